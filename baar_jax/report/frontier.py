"""Pareto set, area under the frontier, and bootstrap intervals over tasks: pure NumPy."""

import numpy as np

CONFIDENCE = 0.95
MIN_USABLE_SHARE = 0.5  # of resamples that have an area; below it there is no interval


def pareto(cost_P, score_P) -> np.ndarray:
  """The non-dominated points (the usual definition).

  A point is dominated by one that is no dearer and no worse, and better in one of the two. Equal
  points do not dominate each other: all of them stay.

  Args:
    cost_P, score_P: one entry per policy; any units.

  Returns:
    Indices into P by ascending cost; ties by index.

  Raises:
    ValueError: the shapes differ or are not one-dimensional, or a value is not finite.
  """
  cost_P, score_P = _points(cost_P, score_P)
  order_P = np.lexsort((np.arange(cost_P.size), -score_P, cost_P))
  kept = []
  for p in order_P:
    last = kept[-1] if kept else None
    same = last is not None and (cost_P[p], score_P[p]) == (cost_P[last], score_P[last])
    if last is None or same or score_P[p] > score_P[last]:
      kept.append(p)
  return np.array(kept, dtype=int)


def area(cost_P, score_P, small: tuple[float, float], large: tuple[float, float]) -> float:
  """Share of the boundaries' rectangle under the policies' upper concave hull (our metric).

  The hull of always-SMALL's, always-LARGE's and the policies' points is what mixing policies over
  tasks can reach. Its area above always-SMALL's score, between the boundaries' costs, is divided
  by (c_large - c_small) * (s_large - s_small). The straight line between the boundaries has 0.5;
  policies that beat always-LARGE can pass 1. Costs outside the interval are clipped into it.

  Args:
    cost_P, score_P: the policies' mean costs and scores; may be empty.
    small, large: (cost, score) of always-SMALL and always-LARGE, in the same units.

  Raises:
    ValueError: shapes differ, a value is not finite, or LARGE is not both dearer and better.
  """
  cost_P, score_P = _points(cost_P, score_P)
  if not np.all(np.isfinite([*small, *large])):
    raise ValueError(f"boundaries must be finite, got small {small} and large {large}")
  width, height = large[0] - small[0], large[1] - small[1]
  if width <= 0.0 or height <= 0.0:
    raise ValueError(
      f"always-LARGE must cost more and score more than always-SMALL, got {large} and {small}"
    )
  x_P = np.clip((cost_P - small[0]) / width, 0.0, 1.0)
  y_P = (score_P - small[1]) / height
  hull = upper_hull([(0.0, 0.0), (1.0, 1.0), *zip(x_P.tolist(), y_P.tolist())])
  return sum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in zip(hull, hull[1:]))


