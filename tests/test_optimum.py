"""Test the sandbox's exact optimum against brute force."""

import itertools
import math

import numpy as np
import pytest

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Oracle
from baar_jax.envs.sandbox.adapter import (
  BROKEN,
  LOOKS,
  PLAIN,
  SIGNS,
  Kind,
  Rules,
  SandboxErrors,
)
from baar_jax.episode import Step, Task
from baar_jax.rollout.specs import Cap, Job, Live
from examples.optimum import Exact

KINDS = Kind("cabin", 0.6, 0.1, 0.2), Kind("vault", 0.4, 0.5, 0.6)
FEW = Rules(
  locks=3, attempts=2, sign_at=1, broken_from=2, amber=(0.2, 0.7), kinds=KINDS
)
FEW_STEPS = 5
# Dollars per million tokens, of a prompt and of a reply, for both models.
PRICES = (0.4, 1.6), (2.0, 8.0)
MODELS = ModelsConfig(prompt_cache=False)


def prompt_tokens(step):
  """Count the tokens of a prompt: a call's reply and observation have 25 and 13."""
  return 76 + 38 * step


def bill(model, step):
  """Compute the dollars of a model's call at a step."""
  return (prompt_tokens(step) * PRICES[model][0] + 25 * PRICES[model][1]) / 1e6


def brute_force(errors, mu, calls, choose):
  """Compute the best expected success - mu * dollars by expectimax over full histories.

  It keeps the probability of every building that agrees with the history, and all
  earlier calls. It uses no posterior and no compressed state. In each state, the model
  of the rule `choose` has to be a best one.
  """
  rules = FEW
  worlds = []
  for (k, kind), sign, doomed in itertools.product(
    enumerate(rules.kinds), (1, 2), (False, True)
  ):
    p_kind = kind.share * (kind.doomed if doomed else 1 - kind.doomed)
    p_kind *= rules.amber[doomed] if sign == 2 else 1 - rules.amber[doomed]
    for levels in itertools.product((0, 1), repeat=2 if doomed else 3):
      shares = 1 - kind.tricky, kind.tricky
      p_levels = math.prod(shares[level] for level in levels)
      levels = (*levels, BROKEN) if doomed else levels
      for looks in itertools.product(range(3), repeat=3):
        pairs = zip(levels, looks)
        p_looks = math.prod(rules.looks[level][look] for level, look in pairs)
        shown = [sign if lock >= rules.sign_at else 0 for lock in range(3)]
        seen = [100 * k + 10 * shown[lock] + looks[lock] for lock in range(3)]
        worlds.append((p_kind * p_levels * p_looks, levels, seen))
  weight_W, level_WxI, seen_WxI = map(np.array, zip(*worlds))
  assert weight_W.sum() == pytest.approx(1.0)
  lapses = [
    [errors.lapse(m, "", Oracle("", 0, c, False)) for c in (0, 1)] for m in (0, 1)
  ]

  def best(weight_W, lock, jams, history):
    """Compute the value of the remaining episode, times its probability."""
    remaining = calls - sum(step.model for step in history)
    if lock == rules.locks:
      return weight_W.sum()
    if jams == rules.attempts or len(history) == FEW_STEPS:
      return 0.0
    total = 0.0
    level_W = level_WxI[:, lock]
    seen_W = seen_WxI[:, lock]
    for seen in {*seen_W[weight_W > 0]}:
      matching_W = weight_W * (seen_W == seen)
      values = []
      kind = seen // 100
      sign = seen // 10 % 10
      look = seen % 10
      text = f"Lock {lock + 1} looks {LOOKS[look]}. The sign is {SIGNS[sign]}."
      task = Task("", "train", f"Open the {rules.kinds[kind].word}.", FEW_STEPS)
      for model in (0, 1) if remaining > 0 else (0,):
        plain, tricky = lapses[model]
        rate_W = np.where(level_W == PLAIN, plain.rate, tricky.rate)
        wrong_W = np.where(level_W == PLAIN, plain.wrong, tricky.wrong)
        open_W = np.where(level_W == BROKEN, 0.0, 1 - rate_W)
        jam_W = 1 - open_W - rate_W * wrong_W
        later = [*history, Step(text, model, "")]
        opened = best(matching_W * open_W, lock + 1, 0, later)
        jammed = best(matching_W * jam_W, lock, jams + 1, later)
        usd = bill(model, len(history))
        values.append(opened + jammed - mu * usd * matching_W.sum())
      live = Live(Job(task, "", 0), Cap(calls), steps=history, observation=text)
      assert values[choose(live, None)] > max(values) - 1e-12
      total += max(values)
    return total

  return best(weight_W, 0, 0, [])


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 10**9, None])
@pytest.mark.parametrize("mu", [0.0, 100.0, 300.0, 1000.0])
def test_the_optimum_is_that_of_full_histories(calls, mu):
  class Harsh(SandboxErrors):
    """Error rates with which every variable of the state matters."""

    PLAIN = (0.2, 0.3), (0.05, 0.3)
    CRITICAL = (0.7, 0.4), (0.2, 0.4)

  exact = Exact(MODELS, FEW_STEPS, FEW, Harsh())
  point = exact.solve(mu, calls)[0]
  rule = exact.optimal_rule(mu, calls)
  most_calls = FEW_STEPS if calls is None else calls
  expected = brute_force(Harsh(), mu, most_calls, rule)
  assert point.success - mu * point.cost_usd == pytest.approx(expected, rel=1e-9)
