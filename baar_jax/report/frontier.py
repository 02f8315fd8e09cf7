"""Frontiers of (cost, score) points, and 95 % intervals of means over tasks and training seeds.

Axes: B resamples (the first is no resample), P policies, N tasks, R training seeds, V vertices.
"""

import numpy as np

# What is taken off for the luck of episodes, in parts of what it explains on average: more than 1,
# because only what is left above 0 counts (our choice, by simulation).
NOISE_SHARE = 1.5


def pareto(cost_P, score_P) -> np.ndarray:
  """Indices of the non-dominated points by ascending cost; equal points all stay, by index.

  A point is dominated by one that is no dearer and no worse, and better in one of the two. Raises
  ValueError where the points are no finite numbers, equally many.
  """
  cost_P, score_P = _points(cost_P, score_P)
  cost_Px1, score_Px1 = cost_P[:, None], score_P[:, None]
  by_PxP = (cost_P <= cost_Px1) & (score_P >= score_Px1)
  by_PxP &= (cost_P != cost_Px1) | (score_P != score_Px1)
  kept = np.flatnonzero(~by_PxP.any(axis=1))
  return kept[np.argsort(cost_P[kept], kind="stable")]


def area(cost_P, score_P, small: tuple[float, float], large: tuple[float, float]) -> float:
  """Share of the boundaries' rectangle under the policies' upper concave hull (our metric).

  The hull of the boundaries, (cost, score) of always-SMALL and always-LARGE, and of the policies is
  what mixing policies over tasks can reach. The line between the boundaries has 0.5; policies that
  beat always-LARGE can pass 1. Of measured points it is biased upwards, for noise can only raise a
  hull. Costs are clipped into the rectangle. Raises ValueError as `vertices` does.
  """
  on_hull = vertices(cost_P, score_P, small, large)
  points = (np.asarray(values, np.float64)[on_hull] for values in (cost_P, score_P))
  return float(area_along(*points, small, large))


def area_along(cost_V, score_V, small, large):
  """Share of the boundaries' rectangle under the line from always-SMALL through the points, in the
  order given, to always-LARGE. Where a point is cheaper than the one before, the area between is
  taken off again, so that noise in the points cancels out in the mean. Points and boundaries may
  have further axes (cost_VxB); nan where LARGE is not both dearer and better.
  """
  width, height = large[0] - small[0], large[1] - small[1]
  usable = (width > 0.0) & (height > 0.0)
  width, height = (np.where(usable, side, np.nan) for side in (width, height))
  x = np.clip((np.asarray(cost_V, np.float64) - small[0]) / width, 0.0, 1.0)
  y = (np.asarray(score_V, np.float64) - small[1]) / height
  ends = 0.0 * width[None]  # nan where not usable
  x, y = (np.concatenate([ends, values, ends + 1.0]) for values in (x, y))
  return np.trapezoid(y, x, axis=0)


def vertices(cost_P, score_P, small: tuple[float, float], large: tuple[float, float]) -> np.ndarray:
  """Indices of the policies on the upper concave hull of them and the boundaries, by ascending cost
  (Andrew's monotone chain); of equal ones the first. Raises ValueError as `pareto` does, or where
  LARGE is not both dearer and better."""
  cost_P, score_P = _points([small[0], large[0], *cost_P], [small[1], large[1], *score_P])
  if large[0] <= small[0] or large[1] <= small[1]:
    problem = "always-LARGE must cost more and score more than always-SMALL"
    raise ValueError(f"{problem}, got {large} and {small}")
  x_P, hull = np.clip(cost_P, small[0], large[0]), []
  for p in np.lexsort((-score_P, x_P)):
    if hull and x_P[p] == x_P[hull[-1]]:
      continue  # the one before is as high or higher
    while len(hull) >= 2:
      left, middle = hull[-2:]
      rise, run = score_P[[middle, p]] - score_P[left], x_P[[middle, p]] - x_P[left]
      if rise[0] * run[1] > rise[1] * run[0]:
        break  # the middle point is above the line from the left point to the new one
      hull.pop()
    hull.append(p)
  return np.array([p - 2 for p in hull if p >= 2], dtype=int)


