"""Thresholds on a router's p(LARGE) that are set on stored training episodes (our choice).

What p means differs from method to method: one may never pass 0.5 and still rank the steps well. So
each method's thresholds are quantiles of its own p over decisions of training tasks, the same
number of points at the same shares for all, and no test task has a say in them.
"""

from collections.abc import Callable, Sequence

import numpy as np

from baar_jax.episode import Episode
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.train.batches import Batch
from baar_jax.train.dataset import threshold_episodes
from baar_jax.train.trainer import Batcher, Scorer

Label = Callable[[Sequence[Episode], Batch], Batch]


def threshold(p_D: np.ndarray, share: float) -> float:
  """The p that a share of the decisions reach."""
  return float(np.quantile(p_D, 1.0 - share))


def measure(
  run: Run,
  model: Qwen2,
  view: View,
  label: Label | None = None,
  seen: Callable[[Episode], Episode] | None = None,
) -> np.ndarray:
  """p_D: the router's p(LARGE) of decisions in stored training episodes.

  Args:
    label: masks decisions that the router would not be asked for; None masks none.
    seen: what it would have been shown of an episode; None is the episode.
  """
  episodes = threshold_episodes(run.store, run.config)
  if seen:
    episodes = list(map(seen, episodes))
  return score(run, model, view, episodes, label)[0]


def score(
  run: Run, model: Qwen2, view: View, episodes: Sequence[Episode], label: Label | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """p_D, the router's p(LARGE) of training episodes' decisions, and action_D, what was decided.

  Args:
    label: as of `measure`; it may also change what counts as decided.
  """
  batcher = Batcher(run.config, view, {task.id: task for task in run.store.tasks("train")})
  scorer = Scorer(model, view.decision_ids, run.mesh, run.config.router.dtype)
  p_parts, action_parts = [], []
  for indices, batch in batcher.micro_batches(episodes):
    if label:
      batch = label([episodes[i] for i in indices], batch)
    p_parts.append(scorer.p_large(batch)[batch.mask_BxS])
    action_parts.append(batch.action_BxS[batch.mask_BxS])
  return np.concatenate(p_parts), np.concatenate(action_parts)
