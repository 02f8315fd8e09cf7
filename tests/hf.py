"""Writes Hugging Face directories of Qwen2 with random weights, and uses nothing of baar_jax.

  python tests/hf.py DIRECTORY --shape=qwen2.5-1.5b --dtype=bfloat16 --shard_mb=1000 --tokens=400

The names and shapes of the tensors are those of transformers' Qwen2ForCausalLM, the fields of
config.json those of Qwen2.5's own. Values depend on the seed and a tensor's name alone.
"""

import argparse
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

FIELDS = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "tie_word_embeddings",
)
SHAPES = {
  name: dict(zip(FIELDS, sizes))
  for name, sizes in {
    "grouped": (307, 48, 40, 3, 6, 2, True),
    "multihead": (131, 40, 56, 2, 4, 4, False),
    "long": (97, 128, 64, 2, 2, 1, True),
    "qwen2.5-0.5b": (151_936, 896, 4_864, 24, 14, 2, True),
    "qwen2.5-1.5b": (151_936, 1_536, 8_960, 28, 12, 2, True),
    "qwen2.5-3b": (151_936, 2_048, 11_008, 36, 16, 2, True),
    "qwen2.5-7b": (152_064, 3_584, 18_944, 28, 28, 4, False),
  }.items()
}
# Heads that do not add up to the width, and other constants than Qwen2.5's.
SHAPES["multihead"] |= {"head_dim": 16, "rope_theta": 10_000.0, "rms_norm_eps": 1e-3}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
CHUNK = 1 << 22  # numbers that are drawn at a time
# What Qwen2's tokenizer splits a text into before it merges bytes, and its tokens behind those.
WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "so", "ti", "va", "SA", "LL", "TA", "big")


def config_json(shape: dict, dtype: str = "float32") -> dict:
  """A config.json as Qwen2.5's are, with the shape's fields in it."""
  return {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32_768,
    "max_window_layers": shape["num_hidden_layers"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "sliding_window": 32_768,
    "torch_dtype": dtype,
    "use_cache": True,
    "use_sliding_window": False,
    **shape,
  }


def plan(shape: dict) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
  """(name, shape, mean, half-width) of each tensor, uniformly distributed."""
  D, F, V = (shape[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
  heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
  H = shape.get("head_dim", D // heads)
  yield "model.embed_tokens.weight", (V, D), 0.0, (3 / D) ** 0.5
  for layer in range(shape["num_hidden_layers"]):
    prefix = f"model.layers.{layer}."
    yield prefix + "input_layernorm.weight", (D,), 1.0, 0.5
    for name, rows in (("q", heads * H), ("k", kv_heads * H), ("v", kv_heads * H)):
      yield prefix + f"self_attn.{name}_proj.weight", (rows, D), 0.0, (3 / D) ** 0.5
      yield prefix + f"self_attn.{name}_proj.bias", (rows,), 0.1, 1.5
    yield prefix + "self_attn.o_proj.weight", (D, heads * H), 0.0, (3 / (heads * H)) ** 0.5
    yield prefix + "post_attention_layernorm.weight", (D,), 1.0, 0.5
    yield prefix + "mlp.gate_proj.weight", (F, D), 0.0, (3 / D) ** 0.5
    yield prefix + "mlp.up_proj.weight", (F, D), 0.0, (3 / D) ** 0.5
    yield prefix + "mlp.down_proj.weight", (D, F), 0.0, (3 / F) ** 0.5
  yield "model.norm.weight", (D,), 1.0, 0.5
  if not shape["tie_word_embeddings"]:
    yield "lm_head.weight", (V, D), 0.0, (3 / D) ** 0.5


def tensors(shape: dict, dtype: str = "float32", seed: int = 0) -> Iterator:
  """(name, array) of each tensor, one at a time."""
  for name, sizes, mean, width in plan(shape):
    # Bits, which NumPy promises to keep from version to version; it does not for distributions.
    bits = np.random.PCG64([seed, zlib.crc32(name.encode())])
    array = np.empty(sizes, DTYPES[dtype])
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
      part = flat[start : start + CHUNK]
      unit = (bits.random_raw(part.size) >> 40).astype(np.float32) * np.float32(2**-23) - 1
      part[:] = np.float32(mean) + np.float32(width) * unit
    yield name, array


def write(
  directory: Path,
  shape: dict,
  dtype: str = "float32",
  seed: int = 0,
  shard_mb: float | None = None,
  tokens: int = 0,
) -> Path:
  """Writes config.json and the weights; one file of them is in memory at a time.

  Args:
    shard_mb: of one file; None is one file of all, without an index.
    tokens: of a tokenizer.json, at least 259; 0 is without one.
  """
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(config_json(shape, dtype), indent=2))
  files, filled = [[]], 0
  for name, sizes, _, _ in plan(shape):
    size = int(np.prod(sizes)) * np.dtype(DTYPES[dtype]).itemsize
    if shard_mb and files[-1] and filled + size > shard_mb * 1e6:
      files.append([])
      filled = 0
    files[-1].append(name)
    filled += size
  drawn = tensors(shape, dtype, seed)
  places = {}
  for number, names in enumerate(files, 1):
    file = "model.safetensors"
    if shard_mb:
      file = f"model-{number:05}-of-{len(files):05}.safetensors"
    save_file(dict(next(drawn) for _ in names), directory / file, {"format": "pt"})
    places |= dict.fromkeys(names, file)
  if shard_mb:
    text = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
    (directory / "model.safetensors.index.json").write_text(text)
  if tokens:
    write_tokenizer(directory, tokens)
  return directory


def write_tokenizer(directory: Path, tokens: int) -> None:
  """A tokenizer.json built as Qwen2's is: bytes, merges, then special tokens."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.normalizer = tokenizers.normalizers.NFC()
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=tokens - len(SPECIAL),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  text = [f" {a}{b}{c}" for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]
  tokenizer.train_from_iterator(text, trainer)
  tokenizer.add_special_tokens(list(SPECIAL))
  assert tokenizer.get_vocab_size() == tokens, (tokenizer.get_vocab_size(), tokens)
  tokenizer.save(str(directory / "tokenizer.json"))


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("directory", type=Path)
  parser.add_argument("--shape", choices=SHAPES, default="grouped")
  parser.add_argument("--change", type=json.loads, default={}, help="JSON: fields of config.json")
  parser.add_argument("--dtype", choices=DTYPES, default="float32")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--shard_mb", type=float, help="of one file; left out, there is one file")
  parser.add_argument("--tokens", type=int, default=0, help="of a tokenizer.json; 0: without one")
  flags = parser.parse_args()
  shape = SHAPES[flags.shape] | flags.change
  write(flags.directory, shape, flags.dtype, flags.seed, flags.shard_mb, flags.tokens)


if __name__ == "__main__":
  main()
