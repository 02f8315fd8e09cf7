"""Encode episodes for a text router, and feed it the new tokens of live episodes.

Axes: B windows, S decisions of a window, R rows of the KV cache, T tokens of a row, A
answers, D width of a hidden state.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from baar_jax.mesh import local_copy, one_device
from baar_jax.rollout.specs import Live
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View, Window
from baar_jax.router.weights import find_shape

# Rows are padded to two lengths, or to four if a text may have more tokens than this.
LONG = 1024
# The router is compiled for each of these numbers of new tokens per row (NEW_TOKENS),
# with each of these numbers of rows (ROWS). Other batches are padded to the next size.
# 144 holds a step of configs/sciworld.py in any tokenizer.
NEW_TOKENS = (32, 64, 144, 256)
ROWS = (1, 4, 16, 64)
# The price of the router's own compute (our choice), in US dollars.
USD_PER_TOKEN = 0.02 / 1e6


class Text(NamedTuple):
  """Padded windows, as a text router reads them.

  Attributes:
    tokens_BxT: int32, 0-padded.
    position_BxS: int32, the position of the decision in its window.
  """

  tokens_BxT: np.ndarray
  position_BxS: np.ndarray


class TextEncoder(View):
  """Turn episodes into the tokens that Qwen2 reads.

  It is an `Encoder`, see learn/batches.py.
  """

  @property
  def dtype(self) -> str:
    """Return the dtype of the computation."""
    return self.config.dtype

  def build(self, seed: int) -> Qwen2:
    """Build a router of the shape of the configured weights, with random weights."""
    shape = find_shape(self.config, self.decision_ids)
    return Qwen2(shape, nnx.Rngs(seed))

  def measure(self, window: Window) -> tuple[int, int]:
    """Return the numbers of a window's tokens and decisions."""
    return len(window.tokens), len(window.positions)

  def pad(self, windows: Sequence[Window], count: int, decisions: int) -> Text:
    """Pad windows to few lengths, because each length is compiled once per loss.

    Args:
      windows: windows of any episodes' texts.
      count: B.
      decisions: S.
    """
    most = self.config.max_tokens
    bucket = -(-most // (4 if most > LONG else 2))
    longest = max(len(window.tokens) for window in windows)
    T = -(-longest // bucket) * bucket
    tokens_BxT = np.zeros((count, T), np.int32)
    position_BxS = np.zeros((count, decisions), np.int32)
    for b, window in enumerate(windows):
      tokens_BxT[b, : len(window.tokens)] = window.tokens
      position_BxS[b, : len(window.positions)] = window.positions
    return Text(tokens_BxT, position_BxS)

  def forward(self, model: Qwen2, text: Text) -> jax.Array:
    """Compute float32 logits_BxSxA, only at decisions and only of decision tokens."""
    hidden_BxTxD = model(text.tokens_BxT, jnp.dtype(self.dtype))
    position_BxSx1 = text.position_BxS[:, :, None]
    hidden_BxSxD = jnp.take_along_axis(hidden_BxTxD, position_BxSx1, axis=1)
    return model.logits(hidden_BxSxD, np.array(self.logit_ids))

  def open_reader(self, model: Qwen2, rows: int, mesh: Mesh) -> "Reader":
    """Open a reader with a KV cache for at most `rows` live episodes."""
    return Reader(model, self, rows, mesh)


@dataclasses.dataclass
class Row:
  """A row of the KV cache, with the text of its episode.

  Attributes:
    number: index of the row in the KV cache.
    tokens: the episode's text.
    fed: number of its tokens whose keys and values the row holds.
    logits_A: the logits after the tokens that were fed.
  """

  number: int
  tokens: list[int] = dataclasses.field(default_factory=list)
  fed: int = 0
  logits_A: np.ndarray | None = None


class Reader:
  """Compute a router's logits at the end of each live episode's text.

  Only new tokens are fed if the text begins with the tokens in the episode's row.
  Otherwise the whole text is fed again. This happens if the text has lost its oldest
  steps, and at every step with --config.router.view=paper.
  """

  def __init__(
    self,
    model: Qwen2,
    view: View,
    rows: int,
    mesh: Mesh | None = None,
  ):
    """Copy the model to this process's first device, and make an empty KV cache.

    Args:
      model: the router.
      view: writes the text that the router reads, and names the decision tokens.
      rows: the largest number of episodes that are live at once.
      mesh: the mesh that holds the model's parameters; None is one device.
    """
    self._view = view
    self._token_ids = tuple(view.logit_ids)
    dtype = jnp.dtype(view.config.dtype)
    self._graphdef, params = nnx.split(model)
    self._params = local_copy(params, mesh or one_device(), dtype)
    cache = model.make_cache(rows + 1, view.config.max_tokens, dtype)
    # The first call must see the cache on the same device as all later calls. Otherwise
    # JAX compiles the first shape twice.
    device = jax.tree.leaves(self._params)[0].sharding
    self._cache = jax.device_put(cache, device)
    # No episode gets this row of the KV cache: padding of a batch is written into it.
    self._spare_row = rows
    self._free_rows = list(range(rows))
    # The KV cache's row of each live episode, by `Live.key`.
    self._row_of: dict[Hashable, Row] = {}

  def read(self, ready: Sequence[Live]) -> tuple[np.ndarray, list[float]]:
    """Read the new text of episodes and compute the router's logits at its end.

    Args:
      ready: the R episodes that wait for a decision.

    Returns:
      logits_RxA: float64, the logits of the token ids.
      usd_R: the price of the tokens that were fed for each episode.
    """
    rows = []
    usd_R = []
    for live in ready:
      tokens = self._view.live_window(live).tokens
      if live.key not in self._row_of:
        self._row_of[live.key] = Row(self._free_rows.pop())
      row = self._row_of[live.key]
      if row.fed >= len(tokens) or tokens[: row.fed] != row.tokens[: row.fed]:
        row.fed = 0
      row.tokens = tokens
      rows.append(row)
      usd_R.append((len(tokens) - row.fed) * USD_PER_TOKEN)
    self._feed_all(rows)
    return np.stack([row.logits_A for row in rows]), usd_R

  def forget(self, live: Live) -> None:
    """Free the KV cache's row of an episode that ended or starts again."""
    row = self._row_of.pop(live.key, None)
    if row:
      self._free_rows.append(row.number)

  def compile(self) -> None:
    """Compile the router for all batch shapes before the first decision."""
    for R, T in itertools.product(ROWS, NEW_TOKENS):
      self._feed([Row(self._spare_row, [0] * T)] * R)

  def _feed_all(self, rows: Sequence[Row]) -> None:
    """Feed the new tokens of rows in batches, rows with the fewest tokens first."""
    pending = [*rows]
    while pending:
      pending.sort(key=lambda row: len(row.tokens) - row.fed)
      batch = pending[: ROWS[-1]]
      pending = pending[ROWS[-1] :]
      logits_RxA, T = self._feed(batch)
      for row, logits_A in zip(batch, logits_RxA):
        row.logits_A = logits_A
        row.fed = min(row.fed + T, len(row.tokens))
        if row.fed < len(row.tokens):
          pending.append(row)

  def _feed(self, batch: Sequence[Row]) -> tuple[np.ndarray, int]:
    """Feed up to T tokens of each row of a batch in one compiled call.

    T is the smallest of `NEW_TOKENS` that holds the new tokens of every row, or else
    the largest of `NEW_TOKENS`.

    Args:
      batch: at most ROWS[-1] rows, the one with the most new tokens last.

    Returns:
      logits_RxA at each row's last fed token, and T.
    """
    R = _find_bucket(ROWS, len(batch))
    T = _find_bucket(NEW_TOKENS, len(batch[-1].tokens) - batch[-1].fed)
    tokens_RxT = np.zeros((R, T), np.int32)
    row_R = np.full(R, self._spare_row, np.int32)
    start_R = np.zeros(R, np.int32)
    last_R = np.zeros(R, np.int32)
    for r, row in enumerate(batch):
      chunk = row.tokens[row.fed :][:T]
      tokens_RxT[r, : len(chunk)] = chunk
      row_R[r] = row.number
      start_R[r] = row.fed
      last_R[r] = len(chunk) - 1
    inputs = Inputs(tokens_RxT, row_R, start_R, last_R)
    logits_RxA, self._cache = _extend(
      self._graphdef, self._params, self._cache, inputs, self._token_ids
    )
    return np.asarray(logits_RxA, np.float64), T


class Inputs(NamedTuple):
  """The inputs of one compiled call of the router, all int32.

  Attributes:
    tokens_RxT: New tokens of R episodes, padded on the right.
    row_R: Index of each episode's row in the KV cache.
    start_R: Number of tokens that the row already holds.
    last_R: Index of each episode's last new token in `tokens_RxT`.
  """

  tokens_RxT: np.ndarray
  row_R: np.ndarray
  start_R: np.ndarray
  last_R: np.ndarray


def _find_bucket(sizes: Sequence[int], size: int) -> int:
  """Return the smallest compiled size that holds a batch, else the largest.

  Args:
    sizes: the sizes that the router is compiled for, ascending.
    size: the number of rows, or of tokens, in the batch.
  """
  for bucket in sizes:
    if size <= bucket:
      return bucket
  return sizes[-1]


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=(2,))
def _extend(
  graphdef: nnx.GraphDef,
  params: nnx.State,
  cache: tuple[jax.Array, jax.Array],
  inputs: Inputs,
  ids: tuple[int, ...],
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Feed new tokens to the router, and compute its logits at each row's last token.

  Args:
    graphdef: the structure of the model.
    params: the parameters of the model.
    cache: the KV cache; its memory is reused for the result.
    inputs: the new tokens and their rows.
    ids: the tokens whose logits are the output.

  Returns:
    logits_RxA, and the updated cache.
  """
  model = nnx.merge(graphdef, params)
  hidden_RxTxD, cache = model.extend(
    inputs.tokens_RxT, inputs.start_R, cache, inputs.row_R
  )
  rows = jnp.arange(len(inputs.last_R))
  hidden_RxD = hidden_RxTxD[rows, inputs.last_R]
  return model.logits(hidden_RxD, np.array(ids)), cache
