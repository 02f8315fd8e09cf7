"""Hugging Face weights: PyTorch's numbers, in and out exactly, one tensor at a time, no trust."""

import functools
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
from safetensors.numpy import load_file, save_file

from baar_jax.router import weights
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.tokenizer import adopt_tokenizer
from baar_jax.router.weights import check_directory, load_qwen2, read_config, save_qwen2

TESTS = Path(__file__).parent
INDEX = "model.safetensors.index.json"
# 6 heads of 10 on a width of 48: no two axes of a kernel, in the file or here, are as long.
SHAPE = hf.SHAPES["grouped"] | {"head_dim": 10}
UNTIED = SHAPE | {"tie_word_embeddings": False}
H = 10
# Where in the file's tensor the number is that stands at these places of a layer's parameter.
LAYOUT = {
  "input_norm": ("input_layernorm.weight", lambda d: (d,)),
  "q_kernel": ("self_attn.q_proj.weight", lambda d, n, h: (n * H + h, d)),
  "q_bias": ("self_attn.q_proj.bias", lambda n, h: (n * H + h,)),
  "k_kernel": ("self_attn.k_proj.weight", lambda d, k, h: (k * H + h, d)),
  "k_bias": ("self_attn.k_proj.bias", lambda k, h: (k * H + h,)),
  "v_kernel": ("self_attn.v_proj.weight", lambda d, k, h: (k * H + h, d)),
  "v_bias": ("self_attn.v_proj.bias", lambda k, h: (k * H + h,)),
  "o_kernel": ("self_attn.o_proj.weight", lambda n, h, d: (d, n * H + h)),
  "post_attention_norm": ("post_attention_layernorm.weight", lambda d: (d,)),
  "gate_kernel": ("mlp.gate_proj.weight", lambda d, f: (f, d)),
  "up_kernel": ("mlp.up_proj.weight", lambda d, f: (f, d)),
  "down_kernel": ("mlp.down_proj.weight", lambda f, d: (d, f)),
}


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


@pytest.fixture(scope="module")
def golden():
  """golden(case, name): an array of qwen2.npz."""
  arrays = dict(np.load(make_qwen2.FILE))
  return lambda case, name: arrays[f"{case}/{name}"]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
  """directory_of(case): the weights that a case of qwen2.npz was computed from."""
  root = tmp_path_factory.mktemp("cases")
  return functools.cache(lambda case: hf.write(root / case, hf.SHAPES[case]))


@pytest.fixture(scope="module")
def ours(golden, directory_of):
  """ours(case): (hidden_BxTxD, logits_BxTxV) of a case's tokens by baar_jax."""

  @functools.cache
  def compute(case):
    tokens_BxT = golden(case, "tokens_BxT").astype(np.int32)
    return tuple(map(np.asarray, forward(load_qwen2(directory_of(case)), tokens_BxT)))

  return compute


@pytest.mark.parametrize("case", make_qwen2.CASES)
def test_computes_what_the_pytorch_original_does(case, golden, ours):
  """The numbers are Qwen2ForCausalLM's (transformers 5.23, float32) with the same weights.

  `cd tests && python -m golden.make_qwen2` made them. Grouped, multi-head and multi-query
  attention; tied and untied heads; 3,000 tokens. Biases and norms are random too.
  """
  kept_S = golden(case, "kept_S")
  for got, name in zip(ours(case), ("hidden_BxSxD", "logits_BxSxV")):
    want = golden(case, name)
    assert want.std() > 0.5
    np.testing.assert_allclose(got[:, kept_S], want, rtol=0, atol=2e-5)


