"""Test that many devices and processes train the same text router as one device."""

import json
import shutil
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path

import jax
import numpy as np
import program
import qwen2_checkpoint as hf
from flax import nnx
from program import finish, interrupt, rows, updates

from baar_jax.config import Config, RouterConfig
from baar_jax.families.family import load_router, open_encoder
from baar_jax.mesh import one_device
from baar_jax.router.view import View, read_tokenizer
from baar_jax.router.weights import load_pretrained
from baar_jax.run import RouterFiles

STORES = "episodes.sqlite", "episodes-1.sqlite"
start = partial(program.start, config="tests/steady_adam.py")
UPDATES = 7  # of BoPO: a checkpoint is written after 5
FLAGS = [
  f"--config.bopo.updates={UPDATES}",
  "--config.baselines.rivals=()",
  "--config.evaluate.shares=(0.5,)",
]


def start_two(runs: Path, *flags: str) -> list[subprocess.Popen]:
  """Start the two processes of one run on loopback."""
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
  d, shared = "--config.distributed", [*FLAGS, *flags]
  shared += [f"{d}.coordinator=127.0.0.1:{port}", f"{d}.processes=2"]
  return [start(runs, *shared, f"{d}.process={n}") for n in (0, 1)]


def parameters(runs: Path) -> list:
  """Read the parameters of the SFT router and of BoPO's, onto one device."""
  config = Config(**json.loads((runs / "tiny" / "config.json").read_text()))
  files = RouterFiles(runs / "tiny", config, one_device())
  load = partial(load_router, files, open_encoder(files))
  return [
    nnx.to_pure_dict(nnx.state(model)) for model in (load("sft"), load("bopo", 0.1))
  ]


def test_two_processes_train_checkpoint_and_resume_as_one(tmp_path, monkeypatch):
  """Both processes are killed during BoPO, and resume from a checkpoint.

  Each process plays its tasks into its store. Each has two devices: there are two copies
  of the parameters, each split in two, and batches are spread over them.
  """
  monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
  two, one = tmp_path / "two", tmp_path / "one"
  shape = hf.SHAPES["grouped"]
  weights = hf.write(tmp_path / "weights", shape, shards=3, tokens=300)
  flag, fsdp = f"--config.router.weights={weights}", "--config.distributed.fsdp=2"
  processes = start_two(two, flag, fsdp)
  saved = (
    two / "tiny" / "checkpoints" / "bopo-lam0.1" / "5"
  )  # written in the background
  reached = lambda: ("bopo", 6) in updates(two) and saved.is_dir()  # noqa: E731
  interrupt(processes[0], reached, signal.SIGKILL)
  processes[1].kill()
  processes[1].communicate()
  kept = [rows(two, file) for file in STORES]
  assert all(kept)

  out, silent = map(finish, start_two(two, flag, fsdp))
  assert out.splitlines()[-1].startswith("report: ") and "report" not in silent
  # Updates before the checkpoint are not repeated.
  assert updates(two).count(("bopo", 5)) == 1
  assert updates(two)[-1] == ("bopo", UPDATES)
  stores = [rows(two, file) for file in STORES]
  # In the end each store has all episodes.
  assert stores[0] == stores[1]
  for before, after in zip(kept, stores):
    assert before.items() <= after.items()

  # One process with one device gets only the episodes.
  monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
  (one / "tiny").mkdir(parents=True)
  shutil.copy(two / "tiny" / STORES[0], one / "tiny")
  finish(start(one, *FLAGS, flag))
  # No episode was missing.
  assert rows(one, STORES[0]) == stores[0]
  close = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
  jax.tree.map(close, parameters(two), parameters(one))
  # An exported router can be loaded as weights.
  finish(start(one, *FLAGS, flag, "--stage=export"))
  directory = one / "tiny" / "export" / "sft"
  view = View(RouterConfig(weights=str(directory)), read_tokenizer(directory))
  exported = nnx.to_pure_dict(nnx.state(load_pretrained(view)))
  jax.tree.map(np.testing.assert_array_equal, exported, parameters(one)[0])
