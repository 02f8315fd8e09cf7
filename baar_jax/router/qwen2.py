"""Compute the Qwen2 transformer in flax.nnx.

Axes: F width of SwiGLU, U key positions, G query heads that share a key head,
M = G x T queries of one key head.
"""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from baar_jax.mesh import spread_rows


class Rotation(NamedTuple):
  """Cosines and sines of the rotary embeddings of a batch's positions."""

  cos_BxTxH: jax.Array
  sin_BxTxH: jax.Array


class KeysValues(NamedTuple):
  """The keys and the values of attention.

  Attributes:
    k: Keys of a layer, [B, T, K, H], or of a KV cache, [L, R, U, K, H].
    v: Values, of the same shape.
  """

  k: jax.Array
  v: jax.Array


@dataclass(frozen=True, config={"allow_inf_nan": False})
class Qwen2Config:
  """The shape of a plain Qwen2, as Hugging Face's config.json states it.

  Names and defaults are Hugging Face's. A field of type Literal or None allows only one
  value. Other values mark variants of Qwen2, which are refused.
  """

  vocab_size: PositiveInt
  hidden_size: PositiveInt
  intermediate_size: PositiveInt
  num_hidden_layers: PositiveInt
  num_attention_heads: PositiveInt
  num_key_value_heads: PositiveInt
  head_dim: Annotated[PositiveInt, Field(multiple_of=2)]
  rope_theta: PositiveFloat = 10_000.0
  rms_norm_eps: PositiveFloat = 1e-6
  tie_word_embeddings: bool = False
  # This field only limits --config.router.max_tokens; the computation does not read it.
  max_position_embeddings: PositiveInt = 32_768
  model_type: Literal["qwen2"] = "qwen2"
  hidden_act: Literal["silu"] = "silu"
  use_sliding_window: Literal[False] = False
  rope_type: Literal["default"] = "default"
  rope_scaling: None = None
  quantization_config: None = None


class Layer(nnx.Module):
  """A layer: grouped-query attention, then SwiGLU, with an RMSNorm before each.

  The caller computes the attention between `project` and `finish`. The parameters must
  have the dtype of the input x.
  """

  def __init__(self, config: Qwen2Config, rngs: nnx.Rngs) -> None:
    D = config.hidden_size
    F = config.intermediate_size
    N = config.num_attention_heads
    K = config.num_key_value_heads
    H = config.head_dim
    self.input_norm = nnx.Param(jnp.ones(D))
    self.q_kernel = _draw_normal(rngs, D, N, H)
    self.q_bias = nnx.Param(jnp.zeros((N, H)))
    self.k_kernel = _draw_normal(rngs, D, K, H)
    self.k_bias = nnx.Param(jnp.zeros((K, H)))
    self.v_kernel = _draw_normal(rngs, D, K, H)
    self.v_bias = nnx.Param(jnp.zeros((K, H)))
    self.o_kernel = _draw_normal(rngs, N, H, D, fan_in=N * H)
    self.post_attention_norm = nnx.Param(jnp.ones(D))
    self.gate_kernel = _draw_normal(rngs, D, F)
    self.up_kernel = _draw_normal(rngs, D, F)
    self.down_kernel = _draw_normal(rngs, F, D)
    self.eps = config.rms_norm_eps

  def project(
    self, x_BxTxD: jax.Array, rotation: Rotation
  ) -> tuple[jax.Array, KeysValues]:
    """Compute the rotated queries, the rotated keys, and the values of positions.

    The keys are reduced by their bias.

    Returns:
      q_BxTxNxH, and keys and values [B, T, K, H].
    """
    h_BxTxD = rms_norm(x_BxTxD, self.input_norm, self.eps)
    q_BxTxNxH = _project_heads(h_BxTxD, self.q_kernel, self.q_bias)
    k_BxTxKxH = _project_heads(h_BxTxD, self.k_kernel, self.k_bias)
    v_BxTxKxH = _project_heads(h_BxTxD, self.v_kernel, self.v_bias)
    # Attention does not change if all keys lose the same numbers. Qwen2.5's biases are
    # above 100 where the rotation is slow. Without them bfloat16 rounds the keys less:
    # scores near 1,000 were wrong by several units.
    k_BxTxKxH = rotate(k_BxTxKxH, rotation) - self.k_bias[...][None, None]
    new = KeysValues(k_BxTxKxH.astype(x_BxTxD.dtype), v_BxTxKxH.astype(x_BxTxD.dtype))
    return rotate(q_BxTxNxH, rotation).astype(x_BxTxD.dtype), new

  def finish(self, x_BxTxD: jax.Array, a_BxTxNxH: jax.Array) -> jax.Array:
    """Add the attention's output and SwiGLU's output to the residual stream.

    Args:
      x_BxTxD: the residual stream before the layer.
      a_BxTxNxH: the attention's result, a weighted mean of values for each query.

    Returns:
      The residual stream after the layer, [B, T, D].
    """
    x_BxTxD += jnp.einsum("BTNH,NHD->BTD", a_BxTxNxH, self.o_kernel[...])
    h_BxTxD = rms_norm(x_BxTxD, self.post_attention_norm, self.eps)
    gate_BxTxF = jax.nn.silu(h_BxTxD @ self.gate_kernel[...])
    h_BxTxF = gate_BxTxF * (h_BxTxD @ self.up_kernel[...])
    return x_BxTxD + h_BxTxF @ self.down_kernel[...]


