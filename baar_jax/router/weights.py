"""A Hugging Face directory <-> Qwen2, by one table of names; every tensor is checked."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from baar_jax.mesh import one_device, split_parameters
from baar_jax.router.qwen2 import Qwen2, Qwen2Config

LAYER = "model.layers.{}."
# Our names -> theirs. Kernels are [in, out] here and [out, in] there, with one axis for all heads.
NAMES = {
  "embedding_VxD": "model.embed_tokens.weight",
  "final_norm": "model.norm.weight",
  "head_VxD": "lm_head.weight",
  "input_norm": LAYER + "input_layernorm.weight",
  "q_kernel": LAYER + "self_attn.q_proj.weight",
  "q_bias": LAYER + "self_attn.q_proj.bias",
  "k_kernel": LAYER + "self_attn.k_proj.weight",
  "k_bias": LAYER + "self_attn.k_proj.bias",
  "v_kernel": LAYER + "self_attn.v_proj.weight",
  "v_bias": LAYER + "self_attn.v_proj.bias",
  "o_kernel": LAYER + "self_attn.o_proj.weight",
  "post_attention_norm": LAYER + "post_attention_layernorm.weight",
  "gate_kernel": LAYER + "mlp.gate_proj.weight",
  "up_kernel": LAYER + "mlp.up_proj.weight",
  "down_kernel": LAYER + "mlp.down_proj.weight",
}
# What config.json may say of the architecture; None is a field that is left out.
EXPECTED = {
  "model_type": ("qwen2",),
  "hidden_act": ("silu", None),
  "use_sliding_window": (False, None),
  "rope_scaling": (None,),
  "rope_type": ("default", None),
  "quantization_config": (None,),
}
STORED = ("F32", "BF16", "F16")  # dtypes of tensors; numbers of quantised ones would need a scale
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30  # of one written file


def read_config(directory: Path | str) -> Qwen2Config:
  """The sizes in config.json; ValueError if it is incomplete or of another architecture."""
  path = Path(directory) / "config.json"
  fields = {name: value for name, value in _json(path).items() if value is not None}
  rope = fields.get("rope_parameters")
  fields = (rope if isinstance(rope, dict) else {}) | fields
  for name, expected in EXPECTED.items():
    if fields.get(name) not in expected:
      raise ValueError(
        f"{path} has {name}={fields.get(name)!r}, expected {expected[0]!r}: "
        "only plain Qwen2 and Qwen2.5 models can be loaded"
      )
  try:
    heads = fields["num_attention_heads"]
    defaults = {"num_key_value_heads": heads, "head_dim": fields["hidden_size"] // heads}
    defaults |= {"tie_word_embeddings": False, "max_position_embeddings": 32_768}
    fields = defaults | fields
    types = {field.name: field.type for field in dataclasses.fields(Qwen2Config)}
    sizes = {name: number(fields[name]) for name, number in types.items()}
    if min(size for name, size in sizes.items() if name != "tie_word_embeddings") <= 0:
      raise ValueError("sizes are positive")
  except KeyError as error:
    raise ValueError(f"{path} lacks {error}; restore a copy of it") from None
  except (TypeError, ValueError, ZeroDivisionError) as error:
    raise ValueError(f"{path} has a wrong size ({error}); restore a copy of it") from None
  return Qwen2Config(**sizes)


def load_qwen2(directory: Path | str, dtype=jnp.float32, mesh: Mesh | None = None) -> Qwen2:
  """The model of config.json and model.safetensors (or its shards), straight onto the devices.

  Tensors are read one by one: the host needs memory for its own parameters and one tensor.

  Args:
    dtype: of the parameters, whatever the files have.
    mesh: where `split_parameters` puts the parameters; None is the first device.

  Raises:
    ValueError: a file or a tensor is missing, unknown, duplicate, damaged or of another shape.
  """
  mesh = mesh or one_device()
  config, file_of = check_directory(directory)

  def load(path, x, sharding):
    array = jnp.zeros(x.shape, dtype, device=sharding)
    place = jax.jit(_place, static_argnums=3, donate_argnums=0, out_shardings=sharding)
    for tensor in _tensors(path, x):
      # The file is mapped: what was read of it counts as memory until it is closed.
      with _open(file_of[tensor.name]) as file:
        numbers = file.get_tensor(tensor.name)
      whole = NamedSharding(mesh, P())
      numbers = jax.make_array_from_callback(numbers.shape, whole, numbers.__getitem__)
      array = place(array, numbers, np.int32(tensor.layer or 0), tensor.kernel)
      array.block_until_ready()  # or several tensors would wait on the host
    return array

  graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0))))
  shardings = split_parameters(abstract, mesh)
  return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(load, abstract, shardings))


def check_directory(directory: Path | str) -> tuple[Qwen2Config, dict[str, Path]]:
  """The sizes in config.json and each tensor's file, by headers; raises what `load_qwen2` does."""
  directory = Path(directory)
  config, headers = read_config(directory), _headers(directory)
  model = nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0)))
  expected_shapes = {tensor.name: tensor.shape for tensor, _ in _model_tensors(model)}
  for name in sorted(headers.keys() | expected_shapes.keys()):
    if name not in headers:
      raise ValueError(f"{directory}: tensor {name} is in none of its files")
    path, stored, shape = headers[name]
    if name not in expected_shapes:
      raise ValueError(f"{path}: tensor {name} has no place in a Qwen2 of this config.json")
    if stored not in STORED:
      raise ValueError(f"{path}: tensor {name} is {stored}, expected {' or '.join(STORED)}")
    if shape != expected_shapes[name]:
      shapes = f"is {list(shape)}, config.json makes it {list(expected_shapes[name])}"
      raise ValueError(f"{path}: tensor {name} {shapes}")
  return config, {name: path for name, (path, _, _) in headers.items()}


