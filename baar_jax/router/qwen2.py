"""The Qwen2 transformer in flax.nnx.

Axes: F SwiGLU's width, U key positions, M = G x T queries that share a key.
"""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx
from jax.typing import DTypeLike
from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from baar_jax.mesh import spread_rows

KEPT_SHARE = 1 / 8  # of the machine's memory, for products kept for a backward pass
KEPT_WIDTH = 128  # in a narrower model to store costs as much as to compute again
QUERIES = 128  # of one block of attention scores on a CPU
NEARNESS = 2.0  # size of the initial biases of queries and keys
# The wavelengths of the rotations that have these biases, in tokens.
SHORTEST_WAVE = 16
LONGEST_WAVE = 128


class Rotation(NamedTuple):
  """Rotary embeddings of the positions of a batch."""

  cos_BxTxH: jax.Array
  sin_BxTxH: jax.Array


class KeysValues(NamedTuple):
  """Keys and values of a layer [B, T, K, H], or of a cache [L, R, U, K, H]."""

  k: jax.Array
  v: jax.Array


@dataclass(frozen=True, config={"allow_inf_nan": False})
class Qwen2Config:
  """A plain Qwen2 under the names, and with the defaults, of Hugging Face's files."""

  vocab_size: Annotated[int, Field(gt=0, le=10**8)]
  hidden_size: Annotated[int, Field(gt=0, le=10**6)]
  intermediate_size: Annotated[int, Field(gt=0, le=10**6)]
  num_hidden_layers: Annotated[int, Field(gt=0, le=1000)]
  num_attention_heads: Annotated[int, Field(gt=0, le=10**4)]
  num_key_value_heads: Annotated[int, Field(gt=0, le=10**4)]
  head_dim: Annotated[int, Field(gt=0, le=10**4, multiple_of=2)]
  rope_theta: PositiveFloat
  rms_norm_eps: PositiveFloat = 1e-6
  tie_word_embeddings: bool = False
  # It bounds `router.max_tokens` alone.
  max_position_embeddings: PositiveInt = 32_768
  model_type: Literal["qwen2"] = "qwen2"
  hidden_act: Literal["silu"] = "silu"
  use_sliding_window: Literal[False] = False
  rope_type: Literal["default"] = "default"
  rope_scaling: None = None
  quantization_config: None = None


class Layer(nnx.Module):
  """Attention with grouped queries and biases, then SwiGLU, each behind an RMSNorm.

  A caller attends between `project` and `finish`. The parameters have the dtype of x.
  """

  def __init__(self, config: Qwen2Config, rngs: nnx.Rngs) -> None:
    D = config.hidden_size
    F = config.intermediate_size
    N = config.num_attention_heads
    K = config.num_key_value_heads
    H = config.head_dim
    near_1xH = make_near_bias(config)[None]
    even_Nx1 = jnp.arange(N)[:, None] % 2 == 0  # odd heads start without a bias
    self.input_norm = nnx.Param(jnp.ones(D))
    self.q_kernel = _draw_normal(rngs, D, N, H)
    self.q_bias = nnx.Param(jnp.where(even_Nx1, near_1xH, 0.0))
    self.k_kernel = _draw_normal(rngs, D, K, H)
    self.k_bias = nnx.Param(jnp.broadcast_to(near_1xH, (K, H)))
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
    """Compute rotated queries q_BxTxNxH and keys, and values."""
    h_BxTxD = rms_norm(x_BxTxD, self.input_norm, self.eps)
    q_BxTxNxH = _project_heads(h_BxTxD, self.q_kernel, self.q_bias)
    k_BxTxKxH = _project_heads(h_BxTxD, self.k_kernel, self.k_bias)
    v_BxTxKxH = _project_heads(h_BxTxD, self.v_kernel, self.v_bias)
    rotated = KeysValues(rotate(k_BxTxKxH, rotation), v_BxTxKxH)
    return rotate(q_BxTxNxH, rotation), rotated

  def finish(self, x_BxTxD: jax.Array, a_BxTxNxH: jax.Array) -> jax.Array:
    """Add what was attended to and the feed-forward network to the residual stream."""
    x_BxTxD += jnp.einsum("BTNH,NHD->BTD", a_BxTxNxH, self.o_kernel[...])
    h_BxTxD = rms_norm(x_BxTxD, self.post_attention_norm, self.eps)
    gate_BxTxF = jax.nn.silu(h_BxTxD @ self.gate_kernel[...])
    h_BxTxF = gate_BxTxF * (h_BxTxD @ self.up_kernel[...])
    return x_BxTxD + h_BxTxF @ self.down_kernel[...]


