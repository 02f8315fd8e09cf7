"""The table of families: which policies are evaluated, under which keys and caps."""

import pytest
import tiny

from baar_jax.config import BaselinesConfig
from baar_jax.families.rules import RandomSpec
from baar_jax.families.table import (
  FAMILIES,
  list_specs,
  list_trained,
)
from baar_jax.rollout.specs import Cap


@pytest.fixture
def config():
  config = tiny.config("runs")
  config.models.prompt_cache = False
  config.bopo.lam = (0.3, 0.1)
  config.value.updates = 9
  config.value.cost_weights = (0.1,)
  config.value.capped_cost_weights = (0.5,)
  config.evaluate.thresholds = (0.25, 0.5)
  config.evaluate.call_budgets = (2, 2)
  rivals = tuple(name for name in FAMILIES if FAMILIES[name].is_rival)
  config.baselines = BaselinesConfig(rivals, ("no-reference",))
  return config


def judged(config):
  """Return the zero-shot policy without a cap."""
  return next(iter(FAMILIES["zero-shot"].points(config)))


def test_keys_carry_every_parameter_and_nothing_else(config):
  zero_shot = judged(config).key
  expected = ["always-small", "always-large", "first-large(K=2)"]
  expected += ["random(p=0.5)", "random(p=0.5,K=2)"]
  expected += ["escalate", "escalate(K=2)", zero_shot, f"{zero_shot}(K=2)"]
  free = "conditioned(update=9,cost_weight="
  expected += [f"{free}0.1)", f"{free}0.5,K=2)", f"{free}0.5,blind=1,K=2)"]
  for router in (
    "sft(update=2",
    "bopo(lam=0.3,update=2",
    "bopo(lam=0.1,update=2",
    "cascade(update=2",
    "single-turn(update=2",
    "vanilla(lam=0.3,update=2",
    "vanilla(lam=0.1,update=2",
    "no-reference(lam=0.3,update=2",
    "no-reference(lam=0.1,update=2",
  ):
    points = [f"{router},threshold=0.5", f"{router},threshold=0.25"]
    expected += [f"{point})" for point in points]
    if not router.startswith("no-"):
      expected += [f"{point},K=2)" for point in points]
  by_key = {spec.key: spec for spec in list_specs(config)}
  assert list(by_key) == expected
  assert by_key["random(p=0.5,K=2)"] == RandomSpec("random", 0.5, cap=Cap(2))
  settings = by_key["bopo(lam=0.3,update=2,threshold=0.25)"].parameters
  assert settings == {"lam": 0.3, "update": 2, "threshold": 0.25}


def test_every_rival_is_trained_with_each_training_seed(config):
  config.train_seeds = 3
  for family in list_trained(config):
    assert {spec.seeds for spec in family.points(config)} == {3}


def test_every_policy_is_played_under_caps_on_dollars(config):
  config.evaluate.call_budgets = ()
  config.evaluate.usd_budgets = (0.5, 0.01)
  capped = [spec for spec in list_specs(config) if spec.cap.usd]
  assert all(spec.cap.calls is None for spec in capped)
  keys = {spec.key for spec in capped}
  assert {"always-small(usd=0.5)", "first-large(usd=0.01)"} <= keys


def test_each_setting_of_the_judge_changes_its_key(config):
  keys = {judged(config).key}
  changes = dict(
    temperature=0.5,
    max_completion_tokens=9,
    base_urls=("http://h",),
    reasoning_effort="low",
  )
  for name, value in changes.items():
    setattr(config.baselines.judge, name, value)
    keys.add(judged(config).key)
  assert len(keys) == 5 and all(key.startswith("zero-shot gpt-5 ") for key in keys)
