"""The policies that need no training, and the entries: names, and what runs under which budget."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import tiny

from baar_jax.config import RIVALS, BaselinesConfig
from baar_jax.episode import Step, Task
from baar_jax.llms.scripted import Prospect
from baar_jax.rollout.policies import Entry, Job, Live, entries, rule_policy, zero_shot_name

SEEN = [Step(letter, 0, "") for letter in "abacabbbcc" * 400]


def live(task_id="t", seed=0, step=0, prospects=()) -> Live:
  agents = [SimpleNamespace(prospect=lambda _, step, p=p: p) for p in prospects or (None, None)]
  job = Job(Task(task_id, "train", "do it", 10), seed)
  return Live(job, None, agents=agents, steps=SEEN[:step], observation=SEEN[step].observation)


def models(family, ready, **parameters):
  return [decision.model for decision in rule_policy(family, **parameters).choose(ready)]


def test_random_takes_large_as_often_as_it_says():
  """The draw depends on task, seed and step alone."""
  ready = [live(f"t{t}", seed, step) for t in range(10) for seed in range(10) for step in range(20)]
  none, few, many, all_ = (models("random", ready, p=p) for p in (0.0, 0.25, 0.5, 1.0))
  for p, draws in ((0.25, few), (0.5, many)):
    # 2000 draws: five standard deviations around the mean
    assert abs(sum(draws) - 2000 * p) < 5 * math.sqrt(2000 * p * (1 - p))
  assert all(a <= b for a, b in zip(few, many))  # a larger p takes LARGE wherever a smaller does
  assert none == models("always-small", ready) == [0] * 2000
  assert all_ == models("always-large", ready) == models("first-large", ready) == [1] * 2000
  assert many[::-1] == models("random", ready[::-1], p=0.5)


# LARGE costs $0.01 more. It gains (0.9 - 0.1) * 0.5 = 0.4, so 40 per dollar. A third model gains
# (0.9 - 0.05) * 0.8 = 0.68 for $0.03 more: over LARGE 14 per dollar.
@pytest.mark.parametrize(
  "small_loss, known_share, mu, model",
  [(0.9, 0.5, 39, 1), (0.9, 0.5, 41, 0), (0.9, 0.0, 0, 0), (0.11, 0.5, 0, 1), (0.09, 0.5, 0, 0)]
  + [(0.9, 0.5, 13, 2), (0.9, 0.5, 15, 1)],
)
def test_privileged_takes_what_gains_enough_per_dollar(small_loss, known_share, mu, model):
  prospects = Prospect(small_loss, 0.2, 0.01), Prospect(0.1, known_share, 0.02)
  if mu in (13, 15):
    prospects = *prospects, Prospect(0.05, 0.8, 0.04)
  assert models("privileged", [live(prospects=prospects)], mu=mu) == [model]


@pytest.fixture
def config():
  config = tiny.config("runs")
  config.bopo.lam, config.value.updates, config.value.prices = (0.1, 0.3), 9, (0.5, 0.1)
  config.evaluate.thresholds, config.evaluate.call_budgets = (0.25,), (1, 2)
  config.baselines = BaselinesConfig(RIVALS, ("no-reference",), compared_lam=0.3, updates=7)
  return config


def test_names_carry_every_parameter_and_entries_say_what_they_are(config):
  judged, K = zero_shot_name(config), ["", "K=1", "K=2"]
  free, told = "conditioned(update=9,price=", "conditioned(update=9,price=0.1,"
  expected = ["always-small", "always-large", "first-large(K=1)", "first-large(K=2)"]
  expected += ["random(p=0.5)", "random(p=0.5,K=1)", "random(p=0.5,K=2)"]
  expected += [f"optimum(mu={mu})" for mu in (40, 60, 90, 130, 200, 300)]
  expected += ["optimum(K=1)", "optimum(K=2)", judged, f"{judged}(K=1)", f"{judged}(K=2)"]
  expected += [f"{free}0.5)", f"{free}0.1)", f"{told}K=1)", f"{told}K=2)"]
  expected += [f"{told}bold=0,{cap})" for cap in K[1:]]
  for bold in (1, 2):
    expected += [f"{told}bold={bold})", *(f"{told}bold={bold},{cap})" for cap in K[1:])]
  routers = ["sft(update=2", "bopo(lam=0.1,update=2", "bopo(lam=0.3,update=2", "cascade(update=7"]
  routers += ["single-turn(update=7", "vanilla(lam=0.1,update=2", "vanilla(lam=0.3,update=2"]
  for router in routers:
    expected += [f"{router},threshold={threshold})" for threshold in (0.5, 0.25)]
    expected += [f"{router},threshold=0.5,{cap})" for cap in K[1:]]
  expected += [f"no-reference(lam=0.3,update=2,threshold={value})" for value in (0.5, 0.25)]
  by_name = {entry.policy: entry for entry in entries(config)}
  assert list(by_name) == expected
  name = "random(p=0.5,K=2)"
  assert by_name[name] == Entry("random", {"p": 0.5}, name, 2, uncapped_policy="random(p=0.5)")
  assert by_name["first-large(K=2)"].uncapped_policy == "always-large"
  name = "bopo(lam=0.3,update=2,threshold=0.25)"
  assert by_name[name] == Entry("bopo", {"lam": 0.3, "update": 2, "threshold": 0.25}, name)
  # What sees its budget is run under it, not taken from the run without one.
  seeing = [by_name[n].uncapped_policy for n in ("optimum(K=2)", f"{judged}(K=2)", f"{told}K=2)")]
  assert seeing == [None] * 3 and by_name[f"{told}bold=0,K=2)"].uncapped_policy == f"{free}0.1)"
  assert by_name[f"{told}bold=1,K=2)"].uncapped_policy == f"{told}bold=1)"


def test_under_dollars_every_policy_is_run(config):
  config.evaluate.call_budgets, config.evaluate.usd_budgets = (), (0.5, 0.01)
  capped = [entry for entry in entries(config) if entry.usd_budget]
  assert all(entry.uncapped_policy is None and entry.call_budget is None for entry in capped)
  assert {"always-small(usd=0.5)", "first-large(usd=0.01)"} <= {entry.policy for entry in capped}


def test_elsewhere_a_privileged_rule_stands_for_the_optimum(config):
  config.env.kind = "scienceworld"
  expected = ["privileged(mu=0)", "privileged(mu=3)"]
  for mu in (10, 30, 100):
    expected += [f"privileged(mu={mu})", f"privileged(mu={mu},K=1)", f"privileged(mu={mu},K=2)"]
  names = [entry.policy for entry in entries(config)]
  assert [name for name in names if name.startswith(("optimum", "privileged"))] == expected
  config.models.kind = "chat"
  assert not {"optimum", "privileged"} & {entry.family for entry in entries(config)}


def test_what_changes_the_judge_changes_its_name(config):
  names = [zero_shot_name(config)]
  for change in ({"temperature": 0.5}, {"max_completion_tokens": 9}, {"base_urls": ("http://h",)}):
    config.baselines.judge = dataclasses.replace(config.baselines.judge, **change)
    names.append(zero_shot_name(config))
  assert len({*names}) == 4 and names[0].startswith("zero-shot gpt-5 ")
