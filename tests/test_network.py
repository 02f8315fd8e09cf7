"""Check the policy network, its inputs and its batches by hand; live decisions agree."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_router import fill

from baar_jax.config import Config, EnvConfig, SFTConfig
from baar_jax.episode import Episode, Step, Task
from baar_jax.families.cascade import FAILURES
from baar_jax.learn.batches import ACTED, Batcher
from baar_jax.learn.trainer import ShardedRouter
from baar_jax.mesh import one_device
from baar_jax.rollout.specs import Job, Live
from baar_jax.router.inputs import learn_vocabulary
from baar_jax.router.network import InputsEncoder

TASK = Task("plant-0", "train", "find the red lamp", 4)


def observe(*steps: tuple[int, int]) -> Episode:
  """Make an episode of models and lengths of observations that begin with "lamp"."""
  made = [
    Step("lamp".ljust(size, "."), model, "look", [tiny.call(model)])
    for model, size in steps
  ]
  return Episode(TASK.id, "p", "profile", len(steps), made, 1.0, "done")


EPISODES = [observe((0, 9), (1, 29), (0, 99)), observe((1, 9))]
# The lamp is a quarter of the words that tell this task from another.
OTHER = Task("other", "train", "open a door", 4)
VOCABULARY = learn_vocabulary({TASK.id: TASK, OTHER.id: OTHER}, EPISODES)


def test_inputs_are_standardised_and_terms_are_those_of_no_cap():
  """The lengths of observations vary; the task's words in the first one never do."""
  logs = np.log([10, 30, 100, 10]) / 5
  assert VOCABULARY.mean_D[[1, 9]] == pytest.approx([0.25, logs.mean()])
  assert VOCABULARY.spread_D[[1, 9]] == pytest.approx([1, logs.std()])
  encoder = InputsEncoder(VOCABULARY, 2, ACTED.describe_draft)
  (x_SxI,) = encoder.encode(TASK, EPISODES[0])
  np.testing.assert_allclose(x_SxI[:, 1], 0, atol=1e-6)
  expected = (logs[:3] - logs.mean()) / logs.std()
  np.testing.assert_allclose(x_SxI[:, 9], expected, rtol=1e-5)
  # No cap, no cost weight; half of the steps, its root, and no LARGE call that counts.
  expected = [1, np.log(21) / 3, 1, 1, 1, 1, 0.5, 0.5**0.5, 0]
  np.testing.assert_allclose(x_SxI[2, -9:], expected, rtol=1e-6)
  # Nothing tells which models acted.
  same = observe((1, 9), (0, 29), (1, 99))
  (same_SxI,) = InputsEncoder(VOCABULARY, 2, ACTED.describe_draft).encode(TASK, same)
  np.testing.assert_array_equal(same_SxI, x_SxI)
  # A new network prefers no answer.
  logits = encoder.build(0)(jnp.asarray(x_SxI[None]))
  assert logits.shape == (1, 3, 2) and not logits.any()


def make_batcher(encoder, labels) -> Batcher:
  """Make a batcher of two rows, for episodes of at most 4 steps in most cases."""
  config = Config(env=EnvConfig(max_steps=4), sft=SFTConfig(micro_episodes=2))
  return Batcher(config, encoder, [TASK], labels)


@pytest.mark.parametrize("labels", [ACTED, FAILURES])
def test_live_logits_equal_those_of_training(labels):
  """A cascade's step waits with a proposal of SMALL."""
  encoder = InputsEncoder(VOCABULARY, 2, labels.describe_draft)
  model = fill(partial(encoder.build, 0))
  router = ShardedRouter(model, encoder)
  trained_NxA = make_batcher(encoder, labels).compute(router.logits, EPISODES)
  ready = []
  for episode in EPISODES:
    for s, step in enumerate(episode.steps):
      live = Live(Job(TASK, "test", episode.trial), steps=episode.steps[:s])
      live.observation = step.observation
      if labels is FAILURES:
        live.draft = dataclasses.replace(step, action="", proposal=step.action)
      if labels is ACTED or step.model == 0:
        ready.append(live)
  logits_NxA, usd_N = encoder.open_reader(model, 4, one_device()).read(ready)
  assert usd_N == [0.0] * len(ready) and np.ptp(logits_NxA) > 0.1
  np.testing.assert_allclose(logits_NxA, trained_NxA, rtol=1e-4, atol=1e-4)
