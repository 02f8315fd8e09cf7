"""The policies that need no training, on live episodes made by hand."""

import math
from types import SimpleNamespace

import pytest

from baar_jax.episode import Task
from baar_jax.rollout.entries import Entry
from baar_jax.rollout.live import Decision, Job, Live, random_rule, rule_policy


def live(task_id="t", seed=0, step=0, error_rates=(0.0, 0.0)) -> Live:
  agents = [SimpleNamespace(error_rate=lambda rate=rate: rate) for rate in error_rates]
  job = Job(Task(task_id, "train", "do it", 10), seed)
  return Live(job, None, agents=agents, steps=[None] * step)


def models(policy, ready):
  decisions = policy.choose(ready)
  assert all(d == Decision(d.model, logp=None, cost_usd=0.0) for d in decisions)
  return [d.model for d in decisions]


def test_random_takes_large_as_often_as_it_says():
  ready = [live(f"t{t}", seed, step) for t in range(10) for seed in range(10) for step in range(20)]
  entries = [Entry("random", {"p": p}, "random") for p in (0.0, 0.25, 0.5, 1.0)]
  none, few, many, always = (models(rule_policy(entry), ready) for entry in entries)
  for p, draws in ((0.25, few), (0.5, many)):
    # 2000 draws: five standard deviations around the mean
    assert abs(sum(draws) - 2000 * p) < 5 * math.sqrt(2000 * p * (1 - p))
  assert all(a <= b for a, b in zip(few, many))  # a larger p takes LARGE wherever a smaller does
  assert none == models(rule_policy(Entry("always-small", {}, "s")), ready) == [0] * 2000
  for family in ("always-large", "first-large"):
    assert always == models(rule_policy(Entry(family, {}, "l")), ready) == [1] * 2000


def test_random_depends_on_task_seed_and_step_alone():
  episodes = [("t1", 0), ("t2", 0), ("t1", 1)]
  draws = [[random_rule(live(*key, step), 0.5) for step in range(40)] for key in episodes]
  assert draws == [[random_rule(live(*key, step), 0.5) for step in range(40)] for key in episodes]
  assert draws[0] != draws[1] != draws[2] != draws[0]
  assert 0 < sum(draws[0]) < 40  # steps of one episode differ


@pytest.mark.parametrize("rate, model", [(0.0, 0), (0.5, 0), (0.51, 1), (1.0, 1)])
def test_oracle_takes_large_where_small_is_likelier_to_fail_than_not(rate, model):
  # What LARGE would do does not matter.
  assert models(rule_policy(Entry("oracle", {}, "o")), [live(error_rates=(rate, 0.9))]) == [model]
