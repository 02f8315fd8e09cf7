"""Train the router's tokenizer, or copy the one of pretrained weights."""

import os
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers

from baar_jax.episode import decision_words

# A trained token has at most this number of characters, so that long phrases share
# tokens (our choice).
TOKEN_CHARS = 12
# Encoding and decoding this text must give the same text.
PROBE = "step 1:\n é☂"


def decision_tokens(models: int) -> list[str]:
  """Return the text of each model's decision token, cheapest model first."""
  return [f"<|{word}|>" for word in decision_words(models)]


def train_tokenizer(
  texts: Iterable[str], vocab_size: int, directory: Path, models: int = 2
) -> None:
  """Train a byte-level BPE tokenizer on texts, and save it.

  A token may contain several words, because environments repeat the same phrases (our
  choice). No token has text of two lines.

  Args:
    texts: the texts to train on.
    vocab_size: largest number of tokens, including the 256 bytes and the decision
      tokens.
    directory: `tokenizer.json` is written there.
    models: number of models; each has a decision token.
  """
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  lines = pre_tokenizers.Split("\n", "merged_with_next")
  as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, as_bytes])
  tokenizer.decoder = decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=decision_tokens(models),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
    max_token_length=TOKEN_CHARS,
  )
  # The package tokenizers reads the texts in another thread. An iterator over SQLite's
  # rows works only in the thread that opened the store. So the texts become a list.
  tokenizer.train_from_iterator(list(texts), trainer)
  _save(tokenizer, directory)


def adopt_tokenizer(source: Path, directory: Path, models: int = 2) -> None:
  """Copy the tokenizer of pretrained weights, and add the decision tokens.

  A new token gets an id above all existing ids. A decision token that the tokenizer
  already has keeps its id.

  Args:
    source: directory of the weights' `tokenizer.json`, which is not changed.
    directory: the copy is written there.
    models: number of models; each has a decision token.

  Raises:
    ValueError: the weights' tokenizer cannot be read.
  """
  tokenizer = read_tokenizer(source)
  tokenizer.add_special_tokens(decision_tokens(models))
  _save(tokenizer, directory)


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
  """Read the tokenizer from a directory's `tokenizer.json`.

  Raises:
    ValueError: the file is missing or damaged, or encoding and decoding a text changes
      the text.
  """
  path = directory / "tokenizer.json"
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(require_file(path)))
    if tokenizer.decode(tokenizer.encode(PROBE).ids) != PROBE:
      raise ValueError("encoding and decoding a text changes the text")
    return tokenizer
  # The tokenizers package raises a BaseException after an internal failure (a panic).
  # The exception has no narrower public class.
  except BaseException as error:
    line = str(error).partition("\n")[0]
    remedy = "Restore a copy, or (in a run) delete the file and run --stage=profile."
    raise ValueError(f"Cannot read {path} ({line}). {remedy}") from error


def require_file(path: Path) -> Path:
  """Require a path to be a regular file, before it is opened.

  Opening a named pipe would wait for a writer forever.

  Returns:
    The path.

  Raises:
    ValueError: there is no file, or it is a pipe, a directory or a device.
  """
  if not path.is_file():
    raise ValueError("it is missing or not a regular file")
  return path


def _save(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
  """Write `tokenizer.json` in one step, so that no reader sees half of it."""
  directory.mkdir(parents=True, exist_ok=True)
  temporary = directory / "tokenizer.tmp"
  tokenizer.save(str(temporary))
  os.replace(temporary, directory / "tokenizer.json")
