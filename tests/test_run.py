"""Check which changes a run's directory accepts, and what is played again."""

from contextlib import closing

import jax
import pytest
import tiny

from baar_jax.envs.base import EnvDied
from baar_jax.rollout import jobs
from baar_jax.rollout.policy import RulePolicy
from baar_jax.rollout.specs import Job, PolicySpec
from baar_jax.run import Run
from examples.sandbox import Sandbox


@pytest.fixture
def config(tmp_path):
  return tiny.config(tmp_path)


def test_compiled_programs_are_not_in_the_runs_directory(config, tmp_path, monkeypatch):
  """A stranger may have made the directory, so the user's cache holds them."""
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  before = jax.config.jax_compilation_cache_dir
  Run(config).close()
  after = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", before)
  assert after == str(tmp_path / "cache" / "compiled")


def test_a_run_copies_another_s_profile_and_samples(config, tmp_path):
  copied = [jobs.ALWAYS_SMALL.key, jobs.stratified_spec(config).key]
  with closing(Run(config)) as run:
    tasks = run.tasks("dev")
    for policy in (*copied, "sft"):
      purpose = "dev" if policy == "sft" else "reference"
      run.store.add(tiny.episode("t", policy, purpose=purpose))
  again = tiny.config(tmp_path, "again")
  again.reuse = str(run.dir)
  again.max_usd = again.bopo.kl_beta = 0.5
  for _ in range(2):  # The second command finds the copies.
    with closing(Run(again)) as run:
      table = run.store.table()
      assert run.tasks("dev") == tasks and table.policy.tolist() == copied
      # Each of the episodes cost 6 dollars, which the first run has paid.
      assert table.reused.all() and run.budget.settled_usd == 0


def test_an_episode_that_failed_is_played_again_alone(config, capsys):
  asked = set()

  def decide(live, spec):
    asked.add(live.task.id)
    return 0

  class Dying(Sandbox):
    def reset(self, task_id):
      if task_id == trials[0].task.id:
        raise EnvDied("the process was killed")
      return super().reset(task_id)

  def collect(env):
    run.source.opened = [env(**tiny.SIZES)]
    policy = RulePolicy(PolicySpec("counted"), decide)
    episodes = run.play("some", {policy.spec: trials}, lambda _: policy)
    return [e.key for e in episodes]

  with closing(Run(config)) as run:
    trials = [Job(task, "profile", 0) for task in run.tasks("train")[:3]]
    keys = [job.key for job in trials]
    assert collect(Dying) == keys[1:]
    message = (
      f"left out: {keys[0][0]}, profile 0, counted: the process was killed; run again"
    )
    assert message in capsys.readouterr().out
    asked.clear()
    assert collect(Sandbox) == keys
    assert asked == {keys[0][0]}
