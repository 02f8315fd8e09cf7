"""The trained router as a policy: model, view and KV cache -> decisions for the ready episodes."""

import dataclasses
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from baar_jax.config import RouterConfig
from baar_jax.mesh import local_copy, one_device
from baar_jax.rollout.live import Decision, Live
from baar_jax.router.qwen2 import Qwen2, Qwen2Config
from baar_jax.router.view import View, count_tokens, has_decisions
from baar_jax.router.weights import check_directory, load_qwen2, read_config
from baar_jax.train.batches import bucket_of

NEW_TOKENS = (32, 64, 128, 256)  # bucket lengths of one cached call
ROWS = (1, 4, 16, 64)  # and bucket sizes of its batch
VOCABULARY_BLOCK = 128  # a vocabulary without spare rows grows to a multiple of it


def shape_of(config: RouterConfig, decision_ids: Sequence[int]) -> Qwen2Config:
  """The router's shape: its checkpoint's, with rows for the decisions, or the configured one.

  Raises:
    ValueError: the checkpoint's config.json is not that of a Qwen2.
  """
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
  # Compiled as a whole: drawing the weights one by one takes longer than the rest of a start.
  return nnx.jit(lambda: Qwen2(shape, nnx.Rngs(seed)))()


def abstract_model(config: RouterConfig, decision_ids: Sequence[int]) -> Qwen2:
  """A router's structure, shapes and dtypes without values."""
  return nnx.eval_shape(lambda: Qwen2(shape_of(config, decision_ids), nnx.Rngs(0)))


def check_pretrained(config: RouterConfig) -> None:
  """Raises ValueError unless `config.weights` looks like what `load_pretrained` will read."""
  shape, tokens = check_directory(config.weights), count_tokens(Path(config.weights))
  if config.max_tokens > shape.max_position_embeddings:
    raise ValueError(
      f"--config.router.max_tokens is {config.max_tokens}; {config.weights} was made for "
      f"at most {shape.max_position_embeddings}"
    )
  if tokens > shape.vocab_size:
    raise ValueError(
      f"{config.weights}: tokenizer.json has {tokens} tokens, config.json {shape.vocab_size}; "
      "put the tokenizer of this checkpoint there"
    )


def load_pretrained(config: RouterConfig, view: View, mesh: Mesh | None = None) -> Qwen2:
  """The router of `config.weights`, float32, with rows for the decisions (spec.md 3).

  Each decision takes a spare row of the embedding, and of the head if that is another table,
  which starts as the mean of the rows of the word's own tokens. A vocabulary without a spare row
  grows to a multiple of `VOCABULARY_BLOCK`. Rows of decisions that the checkpoint's tokenizer
  already knows, because it is a saved router, stay as they are.

  Raises:
    ValueError: the directory is not that of a Qwen2.
  """
  model = load_qwen2(config.weights, jnp.float32, mesh)
  spare = max(view.decision_ids) < model.config.vocab_size
  if spare and has_decisions(Path(config.weights)):
    return model
  shape = shape_of(config, view.decision_ids)
  model.config = shape
  tables = [model.embedding_VxD] + ([] if shape.tie_word_embeddings else [model.head_VxD])
  for table in tables:
    # Not `table[...] =`, which keeps the shape.
    table.set_value(_with_rows(table[...], shape.vocab_size, view.decision_ids, view.word_ids))
  return model


def _with_rows(table_VxD, V: int, ids: Sequence[int], words: Sequence[Sequence[int]]):
  """The table with V rows; the row of each decision is the mean of its word's rows."""
  rows_AxD = jnp.stack([table_VxD[np.array(word)].mean(axis=0) for word in words])
  table_VxD = jnp.pad(table_VxD, ((0, V - len(table_VxD)), (0, 0)))
  return table_VxD.at[np.array(ids)].set(rows_AxD)


def start_alike(model: Qwen2, ids: Sequence[int]) -> None:
  """Gives the decision tokens equal rows, each the mean of theirs, so that all are as probable.

  A router from random weights would have to unlearn an arbitrary preference; and as the head rows'
  difference is what passes a gradient on, at first little else learns, on features that are
  there. The rows that are read become equal too: references were drawn with one probability per
  episode, so a past decision foretells the next one, which is not what is to be learned. Our
  choice; how much each half of it brings was not measured apart.
  """
  tables = [model.embedding_VxD]
  if not model.config.tie_word_embeddings:
    tables.append(model.head_VxD)
  for table in tables:
    table[...] = table[...].at[np.array(ids)].set(table[...][np.array(ids)].mean(axis=0))


@dataclasses.dataclass
class Sample:
  """Decide by sampling, as training does; `key` seeds the draws beside task, seed and step."""

  key: str

  def pick(self, p_A: np.ndarray, live: Live) -> int:
    draw = random.Random(f"{self.key}|{live.task.id}|{live.job.seed}|{len(live.steps)}").random()
    return min(int(np.searchsorted(np.cumsum(p_A), draw, side="right")), len(p_A) - 1)


@dataclasses.dataclass
class Threshold:
  """Decide for LARGE where its probability reaches `value`, as evaluation does.

  Of two models 0.5 takes the more probable.
  """

  value: float = 0.5

  def pick(self, p_A: np.ndarray, live: Live) -> int:
    del live
    return len(p_A) - 1 if p_A[-1] >= self.value else int(np.argmax(p_A[:-1]))