class Qwen2(nnx.Module):
  """Compute hidden states from token ids, and logits from hidden states."""

  def __init__(self, config: Qwen2Config, rngs: nnx.Rngs) -> None:
    self.config = config
    V = config.vocab_size
    D = config.hidden_size
    self.embedding_VxD = _draw_normal(rngs, V, D, fan_in=D)
    self.final_norm = nnx.Param(jnp.ones(D))
    if not config.tie_word_embeddings:
      self.head_VxD = _draw_normal(rngs, V, D, fan_in=D)
    stack = nnx.vmap(lambda rngs: Layer(config, rngs))
    self.layers = nnx.split_rngs(splits=config.num_hidden_layers)(stack)(rngs)

  def __call__(
    self, tokens_BxT: jax.Array, dtype: DTypeLike = jnp.float32
  ) -> jax.Array:
    """Compute the hidden states of whole sequences after the final norm.

    A backward pass recomputes each layer instead of storing its activations.

    Args:
      tokens_BxT: int, token ids, padded on the right.
      dtype: dtype of the computation.

    Returns:
      hidden_BxTxD in `dtype`.
    """
    position_1xT = jnp.arange(tokens_BxT.shape[1])[None]
    attend_all = lambda number, q, new, cache: (attend_causally(q, new), cache)  # noqa: E731
    return self._forward(tokens_BxT, position_1xT, attend_all, None, dtype)[0]

  def extend(
    self, tokens_BxT: jax.Array, start_B: jax.Array, cache: KeysValues, row_B: jax.Array
  ) -> tuple[jax.Array, KeysValues]:
    """Compute the hidden states of new tokens after the final norm, with a KV cache.

    Args:
      tokens_BxT: int, the new tokens of each sequence, padded on the right.
      start_B: int, number of the sequence's tokens that the cache already holds.
      cache: a KV cache from `make_cache`; its dtype is the dtype of the computation.
      row_B: int, the cache's row of each sequence.

    Returns:
      hidden_BxTxD, and the cache with the keys and values of the new tokens added.
    """
    position_BxT = start_B[:, None] + jnp.arange(tokens_BxT.shape[1])[None]
    position_1x1xU = jnp.arange(cache.k.shape[2])[None, None]
    mask_BxTxU = position_1x1xU <= position_BxT[:, :, None]

    def attend_cached(
      number: jax.Array, q_BxTxNxH: jax.Array, new: KeysValues, cache: KeysValues
    ) -> tuple[jax.Array, KeysValues]:
      """Write a layer's new keys and values into the cache, and compute attention.

      Args:
        number: index of the layer.
        q_BxTxNxH: the layer's queries.
        new: the layer's keys and values of the new tokens.
        cache: the KV cache of all layers.
      """
      index = number, row_B[:, None], position_BxT
      write = lambda cached, x: cached.at[index].set(x, mode="drop")  # noqa: E731
      cache = jax.tree.map(write, cache, new)
      layer = jax.tree.map(lambda cached: cached[number, row_B], cache)
      a_BxTxNxH = jax.nn.dot_product_attention(
        q_BxTxNxH, *layer, mask=mask_BxTxU[:, None], implementation="xla"
      )
      return a_BxTxNxH, cache

    return self._forward(tokens_BxT, position_BxT, attend_cached, cache, cache.k.dtype)

  def make_cache(
    self, rows: int, length: int, dtype: DTypeLike = jnp.float32
  ) -> KeysValues:
    """Make an empty KV cache.

    Args:
      rows: number of sequences, R.
      length: largest number of tokens of a sequence, U.
      dtype: dtype of keys and values.
    """
    c = self.config
    shape = c.num_hidden_layers, rows, length, c.num_key_value_heads, c.head_dim
    return KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

  @property
  def token_tables(self) -> list[nnx.Param]:
    """Return the parameters that have a row for each token of the vocabulary.

    These are the embedding and, unless it is tied to the embedding, the output head.
    """
    if self.config.tie_word_embeddings:
      return [self.embedding_VxD]
    return [self.embedding_VxD, self.head_VxD]

  def logits(self, hidden: jax.Array, token_ids: jax.Array | None = None) -> jax.Array:
    """Compute the float32 logits of some tokens from hidden states.

    Args:
      hidden: [..., D], hidden states after the final norm.
      token_ids: int, ids of A tokens; None is the whole vocabulary.

    Returns:
      Logits [..., A].
    """
    head_AxD = self.token_tables[-1][...]
    if token_ids is not None:
      head_AxD = head_AxD[token_ids]
    hidden = hidden.astype(jnp.float32)
    return jnp.einsum("...D,AD->...A", hidden, head_AxD.astype(jnp.float32))

  def _forward(
    self,
    tokens_BxT: jax.Array,
    position_BxT: jax.Array,
    attend_layer: Callable[..., tuple[jax.Array, KeysValues | None]],
    cache: KeysValues | None,
    dtype: DTypeLike,
  ) -> tuple[jax.Array, KeysValues | None]:
    """Compute the hidden states of tokens after the final norm.

    Args:
      tokens_BxT: int, token ids.
      position_BxT: int, the position of each token in its sequence; B may be 1.
      attend_layer: takes a layer's number, its q_BxTxNxH, its new keys and values, and
        the KV cache; returns a_BxTxNxH and the updated cache.
      cache: a KV cache, or None without one.
      dtype: dtype of the computation.

    Returns:
      hidden_BxTxD, and the updated cache.
    """
    rotation = make_rotation(self.config, position_BxT)
    graphdef, stacked = nnx.split(self.layers)

    def apply_layer(
      carry: tuple[jax.Array, KeysValues | None], inputs: tuple[jax.Array, nnx.State]
    ) -> tuple[tuple[jax.Array, KeysValues | None], None]:
      """Apply one layer to the residual stream, as a step of `jax.lax.scan`.

      Args:
        carry: the residual stream before the layer, and the KV cache.
        inputs: the index of the layer, and its parameters.
      """
      x_BxTxD, cache = carry
      number, params = inputs
      layer = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype), params))
      q_BxTxNxH, new = layer.project(x_BxTxD, rotation)
      a_BxTxNxH, cache = attend_layer(number, q_BxTxNxH, new, cache)
      return (spread_rows(layer.finish(x_BxTxD, a_BxTxNxH)), cache), None

    layers = jnp.arange(self.config.num_hidden_layers), stacked
    embedded_BxTxD = self.embedding_VxD[...][tokens_BxT].astype(dtype)
    # The scan carries the KV cache, so JAX updates the cache in place. If each step of
    # the scan returned the cache as an output, JAX would copy the whole cache.
    carry = spread_rows(embedded_BxTxD), cache
    (x_BxTxD, cache), _ = jax.lax.scan(jax.checkpoint(apply_layer), carry, layers)
    return rms_norm(x_BxTxD, self.final_norm, self.config.rms_norm_eps), cache


