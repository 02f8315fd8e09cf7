"""Frontiers of (cost, score) points, and 95 % intervals of means.

Axes: B resamples (the first is no resample), P policies, N tasks, R training seeds, V
vertices.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# What is taken off for the luck of episodes, in parts of what it explains on average:
# more than 1, because only what is left above 0 counts (our choice, by simulation).
NOISE_SHARE = 1.5


def pareto(cost_P: ArrayLike, score_P: ArrayLike) -> np.ndarray:
  """Find the non-dominated points, by ascending cost; equal points all stay, by index.

  A point is dominated by one that is no costlier and no worse, and better in one of the
  two.

  Raises:
    ValueError: the points are no finite numbers, equally many.
  """
  costs_P, scores_P = _points(cost_P, score_P)
  # Of two equal points each is as good as the other.
  as_good_PxP = (costs_P <= costs_P[:, None]) & (scores_P >= scores_P[:, None])
  dominated_P = (as_good_PxP & ~as_good_PxP.T).any(axis=1)
  order_P = np.argsort(costs_P, kind="stable")
  return order_P[~dominated_P[order_P]]


def area(
  cost_P: ArrayLike,
  score_P: ArrayLike,
  small: tuple[float, float],
  large: tuple[float, float],
) -> float:
  """Compute the share of the boundaries' rectangle below the policies' hull.

  The hull of the boundaries, (cost, score) of always-SMALL and always-LARGE, and of the
  policies is the best that mixing policies over tasks can reach. This area is our
  metric. The line between the boundaries has 0.5; policies that beat always-LARGE can
  pass 1. Of measured points it is biased upwards, for noise can only raise a hull.
  Costs are clipped into the rectangle.

  Raises:
    ValueError: as `vertices` does.
  """
  hull = vertices(cost_P, score_P, small, large)
  points = np.array([small, *zip(cost_P, score_P), large])
  costs_V, scores_V = points[[0, *(hull + 1), -1]].T
  return float(area_along(costs_V, scores_V))


def area_along(cost_V: np.ndarray, score_V: np.ndarray) -> np.ndarray:
  """Compute the share of the boundaries' rectangle under a line through points.

  Where a point is cheaper than the one before, the area between is taken off again, so
  that noise in the points cancels out in the mean.

  Args:
    cost_V: the costs in the order of the line: first always-SMALL's, last
      always-LARGE's. There may be further axes (VxB).
    score_V: the scores, likewise.

  Returns:
    The area, nan unless LARGE costs more and scores more than SMALL.
  """
  points = np.array([cost_V, score_V])
  small = points[:, :1]
  size = points[:, -1:] - small
  size = np.where((size > 0.0).all(axis=0), size, np.nan)
  x, y = (points - small) / size
  return np.trapezoid(y, np.clip(x, 0.0, 1.0), axis=0)


def vertices(
  cost_P: ArrayLike,
  score_P: ArrayLike,
  small: tuple[float, float],
  large: tuple[float, float],
) -> np.ndarray:
  """Find the policies on the upper concave hull of them and the boundaries.

  This is Andrew's monotone chain; of equal points it takes the first.

  Returns:
    Their indices by ascending cost.

  Raises:
    ValueError: as `pareto` does, or unless LARGE costs more and scores more than SMALL.
  """
  ends = [small[0], large[0]]
  costs_P, scores_P = _points([*ends, *cost_P], [small[1], large[1], *score_P])
  if large[0] <= small[0] or large[1] <= small[1]:
    problem = "always-LARGE must cost more and score more than always-SMALL"
    raise ValueError(f"{problem}, got {large} and {small}")
  points_Px2 = np.stack([np.clip(costs_P, *ends), scores_P], axis=1)
  hull = []
  for p in np.lexsort((-scores_P, points_Px2[:, 0])):
    if hull and points_Px2[p, 0] == points_Px2[hull[-1], 0]:
      continue  # the one before is as high or higher
    while len(hull) >= 2:
      middle, new = points_Px2[[hull[-1], p]] - points_Px2[hull[-2]]
      if middle[1] * new[0] > new[1] * middle[0]:
        break  # the middle point is above the line from the left point to the new one
      hull.pop()
    hull.append(p)
  policies = np.array(hull, dtype=int) - 2
  return policies[policies >= 0]


def _points(cost_P: ArrayLike, score_P: ArrayLike) -> list[np.ndarray]:
  """Return the costs and the scores as arrays. Raises ValueError as `pareto` does."""
  costs_P = np.asarray(cost_P, np.float64)
  scores_P = np.asarray(score_P, np.float64)
  points = [costs_P, scores_P]
  if (
    costs_P.ndim != 1
    or costs_P.shape != scores_P.shape
    or not np.isfinite(points).all()
  ):
    raise ValueError("costs and scores must be finite and equally long")
  return points


class Draws(NamedTuple):
  """The weights of the resamples."""

  task_BxN: np.ndarray  # the share of each task
  seed_BxR: np.ndarray  # the weight of each training seed's deviation


def draw(tasks: int, training_seeds: int, resamples: int, seed: int = 0) -> Draws:
  """Draw the resamples' weights once for all results, so that differences are paired.

  Tasks are drawn with replacement. The training seeds' weights make the sum of R
  deviations vary as a mean over R normal values does: as Student's t with R - 1 degrees
  of freedom. R = 3 is too few to be resampled with replacement.
  """
  rng = np.random.default_rng(seed)
  R = training_seeds
  count_BxN = rng.multinomial(tasks, np.ones(tasks) / tasks, resamples)
  task_BxN = np.vstack([np.ones(tasks), count_BxN]) / tasks
  seed_BxR = np.zeros((resamples + 1, R))
  if R > 1:
    scale_Bx1 = np.sqrt(R * rng.chisquare(R - 1, size=(resamples, 1)))
    seed_BxR[1:] = rng.normal(size=(resamples, R)) / scale_Bx1
  return Draws(task_BxN, seed_BxR)


def means(value_PxNxR: np.ndarray, trained_P: np.ndarray, draws: Draws) -> np.ndarray:
  """Compute mean_PxB: over all tasks and training seeds, then in each resample.

  The mean over tasks is resampled as it is: that carries the chance in tasks and in
  episodes. Of trained policies the deviation of each training seed's mean is added,
  less the part of its variance that chance in episodes explains (analysis of variance:
  the ratio of mean squares). Resampling both axes at once would count that chance
  thrice (simulated in docs/evaluation.md). A task may lack some seeds (nan), the same
  for all policies.
  """
  N = value_PxNxR.shape[1]
  value_PxN = np.nanmean(value_PxNxR, axis=2)
  mean_PxB = value_PxN @ draws.task_BxN.T
  rest_PxNxR = value_PxNxR - value_PxN[..., None]
  deviation_PxR = np.nanmean(rest_PxNxR, axis=1)
  rest_PxNxR = rest_PxNxR - deviation_PxR[:, None]
  # Both are mean squares times R - 1.
  between_P = N * (deviation_PxR**2).sum(axis=1)
  noise_P = between_P
  if N > 1:
    noise_P = np.nansum(rest_PxNxR**2, axis=(1, 2)) / (N - 1)
  left_P = 1 - NOISE_SHARE * noise_P / np.maximum(between_P, 1e-300)
  kept_P = np.sqrt(np.clip(left_P, 0, None))
  own_PxR = (trained_P * kept_P)[:, None] * deviation_PxR
  return mean_PxB + own_PxR @ draws.seed_BxR.T


def interval(name: str, value_B: np.ndarray) -> dict[str, float]:
  """Compute a value and its 95 % percentile bootstrap interval (Efron 1979).

  value_B[0] is the value itself, the others are of resamples. If fewer than half of
  these have one (NaN is none), there is no interval.

  Returns:
    name, name_low and name_high.
  """
  value = value_B[0]
  drawn = value_B[1:][np.isfinite(value_B[1:])]
  low = high = np.nan
  if np.isfinite(value) and 2 * len(drawn) >= len(value_B) - 1:
    low, high = np.percentile(drawn, [2.5, 97.5])
  return {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
