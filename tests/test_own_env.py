"""An environment in one file: examples/corridor.py, through the whole pipeline and by hand."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import tiny

from baar_jax.envs.base import EnvDied, spread
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


def test_the_example_plays():
  with closing(*open_envs(f"{CORRIDOR}:Corridor", SIZES, 1, 1)) as env:
    task = env.tasks("train")[1]
    assert (task.id, task.max_steps) == ("train-1", 12)
    assert env.reset(task.id).endswith(" door.")
    assert env.step(env.mistake("wrong", "k"))[1] is False
    for _ in range(6):
      assert env.score() == 0
      _, done = env.step(env.oracle().action)
    assert (done, env.score()) == (True, 1.0)


def test_an_environment_without_an_expert_says_so(tmp_path):
  path = tmp_path / "plain.py"
  path.write_text(CORRIDOR.read_text().replace("def oracle(", "def other("))
  with closing(*open_envs(f"{path}:Corridor", SIZES, 1, 1)) as env:
    env.reset("test-0")
    with pytest.raises(NotImplementedError, match="no expert, which scripted models need"):
      env.oracle()


@pytest.mark.parametrize(
  "kind, kwargs, error, message",
  [
    ("beach", {}, ValueError, "known: sandbox"),
    ("nowhere.py:Corridor", {}, ValueError, "there is no file nowhere.py"),
    (f"{CORRIDOR}:Hall", {}, ValueError, "corridor.py has no class Hall"),
    ("sandbox", {"no_such_argument": 1}, EnvDied, "no_such_argument"),
  ],
)
def test_a_wrong_kind_or_argument_is_named(kind, kwargs, error, message):
  with pytest.raises(error, match=message):
    open_envs(kind, kwargs, 1, 1)


def test_spread_is_a_permutation_that_starts_evenly():
  for count in (0, 1, 2, 7, 64, 100):
    assert sorted(spread(count)) == list(range(count))
  assert spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
