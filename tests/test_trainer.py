"""Check gradient steps of micro-batches, and the optimizers' learning rates."""

import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_router import EPISODES, VIEW, draw_model, make_batcher

from baar_jax.config import BoPOConfig, SFTConfig
from baar_jax.learn.batches import SAMPLED, Batch
from baar_jax.learn.trainer import ShardedRouter, Trainer, sft_optimizer
from baar_jax.paper.bopo import Learner, RatedEpisode
from baar_jax.paper.losses import bopo_loss

ADV = [1.0, -2.0, 0.5, 3.0, -1.0]  # mean 0.3
WHOLE = 8  # a batch with this many rows has all episodes
BOPO = BoPOConfig(kl_beta=0.5)
# The first step is plain gradient descent, so the parameters show the gradient.
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def copy_of(state):
  """Copy arrays on their devices, because a step donates its buffers."""
  return jax.tree.map(jnp.copy, state)


def test_micro_batches_take_the_same_step_as_one_batch():
  encoder = VIEW
  model = draw_model()
  anchor = ShardedRouter(draw_model(seed=3), encoder)
  trainer = Trainer(model, encoder, partial(bopo_loss, BOPO), OPTIMIZER)
  start = copy_of(trainer.state)
  results = []
  # The first batch has rows of 208 tokens, the others of 104 or 208.
  for micro in (make_batcher(WHOLE, labels=SAMPLED), make_batcher(2, labels=SAMPLED)):
    trainer.load(copy_of(start))
    learner = Learner(BOPO, trainer, micro, anchor)
    metrics = learner.learn([*map(RatedEpisode, EPISODES, ADV)])
    results.append((metrics, copy_of(trainer.state)))
  close = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
  jax.tree.map(close, *results)
  metrics, state = results[0]
  assert metrics["kl"] > 0.005 and trainer._gradient._cache_size() == 3
  changes = jax.tree.map(lambda now, was: np.abs(now - was).max(), state, start)
  assert max(jax.tree.leaves(changes["params"])) > 0.001
  # Every kernel, and its state in the optimizer, is sharded over the devices.
  kernels = [x for x in jax.tree.leaves(trainer.state) if x.ndim > 1]
  assert all("fsdp" in kernel.sharding.spec for kernel in kernels)
  # The model that was passed has not changed.
  norm = start["params"]["final_norm"]
  np.testing.assert_array_equal(model.final_norm[...], norm)


class Product(nnx.Module):
  """Multiply parameters, which are 0 at first, with the inputs."""

  def __init__(self, size):
    self.w = nnx.Param(jnp.zeros(size))


def open_product(size, optimizer):
  """Open a trainer whose loss is the sum of products, so the inputs are its gradient."""
  encoder = SimpleNamespace(forward=lambda model, x: model.w[...] * x)
  loss = lambda values, batch: {"loss": values.sum()}  # noqa: E731
  return Trainer(Product(size), encoder, loss, optimizer)


def to_batch(gradient):
  return Batch(np.array(gradient, "f4"), *[None] * 4)


@pytest.mark.parametrize(
  "inputs, norm, change",
  [
    # (1, 2) + (3, 4) = (4, 6), of norm sqrt(52): scaled down to norm 1.
    ([[1.0, 2.0], [3.0, 4.0]], 52**0.5, [4 / 52**0.5, 6 / 52**0.5]),
    ([[0.1, -0.2], [-0.4, 0.6]], 0.5, [-0.3, 0.4]),  # not scaled
  ],
)
def test_a_step_adds_up_gradients_and_clips_the_sum(inputs, norm, change):
  trainer = open_product(2, optax.sgd(1.0))
  metrics = trainer.step([*map(to_batch, inputs)])
  assert metrics == pytest.approx({"loss": 0.0, "gradient_norm": norm})
  (w,) = jax.tree.leaves(trainer.params)
  np.testing.assert_allclose(w, -np.array(change), rtol=1e-6)


def test_a_step_works_in_the_memory_of_its_arguments():
  """The gradient is added to the donated sum, and the optimizer needs no copy of it."""
  size = 100_000
  trainer = open_product(size, sft_optimizer(SFTConfig()))
  params = trainer.params
  add = trainer._gradient.lower(params, to_batch([1.0] * size), params)
  apply = trainer._apply.lower(params, trainer.optimizer_state, params)
  for lowered, arrays in ((add, 1), (apply, 4)):  # float32
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes // (4 * size) == arrays
    assert memory.temp_size_in_bytes < size


def updates_of(optimizer, gradients, value=0.0):
  """The updates of one parameter whose value stays; the value 0 has no weight decay."""
  state = optimizer.init(jnp.array(value))
  step = jax.jit(optimizer.update)
  updates = []
  for gradient in gradients:
    update, state = step(jnp.array(gradient), state, jnp.array(value))
    updates.append(float(update))
  return updates


def sft(updates=103):
  return sft_optimizer(SFTConfig(updates=updates, learning_rate=0.6))


def test_learning_rates_and_weight_decay():
  # Adam's step on a constant gradient is the learning rate. 3 % of 103 updates are warm-up:
  # quarters of the peak. The other 100 are half a cosine: at 0, 45, 90 and 180 degrees.
  rates = np.array(updates_of(sft(), [0.5] * 104))[[0, 1, 2, 3, 28, 53, 103]]
  expected = [0.15, 0.3, 0.45, 0.6, 0.6 * (1 + math.sqrt(0.5)) / 2, 0.3, 0.0]
  np.testing.assert_allclose(-rates, expected, rtol=1e-4, atol=1e-6)
  assert updates_of(sft(updates=2), [0.5] * 2) == pytest.approx([-0.3, -0.6], rel=1e-4)
  # Weights decay: at a quarter and at half of the peak by 0.15 and 0.3 times 0.01 * 5.
  decayed = updates_of(sft(), [0.0, 0.0], 5.0)
  assert decayed == pytest.approx([-0.0075, -0.015], rel=1e-3)
