"""Load and save the router's weights in Hugging Face's format."""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from baar_jax.config import RouterConfig
from baar_jax.mesh import one_device, split_parameters
from baar_jax.router.qwen2 import Qwen2, Qwen2Config, check_finite
from baar_jax.router.view import View, decision_tokens, read_tokenizer
from baar_jax.store import require_file

# Maps each parameter's name in router/qwen2.py to its tensor's name in Hugging Face's
# files; {} stands for the layer. A kernel is [inputs, outputs] in qwen2.py and
# [outputs, inputs] in a file. The axes of heads and of numbers per head in qwen2.py are
# one axis in a file.
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


def find_shape(config: RouterConfig, decision_ids: Sequence[int]) -> Qwen2Config:
  """Find the shape of the router that the configured weights become.

  It is that of their config.json, with enough rows of the embedding for the decision
  tokens.

  Args:
    config: the router's settings.
    decision_ids: the ids of the decision tokens.

  Raises:
    ValueError: the weights' config.json cannot be read.
  """
  shape = read_config(config.weights)
  rows = max(shape.vocab_size, max(decision_ids) + 1)
  return dataclasses.replace(shape, vocab_size=rows)


def make_abstract_model(shape: Qwen2Config) -> Qwen2:
  """Make a model whose parameters have shapes and dtypes, but no values."""
  return nnx.eval_shape(lambda: Qwen2(shape, nnx.Rngs(0)))


def load_pretrained(view: View, mesh: Mesh | None = None) -> Qwen2:
  """Load the configured weights as a float32 router with decision tokens.

  If the tokenizer of the weights lacks a decision token, all decision tokens get new
  embedding rows, which start from those of `start_tokens`.

  Args:
    view: the router's settings, tokenizer and decision tokens.
    mesh: the parameters are spread over it; None is one device.

  Raises:
    ValueError: the weights cannot be loaded; see `load_qwen2`.
  """
  config = view.config
  ids = view.decision_ids
  model = load_qwen2(config.weights, jnp.float32, mesh)
  find_id = read_tokenizer(Path(config.weights)).token_to_id
  if None in map(find_id, decision_tokens(len(ids))):
    model.config = find_shape(config, ids)
    set_rows(model, ids, start_tokens(view))
  return model


def start_tokens(view: View) -> list[tuple[int, ...]]:
  """Choose the tokens whose rows each decision token starts from (our choice).

  It is the token with which the weights themselves would begin the model's word, such
  as SMALL, at that place: after a space in a transcript, without one in an answer. If
  two words begin with the same token, they are all tokens of each word.
  """
  space = "" if view.config.view == "paper" else " "
  spelled = [view.tokenize(f"{space}{word}") for word in view.words]
  first = [tokens[:1] for tokens in spelled]
  return first if len({*first}) == len(first) else spelled


def set_rows(
  model: Qwen2, ids: Sequence[int], source_ids: Sequence[Sequence[int]]
) -> None:
  """Set the embedding rows of some tokens to means of other tokens' rows.

  The rows of an untied output head are set too. Each of these tables first grows to the
  vocabulary of `model.config`.

  Args:
    model: the router; its parameters are changed in place.
    ids: the tokens to set.
    source_ids: for each token in `ids`, the tokens whose rows are averaged. The rows
      are read before any row is set.
  """
  for table in model.token_tables:
    table_VxD = table[...]
    rows = [table_VxD[np.array(sources)].mean(axis=0) for sources in source_ids]
    missing = model.config.vocab_size - len(table_VxD)
    table_VxD = jnp.pad(table_VxD, ((0, missing), (0, 0)))
    # An assignment to `table[...]` could not change the table's shape.
    table.set_value(table_VxD.at[np.array(ids)].set(jnp.stack(rows)))


def check_pretrained(config: RouterConfig) -> None:
  """Check that `load_pretrained` can load the configured weights.

  This check reads every number of the weights, before a run pays for anything.

  Raises:
    ValueError: the weights cannot be loaded (see `load_qwen2`), or have fewer positions
      than --config.router.max_tokens, or fewer rows than their tokenizer has tokens.
  """
  directory = Path(config.weights)
  shape, file_of = check_directory(directory)
  for name, path in file_of.items():
    _read(path, name)
  tokens = 1 + max(read_tokenizer(directory).get_vocab().values())
  for name, count, most in (
    ("--config.router.max_tokens", config.max_tokens, shape.max_position_embeddings),
    ("the size of tokenizer.json", tokens, shape.vocab_size),
  ):
    if count > most:
      raise ValueError(
        f"{directory}: {name} is {count}, expected at most {most}, as config.json says."
        " Set a lower number, or use all files of one model."
      )


