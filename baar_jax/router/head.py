"""Compute the models' values from a hidden state, the budget and the cost weight.

The value heads are an ensemble behind a frozen trunk; their outputs are averaged. The
trunk does not read the budget, so one forward pass of an episode serves every budget
(our choice, see docs/evaluation.md).

Axes: E heads, N decisions, F facts of `describe`, I inputs of a layer (D + F in the
first layer), P counts of `count_progress`, W width of a layer.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.episode import Step
from baar_jax.llms.prices import TINY_USD, Outlook
from baar_jax.rollout.specs import Cap

# The heads treat this number of remaining LARGE calls, or a larger one, as no cap.
MAX_CALLS = 20
FACTS = 12  # number of facts about a decision that `describe` computes
# The advantage network's output is multiplied by this constant, because advantages are
# smaller than values (our choice).
ADVANTAGE_UNIT = 0.3

# A network of all E heads: (weight_ExIxW, bias_ExW) of each layer. A network of one
# head lacks the axis E.
Layers = Sequence[tuple[jax.Array, jax.Array]]


class Scale(NamedTuple):
  """Statistics of the training episodes, for hidden states, dollars and forecasts.

  Attributes:
    mean_D: Mean of the hidden states.
    spread_D: Standard deviation of the hidden states, per coordinate.
    unit_usd: US dollars of one normalised dollar.
    opening_tokens: Mean tokens of an episode's first prompt.
    reply_tokens: Mean tokens of a reply.
  """

  mean_D: np.ndarray
  spread_D: np.ndarray
  unit_usd: np.ndarray
  opening_tokens: np.ndarray
  reply_tokens: np.ndarray


class Heads(NamedTuple):
  """The parameters of an ensemble of E value heads.

  Attributes:
    value: Layers of the network that computes the value of a decision, for each head.
    advantage: Layers of the network that computes the models' advantages, for each
      head.
    scale: Statistics that normalise the inputs, common to all heads.
  """

  value: Layers
  advantage: Layers
  scale: Scale


def draw_heads(
  key: jax.Array, count: int, widths: tuple[int, int], models: int, scale: Scale
) -> Heads:
  """Draw the random initial parameters of an ensemble of value heads.

  The last layers are 0, so every value and every advantage starts at 0.

  Args:
    key: a JAX random key.
    count: number of heads, E.
    widths: widths of the value network and of the advantage network.
    models: number of models, A.
    scale: statistics that normalise the inputs.
  """
  inputs = len(scale.mean_D) + FACTS

  def draw(width: int, outputs: int, key: jax.Array) -> list:
    """Draw the layers of one network of one head: two of `width`, then the output.

    Args:
      width: width of the two hidden layers.
      outputs: number of outputs of the network.
      key: a JAX random key.
    """
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
  """Count progress and repetition before each decision of an episode (our choice).

  Args:
    max_steps: the step limit of the task.
    steps: the episode's steps; only the observation of the last step is read.

  Yields:
    For each step a tuple of P = 6 counts: earlier steps; earlier LARGE calls;
    `max_steps`; steps since the last new observation; LARGE calls since the last new
    observation; observations up to this step that repeat an earlier one.
  """
  observations = set()
  large_calls = 0
  for index, step in enumerate(steps):
    if step.observation not in observations:
      observations.add(step.observation)
      newest = index
      newest_calls = large_calls
    stale_calls = large_calls - newest_calls
    repeats = index + 1 - len(observations)
    yield index, large_calls, max_steps, index - newest, stale_calls, repeats
    large_calls += step.large_calls


def describe(
  calls_left: jax.Array, cost_weight: jax.Array, progress: jax.Array
) -> jax.Array:
  """Compute the facts that the value heads read beside the hidden states.

  The facts describe the remaining cap, the cost weight and the episode's progress. The
  leading axes of the arguments broadcast. NumPy arrays give a NumPy array.

  Args:
    calls_left: LARGE calls that the cap still allows; `MAX_CALLS` or more is no cap.
    cost_weight: units of score that one normalised dollar costs. A normalised dollar is
      the mean over training tasks of always-LARGE's median cost.
    progress: [..., P], the counts of `count_progress`.

  Returns:
    float32 [..., F], F = FACTS, scaled to about [0, 1] (our choice).
  """
  xp = jnp if isinstance(calls_left, jax.Array) else np
  step, large_calls, max_steps, stale, stale_calls, repeats = xp.moveaxis(
    progress, -1, 0
  )
  calls_left = xp.minimum(calls_left, MAX_CALLS)
  steps_left = xp.maximum(max_steps - step, 1)
  weight = 1 / (1 + cost_weight)
  time = step / max_steps
  facts = xp.broadcast_arrays(
    calls_left / MAX_CALLS,
    # log(1 + MAX_CALLS) is about 3, so this fact is at most about 1.
    xp.log1p(calls_left) / 3,
    xp.minimum(calls_left / steps_left, 1.0),
    (calls_left >= steps_left) | (calls_left >= MAX_CALLS),
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
  """Compute value_N and advantage_NxA of decisions with one head of the ensemble.

  Value plus advantage is the Q value of a model: the expected return if this model acts
  now and the best allowed models act later. With the cost weight w the return is
  gain / (1 + w) - cost * w / (1 + w). The gain of score and the cost in normalised
  dollars count from this decision to the end of the episode.

  Args:
    head: the parameters of one head, without the axis E.
    hidden_NxD: the hidden states at the decisions.
    facts_NxF: the result of `describe`.

  Returns:
    value_N, and advantage_NxA with mean 0 over A.
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
  """Average values and advantages over the ensemble, and add the optimism.

  Optimism raises the advantage of each model costlier than SMALL. Then a costlier model
  acts unless the heads agree that this model is not worth its cost (our choice).

  Args:
    heads: the ensemble.
    hidden_RxD: the hidden states at R decisions.
    facts_RxF: the result of `describe`.
    optimism: number of ensemble standard deviations to add. The standard deviation is
      over the heads' differences between the model's advantage and SMALL's.

  Returns:
    value_R and advantage_RxA, as `estimate_one` defines them.
  """
  estimate_all = jax.vmap(estimate_one, (Heads(0, 0, None), None, None))
  value_ExR, advantage_ExRxA = estimate_all(heads, hidden_RxD, facts_RxF)
  spread_RxA = jnp.std(advantage_ExRxA - advantage_ExRxA[..., :1], axis=0)
  return value_ExR.mean(axis=0), advantage_ExRxA.mean(axis=0) + optimism * spread_RxA


