"""The errors of the router: its tokenizer, its weights."""

import resource
from pathlib import Path
from unittest.mock import Mock

import numpy as np
from safetensors.numpy import save_file
from test_weights import set_fields, set_tensor

from baar_jax.config import RouterConfig
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.view import View, read_tokenizer, train_tokenizer
from baar_jax.router.weights import (
  check_directory,
  check_pretrained,
  read_config,
  write_directory,
)
from tools import qwen2_checkpoint as hf

SHAPE = hf.SHAPES["grouped"]
NORM = "model.norm.weight"


def keep_no_text(tmp: Path) -> None:
  """Read a tokenizer that cuts every text to one token."""
  train_tokenizer([""], 300, tmp)
  tokenizer = read_tokenizer(tmp)
  tokenizer.enable_truncation(1)
  tokenizer.save(str(tmp / "tokenizer.json"))
  read_tokenizer(tmp)


def open_view(tmp: Path, models: int = 2, vocab_size: int = 300) -> None:
  """Open a view of three models on the tokenizer of a number of models."""
  train_tokenizer([""], 300, tmp, models)
  View(RouterConfig(vocab_size=vocab_size), tmp, models=3)


def check(tmp: Path, tokens: int = 300, **settings: int) -> None:
  """Check weights whose tokenizer has a number of tokens, as --stage=setup does."""
  hf.write(tmp, SHAPE, tokens=tokens)
  check_pretrained(RouterConfig(weights=str(tmp), **settings))


def check_tensor(tmp: Path, name: str, numbers: np.ndarray | None) -> None:
  """Check weights in which one tensor is changed."""
  set_tensor(hf.write(tmp, SHAPE), name, numbers)
  check_directory(tmp)


def add_shard(tmp: Path) -> None:
  hf.write(tmp, SHAPE)
  save_file({NORM: np.zeros(48, "f4")}, tmp / "model-2.safetensors")
  check_directory(tmp)


def cut_weights(tmp: Path) -> None:
  hf.write(tmp, SHAPE)
  (tmp / "model.safetensors").write_bytes(b"")
  check_directory(tmp)


def change_config(tmp: Path, **fields: object) -> None:
  """Check weights whose config.json has some fields changed."""
  set_fields(hf.write(tmp, SHAPE), fields)
  check_directory(tmp)


def fill_disk(tmp: Path) -> None:
  """Write weights although no file may be longer than 1,000 bytes."""
  shape = read_config(hf.write(tmp, SHAPE))
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
  try:
    write_directory(tmp / "saved", {NORM: np.zeros(1000)}, shape, "")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def read_nan(tmp: Path) -> None:
  """Decide by logits of which one is NaN; the router would always pick one model."""
  feed = Mock(**{"read.return_value": (np.array([[0.0, np.nan]]), [1])})
  RouterPolicy(PolicySpec("router"), feed, Threshold()).choose([Mock()])


CONFIG = (
  "Cannot read TMP/config.json ({}). Set --config.router.weights to a Hugging Face"
  " directory of a Qwen2, or run --stage=setup."
)
TOKENIZER = (
  "Cannot read TMP/tokenizer.json ({})."
  " Restore a copy, or (in a run) delete the file and run --stage=profile."
)
WEIGHTS = "TMP/model.safetensors: tensor {}. Use the files of one plain Qwen2."
CASES = [
  (
    "Found an infinite number or a NaN in logits of router, expected finite numbers."
    " Restore the weights, or train again with a lower learning rate.",
    read_nan,
  ),
  (
    TOKENIZER.format("TMP/tokenizer.json is missing or not a regular file"),
    read_tokenizer,
  ),
  (TOKENIZER.format("encoding and decoding a text changes the text"), keep_no_text),
  (
    "TMP/tokenizer.json lacks one of the decision tokens <|M1|>, <|M2|>, <|M3|>."
    " Restore a copy that was made for this number of models.",
    open_view,
  ),
  (
    "TMP/tokenizer.json has a token with id 258, expected ids below"
    " --config.router.vocab_size, 258. Restore a copy of the file.",
    lambda tmp: open_view(tmp, models=3, vocab_size=258),
  ),
  (
    "--config.router.max_tokens is 32769, but TMP was trained for 32768 tokens."
    " Choose at most this number.",
    lambda tmp: check(tmp, max_tokens=32_769),
  ),
  (
    "TMP/tokenizer.json has 400 tokens, but config.json has vocab_size 307."
    " Use both files of the same model.",
    lambda tmp: check(tmp, tokens=400),
  ),
  (
    "TMP: weights need 40,000 GB in float32, memory has .... Choose smaller weights.",
    lambda tmp: change_config(tmp, vocab_size=10**8, hidden_size=10**5, head_dim=10),
  ),
  (
    "Cannot read TMP/model.safetensors (...). Restore or download the file again.",
    cut_weights,
  ),
  (
    f"TMP: tensor {NORM} is in no model*.safetensors file."
    " Restore the missing file, or download the model again.",
    check_tensor,
    NORM,
    None,
  ),
  (
    WEIGHTS.format(f"{NORM} is F32 [4], expected F32 or BF16 or F16 [48]"),
    check_tensor,
    NORM,
    np.zeros(4, "f4"),
  ),
  (
    WEIGHTS.format("'bias' is unknown to a Qwen2 of the shape in config.json"),
    check_tensor,
    "bias",
    np.zeros(4, "f4"),
  ),
  (
    WEIGHTS.format(f"{NORM} is in model-2.safetensors too, expected in one file"),
    add_shard,
  ),
  (CONFIG.format("TMP/config.json is missing or not a regular file"), read_config),
  (
    "TMP/config.json has an unsupported model_type (Input should be 'qwen2')."
    " Choose a plain Qwen2 or Qwen2.5.",
    lambda tmp: change_config(tmp, model_type="llama"),
  ),
  (
    "TMP/config.json: num_attention_heads must be a multiple of num_key_value_heads."
    " Restore or download the file again.",
    lambda tmp: change_config(tmp, num_key_value_heads=4),
  ),
  (
    "Cannot write TMP/saved.tmp/model.safetensors (...)."
    " Free disk space and run the same command again.",
    fill_disk,
  ),
]
