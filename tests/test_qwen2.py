"""Test properties of the transformer; test_weights compares it with transformers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from baar_jax.router import qwen2
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


def test_kept_products_save_work_and_change_no_gradient(model, monkeypatch):
  graphdef, params = nnx.split(model)
  results = []
  for width, share in ((17, 1.0), (16, 1.0), (16, 1e-12)):
    monkeypatch.setattr(qwen2, "KEPT_WIDTH", width)
    monkeypatch.setattr(qwen2, "KEPT_SHARE", share)
    loss = lambda params: jnp.sin(nnx.merge(graphdef, params)(TOKENS)).sum()  # noqa: E731
    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    results.append(
      (compiled.cost_analysis()["flops"], jax.tree.leaves(compiled(params)))
    )
  (flops, gradients), (fewer_flops, same_gradients), (same_flops, _) = results
  assert fewer_flops < 0.9 * flops == 0.9 * same_flops
  for gradient, same in zip(gradients, same_gradients):
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(same, gradient, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_close_to_float32(model):
  exact = jax.jit(partial(model, dtype="f4"))(TOKENS)
  hidden = jax.jit(partial(model, dtype=jnp.bfloat16))(TOKENS)
  assert (hidden.dtype, model.logits(hidden).dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(hidden.astype(jnp.float32), exact, atol=0.15)
