"""The errors of the router and its weights."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import qwen2_checkpoint as hf

from baar_jax.config import RouterConfig
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.policy import RouterPolicy
from baar_jax.router.weights import (
  check_directory,
  check_pretrained,
)

SHAPE = hf.SHAPES["grouped"]


def check(tmp: Path, tokens: int = 300, **settings: int) -> None:
  """Check weights whose tokenizer has a number of tokens, as --stage=setup does."""
  hf.write(tmp, SHAPE, tokens=tokens)
  check_pretrained(RouterConfig(weights=str(tmp), **settings))


def read_nan(tmp: Path) -> None:
  """Decide by logits of which one is NaN; the router would always pick one model."""
  feed = Mock(**{"read.return_value": (np.array([[0.0, np.nan]]), [1])})
  RouterPolicy(PolicySpec("router"), feed).choose([Mock()])


CONFIG = (
  "Cannot read TMP/config.json ({}). Set --config.router.weights to a Hugging Face"
  " directory of a Qwen2."
)
CASES = [
  (
    "Found an infinite number or a NaN in logits of router, expected finite numbers."
    " Restore the weights, or train again with a lower learning rate.",
    read_nan,
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
    CONFIG.format("rope_theta differs from that in rope_parameters, expected one"),
    lambda tmp: check_directory(
      hf.write(tmp, SHAPE | {"rope_parameters": {"rope_theta": 1e4}})
    ),
  ),
]
