"""Vanilla RL: its rewards and groups by hand."""

import numpy as np
import pytest
import tiny

from baar_jax.config import BoPOConfig
from baar_jax.taxonomy import Profile
from baar_jax.vanilla import advantages

# The unit of cost is the mean of always-LARGE: (10 + 6) / 2 = 8 dollars, whatever the task.
PROFILES = {"a": Profile("hard", 2.0, 10.0, [], []), "b": Profile("easy", 1.0, 6.0, [], [])}


def tried(task_id, seed, score, usd):
  return tiny.episode(task_id, "vanilla", seed, "SL", score, cost_usd=usd)


def weigh(episodes, lam=0.5):
  return advantages(episodes, PROFILES, {}, lam, BoPOConfig())


def test_by_hand():
  # Rewards of a: 1 - .5 * 4/8 = .75 and 0 - .5 * 8/8 = -.5: mean .125, std .625.
  episodes = [tried("a", 0, 1.0, 4.0), tried("a", 1, 0.9, 8.0)]
  kept, adv_B, metrics = weigh(episodes)
  assert kept == episodes
  np.testing.assert_allclose(adv_B, [1.0, -1.0], rtol=1e-5)
  assert metrics["reward"] == pytest.approx(0.125)
  assert metrics["success"] == 0.5
  assert metrics["kept_groups"] == 1.0


def test_groups_that_are_all_good_or_all_bad_are_left_out():
  good = [tried("a", seed, 1.0, usd) for seed, usd in enumerate((1.0, 9.0))]
  bad = [tried("b", seed, 0.5, usd) for seed, usd in enumerate((1.0, 9.0))]
  kept, adv_B, metrics = weigh(good + bad)
  assert kept == [] and adv_B.shape == (0,)
  assert metrics["kept_groups"] == 0.0
  assert metrics["success"] == 0.5  # they count in the metrics