def save_qwen2(model: Qwen2, directory: Path | str, tokenizer: Path, dtype=jnp.bfloat16) -> None:
  """Writes a directory that transformers and vLLM load; it appears when it is whole.

  `tokenizer` is a `tokenizer.json`, `dtype` that of the written tensors. Raises ValueError if the
  directory exists.
  """
  directory = Path(directory)
  if directory.exists():
    raise ValueError(f"{directory} exists; remove it to write it anew")
  temporary = directory.with_name(directory.name + ".tmp")
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir(parents=True)
  shutil.copyfile(tokenizer, temporary / "tokenizer.json")
  tensors = _model_tensors(model)
  sizes = [math.prod(tensor.shape) * jnp.dtype(dtype).itemsize for tensor, _ in tensors]
  shard_of = (np.cumsum(sizes) - sizes) // SHARD_BYTES
  shards, file_of = sorted(set(shard_of)), {}
  for number, shard in enumerate(shards, 1):
    suffix = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
    file = f"model{suffix}.safetensors"
    pairs = [pair for pair, place in zip(tensors, shard_of) if place == shard]
    arrays = {tensor.name: _to_file(tensor, x, dtype) for tensor, x in pairs}
    save_file(arrays, temporary / file, {"format": "pt"})
    (temporary / file).chmod(0o644)  # as the other files: save_file lets nobody else read it
    file_of |= dict.fromkeys(arrays, file)
  json_files = {
    "config.json": {
      "architectures": ["Qwen2ForCausalLM"],
      "model_type": "qwen2",
      "hidden_act": "silu",
      "use_sliding_window": False,
      "torch_dtype": jnp.dtype(dtype).name,
      **vars(model.config),
    },
    "tokenizer_config.json": {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "model_max_length": model.config.max_position_embeddings,
      "clean_up_tokenization_spaces": False,
    },
  }
  if len(shards) > 1:
    json_files[INDEX] = {"metadata": {"total_size": int(sum(sizes))}, "weight_map": file_of}
  for name, fields in json_files.items():
    (temporary / name).write_text(json.dumps(fields, indent=2))
  os.replace(temporary, directory)


class _Tensor(NamedTuple):
  """A tensor of the files, with its name and shape there."""

  name: str
  shape: tuple[int, ...]
  layer: int | None
  kernel: bool


def _model_tensors(model: Qwen2) -> list[tuple[_Tensor, jax.Array]]:
  """The files' tensors that a model consists of, each with our parameter."""
  flat = jax.tree_util.tree_flatten_with_path(nnx.split(model)[1])[0]
  return [(tensor, x) for path, x in flat for tensor in _tensors(path, x)]


def _tensors(path, x) -> list[_Tensor]:
  """The files' tensors that a parameter consists of: one, or one for each layer."""
  name = next(key.key for key in path if getattr(key, "key", None) in NAMES)
  stacked, kernel = LAYER in NAMES[name], name.endswith("_kernel")
  shape = x.shape[1:] if stacked else x.shape
  if kernel:
    inputs = 2 if name == "o_kernel" else 1  # axes
    shape = math.prod(shape[inputs:]), math.prod(shape[:inputs])
  elif name.endswith("_bias"):
    shape = (math.prod(shape),)
  layers = range(x.shape[0]) if stacked else (None,)
  return [_Tensor(NAMES[name].format(layer), shape, layer, kernel) for layer in layers]


def _place(array, tensor, layer, kernel: bool):
  """The parameter with a file's tensor in its place, in our layout."""
  tensor = (tensor.T if kernel else tensor).astype(array.dtype)
  if array.size == tensor.size:
    return tensor.reshape(array.shape)
  return array.at[layer].set(tensor.reshape(array.shape[1:]))


def _to_file(tensor: _Tensor, x: jax.Array, dtype) -> np.ndarray:
  """A tensor of a parameter in a file's layout."""
  x = np.asarray((x if tensor.layer is None else x[tensor.layer]).astype(dtype))
  if tensor.kernel:
    return np.ascontiguousarray(x.reshape(tensor.shape[::-1]).T)
  return x.reshape(tensor.shape)


def _headers(directory: Path) -> dict[str, tuple[Path, str, tuple[int, ...]]]:
  """Each tensor's file, dtype and shape; an index, if there is one, has to agree with the files."""
  paths, file_of, index = [directory / "model.safetensors"], None, directory / INDEX
  if index.exists():
    file_of = _json(index).get("weight_map")
    if not isinstance(file_of, dict):
      raise ValueError(f"{index} has no weight_map; restore a copy of it")
    paths = [directory / name for name in sorted(set(map(str, file_of.values())))]
  headers = {}
  for path in paths:
    with _open(path) as file:
      slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
      headers |= {name: (path, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    for name in slices:  # a tensor in two files too: the index names one of them
      if file_of is not None and file_of.get(name) != path.name:
        raise ValueError(f"{path} has tensor {name}, {INDEX} puts it in {file_of.get(name)}")
  return headers


def _open(path: Path):
  try:
    return safe_open(path, "np")
  except (SafetensorError, OSError) as error:
    problem = f"is missing, cut short or damaged ({error}); restore a copy of it"
    raise ValueError(f"{path} {problem}") from None


def _json(path: Path) -> dict:
  try:
    fields = json.loads(path.read_text())
    if not isinstance(fields, dict):
      raise ValueError("it is not a JSON object")
  except FileNotFoundError:
    hint = "--config.router.weights names a Hugging Face directory of a Qwen2"
    raise ValueError(f"{path} is missing: {hint}") from None
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} cannot be read ({error}); restore a copy of it") from None
  return fields
