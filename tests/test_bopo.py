"""Check BoPO's advantages by hand (their cost is C, not the bill), and that it learns."""

import itertools

import jax
import numpy as np
import pytest
from tiny import episode

from baar_jax.config import BoPOConfig, Config
from baar_jax.episode import Task
from baar_jax.learn.batches import Batch
from baar_jax.paper import losses
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


# Each of five tasks has two steps, so there are ten states. A task is solved if LARGE acts where it
# is needed (L); the last one never is. An S costs $1 and an L $5.
WORLD = {"easy": "SS", "first": "LS", "second": "SL", "both": "LL", "never": "SS"}
DIFFICULTIES = ("easy", "hard", "hard", "hard", "intractable")
# Rewards of these choices under lam 0.4: 1, 1.5 - .2 twice, 1.5 - .4 and 0.
OPTIMUM = (1.0 + 1.3 + 1.3 + 1.1 + 0.0) / 5


def play(task_id, trial, models, logps=()):
  needed = WORLD[task_id]
  lacks = any(pair == ("L", "S") for pair in zip(needed, models))
  score = 0.0 if lacks or task_id == "never" else 1.0
  return episode(task_id, "bopo", trial, models, score, logps=logps)


class TableRouter:
  """Learn a table of logits: the learner, and what plays its episodes."""

  act = None  # `play` samples from the table itself.
  label = "BoPO"

  def __init__(self, config):
    self.config = config
    self.logits_NxA = np.zeros((10, 2), np.float32)
    self.draw = np.random.default_rng(0)
    self.gradient = jax.jit(jax.grad(self.loss))

  def play(self, title, plan, build):
    logp_NxA = np.array(jax.nn.log_softmax(self.logits_NxA))
    played = []
    for job in itertools.chain(*plan.values()):
      logp_SxA = logp_NxA[self.states(job.task.id)]
      actions = (self.draw.random(2) < np.exp(logp_SxA[:, 1])).astype(int)
      models = "".join("SL"[action] for action in actions)
      played.append(play(job.task.id, job.trial, models, logp_SxA[[0, 1], actions]))
    return played

  def states(self, task_id):
    first = 2 * [*WORLD].index(task_id)
    return [first, first + 1]

  def learn(self, rated):
    episodes, advantages = zip(*rated)
    state_BxS = np.array([self.states(e.task_id) for e in episodes])
    action_BxS = np.array([[step.model for step in e.steps] for e in episodes])
    logp_BxS = np.array([[step.logp for step in e.steps] for e in episodes])
    mask_BxS = state_BxS >= 0
    labels = action_BxS, logp_BxS, mask_BxS, np.array(advantages)
    totals = len(episodes), mask_BxS.sum()
    uniform_BxSxA = np.zeros((*state_BxS.shape, 2))
    batch = Batch(state_BxS, *labels, *totals, uniform_BxSxA)
    self.logits_NxA -= 2.0 * np.array(self.gradient(self.logits_NxA, batch))
    return {}

  def loss(self, logits_NxA, batch):
    return losses.bopo_loss(self.config, logits_NxA[batch.inputs], batch)["loss"]


def test_bopo_finds_the_optimum_of_ten_states():
  config = Config(bopo=BoPOConfig(updates=60, tasks_per_update=5))
  profiles = {}
  references = {}
  for difficulty, (task_id, models) in zip(DIFFICULTIES, WORLD.items()):
    profiles[task_id] = Profile(difficulty, 2.0, 10.0, [], [])
    references[task_id] = play(task_id, 0, models)
  tasks = [Task(task_id, "train", "", 2) for task_id in WORLD]
  rollouts = list_updates(config, "bopo", 0.4, tasks)
  rollouts = itertools.islice(rollouts, config.bopo.updates)
  router = TableRouter(config.bopo)
  updates = [*bopo(router.play, profiles, references, router, rollouts)]
  reward = np.mean([update.metrics["reward"] for update in updates[-10:]])
  choices = "".join("SL"[action] for action in router.logits_NxA.argmax(axis=1))
  assert choices == "".join(WORLD.values()) and reward > 0.95 * OPTIMUM
