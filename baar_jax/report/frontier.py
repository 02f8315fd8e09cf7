"""Compute frontiers of (cost, score) points, and 95 % intervals of means.

Letters of axes: B resamples (index 0 is the unchanged data), P policies, N tasks, R
training seeds, V points of a line.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# Part of the variance between training seeds is due to chance in the episodes. The mean
# estimate of this part is multiplied by this factor before it is subtracted. The factor
# exceeds 1 because negative results are set to 0 (our choice, by simulation; see
# docs/evaluation.md).
NOISE_SHARE = 1.5


def pareto(cost_P: ArrayLike, score_P: ArrayLike) -> np.ndarray:
  """Find the (cost, score) points that no other point dominates.

  One point dominates another if its cost is no higher and its score is no lower, and at
  least one of them is better. Equal points do not dominate each other.

  Args:
    cost_P: the points' costs.
    score_P: the points' scores.

  Returns:
    Indices by ascending cost; points of equal cost are in the order of their indices.

  Raises:
    ValueError: a number is not finite, or the arrays have different lengths.
  """
  costs_P, scores_P = _points(cost_P, score_P)
  # Equal points are as good as each other. They do not dominate each other.
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
  """Compute the share of the rectangle between the boundaries that is below the hull.

  The rectangle has always-SMALL and always-LARGE as corners. The upper hull of the
  boundary policies and the policies is the best score that a mix of policies over tasks
  can reach at each cost. A random mix of the boundary policies has area 0.5. The area
  can exceed 1 if policies score higher than always-LARGE. Costs outside the rectangle
  are clipped to its edges. The area of measured points is biased upwards, because noise
  can only raise a hull. This metric is our choice.

  Args:
    cost_P: the policies' costs.
    score_P: the policies' scores.
    small: (cost, score) of always-SMALL.
    large: (cost, score) of always-LARGE.

  Raises:
    ValueError: as in `vertices`.
  """
  hull = vertices(cost_P, score_P, small, large)
  points = np.array([small, *zip(cost_P, score_P), large])
  costs_V, scores_V = points[[0, *(hull + 1), -1]].T
  return float(area_along(costs_V, scores_V))


def area_along(cost_V: np.ndarray, score_V: np.ndarray) -> np.ndarray:
  """Compute the share of the rectangle between the boundaries that is below a line.

  The line joins points in a fixed order. Where it goes to a cheaper point, the area
  below is subtracted. So noise in the points cancels out in the mean.

  Args:
    cost_V: the points' costs, in the line's order: always-SMALL first, always-LARGE
      last. Further axes may follow, as in cost_VxB.
    score_V: the points' scores, in the same order and with the same axes.

  Returns:
    The area; NaN unless always-LARGE costs more and scores more than always-SMALL.
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
  """Find the policies on the upper concave hull of the policies and the boundaries.

  The algorithm is Andrew's monotone chain. Costs outside the boundaries' are clipped.
  Of points that are equal then, the cheapest one is taken, and of equally cheap ones
  the first.

  Args:
    cost_P: the policies' costs.
    score_P: the policies' scores.
    small: (cost, score) of always-SMALL.
    large: (cost, score) of always-LARGE.

  Returns:
    Indices of the policies, by ascending cost.

  Raises:
    ValueError: as in `pareto`, or always-LARGE does not cost more and score more than
      always-SMALL.
  """
  limits = [small[0], large[0]]
  costs_P, scores_P = _points([*limits, *cost_P], [small[1], large[1], *score_P])
  if large[0] <= small[0] or large[1] <= small[1]:
    raise ValueError(
      "always-LARGE must cost more and score more than always-SMALL, "
      f"but their (cost, score) are {large} and {small}: pass other boundaries"
    )
  points_Px2 = np.stack([np.clip(costs_P, *limits), scores_P], axis=1)
  hull = []
  for p in np.lexsort((costs_P, -scores_P, points_Px2[:, 0])):
    if hull and points_Px2[p, 0] == points_Px2[hull[-1], 0]:
      continue  # The hull has a point that costs as much and is not lower.
    while len(hull) >= 2:
      middle, new = points_Px2[[hull[-1], p]] - points_Px2[hull[-2]]
      if middle[1] * new[0] > new[1] * middle[0]:
        break  # The hull's last point is above the line to the new point.
      hull.pop()
    hull.append(p)
  policies = np.array(hull, dtype=int) - 2
  return policies[policies >= 0]


def _points(cost_P: ArrayLike, score_P: ArrayLike) -> list[np.ndarray]:
  """Check the costs and the scores, and return them as arrays.

  Raises:
    ValueError: as in `pareto`.
  """
  costs_P = np.asarray(cost_P, np.float64)
  scores_P = np.asarray(score_P, np.float64)
  points = [costs_P, scores_P]
  if (
    costs_P.ndim != 1
    or costs_P.shape != scores_P.shape
    or not np.isfinite(points).all()
  ):
    raise ValueError(
      f"got costs {costs_P.tolist()!s:.80} and scores {scores_P.tolist()!s:.80}: "
      "pass a finite cost and a finite score for each point"
    )
  return points


