"""Test the loading, checking and saving of weights, and the rows of decision tokens."""

import dataclasses
import filecmp
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen2_checkpoint as hf
from flax import nnx
from golden import make_rows
from safetensors.numpy import load_file, save_file
from scipy import stats
from tiny_router import ROUTER

from baar_jax.config import RouterConfig
from baar_jax.router import weights
from baar_jax.router.view import (
  View,
  adopt_tokenizer,
  make_byte_tokenizer,
  read_tokenizer,
)
from baar_jax.router.weights import load_pretrained, load_qwen2, save_qwen2

# With 6 heads of 10 numbers and a width of 48, no two axes of a kernel are equally long.
SHAPE = hf.SHAPES["grouped"] | {"head_dim": 10}
UNTIED = SHAPE | {"tie_word_embeddings": False}


def adopt(directory: Path, view: str = "transcript") -> View:
  """Make a run's view for a directory of weights."""
  adopt_tokenizer(directory, directory / "adopted")
  config = dataclasses.replace(
    ROUTER, weights=str(directory), view=view, max_tokens=400
  )
  return View(config, read_tokenizer(directory / "adopted"))


CASES = [(SHAPE, "bfloat16", 1), (UNTIED, "float32", 4), (UNTIED, "float16", 1)]


@pytest.mark.parametrize("shape, stored, shards", CASES)
def test_saved_weights_equal_the_loaded_weights(shape, stored, shards, tmp_path):
  """All numbers of all tensors are equal. The default dtype is bfloat16."""
  base = hf.write(tmp_path / "base", shape, stored, shards, tokens=300)
  saved = tmp_path / "saved"
  dtype = jnp.dtype(stored)
  model = load_qwen2(base, dtype)
  (base / "chat_template.jinja").write_text("{{ messages }}")
  (base / "generation_config.json").write_text('{"eos_token_id": 299}')
  settings = '{"eos_token": "<|im_end|>", "added_tokens_decoder": {"299": {}}}'
  (base / "tokenizer_config.json").write_text(settings)
  adopt(base)
  adopted = base / "adopted"
  # A run that was killed left this directory.
  (tmp_path / "saved.tmp").mkdir()
  save_qwen2(model, saved, adopted, *([] if stored == "bfloat16" else [dtype]))
  assert not (tmp_path / "saved.tmp").exists()
  written = load_file(saved / "model.safetensors")
  expected = dict(hf.tensors(shape, stored))
  assert written.keys() == expected.keys()
  for name, numbers in expected.items():
    np.testing.assert_array_equal(written[name], numbers, strict=True)
  assert weights.read_config(saved) == model.config
  names = ["chat_template.jinja", "generation_config.json", "tokenizer.json"]
  assert filecmp.cmpfiles(saved, adopted, names, shallow=False)[0] == names
  # Beside the list, transformers would not know the decision tokens.
  settings = json.loads((saved / "tokenizer_config.json").read_text())
  assert settings == {"eos_token": "<|im_end|>"}


def set_fields(directory: Path, changes: dict) -> None:
  """Set fields of config.json; fields that are None are left out."""
  path = directory / "config.json"
  fields = json.loads(path.read_text()) | changes
  path.write_text(json.dumps({name: x for name, x in fields.items() if x is not None}))


def set_tensor(directory: Path, name: str, array) -> None:
  """Set a tensor of the weights; None removes it."""
  tensors = load_file(directory / "model.safetensors") | {name: array}
  tensors = {name: x for name, x in tensors.items() if x is not None}
  save_file(tensors, directory / "model.safetensors")


def refusal(directory: Path) -> str:
  """Return the one line with which a directory is refused, with DIR for its path."""
  with pytest.raises(ValueError) as caught:
    load_qwen2(directory)
  assert "\n" not in str(caught.value)
  return str(caught.value).replace(str(directory), "DIR")


UP = "model.layers.1.mlp.up_proj.weight"  # [40, 48]


@pytest.mark.parametrize(
  "name, array, problem",
  [
    # Quantised types need such scales.
    ("side\n\x1b[3m", np.zeros(3), r"'side\n\x1b[3m' is (3,), expected no such tensor"),
    (UP, np.zeros([48, 40]), f"{UP!r} is (48, 40), expected (40, 48)"),
    (UP, None, f"{UP!r} is missing, expected (40, 48)"),
  ],
)
def test_names_and_shapes_of_tensors_are_compared(name, array, problem, tmp_path):
  set_tensor(hf.write(tmp_path, SHAPE), name, array)
  assert f"DIR: tensor {problem}" in refusal(tmp_path)


@pytest.mark.parametrize(
  "field, value",
  [
    ("model_type", "llama"),
    ("vocab_size", None),
    ("rope_theta", float("nan")),
    ("head_dim", 9),
    ("use_sliding_window", True),
    ("rope_scaling", {"type": "yarn"}),
    ("rope_type", "yarn"),
    ("quantization_config", {"bits": 4}),
  ],
)
def test_settings_that_change_the_mathematics_are_refused(field, value, tmp_path):
  set_fields(hf.write(tmp_path, SHAPE), {field: value})
  assert f"DIR/config.json has an unsupported {field} (" in refusal(tmp_path)


