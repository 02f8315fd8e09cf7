"""A config -> the router's model: random weights, or a checkpoint with rows for the decisions."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from baar_jax.config import RouterConfig
from baar_jax.router.qwen2 import Qwen2, Qwen2Config
from baar_jax.router.tokenizer import DECISION_TOKENS, read_tokenizer
from baar_jax.router.view import View
from baar_jax.router.weights import check_directory, load_qwen2, read_config

VOCABULARY_BLOCK = 128  # a vocabulary without spare rows grows to a multiple of it


def shape_of(config: RouterConfig, decision_ids: Sequence[int]) -> Qwen2Config:
  """The configured shape, or the checkpoint's (see `read_config`) with rows for the decisions."""
  if config.weights:
    shape, rows = read_config(config.weights), max(decision_ids) + 1
    if rows > shape.vocab_size:
      shape = dataclasses.replace(shape, vocab_size=-(-rows // VOCABULARY_BLOCK) * VOCABULARY_BLOCK)
    return shape
  return Qwen2Config(
    vocab_size=config.vocab_size,
    hidden_size=config.hidden_size,
    intermediate_size=config.intermediate_size,
    num_hidden_layers=config.num_layers,
    num_attention_heads=config.num_heads,
    num_key_value_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    rope_theta=config.rope_theta,
    tie_word_embeddings=config.tie_word_embeddings,
  )


def build_model(config: RouterConfig, seed: int) -> Qwen2:
  """A router of the configured shape with random weights."""
  shape = shape_of(config, ())
  # One compilation of everything is faster than drawing each weight by itself.
  return nnx.jit(lambda: Qwen2(shape, nnx.Rngs(seed)))()


def abstract_model(config: RouterConfig, decision_ids: Sequence[int]) -> Qwen2:
  """A router's structure, shapes and dtypes without values."""
  return nnx.eval_shape(lambda: Qwen2(shape_of(config, decision_ids), nnx.Rngs(0)))


def check_pretrained(config: RouterConfig) -> None:
  """Raises ValueError unless `load_pretrained` can load `config.weights`; reads headers alone."""
  shape, _ = check_directory(config.weights)
  tokens = read_tokenizer(Path(config.weights)).get_vocab_size()
  longest = shape.max_position_embeddings
  if config.max_tokens > longest:
    flag = f"--config.router.max_tokens is {config.max_tokens}"
    raise ValueError(f"{flag}; {config.weights} was trained for at most {longest}")
  if tokens > shape.vocab_size:
    sizes = f"tokenizer.json has {tokens} tokens, config.json {shape.vocab_size}"
    raise ValueError(f"{config.weights}: {sizes}; put the tokenizer of this checkpoint there")


def load_pretrained(config: RouterConfig, view: View, mesh: Mesh | None = None) -> Qwen2:
  """The float32 router of `config.weights`, with rows for the decisions.

  Each decision's row in the embedding, and in an untied head, is the mean of the rows of its
  word's tokens (our choice); a saved router keeps its own. Raises what `load_qwen2` does.
  """
  model = load_qwen2(config.weights, jnp.float32, mesh)
  stored_ids = map(read_tokenizer(Path(config.weights)).token_to_id, DECISION_TOKENS)
  if None not in stored_ids and max(view.decision_ids) < model.config.vocab_size:
    return model
  model.config = shape_of(config, view.decision_ids)
  V = model.config.vocab_size
  for table in _token_tables(model):
    table_VxD = table[...]
    rows_AxD = jnp.stack([table_VxD[np.array(ids)].mean(axis=0) for ids in view.tokenizer.word_ids])
    table_VxD = jnp.pad(table_VxD, ((0, V - len(table_VxD)), (0, 0)))
    # Not `table[...] =`, which keeps the shape.
    table.set_value(table_VxD.at[np.array(view.decision_ids)].set(rows_AxD))
  return model


def start_alike(model: Qwen2, decision_ids: Sequence[int]) -> None:
  """Gives the decision tokens equal rows, the mean of theirs, so that all are equally probable.

  Our choice, for random weights, so that a router need not unlearn an arbitrary preference. Equal
  embedding rows also hide at first that past decisions predict the next one in the references.
  """
  ids = np.array(decision_ids)
  for table in _token_tables(model):
    table[...] = table[...].at[ids].set(table[...][ids].mean(axis=0))


def _token_tables(model: Qwen2) -> list[nnx.Param]:
  """The parameters with a row per token: the embedding, and a head that is not tied to it."""
  tied = model.config.tie_word_embeddings
  return [model.embedding_VxD] if tied else [model.embedding_VxD, model.head_VxD]