def load_qwen2(
  directory: Path | str,
  dtype: jax.typing.DTypeLike = jnp.float32,
  mesh: Mesh | None = None,
) -> Qwen2:
  """Load a Qwen2 from a Hugging Face directory, spread over a mesh.

  This process needs memory for its own devices' part of the model. In addition it needs
  memory for one parameter at a time, with all of its layers.

  Args:
    directory: the directory with config.json and model*.safetensors.
    dtype: dtype of the parameters.
    mesh: the parameters are spread over it; None is one device.

  Raises:
    ValueError: a file is missing or damaged; the model is no plain Qwen2; a tensor is
      missing or unknown, has another shape, or has a number that is not finite.
  """
  config, file_of = check_directory(directory)

  def load(
    path: Sequence[Any], x: jax.ShapeDtypeStruct, sharding: NamedSharding
  ) -> jax.Array:
    """Load one parameter, with all of its layers.

    Args:
      path: the parameter's path in the model.
      x: the parameter's shape and dtype.
      sharding: the part of the parameter for each device.
    """
    array = np.empty(x.shape, dtype)
    name, tensors = _find_tensors(path, x)
    for tensor, layer in tensors:
      numbers = _read(file_of[tensor], tensor)
      if name.endswith("_kernel"):
        numbers = numbers.T
      array[layer] = numbers.reshape(array[layer].shape)
    return jax.make_array_from_callback(x.shape, sharding, array.__getitem__)

  graphdef, abstract = nnx.split(make_abstract_model(config))
  shardings = split_parameters(abstract, mesh or one_device())
  return nnx.merge(graphdef, jax.tree.map_with_path(load, abstract, shardings))


def check_directory(directory: Path | str) -> tuple[Qwen2Config, dict[str, Path]]:
  """Compare the tensors of a Hugging Face directory with those of its config.json.

  The numbers of the tensors are not read. An output head that is stored although it is
  tied to the embedding is ignored.

  Args:
    directory: the directory with config.json and model*.safetensors.

  Returns:
    The shape of the model, and the file of each tensor by the tensor's name.

  Raises:
    ValueError: see `load_qwen2`.
  """
  config = read_config(directory)
  expected = {name: x.shape for name, x in expected_tensors(config).items()}
  stored = {}
  file_of = {}
  for path in sorted(Path(directory).glob("model*.safetensors")):
    try:
      with safe_open(require_file(path), "np") as file:
        for name in file.keys():  # noqa: SIM118
          stored[name] = tuple(file.get_slice(name).get_shape())
          file_of[name] = path
    except (SafetensorError, OSError) as error:
      raise ValueError(
        f"Cannot read {path} ({error}). Restore or download the file again."
      ) from None
  if config.tie_word_embeddings:
    stored.pop(NAMES["head_VxD"], None)
  for name in sorted(expected.keys() | stored.keys()):
    sizes = stored.get(name, "missing")
    needed = expected.get(name, "no such tensor")
    if sizes != needed:
      raise ValueError(
        f"{directory}: tensor {name!r} is {sizes}, expected {needed}. Use the complete"
        " files of one plain Qwen2."
      )
  return config, file_of


def expected_tensors(shape: Qwen2Config) -> dict[str, jax.ShapeDtypeStruct]:
  """Compute the shapes of the tensors in Hugging Face's files, by their names."""
  params = nnx.split(make_abstract_model(shape))[1]
  return jax.eval_shape(lambda params: dict(_list_tensors(params)), params)