class TestPyTorch:
  """Where torch and transformers are installed."""

  @pytest.fixture
  def transformers(self):
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")

  @pytest.mark.parametrize("case", make_qwen2.CASES)
  def test_every_position_equals_the_original(self, transformers, case, golden, ours, directory_of):
    original = make_qwen2.outputs(directory_of(case), golden(case, "tokens_BxT").astype(np.int32))
    names = "hidden_BxSxD", "logits_BxSxV"
    for got, want, name in zip(ours(case), original, names):
      np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
      # What is stored is what the original computes here.
      kept = want[:, golden(case, "kept_S")]
      np.testing.assert_allclose(kept, golden(case, name), rtol=0, atol=1e-5)

  @pytest.mark.parametrize("shape, shard_bytes", [(SHAPE, 1 << 30), (UNTIED, 40_000)])
  def test_loads_what_is_saved(self, transformers, shape, shard_bytes, tmp_path, monkeypatch):
    """The model and the tokenizer, which is a Qwen2's with the decisions added."""
    model = load_qwen2(hf.write(tmp_path / "base", shape, tokens=300))
    adopt_tokenizer(tmp_path / "base", tmp_path / "adopted")
    monkeypatch.setattr(weights, "SHARD_BYTES", shard_bytes)
    saved, file = tmp_path / "saved", tmp_path / "adopted" / "tokenizer.json"
    save_qwen2(model, saved, file, jnp.float32)
    assert (saved / INDEX).exists() == (shard_bytes < 1 << 30)
    tokens_BxT = np.random.default_rng(5).integers(0, 307, (2, 12))
    for got, want in zip(forward(model, tokens_BxT), make_qwen2.outputs(saved, tokens_BxT)):
      np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    self.assert_reads(theirs, tokenizers.Tokenizer.from_file(str(file)), [300, 301])

  def assert_reads(self, theirs, mine, decisions):
    text = "task: find the plant\n\n  step 1 model:<|BIG|> action: é☂ big SMALL<|SMALL|>."
    ids = mine.encode(text, add_special_tokens=False).ids
    assert theirs(text).input_ids == ids and theirs.decode(ids) == text
    assert [id for id in ids if id in decisions] == decisions[::-1]
    assert theirs.convert_tokens_to_ids(["<|SMALL|>", "<|BIG|>"]) == decisions

  def test_reads_a_tokenizer_that_was_trained_here(self, transformers, tmp_path, tokenizer_dir):
    """By the class that takes tokenizer.json as it is: AutoTokenizer splits texts as Qwen2 does,
    whatever tokenizer.json and tokenizer_config.json say."""
    model = load_qwen2(hf.write(tmp_path / "base", SHAPE))
    file = tokenizer_dir / "tokenizer.json"
    save_qwen2(model, tmp_path / "saved", file)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    self.assert_reads(theirs, tokenizers.Tokenizer.from_file(str(file)), [0, 1])

  @pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
  def test_what_transformers_saves_is_loaded(self, transformers, shape, tmp_path):
    """Its config.json of today has other fields than those of the published checkpoints."""
    hf.write(tmp_path / "base", shape)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    original.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    assert_same(load_qwen2(tmp_path / "saved"), load_qwen2(tmp_path / "base"))


