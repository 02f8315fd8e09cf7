"""Make tickets of small functions, and a recording of their models, by hand."""

import itertools
import json
from pathlib import Path

from baar_jax.config import Config, EnvConfig, ModelsConfig
from baar_jax.envs.base import make
from baar_jax.envs.code.adapter import (
  FORMAT,
  Code,
  Node,
  Recording,
  hash_text,
  write_recording,
)
from baar_jax.episode import SPLITS
from baar_jax.llms.history import write_reply
from tools.record import list_all

# Dollars per million tokens of SMALL and of LARGE: input, cached input and output.
PRICES = (1.0, 0.5, 4.0), (10.0, 5.0, 40.0)
PATHS = "0 1 00 01 10 11".split()
PROMPT_TOKENS = 2084


def configure(tmp: Path) -> Config:
  """Configure a ticket for each split, of four functions that all add one."""
  rows = []
  for split, number in itertools.product(SPLITS, "abcd"):
    row = {
      "id": split + number,
      "split": split,
      "text": f"Add one ({split}, {number}).",
      "signature": "def f(x):",
      "shown": ["assert f(1) == 2"],
      "hidden": ["assert f(3) > 3"],
    }
    rows.append(json.dumps(row))
  data = tmp / "functions.jsonl"
  data.write_text("\n".join(rows))
  options = {"data": str(data), "trusted": True}
  models = ModelsConfig(
    kind="recorded",
    recording=str(tmp / "recording.gz"),
    names=("small", "large"),
    prices=PRICES,
  )
  env = EnvConfig("code", 1, 1, 1, 8, options=options)
  return Config(name="tiny", runs=str(tmp), env=env, models=models)


def record(config: Config, solved: set[tuple], trials: int = 1, **header) -> None:
  """Write a recording of all tries at all functions.

  The action of a node is its key. Each prompt has PROMPT_TOKENS, each reply 10 tokens.

  Args:
    config: the configuration; see `configure`.
    solved: the keys of the nodes that solve their function.
    trials: the number of trials.
    header: replaced values of the header.
  """
  functions = list_all(make("code", config.env.options))
  nodes = {}
  for function, trial, path in itertools.product(functions, range(trials), PATHS):
    failure = ""
    if before := path[:-1]:
      failure = nodes[function.id, trial, before].observation
      if not failure:
        continue
    key = function.id, trial, path
    action = " ".join(map(str, key))
    results = ("" if key in solved else "It gave 0.",) * 2
    nodes[key] = Node(
      *key,
      hash_text(Code.system_prompt, function.prompt(failure)),
      write_reply("", action, code=True),
      hash_text(action),
      PROMPT_TOKENS,
      10,
      results,
      function.describe_failure(results),
      0.5,
    )
  usual = {
    "format": FORMAT,
    "models": config.models.names,
    "prompts": hash_text(*(function.prompt() for function in functions)),
    "max_completion_tokens": 50,
    "trials": trials,
  }
  write_recording(
    Path(config.models.recording), Recording(usual | header, nodes, {})
  )