def read_config(directory: Path | str) -> Qwen2Config:
  """Read the shape of a model from a directory's config.json.

  Raises:
    ValueError: the file is missing or damaged, or the model is no plain Qwen2.
  """
  path = Path(directory) / "config.json"
  if Path(directory).suffix == ".gguf":
    raise ValueError(
      f"{directory} is a GGUF file: make a directory of it with python -m"
      " tools.convert_gguf, and set --config.router.weights to that."
    )
  try:
    fields = json.loads(require_file(path).read_text())
    rope = fields.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
      raise ValueError("rope_parameters by type of layer, expected one for all layers")
    # The oldest name of rope_type is type.
    fields = {"model_type": "", "rope_type": rope.get("type"), **rope, **fields}
    fields = {name: value for name, value in fields.items() if value is not None}
    if rope.get("rope_theta") not in (None, fields.get("rope_theta")):
      raise ValueError("rope_theta differs from that in rope_parameters, expected one")
    heads = fields["num_attention_heads"]
    fields = {"num_key_value_heads": heads, **fields}
    fields = {"head_dim": fields["hidden_size"] // heads, **fields}
    return Qwen2Config(**fields)
  except ValidationError as error:
    first = error.errors()[0]
    raise ValueError(
      f"{path} has an unsupported {first['loc'][0]} ({first['msg']})."
      " Choose a plain Qwen2 or Qwen2.5."
    ) from None
  except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
    raise ValueError(
      f"Cannot read {path} ({error}). Set --config.router.weights to a Hugging Face"
      " directory of a Qwen2."
    ) from None


def save_qwen2(
  model: Qwen2,
  directory: Path,
  adopted: Path,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> None:
  """Write a model as a Hugging Face directory that transformers and vLLM can load.

  The directory gets its name only when all of its files are written.

  Args:
    model: the model.
    directory: the directory to write. It must be empty, or not exist yet.
    adopted: the directory that `adopt_tokenizer` wrote, whose files are copied.
    dtype: dtype of the written tensors.

  Raises:
    ValueError: the disk is full, or a number is infinite or NaN in this dtype.
  """
  arrays = {}
  for name, x in _list_tensors(nnx.split(model)[1]):
    arrays[name] = np.ascontiguousarray(x.astype(dtype))
    check_finite(arrays[name], f"{directory}: tensor {name}")
  temporary = directory.with_name(directory.name + ".tmp")
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir(parents=True)
  file = temporary / "model.safetensors"
  try:
    save_file(arrays, file, {"format": "pt"})
  except SafetensorError as error:
    raise ValueError(
      f"Cannot write {file} ({error}). Free disk space and run the same command again."
    ) from None
  # The safetensors package makes its file readable for the owner only. All other files
  # of the directory are readable for everyone, so this file is made so too.
  file.chmod(0o644)
  fields = {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": jnp.dtype(dtype).name}
  fields |= {name: x for name, x in vars(model.config).items() if x is not None}
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
  }
  (temporary / "config.json").write_text(json.dumps(fields, indent=2))
  for path in adopted.iterdir():
    shutil.copy(path, temporary)
  file = temporary / "tokenizer_config.json"
  if file.exists():
    settings = json.loads(file.read_text())
  # This list of the weights' own special tokens would hide the decision tokens, which
  # tokenizer.json has.
  settings.pop("added_tokens_decoder", None)
  file.write_text(json.dumps(settings, indent=2))
  temporary.replace(directory)


def _read(path: Path, name: str) -> np.ndarray:
  """Read a tensor from a file.

  Raises:
    ValueError: a number is infinite or NaN.
  """
  # An open file is mapped into memory, and its pages that were read count as used
  # memory. So the file is opened and closed again for each tensor.
  with safe_open(path, "np") as file:
    numbers = file.get_tensor(name)
  check_finite(numbers, f"{path}: tensor {name}")
  return numbers


def _find_tensors(path: Sequence[Any], x: Any) -> tuple[str, list[tuple[str, Any]]]:
  """Find the tensors of Hugging Face's files that hold a parameter.

  Args:
    path: the parameter's path in the model.
    x: the parameter, or its shape.

  Returns:
    The parameter's name in `NAMES`, and for each tensor its name and its index in the
    parameter: a layer, or `...` if one tensor holds the whole parameter.
  """
  name = next(key.key for key in path if getattr(key, "key", None) in NAMES)
  layers = range(x.shape[0]) if "{}" in NAMES[name] else (...,)
  return name, [(NAMES[name].format(layer), layer) for layer in layers]


def _list_tensors(params: nnx.State) -> Iterator[tuple[str, jax.Array]]:
  """Convert a model's parameters to the tensors of Hugging Face's files.

  Yields:
    The name and the array of each tensor.
  """
  for path, x in jax.tree.leaves_with_path(params):
    name, tensors = _find_tensors(path, x)
    for tensor, layer in tensors:
      array = x[layer]
      if name.endswith("_bias"):
        array = array.reshape(-1)
      elif name.endswith("_kernel"):
        input_axes = 2 if name == "o_kernel" else 1
        array = array.reshape(math.prod(array.shape[:input_axes]), -1).T
      yield tensor, array
