"""The table of families: which policies are evaluated, under which keys and caps."""

import dataclasses

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from baar_jax.config import BaselinesConfig, SamplePlan
from baar_jax.rivals.families import (
  FAMILIES,
  find_uncapped,
  list_specs,
  list_trained,
  zero_shot_spec,
)
from baar_jax.rollout.specs import Cap, PolicySpec


@pytest.fixture
def config():
  config = tiny.config("runs")
  config.models.prompt_cache = False
  config.bopo.lam = (0.3, 0.1)
  config.value.updates = 9
  config.value.cost_weights = (0.1,)
  config.value.capped_cost_weights = (0.5,)
  config.evaluate.thresholds = (0.25, 0.5)
  config.evaluate.call_budgets = (2,)
  rivals = tuple(name for name in FAMILIES if FAMILIES[name].is_rival)
  config.baselines = BaselinesConfig(rivals, ("no-reference",))
  return config


def test_keys_carry_every_parameter_and_nothing_else(config):
  judged = zero_shot_spec(config).key
  expected = ["always-small", "always-large", "first-large(K=2)"]
  expected += ["random(p=0.5)", "random(p=0.5,K=2)"]
  expected += [f"optimum(mu={mu})" for mu in (40, 60, 90, 130, 200, 300)]
  expected += ["optimum(K=2)", judged, f"{judged}(K=2)"]
  free = "conditioned(update=9,cost_weight="
  expected += [f"{free}0.1)", f"{free}0.5,K=2)", f"{free}0.5,blind=1,K=2)"]
  rules = [
    f"{rule}(update=9,cost_weight=0.1" for rule in ("cache-sticky", "one-escalation")
  ]
  rules += [f"stage-rule(patience={steps}" for steps in (1, 2, 3, 5, 10)]
  for rule in rules:
    expected += [f"{rule})", f"{rule},K=2)"]
  for router in (
    "sft(update=2",
    "bopo(lam=0.3,update=2",
    "bopo(lam=0.1,update=2",
    "cascade(update=2",
    "single-turn(update=2",
    "vanilla(lam=0.3,update=2",
    "vanilla(lam=0.1,update=2",
    "vanilla-sft(lam=0.3,update=2",
    "vanilla-sft(lam=0.1,update=2",
    "no-reference(lam=0.3,update=2",
  ):
    expected += [f"{router},threshold=0.5)", f"{router},threshold=0.25)"]
    if not router.startswith("no-"):
      expected.append(f"{router},threshold=0.5,K=2)")
  by_key = {spec.key: spec for spec in list_specs(config)}
  assert list(by_key) == expected
  assert by_key["random(p=0.5,K=2)"] == PolicySpec("random", p=0.5, cap=Cap(2))
  settings = by_key["bopo(lam=0.3,update=2,threshold=0.25)"].settings
  assert settings == {"lam": 0.3, "update": 2, "threshold": 0.25}
  uncapped = {key: find_uncapped(spec) for key, spec in by_key.items()}
  assert uncapped["random(p=0.5,K=2)"].key == "random(p=0.5)"
  assert uncapped["first-large(K=2)"].key == "always-large"
  assert uncapped["random(p=0.5)"] is None
  # A policy that sees its cap is played under it. Its uncapped episodes are not reused.
  for key in ("optimum(K=2)", f"{judged}(K=2)", f"{free}0.5,K=2)"):
    assert uncapped[key] is None
  assert uncapped[f"{free}0.5,blind=1,K=2)"].key == f"{free}0.5)"
  # These rules act alike until the cap is spent.
  for spec in list_specs(config):
    if spec.family in ("cache-sticky", "one-escalation", "stage-rule"):
      assert bool(find_uncapped(spec)) == bool(spec.cap)


