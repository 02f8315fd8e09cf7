"""Check the targets of value heads by hand, and that the heads solve a small problem."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import call

from baar_jax.conditioned import fit, heads
from baar_jax.conditioned.fit import Regime, Transitions, fit_heads
from baar_jax.conditioned.heads import Heads
from baar_jax.config import ValueConfig
from baar_jax.episode import LARGE, SMALL, Episode, Step, Task
from baar_jax.router.inputs import (
  BUCKETS,
  DIRECTIONS,
  TERMS,
  Vocabulary,
  describe,
  follow_episodes,
  read_states,
)

TASK = Task("t", "train", "Do it.", 3)
NO_WORDS = Vocabulary(np.zeros((BUCKETS, DIRECTIONS)), {}, 1.0, {})


def step(model, usd, score=None):
  return Step("seen", model, "act", [call(model, usd)], score=score)


def episode(score, *steps):
  return Episode("t", "p", "profile", 0, [*steps], score, "done")


def transitions_of(episodes, feature_N, unit_usd=1.0) -> Transitions:
  """Transitions of a task of three steps, whose states have one given feature."""
  states = read_states(follow_episodes(NO_WORDS, {"t": TASK}, episodes))
  states = states._replace(features_NxD=np.array(feature_N, np.float32)[:, None])
  return fit.make_transitions(states, episodes, unit_usd)


def without_end(gain, cost, feature=0) -> Transitions:
  """Transitions of SMALL with this gain and cost, each of which is followed by another."""
  data = transitions_of([episode(0.0, *[step(SMALL, cost)] * 2)], [feature] * 2)
  gains = np.full(2, gain, np.float32)
  return data._replace(gain_N=gains, last_N=np.array([False, False]))


def make_heads(width) -> Heads:
  """Draw two heads for states of one feature."""
  return heads.draw_heads(jax.random.key(0), 2, (width, width), 2, features=1)


def heads_of_input(number, sign=1) -> Heads:
  """Make two heads whose value is that of one input: SiLU(SiLU(x)), times the sign.

  Input 0 is the feature, and input 1 the first term: the share of calls left.
  """
  drawn = make_heads(1)
  zero = np.zeros((2, 1), np.float32)
  one = np.ones((2, 1, 1), np.float32)
  first = np.zeros((2, 1 + TERMS, 1), np.float32)
  first[:, number] = 1
  value = [(first, zero), (one, zero), (sign * one, zero)]
  return drawn._replace(value=value)


def test_transitions_of_an_episode_by_hand():
  """Gains add up to the final score, even if the environment does not score steps."""
  scored = episode(0.5, step(0, 1.0, 0.25), step(1, 2.0, 0.25), step(0, 1.0, 0.9))
  unscored = episode(0.5, step(0, 1.0), step(1, 2.0))
  data = transitions_of([scored, unscored], [0] * 5, unit_usd=2.0)
  assert data.model_N.tolist() == [0, 1, 0, 0, 1]
  assert data.cost_N.tolist() == [0.5, 1.0, 0.5, 0.5, 1.0]
  assert data.gain_N.tolist() == [0.25, 0.0, 0.25, 0.0, 0.5]
  assert data.last_N.tolist() == [False, False, True, False, True]
  assert data.states.progress_NxP[2].tolist() == [2, 1, 3]


def test_target_under_caps_and_cost_weights_by_hand():
  """LARGE counts only if a call is left. Gain and cost are .2 and .4."""
  columns = [  # (1 / (1 + cost weight), calls left after the step, is last, target)
    (1.0, 1.0, False, 0.2 + 0.6),
    (1.0, 0.0, False, 0.2 + 0.4),
    (0.5, np.inf, False, 0.1 - 0.2 + 0.6),
    (0.5, np.inf, True, 0.1 - 0.2),
  ]
  for weight, calls, last, target in columns:
    reward = Regime(calls, weight).weigh(0.2, 0.4)
    advantage = jnp.array([-0.1, 0.1])
    got = fit.compute_target(reward, last, jnp.array(0.5), advantage, calls)
    assert got == pytest.approx(target, abs=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_target_under_a_cap_is_at_most_the_one_without(sign):
  """The value rises or falls with the calls that are left. A step of SMALL earns nothing.

  So each target without the bound equals the value, and only falling values change.
  """
  config = ValueConfig(updates=1, heads=2, noise=0)
  ((_, _, loss),) = fit_heads(heads_of_input(1, sign), without_end(0, 0), config, 0)
  # The value of no cap is SiLU(SiLU(1)) = 0.4936, and that of no call left is 0.
  assert 0.01 < loss < 0.4936**2 if sign < 0 else loss == pytest.approx(0, abs=1e-9)


def test_targets_come_from_networks_that_follow_slowly(monkeypatch):
  """A step earns 1 at each cost weight: its gain is 1, and its cost -1. Only the last
  biases are not 0, so a step of Adam changes them alone."""
  monkeypatch.setattr(fit, "LEARNING_RATE", 0.1)
  config = ValueConfig(updates=2, heads=2, noise=0, weight_decay=0)
  drawn = make_heads(1)
  start = jax.tree.map(jnp.zeros_like, drawn)
  ((_, fitted, loss),) = fit_heads(start, without_end(1, -1), config, 0)
  # Update 1: Q = 0, the target is 1, so the loss is 1. The biases become .1 (value), .1 and
  # -.1 (advantages, times .3), so Q = .13; the target networks go 2 % of the way, to .0026.
  # Update 2: the target is 1.0026, so the loss is .8726^2 = .7614.
  assert loss == pytest.approx((1 + 0.7614) / 2, rel=1e-4)
  # The gradients of the value's bias are -2 and -1.7452, so Adam's second step is half of .1 (the
  # cosine) times 1.8659 / 1.8769, to .1497. 2 % of the way from .002 to it: .00495.
  bias = fitted.value[-1][1]
  np.testing.assert_allclose(bias, 0.002 + 0.02 * (0.1497 - 0.002), rtol=1e-3)


def test_noise_is_added_to_inputs_and_not_to_targets(monkeypatch):
  """The value is the feature, 20 standard deviations, and so is the target."""
  monkeypatch.setattr(fit, "BATCH_DECISIONS", 50_000)
  config = ValueConfig(updates=1, heads=2, noise=0.5)
  ((_, _, loss),) = fit_heads(heads_of_input(0), without_end(0, 0, 20), config, 0)
  # The mean square of the noise, over 100,000 draws: the tolerance is four deviations.
  assert loss == pytest.approx(0.5**2, abs=0.0045)


def test_heads_learn_the_best_plan_of_each_cap_and_cost_weight(monkeypatch):
  """In three steps LARGE, at one dollar, earns 0.3, 0.5 and 0.4. SMALL earns nothing.

  All eight plans are stored. One call is best used at the second step, two at the second and third.
  At cost weight 1/3 scores count .75 and dollars .25, so LARGE is not better at the first step.
  """
  episodes = []
  for plan in itertools.product((SMALL, LARGE), repeat=3):
    scores = np.cumsum(np.multiply(plan, (0.3, 0.5, 0.4)))
    episodes.append(episode(scores[-1], *map(step, plan, plan, scores)))
  data = transitions_of(episodes * 8, [-1, 0, 1] * 8 * 8)
  monkeypatch.setattr(fit, "BATCH_DECISIONS", 128)
  monkeypatch.setattr(fit, "LEARNING_RATE", 1e-2)
  config = ValueConfig(updates=2000, heads=2, noise=0, weight_decay=0)
  *_, (done, fitted, loss) = fit_heads(make_heads(16), data, config, seed=0)
  assert done == 2000 and loss < 0.01
  progress = np.array([[0, 0, 3], [1, 0, 3], [2, 0, 3]])
  for left, cost_weight, *gains in [  # of LARGE over SMALL, by step
    # At the first step, LARGE takes a call from the third.
    (2.0, 0.0, 0.3 - 0.4, 0.5, 0.4),
    (1.0, 0.0, 0.3 - 0.5, 0.5 - 0.4, 0.4),
    (np.inf, 1 / 3, 0.75 * 0.3 - 0.25, 0.75 * 0.5 - 0.25, 0.75 * 0.4 - 0.25),
  ]:
    terms = describe(np.full(3, left), 1 / (1 + cost_weight), progress)
    features = np.array([[-1.0], [0.0], [1.0]])
    value_ExS, advantage_ExSxA = heads.estimate_each(fitted, features, terms)
    value_S, advantage_SxA = value_ExS.mean(axis=0), advantage_ExSxA.mean(axis=0)
    np.testing.assert_allclose(np.diff(advantage_SxA)[:, 0], gains, atol=0.1)
    # SMALL earns nothing, so the best plan's value is the sum of positive gains to come.
    best_S = np.cumsum(np.maximum(gains, 0)[::-1])[::-1]
    np.testing.assert_allclose(value_S + advantage_SxA.max(axis=1), best_S, atol=0.08)
