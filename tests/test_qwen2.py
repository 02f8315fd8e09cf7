"""Test properties of the transformer; test_weights compares it with transformers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from baar_jax.router.qwen2 import Qwen2, Qwen2Config

CONFIG = Qwen2Config(
  vocab_size=11,
  hidden_size=16,
  intermediate_size=12,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=4,
  rope_theta=100.0,
  rms_norm_eps=1e-3,
  tie_word_embeddings=True,
)
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [10, 0, 7, 7, 8, 2, 5, 3]], np.int32)


@pytest.fixture(scope="module")
def model(filled):
  return filled(lambda: Qwen2(CONFIG, nnx.Rngs(0)))


def test_bfloat16_is_close_to_float32(model):
  exact = jax.jit(partial(model, dtype="f4"))(TOKENS)
  hidden = jax.jit(partial(model, dtype=jnp.bfloat16))(TOKENS)
  assert (hidden.dtype, model.logits(hidden).dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(hidden.astype(jnp.float32), exact, atol=0.15)
