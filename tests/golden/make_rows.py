"""Compute rows.npz: Qwen2's answers in words, and the logits of the words' tokens.

  cd tests && PYTHONPATH=.. python -m golden.make_rows SMALLER LARGER

The directories have the weights of two models. This needs torch and transformers. The
stored file was computed with torch 2.14.1 and transformers 5.24.0 on a CPU, in float32,
from 4-bit GGUF files of Qwen2.5-Coder 0.5B and 1.5B Instruct (docs/reproduce.md), with
weights rounded to bfloat16.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import tokenizers

from baar_jax.config import RouterConfig
from baar_jax.episode import Episode, Step, Task
from baar_jax.router import view as view_file
from baar_jax.router.view import View, decision_tokens, read_tokenizer

FILE = Path(__file__).with_name("rows.npz")
# The tokens whose logits are stored, and those of each word by their places. After a
# space each word is one token, so a transcript leaves no choice.
TOKENS = ("SM", "ALL", "BIG", " SMALL", " BIG")
SPLITS = {"SMALL": (0, 1), "BIG": (2,), " SMALL": (3,), " BIG": (4,)}
TASKS = (
  "Boil water.",
  "Say hello.",
  "Prove a theorem.",
  "Find out which seed is older.",
)
# The models of the steps so far, and the cap on calls of BIG.
HISTORIES = (("", None), ("S", None), ("SL", None), ("", 2), ("L", 1), ("S", 4))


def make_view(tokenizer: tokenizers.Tokenizer) -> View:
  """Make the paper's view; no text is cut."""
  return View(RouterConfig("", "float32", "paper", 4096, 400, 400, 400), tokenizer)


def write_prompts(view: View) -> list[list[int]]:
  """Write a prompt for each task and history, with both orders of the two words."""
  orders = view_file.ASK, view_file.ASK.replace("SMALL or BIG", "BIG or SMALL")
  prompts = []
  for t, name in enumerate(TASKS):
    for h, (history, calls) in enumerate(HISTORIES):
      models = ["SL".index(letter) for letter in f"{history}S"]
      steps = [Step("You see a door.", model, "look around") for model in models]
      episode = Episode("t", "test", "profile", 0, steps, 1.0, "done", calls)
      with mock.patch.object(view_file, "ASK", orders[(t + h) % 2]):
        windows = view.encode(Task("t", "test", name, 30), episode)
      prompts.append(windows[-1].tokens)
  return prompts


def main(directories: list[str]) -> None:
  """Compute the answers of both models to all prompts, and write the file."""
  import torch
  from transformers import AutoModelForCausalLM

  arrays = {}
  for number, directory in enumerate(directories):
    tokenizer = read_tokenizer(Path(directory))
    tokenizer.add_special_tokens(decision_tokens(2))
    view = make_view(tokenizer)
    kept = [view.tokenize(token)[0] for token in TOKENS]
    small, big = map(view.encode, view.words)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = write_prompts(view)
    logits = []
    words = []
    for tokens in prompts:
      ids = torch.tensor([[*tokens, *small[:-1]]])
      with torch.no_grad():
        logits_SxV = model(ids, logits_to_keep=len(small)).logits[0]
      logits.append(logits_SxV[0, kept])
      logp_SxV = logits_SxV.log_softmax(dim=-1)
      words.append(logp_SxV[0, big[0]] - logp_SxV[range(len(small)), small].sum())
    arrays["prompts"] = tokenizer.decode_batch(prompts, skip_special_tokens=False)
    arrays[f"{number}/logits_PxC"] = np.array(logits)
    arrays[f"{number}/words_P"] = np.array(words)
  np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
  main(sys.argv[1:])
