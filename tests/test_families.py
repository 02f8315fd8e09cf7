"""The table of families: which policies are evaluated, under which keys and caps."""

import dataclasses

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from baar_jax.config import BaselinesConfig, SamplePlan
from baar_jax.rivals.families import FAMILIES, find_uncapped, list_specs, zero_shot_spec
from baar_jax.rollout import jobs
from baar_jax.rollout.specs import Cap, PolicySpec


@pytest.fixture
def config():
  config = tiny.config("runs")
  config.models.prompt_cache = False
  config.bopo.lam, config.value.updates, config.value.cost_weights = (
    (0.3, 0.1),
    9,
    (0.5, 0.1),
  )
  config.value.capped_cost_weights = (0.5, 0.1)
  config.evaluate.thresholds, config.evaluate.call_budgets = (0.25, 0.5), (1, 2)
  config.baselines = BaselinesConfig(
    tuple(name for name in FAMILIES if FAMILIES[name].is_rival),
    ("no-reference",),
  )
  return config


def test_keys_carry_every_parameter_and_nothing_else(config):
  judged = zero_shot_spec(config).key
  free = "conditioned(update=9,cost_weight="
  expected = [
    "always-small",
    "always-large",
    "first-large(K=1)",
    "first-large(K=2)",
    "random(p=0.5)",
    "random(p=0.5,K=1)",
    "random(p=0.5,K=2)",
  ]
  expected += [f"optimum(mu={mu})" for mu in (40, 60, 90, 130, 200, 300)]
  expected += [
    "optimum(K=1)",
    "optimum(K=2)",
    judged,
    f"{judged}(K=1)",
    f"{judged}(K=2)",
    f"{free}0.5)",
    f"{free}0.1)",
  ]
  for weight in (0.5, 0.1):
    for cap in ("K=1", "K=2"):
      expected += [f"{free}{weight},{cap})", f"{free}{weight},blind=1,{cap})"]
  rules = [
    f"{rule}(update=9,cost_weight={weight}"
    for rule in ("cache-sticky", "one-escalation")
    for weight in (0.5, 0.1)
  ]
  rules += [f"stage-rule(patience={steps}" for steps in (1, 2, 3, 5, 10)]
  for rule in rules:
    expected += [f"{rule})", f"{rule},K=1)", f"{rule},K=2)"]
  routers = [
    "sft(update=2",
    "bopo(lam=0.3,update=2",
    "bopo(lam=0.1,update=2",
    "cascade(update=2",
    "single-turn(update=2",
    "vanilla(lam=0.3,update=2",
    "vanilla(lam=0.1,update=2",
  ]
  for router in routers:
    for ending in ("0.5", "0.25", "0.5,K=1", "0.5,K=2"):
      expected.append(f"{router},threshold={ending})")
  expected += [
    "no-reference(lam=0.3,update=2,threshold=0.5)",
    "no-reference(lam=0.3,update=2,threshold=0.25)",
  ]
  by_key = {spec.key: spec for spec in list_specs(config)}
  assert list(by_key) == expected
  spec = by_key["random(p=0.5,K=2)"]
  assert spec == PolicySpec("random", p=0.5, cap=Cap(2)) and spec.settings == {"p": 0.5}
  key = "bopo(lam=0.3,update=2,threshold=0.25)"
  assert by_key[key].settings == {"lam": 0.3, "update": 2, "threshold": 0.25}
  uncapped = {key: find_uncapped(spec) for key, spec in by_key.items()}
  assert uncapped["random(p=0.5,K=2)"].key == "random(p=0.5)"
  assert uncapped["first-large(K=2)"].key == "always-large"
  assert uncapped["random(p=0.5)"] is None
  # A policy that sees its cap is played under it. Its uncapped episodes are not reused.
  for key in ("optimum(K=2)", f"{judged}(K=2)", f"{free}0.1,K=2)"):
    assert uncapped[key] is None
  assert uncapped[f"{free}0.1,blind=1,K=2)"].key == f"{free}0.1)"
  # The three rules act alike until the cap is spent, even if routers read their cap.
  config.router.show_budget = True
  rules = {"cache-sticky", "one-escalation", "stage-rule"}
  specs = [spec for spec in list_specs(config) if spec.family in rules and spec.cap]
  assert len(specs) == 18 and all(find_uncapped(spec) for spec in specs)


def test_every_policy_is_played_under_caps_on_dollars(config):
  config.evaluate.call_budgets, config.evaluate.usd_budgets = (), (0.5, 0.01)
  capped = [spec for spec in list_specs(config) if spec.cap.usd]
  assert all(find_uncapped(spec) is None and spec.cap.calls is None for spec in capped)
  assert {"always-small(usd=0.5)", "first-large(usd=0.01)"} <= {
    spec.key for spec in capped
  }


