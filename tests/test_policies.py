"""The policies that need no training."""

import math
from types import SimpleNamespace

import pytest

from baar_jax.episode import Task
from baar_jax.rollout.live import Decision, Job, Live
from baar_jax.rollout.policies import always, oracle, random_large, random_rule


def live(task_id="t", seed=0, step=0, error_rates=(0.0, 0.0)) -> Live:
  agents = [SimpleNamespace(error_rate=lambda rate=rate: rate) for rate in error_rates]
  job = Job(Task(task_id, "train", "do it", 10), seed)
  return Live(job, None, agents=agents, steps=[None] * step)


def models(policy, ready):
  decisions = policy.choose(ready)
  assert all(d == Decision(d.model, logp=None, cost_usd=0.0) for d in decisions)
  return [d.model for d in decisions]


@pytest.mark.parametrize("model", [0, 1])
def test_always(model):
  policy = always(model, "always-this")
  assert policy.name == "always-this"
  assert models(policy, [live(step=s) for s in range(3)]) == [model] * 3
  policy.finish(live())


def test_random_takes_large_as_often_as_it_says():
  ready = [live(f"t{t}", seed, step) for t in range(10) for seed in range(10) for step in range(20)]
  for p in (0.25, 0.5):
    count = sum(models(random_large(p, "random"), ready))
    # 2000 draws: five standard deviations around the mean
    assert abs(count - 2000 * p) < 5 * math.sqrt(2000 * p * (1 - p))
  assert models(random_large(0.0, "random"), ready) == [0] * 2000
  assert models(random_large(1.0, "random"), ready) == [1] * 2000


def test_random_depends_on_task_seed_and_step_alone():
  episodes = [("t1", 0), ("t2", 0), ("t1", 1)]
  draws = [[random_rule(live(*key, step), 0.5) for step in range(40)] for key in episodes]
  assert draws == [[random_rule(live(*key, step), 0.5) for step in range(40)] for key in episodes]
  assert draws[0] != draws[1] != draws[2] != draws[0]
  assert 0 < sum(draws[0]) < 40  # steps of one episode differ


def test_random_of_a_larger_p_contains_that_of_a_smaller():
  ready = [live(seed=seed) for seed in range(200)]
  few, many = (models(random_large(p, "random"), ready) for p in (0.3, 0.6))
  assert all(a <= b for a, b in zip(few, many))
  assert sum(few) < sum(many)


@pytest.mark.parametrize("rate, model", [(0.0, 0), (0.5, 0), (0.51, 1), (1.0, 1)])
def test_oracle_takes_large_where_small_is_likelier_to_fail_than_not(rate, model):
  # What LARGE would do does not matter.
  assert models(oracle("oracle"), [live(error_rates=(rate, 0.9))]) == [model]
