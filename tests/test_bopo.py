"""Check BoPO's advantages of two groups by hand: their cost is C, and not the bill."""

import pytest
from tiny import episode

from baar_jax.config import BoPOConfig
from baar_jax.paper.bopo import compute_advantages
from baar_jax.paper.references import Profile

PROFILES = {
  "h": Profile("hard", 2.0, 10.0, [], []),
  "e": Profile("easy", 2.0, 1.0, [], []),  # SMALL costs more: C_min is LARGE's
}


def rollout(task_id, score, usd, models="SL"):
  """Make an episode; a failed attempt adds $3 to its bill."""
  return episode(task_id, "bopo", 0, models, score, usd, retry_usd=3.0)


# Rewards of the hard task: 0 - 0, 1.5 - 0.125, 1.5 - 0.25, 0 - 0.5: mean 0.53125, and the squared
# distances 0.28223, 0.71191, 0.51660, 1.06348 have the mean 0.64355, so std 0.80222.
GROUP = [
  rollout("h", 0, 2.0),
  rollout("h", 1, 4.0),
  rollout("h", 1, 6.0, "LLLL"),
  rollout("h", 0, 10.0),
]
# Both episodes fail at cost C_min: rewards 0 and 0, std 0.
FAILED = [rollout("e", 0, 1.0, "SSS"), rollout("e", 0, 1.0, "SSS")]
# The rewards of the references are 1.375, above the mean, and 1.
REFERENCES = {"h": rollout("h", 1, 4.0), "e": rollout("e", 1, 1.0)}
# (0 - 1.375) / (0.80222 + 0.1), (1.25 - 1.375) / 0.90222, (-0.5 - 1.375) / 0.90222; and
# (0 - 1) / 0.1 = -10, clipped
GUIDED = [-1.52402, 0.0, -0.13855, -2.07821, -5.0, -5.0]
# (0 - 0.53125) / 0.90222, ...
OF_THE_MEAN = [-0.58882, 0.93519, 0.79664, -1.14300, 0.0, 0.0]


# Sums of A: -3.74078 and -10, or 0; sums of A^2: 6.66086 and 50, or 3.16237. Of the groups none has
# an advantage above 0 if there is a reference. Without one the first has, and the second is all 0.
SUMMARY_GUIDED = {
  "clipped_groups": 1,
  "nonpositive_share": 1.0,
  "offset_share": pytest.approx((3.74078**2 / 4 + 10**2 / 2) / 56.66086, abs=1e-5),
}
SUMMARY_OF_THE_MEAN = {
  "clipped_groups": 0,
  "nonpositive_share": 0.5,
  "offset_share": pytest.approx(0.0, abs=1e-9),
}


@pytest.mark.parametrize(
  "guided, expected, summary",
  [(True, GUIDED, SUMMARY_GUIDED), (False, OF_THE_MEAN, SUMMARY_OF_THE_MEAN)],
)
def test_advantages_of_two_groups_by_hand(guided, expected, summary):
  config = BoPOConfig(reference_guided=guided)
  groups = [GROUP, FAILED]
  rated, metrics = compute_advantages(config, groups, PROFILES, REFERENCES, lam=0.5)
  kept, adv_B = zip(*rated)
  assert kept == (*GROUP, *FAILED)
  assert adv_B == pytest.approx(expected, abs=1e-4)
  assert metrics == summary | {
    "reward": pytest.approx(2.125 / 6),
    "success": pytest.approx(2 / 6),
    "cost_usd": pytest.approx((2 + 4 + 6 + 10 + 1 + 1) / 6),
    # LARGE calls: 1, 1, 4, 1 and none; steps: 2, 2, 4, 2 and 3, 3
    "large_share": pytest.approx(7 / 16),
    "mixed_share": 0.5,
  }