def test_other_training_seeds_train_no_rivals_of_one_seed(config):
  config.train_seeds = 3
  first, second = (list_trained(config, number) for number in (0, 1))
  families = {spec.family for spec in second}
  assert families == {"conditioned", "sft", "bopo", "vanilla"}
  skipped = {spec.family for spec in first} - families
  assert skipped == {"cascade", "single-turn", "vanilla-sft", "no-reference"}
  assert {spec.seeds for spec in second} == {3}
  assert {spec.seeds for spec in first if spec.family in skipped} == {None}


def test_every_policy_is_played_under_caps_on_dollars(config):
  config.evaluate.call_budgets = ()
  config.evaluate.usd_budgets = (0.5, 0.01)
  capped = [spec for spec in list_specs(config) if spec.cap.usd]
  assert all(find_uncapped(spec) is None and spec.cap.calls is None for spec in capped)
  keys = {spec.key for spec in capped}
  assert {"always-small(usd=0.5)", "first-large(usd=0.01)"} <= keys


@pytest.mark.parametrize("models, stands_in", [("scripted", True), ("chat", False)])
def test_the_privileged_rule_stands_in_without_an_optimum(config, models, stands_in):
  config.env.kind = "scienceworld"
  config.models.kind = models
  keys = {spec.key for spec in list_specs(config)}
  assert ("privileged(mu=100)" in keys) == stands_in
  assert not any(key.startswith("optimum") for key in keys)


def test_each_setting_of_the_judge_changes_its_key(config):
  keys = {zero_shot_spec(config).key}
  for name, value in (
    ("temperature", 0.5),
    ("max_completion_tokens", 9),
    ("base_urls", ("http://h",)),
    ("reasoning_effort", "low"),
  ):
    setattr(config.baselines.judge, name, value)
    keys.add(zero_shot_spec(config).key)
  assert len(keys) == 5 and all(key.startswith("zero-shot gpt-5 ") for key in keys)


COUNT = st.none() | st.integers(1, 3) | st.integers(1, 10**6 - 1)
FLOAT = st.sampled_from((0.0, 0.1, 0.5, 1.0)) | st.floats(0, 1e9)
# Keys have six digits, so weights have no more.
WEIGHT = st.none() | FLOAT.map(lambda x: float(f"{x:g}"))
DIGEST = st.integers(0, 2**24 - 1)
JUDGE = st.builds("{} {:06x}".format, st.sampled_from(("gpt-5", "m (K=1)")), DIGEST)
KIND = st.sampled_from(("samples", "steps", "repeats"))
# A policy does not depend on which tasks play a plan.
PLAN = st.builds(SamplePlan, KIND, st.integers(1, 3), st.just(False))
FIELDS = {
  "judge": st.just("") | JUDGE,
  "plans": st.lists(PLAN, max_size=2).map(tuple),
  "cap": st.builds(Cap, st.just(0) | COUNT, WEIGHT),
}
FIELDS |= dict.fromkeys(("seed", "update", "seeds", "rank", "patience"), COUNT)
FIELDS |= dict.fromkeys(("lam", "threshold", "share", "cost_weight", "p"), WEIGHT)
SPEC = st.builds(PolicySpec, st.sampled_from(("sft", "bopo")), **FIELDS)

# Equal numbers of different fields.
ALIKE = [
  {"lam": 1.0, "share": None},
  {"lam": None, "share": 1.0},
  {"cap": Cap(calls=1)},
  {"cap": Cap(usd=1.0)},
  {"plans": (SamplePlan("steps", 1),)},
  {"plans": (SamplePlan("repeats", 1),)},
]


@given(first=SPEC, second=SPEC)
def test_two_policies_never_share_a_key(first, second):
  """They may differ in a single field, or only in which fields they have."""
  specs = {first, second}
  for name in FIELDS:
    specs.add(dataclasses.replace(first, **{name: getattr(second, name)}))
  for change in ALIKE:
    specs.add(dataclasses.replace(first, **change))
  for spec in [*specs]:
    if spec.update is not None:
      specs.add(dataclasses.replace(spec, rollout=True))
    if spec.cap:
      specs.add(dataclasses.replace(spec, blind=1))
  assert len({spec.key for spec in specs}) == len(specs)
