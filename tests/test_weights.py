"""Hugging Face weights: PyTorch's numbers, in and out exactly, no trust; rows for the decisions."""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden import make_qwen2
from safetensors.numpy import load_file, save_file

from baar_jax.config import Config, RouterConfig
from baar_jax.router import weights
from baar_jax.router.tokenizer import adopt_tokenizer
from baar_jax.router.view import View
from baar_jax.router.weights import load_pretrained, load_qwen2, save_qwen2
from baar_jax.train.checkpoint import load_initial
from baar_jax.train.training import RouterFiles

# 6 heads of 10 on a width of 48: no two axes of a kernel are equally long.
SHAPE = hf.SHAPES["grouped"] | {"head_dim": 10}
UNTIED = SHAPE | {"tie_word_embeddings": False}


@pytest.fixture
def adopt(router_config, tmp_path):
  """adopt(directory): the view that a run makes of a checkpoint."""

  def make(directory):
    adopt_tokenizer(directory, tmp_path / "tokenizer")
    config = dataclasses.replace(router_config, weights=str(directory))
    return View(config, tmp_path / "tokenizer")

  return make


@jax.jit
def forward(model, tokens_BxT):
  hidden_BxTxD = model(tokens_BxT)
  return hidden_BxTxD, model.logits(hidden_BxTxD)


@pytest.mark.parametrize("case", make_qwen2.CASES)
def test_computes_what_the_pytorch_original_does(case, tmp_path):
  """Qwen2ForCausalLM's numbers (float32), which golden/make_qwen2.py made with the same weights.
  Grouped, multi-head and multi-query attention; tied and untied heads; 3,000 tokens."""
  golden = np.load(make_qwen2.FILE)
  model = load_qwen2(hf.write(tmp_path, hf.SHAPES[case]))
  outputs = forward(model, golden[f"{case}/tokens_BxT"].astype(np.int32))
  for output, name in zip(outputs, ("hidden_BxSxD", "logits_BxSxV")):
    want = golden[f"{case}/{name}"]
    assert want.std() > 0.5
    np.testing.assert_allclose(
      output[:, golden[f"{case}/kept_S"]], want, rtol=0, atol=2e-5
    )


CASES = [(SHAPE, "bfloat16", 1), (UNTIED, "float32", 4), (UNTIED, "float16", 1)]


@pytest.mark.parametrize("shape, stored, shards", CASES)
def test_writes_what_was_loaded(shape, stored, shards, tmp_path):
  """Every number of every tensor, in bf16 if nothing else is asked for."""
  base = hf.write(tmp_path / "base", shape, stored, shards, tokens=300)
  saved, dtype = tmp_path / "saved", jnp.dtype(stored)
  model = load_qwen2(base, dtype)
  (tmp_path / "saved.tmp").mkdir()  # of a run that was killed
  save_qwen2(
    model, saved, base / "tokenizer.json", *([] if stored == "bfloat16" else [dtype])
  )
  assert not (tmp_path / "saved.tmp").exists()
  written, expected = (
    load_file(saved / "model.safetensors"),
    dict(hf.tensors(shape, stored)),
  )
  assert written.keys() == expected.keys()
  for name, want in expected.items():
    np.testing.assert_array_equal(written[name], want, strict=True)
  again = load_qwen2(saved, dtype)
  assert again.config == model.config
  equal = partial(np.testing.assert_array_equal, strict=True)
  jax.tree.map(equal, nnx.state(again), nnx.state(model))
  assert (saved / "tokenizer.json").read_bytes() == (
    base / "tokenizer.json"
  ).read_bytes()


