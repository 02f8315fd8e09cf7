"""Episodes -> padded micro-batches of few shapes, with the decisions to learn."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.config import Config
from baar_jax.episode import Episode, Task
from baar_jax.router.view import View, Window

NO_TOKEN = -1  # padding of the tokens that follow a decision


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A micro-batch: what a loss reads of a part of a gradient step's episodes.

  The losses of all parts add up to the step's: a mean over episodes counts by
  `episode_share`, one over decisions by `decision_share`.
  """

  tokens_RxT: np.ndarray  # int32, 0-padded; a row per window
  row_BxS: np.ndarray  # int32, the row of tokens_RxT that predicts each decision
  position_BxS: np.ndarray  # int32, and the position in that row
  action_BxS: np.ndarray  # int32, the logit to learn: the model chosen, or a label's
  logp_BxS: np.ndarray  # float32, its log-probability if it was sampled, else 0
  mask_BxS: np.ndarray  # bool, the decisions to learn from
  adv_B: np.ndarray  # float32, the episodes' advantages; 0 if they have none
  # Of an anchored method: float32, the SFT router's logits (`Learner.fill`).
  ref_logits_BxSxA: jax.Array | None = None
  # Of labels with outcomes: int32, the M tokens after each decision.
  token_BxSxM: np.ndarray | None = None
  # Part of the step's episodes (B, with padding) and of its real decisions.
  episode_share: np.float32 = np.float32(1)
  decision_share: np.float32 = np.float32(1)


class Sum(NamedTuple):
  """A sum over a batch, and what its mean divides it by."""

  total: jax.Array
  count: jax.Array | int  # of real decisions, or of episodes with padding

  @property
  def mean(self) -> jax.Array:
    """Divide the sum by the count; 0 if there is nothing to count."""
    return self.total / jnp.maximum(self.count, 1)


class Term(NamedTuple):
  """A term of a loss: a batch's mean counts by the batch's share of a gradient step."""

  values: Sum
  share: jax.Array | float  # the batch's `decision_share` or `episode_share`
  weight: jax.Array | float = 1.0  # in the loss


# (logits_BxSxA, batch) -> its terms, to be summed by weight; "loss" is the main one.
Loss = Callable[[jax.Array, Batch], dict[str, Term]]


@dataclasses.dataclass(frozen=True)
class Labels:
  """What a router learns to decide at the steps of an episode.

  `decide` returns for each step the index of a logit, or None for nothing.
  """

  decide: Callable[[Episode], Sequence[int | None]]
  proposals: bool = False  # show the episode as a cascade would have seen it
  outcomes: bool = False  # add the tokens that follow each decision


def _decide_acted(episode: Episode) -> list[int]:
  """List the model of each step."""
  return [step.model for step in episode.steps]


def _decide_sampled(episode: Episode) -> list[int | None]:
  """List the model of each step, None if it was not sampled."""
  return [None if step.logp is None else step.model for step in episode.steps]


def _decide_failures(episode: Episode) -> list[int | None]:
  """List for each step with a proposal 1 if the episode fails, else 0."""
  fails = int(not episode.success)
  return [None if step.proposal is None else fails for step in episode.steps]


ACTED = Labels(_decide_acted)  # the models that acted
SAMPLED = Labels(_decide_sampled)  # the same, but for those that a budget forced
# Whether the episode fails, if a proposal was taken.
FAILURES = Labels(_decide_failures, proposals=True)
OUTCOMES = Labels(_decide_acted, outcomes=True)  # the next tokens: pretraining


class Shape(NamedTuple):
  """The sizes that a batch is padded to."""

  episodes: int  # B
  decisions: int  # S, no less than any episode's steps
  buckets: Sequence[int]  # the possible T


def make_batch(
  episodes: Sequence[Episode],
  windows: Sequence[Sequence[Window]],
  labels: Labels,
  shape: Shape,
  adv_B: Sequence[float] = (),
) -> Batch:
  """Pad episodes to a batch; without advantages they are 0.

  Missing episodes have no decisions. R is B or a power of two above it. Each step is
  decided in exactly one of its episode's windows.
  """
  size = shape[:2]
  rows = [(b, window) for b, group in enumerate(windows) for window in group]
  longest = max(len(window.tokens) for _, window in rows)
  T = min(bucket for bucket in shape.buckets if bucket >= longest)
  R = shape.episodes
  if len(rows) > R:
    R = 1 << (len(rows) - 1).bit_length()
  batch = Batch(
    tokens_RxT=np.zeros((R, T), np.int32),
    row_BxS=np.zeros(size, np.int32),
    position_BxS=np.zeros(size, np.int32),
    action_BxS=np.zeros(size, np.int32),
    logp_BxS=np.zeros(size, np.float32),
    mask_BxS=np.zeros(size, bool),
    adv_B=np.zeros(shape.episodes, np.float32),
  )
  batch.adv_B[: len(adv_B)] = adv_B
  for row, (b, window) in enumerate(rows):
    batch.tokens_RxT[row, : len(window.tokens)] = window.tokens
    span = slice(window.first, window.first + len(window.positions))
    batch.row_BxS[b, span] = row
    batch.position_BxS[b, span] = window.positions
  for b, episode in enumerate(episodes):
    decisions = zip(episode.steps, labels.decide(episode))
    for s, (step, index) in enumerate(decisions):
      batch.action_BxS[b, s] = index or 0
      batch.logp_BxS[b, s] = step.logp or 0.0
      batch.mask_BxS[b, s] = index is not None
  return batch


