"""The Qwen2 transformer in flax.nnx. Axes: F SwiGLU's width, U key positions, M = G x T queries."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx
from pydantic import Field
from pydantic.dataclasses import dataclass

from baar_jax.mesh import spread_rows

KEPT_SHARE = 1 / 8  # of the machine's memory, that products may take until a backward pass
KEPT_WIDTH = 128  # in a narrower model storing them costs as much as computing them again
QUERIES = 128  # of one block of attention scores on a CPU
NEARNESS = 2.0  # size of the initial biases of queries and keys
NEAR_TOKENS = 16, 128  # shortest and longest wavelength of the rotations that have them


@dataclass(frozen=True, config={"allow_inf_nan": False})
class Qwen2Config:
  """A plain Qwen2 under the names, and with the defaults, of a Hugging Face `config.json`."""

  vocab_size: int = Field(gt=0, le=10**8)
  hidden_size: int = Field(gt=0, le=10**6)
  intermediate_size: int = Field(gt=0, le=10**6)
  num_hidden_layers: int = Field(gt=0, le=1000)
  num_attention_heads: int = Field(gt=0, le=10**4)
  num_key_value_heads: int = Field(gt=0, le=10**4)
  head_dim: int = Field(gt=0, le=10**4, multiple_of=2)
  rope_theta: float = Field(gt=0)
  rms_norm_eps: float = Field(1e-6, gt=0)
  tie_word_embeddings: bool = False
  max_position_embeddings: int = Field(32_768, gt=0)  # bounds `router.max_tokens` alone
  model_type: Literal["qwen2"] = "qwen2"
  hidden_act: Literal["silu"] = "silu"
  use_sliding_window: Literal[False] = False
  rope_type: Literal["default"] = "default"
  rope_scaling: None = None
  quantization_config: None = None


class Layer(nnx.Module):
  """Attention with grouped queries and biases, then SwiGLU, each behind an RMSNorm."""

  def __init__(self, config: Qwen2Config, rngs: nnx.Rngs):
    D, F = config.hidden_size, config.intermediate_size
    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    self.input_norm = nnx.Param(jnp.ones(D))
    self.q_kernel = nnx.Param(_draw_normal(rngs, (D, N, H), D))
    near_H = _make_near_bias(config)
    even_N = (jnp.arange(N) % 2 == 0).astype(jnp.float32)  # odd heads start without a bias
    self.q_bias = nnx.Param(even_N[:, None] * near_H[None])
    self.k_kernel = nnx.Param(_draw_normal(rngs, (D, K, H), D))
    self.k_bias = nnx.Param(jnp.broadcast_to(near_H[None], (K, H)))
    self.v_kernel = nnx.Param(_draw_normal(rngs, (D, K, H), D))
    self.v_bias = nnx.Param(jnp.zeros((K, H)))
    self.o_kernel = nnx.Param(_draw_normal(rngs, (N, H, D), N * H))
    self.post_attention_norm = nnx.Param(jnp.ones(D))
    self.gate_kernel = nnx.Param(_draw_normal(rngs, (D, F), D))
    self.up_kernel = nnx.Param(_draw_normal(rngs, (D, F), D))
    self.down_kernel = nnx.Param(_draw_normal(rngs, (F, D), F))
    self.eps = config.rms_norm_eps

  def __call__(self, x_BxTxD, rope, mask_BxTxU, past=None):
    """The new residual stream, and the cache with the new keys and values (None without one).

    `rope` is (cos_BxTxH, sin_BxTxH), `past` (k_LxRxUxKxH, v_LxRxUxKxH, layer, row_B,
    position_BxT): the cache, and the new tokens' places in it.
    """
    dtype = x_BxTxD.dtype
    h_BxTxD = rms_norm(x_BxTxD, self.input_norm[...], self.eps)
    q_BxTxNxH = jnp.einsum("BTD,DNH->BTNH", h_BxTxD, self.q_kernel[...].astype(dtype))
    k_BxTxKxH = jnp.einsum("BTD,DKH->BTKH", h_BxTxD, self.k_kernel[...].astype(dtype))
    v_BxTxKxH = jnp.einsum("BTD,DKH->BTKH", h_BxTxD, self.v_kernel[...].astype(dtype))
    q_BxTxNxH = rotate(q_BxTxNxH + self.q_bias[...].astype(dtype)[None, None], *rope)
    k_BxTxKxH = rotate(k_BxTxKxH + self.k_bias[...].astype(dtype)[None, None], *rope)
    v_BxTxKxH = v_BxTxKxH + self.v_bias[...].astype(dtype)[None, None]
    cache = None
    if past is not None:
      k_LxRxUxKxH, v_LxRxUxKxH, layer, row_B, position_BxT = past
      at = layer, row_B[:, None], position_BxT
      k_LxRxUxKxH = k_LxRxUxKxH.at[at].set(k_BxTxKxH, mode="drop")
      cache = k_LxRxUxKxH, v_LxRxUxKxH.at[at].set(v_BxTxKxH, mode="drop")
      k_BxTxKxH, v_BxTxKxH = (x[layer, row_B] for x in cache)
    a_BxTxNxH = attention(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, mask_BxTxU)
    x_BxTxD = x_BxTxD + jnp.einsum("BTNH,NHD->BTD", a_BxTxNxH, self.o_kernel[...].astype(dtype))
    h_BxTxD = rms_norm(x_BxTxD, self.post_attention_norm[...], self.eps)
    gate_BxTxF = jax.nn.silu(h_BxTxD @ self.gate_kernel[...].astype(dtype))
    h_BxTxF = gate_BxTxF * (h_BxTxD @ self.up_kernel[...].astype(dtype))
    return x_BxTxD + h_BxTxF @ self.down_kernel[...].astype(dtype), cache


class Qwen2(nnx.Module):
  """Token ids -> hidden states -> logits of the positions and tokens that are needed."""

  def __init__(self, config: Qwen2Config, rngs: nnx.Rngs):
    self.config = config
    V, D = config.vocab_size, config.hidden_size
    self.embedding_VxD = nnx.Param(_draw_normal(rngs, (V, D), D))
    self.final_norm = nnx.Param(jnp.ones(D))
    if not config.tie_word_embeddings:
      self.head_VxD = nnx.Param(_draw_normal(rngs, (V, D), D))
    stack = nnx.vmap(lambda rngs: Layer(config, rngs), in_axes=(0,), out_axes=0)
    self.layers = nnx.split_rngs(splits=config.num_hidden_layers)(stack)(rngs)

  def __call__(self, tokens_BxT, dtype=jnp.float32):
    """hidden_BxTxD after the final norm of whole sequences, padded on the right, in `dtype`.

    A backward pass recomputes each layer instead of storing its activations, except for products
    with weights where a CPU has the memory for them.
    """
    rope = self._rope(jnp.arange(tokens_BxT.shape[1])[None], dtype)
    graphdef, stacked = nnx.split(self.layers)

    def block(x_BxTxD, layer):
      return spread_rows(nnx.merge(graphdef, layer)(x_BxTxD, rope, None)[0]), None

    embedded_BxTxD = self.embedding_VxD[...][tokens_BxT].astype(dtype)
    # To store everything is no faster: layers' activations are copied into stacks.
    keep_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    block = jax.checkpoint(block, policy=keep_products if self._has_room(tokens_BxT.size) else None)
    x_BxTxD, _ = jax.lax.scan(block, spread_rows(embedded_BxTxD), stacked)
    return rms_norm(x_BxTxD, self.final_norm[...], self.config.rms_norm_eps)

  def extend(self, tokens_BxT, start_B, cache, row_B):
    """hidden_BxTxD after the final norm of new tokens, and the cache with their keys and values.

    Sequence b, padded on the right, stands in row row_B[b] behind its first start_B[b] tokens.
    """
    dtype = cache[0].dtype
    position_BxT = start_B[:, None] + jnp.arange(tokens_BxT.shape[1])[None]
    rope = self._rope(position_BxT, dtype)
    mask_BxTxU = jnp.arange(cache[0].shape[2])[None, None] <= position_BxT[:, :, None]
    graphdef, stacked = nnx.split(self.layers)

    def block(carry, inputs):
      (x_BxTxD, cache), (number, layer) = carry, inputs
      past = (*cache, number, row_B, position_BxT)
      return nnx.merge(graphdef, layer)(x_BxTxD, rope, mask_BxTxU, past), None

    # The cache is carried through the scan and updated in place; stacking would copy all of it.
    layers = jnp.arange(self.config.num_hidden_layers), stacked
    embedded_BxTxD = self.embedding_VxD[...][tokens_BxT].astype(dtype)
    (x_BxTxD, cache), _ = jax.lax.scan(block, (embedded_BxTxD, cache), layers)
    return rms_norm(x_BxTxD, self.final_norm[...], self.config.rms_norm_eps), cache

  def make_cache(self, rows: int, length: int, dtype=jnp.float32):
    """Zeroed (k_LxRxUxKxH, v_LxRxUxKxH) for R = `rows` sequences of up to U = `length` tokens."""
    c = self.config
    shape = c.num_hidden_layers, rows, length, c.num_key_value_heads, c.head_dim
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

  @property
  def token_tables(self) -> list[nnx.Param]:
    """The parameters with a row per token: the embedding, and a head that is not tied to it."""
    tied = self.config.tie_word_embeddings
    return [self.embedding_VxD] if tied else [self.embedding_VxD, self.head_VxD]

  def logits(self, hidden, token_ids=None):
    """float32 logits [..., len(token_ids)] of the given tokens (None: of the whole vocabulary)."""
    head_VxD = self.token_tables[-1][...]
    head_AxD = head_VxD if token_ids is None else head_VxD[token_ids]
    return jnp.einsum("...D,AD->...A", hidden.astype(jnp.float32), head_AxD.astype(jnp.float32))

  def _has_room(self, tokens: int) -> bool:
    c = self.config
    heads = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    layer = heads + 2 * c.hidden_size + 3 * c.intermediate_size  # numbers of a token
    fit = 4 * tokens * c.num_hidden_layers * layer <= KEPT_SHARE * psutil.virtual_memory().total
    return jax.default_backend() == "cpu" and c.hidden_size >= KEPT_WIDTH and fit

  def _rope(self, position_BxT, dtype):
    H = self.config.head_dim
    # Rounded as in the checkpoints' own code: at position 30,000 a last digit matters.
    frequency_H2 = 1 / (self.config.rope_theta ** (np.arange(0, H, 2) / H)).astype(np.float32)
    angle_BxTxH2 = position_BxT[:, :, None].astype(jnp.float32) * frequency_H2[None, None]
    angle_BxTxH = jnp.concatenate([angle_BxTxH2] * 2, axis=-1)
    return jnp.cos(angle_BxTxH).astype(dtype), jnp.sin(angle_BxTxH).astype(dtype)


def attention(q_BxTxNxH, k_BxUxKxH, v_BxUxKxH, mask_BxTxU=None):
  """Grouped-query attention [B, T, N, H]; without a mask it is causal, and U = T.

  On a GPU, whole sequences in bf16 go through cuDNN's flash attention; on a CPU the scores of a few
  queries at a time stay in the processor's cache.
  """
  backend, whole = jax.default_backend(), mask_BxTxU is None
  if backend != "cpu":
    flash = whole and q_BxTxNxH.dtype == jnp.bfloat16 and q_BxTxNxH.shape[-1] % 8 == 0
    settings = {"is_causal": True} if whole else {"mask": mask_BxTxU[:, None]}
    settings["implementation"] = "cudnn" if backend == "gpu" and flash else "xla"
    return jax.nn.dot_product_attention(q_BxTxNxH, k_BxUxKxH, v_BxUxKxH, **settings)
  if not whole:
    return _attend(q_BxTxNxH, k_BxUxKxH, v_BxUxKxH, mask_BxTxU)
  T, blocks = q_BxTxNxH.shape[1], []
  for start in range(0, T, QUERIES):
    end = min(start + QUERIES, T)
    mask_1xtxU = jnp.arange(end)[None, None] <= jnp.arange(start, end)[None, :, None]
    keys_values = k_BxUxKxH[:, :end], v_BxUxKxH[:, :end]
    blocks.append(_attend(q_BxTxNxH[:, start:end], *keys_values, mask_1xtxU))
  return jnp.concatenate(blocks, axis=1)


def _attend(q_BxTxNxH, k_BxUxKxH, v_BxUxKxH, mask_BxTxU):
  """Attention as two matrix products for each key head, over all of its queries at once."""
  B, T, N, H = q_BxTxNxH.shape
  U, K = k_BxUxKxH.shape[1:3]
  G = N // K
  q_BxTxKxGxH = (q_BxTxNxH * H**-0.5).reshape(B, T, K, G, H)
  q_BxKxMxH = q_BxTxKxGxH.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
  score_BxKxMxU = jnp.einsum("BKMH,BUKH->BKMU", q_BxKxMxH, k_BxUxKxH).astype(jnp.float32)
  score_BxKxGxTxU = score_BxKxMxU.reshape(B, K, G, T, U)
  score_BxKxGxTxU = jnp.where(mask_BxTxU[:, None, None], score_BxKxGxTxU, -1e30)
  peak_BxKxGxTx1 = jax.lax.stop_gradient(score_BxKxGxTxU.max(axis=-1, keepdims=True))
  weight_BxKxGxTxU = jnp.exp(score_BxKxGxTxU - peak_BxKxGxTx1)
  total_BxKxGxTx1 = weight_BxKxGxTxU.sum(axis=-1, keepdims=True)
  weight_BxKxMxU = weight_BxKxGxTxU.astype(v_BxUxKxH.dtype).reshape(B, K, G * T, U)
  sum_BxKxMxH = jnp.einsum("BKMU,BUKH->BKMH", weight_BxKxMxU, v_BxUxKxH)
  mean_BxKxGxTxH = sum_BxKxMxH.reshape(B, K, G, T, H) / total_BxKxGxTx1.astype(q_BxTxNxH.dtype)
  return mean_BxKxGxTxH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _make_near_bias(config: Qwen2Config):
  """bias_H of queries and keys that favours near tokens at the start (our choice).

  Once rotated, it adds a score that depends on the distance alone: narrow models learn faster.
  """
  H, (shortest, longest) = config.head_dim, NEAR_TOKENS
  wavelength_H2 = 2 * jnp.pi * config.rope_theta ** (jnp.arange(0, H, 2, dtype=jnp.float32) / H)
  near_H2 = (wavelength_H2 >= shortest) & (wavelength_H2 <= longest)
  return jnp.tile(NEARNESS * near_H2.astype(jnp.float32), 2)


def rotate(x_BxTxNxH, cos_BxTxH, sin_BxTxH):
  """Rotary position embedding, halves paired as Hugging Face checkpoints have them."""
  first, second = jnp.split(x_BxTxNxH, 2, axis=-1)
  rotated = jnp.concatenate([-second, first], axis=-1)
  return x_BxTxNxH * cos_BxTxH[:, :, None] + rotated * sin_BxTxH[:, :, None]


def rms_norm(x_BxTxD, scale_D, eps):
  """x over its root mean square, times scale; statistics in float32."""
  x32_BxTxD = x_BxTxD.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(x32_BxTxD**2, axis=-1, keepdims=True) + eps)
  return (x32_BxTxD * scale).astype(x_BxTxD.dtype) * scale_D.astype(x_BxTxD.dtype)[None, None]


def _draw_normal(rngs: nnx.Rngs, shape, fan_in: int):
  """Random weights that keep the scale of their input (our choice: narrow models learn faster)."""
  return fan_in**-0.5 * jax.random.normal(rngs.params(), shape)


def check_finite(numbers, name: str) -> None:
  """Raises ValueError if a number is infinite or NaN: a router would take SMALL in silence."""
  if not np.isfinite(numbers).all():
    raise ValueError(f"{name}: all numbers must be finite")


def softmax(logits_RxA: np.ndarray, name: str) -> np.ndarray:
  """p_RxA, float64; ValueError, which says of what, if a logit is infinite or NaN."""
  check_finite(logits_RxA, f"logits of {name}")
  logits_RxA = logits_RxA.astype(np.float64)
  weight_RxA = np.exp(logits_RxA - logits_RxA.max(axis=1, keepdims=True))
  return weight_RxA / weight_RxA.sum(axis=1, keepdims=True)
