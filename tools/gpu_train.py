"""Train the paper's router on recorded tickets, on a GPU and within a time limit.

    pip install gguf==0.19.0
    python -m tools.gpu_train --parts=PARTS --pack=DIRECTORY
    python -m tools.gpu_train --parts=PARTS --limit_s=480

The first command rounds the layers of a Hugging Face directory to 4.5 bits a number,
and cuts them into parts of `PART_MB` megabytes, which can be copied one by one. The
second one joins the parts, compares ten top-1 tokens with those of the first machine,
and plays the stages of main.py with the settings of `get_config`, which flags change.
After each stage, gpu_train.json in the run's directory has what it has measured. A
second call goes on; of a stage that was stopped, it measures the rest.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import flags
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.numpy import load_file, save_file

import main as program
from baar_jax.config import (
  BoPOConfig,
  Config,
  RouterConfig,
  SFTConfig,
  fail,
  read_flags,
)
from baar_jax.envs.code.adapter import read_functions
from baar_jax.router.view import read_tokenizer
from baar_jax.router.weights import load_qwen2, read_config
from baar_jax.store import Store
from configs import code
from tools.gpu_check import STEPS, make_batcher, make_episodes, peak_gb, train

PACK = flags.DEFINE_string("pack", "", "A Hugging Face directory to pack.")
PARTS = flags.DEFINE_string("parts", "parts", "The directory of the parts.")
LIMIT_S = flags.DEFINE_float("limit_s", 480.0, "Seconds until the program ends.", 1.0)

PART_MB = 48
CHECKED = 10  # The last tokens of a text whose successors are compared.


def pack(directory: Path, parts: Path) -> None:
  """Write the parts of a Hugging Face directory, and its top-1 tokens.

  Tensors with one axis are kept as they are.
  """
  parts.mkdir(parents=True)
  shutil.copytree(
    directory, parts / "files", ignore=shutil.ignore_patterns("*.safetensors")
  )
  part = {}
  number = size = 0
  for file in sorted(directory.glob("model*.safetensors")):
    for name, array in load_file(file).items():
      if array.ndim == 2:
        kind = "Q4_0" if ".layers." in name else "Q8_0"
        array = quantize(array.astype(np.float32), GGMLQuantizationType[kind])
        name = f"{kind}:{name}"
      if size + array.nbytes > PART_MB * 1_000_000:
        save_file(part, parts / f"{number:02}.safetensors")
        part = {}
        number += 1
        size = 0
      part[name] = array
      size += array.nbytes
  save_file(part, parts / f"{number:02}.safetensors")
  join(parts)
  (parts / "top1.json").write_text(json.dumps(find_top1(parts / "files")))


def join(parts: Path) -> None:
  """Write all parts as model.safetensors into the directory of the other files."""
  arrays = {}
  for file in sorted(parts.glob("*.safetensors")):
    for name, array in load_file(file).items():
      kind, colon, rest = name.rpartition(":")
      arrays[rest] = dequantize(array, GGMLQuantizationType[kind]) if colon else array
  save_file(arrays, parts / "files" / "model.safetensors", {"format": "pt"})


def find_top1(directory: Path) -> list[int]:
  """Find the most probable successors of the last tokens of a function's text."""
  model = load_qwen2(directory)
  text = read_functions("")[0].prompt()
  tokens = jnp.array([read_tokenizer(directory).encode(text).ids])
  hidden_1xTxD = model(tokens)[:, -CHECKED:]
  return model.logits(hidden_1xTxD).argmax(axis=-1)[0].tolist()


def get_config() -> Config:
  """Return the configuration of the default run, with a text router for a GPU."""
  config = code.get_config()
  config.name = "gpu_train"
  config.router = RouterConfig(dtype="bfloat16", max_tokens=2048)
  config.sft = SFTConfig(micro_episodes=8)
  config.bopo = BoPOConfig(lam=config.bopo.lam, updates=30)
  config.value.updates = 0
  return config


def measure(config: Config) -> int:
  """Play all stages, and write what they took, and the tables on test.

  Returns:
    The exit code of main.py.
  """
  directory = Path(config.runs, config.name)
  path = directory / "gpu_train.json"
  figures = json.loads(path.read_text()) if path.exists() else {}
  for stage in [name for name in program.STAGES if name != "export"]:
    start_s = time.monotonic()
    if exit_code := program.main((config, stage)):
      return exit_code
    figures.setdefault(f"{stage}_s", time.monotonic() - start_s)
    figures["peak_gb"] = peak_gb()
    path.write_text(json.dumps(figures, indent=1))
  results = json.loads((directory / "report" / "results.json").read_text())
  figures |= {"areas": results["frontiers"], "capped": results["hard_budget"]}
  store = Store(directory / "episodes.sqlite")
  figures["decision_s"] = store.mean_latency_s("router_latency_s")
  path.write_text(json.dumps(figures, indent=1))
  shape = read_config(config.router.weights)
  for name, speed in train(shape, make_batcher("transcript"), make_episodes(8, STEPS)):
    figures[f"{name}_tokens_per_s"] = speed
    path.write_text(json.dumps(figures, indent=1))
  return 0


def out_of_time(*_: object) -> None:
  """End the program at once, with its finished episodes and checkpoints on disk."""
  os._exit(fail(f"--limit_s={LIMIT_S.value:g} is over; the same command goes on"))


def main(argv: list[str]) -> int:
  """Pack or train; a mistake ends with one line."""
  try:
    config = read_flags(argv, get_config(), flags.FLAGS, program.load_config)
    parts = Path(PARTS.value)
    if PACK.value:
      pack(Path(PACK.value), parts)
      return 0
    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S.value)
    known = json.loads((parts / "top1.json").read_text())
    join(parts)
    found = find_top1(parts / "files")
    if found != known:
      raise ValueError(f"top-1 tokens are {found}, expected {known}: copy all parts")
  except (ValueError, OSError) as error:
    return fail(error)
  config.router.weights = str(parts / "files")
  return measure(config)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
