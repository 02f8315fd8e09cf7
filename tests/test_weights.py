"""Hugging Face weights: PyTorch's numbers, in and out exactly, no trust; rows for the decisions."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from golden import make_qwen2
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from baar_jax.config import Config, RouterConfig
from baar_jax.router import weights
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.tokenizer import adopt_tokenizer
from baar_jax.router.view import View
from baar_jax.router.weights import build_model, load_pretrained, load_qwen2, save_qwen2
from baar_jax.train.checkpoint import load_initial

# 6 heads of 10 on a width of 48: no two axes of a kernel are equally long.
SHAPE = hf.SHAPES["grouped"] | {"head_dim": 10}
UNTIED = SHAPE | {"tie_word_embeddings": False}


def leaves(model: Qwen2) -> list[np.ndarray]:
  return [np.asarray(x) for x in jax.tree.leaves(nnx.split(model)[1])]


def assert_same(model: Qwen2, other: Qwen2) -> None:
  assert model.config == other.config
  for mine, its in zip(leaves(model), leaves(other), strict=True):
    assert mine.dtype == its.dtype
    np.testing.assert_array_equal(mine, its)


@jax.jit
def forward(model, tokens_BxT):
  hidden_BxTxD = model(tokens_BxT)
  return hidden_BxTxD, model.logits(hidden_BxTxD)


@pytest.mark.parametrize("case", make_qwen2.CASES)
def test_computes_what_the_pytorch_original_does(case, tmp_path):
  """Qwen2ForCausalLM's numbers (float32), which golden/make_qwen2.py made with the same weights.

  Grouped, multi-head and multi-query attention; tied and untied heads; 3,000 tokens.
  """
  golden = np.load(make_qwen2.FILE)
  model = load_qwen2(hf.write(tmp_path, hf.SHAPES[case]))
  outputs = forward(model, golden[f"{case}/tokens_BxT"].astype(np.int32))
  for output, name in zip(outputs, ("hidden_BxSxD", "logits_BxSxV")):
    want = golden[f"{case}/{name}"]
    assert want.std() > 0.5
    np.testing.assert_allclose(output[:, golden[f"{case}/kept_S"]], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [SHAPE, UNTIED])
def test_transformers_loads_what_is_saved(shape, tmp_path):
  """Where torch is installed: the model, and a Qwen2's tokenizer with the decisions added."""
  pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  model = load_qwen2(hf.write(tmp_path / "base", shape, tokens=300))
  adopt_tokenizer(tmp_path / "base", tmp_path / "adopted")
  saved, file = tmp_path / "saved", tmp_path / "adopted" / "tokenizer.json"
  save_qwen2(model, saved, file, jnp.float32)
  tokens_BxT = np.random.default_rng(5).integers(0, 307, (2, 12))
  for output, want in zip(forward(model, tokens_BxT), make_qwen2.outputs(saved, tokens_BxT)):
    np.testing.assert_allclose(output, want, rtol=0, atol=2e-5)
  tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
  text = "task: find the plant\n\n  step 1 model:<|BIG|> action: é☂ big SMALL<|SMALL|>."
  ids = tokenizers.Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
  assert tokenizer(text).input_ids == ids and tokenizer.decode(ids) == text
  assert [id for id in ids if id >= 300] == [301, 300]


def test_the_sizes_are_those_of_config_json(tmp_path):
  config = weights.read_config(hf.write(tmp_path, hf.SHAPES["multihead"]))
  sizes = 131, 40, 56, 2, 4, 4, 16, 10_000.0, 1e-3, False, 32_768
  assert tuple(vars(config).values())[: len(sizes)] == sizes
  # Without a size of heads they share the width, without key heads each has its own; transformers
  # writes the base of the rotations into a field of today's.
  rope = {"rope_type": "default", "rope_theta": 500.0}
  absent = {"num_key_value_heads": None, "head_dim": None, "rope_theta": None}
  set_fields(tmp_path, absent | {"rope_parameters": rope})
  config = weights.read_config(tmp_path)
  assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (4, 10, 500.0)


