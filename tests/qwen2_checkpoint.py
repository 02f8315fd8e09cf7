"""Write Hugging Face directories of a Qwen2 with random weights.

Tensors have the names and shapes of transformers' Qwen2ForCausalLM. config.json has the
fields of Qwen2.5's. The numbers of a tensor depend only on its name and shape. Nothing
of baar_jax computes them.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from tools.convert_gguf import set_rules


class Tensor(NamedTuple):
  """Describe a tensor of uniformly distributed numbers.

  Attributes:
    sizes: the sizes of its axes.
    mean: the mean of its numbers.
    width: the largest difference from the mean.
  """

  sizes: tuple[int, ...]
  mean: float
  width: float


def make_shape(
  vocab_size: int, hidden_size: int, width: int, layers: int, heads: int, groups: int
) -> dict:
  """Make the fields of config.json for a model with a tied output head.

  Args:
    vocab_size: number of tokens.
    hidden_size: width of the hidden states.
    width: width of the feed-forward layers.
    layers: number of layers.
    heads: number of query heads per layer.
    groups: number of key-value heads per layer.
  """
  return {
    "vocab_size": vocab_size,
    "hidden_size": hidden_size,
    "intermediate_size": width,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": groups,
    "tie_word_embeddings": True,
  }


SHAPES = {
  "grouped": make_shape(307, 48, 40, 3, 6, 2),
  "multihead": make_shape(131, 40, 56, 2, 4, 4),
  "long": make_shape(97, 128, 64, 2, 2, 1),
}
# In "multihead" the heads do not add up to the width, and the constants differ from
# those of Qwen2.5.
SHAPES["multihead"] |= {
  "tie_word_embeddings": False,
  "head_dim": 16,
  "rope_theta": 10_000.0,
  "rms_norm_eps": 1e-3,
}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CONFIG = {
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
  "hidden_act": "silu",
  "max_position_embeddings": 32_768,
  "rms_norm_eps": 1e-6,
  "rope_theta": 1_000_000.0,
  "sliding_window": 32_768,
  "use_sliding_window": False,
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "so", "ti", "va", "SA", "LL", "TA", "big")


def plan(shape: dict) -> dict[str, Tensor]:
  """Return the tensors of a model by their names."""
  D = shape["hidden_size"]
  F = shape["intermediate_size"]
  N = shape["num_attention_heads"]
  H = shape.get("head_dim", D // N)
  queries = N * H
  keys = shape["num_key_value_heads"] * H
  vocabulary = (shape["vocab_size"], D)
  kernels = {"model.embed_tokens": vocabulary}
  if not shape["tie_word_embeddings"]:
    kernels["lm_head"] = vocabulary
  result = {"model.norm.weight": Tensor((D,), 1.0, 0.5)}
  for layer in range(shape["num_hidden_layers"]):
    prefix = f"model.layers.{layer}."
    for name in ("input", "post_attention"):
      result[f"{prefix}{name}_layernorm.weight"] = Tensor((D,), 1.0, 0.5)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
      result[f"{prefix}self_attn.{name}_proj.bias"] = Tensor((rows,), 0.1, 1.5)
      kernels[f"{prefix}self_attn.{name}_proj"] = (rows, D)
    kernels[f"{prefix}self_attn.o_proj"] = (D, queries)
    kernels[f"{prefix}mlp.gate_proj"] = (F, D)
    kernels[f"{prefix}mlp.up_proj"] = (F, D)
    kernels[f"{prefix}mlp.down_proj"] = (D, F)
  for name, sizes in kernels.items():
    inputs = sizes[1]
    result[f"{name}.weight"] = Tensor(sizes, 0.0, (3 / inputs) ** 0.5)
  return result


def tensors(shape: dict, dtype: str = "float32") -> Iterator[tuple[str, np.ndarray]]:
  """Draw the tensors of a model.

  Yields:
    The name and the array of each tensor.
  """
  for name, tensor in plan(shape).items():
    # NumPy promises the same raw bits in every version, but not the same draws from a
    # distribution.
    generator = np.random.PCG64([0, zlib.crc32(name.encode())])
    bits = generator.random_raw(np.prod(tensor.sizes)) >> 40
    unit = bits.astype(np.float32) * np.float32(2**-23) - 1
    numbers = np.float32(tensor.mean) + np.float32(tensor.width) * unit
    yield name, numbers.astype(DTYPES[dtype]).reshape(tensor.sizes)


def write(directory: Path, shape: dict, dtype="float32", shards=1, tokens=0) -> Path:
  """Write a Hugging Face directory of a Qwen2.

  Args:
    directory: the directory.
    shape: fields of config.json.
    dtype: dtype of the tensors.
    shards: number of files that the tensors are split over.
    tokens: number of tokens in tokenizer.json; 0 writes no tokenizer.

  Returns:
    The directory.
  """
  directory.mkdir(parents=True, exist_ok=True)
  fields = CONFIG | {"torch_dtype": dtype} | shape
  (directory / "config.json").write_text(json.dumps(fields))
  drawn = list(tensors(shape, dtype))
  for shard in range(shards):
    number = f"-{shard + 1:05}-of-{shards:05}" if shards > 1 else ""
    path = directory / f"model{number}.safetensors"
    save_file(dict(drawn[shard::shards]), path, {"format": "pt"})
  if tokens:
    write_tokenizer(directory, tokens)
  return directory


def write_tokenizer(directory: Path, tokens: int) -> None:
  """Write a tokenizer.json like Qwen2's: bytes, merges, special tokens."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  set_rules(tokenizer)
  trainer = BpeTrainer(
    vocab_size=tokens - len(SPECIAL),
    initial_alphabet=ByteLevel.alphabet(),
    show_progress=False,
  )
  text = [f" {a}{b}{c}" for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]
  tokenizer.train_from_iterator(text, trainer)
  tokenizer.add_special_tokens(list(SPECIAL))
  assert tokenizer.get_vocab_size() == tokens
  tokenizer.save(str(directory / "tokenizer.json"))