class Qwen2(nnx.Module):
  """Token ids -> hidden states -> logits of the tokens that are needed."""

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
    """Compute hidden_BxTxD after the final norm of whole sequences, in `dtype`.

    Sequences are padded on the right. A backward pass recomputes each layer instead of
    storing its activations. Products with weights are kept if a CPU has room.
    """
    position_1xT = jnp.arange(tokens_BxT.shape[1])[None]
    attend_all = lambda number, q, new, cache: (attend_causally(q, new), cache)  # noqa: E731
    return self._forward(tokens_BxT, position_1xT, attend_all, None, dtype)[0]

  def extend(
    self, tokens_BxT: jax.Array, start_B: jax.Array, cache: KeysValues, row_B: jax.Array
  ) -> tuple[jax.Array, KeysValues]:
    """Compute hidden_BxTxD after the final norm of new tokens, from a cache.

    Args:
      tokens_BxT: the new tokens of each sequence, padded on the right.
      start_B: how many tokens of it the cache holds already.
      cache: as of `make_cache`; its dtype is that of the computation.
      row_B: the cache's row of each sequence.

    Returns:
      hidden_BxTxD and the cache with the keys and values of the new tokens.
    """
    position_BxT = start_B[:, None] + jnp.arange(tokens_BxT.shape[1])[None]
    position_1x1xU = jnp.arange(cache.k.shape[2])[None, None]
    mask_BxTxU = position_1x1xU <= position_BxT[:, :, None]

    def attend_cached(
      number: jax.Array, q_BxTxNxH: jax.Array, new: KeysValues, cache: KeysValues
    ) -> tuple[jax.Array, KeysValues]:
      at = number, row_B[:, None], position_BxT
      write = lambda kept, x: kept.at[at].set(x, mode="drop")  # noqa: E731
      cache = jax.tree.map(write, cache, new)
      layer = jax.tree.map(lambda kept: kept[number, row_B], cache)
      return attend(q_BxTxNxH, layer, mask_BxTxU), cache

    return self._forward(tokens_BxT, position_BxT, attend_cached, cache, cache.k.dtype)

  def make_cache(
    self, rows: int, length: int, dtype: DTypeLike = jnp.float32
  ) -> KeysValues:
    """Make an empty cache for R = `rows` sequences of up to U = `length` tokens."""
    c = self.config
    shape = c.num_hidden_layers, rows, length, c.num_key_value_heads, c.head_dim
    return KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

  @property
  def token_tables(self) -> list[nnx.Param]:
    """List the parameters with a row per token: the embedding, and an untied head."""
    if self.config.tie_word_embeddings:
      return [self.embedding_VxD]
    return [self.embedding_VxD, self.head_VxD]

  def logits(self, hidden: jax.Array, token_ids: jax.Array | None = None) -> jax.Array:
    """Compute float32 logits [..., len(token_ids)] of tokens (None: of all tokens)."""
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
    """Compute hidden_BxTxD after the final norm, and the updated cache.

    `attend_layer` takes a layer's number, its q_BxTxNxH, its new keys and values, and
    the cache. It returns a_BxTxNxH and the cache.
    """
    rotation = make_rotation(self.config, position_BxT, dtype)
    graphdef, stacked = nnx.split(self.layers)

    def apply_layer(
      carry: tuple[jax.Array, KeysValues | None], inputs: tuple[jax.Array, nnx.State]
    ) -> tuple[tuple[jax.Array, KeysValues | None], None]:
      x_BxTxD, cache = carry
      number, params = inputs
      layer = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype), params))
      q_BxTxNxH, new = layer.project(x_BxTxD, rotation)
      a_BxTxNxH, cache = attend_layer(number, q_BxTxNxH, new, cache)
      return (spread_rows(layer.finish(x_BxTxD, a_BxTxNxH)), cache), None

    policy = find_kept_products(self.config, tokens_BxT.size)
    apply_layer = jax.checkpoint(apply_layer, policy=policy)
    layers = jnp.arange(self.config.num_hidden_layers), stacked
    embedded_BxTxD = self.embedding_VxD[...][tokens_BxT].astype(dtype)
    # The cache is carried and updated in place; stacking would copy all of it.
    carry = spread_rows(embedded_BxTxD), cache
    (x_BxTxD, cache), _ = jax.lax.scan(apply_layer, carry, layers)
    return rms_norm(x_BxTxD, self.final_norm, self.config.rms_norm_eps), cache


