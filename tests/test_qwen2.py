"""Test that the transformer computes what transformers' Qwen2 computes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen2_checkpoint as hf
from golden import make_qwen2

from baar_jax.router.weights import load_qwen2


@jax.jit
def forward(model, tokens_BxT):
  hidden_BxTxD = model(tokens_BxT)
  return hidden_BxTxD, model.logits(hidden_BxTxD)


@pytest.mark.parametrize("case", make_qwen2.CASES)
def test_hidden_states_and_logits_equal_those_of_transformers(case, tmp_path):
  """The outputs equal those that golden/make_qwen2.py computed with the same weights.

  The shapes have grouped, multi-head and multi-query attention, tied and untied heads,
  and 3,000 tokens.
  """
  golden = np.load(make_qwen2.FILE)
  model = load_qwen2(hf.write(tmp_path, hf.SHAPES[case]))
  outputs = forward(model, golden[f"{case}/tokens_BxT"].astype(np.int32))
  kept_S = golden[f"{case}/kept_S"]
  for output, name in zip(outputs, ("hidden_BxSxD", "logits_BxSxV")):
    expected = golden[f"{case}/{name}"]
    assert expected.std() > 0.5
    np.testing.assert_allclose(output[:, kept_S], expected, rtol=0, atol=2e-5)


def test_bfloat16_is_close_to_float32_beside_large_biases(tmp_path):
  """Qwen2.5's keys have biases of up to 158, nearly all where the rotation is slow."""
  model = load_qwen2(hf.write(tmp_path, hf.SHAPES["multihead"]))
  for bias in (model.layers.q_bias, model.layers.k_bias):
    bias[...] = bias[...].at[..., [7, 15]].set(jnp.array([150.0, -130.0]))
  tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6]], np.int32)
  exact = jax.jit(partial(model, dtype="f4"))(tokens)
  hidden = jax.jit(partial(model, dtype=jnp.bfloat16))(tokens)
  assert (hidden.dtype, model.logits(hidden).dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(hidden.astype(jnp.float32), exact, atol=0.15)