def add_proposals(episode: Episode, costliest: int) -> Episode:
  """Show an episode as a cascade sees it: all models but the costliest propose."""
  steps = []
  for step in episode.steps:
    proposal = None if step.model == costliest else step.action
    steps.append(dataclasses.replace(step, proposal=proposal))
  return dataclasses.replace(episode, steps=steps)


@dataclasses.dataclass(frozen=True)
class Batcher:
  """Cuts the episodes of a gradient step into micro-batches, short ones together."""

  config: Config  # a micro-batch holds up to `sft.micro_episodes`
  view: View
  tasks: Iterable[Task]  # those of all episodes
  labels: Labels = ACTED

  def micro_batches(
    self, episodes: Sequence[Episode], adv_B: np.ndarray | None = None
  ) -> list[Batch]:
    """Make the batches of a gradient step."""
    parts = [batch for _, batch in self._cut(episodes, adv_B)]
    decisions = max(1, sum(batch.mask_BxS.sum() for batch in parts))
    batches = []
    for batch in parts:
      episode_share = np.float32(len(batch.mask_BxS) / len(episodes))
      share = np.float32(batch.mask_BxS.sum() / decisions)
      batches.append(
        dataclasses.replace(batch, episode_share=episode_share, decision_share=share)
      )
    return batches

  def compute(
    self, function: Callable[[Batch], jax.Array], episodes: Sequence[Episode]
  ) -> np.ndarray:
    """Compute a function of batches, [B, S, ...].

    Returns:
      Its values [N, ...] at labelled decisions, in the order of the episodes.
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
    """Yield each micro-batch, without its shares, after the indices of its episodes."""
    router = self.config.router
    size = self.config.sft.micro_episodes
    task_of = {task.id: task for task in self.tasks}
    if self.labels.proposals:
      costliest = len(self.view.words) - 1
      episodes = [add_proposals(episode, costliest) for episode in episodes]
    parts = range(1, router.buckets + 1)  # each length costs a compilation per loss
    buckets = [router.max_tokens * part // router.buckets for part in parts]
    windows = [self.view.episode_windows(task_of[e.task_id], e) for e in episodes]
    for indices in sort_by_length(windows, size):
      group = [episodes[i] for i in indices]
      shape = Shape(size, self._pad_steps(group), buckets)
      adv = () if adv_B is None else adv_B[indices]
      batch = make_batch(group, [windows[i] for i in indices], self.labels, shape, adv)
      if self.labels.outcomes:
        token_BxSxM = list_outcomes(self.view, group, shape)
        batch = dataclasses.replace(batch, token_BxSxM=token_BxSxM)
      yield indices, batch

  def _pad_steps(self, episodes: Sequence[Episode]) -> int:
    """Return how many steps a batch of the episodes has.

    A client's episode may be longer than the config has it: a multiple is one more
    shape.
    """
    max_steps = self.config.env.max_steps
    longest = max(len(episode.steps) for episode in episodes)
    return -(-longest // max_steps) * max_steps


def list_outcomes(view: View, episodes: Sequence[Episode], shape: Shape) -> np.ndarray:
  """Encode the tokens [B, S, M] that follow each decision but an episode's last."""
  c = view.config
  width = c.action_tokens + c.result_tokens + 2 * len(view.cut_mark)
  token_BxSxM = np.full((*shape[:2], width), NO_TOKEN, np.int32)
  for b, episode in enumerate(episodes):
    for s, (step, after) in enumerate(zip(episode.steps, episode.steps[1:])):
      action = view.encode(step.action, c.action_tokens)
      tokens = action + view.encode(after.observation, c.result_tokens)
      token_BxSxM[b, s, : len(tokens)] = tokens
  return token_BxSxM


def sort_by_length(windows: Sequence[Sequence[Window]], size: int) -> list[list[int]]:
  """Group indices of episodes, short ones together, with at most `size` windows."""

  def length(i: int) -> int:
    return max(len(window.tokens) for window in windows[i])

  groups: list[list[int]] = []
  count = size  # a full group, so that the first episode opens another
  for i in sorted(range(len(windows)), key=length):
    count += len(windows[i])
    if count > size:
      groups.append([])
      count = len(windows[i])
    groups[-1].append(i)
  return groups
