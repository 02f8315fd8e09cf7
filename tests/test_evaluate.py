"""Everything that learns on the smallest run: rivals and ablations too; evaluated and exported."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from baar_jax.rollout.policies import (
  Job,
  entries,
  rollouts_name,
  rule_policy,
  zero_shot_name,
)
from flax import nnx

from baar_jax import config as settings
from baar_jax.config import ABLATIONS, RIVALS, BaselinesConfig
from baar_jax.episode import SMALL, SPLITS
from baar_jax.router.view import View
from baar_jax.router.weights import load_pretrained
from baar_jax.run import Run
from baar_jax.stages import evaluate, train
from baar_jax.stages.evaluate import choose_on_dev
from baar_jax.store import KEY
from baar_jax.train.checkpoint import load_router


def configured(runs):
  config = tiny.config(runs, test_tasks=4)
  config.evaluate.tasks = 3
  config.sft.updates = config.bopo.updates = 1
  config.baselines = BaselinesConfig(RIVALS, tuple(ABLATIONS), compared_lam=0.1, updates=1)
  config.evaluate.shares, config.evaluate.budget_rules = (0.5,), True
  return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  run = Run(configured(tmp_path_factory.mktemp("runs")))
  for stage in (train.baselines, evaluate.main):
    with pytest.raises(ValueError, match="--stage=(profile|references|sft)"):
      stage(run)
  assert len(run.store.table()) == 0  # what is missing is reported before anything is run
  run.luck = {}  # of each stage: tasks and seeds of the episodes that it has added
  before = train.profile, train.references, train.sft, train.bopo, train.baselines
  for stage in (*before, evaluate.main):
    start(run, stage)
  yield run
  run.close()


def start(run, stage):
  before = set(run.store.table()[[*KEY]].itertuples(index=False))
  stage(run)
  added = set(run.store.table()[[*KEY]].itertuples(index=False)) - before
  run.luck[stage] = {(task_id, seed) for _, task_id, seed in added}


def test_no_episode_shares_its_luck_with_one_of_another_purpose(run):
  stages = train.profile, train.references, train.bopo, evaluate.main
  purposes = [run.luck[stage] for stage in stages]
  assert all(purposes) and sum(map(len, purposes)) == len(set().union(*purposes))
  luck = run.luck[evaluate.main]
  seeds = {split: {s for t, s in luck if t.startswith(split)} for split in SPLITS}
  assert seeds == {"train": set(), "dev": {2000}, "test": {3000}}
  # The bounds of counts (1000) are no further than the next purpose's first seed.
  names = ("PROFILE", "REFERENCE", "DEV", "TEST", "ROLLOUT")
  assert min(np.diff([getattr(settings, f"{name}_SEEDS") for name in names])) >= settings.SEEDS


def test_every_entry_has_every_dev_task_within_its_budget_and_does_what_its_name_says(run):
  """Also where an episode of another entry stands for its own: a run of its own gives the same."""

  def outcome(e):
    return e.task_id, e.seed, e.score, e.stop, [(s.model, s.action, s.observation) for s in e.steps]

  jobs = [Job(task, 2000) for task in run.tasks("dev")]
  chosen = {e.policy for e in choose_on_dev(run.store, entries(run.config), run.config).entries}
  assert {"always-small", "always-large"} < chosen < {e.policy for e in entries(run.config)}
  for entry in entries(run.config):
    stored = run.store.episodes(entry.policy)
    assert any(e.task_id.startswith("test") for e in stored) == (entry.policy in chosen)
    # The profile's trials are under the names of the boundaries too.
    episodes = [e for e in stored if e.seed == 2000]
    assert {(e.task_id, e.seed) for e in episodes} == {(job.task.id, job.seed) for job in jobs}
    assert {e.call_budget for e in episodes} == {entry.call_budget}
    for e in episodes:
      models = [step.model for step in e.steps]
      assert entry.call_budget is None or e.large_calls == sum(models) <= entry.call_budget
      if entry.policy in ("always-small", "always-large"):
        assert set(models) == {entry.policy == "always-large"}
      if entry.family == "first-large":
        assert models == [1] + [0] * (len(models) - 1)
    if entry.family in ("first-large", "random") and entry.call_budget is not None:
      rule = rule_policy(entry.family, "own " + entry.policy, **entry.parameters)
      own = run.collect("own", rule, jobs, entry.call_budget)
      assert list(map(outcome, own)) == list(map(outcome, episodes))


def test_rivals_use_as_many_episodes_as_bopo_and_pay_for_all_their_calls(run):
  families = "bopo", "vanilla", *ABLATIONS
  first, *others = (run.store.keys(rollouts_name(family, 0.1, 1)) for family in families)
  assert len(first) == 4  # of 2 tasks with 2 episodes each
  assert all(keys == first for keys in others)
  episodes = run.store.episodes("cascade(update=1,share=0.5)")
  steps = [step for e in episodes for step in e.steps]
  assert {step.model for step in steps} == {SMALL, 1}
  for step in steps:
    assert (step.usd("proposal") > 0) == (step.model != SMALL)
    assert step.model != SMALL or step.action == step.proposal
  for e in run.store.episodes(zero_shot_name(run.config)):
    assert all(step.usd("judge") > 0 and not step.router_cost_usd for step in e.steps)
    assert e.cost_usd == pytest.approx(sum(step.usd("act") for step in e.steps))


def test_an_exported_router_is_a_checkpoint_to_start_from(run):
  train.export(run)
  directory = run.dir / "export" / "sft"
  config = dataclasses.replace(run.config.router, weights=str(directory))
  trained = load_router(run.training(), "sft")
  loaded = load_pretrained(View(config, directory))
  # The decisions' rows are among them: a trained router keeps what it has learned.
  jax.tree.map(np.testing.assert_array_equal, nnx.split(trained)[1], nnx.split(loaded)[1])
