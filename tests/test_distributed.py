"""Many devices and many processes train the router that one device does."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import hf
import jax
import numpy as np
import pytest
from flax import nnx
from test_pipeline import QUICK, ROOT, finish, interrupt, rows, start

from baar_jax.config import Config
from baar_jax.mesh import one_device
from baar_jax.train.checkpoint import load_router

FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4 " + QUICK["XLA_FLAGS"]}
STORES = "episodes.sqlite", "episodes-1.sqlite"
UPDATES = 7  # of BoPO: a checkpoint is written after 5
FLAGS = [f"--config.bopo.updates={UPDATES}", "--config.pretrain.epochs=0"]
FLAGS += ["--config.baselines.rivals=()", "--config.evaluate.shares=(0.5,)"]
# With the usual eps Adam makes a whole step of a gradient that is rounding alone.
FLAGS += ["--config.sft.adam_eps=0.01", "--config.bopo.adam_eps=0.01"]

# Two updates of SFT, then one of BoPO, on one device and on a mesh of 2 x 2.
MESHES = """
import json, sys
from functools import partial
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
import tiny
from baar_jax.episode import Task
from baar_jax.router.weights import build_model
from baar_jax.mesh import make_mesh, one_device
from baar_jax.train.fit import update_policy
from baar_jax.train.losses import bopo_loss, sft_batch_loss
from baar_jax.train.trainer import Batcher, ShardedRouter, Trainer, bopo_optimizer, sft_optimizer
from baar_jax.router.view import View, train_tokenizer

config = tiny.config("none")
config.sft.micro_episodes = 4
letters = "SLS", "L", "LLSS", "SS", "LS", "SLLLS"
episodes = [tiny.episode(models=models, logps=[-0.5] * len(models)) for models in letters]
directory = Path(sys.argv[1])
train_tokenizer(["find the plant", "open door 1 see lamp 2"], 300, directory)
view = View(config.router, directory)
batcher = Batcher(config, view, [Task("t", "train", "find the plant", 10)])
model = build_model(config.router, 0)
out = []
for mesh in (one_device(), make_mesh(2)):
  ids = view.decision_ids
  trainer = Trainer(model, sft_batch_loss, sft_optimizer(config.sft, 1e-2), ids, mesh)
  batches = batcher.micro_batches(episodes)
  metrics = [trainer.step(batches) for _ in range(2)]
  kernel = trainer.params["layers"]["q_kernel"][...]
  alike = [kernel, *(x for x in jax.tree.leaves(trainer.optimizer_state) if x.size == kernel.size)]
  shares = [shard.data.size / x.size for x in alike for shard in x.addressable_shards]
  loss = partial(bopo_loss, config.bopo)
  better = Trainer(trainer.model, loss, bopo_optimizer(config.bopo), ids, mesh)
  adv_B = np.array([1.0, -2.0, 0.5, 3.0, -1.0, 0.2])
  anchor = ShardedRouter(model, ids, mesh)
  metrics.append(update_policy(better, anchor, batcher, episodes, adv_B, config.bopo, seed=0))
  params = [np.asarray(x).ravel().tolist() for x in jax.tree.leaves(better.params)]
  out.append({"metrics": metrics, "params": params, "shares": shares})
print(json.dumps(out))
"""


def test_four_devices_make_the_updates_of_one(tmp_path):
  command = [sys.executable, "-c", MESHES, str(tmp_path)]
  env = os.environ | FOUR | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
  result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  one, four = json.loads(result.stdout.splitlines()[-1])
  # SFT's two updates and BoPO's change the loss, by far more than what is allowed to differ.
  losses = [metrics["loss"] for metrics in one["metrics"]]
  assert abs(losses[0] - losses[1]) > 1e-3
  assert {*four["shares"]} == {1 / 2}  # of a kernel and its moments, by each device
  for mine, its in zip(one["metrics"], four["metrics"]):
    assert its == pytest.approx(mine, abs=1e-5)
  for mine, its in zip(one["params"], four["params"]):
    np.testing.assert_allclose(its, mine, rtol=0, atol=1e-5)


def start_two(runs: Path, *flags: str, second=()) -> list[subprocess.Popen]:
  """The processes of one run, joined on loopback, perhaps with flags that only the second has."""
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
  d, shared = "--config.distributed", [*FLAGS, *flags]
  shared += [f"{d}.coordinator=127.0.0.1:{port}", f"{d}.processes=2"]
  return [start(runs, *shared, f"{d}.process={n}", *(second if n else ())) for n in (0, 1)]


def test_processes_with_other_flags_end_in_words(tmp_path):
  for process in start_two(tmp_path, second=["--config.evaluate.seeds=2"]):
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2, err
    assert "different --config.evaluate.seeds" in err and "Traceback" not in err


def updates(runs: Path) -> list[tuple[str, int]]:
  """(stage, update) of SFT's and BoPO's lines of metrics.jsonl."""
  path = runs / "tiny" / "metrics.jsonl"
  lines = path.read_text().splitlines() if path.exists() else []
  lines = [line for line in map(json.loads, lines) if line["stage"] in ("sft", "bopo")]
  return [(line["stage"], line["update"]) for line in lines]


def parameters(runs: Path) -> list[np.ndarray]:
  """Of the SFT router and BoPO's, read onto one device, whoever wrote them."""
  config = Config(**json.loads((runs / "tiny" / "config.json").read_text()))
  leaves = []
  for family, lam in (("sft", None), ("bopo", 0.1)):
    model = load_router(runs / "tiny", config, one_device(), family, lam)
    leaves += [np.asarray(x) for x in jax.tree.leaves(nnx.split(model)[1])]
  return leaves


def test_two_processes_train_checkpoint_and_resume_as_one(tmp_path):
  """From a checkpoint; each runs its own tasks into its own store, and both are killed in BoPO."""
  two, one = tmp_path / "two", tmp_path / "one"
  shape = hf.SHAPES["grouped"]
  weights = hf.write(tmp_path / "weights", shape, shards=3, tokens=300)
  flag = f"--config.router.weights={weights}"
  processes = start_two(two, flag)
  saved = two / "tiny" / "checkpoints" / "bopo-lam0.1" / "5"  # written in the background
  reached = lambda: ("bopo", 6) in updates(two) and saved.is_dir()  # noqa: E731
  interrupt(processes[0], reached, signal.SIGKILL)
  processes[1].kill()
  processes[1].communicate()
  kept = [rows(two, file) for file in STORES]
  assert all(kept)

  out, silent = map(finish, start_two(two, flag))
  assert out.splitlines()[-1].startswith("report: ") and "report" not in silent
  assert updates(two).count(("bopo", 5)) == 1  # what was saved is not done again
  assert updates(two)[-1] == ("bopo", UPDATES)
  stores = [rows(two, file) for file in STORES]
  assert stores[0] == stores[1]  # in the end each has all
  for before, after in zip(kept, stores):
    assert before.items() <= after.items()

  # One process with the same episodes, and nothing else of theirs.
  (one / "tiny" / "tokenizer").mkdir(parents=True)
  for file in ("tokenizer/tokenizer.json", STORES[0]):
    shutil.copy(two / "tiny" / file, one / "tiny" / file)
  finish(start(one, *FLAGS, flag))
  assert rows(one, STORES[0]) == stores[0]  # it had nothing to run
  for mine, theirs in zip(parameters(one), parameters(two)):
    np.testing.assert_allclose(theirs, mine, rtol=0, atol=1e-5)
