"""Check which changes a run's directory accepts, and what is played again."""

import contextlib
import dataclasses
import json

import jax
import pytest
import tiny

from baar_jax.envs.base import EnvDied
from baar_jax.envs.sandbox.adapter import Sandbox
from baar_jax.rollout.jobs import Planned
from baar_jax.rollout.rules import RulePolicy
from baar_jax.rollout.specs import Job, PolicySpec
from baar_jax.run import Run
from baar_jax.stages import plan
from baar_jax.store import read_config


@pytest.fixture
def config(tmp_path):
  return tiny.config(tmp_path)


@pytest.fixture
def opened():
  """Open runs that are closed at the end of the test."""
  with contextlib.ExitStack() as stack:
    yield lambda config: stack.enter_context(contextlib.closing(Run(config)))


def test_compiled_programs_are_not_in_the_runs_directory(
  opened, config, tmp_path, monkeypatch
):
  """A stranger may have made the directory, so the user's cache holds them."""
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  before = jax.config.jax_compilation_cache_dir
  opened(config)
  after = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", before)
  assert after == str(tmp_path / "cache" / "compiled")


class Counting(RulePolicy):
  """A policy that always calls SMALL, and keeps the keys of its episodes."""

  def __init__(self):
    super().__init__(PolicySpec("counted"), self.decide)
    self.asked = []

  def decide(self, live, spec):
    self.asked += [(live.task.id, live.job.seed)] * (not live.steps)
    return 0


def refused(config) -> str:
  """Return the one-line error of a run that cannot be opened."""
  with pytest.raises(ValueError) as error:
    Run(config)
  text = str(error.value)
  assert "\n" not in text
  return text


def used_directory(config):
  """Make the directory of a closed run with tasks."""
  with contextlib.closing(Run(config)) as run:
    run.tasks("train")
    return run.dir


def test_a_run_with_another_option_is_refused(config):
  path = used_directory(config) / "config.json"
  written = json.loads(path.read_text())
  written["env"]["options"] = {"short_tasks": False}
  changed = json.dumps(written)
  path.write_text(changed)
  assert read_config(path.parent).env.options == {"short_tasks": False}
  message = (
    "has env.options.short_tasks=False, this command has None: "
    "set --config.env.options.short_tasks back"
  )
  assert message in refused(config) and path.read_text() == changed


LOST = "restore the run's directory from a copy, or choose another --config.name"
TEXTS = [
  "[]",
  "null",
  "\x00",
  "[" * 100_000,
]
CHANGES = [{"models": {"field_of_another_version": 1}}, {"env": {"options": 3}}]
CHANGES += [{"env": 3}, {"bopo": 3}, {"distributed": {"processes": None}}]


def test_a_run_with_an_empty_store_is_refused(config):
  """A fresh store would forget the spent dollars, so the cap would begin again."""
  store = used_directory(config) / "episodes.sqlite"
  store.write_bytes(b"")
  with pytest.raises(ValueError, match="sqlite is missing or empty"):
    plan.main(config, ["profile"])
  assert "sqlite is missing or empty" in refused(config)


def test_an_unreadable_config_and_a_missing_store_are_one_line(config):
  path = used_directory(config) / "config.json"
  stored = dataclasses.asdict(config)
  for text in [*TEXTS, *(json.dumps(stored | change) for change in CHANGES)]:
    path.write_text(text)
    assert (
      refused(config) == f"{path} is damaged, or was made by an older version: {LOST}"
    )
  distributed = {"processes": 2, "coordinator": "host:1"}
  path.write_text(json.dumps(stored | {"distributed": distributed}))
  assert (
    "episodes-1.sqlite is missing or empty, so the spent dollars are unknown"
    in refused(config)
  )


def collect(run, policy, jobs):
  return run.source.episodes("some", Planned(policy.spec, jobs), lambda spec: policy)


def test_an_episode_that_failed_is_played_again_alone(opened, config, capsys):
  run = opened(config)
  first, second, third = run.tasks("train")[:3]

  class Dying(Sandbox):
    def reset(self, task_id):
      if task_id == first.id:
        raise EnvDied("the process was killed")
      return super().reset(task_id)

  run.source._envs = [Dying(**tiny.SIZES)]
  jobs = [Job(task, "profile", 0) for task in (first, second, third)]
  assert [e.task_id for e in collect(run, Counting(), jobs)] == [second.id, third.id]
  message = capsys.readouterr().out.splitlines()
  assert message == [
    f"left out: {first.id} seed 0, some: the process was killed; run again to play it again"
  ]
  run.source._envs = [Sandbox(**tiny.SIZES)]
  policy = Counting()
  assert [e.task_id for e in collect(run, policy, jobs[:2])] == [first.id, second.id]
  assert policy.asked == [(first.id, 0)]
