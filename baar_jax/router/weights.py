"""A Hugging Face directory <-> qwen2: one table of names, and nothing is taken on trust."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

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
# Ours -> theirs. Kernels are [in, out] here and [out, in] there; the axes of heads are one there.
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
INPUTS = {"o_kernel": 2}  # axes of a kernel that its input has, where it is not one
# What a config.json may say of an architecture that this is: any other value is another one.
EXPECTED = {
  "model_type": ("qwen2",),
  "hidden_act": ("silu", None),
  "use_sliding_window": (False, None),
  "rope_scaling": (None,),
  "quantization_config": (None,),
}
STORED = ("F32", "BF16", "F16")  # of the tensors; the numbers of quantised ones need a scale
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30  # of one file that is written


def read_config(directory: Path | str) -> Qwen2Config:
  """The sizes in a directory's config.json.

  Raises:
    ValueError: it is missing or incomplete, or of another architecture.
  """
  path = Path(directory) / "config.json"
  found = _json(path)
  rope = found.get("rope_parameters") or {}
  if not isinstance(rope, dict):
    raise ValueError(f"{path} has rope_parameters={rope!r}; restore a copy of it")
  if rope.get("rope_type", "default") != "default":
    raise ValueError(f"{path} has rope_type={rope['rope_type']!r}; only 'default' is supported")
  for name, expected in EXPECTED.items():
    if found.get(name) not in expected:
      raise ValueError(
        f"{path} has {name}={found.get(name)!r}, expected {expected[0]!r}: "
        "only plain Qwen2 and Qwen2.5 models can be loaded"
      )
  try:
    heads = int(found["num_attention_heads"])
    config = Qwen2Config(
      vocab_size=int(found["vocab_size"]),
      hidden_size=int(found["hidden_size"]),
      intermediate_size=int(found["intermediate_size"]),
      num_hidden_layers=int(found["num_hidden_layers"]),
      num_attention_heads=heads,
      num_key_value_heads=int(found.get("num_key_value_heads") or heads),
      head_dim=int(found.get("head_dim") or found["hidden_size"] // heads),
      rope_theta=float(found["rope_theta"] if "rope_theta" in found else rope["rope_theta"]),
      rms_norm_eps=float(found["rms_norm_eps"]),
      tie_word_embeddings=bool(found.get("tie_word_embeddings", False)),
      max_position_embeddings=int(found.get("max_position_embeddings", 32_768)),
    )
    for name, size in dataclasses.asdict(config).items():
      if size <= 0 and name != "tie_word_embeddings":
        raise ValueError(f"{name} is {size}")
    return config
  except KeyError as error:
    raise ValueError(f"{path} lacks {error}; restore a copy of it") from None
  except (TypeError, ValueError, ZeroDivisionError) as error:
    raise ValueError(f"{path} has a size that is none ({error}); restore a copy of it") from None


def load_qwen2(directory: Path | str, dtype=jnp.float32, mesh: Mesh | None = None) -> Qwen2:
  """The model in a Hugging Face directory, straight onto the devices.

  One tensor at a time is read, so the host needs about one tensor more than the parameters that
  it holds itself.

  Args:
    directory: config.json beside model.safetensors, or its parts and their index.
    dtype: of the parameters, whatever the files have.
    mesh: where the parameters go, as `split_parameters` says; None is the first device.

  Raises:
    ValueError: the directory, a file or a tensor is not what config.json promises.
  """
  directory, mesh = Path(directory), mesh or one_device()
  config = check_directory(directory)
  files = _tensor_files(directory)
  graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0))))
  paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(abstract)[0]]
  leaves, treedef = jax.tree.flatten(abstract)
  shardings = jax.tree.leaves(split_parameters(abstract, mesh))
  for i, (path, sharding) in enumerate(zip(paths, shardings)):
    tensors = _tensors(path, leaves[i])
    place = jax.jit(_place, static_argnums=3, donate_argnums=0, out_shardings=sharding)
    leaves[i] = jnp.zeros(leaves[i].shape, dtype, device=sharding)
    for tensor in tensors:
      read = _replicated(_read(files[tensor.name][0], tensor.name), mesh)
      leaves[i] = place(leaves[i], read, np.int32(tensor.layer or 0), tensor.kernel)
      leaves[i].block_until_ready()  # or more tensors than one would wait on the host
  return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


def check_directory(directory: Path | str) -> Qwen2Config:
  """Compares names and shapes of all tensors with config.json, from the files' headers alone.

  Returns:
    The sizes in config.json.

  Raises:
    ValueError: the directory, a file or a tensor is not what config.json promises.
  """
  directory = Path(directory)
  config, files = read_config(directory), _tensor_files(directory)
  abstract = nnx.split(nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0))))[1]
  flat = jax.tree_util.tree_flatten_with_path(abstract)[0]
  wanted = {tensor.name: tensor.shape for path, x in flat for tensor in _tensors(path, x)}
  for name in sorted(files.keys() | wanted.keys()):
    if name not in files:
      raise ValueError(f"{directory}: tensor {name} is in none of its files")
    path, shape = files[name]
    if name not in wanted:
      raise ValueError(f"{path}: tensor {name} has no place in a Qwen2 of this config.json")
    if shape != wanted[name]:
      raise ValueError(
        f"{path}: tensor {name} is {list(shape)}, config.json makes it {list(wanted[name])}"
      )
  return config


def save_qwen2(model: Qwen2, directory: Path | str, tokenizer: Path, dtype=jnp.bfloat16) -> None:
  """Writes a directory that transformers and vLLM load; it appears when it is whole.

  Args:
    directory: must not be there yet.
    tokenizer: a `tokenizer.json`, with the tokens that were added.
    dtype: of the tensors that are written.

  Raises:
    ValueError: the directory is there.
  """
  directory = Path(directory)
  if directory.exists():
    raise ValueError(f"{directory} exists; remove it to write it anew")
  temporary = directory.with_name(directory.name + ".tmp")
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir(parents=True)
  shutil.copyfile(tokenizer, temporary / "tokenizer.json")
  flat = jax.tree_util.tree_flatten_with_path(nnx.split(model)[1])[0]
  tensors = [(tensor, x) for path, x in flat for tensor in _tensors(path, x)]
  sizes = [math.prod(tensor.shape) * jnp.dtype(dtype).itemsize for tensor, _ in tensors]
  part_of = (np.cumsum(sizes) - sizes) // SHARD_BYTES
  parts = len(set(part_of))
  places = {}
  for number, part in enumerate(sorted(set(part_of)), 1):
    file = f"model-{number:05}-of-{parts:05}.safetensors" if parts > 1 else "model.safetensors"
    chosen = {t.name: _outward(t, x, dtype) for (t, x), its in zip(tensors, part_of) if its == part}
    save_file(chosen, temporary / file, {"format": "pt"})
    (temporary / file).chmod(0o644)  # as the other files; it would be for its owner alone
    places |= dict.fromkeys(chosen, file)
  if parts > 1:
    index = {"metadata": {"total_size": int(sum(sizes))}, "weight_map": places}
    (temporary / INDEX).write_text(json.dumps(index, indent=2))
  (temporary / "config.json").write_text(json.dumps(_config_json(model.config, dtype), indent=2))
  about = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": model.config.max_position_embeddings,
    "clean_up_tokenization_spaces": False,
  }
  (temporary / "tokenizer_config.json").write_text(json.dumps(about, indent=2))
  os.replace(temporary, directory)


def _config_json(config: Qwen2Config, dtype) -> dict:
  return {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": jnp.dtype(dtype).name,
    **{
      name: getattr(config, name)
      for name in Qwen2Config.__dataclass_fields__
      # Most readers work it out, and some know no other way.
      if name != "head_dim" or config.head_dim * config.num_attention_heads != config.hidden_size
    },
  }


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """One tensor of a file: its name and shape there, which layer it is of, and if it is a kernel."""

  name: str
  shape: tuple[int, ...]
  layer: int | None
  kernel: bool


def _tensors(path, x) -> list[_Tensor]:
  """What a parameter is made of: a tensor for each of its layers, if it has layers."""
  names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
  name = next(name for name in names if name in NAMES)
  stacked, kernel = LAYER in NAMES[name], name.endswith("_kernel")
  shape = x.shape[1:] if stacked else x.shape
  if kernel:
    inputs = INPUTS.get(name, 1)
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


def _outward(tensor: _Tensor, x: jax.Array, dtype) -> np.ndarray:
  """A tensor of a parameter in a file's layout."""
  x = np.asarray((x if tensor.layer is None else x[tensor.layer]).astype(dtype))
  if tensor.kernel:
    return np.ascontiguousarray(x.reshape(tensor.shape[::-1]).T)
  return x.reshape(tensor.shape)


