"""An environment of the user's own: README's example, run as it stands there."""

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


@pytest.fixture(scope="module")
def corridor(tmp_path_factory) -> Path:
  """README's file."""
  code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
  assert len(code.splitlines()) <= 40
  path = tmp_path_factory.mktemp("own") / "corridor.py"
  path.write_text(code)
  return path


def test_readme_s_example_runs_the_whole_pipeline(corridor, tmp_path):
  command = [sys.executable, "main.py", f"--config={corridor}", *tiny.flags(tmp_path)]
  environ = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
  done = subprocess.run(
    [*command, "--config.env.max_steps=12", "--config.env.live_per_process=2"],
    cwd=ROOT,
    env=environ,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1].startswith("report: ")
  results = json.loads((tmp_path / "tiny" / "report" / "results.json").read_text())
  assert results["run"]["environment"] == "Corridor"
  assert results["run"]["environment_mb"] > 5
  rate = {p["policy"]: p["success_percent"] for p in results["policies"]}
  assert rate["always-large"] > 0


def test_the_example_plays(corridor):
  sizes = {"train_tasks": 2, "test_tasks": 2, "max_steps": 12}
  (env,) = open_envs(f"{corridor}:Corridor", sizes, 1, 1)
  try:
    task = env.tasks("train")[1]
    assert (task.id, task.max_steps) == ("train-1", 12)
    assert env.reset(task.id).endswith(" door.")
    assert env.step(env.mistake("wrong", "k"))[1] is False
    for _ in range(6):
      assert env.score() == 0
      _, done = env.step(env.oracle_action())
    assert (done, env.score()) == (True, 1.0)
  finally:
    env.close()


@pytest.mark.parametrize(
  "kind, said",
  [
    ("nowhere.py:Corridor", "there is no file nowhere.py"),
    ("corridor.py:Hall", "corridor.py has no class Hall"),
  ],
)
def test_what_cannot_be_found_is_named(corridor, monkeypatch, kind, said):
  monkeypatch.chdir(corridor.parent)
  with pytest.raises(ValueError, match=said):
    open_envs(kind, {}, 1, 1)


def test_an_environment_without_an_expert_says_so(corridor):
  path = corridor.with_name("plain.py")
  path.write_text(corridor.read_text().replace("def oracle(", "def other("))
  sizes = {"train_tasks": 1, "test_tasks": 1, "max_steps": 12}
  (env,) = open_envs(f"{path}:Corridor", sizes, 1, 1)
  try:
    env.reset(env.tasks("test")[0].id)
    with pytest.raises(NotImplementedError, match="no expert, which scripted models need"):
      env.oracle_action()
  finally:
    env.close()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 100])
def test_spread_is_a_permutation(count):
  assert sorted(spread(count)) == list(range(count))


def test_spread_starts_evenly():
  assert spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
