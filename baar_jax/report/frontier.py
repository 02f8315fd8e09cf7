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
  beat always-LARGE can pass 1. Of measured points it is biased upwards, for noise can only raise a
  hull. Costs outside the rectangle are clipped into it.
  Raises ValueError as `pareto` does, or where LARGE is not both dearer and better.
  """
  on_hull = vertices(cost_P, score_P, small, large)
  points = (np.asarray(values, np.float64)[on_hull] for values in (cost_P, score_P))
  return float(area_along(*points, small, large))


def area_along(cost_V, score_V, small, large):
  """Share of the boundaries' rectangle under the line from always-SMALL through the points, in the
  order given, to always-LARGE. Where a point is cheaper than the one before, the area between is
  taken off again, so that noise in the points cancels out in the mean. Costs are clipped as for
  `area`. Points and boundaries may have further axes (cost_VxB); nan where LARGE is not both dearer
  and better.
  """
  width, height = large[0] - small[0], large[1] - small[1]
  usable = (width > 0.0) & (height > 0.0)
  width, height = np.where(usable, width, np.nan), np.where(usable, height, np.nan)
  x = np.clip((np.asarray(cost_V, np.float64) - small[0]) / width, 0.0, 1.0)
  y = (np.asarray(score_V, np.float64) - small[1]) / height
  ends = np.zeros_like(x[:1]) if len(x) else np.zeros((1, *width.shape))
  x, y = (np.concatenate([ends, values, ends + 1.0]) for values in (x, y))
  return np.where(usable, np.trapezoid(y, x, axis=0), np.nan)


def vertices(cost_P, score_P, small: tuple[float, float], large: tuple[float, float]) -> np.ndarray:
  """Indices of the policies on the upper concave hull of them and the boundaries, by ascending cost
  (Andrew's monotone chain); of equal ones the first. Clips and raises ValueError as `area` does."""
  cost_P, score_P = _points([small[0], large[0], *cost_P], [small[1], large[1], *score_P])
  if large[0] <= small[0] or large[1] <= small[1]:
    raise ValueError(
      f"always-LARGE must cost more and score more than always-SMALL, got {large} and {small}"
    )
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
