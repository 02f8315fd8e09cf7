"""frontier.py against geometry worked out by hand, scipy's hull and the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from baar_jax.report import frontier

SMALL, LARGE = (1.0, 0.4), (5.0, 0.6)
GRID = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


def split(points):
  return [cost for cost, _ in points], [score for _, score in points]


def area(points, small=SMALL, large=LARGE):
  return frontier.area(*split(points), small, large)


@given(GRID)
def test_pareto_by_the_definition(points):
  def dominates(p, q):
    return p[0] <= q[0] and p[1] >= q[1] and p != q

  kept = [i for i, q in enumerate(points) if not any(dominates(p, q) for p in points)]
  # By cost, and equal points by index.
  assert frontier.pareto(*split(points)).tolist() == sorted(kept, key=lambda i: (points[i][0], i))


@pytest.mark.parametrize(
  ("points", "expected"),
  [
    ([], 0.5),  # the straight line
    ([(0.5, 0.1), (3.0, 0.45)], 0.5),  # worse than SMALL, below the line
    ([(1.0, 0.6)], 1.0),  # LARGE's score at SMALL's cost: the whole rectangle
    # x = 1/4, y = 1/2: triangle 1/4 * 1/2 / 2 = 1/16, trapezium 3/4 * (1/2 + 1) / 2 = 9/16;
    # a second point under the line from (1/4, 1/2) to (1, 1) changes nothing
    ([(2.0, 0.5), (3.0, 0.52)], 10 / 16),
    # x = 1/4, y = 2: 1/4 * 2 / 2 = 1/4, 3/4 * (2 + 1) / 2 = 9/8
    ([(2.0, 0.8)], 11 / 8),
    # cheaper than SMALL, clipped to x = 0: y = 1/2, then (1/2 + 1) / 2
    ([(0.2, 0.5)], 3 / 4),
    # dearer than LARGE, clipped to x = 1: triangle of height 3/2
    ([(9.0, 0.7)], 3 / 4),
  ],
)
def test_area(points, expected):
  assert area(points) == pytest.approx(expected)


@pytest.mark.parametrize("small", [(5.0, 0.4), (1.0, 0.6)])
def test_area_without_a_rectangle_is_an_error(small):
  with pytest.raises(ValueError, match="cost more and score more"):
    area([(2.0, 0.5)], small)


@pytest.mark.parametrize(
  ("costs", "scores"),
  [([1.0, 2.0], [0.5]), ([[1.0]], [[0.5]]), ([np.nan], [0.5]), ([1.0], [np.inf])],
)
def test_what_is_no_list_of_points_is_rejected(costs, scores):
  for call in (frontier.pareto, lambda *points: frontier.area(*points, SMALL, LARGE)):
    with pytest.raises(ValueError):
      call(costs, scores)
  with pytest.raises(ValueError, match="finite"):
    area([(1.0, 0.5)], small=(np.nan, 0.4))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 2)), max_size=10))
def test_area_is_that_of_scipys_hull(points):
  # Corners at y = 0 close the region under the upper hull.
  corners = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)]
  expected = ConvexHull(np.array([*points, *corners])).volume
  assert area(points, (0.0, 0.0), (1.0, 1.0)) == pytest.approx(expected, abs=1e-6)


@given(GRID, st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_a_policy_more_never_shrinks_the_area(points, point):
  more, fewer = (area(p, (1, 1), (4, 3)) for p in ([*points, point], points))
  assert more >= fewer - 1e-12 >= 0.5 - 2e-12
