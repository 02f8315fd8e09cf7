"""Check vanilla RL by hand: DAPO's loss, the groups that it keeps, and their queue."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import episode

from baar_jax.config import BoPOConfig
from baar_jax.episode import Task
from baar_jax.families import vanilla
from baar_jax.learn.batches import Batch
from baar_jax.paper.references import Profile
from baar_jax.rollout.specs import Job, RolloutSpec


def test_dapo_weighs_decisions_equally_and_divides_by_episodes():
  """The batch has 5 decisions in 4 rows; of the step's 7 episodes, 3 are in another one."""
  low = np.log(0.5 / 1.5)
  logp_BxS = np.array([[low, 0, np.inf], [low, -0.5, 0], [np.inf] * 3, [9] * 3])
  mask_BxS = np.array([[1, 1, 0], [1, 1, 1], [0] * 3, [0] * 3], bool)
  unused = np.zeros((4, 3), int)
  adv_B = np.array([2.0, -1.0, 0.0, 0.0])
  batch = Batch(*[unused] * 2, logp_BxS, mask_BxS, adv_B, episodes=7)

  def step(logits):
    return vanilla.dapo_loss(BoPOConfig(), logits, batch)["loss"]

  # Each decision has probability .5.
  loss, gradient = jax.value_and_grad(step)(jnp.zeros((4, 3, 2)))
  # Ratios 1.5 and .5 of a good episode, 1.5, .5 e^.5 = .8244 and .5 of a bad one, are clipped to
  # [.8, 1.28]. Gains min(3, 2.56), min(1, 1.6), min(-1.5, -1.28), min(-.8244, -.8244) and
  # min(-.5, -.8).
  np.testing.assert_allclose(loss, -(2.56 + 1.0 - 1.5 - 0.8244 - 0.8) / 7, rtol=1e-4)
  # The gradient is 0 if clipped and on padding. Else d gain / d logit = gain * (1 - .5).
  gains = np.array([[0.0, 1.0, 0.0], [-1.5, -0.8244, 0.0], [0.0] * 3, [0.0] * 3])
  np.testing.assert_allclose(gradient[:, :, 0], gains * -0.5 / 7, rtol=1e-4)


def rollout(score, usd=1.0, trial=0, task_id="a"):
  """Make an episode; a failed attempt adds $3 to its bill."""
  return episode(task_id, "vanilla", trial, "SL", score, usd, retry_usd=3.0)


def test_dapo_keeps_groups_with_successes_and_failures():
  # One normalised dollar is $8. Rewards of the first: 1 - .5 * 4/8 = .75 and 0 - .5 * 8/8 = -.5:
  # mean .125, std .625. Those of the second: -.5 * 1/8 = -.0625 and -.5 * 9/8 = -.5625.
  group = [rollout(1.0, 4.0), rollout(0.9, 8.0)]
  bad = [rollout(0.5, 1.0), rollout(0.5, 9.0)]
  rated, metrics = vanilla.rate([group, bad], 8.0, lam=0.5)
  assert [kept for kept, _ in rated] == group
  assert [adv for _, adv in rated] == pytest.approx([1.0, -1.0], rel=1e-5)
  # Dropped groups count too.
  figures = metrics["reward"], metrics["success"], metrics["mixed_share"]
  assert figures == pytest.approx(((0.25 - 0.625) / 4, 0.25, 0.5))
  rated, metrics = vanilla.rate([[rollout(1.0, 1.0), rollout(1.0, 9.0)]], 8.0, lam=0.5)
  assert rated == [] and metrics["mixed_share"] == 0.0


def test_full_batches_of_kept_groups_are_learnt_in_order():
  """A batch has two groups of two episodes; odd updates keep one, even ones two."""

  def play(title, plan, build):
    (spec,) = plan
    number = spec.update
    second = 0.0 if number % 2 else 1.0
    scores = {"a": (1.0, 0.0), "b": (second, 0.0)}
    return [rollout(scores[id_][n], 1.0, number, id_) for id_ in "ab" for n in (0, 1)]

  pools = []

  def learn(rated):
    pools.append("".join(str(e.trial) for e, _ in rated))
    return {}

  jobs = [Job(Task("a", "train", "", 9), "rollout", trial) for trial in range(4)]
  rollouts = [(RolloutSpec("vanilla", 0.1, 0, n), jobs) for n in (1, 2, 3, 4)]
  learner = SimpleNamespace(config=BoPOConfig(), act=None, label="", learn=learn)
  profiles = {"a": Profile("hard", 1.0, 5.0, [], [])}
  updates = [*vanilla.vanilla(play, profiles, {}, learner, rollouts)]
  assert pools == ["1122", "2233", "4444"]
  assert [update.gradient_steps for update in updates] == [0, 1, 1, 1]
  assert [update.waiting for update in updates] == [2, 2, 0, 0]
