"""Convert a GGUF file of a Qwen2 to a directory for --config.router.weights.

    pip install gguf==0.19.0
    python -m tools.convert_gguf FILE.gguf DIRECTORY [--layers=6 --tokens=16384]

Numbers are dequantised to float32. With --layers and --tokens only the first layers and
the first tokens are kept, beside the special ones: a smaller router, for trials.
"""

import json
from pathlib import Path

import numpy as np
import tokenizers
from absl import app, flags
from gguf import MODEL_ARCH, GGUFReader, TokenType, dequantize, get_tensor_name_map
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel, Split

from baar_jax.config import fail
from baar_jax.router.qwen2 import Qwen2Config
from baar_jax.router.weights import expected_tensors

LAYERS = flags.DEFINE_integer("layers", None, "Layers to keep.", 1)
TOKENS = flags.DEFINE_integer("tokens", None, "Tokens to keep, beside special ones.", 1)

FIELDS = {
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_hidden_layers": "block_count",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
  "rope_theta": "rope.freq_base",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
  "max_position_embeddings": "context_length",
}
TABLES = "token_embd.weight", "output.weight"  # the embedding, and that of the output
# Two tables that were quantised apart differ by less than this share of their size.
SAME_TABLE = 0.2
# The regular expression by which Qwen2's tokenizer splits a text into words.
WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert(
  file: Path, directory: Path, layers: int | None = None, tokens: int | None = None
) -> None:
  """Write the directory of a GGUF file.

  A file may store the embedding twice, quantised apart, although the model has it once.
  Then the output's table is kept as the embedding, for it is the finer one. Entries
  that only pad the vocabulary are left out.

  Args:
    file: the GGUF file.
    directory: the directory; it must not exist.
    layers: the number of layers to keep; None is all.
    tokens: the number of ordinary tokens to keep; None is all.

  Raises:
    ValueError: the file is no GGUF file, or no Qwen2.
    OSError: the file cannot be read, or the directory exists.
  """
  reader = GGUFReader(file)
  fields = {name: field.contents() for name, field in reader.fields.items()}
  kind = fields.get("general.architecture")
  if kind != "qwen2":
    raise ValueError(f"{file} has the architecture {kind!r}: choose a Qwen2 or Qwen2.5")
  rows = list_tokens(fields, tokens)
  arrays = {}
  for tensor in reader.tensors:
    array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    arrays[tensor.name] = array[rows] if tensor.name in TABLES else array
  embedding, head = map(arrays.get, TABLES)
  tied = head is None
  if not tied and np.abs(head - embedding).mean() < SAME_TABLE * np.abs(head).mean():
    arrays[TABLES[0]] = head
    tied = True
  config = {name: fields[f"qwen2.{field}"] for name, field in FIELDS.items()}
  config["num_hidden_layers"] = min(layers or 1 << 30, config["num_hidden_layers"])
  config |= {
    "head_dim": config["hidden_size"] // config["num_attention_heads"],
    "vocab_size": len(rows),
    "tie_word_embeddings": tied,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "torch_dtype": "float32",
  }
  name_of = get_tensor_name_map(MODEL_ARCH.QWEN2, config["num_hidden_layers"]).get_name
  kept = {}
  for name in expected_tensors(Qwen2Config(**config)):
    kept[name] = arrays[name_of(name, (".weight", ".bias"))]
  directory.mkdir(parents=True)
  save_file(kept, directory / "model.safetensors", {"format": "pt"})
  tokenizer = make_tokenizer(fields, rows)
  tokenizer.save(str(directory / "tokenizer.json"))
  end = fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]]
  settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
  generation = {"eos_token_id": tokenizer.token_to_id(end)}
  (directory / "config.json").write_text(json.dumps(config, indent=2))
  (directory / "tokenizer_config.json").write_text(json.dumps(settings))
  (directory / "generation_config.json").write_text(json.dumps(generation))
  if template := fields.get("tokenizer.chat_template"):
    (directory / "chat_template.jinja").write_text(template)


def list_tokens(fields: dict, most: int | None) -> list[int]:
  """Return the ids of the tokens to keep: ordinary ones, at most `most`, then special."""
  kinds = np.array(fields["tokenizer.ggml.token_type"])
  special = np.isin(kinds, (TokenType.CONTROL, TokenType.USER_DEFINED))
  return [*np.flatnonzero(kinds == TokenType.NORMAL)[:most], *np.flatnonzero(special)]


def make_tokenizer(fields: dict, rows: list[int]) -> tokenizers.Tokenizer:
  """Make the tokenizer of some tokens, which get the ids 0, 1, 2 and so on."""
  texts = fields["tokenizer.ggml.tokens"]
  kinds = fields["tokenizer.ggml.token_type"]
  ordinary = [texts[row] for row in rows if kinds[row] == TokenType.NORMAL]
  id_of = {text: number for number, text in enumerate(ordinary)}
  merges = []
  for merge in fields["tokenizer.ggml.merges"]:
    left, right = merge.split(" ")
    if {left, right, left + right} <= id_of.keys():
      merges.append((left, right))
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(id_of, merges))
  set_rules(tokenizer)
  tokenizer.add_special_tokens([texts[row] for row in rows[len(ordinary) :]])
  return tokenizer


def set_rules(tokenizer: tokenizers.Tokenizer) -> None:
  """Give a tokenizer Qwen2's rules before and after its merges."""
  tokenizer.normalizer = tokenizers.normalizers.NFC()
  split = Split(tokenizers.Regex(WORDS), "isolated")
  as_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, as_bytes])
  tokenizer.decoder = tokenizers.decoders.ByteLevel()


def main(words: list[str]) -> int:
  """Convert the file that the command line names."""
  try:
    if len(words) != 3:
      raise ValueError("name a GGUF file and a new directory")
    convert(*map(Path, words[1:]), LAYERS.value, TOKENS.value)
  except (ValueError, OSError, LookupError) as error:
    return fail(error)
  return 0


if __name__ == "__main__":
  app.run(main)
