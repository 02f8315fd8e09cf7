"""Write Hugging Face directories of a Qwen2 with random weights, without baar_jax.

Tensors have the names and shapes of transformers' Qwen2ForCausalLM. config.json has the
fields of Qwen2.5's. The numbers of a tensor depend only on its name and shape.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.trainers import BpeTrainer

FIELDS = [
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "tie_word_embeddings",
]
SIZES = {
  "grouped": (307, 48, 40, 3, 6, 2, True),
  "multihead": (131, 40, 56, 2, 4, 4, False),
  "long": (97, 128, 64, 2, 2, 1, True),
}
SHAPES = {name: dict(zip(FIELDS, sizes)) for name, sizes in SIZES.items()}
# In "multihead" the heads do not add up to the width, and the constants differ from
# those of Qwen2.5.
SHAPES["multihead"] |= {"head_dim": 16, "rope_theta": 10_000.0, "rms_norm_eps": 1e-3}
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
# The regular expression by which Qwen2's tokenizer splits a text into words, and the
# special tokens after its other tokens.
WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "so", "ti", "va", "SA", "LL", "TA", "big")


def tensors(shape: dict, dtype: str = "float32") -> Iterator:
  """Draw the tensors of a model, with uniformly distributed numbers.

  Yields:
    The name and the array of each tensor.
  """
  V, D, F, layers, N, K, tied = (shape[name] for name in FIELDS)
  H = shape.get("head_dim", D // N)
  rows = {"q": N * H, "k": K * H, "v": K * H}
  kernels = {f"self_attn.{name}_proj": (size, D) for name, size in rows.items()}
  kernels |= {
    "self_attn.o_proj": (D, N * H),
    "mlp.gate_proj": (F, D),
    "mlp.up_proj": (F, D),
    "mlp.down_proj": (D, F),
  }
  tables = {"model.embed_tokens": (V, D)} | ({} if tied else {"lm_head": (V, D)})
  plan = {"model.norm.weight": ((D,), 1.0, 0.5)}  # sizes, mean, half-width
  for prefix in (f"model.layers.{layer}." for layer in range(layers)):
    for name in ("input", "post_attention"):
      plan[f"{prefix}{name}_layernorm.weight"] = (D,), 1.0, 0.5
    plan |= {
      f"{prefix}self_attn.{name}_proj.bias": ((rows[name],), 0.1, 1.5) for name in rows
    }
    tables |= {prefix + name: sizes for name, sizes in kernels.items()}
  plan |= {
    f"{name}.weight": (sizes, 0.0, (3 / sizes[1]) ** 0.5)
    for name, sizes in tables.items()
  }
  for name, (sizes, mean, width) in plan.items():
    # NumPy promises the same raw bits in every version, but not the same draws from a
    # distribution.
    bits = (
      np.random.PCG64([0, zlib.crc32(name.encode())]).random_raw(np.prod(sizes)) >> 40
    )
    unit = bits.astype(np.float32) * np.float32(2**-23) - 1
    numbers = np.float32(mean) + np.float32(width) * unit
    yield name, numbers.astype(DTYPES[dtype]).reshape(sizes)


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
  (directory / "config.json").write_text(
    json.dumps(CONFIG | {"torch_dtype": dtype} | shape)
  )
  drawn = list(tensors(shape, dtype))
  for shard in range(shards):
    number = f"-{shard + 1:05}-of-{shards:05}" if shards > 1 else ""
    path = directory / f"model{number}.safetensors"
    save_file(dict(drawn[shard::shards]), path, {"format": "pt"})
  if tokens:
    write_tokenizer(directory, tokens)
  return directory


def write_tokenizer(directory: Path, tokens: int) -> None:
  """Train and write a tokenizer.json like Qwen2's: bytes, merges, special tokens."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.normalizer = tokenizers.normalizers.NFC()
  split = Split(tokenizers.Regex(WORDS), "isolated")
  as_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, as_bytes])
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
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
