"""Check frontiers by hand and by scipy, and intervals by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from baar_jax.report import frontier
from baar_jax.report.frontier import draw, interval, means

SMALL, LARGE = (1.0, 0.4), (5.0, 0.6)
NAN = math.nan


def area(points, small=SMALL, large=LARGE):
  return frontier.area(*zip(*points), small, large)


@given(
  st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12)
)
def test_pareto_agrees_with_the_definition(points):
  def dominates(p, q):
    return p[0] <= q[0] and p[1] >= q[1] and p != q

  # By cost, and equal points by index.
  kept = sorted(
    (q[0], i) for i, q in enumerate(points) if not any(dominates(p, q) for p in points)
  )
  assert frontier.pareto(*zip(*points)).tolist() == [i for _, i in kept]


@pytest.mark.parametrize(
  ("points", "expected"),
  [
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


# The first two policies are the boundaries. The others are random mixes of them.
SHARES = np.array([0.0, 1.0, *np.arange(1, 16) / 16])  # of LARGE's episodes
TRAINED = np.arange(17) > 1
# The default run, then configs/reproduce.py with other effects: standard deviations
# between trainings. At an effect of 0.05 three training seeds are too few: the coverage
# is 0.92 to 0.93 (docs/evaluation.md).
SETTINGS = pytest.mark.parametrize(
  ("tasks", "seeds", "trials", "effect", "least"),
  [
    (60, 1, 2, 0.0, 0.93),
    (100, 3, 1, 0.03, 0.93),
    (100, 3, 1, 0.05, 0.91),
  ],
)
RUNS = 2000


def play(rng, effect_R, tasks, trials) -> tuple[np.ndarray, np.ndarray]:
  """Draw mean costs and successes of the policies per task and training seed.

  A policy draws one of the boundaries per episode.
  """
  logit_N, gain_N = rng.normal(-0.4, 1.6, tasks), rng.gamma(1.2, 2.2, tasks)
  usd_AxN = np.exp(rng.normal([[1.6], [0.0]], 0.4, (2, tasks)))
  rate_AxN = 1 / (1 + np.exp(-np.array([logit_N + gain_N, logit_N])))
  shape = (trials, len(effect_R), tasks, 17)
  large = rng.random(shape) < SHARES
  cost = np.where(large, *usd_AxN[..., None])
  rate = np.where(large, *rate_AxN[..., None]) + effect_R[:, None, None] * TRAINED
  return cost.mean(axis=0).T, (rng.random(shape) < rate).mean(axis=0).T


def check(true: float, value_XxB: np.ndarray, least: float, bias: float = 0.0):
  """Compare the values of simulated runs, and their intervals, with the true value."""
  value_X = value_XxB[:, 0]
  bounds = [interval("x", value_B) for value_B in value_XxB]
  covered = np.mean([x["x_low"] <= true <= x["x_high"] for x in bounds])
  error = value_X.std() / math.sqrt(RUNS)
  assert value_X.mean() == pytest.approx(true, abs=3 * error + bias)
  assert least <= covered <= 0.97


@SETTINGS
def test_mixes_of_the_boundaries_have_an_area_of_a_half(
  tasks, seeds, trials, effect, least
):
  """Dev chooses from 15 mixes on 60 tasks, and test measures them. Both play the same
  trainings, so the choice favours lucky ones: by 0.01 at an effect of 0.05.
  """
  rng, draws = np.random.default_rng(0), draw(tasks, seeds, 500)
  areas = []
  for _ in range(RUNS):
    effect_R = rng.normal(0, effect, seeds)
    dev = play(rng, effect_R, 60, trials)
    cost_P, score_P = (x.mean(axis=(1, 2)) for x in dev)
    ends = [(cost_P[end], score_P[end]) for end in (0, 1)]
    names = [0, *(2 + frontier.vertices(cost_P[2:], score_P[2:], *ends)), 1]
    test = play(rng, effect_R, tasks, trials)
    cost_VxB, score_VxB = (means(x[names], TRAINED[names], draws) for x in test)
    areas.append(frontier.area_along(cost_VxB, score_VxB))
  check(0.5, np.array(areas), least, 0.2 * effect)


@SETTINGS
def test_paired_differences_are_covered(tasks, seeds, trials, effect, least):
  """The trained policy gains 0.24 of 0.9 - rival and loses 0.08 of rival - 0.1 in the
  mean: 0.4 * 0.24 - 0.4 * 0.08.
  """
  rng, shape = np.random.default_rng(0), (RUNS, tasks, 1, 1)
  rival = 0.1 + 0.8 * rng.beta(0.5, 0.5, shape)
  gain = rng.beta(0.6, 1.9, shape) * (0.9 - rival)
  loss = rng.beta(0.2, 2.3, shape) * (rival - 0.1)
  effect_R = rng.normal(0, effect, (RUNS, 1, seeds, 1))
  rate = np.stack([rival + 0 * effect_R, rival + gain - loss + effect_R])
  success = rng.random((*rate.shape[:-1], trials)) < rate
  value_PxNxR = success.mean(axis=-1).reshape(-1, tasks, seeds)
  trained_P = np.arange(2 * RUNS) >= RUNS
  mean_PxB = means(value_PxNxR, trained_P, draw(tasks, seeds, 500))
  check(0.064, mean_PxB[RUNS:] - mean_PxB[:RUNS], least)


def test_only_what_trainings_explain_widens_an_interval():
  # A policy without training, and one whose training seeds differ by chance only.
  value_1xNxR = np.tile([1.0, 2.0, 6.0], (1, 40, 1))
  untrained = means(value_1xNxR, np.array([False]), draw(40, 3, 100))
  noise_1xNxR = np.array([[[1.0, 2.0, 6.0], [6.0, 1.0, 2.0], [2.0, 6.0, 1.0]]])
  noisy = means(noise_1xNxR, np.array([True]), draw(3, 3, 100))
  assert [np.ptp(untrained), np.ptp(noisy)] == pytest.approx([0, 0])


def test_a_task_may_lack_a_seed():
  # Two tasks' means are 1 and 3; without the second seed's value of the first task, 2
  # and 3.
  lacking = np.array([[[2.0, NAN], [3.0, 3.0]]])
  assert means(lacking, np.array([True]), draw(2, 2, 1))[0, 0] == 2.5
