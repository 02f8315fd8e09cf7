"""Feed live episodes' new tokens to a router, with a row of a KV cache for each."""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from baar_jax.mesh import local_copy, one_device
from baar_jax.rollout.specs import Live
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View

NEW_TOKENS = (32, 64, 128, 256)  # bucket lengths of one cached call
ROWS = (1, 4, 16, 64)  # bucket sizes of its batch


@dataclasses.dataclass
class Row:
  """A row of the cache, and the tokens of an episode whose keys and values it holds."""

  number: int
  tokens: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Pending:
  """Tokens that are still to be fed into a row, and how many stand before them."""

  row: int
  start: int
  tokens: list[int]


class Reader:
  """Computes a router's output at the end of each episode's text.

  A row is filled anew if the text does not extend what the row holds: after a cut of
  the history, and in the paper's view.
  """

  def __init__(
    self,
    model: Qwen2,
    view: View,
    token_ids: Sequence[int] | None,
    rows: int,
    mesh: Mesh | None = None,
  ):
    """Copy the model to this process's first device.

    Args:
      token_ids: of the logits to compute; None is the hidden state instead.
      rows: the most episodes that are live at once.
    """
    self._view = view
    self._token_ids = None if token_ids is None else tuple(token_ids)
    dtype = jnp.dtype(view.config.dtype)
    self._graphdef, params = nnx.split(model)
    self._params = local_copy(params, mesh or one_device(), dtype)
    cache = model.make_cache(rows + 1, view.config.max_tokens, dtype)
    # It is bound to the device of the parameters from the start: each shape of a call
    # is compiled once.
    device = jax.tree.leaves(self._params)[0].sharding
    self._cache = jax.device_put(cache, device)
    self.rows = rows
    self._spare_row = rows  # it pads a batch
    self._free_rows = list(range(rows))
    self._held: dict[Hashable, Row] = {}  # by episode

  def read(self, ready: Sequence[Live]) -> tuple[np.ndarray, list[int]]:
    """Read the texts of episodes.

    Returns:
      output_RxC: logits_RxA of the token ids, or hidden_RxD, at each text's end.
      new_tokens_R: how many tokens were fed for each episode.
    """
    texts = [self._view.live_window(live).tokens for live in ready]
    fed = []
    pending = []
    for live, tokens in zip(ready, texts):
      row = self._held.get(live.key) or Row(self._free_rows.pop())
      start = len(row.tokens)
      if start >= len(tokens) or tokens[:start] != row.tokens:
        start = 0
      fed.append(Row(row.number, tokens))
      pending.append(Pending(row.number, start, tokens[start:]))
      # Until the tokens are fed: a failure leaves nothing to be trusted.
      self._held[live.key] = Row(row.number)
    new_tokens_R = [len(part.tokens) for part in pending]
    output_of = self._feed_all(pending)
    for live, row in zip(ready, fed):
      self._held[live.key] = row
    return np.stack([output_of[row.number] for row in fed]), new_tokens_R

  def forget(self, live: Live) -> None:
    """Free the row of an episode."""
    row = self._held.pop(live.key, None)
    if row:
      self._free_rows.append(row.number)

  def compile(self) -> None:
    """Compile all shapes of a call, so that no decision waits for it."""
    for R, T in itertools.product(ROWS, NEW_TOKENS):
      self._feed([Pending(self._spare_row, 0, [0] * T)] * R)

  def _feed_all(self, pending: list[Pending]) -> dict[int, np.ndarray]:
    """Feed all tokens; return the output at their end, by row."""
    output_of = {}
    while pending:
      pending.sort(key=lambda part: len(part.tokens))
      batch = pending[: ROWS[-1]]
      pending = pending[ROWS[-1] :]
      output_RxC, T = self._feed(batch)
      for part, output_C in zip(batch, output_RxC):
        output_of[part.row] = output_C
        if len(part.tokens) > T:
          pending.append(Pending(part.row, part.start + T, part.tokens[T:]))
    return output_of

  def _feed(self, batch: Sequence[Pending]) -> tuple[np.ndarray, int]:
    """Feed the parts, the longest last, in one compiled call of T tokens each."""
    R = _find_bucket(ROWS, len(batch))
    T = _find_bucket(NEW_TOKENS, len(batch[-1].tokens))
    tokens_RxT = np.zeros((R, T), np.int32)
    row_R = np.full(R, self._spare_row, np.int32)
    start_R = np.zeros(R, np.int32)
    last_R = np.zeros(R, np.int32)
    for r, part in enumerate(batch):
      chunk = part.tokens[:T]
      tokens_RxT[r, : len(chunk)] = chunk
      row_R[r] = part.row
      start_R[r] = part.start
      last_R[r] = len(chunk) - 1
    inputs = Inputs(tokens_RxT, row_R, start_R, last_R)
    output_RxC, self._cache = _extend(
      self._graphdef, self._params, self._cache, inputs, self._token_ids
    )
    return np.asarray(output_RxC, np.float64), T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
  """New tokens of R rows of the cache."""

  tokens_RxT: np.ndarray  # int32, padded on the right
  row_R: np.ndarray
  start_R: np.ndarray  # how many tokens the row holds before them
  last_R: np.ndarray  # index of the last new token


def _find_bucket(sizes: Sequence[int], size: int) -> int:
  """Return the least of the ascending sizes that is large enough, else the largest."""
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
  ids: tuple[int, ...] | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Compute logits_RxA of the ids, or without ids hidden_RxD, and the new cache."""
  model = nnx.merge(graphdef, params)
  hidden_RxTxD, cache = model.extend(
    inputs.tokens_RxT, inputs.start_R, cache, inputs.row_R
  )
  rows = jnp.arange(len(inputs.last_R))
  hidden_RxD = hidden_RxTxD[rows, inputs.last_R]
  if ids is None:
    return hidden_RxD, cache
  return model.logits(hidden_RxD, np.array(ids)), cache
