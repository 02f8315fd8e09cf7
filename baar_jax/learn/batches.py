"""Cut episodes into padded micro-batches, with labels of their decisions.

A row of a micro-batch is a part of an episode that a router reads at once: a window of
its text, or the inputs of all of its steps. The rows of one episode may be in several
micro-batches, so that a long episode needs no more memory than a short one.

Axes: B rows, S decisions of a row, A answers, N episodes, D decisions of all episodes.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from baar_jax.config import Config
from baar_jax.episode import Episode, Task


class Batch(NamedTuple):
  """Store a padded micro-batch: some of the rows of one gradient step.

  A gradient step adds up the losses of its micro-batches. So a mean over the step is a
  sum over the rows or decisions of each micro-batch, divided by a total of the step.

  Attributes:
    inputs: what the router reads of the episodes, see `Encoder.pad`.
    action_BxS: int32, the index of the logit to learn: the chosen model or a label.
    logp_BxS: float32, the log-probability of the sampled model in nats, when it was
      sampled; 0 if the decision was not sampled.
    mask_BxS: bool, True on decisions to learn from.
    adv_B: float, the advantage of the row's episode; 0 if the method has none.
    episodes: the number of episodes of the whole gradient step.
    decisions: the number of masked decisions of the whole gradient step, at least 1.
    ref_logits_BxSxA: float32, the SFT router's logits; None if the method does not use
      these logits.
  """

  inputs: Any
  action_BxS: np.ndarray
  logp_BxS: np.ndarray
  mask_BxS: np.ndarray
  adv_B: np.ndarray
  episodes: int = 1
  decisions: int = 1
  ref_logits_BxSxA: jax.Array | None = None


# A loss maps (logits_BxSxA, batch) to scalars by name. A gradient step learns from
# "loss", and adds up each of them over its micro-batches.
Loss = Callable[[jax.Array, Batch], dict[str, jax.Array]]


class Labels(NamedTuple):
  """Label the decisions of an episode by a rule.

  Attributes:
    decide: maps an episode to one label per step: the index of the logit to learn, or
      None for a step to leave out.
    rewrite: changes an episode before it is read, given the number of models; None
      reads it as it is.
    answers: the number of answers between which the router decides; None is one for
      each model.
    describe_draft: see `InputsEncoder` in router/network.py.
  """

  decide: Callable[[Episode], Sequence[int | None]]
  rewrite: Callable[[Episode, int], Episode] | None = None
  answers: int | None = None
  describe_draft: Callable = lambda *_: ()


def _decide_acted(episode: Episode) -> list[int]:
  """Label each step with the model that acted."""
  return [step.model for step in episode.steps]


def _decide_sampled(episode: Episode) -> list[int | None]:
  """Label each sampled step with the model that acted; leave out the others."""
  return [None if step.logp is None else step.model for step in episode.steps]


# The label of a step is the model that acted.
ACTED = Labels(_decide_acted)
# The label of a step is the sampled model. Steps that a budget forced are left out.
SAMPLED = Labels(_decide_sampled)


class Encoder(Protocol):
  """Turn episodes into arrays, and compute a router's logits from these arrays.

  The two kinds of routers differ in their encoder only: `TextEncoder` in
  router/reader.py and `InputsEncoder` in router/network.py.

  Attributes:
    dtype: the dtype of the computation.
  """

  dtype: str

  def build(self, seed: int) -> nnx.Module:
    """Build a router with random weights."""

  def encode(self, task: Task, episode: Episode) -> list:
    """Encode the rows of an episode; each decision is in exactly one, in order."""

  def measure(self, row: Any) -> tuple[int, int]:
    """Return the length by which a row is padded, and the number of its decisions."""

  def pad(self, rows: Sequence, count: int, decisions: int) -> Any:
    """Pad encoded rows to arrays, for B = `count` rows of S decisions."""

  def forward(self, model: nnx.Module, inputs: Any) -> jax.Array:
    """Compute float32 logits_BxSxA of padded arrays."""

  def open_reader(self, model: nnx.Module, rows: int, mesh: Mesh) -> Any:
    """Open a `Reader` of at most `rows` live episodes, see router/policy.py."""


def make_batch(
  episodes: Sequence[Episode],
  inputs: Any,
  labels: Labels,
  size: tuple[int, int],
) -> Batch:
  """Label the decisions of episodes, and pad them to one batch.

  Padding has no decisions to learn from: its mask is False.

  Args:
    episodes: at most B, each with the steps of its row.
    inputs: what the router reads of them, padded.
    labels: the rule that labels the decisions.
    size: (B, S); S is at least the steps of the longest episode.

  Returns:
    The batch, without advantages and totals.
  """
  batch = Batch(
    inputs,
    action_BxS=np.zeros(size, np.int32),
    logp_BxS=np.zeros(size, np.float32),
    mask_BxS=np.zeros(size, bool),
    adv_B=np.zeros(size[0], np.float32),
  )
  for b, episode in enumerate(episodes):
    decisions = zip(episode.steps, labels.decide(episode))
    for s, (step, index) in enumerate(decisions):
      batch.action_BxS[b, s] = index or 0
      batch.logp_BxS[b, s] = step.logp or 0.0
      batch.mask_BxS[b, s] = index is not None
  return batch


class Row(NamedTuple):
  """Keep a row before it is padded. Rows are sorted by the first three fields.

  Attributes:
    length: the length by which it is padded.
    number: the index of its episode.
    first: the index of its first step in the episode.
    encoded: what the router reads.
    episode: the episode with the steps of this row alone.
  """

  length: int
  number: int
  first: int
  encoded: Any
  episode: Episode


@dataclasses.dataclass(frozen=True)
class Batcher:
  """Cut episodes into micro-batches with rows of similar length.

  Attributes:
    config: the configuration; `sft.micro_episodes` is B.
    encoder: turns episodes into arrays.
    tasks: the tasks of all episodes that will be cut.
    labels: the rule that labels the decisions.
  """

  config: Config
  encoder: Encoder
  tasks: Iterable[Task]
  labels: Labels = ACTED

  def micro_batches(
    self, episodes: Sequence[Episode], adv_N: np.ndarray | float = 0.0
  ) -> list[Batch]:
    """Make the micro-batches of one gradient step, with its totals.

    Args:
      episodes: the episodes of the gradient step.
      adv_N: one advantage per episode; 0 if the method has no advantages.
    """
    adv_N = np.resize(adv_N, len(episodes))
    batches = []
    decisions = 0
    for rows, batch in self._cut(episodes):
      for b, row in enumerate(rows):
        batch.adv_B[b] = adv_N[row.number]
      batches.append(batch)
      decisions += batch.mask_BxS.sum()
    totals = {"episodes": len(episodes), "decisions": max(1, decisions)}
    return [batch._replace(**totals) for batch in batches]

  def compute(
    self, function: Callable[[Batch], jax.Array], episodes: Sequence[Episode]
  ) -> np.ndarray:
    """Compute a function at the labelled decisions of episodes.

    Args:
      function: maps a batch to an array [B, S, ...].

    Returns:
      An array [D, ...] over the labelled decisions, in the order of the episodes.
    """
    values = {}
    for rows, batch in self._cut(episodes):
      for row, value_S, mask_S in zip(
        rows, np.asarray(function(batch)), batch.mask_BxS
      ):
        values[row.number, row.first] = value_S[mask_S]
    return np.concatenate([values[place] for place in sorted(values)])

  def _cut(self, episodes: Sequence[Episode]) -> Iterator[tuple[list[Row], Batch]]:
    """Cut episodes into micro-batches, shortest rows first.

    Yields:
      The rows of the batch, and the batch without advantages and totals.
    """
    size = self.config.sft.micro_episodes
    max_steps = self.config.env.max_steps
    task_of = {task.id: task for task in self.tasks}
    if self.labels.rewrite:
      models = len(self.config.models.names)
      episodes = [self.labels.rewrite(episode, models) for episode in episodes]
    rows = []
    for number, episode in enumerate(episodes):
      first = 0
      for encoded in self.encoder.encode(task_of[episode.task_id], episode):
        length, decisions = self.encoder.measure(encoded)
        steps = episode.steps[first : first + decisions]
        part = dataclasses.replace(episode, steps=steps)
        rows.append(Row(length, number, first, encoded, part))
        first += decisions
    rows.sort()
    for start in range(0, len(rows), size):
      group = rows[start : start + size]
      # An episode that a client plays may have more steps than `env.max_steps`.
      # Rounding up to multiples keeps the number of compiled shapes small.
      parts = [row.episode for row in group]
      longest = max(len(part.steps) for part in parts)
      shape = size, -(-longest // max_steps) * max_steps
      inputs = self.encoder.pad([row.encoded for row in group], *shape)
      batch = make_batch(parts, inputs, self.labels, shape)
      yield group, batch


def draw_batches(
  pool: Sequence[Episode], size: int, seed: int | str
) -> Iterator[list[Episode]]:
  """Draw batches of episodes from a queue, without end.

  If the queue has too few episodes for a batch, the whole pool is appended in a new
  random order. So all episodes are drawn before one repeats.

  Args:
    pool: the episodes to draw from.
    size: the number of episodes in a batch.
    seed: the seed of the draws.

  Raises:
    ValueError: the pool is empty, and the size is not 0.
  """
  if size and not pool:
    raise ValueError(
      "there are no stored episodes to learn from: run --stage=references first"
    )
  draw = random.Random(seed)
  queue: list[Episode] = []
  while True:
    while len(queue) < size:
      queue += draw.sample(pool, len(pool))
    yield [queue.pop(0) for _ in range(size)]
