"""Episodes -> padded arrays in a few length buckets."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from baar_jax.config import Config
from baar_jax.episode import LARGE, Episode, Task
from baar_jax.router.view import View, Window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A micro-batch: what a loss reads of a part of a gradient step's episodes.

  A transcript has one row per episode, the paper's view one per step: a row and a position say
  where each decision is predicted.
  """

  tokens_RxT: np.ndarray  # int32, zero-padded on the right
  row_BxS: np.ndarray  # int32, where in tokens_RxT each decision is predicted
  position_BxS: np.ndarray  # int32, and at which position of that row
  action_BxS: np.ndarray  # int32, the model chosen, or what a label puts in its place
  logp_BxS: np.ndarray  # float32, its log-probability when it was sampled; 0 where none was
  mask_BxS: np.ndarray  # bool, the real decisions
  adv_B: np.ndarray | None = None  # float32, the episodes' advantages, for a policy gradient
  ref_logits_BxSxA: jax.Array | None = None  # float32, the SFT router's logits, likewise
  token_BxSxM: np.ndarray | None = None  # int32, what follows each decision, for the pretraining
  episode_share: float = 1.0  # this part's B, with padding, over all episodes of the step
  decision_share: float = 1.0  # its real decisions over all of them


Relabel = Callable[[Batch, Sequence[Episode]], Batch]


def make_batch(episodes, windows, size, decisions, buckets, advantages=None) -> Batch:
  """Pads episodes to a batch of few shapes: T is a bucket, R is B or a power of two above it.

  Each decision of an episode is in exactly one of its windows. B is `size`, of which missing
  episodes have no decisions; S is `decisions`, at least the steps of the longest episode. With
  `advantages`, of a policy gradient, decisions without a log-probability (forced by a budget) are
  left out. Raises ValueError if a window is longer than every bucket.
  """
  flat = [window for episode_windows in windows for window in episode_windows]
  longest = max(len(window.tokens) for window in flat)
  if longest > buckets[-1]:
    raise ValueError(f"a sequence of {longest} tokens fits no bucket of {list(buckets)}")
  T = next(bucket for bucket in buckets if longest <= bucket)
  R = size if len(flat) <= size else 1 << (len(flat) - 1).bit_length()
  tokens_RxT = np.zeros((R, T), np.int32)
  row_BxS, position_BxS, action_BxS = np.zeros((3, size, decisions), np.int32)
  logp_BxS = np.zeros((size, decisions), np.float32)
  mask_BxS = np.zeros((size, decisions), bool)
  row = 0
  for b, (episode, episode_windows) in enumerate(zip(episodes, windows)):
    for window in episode_windows:
      tokens_RxT[row, : len(window.tokens)] = window.tokens
      span = slice(window.first, window.first + len(window.positions))
      row_BxS[b, span] = row
      position_BxS[b, span] = window.positions
      row += 1
    for s, step in enumerate(episode.steps):
      action_BxS[b, s] = step.model
      logp_BxS[b, s] = step.logp or 0.0
      mask_BxS[b, s] = advantages is None or step.logp is not None
  adv_B = None
  if advantages is not None:
    adv_B = np.zeros(size, np.float32)
    adv_B[: len(episodes)] = advantages
  return Batch(tokens_RxT, row_BxS, position_BxS, action_BxS, logp_BxS, mask_BxS, adv_B)


@dataclasses.dataclass(frozen=True)
class Batcher:
  """Cuts the episodes of a gradient step into micro-batches of few shapes, short ones together."""

  config: Config  # a micro-batch holds up to `sft.micro_episodes`
  view: View
  tasks: Iterable[Task]  # those of all episodes

  def micro_batches(self, episodes, relabel: Relabel | None = None, advantages=None) -> list[Batch]:
    """The batches of a gradient step, with their shares of it; `advantages` as of `make_batch`.

    `relabel` changes what the router is to decide, or adds what the loss needs.
    """
    c, batches, task_of = self.config, [], {task.id: task for task in self.tasks}
    parts = range(1, c.router.buckets + 1)  # each length costs a compilation per loss
    buckets = [c.router.max_tokens * part // c.router.buckets for part in parts]
    windows = [self.view.episode_windows(task_of[e.task_id], e) for e in episodes]
    for indices in sort_by_length(windows, c.sft.micro_episodes):
      group = [episodes[i] for i in indices]
      adv = None if advantages is None else advantages[indices]
      # A client's episode may be longer than the config has it: a multiple is one shape more.
      rounds = max(-(-len(e.steps) // c.env.max_steps) for e in group)
      shape = c.sft.micro_episodes, rounds * c.env.max_steps, buckets
      batch = make_batch(group, [windows[i] for i in indices], *shape, adv)
      batches.append(relabel(batch, group) if relabel else batch)
    decisions = max(1, sum(batch.mask_BxS.sum() for batch in batches))
    return [
      dataclasses.replace(
        batch,
        episode_share=np.float32(len(batch.mask_BxS) / len(episodes)),
        decision_share=np.float32(batch.mask_BxS.sum() / decisions),
      )
      for batch in batches
    ]


def sort_by_length(windows: Sequence[Sequence[Window]], size: int) -> list[list[int]]:
  """Indices of episodes, short ones together, with at most `size` windows in all, so that cut ones
  bring no new shape."""
  groups: list[list[int]] = []
  count = size  # a full group, so that the first episode opens another
  for i in sorted(range(len(windows)), key=lambda i: max(len(w.tokens) for w in windows[i])):
    count += len(windows[i])
    if count > size:
      groups.append([])
      count = len(windows[i])
    groups[-1].append(i)
  return groups


def label_failures(batch: Batch, episodes: Sequence[Episode], dearest: int = LARGE) -> Batch:
  """The batch with the episode's failure as what is to be decided, but where the dearest acted."""
  proposed_BxS = batch.mask_BxS & (batch.action_BxS < dearest)
  failures = [not e.success for e in episodes]
  return label_episodes(dataclasses.replace(batch, mask_BxS=proposed_BxS), failures)


def label_episodes(batch: Batch, labels: Sequence[int]) -> Batch:
  """The batch with one label per episode as what is to be decided at each of its decisions."""
  label_B = np.zeros(len(batch.mask_BxS), int)
  label_B[: len(labels)] = labels
  action_BxS = np.where(batch.mask_BxS, label_B[:, None], 0).astype(np.int32)
  return dataclasses.replace(batch, action_BxS=action_BxS)
