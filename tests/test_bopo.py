"""Check BoPO's advantages by hand (their cost is C, not the bill), and that it learns."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
from tiny import episode

from baar_jax.config import BoPOConfig, Config
from baar_jax.episode import Task
from baar_jax.paper.bopo import bopo, compute_advantages
from baar_jax.paper.references import Profile
from baar_jax.rollout.jobs import list_updates

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


# Of the groups none has an advantage above 0 if there is a reference. Without one the first has, and
# the second is all 0.
SUMMARY_GUIDED = dict(clipped_groups=1, nonpositive_share=1.0)
SUMMARY_OF_THE_MEAN = dict(clipped_groups=0, nonpositive_share=0.5)


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
  assert metrics == summary | dict(
    reward=pytest.approx(2.125 / 6),
    success=pytest.approx(2 / 6),
    cost_usd=pytest.approx((2 + 4 + 6 + 10 + 1 + 1) / 6),
    # LARGE calls: 1, 1, 4, 1 and none; steps: 2, 2, 4, 2 and 3, 3
    large_share=pytest.approx(7 / 16),
    mixed_share=0.5,
  )


def test_bopo_learns_which_task_needs_large():
  """Each task has one step. LARGE alone solves h. The router is a logit for each task."""
  logits = {"e": 0.0, "h": 0.0}
  draw = random.Random(0)

  def chance(task_id):
    return 1 / (1 + math.exp(-logits[task_id]))

  def play(title, plan, build):
    played = []
    (jobs,) = plan.values()
    for job in jobs:
      task_id = job.task.id
      is_large = draw.random() < chance(task_id)
      solved = is_large or task_id == "e"
      played.append(rollout(task_id, solved, 1 + 9 * is_large, "SL"[is_large]))
    return played

  def learn(rated):
    for played, advantage in rated:
      slope = played.large_calls - chance(played.task_id)
      logits[played.task_id] += 0.1 * advantage * slope
    return {}

  config = Config(bopo=BoPOConfig(tasks_per_update=2))
  tasks = [Task(task_id, "train", "", 1) for task_id in logits]
  rollouts = list_updates(config, "bopo", 0.5, tasks)
  learner = SimpleNamespace(config=config.bopo, act=None, label="", learn=learn)
  for _ in itertools.islice(bopo(play, PROFILES, REFERENCES, learner, rollouts), 40):
    pass
  assert chance("e") < 0.1 and chance("h") > 0.9
