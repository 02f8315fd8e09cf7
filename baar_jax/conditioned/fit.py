"""Fit the value heads to stored decisions under all caps and cost weights.

The method is fitted Q-iteration (Ernst et al. 2005) with target networks. With r LARGE
calls left and cost weight w, the value of a model a that acts in state s is

    Q(s, r, a) = (gain - w * cost) / (1 + w) + max_a' Q(s', r', a')

Here r' is r minus 1 if a is costlier than SMALL, else r. The maximum is over the models
that r' allows. A step's gain, its cost and the next state s' do not depend on r and w.
So each stored step is used with many randomly drawn r and w (our choice).

Axes: N decisions, E heads, D features of a state, P counts of `Tracker.progress`, A
models.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from baar_jax.conditioned.heads import Heads, estimate_each
from baar_jax.config import MAX_COST_WEIGHT, ValueConfig
from baar_jax.episode import SMALL, Episode
from baar_jax.router.inputs import MAX_CALLS, States, describe

BATCH_DECISIONS = 1024  # The number of decisions per gradient step.
LEARNING_RATE = 2e-3  # The learning rate of AdamW at the start; it decays to 0.
ROUND = 100  # The number of updates between two lines of the log.
# In an update, the target networks move this share of the way to the trained networks
# (our choice).
TARGET_RATE = 0.02
CAPPED_SHARE = 0.6  # The share of drawn decisions that get a cap (our choice).
# The shares of drawn decisions that get cost weight 0 (our choice): of those with a
# cap, and of those without a cap.
ZERO_COST_WEIGHT_SHARES = 0.8, 0.1


class Transitions(NamedTuple):
  """Describe the steps of stored decisions, one episode after another.

  Attributes:
    states: the states before the decisions.
    model_N: int, the models that acted.
    cost_N: float32, the cost of the step in normalised dollars.
    gain_N: float32, the increase of the score by the step. If the environment does not
      score steps, the last step gains the whole score.
    last_N: bool, whether the step is the last one of its episode.
  """

  states: States
  model_N: np.ndarray
  cost_N: np.ndarray
  gain_N: np.ndarray
  last_N: np.ndarray


def make_transitions(
  states: States, episodes: Sequence[Episode], unit_usd: float
) -> Transitions:
  """Make the transitions of episodes.

  Args:
    states: the states of all their decisions, in order.
    episodes: the episodes.
    unit_usd: US dollars of one normalised dollar, see `mean_large_usd`.
  """
  models = []
  costs = []
  gains = []
  lasts = []
  for episode in episodes:
    score_before = 0.0
    for number, step in enumerate(episode.steps, 1):
      last = number == len(episode.steps)
      score = score_before if step.score is None else step.score
      if last:
        score = episode.score
      models.append(step.model)
      costs.append(np.float32(step.cost_usd / unit_usd))
      gains.append(np.float32(score - score_before))
      lasts.append(last)
      score_before = score
  cost_N = np.array(costs)
  gain_N = np.array(gains)
  return Transitions(states, np.array(models), cost_N, gain_N, np.array(lasts))


class Fit(NamedTuple):
  """Keep the training state of one value head, or of all with axis E first.

  Attributes:
    heads: the networks.
    targets: the target networks, a moving average of the networks.
    optimizer_state: the state of the optimizer.
  """

  heads: Heads
  targets: Heads
  optimizer_state: optax.OptState


def fit_heads(
  heads: Heads, data: Transitions, config: ValueConfig, seed: int
) -> Iterator[tuple[int, Heads, float]]:
  """Fit the value heads, each on its own randomly drawn decisions.

  Args:
    heads: the heads to start from.
    data: the transitions to learn from.
    config: the settings of the value heads.
    seed: the seed of the random draws.

  Yields:
    After every `ROUND` updates and after the last: the number of updates done, the
    heads with the parameters of the target networks, and the mean loss of the round.
  """
  schedule = optax.cosine_decay_schedule(LEARNING_RATE, config.updates)
  optimizer = optax.adamw(schedule, weight_decay=config.weight_decay)
  fitted = Fit(heads, heads, jax.vmap(optimizer.init)(heads))
  data = jax.tree.map(jnp.asarray, data)
  update = partial(_update, optimizer, config)
  step = jax.jit(jax.vmap(update, (None, 0, 0, None)))
  keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), config.heads)
  losses = []
  for done in range(1, config.updates + 1):
    fitted, loss_E = step(data, fitted, keys, done)
    losses.append(loss_E)
    if done % ROUND == 0 or done == config.updates:
      yield done, fitted.targets, float(np.mean(losses))
      losses = []


class Regime(NamedTuple):
  """Assign a cap and a cost weight to each decision of a batch.

  Attributes:
    calls_left_N: float32, the LARGE calls left before the decision; inf without a cap.
    score_weight_N: float32, 1 / (1 + w) for the cost weight w.
  """

  calls_left_N: jax.Array
  score_weight_N: jax.Array

  def weigh(self, gain_N: jax.Array, cost_N: jax.Array) -> jax.Array:
    """Compute (gain - w * cost) / (1 + w) for the cost weight w.

    Args:
      gain_N: scores.
      cost_N: normalised dollars.
    """
    return self.score_weight_N * gain_N - (1 - self.score_weight_N) * cost_N


def draw_regime(keys: Sequence[jax.Array], used_N: jax.Array) -> Regime:
  """Draw a cap and a cost weight for each decision (our choice).

  - `CAPPED_SHARE` of the decisions have a cap of 0 to `MAX_CALLS` - 1 LARGE calls left.
    Few calls are more likely: the number is floor(MAX_CALLS * u^2), u uniform in 0..1.
  - `ZERO_COST_WEIGHT_SHARES` of the decisions have cost weight 0.
  - For all other decisions, 1 / (1 + w) is uniform above 1 / (1 + MAX_COST_WEIGHT).

  Args:
    keys: four random keys.
    used_N: the LARGE calls of each decision's step, 0 or 1. A drawn cap has at least
      this number of calls left.
  """
  shape = used_N.shape
  key_cap, key_zero, key_weight, key_calls = keys
  is_capped_N = jax.random.uniform(key_cap, shape) < CAPPED_SHARE
  is_zero_N = jax.random.uniform(key_zero, shape) < jnp.where(
    is_capped_N, *ZERO_COST_WEIGHT_SHARES
  )
  least = 1 / (1 + MAX_COST_WEIGHT)
  score_weight_N = jax.random.uniform(key_weight, shape, minval=least)
  score_weight_N = jnp.where(is_zero_N, 1.0, score_weight_N)
  calls_left_N = jnp.floor(MAX_CALLS * jax.random.uniform(key_calls, shape) ** 2)
  calls_left_N = jnp.where(is_capped_N, jnp.maximum(calls_left_N, used_N), jnp.inf)
  return Regime(calls_left_N, score_weight_N)


def compute_target(
  reward: jax.Array,
  is_last: jax.Array,
  next_value: jax.Array,
  next_advantage: jax.Array,
  next_calls_left: jax.Array,
) -> jax.Array:
  """Compute the Q target of each stored decision, without discount.

      target = reward + (0 if is_last else next_value + max_a next_advantage[a])

  The maximum is over the models that `next_calls_left` allows: all models if at least 1
  LARGE call is left, else SMALL.

  Args:
    reward: (gain - w * cost) / (1 + w) of the step, see `Regime.weigh`.
    is_last: bool, whether the step is the last one of its episode.
    next_value: the target networks' value of the next decision.
    next_advantage: [..., A], the target networks' advantages at the next decision.
    next_calls_left: the LARGE calls left at the next decision; inf without a cap.

  Returns:
    float32, of the shape of `reward`.
  """
  best_advantage = jnp.where(
    next_calls_left >= 1, next_advantage.max(axis=-1), next_advantage[..., SMALL]
  )
  return reward + jnp.where(is_last, 0.0, next_value + best_advantage)


def _estimate(
  heads: Heads, regime: Regime, states: States
) -> tuple[jax.Array, jax.Array]:
  """Estimate value_N and advantage_NxA of decisions with the networks of one head."""
  terms_NxT = describe(*regime, states.progress_NxP)
  return estimate_each(heads, states.features_NxD, terms_NxT)


def _update(
  optimizer: optax.GradientTransformation,
  config: ValueConfig,
  data: Transitions,
  fitted: Fit,
  key: jax.Array,
  done: jax.Array,
) -> tuple[Fit, jax.Array]:
  """Take one gradient step of one head on randomly drawn decisions.

  Each decision has a randomly drawn cap and cost weight. Noise is added to the
  features, except those that give targets.

  Args:
    optimizer: the optimizer.
    config: the settings of the value heads.
    data: the transitions that all heads learn from.
    fitted: the training state of the head.
    key: the random key of the head.
    done: the number of this update, from 1.

  Returns:
    The new training state, and the loss.
  """
  keys = jax.random.split(jax.random.fold_in(key, done), 6)
  count = len(data.model_N)
  n = jax.random.randint(keys[0], (BATCH_DECISIONS,), 0, count)
  drawn = jax.tree.map(lambda x: x[n], data)
  following = jax.tree.map(lambda x: x[jnp.minimum(n + 1, count - 1)], data)
  used_N = (drawn.model_N != SMALL).astype(jnp.float32)
  regime = draw_regime(keys[1:5], used_N)
  reward_N = regime.weigh(drawn.gain_N, drawn.cost_N)

  def target(calls_left_N: jax.Array) -> jax.Array:
    """Compute the target if this number of LARGE calls is left at the next decision."""
    regime_N = regime._replace(calls_left_N=calls_left_N)
    estimates = _estimate(fitted.targets, regime_N, following.states)
    return compute_target(reward_N, drawn.last_N, *estimates, calls_left_N)

  # A cap never raises a value, so the target without a cap is an upper bound.
  target_N = jnp.minimum(
    target(regime.calls_left_N - used_N), target(jnp.full_like(used_N, jnp.inf))
  )
  noise_NxD = jax.random.normal(keys[5], drawn.states.features_NxD.shape)
  noisy_NxD = drawn.states.features_NxD + config.noise * noise_NxD
  noisy = drawn.states._replace(features_NxD=noisy_NxD)

  def compute_loss(heads: Heads) -> jax.Array:
    """Compute the mean squared difference between estimated and target Q values."""
    value_N, advantage_NxA = _estimate(heads, regime, noisy)
    chosen = jnp.take_along_axis(advantage_NxA, drawn.model_N[:, None], axis=1)[:, 0]
    return jnp.mean((value_N + chosen - target_N) ** 2)

  loss, gradient = jax.value_and_grad(compute_loss)(fitted.heads)
  updates, state = optimizer.update(gradient, fitted.optimizer_state, fitted.heads)
  heads = optax.apply_updates(fitted.heads, updates)

  def follow(target: jax.Array, new: jax.Array) -> jax.Array:
    """Move a target parameter `TARGET_RATE` of the way to the new parameter."""
    return target + TARGET_RATE * (new - target)

  return Fit(heads, jax.tree.map(follow, fitted.targets, heads), state), loss