def make_rotation(config: Qwen2Config, position_BxT: jax.Array) -> Rotation:
  """Compute the float32 cosines and sines of the rotary embeddings of positions.

  Args:
    config: supplies the width of a head and the base of the wavelengths.
    position_BxT: int, the position of each token in its sequence.
  """
  H = config.head_dim
  # The package transformers also rounds the wavelengths to float32. At position 30,000
  # the last digit of a wavelength changes the result.
  wave_H2 = (config.rope_theta ** (np.arange(0, H, 2) / H)).astype(np.float32)
  position_BxTx1 = position_BxT[:, :, None].astype(jnp.float32)
  angle_BxTxH2 = position_BxTx1 * (1 / wave_H2)[None, None]
  angle_BxTxH = jnp.concatenate([angle_BxTxH2, angle_BxTxH2], axis=-1)
  return Rotation(jnp.cos(angle_BxTxH), jnp.sin(angle_BxTxH))


def attend_causally(q_BxTxNxH: jax.Array, keys_values: KeysValues) -> jax.Array:
  """Compute causal attention in whole sequences.

  A GPU computes bfloat16 with cuDNN's flash attention.

  Args:
    q_BxTxNxH: rotated queries; G = N / K query heads share a key head.
    keys_values: rotated keys, and values, [B, T, K, H].

  Returns:
    a_BxTxNxH, a weighted mean of values for each query.
  """
  is_gpu = jax.default_backend() == "gpu"
  flash = q_BxTxNxH.dtype == jnp.bfloat16 and q_BxTxNxH.shape[-1] % 8 == 0
  implementation = "cudnn" if is_gpu and flash else "xla"
  return jax.nn.dot_product_attention(
    q_BxTxNxH, *keys_values, is_causal=True, implementation=implementation
  )


