"""The decision head: a hidden state and the rest of a budget -> values of models.

One forward pass of an episode serves every budget (our choice, see docs/evaluation.md).
The heads are an ensemble: their mean counts. Axes: E heads, N decisions, I inputs (D
and F), F facts, P numbers of `count_progress`, W width.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.episode import Step
from baar_jax.rollout.specs import Cap

MAX_CALLS = 20  # with so many LARGE calls left, or more, there is no cap
FACTS = 12  # that `describe` gives
# An advantage is small beside a value: its net starts on a scale of its own.
ADVANTAGE_UNIT = 0.3

Layers = Sequence[tuple[jax.Array, jax.Array]]  # (weight_ExIxW, bias_ExW) of each layer


class Scale(NamedTuple):
  """Statistics of the decisions that heads learned from, the units of their inputs."""

  mean_D: np.ndarray  # of the hidden states
  spread_D: np.ndarray
  large_usd: np.ndarray  # mean dollars of a LARGE call; left dollars count in this unit


class Heads(NamedTuple):
  """Parameters of E heads with a common scale."""

  value: Layers  # each head's net of values
  advantage: Layers  # and of advantages
  scale: Scale


def draw_heads(
  key: jax.Array, count: int, widths: tuple[int, int], models: int, scale: Scale
) -> Heads:
  """Draw `count` heads of random weights, which value everything at 0.

  Args:
    widths: of the nets of values and of advantages.
  """
  inputs = len(scale.mean_D) + FACTS

  def draw(width: int, outputs: int, key: jax.Array) -> list:
    layers = []
    for size, layer_key in zip((inputs, width), jax.random.split(key, 3)):
      weight = jax.random.normal(layer_key, (size, width)) * size**-0.5
      layers.append((weight, jnp.zeros(width)))
    return [*layers, (jnp.zeros((width, outputs)), jnp.zeros(outputs))]

  value_keys_E, advantage_keys_E = jax.random.split(key, (2, count))
  value = jax.vmap(partial(draw, widths[0], 1))(value_keys_E)
  advantage = jax.vmap(partial(draw, widths[1], models))(advantage_keys_E)
  return Heads(value, advantage, scale)


def count_progress(max_steps: int, steps: Sequence[Step]) -> Iterator[tuple[int, ...]]:
  """Count what shows whether an episode goes in circles (our choice).

  Yields:
    P numbers before each step's decision: the steps and LARGE calls so far; the most
    steps that the task allows; the steps and LARGE calls since the last new
    observation; and how many observations were not new.
  """
  seen = set()
  large_calls = 0
  for number, step in enumerate(steps):
    if step.observation not in seen:
      seen.add(step.observation)
      newest = number
      newest_calls = large_calls
    stale_calls = large_calls - newest_calls
    repeats = number + 1 - len(seen)
    yield number, large_calls, max_steps, number - newest, stale_calls, repeats
    large_calls += step.large_calls


def describe(left: jax.Array, price: jax.Array, progress: jax.Array) -> jax.Array:
  """Describe decisions under a cap and a price, beside their hidden states.

  The arguments broadcast.

  Args:
    left: LARGE calls; `MAX_CALLS` or more is no cap.
    price: up to config.MAX_PRICE; weighs dollars against the score. Their unit is the
      mean over training tasks of always-LARGE's median.
    progress: [..., P], as of `count_progress`.

  Returns:
    float32 [..., F].
  """
  xp = jnp if isinstance(left, jax.Array) else np
  step, large_calls, max_steps, stale, stale_calls, repeats = xp.moveaxis(
    progress, -1, 0
  )
  left = xp.minimum(left, MAX_CALLS)
  steps_left = xp.maximum(max_steps - step, 1)
  weight = 1 / (1 + price)
  time = step / max_steps
  facts = xp.broadcast_arrays(
    left / MAX_CALLS,
    xp.log1p(left) / 3,  # log1p(MAX_CALLS) is about 3
    xp.minimum(left / steps_left, 1.0),
    (left >= steps_left) | (left >= MAX_CALLS),
    weight,
    weight**0.5,
    time,
    time**0.5,
    large_calls / MAX_CALLS,
    xp.log1p(stale) / 3,
    xp.log1p(stale_calls) / 2,
    repeats / max_steps,
  )
  return xp.stack(facts, axis=-1).astype(np.float32)


def estimate_one(
  head: Heads, hidden_NxD: jax.Array, facts_NxF: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Estimate value_N and advantage_NxA with one head (without axis E).

  The mean of advantages over A is 0. The sum of both is Q: with a model and the best
  choices after it, the expected score times 1 / (1 + price), minus the cost until the
  end times price / (1 + price).
  """
  scaled_NxD = (hidden_NxD - head.scale.mean_D[None]) / head.scale.spread_D[None]
  x_NxI = jnp.concatenate([scaled_NxD, facts_NxF], axis=-1)
  advantage_NxA = ADVANTAGE_UNIT * _apply(head.advantage, x_NxI)
  value_N = _apply(head.value, x_NxI)[:, 0]
  return value_N, advantage_NxA - advantage_NxA.mean(axis=-1, keepdims=True)


@jax.jit
def estimate(
  heads: Heads, hidden_RxD: jax.Array, facts_RxF: jax.Array, optimism: float = 0.0
) -> tuple[jax.Array, jax.Array]:
  """Average value_R and advantage_RxA over the ensemble (see `estimate_one`).

  Each other model's advantage is raised by `optimism` standard deviations, over the
  heads, of its advantage over SMALL: it is taken unless the heads agree that it is not
  worth it (our choice).
  """
  estimate_all = jax.vmap(estimate_one, (Heads(0, 0, None), None, None))
  value_ExR, advantage_ExRxA = estimate_all(heads, hidden_RxD, facts_RxF)
  spread_RxA = jnp.std(advantage_ExRxA - advantage_ExRxA[..., :1], axis=0)
  return value_ExR.mean(axis=0), advantage_ExRxA.mean(axis=0) + optimism * spread_RxA


def count_calls_left(heads: Heads, left: Cap) -> float:
  """Count the LARGE calls that are left of a cap; inf without one.

  Left dollars buy calls at the mean price of a LARGE call in training (our choice).
  """
  calls = float("inf") if left.calls is None else left.calls
  if left.usd is None:
    return calls
  return min(calls, left.usd / float(heads.scale.large_usd))


def _apply(layers: Layers, x_NxI: jax.Array) -> jax.Array:
  """Apply a net: SiLU after each layer but the last."""
  *hidden, (weight_WxO, bias_O) = layers
  for weight_IxW, bias_W in hidden:
    x_NxI = jax.nn.silu(x_NxI @ weight_IxW + bias_W[None])
  return x_NxI @ weight_WxO + bias_O[None]