def test_rotary_settings_are_read_in_both_forms(tmp_path):
  """Newer versions of transformers write a section."""
  hf.write(tmp_path, SHAPE)
  section = {"rope_type": "default", "rope_theta": 5e5}
  set_fields(tmp_path, {"rope_theta": None, "rope_parameters": section})
  assert weights.read_config(tmp_path).rope_theta == 5e5
  set_fields(tmp_path, {"rope_parameters": {"full_attention": section}})
  assert "rope_parameters by type of layer" in refusal(tmp_path)
  for name in ("rope_type", "type"):
    set_fields(tmp_path, {"rope_parameters": {name: "yarn"}})
    assert "unsupported rope_type" in refusal(tmp_path)


def test_a_copy_of_a_tied_embedding_may_be_stored_besides(tmp_path):
  hf.write(tmp_path, SHAPE)
  table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
  set_tensor(tmp_path, "lm_head.weight", table)
  assert len(load_qwen2(tmp_path).token_tables) == 1


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [os.mkfifo, b"[\n]", b"\xff"])
def test_a_file_that_cannot_be_read_is_refused(file, content, tmp_path):
  """Opening a named pipe would wait forever."""
  path = hf.write(tmp_path, SHAPE, tokens=300) / file
  path.unlink()
  path.write_bytes(content) if isinstance(content, bytes) else content(path)
  with pytest.raises(ValueError, match=rf"^Cannot read {path} \([^\n]+\)\.[^\n]+$"):
    load_pretrained(adopt(tmp_path))


def test_infinite_and_nan_weights_are_neither_read_nor_written(tmp_path):
  base = hf.write(tmp_path / "base", SHAPE, tokens=300)
  saved = tmp_path / "saved"
  adopt(base)
  model = load_qwen2(base)
  # The largest float32 is infinite in bfloat16.
  model.final_norm[...] = model.final_norm[...].at[3].set(np.finfo(np.float32).max)
  with pytest.raises(ValueError, match="norm.weight, expected finite numbers"):
    save_qwen2(model, saved, base / "adopted")
  assert not saved.exists()
  array = load_file(base / "model.safetensors")[UP].copy()
  array[39, 47] = np.nan
  set_tensor(base, UP, array)
  assert f"NaN in DIR/model.safetensors: tensor {UP}," in refusal(base)
  # A run calls this check before it pays for anything.
  with pytest.raises(ValueError, match="expected finite numbers"):
    weights.check_pretrained(RouterConfig(weights=str(base)))


# The tokens of " SMALL" and of " BIG", which begin alike, and those that begin "SMALL" and "BIG".
WORDS = (["Ġ", "S", "M", "A", "LL"], ["Ġ", "B", "I", "G"])
FIRST = (["S"], ["B"])


# The tokenizer has 300 tokens. With 301 rows, the second decision token has no row yet.
@pytest.mark.parametrize(
  "tied, vocab_size, name, words",
  [(True, 302, "transcript", WORDS), (False, 301, "paper", FIRST)],
)
def test_decision_tokens_start_as_their_words_do(
  tied, vocab_size, name, words, tmp_path
):
  shape = hf.SHAPES["grouped"] | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
  view = adopt(hf.write(tmp_path / "base", shape, tokens=300), name)
  ids = view.decision_ids
  # The decision tokens follow the 300 tokens of the checkpoint.
  assert ids == [300, 301]
  model = load_pretrained(view)
  written = dict(hf.tensors(shape))
  number_of = json.loads((tmp_path / "base" / "tokenizer.json").read_text())["model"][
    "vocab"
  ]
  for name, table in zip(
    ("model.embed_tokens.weight", "lm_head.weight"), model.token_tables
  ):
    before = written[name]
    after = np.asarray(table[...])
    assert after.shape == (302, 48)
    means = [
      before[[number_of[token] for token in word]].mean(axis=0) for word in words
    ]
    np.testing.assert_allclose(after[ids], means, atol=1e-6)
    np.testing.assert_array_equal(after[:300], before[:300])
  # A checkpoint of the run is restored into a model of this shape.
  abstract = weights.make_abstract_model(weights.find_shape(view.config, ids))
  assert model.config == abstract.config
  assert nnx.state(abstract) == jax.eval_shape(lambda: nnx.state(model))


def test_decision_tokens_start_with_the_answers_of_the_words():
  """Two sizes of Qwen2.5-Coder answered in golden/make_rows.py."""
  golden = np.load(make_rows.FILE)
  tokenizer = make_byte_tokenizer()
  tokenizer.add_special_tokens([*hf.SPECIAL])
  view = make_rows.make_view(tokenizer)
  prompts = make_rows.write_prompts(view)
  texts = tokenizer.decode_batch(prompts, skip_special_tokens=False)
  assert texts == golden["prompts"].tolist()
  view.tokenize = make_rows.SPLITS.get
  small, big = map(list, weights.start_tokens(view))
  for size in range(2):
    # A row that is a mean of tokens' rows has the mean of their logits.
    logits_PxC = golden[f"{size}/logits_PxC"]
    rows_P = logits_PxC[:, big].mean(axis=1) - logits_PxC[:, small].mean(axis=1)
    words_P = golden[f"{size}/words_P"]
    assert min((words_P > 0).sum(), (words_P < 0).sum()) >= 6
    assert ((rows_P > 0) == (words_P > 0)).sum() >= 20
    assert stats.spearmanr(rows_P, words_P).statistic >= 0.8
