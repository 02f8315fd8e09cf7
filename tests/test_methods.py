"""Rewards and advantages of rollout batches, by hand."""

import numpy as np
import pytest
import tiny

from baar_jax.config import BoPOConfig
from baar_jax.train.dataset import Profile
from baar_jax.train.methods import bopo_advantages, compute_reward, dapo_advantages

HARD = Profile("hard", 2.0, 10.0, [], [])
INVERTED = Profile("easy", 2.0, 1.0, [], [])  # SMALL is the dearer one: C_min is LARGE's
PROFILES = {"h": HARD, "e": INVERTED, "alone": HARD}
LAM = 0.5


def tried(task_id, seed, score, usd, models="SL"):
  return tiny.episode(task_id, "bopo", seed, models, score, cost_usd=usd)


@pytest.mark.parametrize(
  "profile, score, usd, reward",
  [
    (HARD, 1, 4.0, 1.375),  # 1 + 0.5 - 0.5 * 2/8
    (HARD, 1, 99.0, 1.0),  # clipped
    (HARD, 0.99, 6.0, -0.25),  # a partial score is a failure: no bonus, only the cost
    (INVERTED, 1, 1.5, 0.75),  # 1 - 0.5 * 0.5/1
    (INVERTED, 0, 3.0, -0.5),
  ],
)
def test_reward_of_an_episode(profile, score, usd, reward):
  value = compute_reward(tried("h", 0, score, usd), profile, LAM, BoPOConfig())
  assert value == pytest.approx(reward, abs=1e-6)
  config = BoPOConfig(r_success=2.0, r_hard=0.0)
  assert compute_reward(tried("h", 0, 1, 6.0), HARD, 1.0, config) == pytest.approx(1.5)


# Rewards of the hard task: 0 - 0, 1.5 - 0.125, 1.5 - 0.25, 0 - 0.5: mean 0.53125, and the squared
# distances 0.28223, 0.71191, 0.51660, 1.06348 have the mean 0.64355, so std 0.80222.
COSTS = ((0, 2.0, "SL"), (1, 4.0, "SL"), (1, 6.0, "LLLL"), (0, 10.0, "SL"))
GROUP = [tried("h", 8 + g, score, usd, models) for g, (score, usd, models) in enumerate(COSTS)]
# Both fail as cheaply as can be: rewards 0 and 0, std 0.
FAILED = [tried("e", 8, 0, 1.0, "SSS"), tried("e", 9, 0, 1.0, "SSS")]
MIXED = [GROUP[0], FAILED[0], GROUP[1], tried("alone", 8, 1, 2.0), GROUP[2], FAILED[1], GROUP[3]]
REFERENCES = {
  "h": tried("h", 0, 1, 4.0),  # reward 1.375, above the mean
  "e": tried("e", 0, 1, 1.0),  # reward 1
  "alone": tried("alone", 0, 1, 4.0),
}
# (0 - 1.375) / (0.80222 + 0.1), (1.25 - 1.375) / 0.90222, (-0.5 - 1.375) / 0.90222; and
# (0 - 1) / 0.1 = -10, clipped
GUIDED = {"h": [-1.52402, 0.0, -0.13855, -2.07821], "e": [-5.0, -5.0]}
# (0 - 0.53125) / 0.90222, ...
OF_THE_MEAN = {"h": [-0.58882, 0.93519, 0.79664, -1.14300], "e": [0.0, 0.0]}


@pytest.mark.parametrize("guided, expected, clipped", [(True, GUIDED, 1), (False, OF_THE_MEAN, 0)])
def test_advantages_of_two_groups(guided, expected, clipped):
  config = BoPOConfig(reference_guided=guided)
  kept, adv_B, metrics = bopo_advantages(MIXED, PROFILES, REFERENCES, LAM, config)
  assert kept == [*GROUP, *FAILED]
  assert adv_B == pytest.approx([*expected["h"], *expected["e"]], abs=1e-4)
  assert metrics == {
    "clipped": clipped,  # groups
    "reward": pytest.approx(2.125 / 6),
    "success": pytest.approx(2 / 6),
    "cost_usd": pytest.approx((2 + 4 + 6 + 10 + 1 + 1) / 6),
    # LARGE calls: 1, 1, 4, 1 and none; steps: 2, 2, 4, 2 and 3, 3
    "large_share": pytest.approx(7 / 16),
  }


def test_the_mean_of_a_batch_is_taken_off_again():
  # GUIDED sums up to -13.74078: the mean of its six is -2.29013.
  config = BoPOConfig(recentre=True)
  _, adv_B, metrics = bopo_advantages(MIXED, PROFILES, REFERENCES, LAM, config)
  expected = [0.76611, 2.29013, 2.15158, 0.21192, -2.70987, -2.70987]
  assert adv_B == pytest.approx(expected, abs=1e-4)
  assert metrics["clipped"] == 1


def test_a_reference_below_the_mean_changes_nothing():
  low = REFERENCES | {"h": tried("h", 0, 0, 10.0)}  # reward -0.5
  _, adv_B, _ = bopo_advantages(GROUP, PROFILES, low, LAM, BoPOConfig())
  assert adv_B == pytest.approx(OF_THE_MEAN["h"], abs=1e-4)


def test_a_batch_without_a_group_says_what_to_do():
  with pytest.raises(ValueError, match="none of the 2 tasks of this batch has 2 episodes"):
    bopo_advantages([GROUP[0], FAILED[0]], {}, {}, LAM, BoPOConfig())
  with pytest.raises(ValueError, match="run the same command again"):
    dapo_advantages([], PROFILES, {}, LAM, BoPOConfig())


# The unit of cost is the mean of always-LARGE: (10 + 6) / 2 = 8 dollars, whatever the task.
VANILLA = {"a": Profile("hard", 2.0, 10.0, [], []), "b": Profile("easy", 1.0, 6.0, [], [])}


def test_dapo_keeps_groups_that_are_neither_all_good_nor_all_bad():
  # Rewards of a: 1 - .5 * 4/8 = .75 and 0 - .5 * 8/8 = -.5: mean .125, std .625. Those of b:
  # -.5 * 1/8 = -.0625 and -.5 * 9/8 = -.5625.
  group = [tried("a", 0, 1.0, 4.0), tried("a", 1, 0.9, 8.0)]
  bad = [tried("b", seed, 0.5, usd) for seed, usd in enumerate((1.0, 9.0))]
  kept, adv_B, metrics = dapo_advantages([*group, *bad], VANILLA, {}, LAM, BoPOConfig())
  assert kept == group
  np.testing.assert_allclose(adv_B, [1.0, -1.0], rtol=1e-5)
  assert metrics["reward"] == pytest.approx((0.25 - 0.625) / 4)  # all episodes count here
  assert (metrics["success"], metrics["kept_groups"]) == (0.25, 0.5)
  good = [tried("a", seed, 1.0, usd) for seed, usd in enumerate((1.0, 9.0))]
  kept, adv_B, metrics = dapo_advantages(good, VANILLA, {}, LAM, BoPOConfig())
  assert (kept, adv_B.shape, metrics["kept_groups"]) == ([], (0,), 0.0)
