"""A run's directory: what may change, what may not, and what is still to be run."""

import contextlib
import fcntl
import json

import jax
import pytest
import tiny

from baar_jax.envs.base import EnvDied
from baar_jax.envs.sandbox.adapter import Sandbox
from baar_jax.rollout.specs import Job, PolicySpec
from baar_jax.rollout.turn import RulePolicy
from baar_jax.run import Run
from baar_jax.stages import plan
from baar_jax.store import Store, read_config


@pytest.fixture
def config(tmp_path):
  return tiny.config(tmp_path)


@pytest.fixture
def opened():
  """Run, closed at the end."""
  with contextlib.ExitStack() as stack:
    yield lambda config: stack.enter_context(contextlib.closing(Run(config)))


def test_no_program_is_kept_where_a_stranger_may_have_been(
  opened, config, tmp_path, monkeypatch
):
  """A run's directory may come from anyone; compiled programs are read from the user's cache."""
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  before = jax.config.jax_compilation_cache_dir
  opened(config)
  after = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", before)
  assert after == str(tmp_path / "cache" / "compiled")


class Counting(RulePolicy):
  """Always SMALL; keeps the keys that it decided for."""

  def __init__(self, name="counted"):
    super().__init__(PolicySpec(name), self.decide)
    self.asked = []

  def decide(self, live, spec):
    self.asked += [(live.task.id, live.job.seed)] * (not live.steps)
    return 0


def refused(config) -> str:
  """What a run says that is not opened, in one line."""
  with pytest.raises(ValueError) as error:
    Run(config)
  text = str(error.value)
  assert "\n" not in text
  return text


def used_directory(config):
  """The directory of a closed run with tasks."""
  with contextlib.closing(Run(config)) as run:
    run.tasks("train")
    return run.dir


def test_a_config_that_contradicts_the_directory_is_refused_by_name(config):
  path = used_directory(config) / "config.json"
  written = path.read_text()
  config.bopo.clip_low = 0.2
  said = "was made with bopo.clip_low=None, this config has 0.2: set it back, or choose another"
  assert said in refused(config) and path.read_text() == written


def test_a_run_from_before_the_options_goes_on(opened, config):
  """Its env had five fields of its own; those that say something become options."""
  path = used_directory(config) / "config.json"
  written = json.loads(path.read_text())
  assert written["env"].pop("options") == {}
  old = {"data": "", "short_tasks": True, "train_split": "", "dev_split": ""}
  path.write_text(json.dumps(written | {"env": written["env"] | old}))
  assert read_config(path.parent) == config
  opened(config).close()
  assert json.loads(path.read_text())["env"]["options"] == {}
  old |= {"short_tasks": False, "test_split": "dev"}
  path.write_text(json.dumps(written | {"env": written["env"] | old}))
  assert read_config(path.parent).env.options == {
    "short_tasks": False,
    "test_split": "dev",
  }
  said = (
    "was made with env.options.short_tasks=False, this config has None: set it back"
  )
  assert said in refused(config)


LOST = "restore a copy, or choose another --config.name"
TEXTS = [
  "[]",
  "null",
  "{",
  "\x00",
  "[" * 100_000,
  '{"distributed": {"processes": null}}',
]
TEXTS += [
  '{"bopo": {"field_of_another_version": 1}}',
  '{"env": {"options": 3}}',
  '{"env": 3}',
]


@pytest.mark.parametrize(
  "lost", [["episodes.sqlite"], ["episodes.sqlite", "config.json"]]
)
def test_a_lost_store_is_no_fresh_start(lost, config):
  """With it what was spent would be forgotten, and --config.max_usd would begin again."""
  directory = used_directory(config)
  (directory / "checkpoints" / "sft").mkdir(parents=True)
  for name in lost:
    (directory / name).unlink()
  if len(lost) == 1:
    with pytest.raises(ValueError, match="sqlite is gone or empty"):
      plan.main(config, ["profile"])
    (directory / lost[0]).touch()
    assert "sqlite is gone or empty" in refused(config)
    Store(directory / lost[0]).close()
  assert "has checkpoints and no tasks" in (said := refused(config)) and LOST in said


def test_a_config_that_is_none_or_of_more_processes_is_one_line(config):
  path = used_directory(config) / "config.json"
  for text in TEXTS:
    path.write_text(text)
    assert refused(config) == f"{path} is no configuration of this version: {LOST}"
  path.write_text('{"distributed": {"processes": 2, "coordinator": "host:1"}}')
  assert "episodes-1.sqlite is gone or empty, and with it what was spent" in refused(
    config
  )


def test_a_directory_that_another_process_uses_is_refused(config, monkeypatch):
  def lockf(file, operation):
    assert file.name == f"{config.runs}/tiny/lock"
    raise BlockingIOError

  monkeypatch.setattr(fcntl, "lockf", lockf)
  problem = (
    f"another process is using {config.runs}/tiny: wait for it or choose another"
  )
  assert refused(config) == f"{problem} --config.name"


def collect(run, policy, jobs):
  return run.collect("some", policy.spec, jobs, lambda spec: policy)


def test_an_error_is_left_out_and_only_what_is_missing_is_run_again(
  opened, config, capsys
):
  run = opened(config)
  first, second, third = run.tasks("train")[:3]

  class Dying(Sandbox):
    def reset(self, task_id):
      if task_id == first.id:
        raise EnvDied("the process was killed")
      return super().reset(task_id)

  run._envs = [Dying(**tiny.SIZES)]
  jobs = [Job(task, "profile", 0) for task in (first, second, third)]
  assert [e.task_id for e in collect(run, Counting(), jobs)] == [second.id, third.id]
  said = capsys.readouterr().out.splitlines()
  assert said == [
    f"left out: {first.id} seed 0 of counted: error:the process was killed"
  ]
  run.config.models.max_failures = 3
  with pytest.raises(ValueError, match="3 times in a row.*the process was killed"):
    collect(run, Counting("again"), jobs)
  run._envs, policy = [Sandbox(**tiny.SIZES)], Counting()
  assert [e.task_id for e in collect(run, policy, jobs[:2])] == [first.id, second.id]
  assert policy.asked == [(first.id, 0)]