def find_kept_products(config: Qwen2Config, tokens: int) -> Callable[..., bool] | None:
  """Find the policy that keeps products with weights for a backward pass, if any.

  To store everything is no faster: layers' activations are copied into stacks.
  """
  heads = (
    2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
  )
  # The numbers of a token in a layer.
  numbers = heads + 2 * config.hidden_size + 3 * config.intermediate_size
  size = 4 * tokens * config.num_hidden_layers * numbers
  fits = size <= KEPT_SHARE * psutil.virtual_memory().total
  if fits and config.hidden_size >= KEPT_WIDTH and jax.default_backend() == "cpu":
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return None


def make_rotation(
  config: Qwen2Config, position_BxT: jax.Array, dtype: DTypeLike
) -> Rotation:
  """Compute the rotary embeddings of positions."""
  H = config.head_dim
  # Rounded as in the checkpoints' own code: at position 30,000 a last digit matters.
  wave_H2 = (config.rope_theta ** (np.arange(0, H, 2) / H)).astype(np.float32)
  position_BxTx1 = position_BxT[:, :, None].astype(jnp.float32)
  angle_BxTxH2 = position_BxTx1 * (1 / wave_H2)[None, None]
  angle_BxTxH = jnp.concatenate([angle_BxTxH2, angle_BxTxH2], axis=-1)
  return Rotation(
    jnp.cos(angle_BxTxH).astype(dtype), jnp.sin(angle_BxTxH).astype(dtype)
  )


def attend_causally(q_BxTxNxH: jax.Array, keys_values: KeysValues) -> jax.Array:
  """Attend from each position of whole sequences to those up to it, a_BxTxNxH.

  On a GPU bf16 goes through cuDNN's flash attention. On a CPU the scores of a few
  queries at a time stay in the processor's cache.
  """
  backend = jax.default_backend()
  T = q_BxTxNxH.shape[1]
  if backend != "cpu":
    flash = q_BxTxNxH.dtype == jnp.bfloat16 and q_BxTxNxH.shape[-1] % 8 == 0
    implementation = "cudnn" if backend == "gpu" and flash else "xla"
    return jax.nn.dot_product_attention(
      q_BxTxNxH, *keys_values, is_causal=True, implementation=implementation
    )
  blocks = []
  for start in range(0, T, QUERIES):
    end = min(start + QUERIES, T)
    mask_1xtxU = jnp.arange(end)[None, None] <= jnp.arange(start, end)[None, :, None]
    past = KeysValues(keys_values.k[:, :end], keys_values.v[:, :end])
    blocks.append(attend(q_BxTxNxH[:, start:end], past, mask_1xtxU))
  return jnp.concatenate(blocks, axis=1)