def count_calls_left(left: Cap, outlook: Outlook) -> float:
  """Count the LARGE calls that a remaining cap allows.

  Dollars pay for a call only if they cover its dollars with a cold prompt. Its expected
  dollars are then spent, and the calls after it are expected to cost what a repeated
  call costs (our choice). Between two whole calls the count is interpolated. If calls
  and dollars are both capped, the smaller count is returned.

  Args:
    left: the cap that remains for the rest of the episode.
    outlook: the forecast of LARGE's next call.

  Returns:
    The count; infinity without a cap.
  """
  calls = float("inf") if left.calls is None else left.calls
  if left.usd is None:
    return calls
  if left.usd < outlook.cold_usd:
    return 0.0
  spare_usd = left.usd - outlook.usd - outlook.cold_usd
  repeats = 1 + spare_usd / max(outlook.repeat_usd, TINY_USD)
  return min(calls, 1 + max(0.0, repeats))


def _apply(layers: Layers, x_NxI: jax.Array) -> jax.Array:
  """Apply one network of one value head, with SiLU after all layers but the last."""
  *hidden, (weight_WxO, bias_O) = layers
  for weight_IxW, bias_W in hidden:
    x_NxI = jax.nn.silu(x_NxI @ weight_IxW + bias_W[None])
  return x_NxI @ weight_WxO + bias_O[None]
