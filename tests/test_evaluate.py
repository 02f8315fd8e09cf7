"""Check the evaluation and the export of everything that learns, on the smallest run."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from baar_jax.config import ABLATIONS, SEEDS, BaselinesConfig
from baar_jax.episode import SMALL, SPLITS
from baar_jax.open import Loader, load_router
from baar_jax.rivals.families import FAMILIES, list_specs, zero_shot_spec
from baar_jax.rollout.jobs import BOUNDARY_KEYS, Planned, rollout_spec
from baar_jax.rollout.specs import FIRST_SEED, Job
from baar_jax.router.view import View
from baar_jax.router.weights import load_pretrained
from baar_jax.run import Run
from baar_jax.stages import collect, evaluate, train
from baar_jax.stages.evaluate import choose_on_dev
from baar_jax.store import KEY


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  config = tiny.config(tmp_path_factory.mktemp("runs"), test_tasks=4)
  config.evaluate.tasks = 3
  config.sft.updates = config.bopo.updates = 1
  config.value.updates, config.value.heads = 2, 2
  config.baselines = BaselinesConfig(
    tuple(sorted(name for name in FAMILIES if FAMILIES[name].is_rival)),
    tuple(ABLATIONS),
    compared_lam=0.1,
    updates=1,
  )
  config.evaluate.shares, config.evaluate.budget_rules = (0.5,), True
  run = Run(config)
  for stage in (train.baselines, evaluate.main):
    with pytest.raises(ValueError, match="--stage=(profile|references|sft|value)"):
      stage(run)
  # What is missing is reported before anything is run.
  assert len(run.store.table()) == 0
  # By stage: (task_id, seed) of the episodes that it has added.
  run.added = {}
  before = set()
  for stage in (
    collect.profile,
    collect.references,
    train.bosft,
    train.bopo,
    train.baselines,
    train.value,
    evaluate.main,
  ):
    stage(run)
    after = set(run.store.table()[[*KEY]].itertuples(index=False))
    run.added[stage] = {(task_id, seed) for _, task_id, seed in after - before}
    before = after
  yield run
  run.close()


def test_no_purpose_shares_a_seed_with_another_one(run):
  stages = collect.profile, collect.references, train.bopo, evaluate.main
  purposes = [run.added[stage] for stage in stages]
  assert all(purposes) and sum(map(len, purposes)) == len(set().union(*purposes))
  added = run.added[evaluate.main]
  seeds = {split: {s for t, s in added if t.startswith(split)} for split in SPLITS}
  assert seeds == {"train": set(), "dev": {2000}, "test": {3000}}
  # No purpose can have so many trials (1000) that it reaches the next one's first seed.
  names = ("profile", "reference", "dev", "test", "rollout")
  assert min(np.diff([FIRST_SEED[name] for name in names])) >= SEEDS


def test_every_policy_plays_every_dev_task_within_its_cap(run):
  """A reused episode equals the episode that the policy itself would have played."""

  def outcome(e):
    return (
      e.task_id,
      e.seed,
      e.score,
      e.stop,
      [(s.model, s.action, s.observation) for s in e.steps],
    )

  jobs = [Job(task, "dev", 0) for task in run.tasks("dev")]
  specs = list_specs(run.config)
  chosen = {spec.key for spec in choose_on_dev(run.store, specs, run.config).entries}
  assert {"always-small", "always-large"} < chosen < {spec.key for spec in specs}
  loader = Loader(run.files(), run.source.live_episodes)
  for spec in specs:
    K = spec.cap.calls
    stored = run.store.episodes(spec.key)
    assert any(e.task_id.startswith("test") for e in stored) == (spec.key in chosen)
    # The boundaries' episodes include those of the profile.
    episodes = [e for e in stored if e.seed == 2000]
    assert {(e.task_id, e.seed) for e in episodes} == {
      (job.task.id, job.seed) for job in jobs
    }
    assert {e.call_budget for e in episodes} == {K}
    for e in episodes:
      models = [step.model for step in e.steps]
      assert K is None or e.large_calls == sum(models) <= K
      if spec.key in BOUNDARY_KEYS:
        assert set(models) == {spec.key == "always-large"}
      if spec.family == "first-large":
        assert models == [1] + [0] * (len(models) - 1)
    if spec.family in ("first-large", "random") and K is not None:
      rule = loader.build(spec)
      rule.spec = dataclasses.replace(spec, family=f"own {spec.family}")
      played = run.source.episodes(
        "own", Planned(rule.spec, jobs), lambda spec, rule=rule: rule
      )
      assert list(map(outcome, played)) == list(map(outcome, episodes))


def test_rivals_learn_from_as_many_episodes_as_bopo(run):
  families = "bopo", "vanilla", *ABLATIONS
  first, *others = (run.store.keys(rollout_spec(name, 0.1, 1).key) for name in families)
  assert len(first) == 4  # of 2 tasks with 2 episodes each
  assert all(keys == first for keys in others)
  episodes = run.store.episodes("cascade(update=1,share=0.5)")
  steps = [step for e in episodes for step in e.steps]
  assert {step.model for step in steps} == {SMALL, 1}
  for step in steps:
    assert (step.usd("proposal") > 0) == (step.model != SMALL)
    assert step.model != SMALL or step.action == step.proposal
  for e in run.store.episodes(zero_shot_spec(run.config).key):
    assert all(step.usd("judge") > 0 and not step.router_cost_usd for step in e.steps)
    assert e.cost_usd == pytest.approx(sum(step.usd("act") for step in e.steps))


def test_an_exported_router_can_be_loaded_as_weights(run):
  train.export(run)
  directory = run.dir / "export" / "sft"
  config = dataclasses.replace(run.config.router, weights=str(directory))
  trained = load_router(run.files(), "sft")
  loaded = load_pretrained(View(config, directory))
  # The rows of the decisions' tokens are compared too.
  jax.tree.map(
    np.testing.assert_array_equal, nnx.split(trained)[1], nnx.split(loaded)[1]
  )