def test_the_first_layers_alone_are_a_smaller_router(adopt, tmp_path):
  directory = hf.write(tmp_path / "whole", SHAPE, tokens=300)
  whole, cut = load_qwen2(directory), load_qwen2(directory, layers=2)
  first_two = jax.tree.map(lambda x: x[:2], nnx.state(whole.layers))
  jax.tree.map(np.testing.assert_array_equal, nnx.state(cut.layers), first_two)
  with pytest.raises(ValueError, match="router.layers is 4; the weights have 3"):
    weights.check_pretrained(RouterConfig(weights=str(directory), layers=4))
  with pytest.raises(
    ValueError, match="max_tokens is 32769; .* trained for at most 32768"
  ):
    weights.check_pretrained(RouterConfig(weights=str(directory), max_tokens=32_769))
  view = adopt(directory)
  view.config = dataclasses.replace(view.config, layers=2)
  start = load_initial(RouterFiles(tmp_path, Config(router=view.config), None), view)
  small, big = start.embedding_VxD[...][np.array(view.decision_ids)]
  np.testing.assert_array_equal(small, big)  # what the words' rows are for is cut off


def set_fields(directory: Path, changes: dict) -> None:
  """Sets fields of config.json; those that are None are left out."""
  path = directory / "config.json"
  fields = json.loads(path.read_text()) | changes
  path.write_text(json.dumps({name: x for name, x in fields.items() if x is not None}))


def set_tensor(directory: Path, name: str, array) -> None:
  """Sets a tensor of the weights; None leaves it out."""
  tensors = load_file(directory / "model.safetensors") | {name: array}
  tensors = {name: x for name, x in tensors.items() if x is not None}
  save_file(tensors, directory / "model.safetensors")


def refusal(directory: Path) -> str:
  """The one line with which a directory, here DIR, is refused."""
  with pytest.raises(ValueError) as caught:
    load_qwen2(directory)
  assert "\n" not in str(caught.value)
  return str(caught.value).replace(str(directory), "DIR")


UP = "model.layers.1.mlp.up_proj.weight"  # [40, 48]
BIAS = "model.layers.2.self_attn.k_proj.bias"  # [20]
WHOLE, CONFIG = "DIR/model.safetensors", "DIR/config.json"


def test_a_tensor_that_does_not_fit_is_refused(tmp_path):
  expected = "expected F32 or BF16 or F16"
  for name, array, line in [
    (
      "side\n\x1b[3m",
      np.zeros(3),
      f"{WHOLE}: tensor 'side\\n\\x1b[3m' has no place in a Qwen2",
    ),
    (UP, None, f"DIR: tensor {UP} is in no model*.safetensors"),
    (
      UP,
      np.zeros([40, 48], "i1"),
      f"{WHOLE}: tensor {UP} is I8 [40, 48], {expected} [40, 48]",
    ),
    (UP, np.zeros([48, 40], "f4"), f"tensor {UP} is F32 [48, 40], {expected} [40, 48]"),
    (BIAS, np.zeros([2, 10], "f4"), f"tensor {BIAS} is F32 [2, 10], {expected} [20]"),
  ]:
    set_tensor(hf.write(tmp_path, SHAPE), name, array)
    assert line in refusal(tmp_path)
  save_file(
    {UP: np.zeros([40, 48], "f4")}, hf.write(tmp_path, SHAPE) / "model-2.safetensors"
  )
  assert f"{WHOLE}: tensor {UP} is in model-2.safetensors too; remove one" in refusal(
    tmp_path
  )


