"""Cut episodes into padded micro-batches, with labels of their decisions.

Axes: B episodes, S decisions of an episode, A answers.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from baar_jax.config import Config
from baar_jax.episode import Episode, Task


class Batch(NamedTuple):
  """Store a padded micro-batch: some of the episodes of one gradient step.

  A gradient step adds up the losses of its micro-batches. In this sum, a mean over a
  micro-batch's episodes is multiplied by `episode_share`, and a mean over its decisions
  by `decision_share`.

  Attributes:
    inputs: what the router reads of the episodes, see `Encoder.pad`.
    action_BxS: int32, the index of the logit to learn: the chosen model or a label.
    logp_BxS: float32, the log-probability of the sampled model in nats; 0 if the
      decision was not sampled.
    mask_BxS: bool, True on decisions to learn from.
    adv_B: float32, one advantage per episode; 0 if the method has no advantages.
    ref_logits_BxSxA: float32, the SFT router's logits; None if the method does not use
      these logits. `Learner.fill` adds them.
    episode_share: this batch's share of the gradient step's episodes; B counts the
      padding too.
    decision_share: this batch's share of the gradient step's masked decisions.
  """

  inputs: Any
  action_BxS: np.ndarray
  logp_BxS: np.ndarray
  mask_BxS: np.ndarray
  adv_B: np.ndarray
  ref_logits_BxSxA: jax.Array | None = None
  episode_share: np.float32 = np.float32(1)
  decision_share: np.float32 = np.float32(1)


class Sum(NamedTuple):
  """Keep a sum over a batch, with the count for its mean.

  Attributes:
    total: float32 scalar, the sum.
    count: the number of added values: real decisions, or episodes with the padding.
  """

  total: jax.Array
  count: jax.Array | int

  @property
  def mean(self) -> jax.Array:
    """Return the sum divided by the count; 0 if the count is 0."""
    return self.total / jnp.maximum(self.count, 1)


def sum_masked(value_BxS: jax.Array, mask_BxS: jax.Array) -> Sum:
  """Add up values over real decisions, and count these decisions.

  Args:
    value_BxS: float32; padding may have any value.
    mask_BxS: bool, True on real decisions.
  """
  return Sum(jnp.where(mask_BxS, value_BxS, 0.0).sum(), mask_BxS.sum())


class Term(NamedTuple):
  """Describe one term of a loss, computed on one micro-batch.

  The term adds weight * share * `values.mean` to the loss of the gradient step.

  Attributes:
    values: the sum over the batch, and the count for its mean.
    share: the batch's `decision_share` or `episode_share`.
    weight: the factor of this term in the loss.
  """

  values: Sum
  share: jax.Array | float
  weight: jax.Array | float = 1.0


# A loss maps (logits_BxSxA, batch) to its terms by name. The main term is "loss".
Loss = Callable[[jax.Array, Batch], dict[str, Term]]


class Labels(NamedTuple):
  """Label the decisions of an episode by a rule.

  Attributes:
    decide: maps an episode to one label per step: the index of the logit to learn, or
      None for a step to leave out.
    rewrite: changes an episode before it is read, given the number of models; None
      reads it as it is.
    answers: the number of answers between which the router decides; None is one for
      each model.
  """

  decide: Callable[[Episode], Sequence[int | None]]
  rewrite: Callable[[Episode, int], Episode] | None = None
  answers: int | None = None


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

  def encode(self, task: Task, episode: Episode) -> Any:
    """Encode what the router reads before each decision of an episode."""

  def measure(self, encoded: Any) -> tuple[int, int]:
    """Return the length by which an episode is padded, and the number of its rows."""

  def pad(self, encoded: Sequence, episodes: int, decisions: int) -> Any:
    """Pad encoded episodes to arrays, for B episodes of S decisions."""

  def forward(self, model: nnx.Module, inputs: Any) -> jax.Array:
    """Compute float32 logits_BxSxA of padded arrays."""

  def open_reader(self, model: nnx.Module, rows: int, mesh: Mesh) -> Any:
    """Open a `Reader` of at most `rows` live episodes, see router/policy.py."""


def make_batch(
  episodes: Sequence[Episode],
  inputs: Any,
  labels: Labels,
  size: tuple[int, int],
  adv_B: Sequence[float] = (),
) -> Batch:
  """Label the decisions of episodes, and pad them to one batch.

  Padding has no decisions to learn from: its mask is False.

  Args:
    episodes: at most B.
    inputs: what the router reads of them, padded.
    labels: the rule that labels the decisions.
    size: (B, S); S is at least the steps of the longest episode.
    adv_B: one advantage per episode; if empty, all advantages are 0.

  Returns:
    The batch. Its `episode_share` and `decision_share` are 1, as in a gradient step
      with this batch alone.
  """
  batch = Batch(
    inputs,
    action_BxS=np.zeros(size, np.int32),
    logp_BxS=np.zeros(size, np.float32),
    mask_BxS=np.zeros(size, bool),
    adv_B=np.zeros(size[0], np.float32),
  )
  batch.adv_B[: len(adv_B)] = adv_B
  for b, episode in enumerate(episodes):
    decisions = zip(episode.steps, labels.decide(episode))
    for s, (step, index) in enumerate(decisions):
      batch.action_BxS[b, s] = index or 0
      batch.logp_BxS[b, s] = step.logp or 0.0
      batch.mask_BxS[b, s] = index is not None
  return batch


@dataclasses.dataclass(frozen=True)
class Batcher:
  """Cut episodes into micro-batches with episodes of similar length.

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
    self, episodes: Sequence[Episode], adv_B: np.ndarray | None = None
  ) -> list[Batch]:
    """Make the micro-batches of one gradient step, and set their shares of the step.

    Args:
      episodes: the episodes of the gradient step.
      adv_B: one advantage per episode; None if the method has no advantages.
    """
    unshared = [batch for _, batch in self._cut(episodes, adv_B)]
    decisions = max(1, sum(batch.mask_BxS.sum() for batch in unshared))
    batches = []
    for batch in unshared:
      episode_share = np.float32(len(batch.mask_BxS) / len(episodes))
      decision_share = np.float32(batch.mask_BxS.sum() / decisions)
      batches.append(
        batch._replace(episode_share=episode_share, decision_share=decision_share)
      )
    return batches

  def compute(
    self, function: Callable[[Batch], jax.Array], episodes: Sequence[Episode]
  ) -> np.ndarray:
    """Compute a function at the labelled decisions of episodes.

    Args:
      function: maps a batch to an array [B, S, ...].

    Returns:
      An array [N, ...] over the N labelled decisions, in the order of the episodes.
    """
    values = {}
    for indices, batch in self._cut(episodes):
      for i, value_S, mask_S in zip(
        indices, np.asarray(function(batch)), batch.mask_BxS
      ):
        values[i] = value_S[mask_S]
    return np.concatenate([values[i] for i in range(len(episodes))])

  def _cut(
    self, episodes: Sequence[Episode], adv_B: np.ndarray | None = None
  ) -> Iterator[tuple[list[int], Batch]]:
    """Cut episodes into micro-batches, shortest episodes first.

    Yields:
      The indices of the batch's episodes, and the batch; both its shares are 1.
    """
    size = self.config.sft.micro_episodes
    max_steps = self.config.env.max_steps
    task_of = {task.id: task for task in self.tasks}
    if self.labels.rewrite:
      models = len(self.config.models.names)
      episodes = [self.labels.rewrite(episode, models) for episode in episodes]
    encoded = [self.encoder.encode(task_of[e.task_id], e) for e in episodes]
    for indices in sort_by_length([*map(self.encoder.measure, encoded)], size):
      group = [episodes[i] for i in indices]
      # An episode that a client plays may have more steps than `env.max_steps`.
      # Rounding up to multiples keeps the number of compiled shapes small.
      longest = max(len(episode.steps) for episode in group)
      shape = size, -(-longest // max_steps) * max_steps
      inputs = self.encoder.pad([encoded[i] for i in indices], *shape)
      adv = () if adv_B is None else adv_B[indices]
      yield indices, make_batch(group, inputs, self.labels, shape, adv)


def sort_by_length(sizes: Sequence[tuple[int, int]], size: int) -> list[list[int]]:
  """Group the indices of episodes by length, shortest first.

  Args:
    sizes: the length and the number of rows of each episode.
    size: the most rows of a group. An episode with more rows is a group of its own.
  """
  groups: list[list[int]] = []
  count = size  # As if a group were full, so that the first episode opens a new one.
  for i in sorted(range(len(sizes)), key=lambda i: sizes[i][0]):
    rows = sizes[i][1]
    count += rows
    if count > size:
      groups.append([])
      count = rows
    groups[-1].append(i)
  return groups


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
