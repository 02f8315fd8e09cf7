"""An environment in one file: examples/corridor.py, through the whole pipeline and by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from baar_jax.envs.base import spread
from baar_jax.envs.process import open_envs

ROOT = Path(__file__).parents[1]
CORRIDOR = ROOT / "examples" / "corridor.py"
SIZES = {"train_tasks": 2, "test_tasks": 2, "max_steps": 12}


def test_the_example_runs_the_whole_pipeline(tmp_path):
  command = [sys.executable, "main.py", "--config=examples/corridor.py", *tiny.flags(tmp_path)]
  environ = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
  flags = ["--config.env.max_steps=12", "--config.env.live_per_process=2"]
  done = subprocess.run([*command, *flags], cwd=ROOT, env=environ, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1].startswith("report: ")
  results = json.loads((tmp_path / "tiny" / "report" / "results.json").read_text())
  assert results["run"]["environment"] == "Corridor"
  assert results["run"]["environment_mb"] > 5
  rate = {p["policy"]: p["success_percent"] for p in results["policies"]}
  assert rate["always-large"] > 0


@pytest.fixture
def opened():
  """The only environment of a file's Corridor."""
  envs = []

  def opening(path):
    envs.extend(open_envs(f"{path}:Corridor", SIZES, 1, 1))
    return envs[0]

  yield opening
  for env in envs:
    env.close()


def test_the_example_plays(opened):
  env = opened(CORRIDOR)
  task = env.tasks("train")[1]
  assert (task.id, task.max_steps) == ("train-1", 12)
  assert env.reset(task.id).endswith(" door.")
  assert env.step(env.mistake("wrong", "k"))[1] is False
  for _ in range(6):
    assert env.score() == 0
    _, done = env.step(env.oracle().action)
  assert (done, env.score()) == (True, 1.0)


def test_an_environment_without_an_expert_says_so(opened, tmp_path):
  path = tmp_path / "plain.py"
  path.write_text(CORRIDOR.read_text().replace("def oracle(", "def other("))
  env = opened(path)
  env.reset("test-0")
  with pytest.raises(NotImplementedError, match="no expert, which scripted models need"):
    env.oracle()


@pytest.mark.parametrize(
  "kind, message",
  [
    ("nowhere.py:Corridor", "there is no file nowhere.py"),
    (f"{CORRIDOR}:Hall", "corridor.py has no class Hall"),
  ],
)
def test_a_missing_file_or_class_is_named(kind, message):
  with pytest.raises(ValueError, match=message):
    open_envs(kind, {}, 1, 1)


def test_spread_is_a_permutation_that_starts_evenly():
  for count in (0, 1, 2, 7, 64, 100):
    assert sorted(spread(count)) == list(range(count))
  assert spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