def test_a_config_that_does_not_fit_is_refused(tmp_path):
  wrong = [("vocab_size", value) for value in ("many", -1, 10**400, None)]
  wrong += [
    ("rope_theta", float("nan")),
    ("rms_norm_eps", float("inf")),
    ("head_dim", 9),
  ]
  wrong += [
    ("num_hidden_layers", 10**6),
    ("num_key_value_heads", 0),
    ("model_type", "llama"),
  ]
  wrong += [("use_sliding_window", True), ("rope_scaling", {"type": "yarn"})]
  wrong += [("quantization_config", {"bits": 4})]
  rows = [({name: value}, f"{CONFIG} has a wrong {name} (") for name, value in wrong]
  rows += [({"num_attention_heads": 0}, f"{CONFIG} cannot be read (")]
  rows += [
    (
      {"rope_parameters": {"rope_type": "yarn"}},
      "rope_type (Input should be 'default')",
    )
  ]
  rows += [
    ({"num_key_value_heads": 4}, "num_attention_heads is no multiple of num_key_")
  ]
  # 10^8 rows of 10^6 numbers of 4 bytes are 400,000 GB, and each layer 1.1.
  large = {"vocab_size": 10**8, "hidden_size": 10**6, "head_dim": 10}
  for changes, line in [*rows, (large, "weights of 400,003 GB in float32")]:
    set_fields(hf.write(tmp_path, SHAPE), changes)
    assert line in refusal(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize(
  "content",  # a pipe would be waited for
  [
    os.mkfifo,
    lambda path: path.symlink_to("gone"),
    b"",
    b"[\n]",
    b"\xff",
    b"[" * 100_000,
    "cut",
  ],
)
def test_a_file_that_cannot_be_read_is_refused(file, content, adopt, tmp_path):
  path = hf.write(tmp_path, SHAPE, tokens=300) / file
  data = path.read_bytes()[:-1] if content == "cut" else content
  path.unlink()
  path.write_bytes(data) if isinstance(data, bytes) else content(path)
  with pytest.raises(ValueError, match=rf"^{path} cannot be read \([^\n]+\)[^\n]+$"):
    load_pretrained(adopt(tmp_path))


@pytest.mark.parametrize("number, stored", [(np.nan, "float32"), (-np.inf, "bfloat16")])
def test_numbers_that_are_none_are_neither_read_nor_written(number, stored, tmp_path):
  base, saved = (
    hf.write(tmp_path / "base", SHAPE, stored, tokens=300),
    tmp_path / "saved",
  )
  model = load_qwen2(base)
  array = load_file(base / "model.safetensors")[UP].copy()
  array[39, 47] = number
  set_tensor(base, UP, array)
  assert f"{WHOLE}: tensor {UP}: all numbers must be finite" in refusal(base)
  with pytest.raises(
    ValueError, match="all numbers must be finite"
  ):  # before anything is paid
    weights.check_pretrained(RouterConfig(weights=str(base)))
  norm, up = model.final_norm[...], model.layers.up_kernel
  model.final_norm[...] = norm.at[3].set(
    np.finfo(np.float32).max
  )  # bf16 cannot hold it
  for tensor in ("model.norm.weight", UP):
    with pytest.raises(ValueError, match=f"{tensor}: all numbers must be finite"):
      save_qwen2(model, saved, base / "tokenizer.json")
    model.final_norm[...], up[...] = norm, up[...].at[1, 47, 39].set(number)
  assert not saved.exists()


WORDS = (
  ["Ġ", "S", "M", "A", "LL"],
  ["Ġ", "B", "I", "G"],
)  # " SMALL" and " BIG" in tokens


@pytest.mark.parametrize(
  "tied, vocab_size", [(True, 302), (False, 301)]
)  # 300 tokens: one too few
def test_a_checkpoints_decisions_start_as_their_words(
  tied, vocab_size, adopt, tmp_path
):
  shape = hf.SHAPES["grouped"] | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
  view = adopt(hf.write(tmp_path / "base", shape, tokens=300))
  ids = view.decision_ids
  assert ids == [300, 301]  # behind all of its own
  model, written = load_pretrained(view), dict(hf.tensors(shape))
  number_of = json.loads((tmp_path / "base" / "tokenizer.json").read_text())["model"][
    "vocab"
  ]
  for name, table in zip(
    ("model.embed_tokens.weight", "lm_head.weight"), model.token_tables
  ):
    before, after = written[name], np.asarray(table[...])
    assert after.shape == (302, 48)
    means = [
      before[[number_of[token] for token in word]].mean(axis=0) for word in WORDS
    ]
    np.testing.assert_allclose(after[ids], means, atol=1e-6)
    np.testing.assert_array_equal(after[:300], before[:300])
  # Checkpoints are restored into this shape.
  abstract = weights.make_abstract_model(weights.find_shape(view.config, ids))
  assert model.config == abstract.config
  assert nnx.state(abstract) == jax.eval_shape(lambda: nnx.state(model))
