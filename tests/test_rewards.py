"""rewards.py against sums worked out by hand; test_references has the difficulties."""

import numpy as np
import pytest

from baar_jax.paper import rewards


def test_normalized_cost():
  # 2 / 4; the inverted 1 / 4; clipped twice; equal boundaries: nothing above them, 0.001 / 1e-9
  cost = np.array([0.003, 0.002, 0.0005, 0.009, 0.004, 0.005])
  small = np.array([0.001, 0.005, 0.001, 0.001, 0.004, 0.004])
  large = np.array([0.005, 0.001, 0.005, 0.005, 0.004, 0.004])
  share = rewards.normalized_cost(cost, small, large)
  np.testing.assert_allclose(share, [0.5, 0.25, 0.0, 1.0, 0.0, 1.0], atol=1e-6)
  share = rewards.normalized_cost(3.0, 1.0, 5.0, eps=4.0)
  assert isinstance(share, float) and share == 0.25  # (3 - 1) / (5 - 1 + 4)


def test_boundary_reward():
  # Rows: easy, hard; columns: success, failure. 2 - .5, 0 - .5;  2 + .25 - .5, 0 - .5
  outcomes = np.array([[True, False]] * 2), np.array([[False], [True]]), np.ones((2, 2))
  reward = rewards.boundary_reward(*outcomes, lam=0.5, r_success=2.0, r_hard=0.25)
  np.testing.assert_allclose(reward, [[1.5, -0.5], [1.75, -0.5]])


@pytest.mark.parametrize(
  "reward_G, reference, options, expected",
  [
    # tests/test_bopo.py has rewards that differ, and the default clip.
    # Equal rewards, std 0: (0.8 - 1) / 0.1 below the reference; 0 above it
    ([0.8] * 4, 1.0, {}, [-2.0] * 4),
    ([1.3] * 4, 1.0, {}, [0.0] * 4),
    ([0.0], 1.0, {"clip": 7.0}, [-7.0]),
    ([0.0], 1.0, {"eps": 0.5}, [-2.0]),
  ],
)
def test_advantage(reward_G, reference, options, expected):
  advantage_G = rewards.reference_advantage(reward_G, reference, **options)
  np.testing.assert_allclose(advantage_G, expected, atol=1e-12)
