"""The router's tokenizer, trained on a profile's texts or taken from a checkpoint."""

import os
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers

from baar_jax.episode import decision_words

TOKEN_CHARS = 12  # of the longest token: so that long phrases share their parts
PROBE = "step 1:\n é☂"  # a text that every tokenizer has to keep


def decision_tokens(models: int) -> list[str]:
  """List the tokens that stand for the decisions, by price."""
  return [f"<|{word}|>" for word in decision_words(models)]


def train_tokenizer(
  texts: Iterable[str], vocab_size: int, directory: Path, models: int = 2
) -> None:
  """Train a byte-level BPE with the decision tokens and save it as `tokenizer.json`.

  Merges may span words, but not lines: environments repeat a few phrases.
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
  # A list, because another thread reads the texts.
  tokenizer.train_from_iterator(list(texts), trainer)
  _save(tokenizer, directory)


def adopt_tokenizer(source: Path, directory: Path, models: int = 2) -> None:
  """Save a checkpoint's tokenizer with the decisions added behind all of its tokens."""
  tokenizer = read_tokenizer(source)
  tokenizer.add_special_tokens(decision_tokens(models))
  _save(tokenizer, directory)


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
  """Read a directory's `tokenizer.json`.

  Raises:
    ValueError: it cannot be read, or does not keep texts.
  """
  path = directory / "tokenizer.json"
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(require_file(path)))
    if tokenizer.decode(tokenizer.encode(PROBE).ids) != PROBE:
      raise ValueError("it does not keep the text")
    return tokenizer
  except BaseException as error:  # the package's panics are of no narrower class
    line = str(error).partition("\n")[0]
    remedy = "restore a copy; a run's is made by --stage=profile"
    raise ValueError(f"{path} cannot be read ({line}): {remedy}") from error


def require_file(path: Path) -> Path:
  """Return a path if it is a regular file. A pipe would be waited for.

  Raises:
    ValueError: it is not.
  """
  if not path.is_file():
    raise ValueError("it is missing or no regular file")
  return path


def _save(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
  directory.mkdir(parents=True, exist_ok=True)
  temporary = directory / "tokenizer.tmp"
  tokenizer.save(str(temporary))
  os.replace(temporary, directory / "tokenizer.json")
