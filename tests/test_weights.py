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

from baar_jax.config import RouterConfig
from baar_jax.router import weights
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.tokenizer import adopt_tokenizer
from baar_jax.router.view import View
from baar_jax.router.weights import build_model, load_pretrained, load_qwen2, save_qwen2

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
  """The numbers are Qwen2ForCausalLM's (transformers 5.23, float32) with the same weights.

  `cd tests && python -m golden.make_qwen2` made them. Grouped, multi-head and multi-query
  attention; tied and untied heads; 3,000 tokens. Biases and norms are random too.
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
import numpy as np
from flax import nnx
from baar_jax.mesh import make_mesh
from baar_jax.router.weights import load_qwen2, save_qwen2

def used(name):
  lines = open("/proc/self/status").read().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

base, saved, large = sys.argv[1:]
load_qwen2(base)  # what the first call compiles and keeps
before = used("VmRSS")
model = load_qwen2(large)
peak = used("VmHWM") - before  # ru_maxrss of a child starts at what its parent has used
split = load_qwen2(base, mesh=make_mesh(4))
save_qwen2(split, saved, base + "/tokenizer.json", np.float32)
params = jax.tree_util.tree_leaves_with_path(nnx.split(split)[1])
shares = lambda x: [shard.data.size / x.size for shard in x.addressable_shards]
print(json.dumps([peak, {jax.tree_util.keystr(path): shares(x) for path, x in params}]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_and_four_devices(tmp_path):
  """With four devices; of 304 MB all layers' tensors of a kind are at most 79 MB."""
  hf.write(tmp_path / "base", UNTIED, shard_mb=0.06, tokens=300)
  large = dict(zip(hf.FIELDS, (8_192, 640, 2_560, 12, 10, 2, True)))
  hf.write(tmp_path / "large", large, shard_mb=50)
  stored = sum(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors"))
  devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
  result = subprocess.run(
    [sys.executable, "-c", SCRIPT, *(tmp_path / name for name in ("base", "saved", "large"))],
    env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | devices,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr
  peak, shares = json.loads(result.stdout.splitlines()[-1])
  # The host needs the parameters, and at most twice 79 MB while one kind of tensor is placed.
  assert stored > 300e6 and stored < peak < 1.55 * stored
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
  with pytest.raises(ValueError, match="saved exists; remove it"):
    save_qwen2(model, saved, base / "tokenizer.json")


def test_a_directory_appears_when_it_is_whole(tmp_path, monkeypatch):
  base = hf.write(tmp_path / "base", UNTIED, tokens=300)

  def disk_full(tensors, path, metadata):
    path.write_bytes(b"cut")
    raise SafetensorError("no space left")

  monkeypatch.setattr(weights, "save_file", disk_full)
  with pytest.raises(ValueError, match="^\\S+model.safetensors cannot be written: no space left$"):
    save_qwen2(load_qwen2(base), tmp_path / "saved", base / "tokenizer.json")
  assert not (tmp_path / "saved").exists()


def set_tensor(directory: Path, name: str, array, file: str = "model.safetensors") -> None:
  """Sets a tensor of a file; None leaves it out."""
  tensors = load_file(directory / file) | {name: array}
  save_file({name: x for name, x in tensors.items() if x is not None}, directory / file)


def set_fields(directory: Path, changes: dict, file: str = "config.json") -> None:
  """Sets fields of a JSON file; those that are None are left out."""
  new = json.loads((directory / file).read_text()) | changes
  text = json.dumps({name: value for name, value in new.items() if value is not None})
  (directory / file).write_text(text)


def cut(path: Path, of_header: float, of_data: float) -> None:
  """Leaves these shares of a file's header and of its numbers."""
  data = path.read_bytes()
  header = 8 + int.from_bytes(data[:8], "little")
  path.write_bytes(data[: int(header * of_header + (len(data) - header) * of_data)])


def zeros(*shape):
  return np.zeros(shape, np.float32)


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
  "name, array, line",
  [
    ("side\n\x1b[3m", zeros(3), f"{WHOLE}: tensor 'side\\n\\x1b[3m' has no place"),
    (UP.replace("1", "3"), zeros(40, 48), "layers.3.mlp.up_proj.weight' has no place"),
    ("lm_head.weight", zeros(307, 48), "tensor 'lm_head.weight' has no place"),
    (UP, None, f"DIR: tensor {UP} is in no model*.safetensors"),
    (UP, zeros(48, 40), f"{WHOLE}: tensor {UP} is [48, 40], config.json makes it [40, 48]"),
    (UP, zeros(40 * 48), f"{UP} is [1920], config.json makes it [40, 48]"),
    (BIAS, zeros(2, 10), f"{BIAS} is [2, 10], config.json makes it [20]"),
    ("model.embed_tokens.weight", zeros(306, 48), "[306, 48], config.json makes it [307"),
  ],
)
def test_a_tensor_that_does_not_fit_is_refused(name, array, line, tmp_path):
  set_tensor(hf.write(tmp_path, SHAPE), name, array)
  assert line in refusal(tmp_path)


@pytest.mark.parametrize(
  "name, value, problem",
  [
    ("hidden_size", None, "a wrong hidden_size (Field required)"),
    ("rope_theta", None, "a wrong rope_theta (Field required)"),
    ("vocab_size", "many", "a wrong vocab_size (Input should be a valid integer"),
    ("vocab_size", [3], "a wrong vocab_size (Input should be a valid integer"),
    ("vocab_size", -1, "a wrong vocab_size (Input should be greater than 0"),
    ("num_attention_heads", 0, "a wrong num_attention_heads (Input should be greater than 0"),
    ("head_dim", 9, "a wrong head_dim (Input should be a multiple of 2"),
    ("rope_theta", float("nan"), "a wrong rope_theta (Input should be a finite number"),
    ("rope_theta", 10**400, "a wrong rope_theta (Input should be a valid number"),
    ("rms_norm_eps", float("inf"), "a wrong rms_norm_eps (Input should be a finite number"),
    ("rms_norm_eps", -1e-6, "a wrong rms_norm_eps (Input should be greater than 0"),
    ("vocab_size", 10**400, "a wrong vocab_size (Input should be less than"),
    ("num_hidden_layers", 10**6, "a wrong num_hidden_layers (Input should be less than"),
    ("model_type", "llama", "a wrong model_type (Input should be 'qwen2'); only plain Qwen2"),
    ("model_type", None, "a wrong model_type (Input should be 'qwen2')"),
    ("hidden_act", "gelu", "a wrong hidden_act (Input should be 'silu')"),
    ("use_sliding_window", True, "a wrong use_sliding_window (Input should be False)"),
    ("rope_scaling", {"type": "yarn"}, "a wrong rope_scaling (Input should be None)"),
    ("rope_parameters", {"rope_type": "yarn"}, "a wrong rope_type (Input should be 'default')"),
    ("quantization_config", {"bits": 4}, "a wrong quantization_config (Input should be None)"),
  ],
)
def test_a_config_that_does_not_fit_is_refused(name, value, problem, tmp_path):
  set_fields(hf.write(tmp_path, SHAPE), {name: value})
  assert f"{CONFIG} has {problem}" in refusal(tmp_path)


@pytest.mark.parametrize(
  "changes, line",
  [
    ({"num_key_value_heads": 4}, f"{CONFIG}: num_attention_heads is no multiple of num_key_"),
    # 10^8 rows of 10^6 numbers of 4 bytes are 400,000 GB, and each layer 1.1.
    ({"vocab_size": 10**8, "hidden_size": 10**6, "head_dim": 10}, "weights of 400,003 GB in float"),
  ],
)
def test_sizes_that_cannot_be_are_refused(changes, line, tmp_path):
  set_fields(hf.write(tmp_path, SHAPE), changes)
  assert line in refusal(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{\n]", "\xff", "[" * 100_000, None])
def test_a_config_that_cannot_be_read_is_refused(text, tmp_path):
  path = hf.write(tmp_path, SHAPE) / "config.json"
  path.unlink() if text is None else path.write_text(text, "latin-1")
  assert f"{CONFIG} cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("gone")])
def test_a_file_that_is_no_regular_file_is_refused(file, make, adopt, tmp_path):
  """Directories, pipes (which would be waited for) and broken links."""
  path = hf.write(tmp_path, SHAPE, tokens=300) / file
  path.unlink()
  make(path)
  with pytest.raises(
    ValueError, match=rf"^{path} cannot be read \(it is missing or no regular file\)[^\n]*$"
  ):
    load_pretrained(adopt(tmp_path))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_numbers_that_are_none_are_neither_read_nor_written(number, stored, tmp_path):
  base = hf.write(tmp_path / "base", SHAPE, stored, tokens=300)
  model = load_qwen2(base)
  array = load_file(base / "model.safetensors")[UP].copy()
  array[39, 47] = number
  set_tensor(base, UP, array)
  line = f"DIR/model.safetensors: tensor {UP}: all numbers must be finite"
  assert line in refusal(base)
  config = RouterConfig(weights=str(base))
  with pytest.raises(ValueError, match="all numbers must be finite"):
    weights.check_pretrained(config)  # before anything is paid
  model.layers.up_kernel[...] = model.layers.up_kernel[...].at[1, 47, 39].set(number)
  with pytest.raises(ValueError, match=f"{UP}: all numbers must be finite"):
    save_qwen2(model, tmp_path / "saved", base / "tokenizer.json")
  assert not (tmp_path / "saved").exists()


def test_a_number_that_bf16_cannot_hold_is_not_written(tmp_path):
  model = load_qwen2(hf.write(tmp_path / "base", SHAPE, tokens=300))
  model.final_norm[...] = model.final_norm[...].at[3].set(np.finfo(np.float32).max)
  with pytest.raises(ValueError, match="model.norm.weight: all numbers must be finite"):
    save_qwen2(model, tmp_path / "saved", tmp_path / "base" / "tokenizer.json")


def test_the_largest_shape_that_a_configuration_may_have_is_a_shape():
  largest = {"vocab_size": 10**8, "hidden_size": 10**6, "intermediate_size": 10**6}
  largest |= {"num_layers": 1000, "num_heads": 10**4, "num_kv_heads": 10**4, "head_dim": 10**4}
  assert weights.find_shape(RouterConfig(**largest), ()).num_hidden_layers == 1000
  for name, value in largest.items():
    with pytest.raises(ValueError, match="less than or equal"):
      RouterConfig(**{name: value + 2})


@pytest.mark.parametrize("tied", [True, False])
def test_decisions_start_alike(router_config, filled, tied):
  config = dataclasses.replace(router_config, tie_word_embeddings=tied)
  model = filled(lambda: build_model(config, 0))
  tables = [model.embedding_VxD] if tied else [model.embedding_VxD, model.head_VxD]
  befores = [np.array(table[...]) for table in tables]
  weights.start_alike(model, [3, 5])
  for before, table in zip(befores, tables):
    after = np.array(table[...])
    others = np.delete(np.arange(len(before)), [3, 5])
    np.testing.assert_array_equal(after[others], before[others])
    np.testing.assert_allclose(after[[3, 5]], [(before[3] + before[5]) / 2] * 2, rtol=1e-6)


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
  assert view.decision_ids == [tokens, tokens + 1]  # behind all of its own
  model = load_pretrained(view)
  written = dict(hf.tensors(shape))
  tables = {"model.embed_tokens.weight": model.embedding_VxD}
  if not tied:
    tables["lm_head.weight"] = model.head_VxD
  number_of = json.loads((tmp_path / "base" / "tokenizer.json").read_text())["model"]["vocab"]
  for name, table in tables.items():
    before, after = written[name], np.asarray(table[...])
    assert after.shape == (rows, 48)
    for row, word in zip(view.decision_ids, WORDS):
      want = sum(before[number_of[token]] for token in word) / len(word)
      np.testing.assert_allclose(after[row], want, atol=1e-6)
    others = np.delete(np.arange(vocab_size), [id for id in view.decision_ids if id < vocab_size])
    np.testing.assert_array_equal(after[others], before[others])
  np.testing.assert_array_equal(model.final_norm[...], written["model.norm.weight"])
  # Checkpoints are restored into this shape.
  abstract = weights.make_abstract_model(weights.find_shape(view.config, view.decision_ids))
  assert model.config == abstract.config
  structures = (nnx.split(router)[1] for router in (model, abstract))
  shapes, expected = ([x.shape for x in jax.tree.leaves(params)] for params in structures)
  assert shapes == expected


@pytest.mark.parametrize("tied, vocab_size", [(True, 307), (False, 300)], ids=["spare", "grown"])
def test_a_saved_router_keeps_its_decisions(tied, vocab_size, adopt, tmp_path):
  shape = hf.SHAPES["grouped"] | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
  view = adopt(hf.write(tmp_path / "base", shape, tokens=300))
  model = load_pretrained(view)
  for number, table in enumerate(model.token_tables):  # trained
    table[...] = table[...].at[np.array(view.decision_ids)].set(7.0 + number)
  save_qwen2(model, tmp_path / "saved", tmp_path / "tokenizer" / "tokenizer.json", jnp.float32)
  saved = adopt(tmp_path / "saved")
  assert saved.decision_ids == view.decision_ids
  assert_same(load_pretrained(saved), model)