class TestLoad:
  @pytest.mark.parametrize(
    "shape, shard_mb, stored, dtype",
    [
      (SHAPE, None, "float32", jnp.float32),
      (UNTIED, 0.03, "bfloat16", jnp.float32),
      (SHAPE, 0.06, "float32", jnp.bfloat16),
    ],
  )
  def test_every_number_is_in_its_place(self, shape, shard_mb, stored, dtype, tmp_path):
    hf.write(tmp_path, shape, stored, shard_mb=shard_mb)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == bool(shard_mb)
    model = load_qwen2(tmp_path, dtype)
    # bf16 numbers are float32 ones too; float32 ones are rounded to the nearest bf16.
    written = {name: np.asarray(x, dtype) for name, x in hf.tensors(shape, stored)}
    found = {
      "model.embed_tokens.weight": model.embedding_VxD,
      "model.norm.weight": model.final_norm,
    }
    if not shape["tie_word_embeddings"]:
      found["lm_head.weight"] = model.head_VxD
    for name, param in found.items():
      assert param[...].dtype == dtype
      np.testing.assert_array_equal(param[...], written.pop(name), err_msg=name)
    for name, (theirs, place) in LAYOUT.items():
      param = getattr(model.layers, name)[...]
      assert param.dtype == dtype
      for layer in range(3):
        where = place(*np.indices(param.shape[1:]))
        want = written.pop(f"model.layers.{layer}.{theirs}")
        assert want.size == param[layer].size
        np.testing.assert_array_equal(param[layer], want[where], err_msg=name)
    assert not written
    assert len(leaves(model)) == len(found) + len(LAYOUT)

  def test_the_sizes_are_those_of_config_json(self, tmp_path):
    config = read_config(hf.write(tmp_path, hf.SHAPES["multihead"]))
    sizes = 131, 40, 56, 2, 4, 4, 16, 10_000.0, 1e-3, False, 32_768
    assert tuple(vars(config).values()) == sizes
    # Without a size of heads they share the width, without key heads each has its own.
    change(tmp_path, num_key_value_heads=None, head_dim=None)
    config = read_config(tmp_path)
    assert (config.num_key_value_heads, config.head_dim) == (4, 10)

  def test_a_single_layer(self, tmp_path):
    shape = SHAPE | {"num_hidden_layers": 1}
    kernel_LxFxD = load_qwen2(hf.write(tmp_path, shape)).layers.down_kernel[...]
    written = dict(hf.tensors(shape))["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(kernel_LxFxD, written.T[None])


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
whole = load_qwen2(base)  # what the first call compiles and keeps
before = used("VmRSS")
model = load_qwen2(large)
peak = used("VmHWM") - before  # ru_maxrss of a child starts at what its parent has used
split = load_qwen2(base, mesh=make_mesh(4))
save_qwen2(split, saved, base + "/tokenizer.json", np.float32)
ours, theirs = (jax.tree_util.tree_leaves_with_path(nnx.split(m)[1]) for m in (split, whole))
print(json.dumps([peak, {
  jax.tree_util.keystr(path): [
    len(y.devices()),
    [shard.data.size / x.size for shard in x.addressable_shards],
    bool((np.asarray(x) == np.asarray(y)).all()),
  ]
  for (path, x), (_, y) in zip(ours, theirs)
}]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_and_four_devices(tmp_path):
  """With four devices; of 304 MB a tensor is 6.6 MB and all layers' of a kind 79 MB."""
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
  peak, parameters = json.loads(result.stdout.splitlines()[-1])
  # The host needs the parameters and one tensor.
  assert stored > 300e6 and stored < peak < 1.35 * stored
  for name, (devices, shares, same) in parameters.items():
    assert (devices, same) == (1, True), name
    # 307 tokens and heads of 10 cannot be divided by 4; 48 and 40 can.
    assert shares == [1.0 if "_bias" in name else 1 / 4] * 4, name
  assert len(parameters) == 15
  assert_same(load_qwen2(tmp_path / "saved"), load_qwen2(tmp_path / "base"))


class TestSave:
  @pytest.fixture
  def base(self, tmp_path):
    return hf.write(tmp_path / "base", UNTIED, tokens=300)

  @pytest.mark.parametrize("shape, shard_bytes, count", [(SHAPE, 1 << 30, 1), (UNTIED, 60_000, 4)])
  def test_writes_what_was_loaded(self, shape, shard_bytes, count, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", shard_bytes)
    base = hf.write(tmp_path / "base", shape, tokens=300)
    model, saved = load_qwen2(base), tmp_path / "saved"
    (tmp_path / "saved.tmp").mkdir()  # of a run that was killed
    save_qwen2(model, saved, base / "tokenizer.json", jnp.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "saved"]
    files = {path.name: load_file(path) for path in saved.glob("*.safetensors")}
    written = {name: x for tensors in files.values() for name, x in tensors.items()}
    assert len(files) >= count and (count > 1 or len(files) == 1)
    for name, want in hf.tensors(shape):
      np.testing.assert_array_equal(written.pop(name), want, strict=True)
    assert not written
    assert (saved / INDEX).exists() == (count > 1)
    if count > 1:
      index = json.loads((saved / INDEX).read_text())
      assert index["weight_map"] == {name: file for file in files for name in files[file]}
      assert index["metadata"]["total_size"] == sum(x.nbytes for _, x in hf.tensors(shape))
    assert (saved / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert_same(load_qwen2(saved), model)

  def test_bf16_is_the_default(self, base, tmp_path):
    save_qwen2(load_qwen2(base), tmp_path / "saved", base / "tokenizer.json")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    for name, want in hf.tensors(UNTIED, "bfloat16"):
      np.testing.assert_array_equal(written[name], want, strict=True)

  def test_what_is_there_stays(self, base, tmp_path):
    model, saved = load_qwen2(base), tmp_path / "saved"
    saved.mkdir()
    with pytest.raises(ValueError, match="saved exists; remove it"):
      save_qwen2(model, saved, base / "tokenizer.json")
    assert list(saved.iterdir()) == []

  def test_it_appears_when_it_is_whole(self, base, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", 40_000)
    files = []

    def disk_full(tensors, path, metadata):
      files.append(path)
      if len(files) == 3:
        raise OSError("no space left")
      save_file(tensors, path, metadata)

    monkeypatch.setattr(weights, "save_file", disk_full)
    with pytest.raises(OSError, match="no space left"):
      save_qwen2(load_qwen2(base), tmp_path / "saved", base / "tokenizer.json")
    assert files[0].exists() and not (tmp_path / "saved").exists()


def change(directory: Path, file: str = "config.json", **fields) -> None:
  """Sets fields of a JSON file; those that are None are left out."""
  old = json.loads((directory / file).read_text())
  new = {name: value for name, value in (old | fields).items() if value is not None}
  (directory / file).write_text(json.dumps(new))


def edit(file: Path, name: str, tensor: np.ndarray | None) -> None:
  """Sets a tensor of a file; None leaves it out."""
  found = load_file(file) | {name: tensor}
  save_file({name: x for name, x in found.items() if x is not None}, file)


def name_dtype(file: Path, name: str, dtype: str) -> None:
  """Calls the bytes of a float32 tensor four times as many numbers of a dtype of 8 bits."""
  data = file.read_bytes()
  end = 8 + int.from_bytes(data[:8], "little")
  header = json.loads(data[8:end])
  rows, columns = header[name]["shape"]
  header[name] |= {"dtype": dtype, "shape": [4 * rows, columns]}
  text = json.dumps(header).encode()
  file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def refusal(directory: Path) -> str:
  """The one line with which a directory, here DIR, is refused by a glance and by loading."""
  lines = set()
  for read in (check_directory, load_qwen2):
    with pytest.raises(ValueError) as caught:
      read(directory)
    lines.add(str(caught.value))
  (line,) = lines
  assert "\n" not in line
  return line.replace(str(directory), "DIR")


class TestRefused:
  UP = "model.layers.1.mlp.up_proj.weight"  # [40, 48]
  BIAS = "model.layers.2.self_attn.k_proj.bias"  # [20]
  WHOLE = "DIR/model.safetensors"

  @pytest.mark.parametrize(
    "name, tensor, line",
    [
      (UP.replace("up", "side"), np.zeros(3), f"{WHOLE}: tensor {UP.replace('up', 'side')} has no"),
      (UP.replace("1", "3"), np.zeros((40, 48)), UP.replace("1", "3")),
      ("lm_head.weight", np.zeros((307, 48)), "lm_head.weight has no place"),
      (UP, None, f"DIR: tensor {UP} is in none of its files"),
      ("model.norm.weight", None, "tensor model.norm.weight is in none"),
      (UP, np.zeros((48, 40)), f"{WHOLE}: tensor {UP} is [48, 40], config.json makes it [40, 48]"),
      (UP, np.zeros(40 * 48), f"{UP} is [1920], config.json makes it [40, 48]"),
      (BIAS, np.zeros((2, 10)), f"{BIAS} is [2, 10], config.json makes it [20]"),
      (BIAS, np.zeros(60), f"{BIAS} is [60], config.json makes it [20]"),
      ("model.embed_tokens.weight", np.zeros((306, 48)), "[306, 48], config.json makes it [307"),
    ],
  )
  def test_a_tensor(self, name, tensor, line, tmp_path):
    tensor = None if tensor is None else tensor.astype(np.float32)
    edit(hf.write(tmp_path, SHAPE) / "model.safetensors", name, tensor)
    assert line in refusal(tmp_path)

  @pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
  def test_numbers_that_need_a_scale(self, dtype, tmp_path):
    """A quantised tensor is not what its integers are."""
    name_dtype(hf.write(tmp_path, SHAPE) / "model.safetensors", self.UP, dtype)
    line = refusal(tmp_path)
    assert self.WHOLE in line and self.UP in line and dtype in line

  @pytest.mark.parametrize(
    "of_header, of_data", [(0, 0), (0.001, 0), (0.999, 0), (1, 0), (1, 0.5), (1, 0.99999)]
  )
  @pytest.mark.parametrize("shard_mb", [None, 0.06])
  def test_a_file_cut_short(self, of_header, of_data, shard_mb, tmp_path):
    hf.write(tmp_path, SHAPE, shard_mb=shard_mb)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    data = last.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    last.write_bytes(data[: int(header * of_header + (len(data) - header) * of_data)])
    assert f"DIR/{last.name} is cut short or damaged" in refusal(tmp_path)

  def test_a_file_that_is_missing(self, tmp_path):
    (hf.write(tmp_path / "whole", SHAPE) / "model.safetensors").unlink()
    assert f"{self.WHOLE} is missing" in refusal(tmp_path / "whole")
    part = sorted(hf.write(tmp_path / "parts", SHAPE, shard_mb=0.06).glob("*.safetensors"))[1]
    part.unlink()
    assert f"DIR/{part.name} is missing" in refusal(tmp_path / "parts")

  def test_parts_that_disagree_with_their_index(self, tmp_path):
    hf.write(tmp_path, SHAPE, shard_mb=0.06)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    here = places[self.UP]
    tensor = load_file(tmp_path / here)[self.UP]
    other = places["model.embed_tokens.weight"]
    assert other < here  # files are read in this order

    edit(tmp_path / other, self.UP, tensor)
    line = refusal(tmp_path)  # in two files, and the index can only name one
    assert f"DIR/{other}" in line and self.UP in line and here in line
    change(tmp_path, INDEX, weight_map=places | {self.UP: other})
    assert refusal(tmp_path) == f"tensor {self.UP} is in both DIR/{other} and DIR/{here}"

    edit(tmp_path / other, self.UP, None)
    line = refusal(tmp_path)  # only where the index does not say
    assert f"DIR/{here}" in line and self.UP in line and other in line
    edit(tmp_path / here, self.UP, None)
    assert refusal(tmp_path).startswith(f"DIR/{other} lacks tensor {self.UP}")

    edit(tmp_path / here, self.UP, tensor)
    change(tmp_path, INDEX, weight_map={k: v for k, v in places.items() if k != self.UP})
    line = refusal(tmp_path)  # the index does not know it
    assert f"DIR/{here}" in line and self.UP in line
    change(tmp_path, INDEX, weight_map=places)
    load_qwen2(tmp_path)  # all is as it was

  @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "{\n\n]"])
  def test_an_index_that_is_none(self, text, tmp_path):
    (hf.write(tmp_path, SHAPE) / INDEX).write_text(text)
    assert f"DIR/{INDEX}" in refusal(tmp_path)

  @pytest.mark.parametrize("text", ["", "[]", "{\n\n]", "\xff"])
  def test_a_config_that_is_no_json(self, text, tmp_path):
    (hf.write(tmp_path, SHAPE) / "config.json").write_bytes(text.encode("latin-1"))
    assert "DIR/config.json" in refusal(tmp_path)

  def test_a_config_that_is_missing(self, tmp_path):
    (hf.write(tmp_path / "base", SHAPE) / "config.json").unlink()
    for name in ("base", "nowhere"):
      assert refusal(tmp_path / name).startswith("DIR/config.json is missing")

  @pytest.mark.parametrize(
    "name",
    [
      *(name for name in hf.FIELDS if name not in ("num_key_value_heads", "tie_word_embeddings")),
      "rope_theta",
      "rms_norm_eps",
    ],
  )
  def test_a_config_that_lacks_a_field(self, name, tmp_path):
    change(hf.write(tmp_path, SHAPE), **{name: None})
    assert f"DIR/config.json lacks '{name}'" in refusal(tmp_path)
    for value in ("many", [3], -1):
      change(tmp_path, **{name: value})
      assert "DIR/config.json has a size that is" in refusal(tmp_path)

  @pytest.mark.parametrize(
    "field, value",
    [
      ("model_type", "llama"),
      ("model_type", None),
      ("model_type", "qwen3"),
      ("hidden_act", "gelu"),
      ("use_sliding_window", True),
      ("rope_scaling", {"type": "yarn", "factor": 4.0}),
      ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
      ("quantization_config", {"quant_method": "gptq"}),
    ],
  )
  def test_another_architecture(self, field, value, tmp_path):
    change(hf.write(tmp_path, SHAPE), **{field: value})
    line = refusal(tmp_path)
    assert "DIR/config.json has " in line and (field in line or "rope_type='yarn'" in line)