def test_the_privileged_rule_stands_in_without_an_optimum(config):
  config.env.kind = "scienceworld"
  names = [spec.key for spec in list_specs(config)]
  assert [name for name in names if name.startswith(("optimum", "privileged"))] == [
    "privileged(mu=100)"
  ]
  config.models.kind = "chat"
  assert not {"optimum", "privileged"} & {spec.family for spec in list_specs(config)}


def test_each_setting_of_the_judge_changes_its_key(config):
  names = [zero_shot_spec(config).key]
  judge = config.baselines.judge
  for field, value in (
    ("temperature", 0.5),
    ("max_completion_tokens", 9),
    ("base_urls", ("http://h",)),
  ):
    vars(judge)[field] = value
    names.append(zero_shot_spec(config).key)
  assert len({*names}) == 4 and names[0].startswith("zero-shot gpt-5 ")


def test_keys_of_rollouts_and_samples_are_as_stored_before(config):
  config.references.plans = (
    SamplePlan("samples", 3, True),
    SamplePlan("steps", 2, True),
    SamplePlan("repeats", 1),
  )
  hard, rest = jobs.exploration_specs(config)
  assert hard.key == "exploration(steps=2,repeats=1)"
  assert rest.key == "exploration-all(samples=3,steps=2)"
  assert jobs.stratified_spec(config).key == "stratified(samples=3)"
  assert jobs.rollout_spec("bopo", 0.3, 5).key == "bopo(lam=0.3)/5"
  assert jobs.rollout_spec("bopo", 0.3, 5, 2).key == "bopo(lam=0.3,seed=2)/5"


COUNT = st.integers(1, 3) | st.integers(1, 10**6 - 1)
# Keys have six digits, so weights have no more.
WEIGHT = st.sampled_from((0.0, 0.1, 0.5, 1.0)) | st.floats(0, 1e9).map(
  lambda x: float(f"{x:g}")
)
CAP = st.builds(Cap, st.none() | st.just(0) | COUNT, st.none() | WEIGHT)
JUDGE = st.builds(
  "{} {:06x}".format, st.sampled_from(("gpt-5", "m (K=1)")), st.integers(0, 2**24 - 1)
)
KIND = st.sampled_from(("samples", "steps", "repeats"))
# A policy does not depend on which tasks play a plan.
PLAN = st.builds(SamplePlan, KIND, st.integers(1, 3), st.just(False))
PLANS = st.lists(PLAN, max_size=2).map(tuple)
LAM = {"lam": st.none() | WEIGHT}
ROUTER = {"update": COUNT, "seeds": st.none() | st.integers(2, 100)}
VALUES = ROUTER | {"cost_weight": WEIGHT}


def list_specs_of(names: str, fields: dict) -> st.SearchStrategy:
  policies = st.builds(PolicySpec, st.sampled_from(names.split()), **fields)
  return st.lists(policies, min_size=2, max_size=9)


# Each row has families, and the fields that they have together.
SHAPES = [
  ("always-small always-large first-large", {"cap": CAP}),
  ("always", {"rank": COUNT}),
  ("random", {"p": WEIGHT, "cap": CAP}),
  ("stage-rule", {"patience": COUNT, "cap": CAP}),
  ("cache-sticky one-escalation", VALUES | {"cap": CAP}),
  ("privileged optimum", {"mu": st.none() | WEIGHT, "cap": CAP}),
  ("zero-shot", {"judge": JUDGE, "cap": CAP}),
  ("stratified exploration exploration-all", {"plans": PLANS}),
  ("sft bopo cascade no-reference", LAM | ROUTER | {"threshold": WEIGHT, "cap": CAP}),
  ("sft bopo cascade no-reference", LAM | ROUTER | {"share": WEIGHT, "cap": CAP}),
  (
    "bopo vanilla",
    LAM | {"seed": st.none() | COUNT, "update": COUNT, "rollout": st.just(True)},
  ),
  # Cap-conditioned, and cap-blind.
  ("conditioned", VALUES | {"cap_conditioned": st.just(True), "cap": CAP}),
  ("conditioned", VALUES | {"blind": st.just(1), "cap": CAP.filter(bool)}),
]


@pytest.mark.parametrize("names, fields", SHAPES)
@given(data=st.data())
def test_two_policies_never_share_a_key(names, fields, data):
  """They may differ in a single field, or only in which fields they have."""
  first, second, *others = data.draw(list_specs_of(names, fields))
  specs = {first, second, *others}
  for name in fields:
    specs.add(dataclasses.replace(first, **{name: getattr(second, name)}))
  other_names, other_fields = data.draw(st.sampled_from(SHAPES))
  shared = fields.keys() & other_fields.keys() - {"blind", "cap_conditioned"}
  values = {name: getattr(first, name) for name in shared if getattr(first, name)}
  for other in data.draw(list_specs_of(other_names, other_fields)):
    specs |= {other, dataclasses.replace(other, **values)}
  assert len({spec.key for spec in specs}) == len(specs)
