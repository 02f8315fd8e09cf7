"""The model that a config describes: a checkpoint gets rows for the decisions, once."""

import dataclasses
import json

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from baar_jax.router import build
from baar_jax.router.build import build_model
from baar_jax.router.tokenizer import adopt_tokenizer
from baar_jax.router.view import View
from baar_jax.router.weights import save_qwen2


@pytest.mark.parametrize("tied", [True, False])
def test_decisions_start_alike(router_config, filled, tied):
  config = dataclasses.replace(router_config, tie_word_embeddings=tied)
  model = filled(lambda: build_model(config, 0))
  tables = [model.embedding_VxD] if tied else [model.embedding_VxD, model.head_VxD]
  befores = [np.array(table[...]) for table in tables]
  ids = [3, 5]
  build.start_alike(model, ids)
  for before, table in zip(befores, tables):
    after = np.array(table[...])
    others = [v for v in range(len(before)) if v not in ids]
    np.testing.assert_array_equal(after[others], before[others])
    np.testing.assert_allclose(after[ids], [(before[3] + before[5]) / 2] * 2, rtol=1e-6)


class TestPretrained:
  """A Hugging Face directory as the router that training starts from."""

  WORDS = (["Ġ", "S", "M", "A", "LL"], ["Ġ", "B", "I", "G"])  # " SMALL" and " BIG" in tokens

  def leaves(self, model):
    return jax.tree.leaves(nnx.split(model)[1])

  @pytest.fixture
  def adopt(self, router_config, tmp_path):
    """adopt(directory): what a run makes of a checkpoint: its configuration and its view."""

    def make(directory):
      adopt_tokenizer(directory, tmp_path / "tokenizer")
      config = dataclasses.replace(router_config, weights=str(directory))
      return config, View(config, tmp_path / "tokenizer")

    return make

  @pytest.mark.parametrize(
    "tied, vocab_size, tokens, rows",
    [
      (True, 302, 300, 302),  # as many spare rows as there are decisions
      (False, 301, 300, 384),  # one too few: 3 * 128
      (True, 383, 383, 512),  # the second decision is row 384, the first of the next block
    ],
  )
  def test_decisions_start_as_their_words(self, tied, vocab_size, tokens, rows, adopt, tmp_path):
    shape = hf.SHAPES["grouped"] | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    config, view = adopt(hf.write(tmp_path / "base", shape, tokens=tokens))
    small, big = view.decision_ids
    assert (small, big) == (tokens, tokens + 1)  # behind all of its own
    model = build.load_pretrained(config, view)

    written = dict(hf.tensors(shape))
    tables = {"model.embed_tokens.weight": model.embedding_VxD}
    if not tied:
      tables["lm_head.weight"] = model.head_VxD
    number_of = json.loads((tmp_path / "base" / "tokenizer.json").read_text())["model"]["vocab"]
    for name, table in tables.items():
      before, after = written[name], np.asarray(table[...])
      assert after.shape == (rows, 48)
      for row, word in zip((small, big), self.WORDS):
        want = sum(before[number_of[token]] for token in word) / len(word)
        np.testing.assert_allclose(after[row], want, atol=1e-6)
      others = [row for row in range(vocab_size) if row not in (small, big)]
      np.testing.assert_array_equal(after[others], before[others])
    np.testing.assert_array_equal(model.final_norm[...], written["model.norm.weight"])

    # Checkpoints are restored into this shape.
    assert model.config == build.shape_of(config, view.decision_ids)
    abstract = build.abstract_model(config, view.decision_ids)
    shapes, expected = ([x.shape for x in self.leaves(m)] for m in (model, abstract))
    assert shapes == expected

  @pytest.mark.parametrize("tied, vocab_size", [(True, 307), (False, 300)], ids=["spare", "grown"])
  def test_a_saved_router_keeps_its_decisions(self, tied, vocab_size, adopt, tmp_path):
    shape = hf.SHAPES["grouped"] | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    config, view = adopt(hf.write(tmp_path / "base", shape, tokens=300))
    model = build.load_pretrained(config, view)
    ids = np.array(view.decision_ids)
    model.embedding_VxD[...] = model.embedding_VxD[...].at[ids].set(7.0)  # trained
    if not tied:
      model.head_VxD[...] = model.head_VxD[...].at[ids].set(8.0)
    tokenizer = tmp_path / "tokenizer" / "tokenizer.json"
    save_qwen2(model, tmp_path / "saved", tokenizer, jnp.float32)
    config, view = adopt(tmp_path / "saved")
    assert view.decision_ids == ids.tolist()
    again = build.load_pretrained(config, view)
    assert again.config == model.config
    for after, before in zip(self.leaves(again), self.leaves(model), strict=True):
      np.testing.assert_array_equal(after, before)
