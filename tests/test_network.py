"""Check the policy network, its inputs and its batches by hand; live decisions agree."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from baar_jax.config import Config, EnvConfig, SFTConfig
from baar_jax.episode import Episode, Step, Task
from baar_jax.learn.batches import ACTED, Batcher
from baar_jax.learn.trainer import ShardedRouter
from baar_jax.mesh import one_device
from baar_jax.rivals.cascade import FAILURES
from baar_jax.rollout.specs import Job, Live
from baar_jax.router.inputs import learn_vocabulary
from baar_jax.router.network import InputsEncoder, PolicyNetwork

TASK = Task("plant-0", "train", "find the red lamp", 4)


def observe(*steps: tuple[int, int]) -> Episode:
  """Make an episode of models and lengths of observations that begin with "lamp"."""
  made = [
    Step("lamp".ljust(size, "."), model, "look", [tiny.call(model)])
    for model, size in steps
  ]
  return Episode(TASK.id, "p", len(steps), made, 1.0, "done")


EPISODES = [observe((0, 9), (1, 29), (0, 99)), observe((1, 9))]
# The lamp is a quarter of the words that tell this task from another.
OTHER = Task("other", "train", "open a door", 4)
VOCABULARY = learn_vocabulary({TASK.id: TASK, OTHER.id: OTHER}, EPISODES)


def compute_logits(layers, x_I: np.ndarray) -> np.ndarray:
  """Compute the logits of one decision in float64, unit by unit."""
  for number, (weight_IxO, bias_O) in enumerate(layers):
    sums = [x_I @ weight_I + bias for weight_I, bias in zip(weight_IxO.T, bias_O)]
    x_I = np.array(sums)
    if number < len(layers) - 1:
      x_I = np.array([z / (1 + np.exp(-z)) for z in sums])
  return x_I


def test_forward_pass_and_gradient_equal_those_of_numpy(filled):
  """The gradient along a random direction of each parameter is a finite difference."""
  network = filled(lambda: PolicyNetwork(3, 2, 0))
  x_BxSxI = np.random.default_rng(1).normal(size=(2, 2, 3))
  weight_BxSxA = np.array([[[1.0, -2.0], [0.5, 3.0]], [[-1.0, 0.0], [2.0, 0.25]]])
  graphdef, params = nnx.split(network)

  def weigh(params):
    logits_BxSxA = nnx.merge(graphdef, params)(jnp.asarray(x_BxSxI, jnp.float32))
    return (logits_BxSxA * weight_BxSxA).sum(), logits_BxSxA

  gradient, logits_BxSxA = jax.grad(weigh, has_aux=True)(params)

  def weigh_exactly(layers):
    rows = [compute_logits(layers, x_I) for x_I in x_BxSxI.reshape(4, 3)]
    return np.sum(rows * weight_BxSxA.reshape(4, 2)), rows

  to_layers = lambda tree: [  # noqa: E731
    [np.array(linear[name][...], np.float64) for name in ("kernel", "bias")]
    for linear in (tree.first, tree.second, tree.last)
  ]
  layers = to_layers(params)
  expected = np.reshape(weigh_exactly(layers)[1], (2, 2, 2))
  np.testing.assert_allclose(logits_BxSxA, expected, rtol=1e-5, atol=1e-5)
  draw = np.random.default_rng(2)
  for layer, slopes in zip(layers, to_layers(gradient)):
    for array, slope in zip(layer, slopes):
      direction = 1e-5 * draw.normal(size=array.shape)
      array += direction
      above, _ = weigh_exactly(layers)
      array -= 2 * direction
      below, _ = weigh_exactly(layers)
      array += direction
      assert np.sum(slope * direction) == pytest.approx((above - below) / 2, rel=1e-4)


def test_inputs_are_standardised_and_terms_are_those_of_no_cap():
  """The lengths of observations vary; the task's words in the first one never do."""
  logs = np.log([10, 30, 100, 10]) / 5
  assert VOCABULARY.mean_D[[1, 9]] == pytest.approx([0.25, logs.mean()])
  assert VOCABULARY.spread_D[[1, 9]] == pytest.approx([1, logs.std()])
  encoder = InputsEncoder(VOCABULARY, 2)
  x_SxI = encoder.encode(TASK, EPISODES[0])
  np.testing.assert_allclose(x_SxI[:, 1], 0, atol=1e-6)
  expected = (logs[:3] - logs.mean()) / logs.std()
  np.testing.assert_allclose(x_SxI[:, 9], expected, rtol=1e-5)
  # No cap, no cost weight; the share of 4 steps, its root, and the LARGE calls of 20.
  free = [1, np.log(21) / 3, 1, 1, 1, 1]
  times = [[0, 0, 0], [0.25, 0.5, 0], [0.5, 0.5**0.5, 0.05]]
  expected = [free + time for time in times]
  np.testing.assert_allclose(x_SxI[:, -9:], expected, rtol=1e-6)
  # A new network prefers no answer.
  logits = encoder.build(0)(jnp.asarray(x_SxI[None]))
  assert logits.shape == (1, 3, 2) and not logits.any()