SCRIPT = """
import json, sys
import jax
from flax import nnx
from baar_jax.mesh import make_mesh
from baar_jax.router.weights import load_qwen2, save_qwen2
from pathlib import Path

base, saved = map(Path, sys.argv[1:])
split = load_qwen2(base, mesh=make_mesh(4))
save_qwen2(split, saved, base / "tokenizer.json", "float32")
shares = {
  jax.tree_util.keystr(path): [shard.data.size / x.size for shard in x.addressable_shards]
  for path, x in jax.tree_util.tree_leaves_with_path(nnx.split(split)[1])
}
print(json.dumps(shares))
"""


def test_four_devices_share_what_is_loaded(tmp_path):
  hf.write(tmp_path / "base", UNTIED, shard_mb=0.06, tokens=300)
  devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
  result = subprocess.run(
    [sys.executable, "-c", SCRIPT, tmp_path / "base", tmp_path / "saved"],
    env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | devices,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr
  shares = json.loads(result.stdout.splitlines()[-1])
  # 307 tokens and heads of 10 cannot be divided by 4; 48 and 40 can.
  assert shares == {name: [1.0 if "_bias" in name else 1 / 4] * 4 for name in shares}
  assert len(shares) == 15
  assert_same(load_qwen2(tmp_path / "saved"), load_qwen2(tmp_path / "base"))


@pytest.mark.parametrize(
  "shape, stored, shard_mb",
  [(SHAPE | {"num_hidden_layers": 1}, "bfloat16", None), (UNTIED, "float32", 0.03)],
  ids=["whole", "shards"],
)
def test_writes_what_was_loaded(shape, stored, shard_mb, tmp_path):
  """Every number of every tensor, in bf16 if nothing else is asked for."""
  base = hf.write(tmp_path / "base", shape, stored, shard_mb=shard_mb, tokens=300)
  assert (len(list(base.glob("*.safetensors"))) > 3) == bool(shard_mb)
  saved, dtype = tmp_path / "saved", jnp.dtype(stored)
  model = load_qwen2(base, dtype)
  assert {x.dtype for x in leaves(model)} == {dtype}
  (tmp_path / "saved.tmp").mkdir()  # of a run that was killed
  save_qwen2(model, saved, base / "tokenizer.json", *([] if stored == "bfloat16" else [dtype]))
  assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "saved"]
  written, expected = load_file(saved / "model.safetensors"), dict(hf.tensors(shape, stored))
  assert written.keys() == expected.keys()
  for name, want in expected.items():
    np.testing.assert_array_equal(written[name], want, strict=True)
  assert_same(load_qwen2(saved, dtype), model)
  assert (saved / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_the_first_layers_alone_are_a_smaller_router(adopt, tmp_path):
  directory = hf.write(tmp_path / "whole", SHAPE, tokens=300)
  whole, cut = load_qwen2(directory), load_qwen2(directory, layers=2)
  for mine, its in zip(leaves(cut.layers), leaves(whole.layers), strict=True):
    np.testing.assert_array_equal(mine, its[:2])
  save_qwen2(cut, tmp_path / "cut", directory / "tokenizer.json", jnp.float32)
  assert_same(load_qwen2(tmp_path / "cut"), cut)
  with pytest.raises(ValueError, match="router.layers is 4; the weights have 3"):
    weights.check_pretrained(RouterConfig(weights=str(directory), layers=4))
  view = adopt(directory)
  view.config = dataclasses.replace(view.config, layers=2)
  start = load_initial(tmp_path, Config(router=view.config), view, None)
  assert start.config == weights.find_shape(view.config, view.decision_ids)
  small, big = start.embedding_VxD[...][np.array(view.decision_ids)]
  np.testing.assert_array_equal(small, big)  # what the words' rows are for is cut off


def test_a_directory_appears_when_it_is_whole(tmp_path, monkeypatch):
  base = hf.write(tmp_path / "base", UNTIED, tokens=300)

  def disk_full(tensors, path, metadata):
    path.write_bytes(b"cut")
    raise SafetensorError("no space left")

  monkeypatch.setattr(weights, "save_file", disk_full)
  with pytest.raises(ValueError, match="^\\S+model.safetensors cannot be written: no space left$"):
    save_qwen2(load_qwen2(base), tmp_path / "saved", base / "tokenizer.json")
  assert not (tmp_path / "saved").exists()


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


@pytest.mark.parametrize(
  "name, shape, dtype, line",
  [
    ("side\n\x1b[3m", [3], "f4", f"{WHOLE}: tensor 'side\\n\\x1b[3m' has no place in a Qwen2"),
    (UP, None, "f4", f"DIR: tensor {UP} is in no model*.safetensors"),
    (UP, [40, 48], "i1", f"{WHOLE}: tensor {UP} is I8 [40, 48], expected F32 or BF16 or F16 [40, "),
    (UP, [48, 40], "f4", f"{UP} is F32 [48, 40], expected F32 or BF16 or F16 [40, 48]"),
    (BIAS, [2, 10], "f4", f"{BIAS} is F32 [2, 10], expected F32 or BF16 or F16 [20]"),
  ],
)
def test_a_tensor_that_does_not_fit_is_refused(name, shape, dtype, line, tmp_path):
  set_tensor(hf.write(tmp_path, SHAPE), name, None if shape is None else np.zeros(shape, dtype))
  assert line in refusal(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
  save_file({UP: np.zeros([40, 48], "f4")}, hf.write(tmp_path, SHAPE) / "model-2.safetensors")
  assert f"{WHOLE}: tensor {UP} is in model-2.safetensors too; remove one" in refusal(tmp_path)


@pytest.mark.parametrize(
  "name, values",
  [
    ("hidden_size", [None]),
    ("rope_theta", [None, float("nan"), 10**400]),
    ("rms_norm_eps", [float("inf"), -1e-6]),
    ("vocab_size", ["many", [3], -1, 10**400]),
    ("num_attention_heads", [0]),
    ("num_hidden_layers", [10**6]),
    ("head_dim", [9]),  # rotations take pairs
    ("model_type", ["llama", None]),
    ("hidden_act", ["gelu"]),
    ("use_sliding_window", [True]),
    ("rope_scaling", [{"type": "yarn"}]),
    ("quantization_config", [{"bits": 4}]),
  ],
)
def test_a_config_that_does_not_fit_is_refused(name, values, tmp_path):
  for value in values:
    set_fields(hf.write(tmp_path, SHAPE), {name: value})
    assert f"{CONFIG} has a wrong {name} (" in refusal(tmp_path)


@pytest.mark.parametrize(
  "changes, line",
  [
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type (Input should be 'default'); only pl"),
    ({"num_key_value_heads": 4}, f"{CONFIG}: num_attention_heads is no multiple of num_key_"),
    # 10^8 rows of 10^6 numbers of 4 bytes are 400,000 GB, and each layer 1.1.
    ({"vocab_size": 10**8, "hidden_size": 10**6, "head_dim": 10}, "weights of 400,003 GB in float"),
  ],
)
def test_sizes_that_cannot_be_are_refused(changes, line, tmp_path):
  set_fields(hf.write(tmp_path, SHAPE), changes)
  assert line in refusal(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize(
  "content",
  [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("gone")]  # a pipe would be waited for
  + [b"", b"{", b"[]", b"[\n]", b"\xff", b"[" * 100_000, "cut"],
)
def test_a_file_that_cannot_be_read_is_refused(file, content, adopt, tmp_path):
  path = hf.write(tmp_path, SHAPE, tokens=300) / file
  data = path.read_bytes()[:-1] if content == "cut" else content
  path.unlink()
  path.write_bytes(data) if isinstance(data, bytes) else content(path)
  reason = r"[^\n]+" if isinstance(data, bytes) else "it is missing or no regular file"
  with pytest.raises(ValueError, match=rf"^{path} cannot be read \({reason}\)[^\n]+$"):
    load_pretrained(adopt(tmp_path))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_numbers_that_are_none_are_neither_read_nor_written(number, stored, tmp_path):
  base, saved = hf.write(tmp_path / "base", SHAPE, stored, tokens=300), tmp_path / "saved"
  model = load_qwen2(base)
  array = load_file(base / "model.safetensors")[UP].copy()
  array[39, 47] = number
  set_tensor(base, UP, array)
  assert f"{WHOLE}: tensor {UP}: all numbers must be finite" in refusal(base)
  with pytest.raises(ValueError, match="all numbers must be finite"):
    weights.check_pretrained(RouterConfig(weights=str(base)))  # before anything is paid
  norm, up = model.final_norm[...], model.layers.up_kernel
  model.final_norm[...] = norm.at[3].set(np.finfo(np.float32).max)  # bf16 cannot hold it
  for tensor in ("model.norm.weight", UP):
    with pytest.raises(ValueError, match=f"{tensor}: all numbers must be finite"):
      save_qwen2(model, saved, base / "tokenizer.json")
    model.final_norm[...], up[...] = norm, up[...].at[1, 47, 39].set(number)
  assert not saved.exists()


def test_decisions_start_alike(router_config, filled):
  config = dataclasses.replace(router_config, tie_word_embeddings=False)
  model = filled(lambda: build_model(config, 0))
  expected = [np.array(table[...]) for table in model.token_tables]
  for table in expected:
    table[[3, 5]] = (table[3] + table[5]) / 2
  weights.start_alike(model, [3, 5])
  for table, want in zip(model.token_tables, expected, strict=True):
    np.testing.assert_allclose(table[...], want, rtol=1e-6)


@pytest.fixture
def adopt(router_config, tmp_path):
  """adopt(directory): the view that a run makes of a checkpoint."""

  def make(directory):
    adopt_tokenizer(directory, tmp_path / "tokenizer")
    config = dataclasses.replace(router_config, weights=str(directory))
    return View(config, tmp_path / "tokenizer")

  return make


WORDS = (["Ġ", "S", "M", "A", "LL"], ["Ġ", "B", "I", "G"])  # " SMALL" and " BIG" in tokens


@pytest.mark.parametrize(
  "tied, vocab_size, tokens, rows",
  [
    (True, 302, 300, 302),  # as many spare rows as there are decisions
    (False, 301, 300, 384),  # one too few: 3 * 128
    (True, 383, 383, 512),  # the second decision is row 384, the first of the next block
  ],
)
def test_a_checkpoints_decisions_start_as_their_words(
  tied, vocab_size, tokens, rows, adopt, tmp_path
):
  shape = hf.SHAPES["grouped"] | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
  view = adopt(hf.write(tmp_path / "base", shape, tokens=tokens))
  ids = view.decision_ids
  assert ids == [tokens, tokens + 1]  # behind all of its own
  model, written = load_pretrained(view), dict(hf.tensors(shape))
  number_of = json.loads((tmp_path / "base" / "tokenizer.json").read_text())["model"]["vocab"]
  for name, table in zip(("model.embed_tokens.weight", "lm_head.weight"), model.token_tables):
    before, after = written[name], np.asarray(table[...])
    assert after.shape == (rows, 48)
    means = [before[[number_of[token] for token in word]].mean(axis=0) for word in WORDS]
    np.testing.assert_allclose(after[ids], means, atol=1e-6)
    others = np.setdiff1d(np.arange(vocab_size), ids)
    np.testing.assert_array_equal(after[others], before[others])
  np.testing.assert_array_equal(model.final_norm[...], written["model.norm.weight"])
  # Checkpoints are restored into this shape.
  abstract = weights.make_abstract_model(weights.find_shape(view.config, ids))
  assert model.config == abstract.config
  structures = (nnx.split(router)[1] for router in (model, abstract))
  shapes, expected = ([x.shape for x in jax.tree.leaves(params)] for params in structures)
  assert shapes == expected
  # A saved router keeps what its decisions have learned.
  for number, table in enumerate(model.token_tables):
    table[...] = table[...].at[np.array(ids)].set(7.0 + number)
  save_qwen2(model, tmp_path / "saved", tmp_path / "tokenizer" / "tokenizer.json", jnp.float32)
  saved = adopt(tmp_path / "saved")
  assert saved.decision_ids == ids
  assert_same(load_pretrained(saved), model)