def rotate(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
  """Apply rotary embeddings to queries or keys.

  Coordinate i is paired with coordinate i + H / 2, as in Hugging Face's checkpoints.
  """
  first, second = jnp.split(x_BxTxNxH, 2, axis=-1)
  turned_BxTxNxH = jnp.concatenate([-second, first], axis=-1)
  cos_BxTx1xH = rotation.cos_BxTxH[:, :, None]
  sin_BxTx1xH = rotation.sin_BxTxH[:, :, None]
  return x_BxTxNxH * cos_BxTx1xH + turned_BxTxNxH * sin_BxTx1xH


def rms_norm(x_BxTxD: jax.Array, scale_D: nnx.Param, eps: float) -> jax.Array:
  """Divide x by its root mean square over D, and multiply it by a scale.

  The division is computed in float32. The result has the dtype of x.

  Args:
    x_BxTxD: the numbers to normalise.
    scale_D: the learned scale of each coordinate.
    eps: added to the mean square before the root.
  """
  x32_BxTxD = x_BxTxD.astype(jnp.float32)
  scale_BxTx1 = jax.lax.rsqrt(jnp.mean(x32_BxTxD**2, axis=-1, keepdims=True) + eps)
  normal_BxTxD = (x32_BxTxD * scale_BxTx1).astype(x_BxTxD.dtype)
  return normal_BxTxD * scale_D[...].astype(x_BxTxD.dtype)[None, None]


def _project_heads(h_BxTxD: jax.Array, kernel: nnx.Param, bias: nnx.Param) -> jax.Array:
  """Compute the float32 queries, keys or values of all heads, [B, T, N, H]."""
  product_BxTxNxH = jnp.einsum("BTD,DNH->BTNH", h_BxTxD, kernel[...])
  return product_BxTxNxH.astype(jnp.float32) + bias[...][None, None]


def _draw_normal(rngs: nnx.Rngs, *shape: int, fan_in: int = 0) -> nnx.Param:
  """Draw normal weights with standard deviation fan_in ** -0.5 (our choice).

  Args:
    rngs: the source of random keys.
    shape: the shape of the weights.
    fan_in: number of inputs that each output adds up; 0 takes the first axis of the
      shape.
  """
  fan_in = fan_in or shape[0]
  return nnx.Param(fan_in**-0.5 * jax.random.normal(rngs.params(), shape))


def check_finite(numbers: np.ndarray, name: str) -> None:
  """Require finite numbers in an array.

  Without this check, a router with a NaN would call SMALL at every step.

  Args:
    numbers: an array of any shape.
    name: name of the array, for the error message.

  Raises:
    ValueError: a number is infinite or NaN.
  """
  if not np.isfinite(numbers).all():
    raise ValueError(
      f"Found an infinite number or a NaN in {name}, expected finite numbers."
      " Restore the weights, or train again with a lower learning rate."
    )


def softmax(logits_RxA: np.ndarray, name: str) -> np.ndarray:
  """Compute the probabilities of models from their logits, in float64.

  Args:
    logits_RxA: the logits of A models for R decisions.
    name: name of the policy, for the error message.

  Returns:
    p_RxA; each row adds up to 1.

  Raises:
    ValueError: a logit is infinite or NaN.
  """
  check_finite(logits_RxA, f"logits of {name}")
  logits_RxA = logits_RxA.astype(np.float64)
  weight_RxA = np.exp(logits_RxA - logits_RxA.max(axis=1, keepdims=True))
  return weight_RxA / weight_RxA.sum(axis=1, keepdims=True)
