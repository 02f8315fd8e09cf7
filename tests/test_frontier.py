"""frontier.py against geometry worked out by hand, scipy's hull and closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from baar_jax.report import frontier

SMALL, LARGE = (1.0, 0.4), (5.0, 0.6)
GRID = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@pytest.mark.parametrize(
  ("cost", "score", "expected"),
  [
    ([], [], []),
    ([3, 1, 2], [0.9, 0.1, 0.5], [1, 2, 0]),  # all stay, by cost
    ([1, 2], [0.5, 0.4], [0]),  # dearer and worse
    ([1, 2], [0.5, 0.5], [0]),  # dearer and no better
    ([1, 1], [0.4, 0.5], [1]),  # as dear and better
    ([2, 1, 2], [0.5, 0.1, 0.5], [1, 0, 2]),  # equal points stay together
    ([1, 1, 2, 2], [0.5, 0.5, 0.5, 0.6], [0, 1, 3]),
  ],
)
def test_pareto(cost, score, expected):
  assert frontier.pareto(cost, score).tolist() == expected


@given(GRID)
def test_pareto_by_the_definition(points):
  def dominates(p, q):
    return p[0] <= q[0] and p[1] >= q[1] and p != q

  kept = {i for i, q in enumerate(points) if not any(dominates(p, q) for p in points)}
  indices = frontier.pareto([c for c, _ in points], [s for _, s in points]).tolist()
  assert set(indices) == kept and len(indices) == len(kept)
  assert [points[i][0] for i in indices] == sorted(points[i][0] for i in indices)


@pytest.mark.parametrize(
  ("points", "expected"),
  [
    ([], 0.5),  # the straight line
    ([(3.0, 0.5)], 0.5),  # on it
    ([(3.0, 0.45)], 0.5),  # below it
    ([(1.0, 0.6)], 1.0),  # LARGE's score at SMALL's cost: the whole rectangle
    # x = 1/4, y = 1/2: triangle 1/4 * 1/2 / 2 = 1/16, trapezium 3/4 * (1/2 + 1) / 2 = 9/16
    ([(2.0, 0.5)], 10 / 16),
    # a second point under the line from (1/4, 1/2) to (1, 1) changes nothing
    ([(2.0, 0.5), (3.0, 0.52)], 10 / 16),
    # x = 1/4, y = 2: 1/4 * 2 / 2 = 1/4, 3/4 * (2 + 1) / 2 = 9/8
    ([(2.0, 0.8)], 11 / 8),
    # cheaper than SMALL, clipped to x = 0: y = 1/2, then (1/2 + 1) / 2
    ([(0.2, 0.5)], 3 / 4),
    # dearer than LARGE, clipped to x = 1: triangle of height 3/2
    ([(9.0, 0.7)], 3 / 4),
    # worse than SMALL: below the hull
    ([(0.5, 0.1), (4.0, 0.3)], 0.5),
  ],
)
def test_area(points, expected):
  costs, scores = [c for c, _ in points], [s for _, s in points]
  assert frontier.area(costs, scores, SMALL, LARGE) == pytest.approx(expected)


@pytest.mark.parametrize(
  ("small", "large"),
  [
    ((5.0, 0.4), (5.0, 0.6)),
    ((6.0, 0.4), (5.0, 0.6)),
    ((1.0, 0.6), (5.0, 0.6)),
    ((1.0, 0.7), (5.0, 0.6)),
  ],
)
def test_area_without_a_rectangle_is_an_error(small, large):
  with pytest.raises(ValueError, match="cost more and score more"):
    frontier.area([2.0], [0.5], small, large)


@pytest.mark.parametrize(
  ("costs", "scores", "small"),
  [
    ([1.0, 2.0], [0.5], SMALL),
    ([[1.0]], [[0.5]], SMALL),
    ([np.nan], [0.5], SMALL),
    ([1.0], [np.inf], SMALL),
    ([1.0], [0.5], (np.nan, 0.4)),
  ],
)
def test_area_rejects(costs, scores, small):
  with pytest.raises(ValueError):
    frontier.area(costs, scores, small, LARGE)
  if small == SMALL:
    with pytest.raises(ValueError):
      frontier.pareto(costs, scores)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 2)), max_size=10))
def test_area_is_that_of_scipys_hull(points):
  # Corners at y = 0 close the region under the upper hull.
  corners = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)]
  expected = ConvexHull(np.array([*points, *corners])).volume
  costs, scores = [c for c, _ in points], [s for _, s in points]
  got = frontier.area(costs, scores, (0.0, 0.0), (1.0, 1.0))
  assert got == pytest.approx(expected, abs=1e-6)


@given(GRID, st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_a_policy_more_never_shrinks_the_area(points, point):
  def area(points):
    costs, scores = [c for c, _ in points], [s for _, s in points]
    return frontier.area(costs, scores, (1, 1), (4, 3))

  assert area([*points, point]) >= area(points) - 1e-12 >= 0.5 - 2e-12