class Draws(NamedTuple):
  """The random weights with which each resample computes its means.

  Attributes:
    task_BxN: the weight of each task; the weights of a resample add up to 1.
    seed_BxR: the weight of each training seed's deviation from the mean over training
      seeds.
  """

  task_BxN: np.ndarray
  seed_BxR: np.ndarray


def draw(tasks: int, training_seeds: int, resamples: int) -> Draws:
  """Draw the random weights of the resamples.

  All policies of a report get the same weights, so that their differences are paired.
  Tasks are drawn with replacement. Three training seeds are too few for that. Their
  weights are drawn so that the weighted sum of the seeds' R deviations varies as the
  mean of R normal values does: as Student's t with R - 1 degrees of freedom.

  Args:
    tasks: the number of tasks, N.
    training_seeds: the number of training seeds, R.
    resamples: the number of random resamples. B is one more, because index 0 is the
      unchanged data.
  """
  rng = np.random.default_rng(0)
  R = training_seeds
  count_BxN = rng.multinomial(tasks, np.ones(tasks) / tasks, resamples)
  task_BxN = np.vstack([np.ones(tasks), count_BxN]) / tasks
  seed_BxR = np.zeros((resamples + 1, R))
  if R > 1:
    scale_Bx1 = np.sqrt(R * rng.chisquare(R - 1, size=(resamples, 1)))
    seed_BxR[1:] = rng.normal(size=(resamples, R)) / scale_Bx1
  return Draws(task_BxN, seed_BxR)


def means(value_PxNxR: np.ndarray, trained_P: np.ndarray, draws: Draws) -> np.ndarray:
  """Compute the mean of each policy in each resample.

  Each value is first averaged over training seeds, and then over the tasks of the
  resample. The spread of these means contains the chance in tasks and in episodes. For
  trained policies, the weighted deviations of the training seeds are added. Before
  that, these deviations are shrunk: the part of their variance that chance in episodes
  explains is removed (analysis of variance: the ratio of mean squares). Resampling
  tasks and training seeds at the same time would count the chance in episodes three
  times; docs/evaluation.md has the simulation.

      mean_b = sum_t task_bt * (mean of value_tr over r) + k * sum_r seed_br * d_r
      d_r    = the mean of training seed r minus the mean of all training seeds
      k^2    = max(0, 1 - NOISE_SHARE * MS_episodes / MS_trainings)

  MS are the mean squares within and between training seeds.

  Args:
    value_PxNxR: a value per policy, task and training seed. A missing value is NaN, and
      is missing for all policies.
    trained_P: for each policy, whether it has routers of several training seeds.
    draws: the weights of the resamples.

  Returns:
    mean_PxB; column 0 is the mean over all tasks and training seeds.
  """
  N = value_PxNxR.shape[1]
  value_PxN = np.nanmean(value_PxNxR, axis=2)
  mean_PxB = value_PxN @ draws.task_BxN.T
  rest_PxNxR = value_PxNxR - value_PxN[..., None]
  deviation_PxR = np.nanmean(rest_PxNxR, axis=1)
  rest_PxNxR = rest_PxNxR - deviation_PxR[:, None]
  # The mean squares between training seeds and within them. Both are multiplied by R -
  # 1, which cancels out in their ratio.
  between_P = N * (deviation_PxR**2).sum(axis=1)
  noise_P = between_P
  if N > 1:
    noise_P = np.nansum(rest_PxNxR**2, axis=(1, 2)) / (N - 1)
  left_P = 1 - NOISE_SHARE * noise_P / np.maximum(between_P, 1e-300)
  kept_P = np.sqrt(np.clip(left_P, 0, None))
  shrunk_PxR = (trained_P * kept_P)[:, None] * deviation_PxR
  return mean_PxB + shrunk_PxR @ draws.seed_BxR.T


def interval(name: str, value_B: np.ndarray) -> dict[str, float]:
  """Compute a value's 95 % percentile bootstrap interval (Efron 1979).

  Args:
    name: the name of the value.
    value_B: the value of the unchanged data, then the value in each resample. NaN is a
      missing value.

  Returns:
    A dict with the value under `name`, and the interval's ends under name_low and
      name_high. The ends are NaN if fewer than half of the resamples have a value.
  """
  value = value_B[0]
  drawn = value_B[1:][np.isfinite(value_B[1:])]
  low = high = np.nan
  if np.isfinite(value) and 2 * len(drawn) >= len(value_B) - 1:
    low, high = np.percentile(drawn, [2.5, 97.5])
  return {name: value, f"{name}_low": low, f"{name}_high": high}
