"""Vanilla RL: its rewards and groups by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from baar_jax.config import BoPOConfig
from baar_jax.stages.bopo import Signal
from baar_jax.stages.vanilla import advantages, improvement
from baar_jax.train.batches import make_batch
from baar_jax.train.dataset import Profile

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


def test_no_episode_is_one_line():
  with pytest.raises(ValueError, match="run the same command again"):
    weigh([])


def test_the_loss_is_a_sum_over_decisions_by_episodes(view, make_task, make_episode):
  """Shares of two micro-batches add up to the loss of the whole, padding rows or not."""
  good, bad = make_episode("SL", logps=[-0.5, -0.25]), make_episode("LLL", logps=[-1.0, -1.5, -2.0])
  episodes = [good, bad]
  windows = [view.episode_windows(make_task(), e) for e in episodes]
  batch = make_batch(episodes, windows, rows=4, decisions=3, buckets=[320])
  logits = jnp.zeros((4, 3, 2))  # log-probability -0.6931 of each
  signal = Signal(np.array([1.0, -2.0, 0, 0], np.float32), None, np.float32(4 / 5), np.float32(0.5))
  loss, _ = improvement(BoPOConfig(), logits, batch, signal)
  # Ratios .5 e^.5 = .8244 and .5 e^.25 = .6420, taken as they are with a gain; .5 e = 1.3591,
  # .5 e^1.5 = 2.2408, .5 e^2 = 3.6945 unclipped with a loss: -2 * 7.2944. Over 5 episodes in all.
  assert loss == pytest.approx(-(0.8244 + 0.6420 - 2 * 7.2944) / 5, rel=1e-4)


def test_groups_that_are_all_good_or_all_bad_are_left_out():
  good = [tried("a", seed, 1.0, usd) for seed, usd in enumerate((1.0, 9.0))]
  bad = [tried("b", seed, 0.5, usd) for seed, usd in enumerate((1.0, 9.0))]
  kept, adv_B, metrics = weigh(good + bad)
  assert kept == [] and adv_B.shape == (0,)
  assert metrics["kept_groups"] == 0.0
  assert metrics["success"] == 0.5  # they count in the metrics