def _replicated(tensor: np.ndarray, mesh: Mesh) -> jax.Array:
  sharding = NamedSharding(mesh, P())
  return jax.make_array_from_callback(tensor.shape, sharding, lambda at: tensor[at])


def _tensor_files(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
  """Each tensor's file and shape; the index, where there is one, has to agree with the files."""
  index = directory / INDEX
  promised = None
  if index.exists():
    promised = _json(index).get("weight_map")
    if not isinstance(promised, dict) or not all(isinstance(v, str) for v in promised.values()):
      raise ValueError(f"{index} has no weight_map; restore a copy of it")
    paths = [directory / name for name in sorted(set(promised.values()))]
  else:
    paths = [directory / "model.safetensors"]
  files: dict[str, tuple[Path, tuple[int, ...]]] = {}
  for path in paths:
    if not path.exists():
      raise ValueError(f"{path} is missing; restore a copy of it")
    with _open(path) as file:
      slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
      found = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    for name, (stored, shape) in found.items():
      if stored not in STORED:
        raise ValueError(f"{path}: tensor {name} is {stored}, expected {' or '.join(STORED)}")
      if name in files:
        raise ValueError(f"tensor {name} is in both {files[name][0]} and {path}")
      if promised is not None and promised.get(name) != path.name:
        raise ValueError(f"{path}: {index.name} puts tensor {name} in {promised.get(name)}")
      files[name] = path, shape
  for name in promised or ():
    if name not in files:
      raise ValueError(f"{directory / promised[name]} lacks tensor {name}, which its index names")
  return files


def _open(path: Path):
  try:
    return safe_open(path, "np")
  except (SafetensorError, OSError) as error:
    raise ValueError(f"{path} is cut short or damaged ({error}); restore a copy of it") from None


def _read(path: Path, name: str) -> np.ndarray:
  # Opened for each tensor: what was read of a mapped file counts as memory until it is closed.
  with _open(path) as file:
    return file.get_tensor(name)


def _json(path: Path) -> dict:
  try:
    found = json.loads(path.read_text())
  except FileNotFoundError:
    raise ValueError(
      f"{path} is missing: --config.router.weights names a Hugging Face directory of a Qwen2"
    ) from None
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} cannot be read ({error}); restore a copy of it") from None
  if not isinstance(found, dict):
    raise ValueError(f"{path} is not a JSON object; restore a copy of it")
  return found
