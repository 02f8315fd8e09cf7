"""Check frontiers by hand and by scipy, and intervals by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import ConvexHull
from scipy.stats import norm, t

from baar_jax.report import frontier
from baar_jax.report.frontier import draw, interval, means

SMALL, LARGE = (1.0, 0.4), (5.0, 0.6)
GRID = st.lists(
  st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12
)


def area(points, small=SMALL, large=LARGE):
  return frontier.area(*zip(*points), small, large)


@given(GRID)
def test_pareto_agrees_with_the_definition(points):
  def dominates(p, q):
    return p[0] <= q[0] and p[1] >= q[1] and p != q

  kept = [i for i, q in enumerate(points) if not any(dominates(p, q) for p in points)]
  # By cost, and equal points by index.
  assert frontier.pareto(*zip(*points)).tolist() == sorted(
    kept, key=lambda i: (points[i][0], i)
  )


@pytest.mark.parametrize(
  ("points", "expected"),
  [
    ([(0.5, 0.1), (3.0, 0.45)], 0.5),  # worse than SMALL, below the line
    ([(0.2, 0.5)], 3 / 4),  # clipped to x = 0: y = 1/2, then (1/2 + 1) / 2
    ([(9.0, 0.7)], 3 / 4),  # clipped to x = 1: triangle of height 3/2
  ],
)
def test_an_area_is_clipped_to_the_rectangle(points, expected):
  assert area(points) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 2)), min_size=1, max_size=10))
def test_an_area_equals_that_of_scipys_hull(points):
  # Corners at y = 0 close the region under the upper hull.
  corners = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)]
  expected = ConvexHull(np.array([*points, *corners])).volume
  assert area(points, (0.0, 0.0), (1.0, 1.0)) == pytest.approx(expected, abs=1e-6)


NAN, TRAINED = math.nan, np.array([False] * 2 + [True] * 15)
SHARES = np.array([0.0, 1.0, *np.arange(1, 16) / 16])[
  :, None, None
]  # of LARGE's episodes


def evaluate(rng, effect_R, tasks=60) -> tuple[np.ndarray, np.ndarray]:
  """Draw costs and successes of the boundaries and of 15 policies that mix them.

  A policy draws one of the boundaries per episode. Each training seed's success differs
  by its effect.
  """
  logit_N, gain_N = rng.normal(-0.4, 1.6, tasks), rng.gamma(1.2, 2.2, tasks)
  usd_AxNx1 = np.exp(rng.normal([[0.0], [1.6]], 0.4, (2, tasks)))[..., None]
  rate_AxNx1 = 1 / (1 + np.exp(-np.array([logit_N, logit_N + gain_N])))[..., None]
  shape = len(SHARES), tasks, len(effect_R)
  large = rng.random(shape) < SHARES
  rate = (
    np.where(large, rate_AxNx1[1], rate_AxNx1[0]) + TRAINED[:, None, None] * effect_R
  )
  return np.where(large, usd_AxNx1[1], usd_AxNx1[0]), (rng.random(shape) < rate).astype(
    float
  )


@pytest.mark.parametrize(("runs", "effect"), [(2000, 0.0), (600, 0.03)])
def test_mixes_of_the_boundaries_have_an_area_of_a_half(runs, effect):
  """Dev chooses from 15 mixes, and test measures them. The first 1,000 runs have
  intervals.
  """
  rng, areas, covered = np.random.default_rng(0), [], []
  for run in range(runs):
    effect_R = rng.normal(0, effect, 3)
    cost_P, score_P = (x.mean(axis=(1, 2)) for x in evaluate(rng, effect_R))
    ends = [(cost_P[end], score_P[end]) for end in (0, 1)]
    names = [0, *(2 + frontier.vertices(cost_P[2:], score_P[2:], *ends)), 1]
    test = evaluate(rng, effect_R)
    draws = draw(60, 3, 300 if run < 1000 else 0, run)
    cost_VxB, score_VxB = (means(x[names], TRAINED[names], draws) for x in test)
    area_B = frontier.area_along(cost_VxB, score_VxB)
    areas.append(area_B[0])
    if run < 1000:
      bounds = interval("area", area_B)
      covered.append(bounds["area_low"] <= 0.5 <= bounds["area_high"])
  assert np.mean(areas) == pytest.approx(0.5, abs=0.005)
  assert 0.93 <= np.mean(covered) <= 0.97


def test_training_seeds_have_students_interval():
  # Nothing but the training seeds differs: the interval of three values is Student's.
  value_PxNxR = np.tile([[[1.0, 2.0, 6.0]], [[5.0, 5.0, 5.0]]], (1, 40, 1))
  trained = np.array([True, True])
  mean_PxB = means(value_PxNxR, trained, draw(40, 3, 40_000))
  half = t.ppf(0.975, 2) * np.std([1, 2, 6], ddof=1) / math.sqrt(3)
  low, high = 3 - half, 3 + half
  assert [*interval("x", mean_PxB[0]).values()] == pytest.approx(
    [3, low, high], abs=0.03 * half
  )
  assert [*interval("x", mean_PxB[1]).values()] == [5, 5, 5]
  # Where no router was trained, and where chance explains as much, there is
  # nothing to add.
  assert np.ptp(
    means(value_PxNxR, ~trained, draw(40, 3, 100)), axis=1
  ) == pytest.approx([0, 0])
  noise_PxNxR = np.stack([np.roll([1.0, 2.0, 6.0], k) for k in range(3)])[None]
  assert np.ptp(means(noise_PxNxR, trained[:1], draw(3, 3, 100))) == pytest.approx(0)


def test_tasks_have_the_normal_interval_and_may_lack_a_seed():
  value_N = np.random.default_rng(3).normal(10.0, 2.0, size=400)
  value_B = means(value_N[None, :, None], np.array([True]), draw(400, 1, 8000))[0]
  mean, half = value_N.mean(), norm.ppf(0.975) * value_N.std() / 20
  expected = [mean, mean - half, mean + half]
  assert [*interval("x", value_B).values()] == pytest.approx(expected, abs=0.1 * half)
  # Two tasks' means are 1 and 3; without the second seed's value of the first task, 2
  # and 3.
  lacking = np.array([[[2.0, NAN], [3.0, 3.0]]])
  assert means(lacking, np.array([True]), draw(2, 2, 1))[0, 0] == 2.5


def test_an_interval_needs_a_value_in_half_of_the_resamples():
  for value_B, expected in (
    ([9.0, 1.0, 1.0, NAN, NAN], [9.0, 1.0, 1.0]),
    ([9.0, 1.0, NAN, NAN, NAN], [9.0, NAN, NAN]),
    ([NAN, 1.0, 1.0], [NAN] * 3),
  ):
    x = interval("x", np.array(value_B))
    assert [*x.values()] == pytest.approx(expected, nan_ok=True)