def attend(
  q_BxTxNxH: jax.Array, keys_values: KeysValues, mask_BxTxU: jax.Array
) -> jax.Array:
  """Attend where a mask is True, a_BxTxNxH; G = N / K queries share a key.

  On a CPU these are two matrix products for each key head, over all of its queries.
  """
  if jax.default_backend() != "cpu":
    return jax.nn.dot_product_attention(
      q_BxTxNxH, *keys_values, mask=mask_BxTxU[:, None], implementation="xla"
    )
  k_BxUxKxH, v_BxUxKxH = keys_values
  B, T, N, H = q_BxTxNxH.shape
  K = k_BxUxKxH.shape[2]
  q_BxTxKxGxH = (q_BxTxNxH * H**-0.5).reshape(B, T, K, -1, H)
  q_BxKxMxH = q_BxTxKxGxH.transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
  score_BxKxMxU = jnp.einsum("BKMH,BUKH->BKMU", q_BxKxMxH, k_BxUxKxH)
  score_BxKxGxTxU = score_BxKxMxU.astype(jnp.float32).reshape(B, K, N // K, T, -1)
  score_BxKxGxTxU = jnp.where(mask_BxTxU[:, None, None], score_BxKxGxTxU, -1e30)
  peak_BxKxGxTx1 = jax.lax.stop_gradient(score_BxKxGxTxU.max(axis=-1, keepdims=True))
  weight_BxKxGxTxU = jnp.exp(score_BxKxGxTxU - peak_BxKxGxTx1)
  total_BxKxGxTx1 = weight_BxKxGxTxU.sum(axis=-1, keepdims=True)
  weight_BxKxMxU = weight_BxKxGxTxU.astype(q_BxTxNxH.dtype).reshape(score_BxKxMxU.shape)
  sum_BxKxMxH = jnp.einsum("BKMU,BUKH->BKMH", weight_BxKxMxU, v_BxUxKxH)
  sum_BxKxGxTxH = sum_BxKxMxH.reshape(B, K, -1, T, H)
  mean_BxKxGxTxH = sum_BxKxGxTxH / total_BxKxGxTx1.astype(q_BxTxNxH.dtype)
  return mean_BxKxGxTxH.transpose(0, 3, 1, 2, 4).reshape(q_BxTxNxH.shape)


def make_near_bias(config: Qwen2Config) -> jax.Array:
  """Make bias_H of queries and keys that favours near tokens at the start (our choice).

  Once rotated, it adds a score that depends on the distance alone. Narrow models learn
  faster with it.
  """
  H = config.head_dim
  exponent_H2 = jnp.arange(0, H, 2, dtype=jnp.float32) / H
  wave_H2 = 2 * jnp.pi * config.rope_theta**exponent_H2
  near_H2 = (wave_H2 >= SHORTEST_WAVE) & (wave_H2 <= LONGEST_WAVE)
  return jnp.tile(NEARNESS * near_H2.astype(jnp.float32), 2)


def rotate(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
  """Rotate x by its positions, halves paired as Hugging Face checkpoints have them."""
  first, second = jnp.split(x_BxTxNxH, 2, axis=-1)
  turned_BxTxNxH = jnp.concatenate([-second, first], axis=-1)
  cos_BxTx1xH = rotation.cos_BxTxH[:, :, None]
  sin_BxTx1xH = rotation.sin_BxTxH[:, :, None]
  return x_BxTxNxH * cos_BxTx1xH + turned_BxTxNxH * sin_BxTx1xH


def rms_norm(x_BxTxD: jax.Array, scale_D: nnx.Param, eps: float) -> jax.Array:
  """Divide x by its root mean square, in float32, and multiply it by a scale."""
  x32_BxTxD = x_BxTxD.astype(jnp.float32)
  scale_BxTx1 = jax.lax.rsqrt(jnp.mean(x32_BxTxD**2, axis=-1, keepdims=True) + eps)
  normal_BxTxD = (x32_BxTxD * scale_BxTx1).astype(x_BxTxD.dtype)
  return normal_BxTxD * scale_D[...].astype(x_BxTxD.dtype)[None, None]


def _project_heads(h_BxTxD: jax.Array, kernel: nnx.Param, bias: nnx.Param) -> jax.Array:
  return jnp.einsum("BTD,DNH->BTNH", h_BxTxD, kernel[...]) + bias[...][None, None]


def _draw_normal(rngs: nnx.Rngs, *shape: int, fan_in: int = 0) -> nnx.Param:
  """Draw weights that keep the scale of their input, for narrow models (our choice)."""
  fan_in = fan_in or shape[0]
  return nnx.Param(fan_in**-0.5 * jax.random.normal(rngs.params(), shape))


def check_finite(numbers: np.ndarray, name: str) -> None:
  """Check that numbers are finite: of others a router would take SMALL in silence.

  Raises:
    ValueError: a number is infinite or NaN; it says of what by `name`.
  """
  if not np.isfinite(numbers).all():
    raise ValueError(f"{name}: all numbers must be finite")


def softmax(logits_RxA: np.ndarray, name: str) -> np.ndarray:
  """Compute p_RxA in float64.

  Raises:
    ValueError: a logit is infinite or NaN; it says of what by `name`.
  """
  check_finite(logits_RxA, f"logits of {name}")
  logits_RxA = logits_RxA.astype(np.float64)
  weight_RxA = np.exp(logits_RxA - logits_RxA.max(axis=1, keepdims=True))
  return weight_RxA / weight_RxA.sum(axis=1, keepdims=True)
