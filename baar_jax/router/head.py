"""The decision head: a router's hidden state, and what is left of a budget -> values of models.

One forward pass of an episode serves every budget (our choice, see docs/evaluation.md). Several
heads vote: their mean counts. Axes: E heads, N decisions, I inputs (D and F), F facts, P numbers
of `count_progress`, W width.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.episode import Step
from baar_jax.rollout.specs import Cap

MAX_CALLS = 20  # with so many LARGE calls left, or more, there is no cap
FACTS = 12  # that `describe` gives
ADVANTAGE_UNIT = 0.3  # an advantage is small beside a value: its net starts on a scale of its own


class Heads(NamedTuple):
  """Parameters of E heads with a common scale: of each a net of values and one of advantages."""

  value: Sequence[tuple[jax.Array, jax.Array]]  # (weight_ExIxW, bias_ExW) of each layer
  advantage: Sequence[tuple[jax.Array, jax.Array]]
  mean_D: np.ndarray  # of the hidden states that they have learned from
  spread_D: np.ndarray
  large_usd: np.ndarray  # mean dollars of the dearest model's calls, as which dollars left count


def draw_heads(key, count: int, widths: tuple[int, int], models: int, scale: tuple) -> Heads:
  """`count` heads of random weights, which value everything at 0; `scale` are the other fields."""

  def draw(width: int, outputs: int, key) -> list:
    sizes, keys = [len(scale[0]) + FACTS, width, width, outputs], jax.random.split(key, 3)
    shapes = zip(keys, sizes, sizes[1:])
    layers = [(jax.random.normal(k, (i, o)) * i**-0.5, jnp.zeros(o)) for k, i, o in shapes]
    return [*layers[:-1], jax.tree.map(jnp.zeros_like, layers[-1])]

  value_keys_E, advantage_keys_E = jax.random.split(key, (2, count))
  value = jax.vmap(partial(draw, widths[0], 1))(value_keys_E)
  return Heads(value, jax.vmap(partial(draw, widths[1], models))(advantage_keys_E), *scale)


def count_progress(max_steps: int, steps: Iterable[Step]) -> Iterator[tuple[int, ...]]:
  """P numbers before each step's decision, which show whether an episode goes in circles (our
  choice).

  The steps so far, their LARGE calls, the most steps that the task allows; steps and LARGE calls
  since the last observation that was new; and how many observations were not new.
  """
  seen, large_calls = set(), 0
  for number, step in enumerate(steps):
    if step.observation not in seen:
      seen.add(step.observation)
      newest = number, large_calls
    since = number - newest[0], large_calls - newest[1]
    yield number, large_calls, max_steps, *since, number + 1 - len(seen)
    large_calls += step.large_calls


def describe(left, price, progress):
  """What a head reads beside the hidden state, float32 [..., F]; all arguments broadcast.

  `left` are LARGE calls (`MAX_CALLS` or more is no cap); `price`, up to config.MAX_PRICE, weighs
  dollars, in units of the mean over training tasks of always-LARGE's median, against the score;
  `progress` [..., P] is as of `count_progress`.
  """
  xp = jnp if isinstance(left, jax.Array) else np
  step, large_calls, max_steps, stale, stale_large, repeats = xp.moveaxis(progress, -1, 0)
  left, steps_left = xp.minimum(left, MAX_CALLS), xp.maximum(max_steps - step, 1)
  weight, time = 1 / (1 + price), step / max_steps
  # log1p(MAX_CALLS) is about 3.
  facts = [left / MAX_CALLS, xp.log1p(left) / 3, xp.minimum(left / steps_left, 1.0)]
  facts += [(left >= steps_left) | (left >= MAX_CALLS), weight, weight**0.5]
  facts += [time, time**0.5, large_calls / MAX_CALLS]
  facts += [xp.log1p(stale) / 3, xp.log1p(stale_large) / 2, repeats / max_steps]
  return xp.stack(xp.broadcast_arrays(*facts), axis=-1).astype(np.float32)


def estimate_one(head: Heads, hidden_NxD, facts_NxF):
  """value_N and advantage_NxA, whose mean over A is 0, of one head (without axis E).

  Their sum, Q, is the score that is expected with a model and the best choices after it, times
  1 / (1 + price), minus the cost until the end times price / (1 + price).
  """
  hidden_NxD = (hidden_NxD - head.mean_D[None]) / head.spread_D[None]
  x_NxI = jnp.concatenate([hidden_NxD, facts_NxF], axis=-1)
  advantage_NxA = ADVANTAGE_UNIT * _apply(head.advantage, x_NxI)
  return _apply(head.value, x_NxI)[:, 0], advantage_NxA - advantage_NxA.mean(axis=-1, keepdims=True)


@jax.jit
def estimate(heads: Heads, hidden_RxD, facts_RxF, bold=0.0):
  """value_R and advantage_RxA: the means of all heads (see `estimate_one`).

  A dearer model's is raised by `bold` standard deviations, over the heads, of what it has over
  SMALL: it is taken unless the heads agree that it is not worth it (our choice).
  """
  vote = jax.vmap(estimate_one, (Heads(0, 0, None, None, None), None, None))
  value_ExR, advantage_ExRxA = vote(heads, hidden_RxD, facts_RxF)
  spread_RxA = jnp.std(advantage_ExRxA - advantage_ExRxA[..., :1], axis=0)
  return value_ExR.mean(axis=0), advantage_ExRxA.mean(axis=0) + bold * spread_RxA


def count_calls_left(heads: Heads, cap: Cap) -> float:
  """LARGE calls that are left: the fewer of a cap on calls, and of one on dollars at the mean price
  of a LARGE call in training (our choice); inf without a cap."""
  left = float("inf") if cap.calls is None else cap.calls
  return left if cap.usd is None else min(left, cap.usd / float(heads.large_usd))


def _apply(layers, x_NxI):
  for weight_IxW, bias_W in layers[:-1]:
    x_NxI = jax.nn.silu(x_NxI @ weight_IxW + bias_W[None])
  weight_IxW, bias_W = layers[-1]
  return x_NxI @ weight_IxW + bias_W[None]