class RouterPolicy:
  """Scores the decision of every ready episode in one forward of the new tokens alone.

  Each live episode owns a row of the KV cache. Where its text no longer extends what the row
  holds (a new episode, a cut of the history, the paper's view) the row is filled anew.
  """

  def __init__(
    self,
    name: str,
    model: Qwen2,
    view: View,
    config: RouterConfig,
    decide: Sample | Threshold,
    live_episodes: int,
    mesh: Mesh | None = None,
  ):
    """Copies the model, which lies on the mesh, to this process's first device.

    Parameters and cache are kept in `config.dtype`, which is computed in too.
    """
    self.name = name
    self._view = view
    self._decide = decide
    self._usd_per_token = config.usd_per_million_tokens / 1e6
    dtype = jnp.dtype(config.dtype)
    self._graphdef, params = nnx.split(model)
    self._params = local_copy(params, mesh or one_device(), dtype)
    # The last row is for padding.
    self._cache = model.empty_cache(live_episodes + 1, config.max_tokens, dtype)
    self._spare_row = live_episodes
    self._free_rows = list(range(live_episodes))
    self._rows: dict[int, int] = {}  # id(live) -> row
    self._held: dict[int, list[int]] = {}  # row -> the tokens that its cache holds
    self._ids = tuple(view.decision_ids)

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decisions for the ready episodes, at most `live_episodes` of them live at once."""
    start = time.monotonic()
    texts = [
      self._view.windows(
        live.task,
        live.steps,
        live.observation,
        live.call_budget,
        live.usd_budget,
        live.proposed,
      )[-1].tokens
      for live in ready
    ]
    rows = [self._row(live) for live in ready]
    p_RxA, fed = self._probabilities(rows, texts)
    latency_s = time.monotonic() - start  # all of them waited for the batch
    decisions = []
    for live, p_A, new_tokens in zip(ready, p_RxA, fed):
      model = self._decide.pick(p_A, live)
      logp = float(np.log(max(p_A[model], 1e-30)))
      decisions.append(Decision(model, logp, new_tokens * self._usd_per_token, latency_s))
    return decisions

  def prepare(self, live: Live) -> None:
    del live

  def finish(self, live: Live) -> None:
    row = self._rows.pop(id(live), None)
    if row is not None:
      self._free_rows.append(row)
      self._held[row] = []

  def _row(self, live: Live) -> int:
    if id(live) not in self._rows:
      self._rows[id(live)] = self._free_rows.pop()
    return self._rows[id(live)]

  def _probabilities(self, rows: list[int], texts: list[list[int]]) -> tuple[np.ndarray, list[int]]:
    """Feeds what each row does not hold yet, in a few calls if it is long.

    Returns:
      p_RxA, float64, and the number of tokens that each row was fed.
    """
    pending = []  # [index, start, tokens]
    for i, (row, text) in enumerate(zip(rows, texts)):
      held = self._held.get(row, [])
      start = len(held) if text[: len(held)] == held and len(held) < len(text) else 0
      pending.append((i, start, text[start:]))
      self._held[row] = text
    fed = [len(tokens) for _, _, tokens in pending]
    p_RxA = np.zeros((len(rows), len(self._ids)))
    while pending:
      pending.sort(key=lambda part: len(part[2]))
      group, pending = pending[: ROWS[-1]], pending[ROWS[-1] :]
      T = bucket_of(min(len(group[-1][2]), NEW_TOKENS[-1]), NEW_TOKENS)
      R = bucket_of(len(group), ROWS)
      tokens_RxT = np.zeros((R, T), np.int32)
      start_R, last_R = np.zeros(R, np.int32), np.zeros(R, np.int32)
      row_R = np.full(R, self._spare_row, np.int32)
      for r, (i, start, tokens) in enumerate(group):
        part = tokens[:T]
        tokens_RxT[r, : len(part)] = part
        row_R[r], start_R[r], last_R[r] = rows[i], start, len(part) - 1
      logits_RxA, self._cache = _extend(
        self._graphdef, self._params, self._cache, tokens_RxT, row_R, start_R, last_R, self._ids
      )
      logits_RxA = np.asarray(logits_RxA, np.float64)
      for r, (i, start, tokens) in enumerate(group):
        if len(tokens) > T:
          pending.append((i, start + T, tokens[T:]))
        else:
          p_A = np.exp(logits_RxA[r] - logits_RxA[r].max())
          p_RxA[i] = p_A / p_A.sum()
    return p_RxA, fed


@partial(jax.jit, static_argnums=(0, 7), donate_argnums=(2,))
def _extend(graphdef, params, cache, tokens_RxT, row_R, start_R, last_R, ids):
  """One forward of new tokens on the named cache rows. Returns logits_RxA and the cache."""
  model = nnx.merge(graphdef, params)
  hidden_RxTxD, cache = model.extend(tokens_RxT, start_R, cache, row_R, cache[0].dtype)
  hidden_RxD = hidden_RxTxD[jnp.arange(len(last_R)), last_R]
  return model.logits(hidden_RxD, np.array(ids)), cache
