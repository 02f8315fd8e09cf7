"""Thresholds on a router's p(LARGE) that are set on stored training episodes (our choice).

What p means differs from method to method: one may never pass 0.5 and still rank the steps well. So
each method's thresholds are quantiles of its own p over decisions of training tasks, the same
number of points at the same shares for all, and no test task has a say in them.
"""

from collections.abc import Sequence

import numpy as np

from baar_jax.episode import Episode
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.train.batches import Batcher, Relabel
from baar_jax.train.fit import TrainingRun
from baar_jax.train.trainer import Scorer

BINS = 10


def quantile_threshold(p_D: np.ndarray, share: float) -> float:
  """The p that a share of the decisions reach."""
  return float(np.quantile(p_D, 1.0 - share))


def score(
  run: TrainingRun,
  model: Qwen2,
  view: View,
  episodes: Sequence[Episode],
  relabel: Relabel | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """p_D, a router's p(LARGE) of decisions in stored training episodes, and action_D, as decided.

  Args:
    relabel: masks decisions that the router would not be asked for, or changes what was decided.
  """
  scorer = Scorer(model, view.decision_ids, run.mesh, run.config.router.dtype)
  batches = Batcher(run.config, view, run.store.tasks("train")).micro_batches(episodes, relabel)
  p_D = [scorer.p_large(batch)[batch.mask_BxS] for batch in batches]
  action_D = [batch.action_BxS[batch.mask_BxS] for batch in batches]
  return np.concatenate(p_D), np.concatenate(action_D)


def calibration(p_D: np.ndarray, failed_D: np.ndarray) -> dict:
  """How well predicted probabilities of failure agree with what happened.

  Returns:
    brier: the mean squared difference (Brier 1950); base_rate: of failures; bins: of equal width,
    those with any decision: mean prediction, observed rate and count.
  """
  bin_D = np.minimum((p_D * BINS).astype(int), BINS - 1)
  bins = []
  for members_D in (bin_D == b for b in np.unique(bin_D)):
    rates = {
      "predicted": float(p_D[members_D].mean()),
      "observed": float(failed_D[members_D].mean()),
    }
    bins.append(rates | {"count": int(members_D.sum())})
  brier = float(np.mean((p_D - failed_D) ** 2))
  return {"brier": brier, "base_rate": float(np.mean(failed_D)), "bins": bins}