def make_batcher(encoder, labels) -> Batcher:
  """Make a batcher of two rows, for episodes of at most 4 steps in most cases."""
  config = Config(env=EnvConfig(max_steps=4), sft=SFTConfig(micro_episodes=2))
  return Batcher(config, encoder, [TASK], labels)


def test_batches_of_inputs_by_hand():
  """Episodes are padded with 0 to a multiple of 4 decisions, and batches with 0 too."""
  encoder = InputsEncoder(VOCABULARY, 2)
  long = observe(*[(0, 7)] * 5)
  first, last = make_batcher(encoder, ACTED).micro_batches([*EPISODES, long])
  one, three, five = (encoder.encode(TASK, e) for e in (EPISODES[1], EPISODES[0], long))
  no_step = np.zeros(one.shape[1])
  padded = [[*one, *[no_step] * 3], [*three, no_step]]
  np.testing.assert_array_equal(first.inputs, padded)
  padded = [[*five, *[no_step] * 3], [no_step] * 8]
  np.testing.assert_array_equal(last.inputs, padded)
  assert first.action_BxS.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
  assert last.mask_BxS.sum(axis=1).tolist() == [5, 0]


@pytest.mark.parametrize("labels", [ACTED, FAILURES])
def test_live_logits_equal_those_of_training(labels, filled):
  """The episodes are live at once. A cascade's step waits with a proposal of SMALL."""
  encoder = InputsEncoder(VOCABULARY, 2, labels.rewrite is not None)
  model = filled(partial(encoder.build, 0))
  router = ShardedRouter(model, encoder)
  trained = make_batcher(encoder, labels).compute(router.logits, EPISODES)
  reader = encoder.open_reader(model, 2, one_device())
  rows = [[], []]
  for s in range(3):
    ready = []
    for seed, episode in enumerate(EPISODES):
      if s < len(episode.steps):
        step = episode.steps[s]
        live = Live(Job(TASK, "test", seed), observation=step.observation)
        live.steps = episode.steps[:s]
        if labels.rewrite:
          live.draft = dataclasses.replace(step, action="", proposal=step.action)
        ready.append(live)
    logits_RxA, usd_R = reader.read(ready)
    assert usd_R == [0.0] * len(ready)
    for row, logits_A, live in zip(rows, logits_RxA, ready):
      if labels is ACTED or live.draft.model == 0:
        row.append(logits_A)
  live_NxA = np.array(rows[0] + rows[1])
  assert len(live_NxA) == {ACTED: 4, FAILURES: 2}[labels]
  assert np.ptp(live_NxA, axis=0).max() > 0.1
  np.testing.assert_allclose(live_NxA, trained, rtol=1e-4, atol=1e-4)
