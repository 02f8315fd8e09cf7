"""Writes Hugging Face directories of Qwen2 with random weights, and uses nothing of baar_jax.

  python tests/hf.py DIRECTORY --shape=qwen2.5-1.5b --dtype=bfloat16 --shard_mb=1000 --tokens=400

The names and shapes of the tensors are those of transformers' Qwen2ForCausalLM, the fields of
config.json those of Qwen2.5's own. Values depend on a tensor's name alone.
"""

import argparse
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

FIELDS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
FIELDS += ["num_attention_heads", "num_key_value_heads", "tie_word_embeddings"]
SHAPES = {
  name: dict(zip(FIELDS, sizes))
  for name, sizes in {
    "grouped": (307, 48, 40, 3, 6, 2, True),
    "multihead": (131, 40, 56, 2, 4, 4, False),
    "long": (97, 128, 64, 2, 2, 1, True),
    "qwen2.5-1.5b": (151_936, 1_536, 8_960, 28, 12, 2, True),
  }.items()
}
# Heads that do not add up to the width, and other constants than Qwen2.5's.
SHAPES["multihead"] |= {"head_dim": 16, "rope_theta": 10_000.0, "rms_norm_eps": 1e-3}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
CONFIG = {
  "architectures": ["Qwen2ForCausalLM"],
  "hidden_act": "silu",
  "max_position_embeddings": 32_768,
  "model_type": "qwen2",
  "rms_norm_eps": 1e-6,
  "rope_theta": 1_000_000.0,
  "sliding_window": 32_768,
  "use_sliding_window": False,
}
# What Qwen2's tokenizer splits a text into before it merges bytes, and its tokens behind those.
WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "so", "ti", "va", "SA", "LL", "TA", "big")


def plan(shape: dict) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
  """(name, shape, mean, half-width) of each tensor, uniformly distributed."""
  V, D, F, layers, N, K, tied = (shape[name] for name in FIELDS)
  H = shape.get("head_dim", D // N)
  rows = {"q": N * H, "k": K * H, "v": K * H}
  kernels = {f"self_attn.{name}_proj": (size, D) for name, size in rows.items()}
  kernels |= {"self_attn.o_proj": (D, N * H), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D)}
  kernels |= {"mlp.down_proj": (D, F)}
  tables = {"model.embed_tokens": (V, D)} | ({} if tied else {"lm_head": (V, D)})
  yield "model.norm.weight", (D,), 1.0, 0.5
  for layer in range(layers):
    prefix = f"model.layers.{layer}."
    for name in ("input", "post_attention"):
      yield f"{prefix}{name}_layernorm.weight", (D,), 1.0, 0.5
    for name, size in rows.items():
      yield f"{prefix}self_attn.{name}_proj.bias", (size,), 0.1, 1.5
    tables |= {prefix + name: sizes for name, sizes in kernels.items()}
  for name, sizes in tables.items():
    yield f"{name}.weight", sizes, 0.0, (3 / sizes[1]) ** 0.5


def tensors(shape: dict, dtype: str = "float32") -> Iterator:
  """(name, array) of each tensor, one at a time."""
  for name, sizes, mean, width in plan(shape):
    # Bits, which NumPy promises to keep from version to version; it does not for distributions.
    bits = np.random.PCG64([0, zlib.crc32(name.encode())]).random_raw(np.prod(sizes)) >> 40
    unit = bits.astype(np.float32) * np.float32(2**-23) - 1
    numbers = np.float32(mean) + np.float32(width) * unit
    yield name, numbers.astype(DTYPES[dtype]).reshape(sizes)


def write(directory: Path, shape: dict, dtype="float32", shard_mb=None, tokens=0) -> Path:
  """Writes config.json and the weights; one file of them is in memory at a time.

  Args:
    shard_mb: of one file; None is one file of all.
    tokens: of a tokenizer.json, at least 259; 0 is without one.
  """
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": dtype} | shape))
  numbers = np.cumsum([np.prod(sizes) for _, sizes, _, _ in plan(shape)])
  ends_mb = numbers * np.dtype(DTYPES[dtype]).itemsize / 1e6
  _, counts = np.unique(ends_mb // (shard_mb or np.inf), return_counts=True)  # of each file
  drawn = tensors(shape, dtype)
  for number, count in enumerate(counts, 1):
    shard = f"-{number:05}-of-{len(counts):05}" if shard_mb else ""
    part = dict(itertools.islice(drawn, count))
    save_file(part, directory / f"model{shard}.safetensors", {"format": "pt"})
  if tokens:
    write_tokenizer(directory, tokens)
  return directory


def write_tokenizer(directory: Path, tokens: int) -> None:
  """A tokenizer.json built as Qwen2's is: bytes, merges, then special tokens."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.normalizer = tokenizers.normalizers.NFC()
  split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
  as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=tokens - len(SPECIAL),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
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
  parser.add_argument("--dtype", choices=DTYPES, default="float32")
  parser.add_argument("--shard_mb", type=float, help="of one file; left out, there is one file")
  parser.add_argument("--tokens", type=int, default=0, help="of a tokenizer.json; 0: without one")
  flags = parser.parse_args()
  write(flags.directory, SHAPES[flags.shape], flags.dtype, flags.shard_mb, flags.tokens)


if __name__ == "__main__":
  main()