def _points(cost_P, score_P) -> tuple[np.ndarray, np.ndarray]:
  cost_P, score_P = np.asarray(cost_P, np.float64), np.asarray(score_P, np.float64)
  if cost_P.ndim != 1 or cost_P.shape != score_P.shape or not np.isfinite([cost_P, score_P]).all():
    raise ValueError("costs and scores must be finite and equally long")
  return cost_P, score_P


def draw(
  tasks: int, training_seeds: int, resamples: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """weight_BxN, the share of each task, drawn with replacement, and seed_weight_BxR, the weight of
  each training seed's deviation. They are drawn once for all results, so differences are paired.

  These weights make the sum of R deviations vary as a mean over R normal values does: as Student's
  t with R - 1 degrees of freedom. R = 3 is too few to be resampled with replacement.
  """
  rng, R = np.random.default_rng(seed), training_seeds
  count_BxN = rng.multinomial(tasks, np.ones(tasks) / tasks, resamples)
  weight_BxN = np.vstack([np.ones(tasks), count_BxN]) / tasks
  seed_weight_BxR = np.zeros((resamples + 1, R))
  if R > 1:
    scale_Bx1 = np.sqrt(R * rng.chisquare(R - 1, size=(resamples, 1)))
    seed_weight_BxR[1:] = rng.normal(size=(resamples, R)) / scale_Bx1
  return weight_BxN, seed_weight_BxR


def means(value_PxNxR: np.ndarray, trained_P: np.ndarray, draws: tuple) -> np.ndarray:
  """mean_PxB: over all tasks and training seeds, then in each resample.

  The mean over tasks is resampled as it is: that carries the tasks' luck and that of episodes. Of
  trained policies the deviation of each training seed's mean is added, less the part of its
  variance that the luck of episodes explains (analysis of variance: the ratio of mean squares).
  Resampling both axes at once would count that luck thrice (simulated in docs/evaluation.md).
  A task may lack some seeds (nan), the same for all policies.
  """
  weight_BxN, seed_weight_BxR = draws
  N, R = value_PxNxR.shape[1:]
  value_PxN = np.nanmean(value_PxNxR, axis=2)
  mean_PxB = value_PxN @ weight_BxN.T
  rest_PxNxR = value_PxNxR - value_PxN[..., None]
  deviation_PxR = np.nanmean(rest_PxNxR, axis=1)
  rest_PxNxR = rest_PxNxR - deviation_PxR[:, None]
  # Both are mean squares times R - 1.
  between_P = N * (deviation_PxR**2).sum(axis=1)
  noise_P = np.nansum(rest_PxNxR**2, axis=(1, 2)) / (N - 1) if N > 1 else between_P
  kept_P = np.clip(1 - NOISE_SHARE * noise_P / np.maximum(between_P, 1e-300), 0, None) ** 0.5
  return mean_PxB + (trained_P * kept_P)[:, None] * deviation_PxR @ seed_weight_BxR.T


def interval(name: str, value_B: np.ndarray) -> dict[str, float]:
  """name, name_low and name_high: a value and its 95 % percentile bootstrap interval (Efron 1979).

  value_B[0] is the value itself, the others are of resamples. Where fewer than half of these have
  one (NaN is none), there is no interval.
  """
  drawn = value_B[1:][np.isfinite(value_B[1:])]
  low = high = np.nan
  if np.isfinite(value_B[0]) and 2 * len(drawn) >= len(value_B) - 1:
    low, high = np.percentile(drawn, [2.5, 97.5])
  return {name: float(value_B[0]), f"{name}_low": float(low), f"{name}_high": float(high)}
