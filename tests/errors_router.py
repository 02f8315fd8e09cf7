"""The errors of the router: its tokenizer, its weights."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import qwen2_checkpoint as hf
from safetensors.numpy import save_file

from baar_jax.config import RouterConfig
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.view import (
  View,
  make_byte_tokenizer,
  read_tokenizer,
)
from baar_jax.router.weights import (
  check_directory,
  check_pretrained,
)

SHAPE = hf.SHAPES["grouped"]


def keep_no_text(tmp: Path) -> None:
  """Read a tokenizer that cuts every text to one token."""
  tokenizer = make_byte_tokenizer()
  tokenizer.enable_truncation(1)
  tokenizer.save(str(tmp / "tokenizer.json"))
  read_tokenizer(tmp)


def check(tmp: Path, tokens: int = 300, **settings: int) -> None:
  """Check weights whose tokenizer has a number of tokens, as --stage=setup does."""
  hf.write(tmp, SHAPE, tokens=tokens)
  check_pretrained(RouterConfig(weights=str(tmp), **settings))


def untie_head(tmp: Path) -> None:
  """Store an output head that differs from the embedding to which it is tied."""
  numbers = dict(hf.tensors(SHAPE))
  numbers["lm_head.weight"] = 2 * numbers["model.embed_tokens.weight"]
  save_file(numbers, hf.write(tmp, SHAPE) / "model.safetensors")
  check_directory(tmp)


def read_nan(tmp: Path) -> None:
  """Decide by logits of which one is NaN; the router would always pick one model."""
  feed = Mock(**{"read.return_value": (np.array([[0.0, np.nan]]), [1])})
  RouterPolicy(PolicySpec("router"), feed, Threshold()).choose([Mock()])


CONFIG = (
  "Cannot read TMP/config.json ({}). Set --config.router.weights to a Hugging Face"
  " directory of a Qwen2."
)
TOKENIZER = (
  "Cannot read TMP/tokenizer.json ({})."
  " Restore a copy, or (in a run) delete the file and run --stage=profile."
)
CASES = [
  (
    "Found an infinite number or a NaN in logits of router, expected finite numbers."
    " Restore the weights, or train again with a lower learning rate.",
    read_nan,
  ),
  (TOKENIZER.format("encoding and decoding a text changes the text"), keep_no_text),
  (
    "tokenizer.json lacks one of <|M1|>, <|M2|>, <|M3|>. Restore the copy ...",
    lambda tmp: View(RouterConfig(), make_byte_tokenizer(models=2), models=3),
  ),
  (
    "TMP: --config.router.max_tokens is 32769, expected at most 32768, as config.json says."
    " Set a lower number, or use all files of one model.",
    lambda tmp: check(tmp, max_tokens=32_769),
  ),
  (
    "TMP/some.gguf is a GGUF file: ...tools.convert_gguf...",
    lambda tmp: check_pretrained(RouterConfig(weights=f"{tmp}/some.gguf")),
  ),
  (
    "TMP: tensors ('lm_head.weight', 'model.embed_tokens.weight') differ, expected equal"
    " ones, as config.json ties them. Set tie_word_embeddings to false there.",
    untie_head,
  ),
  (
    CONFIG.format("rope_theta differs from that in rope_parameters, expected one"),
    lambda tmp: check_directory(
      hf.write(tmp, SHAPE | {"rope_parameters": {"rope_theta": 1e4}})
    ),
  ),
]
