"""Check the evaluation of everything that learns, on the smallest run."""

from functools import partial

import pytest
import tiny

from baar_jax.config import BaselinesConfig
from baar_jax.decide import open_router
from baar_jax.episode import SMALL
from baar_jax.families.conditioned import save_default
from baar_jax.families.table import FAMILIES, list_specs, train
from baar_jax.rollout.jobs import BOUNDARY_KEYS
from baar_jax.rollout.specs import RolloutSpec
from baar_jax.run import Run
from baar_jax.stages import collect, evaluate
from baar_jax.stages.evaluate import choose_on_dev
from configs.sciworld import ABLATIONS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  config = tiny.config(tmp_path_factory.mktemp("runs"), test_tasks=3)
  config.sft.updates = config.bopo.updates = 1
  config.seed = 3
  config.value.updates, config.value.heads = 2, 2
  rivals = tuple(name for name in FAMILIES if FAMILIES[name].is_rival)
  config.baselines = BaselinesConfig(rivals, ABLATIONS)
  config.evaluate.shares = (0.3,)
  run = Run(config)
  for stage in (partial(train, stage="baselines"), evaluate.main):
    with pytest.raises(ValueError, match="--stage=(profile|references|sft|value)"):
      stage(run)
  # What is missing is reported before anything is run.
  assert len(run.store.table()) == 0
  collect.profile(run)
  collect.references(run)
  for stage in ("sft", "bopo", "baselines", "value"):
    train(run, stage)
  evaluate.main(run)
  yield run
  run.close()


def test_every_policy_plays_every_dev_task_within_its_cap(run):
  specs = list_specs(run.config)
  chosen = {spec.key for spec in choose_on_dev(run.store, specs, run.config).entries}
  assert {*BOUNDARY_KEYS} < chosen < {spec.key for spec in specs}
  for spec in specs:
    K = spec.cap.calls
    stored = run.store.episodes(spec.key)
    assert any(e.task_id.startswith("test") for e in stored) == (spec.key in chosen)
    # The boundaries' episodes include those of the profile.
    episodes = [e for e in stored if e.purpose == "dev"]
    assert [e.task_id for e in episodes] == [task.id for task in run.tasks("dev")]
    assert {e.call_budget for e in episodes} == {K}
    assert K is None or all(e.large_calls <= K for e in episodes)


def test_the_weight_that_dev_chose_is_the_default_of_the_router(run):
  choice = choose_on_dev(run.store, list_specs(run.config), run.config)
  assert open_router(run.files()).spec == choice.default
  save_default(run.files(), 0.2)
  assert open_router(run.files()).spec.cost_weight == 0.2


def test_rivals_learn_from_as_many_episodes_as_bopo(run):
  families = "bopo", "vanilla", *ABLATIONS
  first, *others = (
    run.store.keys(RolloutSpec(name, 0.1, 0, 1).key) for name in families
  )
  assert len(first) == 4  # of 2 tasks with 2 episodes each
  assert all(keys == first for keys in others)
  episodes = run.store.episodes("cascade(update=1,share=0.3)")
  steps = [step for e in episodes for step in e.steps]
  assert {step.model for step in steps} == {SMALL, 1}
