"""Train the paper's router on recorded tickets, on a GPU and within a time limit.

    pip install gguf==0.19.0
    python -m tools.gpu_train --parts=PARTS --pack=DIRECTORY
    python -m tools.gpu_train --parts=PARTS --limit_s=480 --out=gpu_train.json

The first command rounds the layers of a Hugging Face directory to 4.5 bits a number,
and cuts them into parts of `PART_MB` megabytes, which can be copied one by one. The
second one joins the parts, compares ten top-1 tokens with those of the first machine,
and plays `STAGES`: BoSFT, BoPO by 30 updates of 64 rollouts, and the tables on test.
After each of them it writes what it has measured. Other flags are those of main.py.
"""

import json
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.numpy import load_file, save_file

import main as program
from baar_jax.config import BoPOConfig, Config, RouterConfig, SFTConfig
from baar_jax.envs.code.adapter import read_functions
from baar_jax.flags import fail
from baar_jax.router.view import read_tokenizer
from baar_jax.router.weights import load_qwen2
from baar_jax.run import Run
from tools.gpu_check import (
  ROWS,
  STEPS,
  decide,
  make_batcher,
  make_episodes,
  peak_gb,
  train,
)

PACK = flags.DEFINE_string("pack", "", "A Hugging Face directory to pack.")
PARTS = flags.DEFINE_string("parts", "parts", "The directory of the parts.")
LIMIT_S = flags.DEFINE_float("limit_s", 480.0, "Seconds until the last figures.", 1.0)
OUT = flags.DEFINE_string("out", "gpu_train.json", "The file of the figures.")

STAGES = ("setup", "profile", "references", "sft", "bopo", "evaluate", "report")
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


def configure(config: Config, weights: Path) -> Config:
  """Give a configuration the text router, with the settings of the paper."""
  config.router = RouterConfig(weights=str(weights), dtype="bfloat16", max_tokens=2048)
  config.sft = SFTConfig(micro_episodes=8)
  config.bopo = BoPOConfig(lam=config.bopo.lam, updates=30)
  config.value.updates = 0
  return config


def measure(config: Config, figures: dict) -> None:
  """Play all stages, and note in `figures` what they took, and the tables on test."""
  with closing(Run(config)) as run:
    for stage in STAGES:
      start_s = time.monotonic()
      program.STAGES[stage](run)
      figures[f"{stage}_s"] = time.monotonic() - start_s
      figures["peak_gb"] = peak_gb()
      save(figures)
    tables = json.loads((run.dir / "report" / "results.json").read_text())
    figures |= {"areas": tables["frontiers"], "capped": tables["hard_budget"]}
    model = load_qwen2(config.router.weights, jnp.float32)
  batcher = make_batcher("transcript")
  for name, value in decide(model, batcher, ROWS):
    figures[name] = float(value)
  for name, speed in train(model.config, batcher, make_episodes(8, STEPS)):
    figures[f"{name}_tokens_per_s"] = speed


def save(figures: dict) -> None:
  """Write the figures so far."""
  Path(OUT.value).write_text(json.dumps(figures, indent=1))


def out_of_time(*_: object) -> None:
  """End the stages."""
  raise TimeoutError(f"--limit_s={LIMIT_S.value:g} is over; a new call goes on")


def start(command: tuple[Config, str]) -> int:
  """Pack or train; a mistake ends with one line."""
  logging.set_verbosity(logging.WARNING)
  parts = Path(PARTS.value)
  figures = {}
  try:
    if PACK.value:
      pack(Path(PACK.value), parts)
      return 0
    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S.value)
    join(parts)
    found = find_top1(parts / "files")
    known = json.loads((parts / "top1.json").read_text())
    figures["equal_top1"] = sum(map(int.__eq__, found, known))
    if figures["equal_top1"] < CHECKED:
      raise ValueError(f"top-1 tokens are {found}, expected {known}: copy all parts")
    config = configure(command[0], parts / "files")
    program.validate(config)
    measure(config, figures)
  except (ValueError, OSError) as error:
    return fail(error)
  finally:
    if figures:
      save(figures)
  return 0


if __name__ == "__main__":
  app.run(start, flags_parser=program.parse)