def bootstrap_interval(value, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
  """95 % percentile bootstrap over tasks of the mean (Efron 1979).

  Seeds are averaged within a task first: runs of the same task are not independent of each other.

  Args:
    value: value_N or value_NxR, one row per task, one column per seed.
    resamples: draws of N tasks with replacement.
    seed: of the draws.

  Returns:
    (low, high) in the values' unit.

  Raises:
    ValueError: no task, no seed, more axes than two, a value that is not finite, or no resample.
  """
  value = np.asarray(value, np.float64)
  if value.ndim not in (1, 2) or value.size == 0:
    raise ValueError(f"value must be tasks, or tasks x seeds, not empty; got shape {value.shape}")
  if not np.all(np.isfinite(value)):
    raise ValueError("values must be finite")
  value_N = value.reshape(len(value), -1).mean(axis=1)
  picks_BxN = resample(len(value_N), resamples, seed)
  return percentiles(value_N[picks_BxN].mean(axis=1))


def area_interval(
  cost_PxN,
  score_PxN,
  small: tuple,
  large: tuple,
  resamples: int = 1000,
  seed: int = 0,
) -> tuple[float, float]:
  """95 % percentile bootstrap over tasks of `area` of a whole family of policies.

  Every resample draws tasks with replacement, the same tasks for all policies and both
  boundaries, and its area is computed anew. A resample in which LARGE is not both dearer and
  better has no area and is dropped; if more than half of them are, the tasks are too few for an
  interval and it is (nan, nan) (our choice).

  Args:
    cost_PxN, score_PxN: per policy and task, averaged over seeds.
    small, large: (cost_N, score_N) of always-SMALL and always-LARGE on the same tasks.

  Returns:
    (low, high), shares of the rectangle.

  Raises:
    ValueError: shapes differ, there is no task, a value is not finite, or no resample.
  """
  cost_PxN, score_PxN = np.asarray(cost_PxN, np.float64), np.asarray(score_PxN, np.float64)
  # The boundaries ride along as the last two rows, so that one draw serves all.
  if cost_PxN.ndim != 2 or cost_PxN.shape != score_PxN.shape or cost_PxN.shape[1] == 0:
    raise ValueError(
      f"costs and scores must be policies x tasks, got {cost_PxN.shape} and {score_PxN.shape}"
    )
  for name, boundary in (("small", small), ("large", large)):
    if any(np.shape(values) != cost_PxN.shape[1:] for values in boundary) or len(boundary) != 2:
      raise ValueError(f"{name} must be (cost_N, score_N) with N = {cost_PxN.shape[1]}")
  cost_QxN = np.vstack([cost_PxN, small[0], large[0]])
  score_QxN = np.vstack([score_PxN, small[1], large[1]])
  if not (np.all(np.isfinite(cost_QxN)) and np.all(np.isfinite(score_QxN))):
    raise ValueError("costs and scores must be finite")
  areas = []
  for picks_N in resample(cost_PxN.shape[1], resamples, seed):
    cost_Q, score_Q = cost_QxN[:, picks_N].mean(axis=1), score_QxN[:, picks_N].mean(axis=1)
    if cost_Q[-1] > cost_Q[-2] and score_Q[-1] > score_Q[-2]:
      boundaries = (cost_Q[-2], score_Q[-2]), (cost_Q[-1], score_Q[-1])
      areas.append(area(cost_Q[:-2], score_Q[:-2], *boundaries))
  if len(areas) < MIN_USABLE_SHARE * resamples:
    return float("nan"), float("nan")
  return percentiles(np.array(areas))


def _points(cost_P, score_P) -> tuple[np.ndarray, np.ndarray]:
  cost_P, score_P = np.asarray(cost_P, np.float64), np.asarray(score_P, np.float64)
  if cost_P.ndim != 1 or cost_P.shape != score_P.shape:
    raise ValueError(
      f"costs and scores must be two lists of one length, got {cost_P.shape} and {score_P.shape}"
    )
  if not (np.all(np.isfinite(cost_P)) and np.all(np.isfinite(score_P))):
    raise ValueError("costs and scores must be finite")
  return cost_P, score_P


def upper_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
  """Vertices of the upper concave hull, left to right (Andrew's monotone chain)."""
  best: dict[float, float] = {}
  for x, y in points:
    best[x] = max(y, best.get(x, y))
  hull: list[tuple[float, float]] = []
  for x, y in sorted(best.items()):
    while len(hull) >= 2 and _on_or_below(hull[-2], hull[-1], (x, y)):
      hull.pop()
    hull.append((x, y))
  return hull


def _on_or_below(left: tuple, middle: tuple, right: tuple) -> bool:
  """Whether `middle` is on or below the line from `left` to `right`."""
  rise = (middle[1] - left[1]) * (right[0] - left[0])
  return rise <= (right[1] - left[1]) * (middle[0] - left[0])


def resample(tasks: int, resamples: int, seed: int = 0) -> np.ndarray:
  """picks_BxN: tasks drawn with replacement, a row for each of the B resamples."""
  if resamples < 1:
    raise ValueError(f"resamples must be at least 1, got {resamples}")
  return np.random.default_rng(seed).integers(tasks, size=(resamples, tasks))


def percentiles(values: np.ndarray) -> tuple[float, float]:
  """The middle `CONFIDENCE` of the values."""
  tail = 100 * (1 - CONFIDENCE) / 2
  low, high = np.percentile(values, [tail, 100 - tail])
  return float(low), float(high)
