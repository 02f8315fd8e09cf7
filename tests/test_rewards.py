"""rewards.py against sums worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baar_jax.train import rewards

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
  ("small", "large", "rate", "expected"),
  [
    ("11110", "00000", 0.8, "easy"),  # 4 / 5 reaches 0.8
    ("11100", "10000", 0.8, "hard"),  # 3 / 5 does not; LARGE once is enough
    ("00000", "00000", 0.8, "intractable"),
    ("1110", "00000", 0.8, "intractable"),  # lucky thrice; one trial lost: 3 / 4 < 0.8
    ("1111111100", "0", 0.8, "easy"),  # 8 / 10, K = 10
    ("110", "1", 0.6, "easy"),
    ("110", "1", 0.7, "hard"),
  ],
)
def test_difficulty(small, large, rate, expected):
  trials = [np.array([mark == "1" for mark in marks]) for marks in (small, large)]
  assert rewards.difficulty(*trials, rate) == expected


@pytest.mark.parametrize(
  ("cost", "small", "large", "expected"),
  [
    (0.003, 0.001, 0.005, 0.5),  # 2 / 4
    (0.002, 0.005, 0.001, 0.25),  # inverted: 1 / 4 of the same interval
    (0.0005, 0.001, 0.005, 0.0),  # clipped
    (0.009, 0.001, 0.005, 1.0),
    (0.004, 0.004, 0.004, 0.0),  # equal boundaries, nothing above them
    (0.005, 0.004, 0.004, 1.0),  # 0.001 / 1e-9, clipped
  ],
)
def test_normalized_cost(cost, small, large, expected):
  share = rewards.normalized_cost(cost, small, large)
  assert isinstance(share, float) and share == pytest.approx(expected, abs=1e-6)
  assert share == rewards.normalized_cost(cost, large, small)  # whichever is dearer


def test_normalized_cost_of_arrays_and_with_another_eps():
  assert rewards.normalized_cost(3.0, 1.0, 5.0, eps=4.0) == 0.25  # (3 - 1) / (5 - 1 + 4)
  share = rewards.normalized_cost(np.array([1.0, 2.0, 9.0]), 1.0, np.array([5.0, 5.0, 0.0]))
  # 0 / 4, 1 / 4, and 9 above [0, 1]
  np.testing.assert_allclose(share, [0.0, 0.25, 1.0], atol=1e-8)


def test_boundary_reward():
  # 1 + 0.5 - 0.3 * 0.4
  reward = rewards.boundary_reward(True, True, 0.4, lam=0.3)
  assert isinstance(reward, float) and reward == pytest.approx(1.38)
  # Rows: easy, hard, intractable; columns: success, failure. All at C_norm = 1, lam = 0.5.
  reward = rewards.boundary_reward(
    success=np.array([[True, False]] * 3),
    hard=np.array([[False], [True], [False]]),
    cost_norm=np.ones((3, 2)),
    lam=0.5,
    r_success=2.0,
    r_hard=0.25,
  )
  # 2 - .5, 0 - .5;  2 + .25 - .5, 0 - .5;  2 - .5, 0 - .5
  np.testing.assert_allclose(reward, [[1.5, -0.5], [1.75, -0.5], [1.5, -0.5]])


@pytest.mark.parametrize(
  "reward_G, reference, options, expected",
  [
    # The mean is 1, the population's std 1: distances from the higher one are divided by 1.1.
    ([0.0, 2.0], 0.5, {}, [-1 / 1.1, 1 / 1.1]),
    ([0.0, 2.0], 1.5, {}, [-1.5 / 1.1, 0.5 / 1.1]),
    # Equal rewards, std 0: (0.8 - 1) / 0.1 below the reference; 0 at or above it
    ([0.8] * 4, 1.0, {}, [-2.0] * 4),
    ([1.0] * 4, 1.0, {}, [0.0] * 4),
    ([1.3] * 4, 1.0, {}, [0.0] * 4),
    ([0.0, 0.0], 1.0, {}, [-5.0, -5.0]),  # (0 - 1) / 0.1 = -10, clipped
    ([0.0], 1.0, {"clip": 7.0}, [-7.0]),
    ([0.0], 1.0, {"eps": 0.5}, [-2.0]),
    # The sum and the squares overflow; mean 0 and std 1e308 in the second.
    ([1e308, 1e308], 0.0, {}, [0.0, 0.0]),
    ([1e308, -1e308], 0.0, {}, [1.0, -1.0]),
  ],
)
def test_advantage(reward_G, reference, options, expected):
  advantage_G = rewards.reference_advantage(reward_G, reference, **options)
  np.testing.assert_allclose(advantage_G, expected, atol=1e-12)


@pytest.mark.parametrize(
  ("message", "function", "arguments"),
  [
    ("a trial of each model", rewards.difficulty, ([], [True])),
    ("a trial of each model", rewards.difficulty, ([True], [])),
    *(("easy_rate", rewards.difficulty, ([1], [1], rate)) for rate in (0.0, 1.1, np.nan)),
    ("finite", rewards.normalized_cost, (np.nan, 1, 2)),
    ("finite", rewards.normalized_cost, (1, np.inf, 2)),
    *(("eps", rewards.normalized_cost, (1, 1, 2, eps)) for eps in (0.0, np.inf, np.nan)),
    *(("lam", rewards.boundary_reward, (1, 0, 0.5, lam)) for lam in (-0.1, np.inf, np.nan)),
    *(("cost_norm", rewards.boundary_reward, (1, 0, c, 0.1)) for c in (-0.1, 1.1, np.nan)),
    *(("one non-empty group", rewards.reference_advantage, (r, 0.0)) for r in ([], 1.0, [[1.0]])),
    ("rewards must be finite", rewards.reference_advantage, ([0.0, np.nan], 0.0)),
    ("rewards must be finite", rewards.reference_advantage, ([0.0, 1.0], np.inf)),
    *(("eps", rewards.reference_advantage, ([0.0], 0.0, eps)) for eps in (0.0, np.inf, np.nan)),
    *(("clip", rewards.reference_advantage, ([0.0], 0.0, 1, c)) for c in (0.0, np.inf, np.nan)),
  ],
)
def test_what_has_no_value_is_an_error(message, function, arguments):
  with pytest.raises(ValueError, match=message):
    function(*arguments)


POSITIVE = st.floats(0, 1e3, exclude_min=True)


@given(st.lists(FLOATS, min_size=1, max_size=8), FLOATS, POSITIVE, POSITIVE)
def test_advantage_is_finite_and_clipped(reward_G, reference, eps, clip):
  advantage_G = rewards.reference_advantage(reward_G, reference, eps, clip)
  assert np.all(np.abs(advantage_G) <= clip)


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=8), st.floats(-2, 2))
def test_advantage_rises_with_the_reward_and_falls_with_the_reference(reward_G, reference):
  advantage_G = rewards.reference_advantage(reward_G, reference)
  order = np.argsort(reward_G)
  assert np.all(np.diff(advantage_G[order]) >= 0)
  assert np.all(rewards.reference_advantage(reward_G, reference + 1.0) <= advantage_G + 1e-9)
