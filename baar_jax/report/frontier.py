"""Geometry of a frontier of (cost, score) points: Pareto set, upper hull, area; pure NumPy."""

import numpy as np


def pareto(cost_P, score_P) -> np.ndarray:
  """Indices of the non-dominated points by ascending cost; equal points all stay, by index.

  A point is dominated by one that is no dearer and no worse, and better in one of the two.
  Raises ValueError where the shapes are not equal and one-dimensional, or a value is not finite.
  """
  cost_P, score_P = _points(cost_P, score_P)
  kept: list[int] = []
  for p in np.lexsort((-score_P, cost_P)):
    equal = kept and cost_P[p] == cost_P[kept[-1]] and score_P[p] == score_P[kept[-1]]
    if not kept or equal or score_P[p] > score_P[kept[-1]]:
      kept.append(p)
  return np.array(kept, dtype=int)


def area(cost_P, score_P, small: tuple[float, float], large: tuple[float, float]) -> float:
  """Share of the boundaries' rectangle under the policies' upper concave hull (our metric).

  The hull of the boundaries, (cost, score) of always-SMALL and always-LARGE, and of the policies is
  what mixing policies over tasks can reach. The line between the boundaries has 0.5; policies that
  beat always-LARGE can pass 1. Costs outside the rectangle are clipped into it.
  Raises ValueError as `pareto` does, or where LARGE is not both dearer and better.
  """
  cost_P, score_P = _points([*cost_P, small[0], large[0]], [*score_P, small[1], large[1]])
  width, height = large[0] - small[0], large[1] - small[1]
  if width <= 0.0 or height <= 0.0:
    raise ValueError(
      f"always-LARGE must cost more and score more than always-SMALL, got {large} and {small}"
    )
  x_P = np.clip((cost_P - small[0]) / width, 0.0, 1.0)
  hull_x, hull_y = zip(*upper_hull([*zip(x_P, (score_P - small[1]) / height)]))
  return float(np.trapezoid(hull_y, hull_x))


def upper_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
  """Vertices of the upper concave hull, left to right (Andrew's monotone chain)."""
  highest = dict(sorted(points))  # of equal x the last has the largest y
  hull: list[tuple[float, float]] = []
  for x, y in highest.items():
    while len(hull) >= 2:
      (left_x, left_y), (middle_x, middle_y) = hull[-2:]
      if (middle_y - left_y) * (x - left_x) > (y - left_y) * (middle_x - left_x):
        break  # the middle point is above the line from the left point to the new one
      hull.pop()
    hull.append((x, y))
  return hull


def _points(cost_P, score_P) -> tuple[np.ndarray, np.ndarray]:
  cost_P, score_P = np.asarray(cost_P, np.float64), np.asarray(score_P, np.float64)
  if cost_P.ndim != 1 or cost_P.shape != score_P.shape or not np.isfinite([cost_P, score_P]).all():
    raise ValueError("costs and scores must be finite and equally long")
  return cost_P, score_P
