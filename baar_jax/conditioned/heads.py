"""Compute the models' values from a state, the budget and the cost weight.

The value heads are an ensemble; a decision averages their outputs. A state does not
depend on the budget, so one state serves every budget (our choice, see
docs/evaluation.md).

Axes: E heads, N decisions, D features of a state, T terms of `describe`, I inputs of a
layer (D + T in the first layer), P counts of `Tracker.progress`, W width of a layer.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.llms.prices import TINY_USD, Outlook
from baar_jax.rollout.specs import Cap
from baar_jax.router.inputs import TERMS
from baar_jax.router.network import Layers, apply_layers

# The advantage network's output is multiplied by this constant, because advantages are
# smaller than values (our choice).
ADVANTAGE_UNIT = 0.3


class Heads(NamedTuple):
  """The parameters of an ensemble of E value heads.

  Attributes:
    value: the networks of the value.
    advantage: the networks of the advantages.
  """

  value: Layers
  advantage: Layers


def draw_heads(
  key: jax.Array, count: int, widths: tuple[int, int], models: int, features: int
) -> Heads:
  """Draw the random initial parameters of an ensemble of value heads.

  The last layers are 0, so every value and every advantage starts at 0.

  Args:
    key: a JAX random key.
    count: number of heads, E.
    widths: widths of the value network and of the advantage network.
    models: number of models, A.
    features: number of features of a state, D.
  """
  inputs = features + TERMS

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
  return Heads(value, advantage)


def estimate_each(
  heads: Heads, features_NxD: jax.Array, terms_NxT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Compute values and advantages of decisions with each head.

  Value plus advantage is the Q value of a model: the expected return if this model acts
  now and the best allowed models act later. With the cost weight w the return is
  gain / (1 + w) - cost * w / (1 + w). The gain of score and the cost in normalised
  dollars count from this decision to the end of the episode.

  Args:
    heads: an ensemble, or one head without the axis E. NumPy arrays give NumPy arrays.
    features_NxD: the standardised features of the decisions' states.
    terms_NxT: the result of `describe`.

  Returns:
    value_ExN, and advantage_ExNxA with mean 0 over A; for one head without E.
  """
  xp = jnp if isinstance(features_NxD, jax.Array) else np
  x_NxI = xp.concatenate([features_NxD, terms_NxT], axis=-1)
  advantage_ExNxA = ADVANTAGE_UNIT * apply_layers(heads.advantage, x_NxI, xp)
  value_ExN = apply_layers(heads.value, x_NxI, xp)[..., 0]
  return value_ExN, advantage_ExNxA - advantage_ExNxA.mean(axis=-1, keepdims=True)


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
