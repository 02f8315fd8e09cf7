"""Check batches against literal arrays, and gradient steps of micro-batches."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import episode

from baar_jax.config import BoPOConfig, Config, EnvConfig, SFTConfig
from baar_jax.learn import trainer as training
from baar_jax.learn.batches import (
  ACTED,
  SAMPLED,
  Batcher,
  Labels,
  Shape,
  make_batch,
)
from baar_jax.learn.trainer import ShardedRouter, Trainer
from baar_jax.paper.bopo import Learner, RatedEpisode, update_policy
from baar_jax.paper.losses import bopo_loss, sft_batch_loss
from baar_jax.rivals.cascade import FAILURES
from baar_jax.router.view import View, Window
from baar_jax.router.weights import build_model

ADV = [1.0, -2.0, 0.5, 3.0, -1.0]  # mean 0.3
WHOLE = 8  # a batch with this many rows has all episodes
BOPO = BoPOConfig(ratio_level="decision", kl_beta=0.5)
# The first step is plain gradient descent, so the parameters show the gradient.
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def episodes():
  """Five episodes with 5, 1, 6, 2 and 4 decisions, of which one was forced."""
  logps = [-0.3 - 0.1 * s for s in range(6)]
  models = "SLSLL", "L", "SLLSSL", "LL", "LSSL"
  result = [
    episode("plant-0", models=letters, logps=logps[: len(letters)])
    for letters in models
  ]
  result[2].steps[3].logp = None
  return result


@pytest.fixture(scope="module")
def batcher(router_config, tokenizer_dir, make_task):
  """batcher(rows): micro-batches of `rows` rows."""

  def make(rows: int, labels: Labels = ACTED) -> Batcher:
    router = dataclasses.replace(router_config, max_tokens=208)
    sft = SFTConfig(micro_episodes=rows)
    config = Config(env=EnvConfig(max_steps=6), router=router, sft=sft)
    return Batcher(config, View(router, tokenizer_dir), [make_task()], labels)

  return make


def copy_of(state):
  """Copy arrays on their devices, because a step donates its buffers."""
  return jax.tree.map(jnp.copy, state)


SHAPE = Shape(3, 4, (6, 10))


def assert_arrays(batch, **expected):
  for name, values in expected.items():
    np.testing.assert_array_equal(getattr(batch, name), np.array(values), err_msg=name)


def test_a_batch_of_transcripts_by_hand():
  """The second episode has two windows; its history is cut before the last step."""
  transcripts = [episode(models="SL"), episode(models="LSL", logps=[-0.5, None, 0.0])]
  windows = [
    [Window([11, 12, 13, 14], [1, 3], 0)],
    [Window([21, 22, 23], [0, 2], 0), Window([31, 32], [1], 2)],
  ]
  assert_arrays(
    make_batch(transcripts, windows, ACTED, SHAPE),
    tokens_RxT=[[11, 12, 13, 14, 0, 0], [21, 22, 23, 0, 0, 0], [31, 32, 0, 0, 0, 0]],
    row_BxS=[[0, 0, 0, 0], [1, 1, 2, 0], [0, 0, 0, 0]],
    position_BxS=[[1, 3, 0, 0], [0, 2, 1, 0], [0, 0, 0, 0]],
    action_BxS=[[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]],
    logp_BxS=[[0, 0, 0, 0], [-0.5, 0, 0, 0], [0, 0, 0, 0]],
    mask_BxS=np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], bool),
  )
  # A decision without log-probability was forced; one with 0.0 was sampled.
  batch = make_batch(transcripts, windows, SAMPLED, SHAPE, [2.0, -1.0])
  mask_BxS = [[False] * 4, [True, False, True, False], [False] * 4]
  assert_arrays(batch, mask_BxS=mask_BxS, adv_B=[2.0, -1.0, 0.0])


def test_micro_batches_hold_every_episode_once(batcher, episodes):
  # Episodes of similar length are together: 1, 2 | 4, 5 | 6 decisions.
  batches = batcher(2).micro_batches(episodes)
  assert [batch.mask_BxS.sum(axis=1).tolist() for batch in batches] == [
    [1, 2],
    [4, 5],
    [6, 0],
  ]
  # The step has 5 episodes and 18 decisions. Padding counts, as losses average over rows.
  assert [batch.episode_share for batch in batches] == pytest.approx([2 / 5] * 3)
  assert [batch.decision_share for batch in batches] == pytest.approx(
    [3 / 18, 9 / 18, 6 / 18]
  )
  batches = batcher(2, labels=SAMPLED).micro_batches(episodes, np.array(ADV))
  assert [batch.adv_B.tolist() for batch in batches] == [[-2, 3], [-1, 1], [0.5, 0]]
  assert batches[2].mask_BxS.sum(axis=1).tolist() == [5, 0]  # one was forced
  assert batches[2].decision_share == pytest.approx(5 / 17)
  # Values computed per batch are returned in the order of the episodes.
  models = batcher(2).compute(lambda batch: batch.action_BxS, episodes)
  assert "".join("SL"[model] for model in models) == "SLSLLLSLLSSLLLLSSL"


def test_a_scorer_learns_failures_from_cheaper_models_proposals(batcher):
  pair = [episode("plant-0", models="SS"), episode("plant-0", models="LSS", score=0.5)]
  scorer = batcher(WHOLE, labels=FAILURES)
  (batch,) = scorer.micro_batches(pair)
  assert np.where(batch.mask_BxS, batch.action_BxS, 2)[:2, :3].tolist() == [
    [0, 0, 2],
    [2, 1, 1],
  ]
  assert [
    scorer.view.tokenizer.decode(row).count(" proposal:")
    for row in batch.tokens_RxT[:2]
  ] == [2, 2]


def test_micro_batches_take_the_same_step_as_one_batch(
  tiny_model, batcher, episodes, filled, view
):
  ids = view.decision_ids
  other = filled(lambda: build_model(view.config, 0), seed=3)
  trainer = Trainer(tiny_model, partial(bopo_loss, BOPO), OPTIMIZER, ids)
  start = copy_of(trainer.state)
  anchor = ShardedRouter(other, ids)
  metrics = []
  states = []
  # The first batch has rows of 208 tokens, the others of 104 or 208.
  for micro in (batcher(WHOLE, labels=SAMPLED), batcher(2, labels=SAMPLED)):
    trainer.load(copy_of(start))
    learner = Learner(BOPO, trainer, micro, anchor)
    metrics.append(update_policy(learner, [*map(RatedEpisode, episodes, ADV)], 0))
    states.append(copy_of(trainer.state))
  close = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
  jax.tree.map(close, metrics[0], metrics[1])
  jax.tree.map(close, states[0], states[1])
  assert metrics[0]["kl"] > 0.005 and trainer._gradient._cache_size() == 3
  changes = jax.tree.map(lambda now, was: np.abs(now - was).max(), states[0], start)
  assert max(jax.tree.leaves(changes["params"])) > 0.001
  # Every kernel, and its state in the optimizer, is sharded over the devices.
  kernels = [x for x in jax.tree.leaves(trainer.state) if x.ndim > 1]
  assert all("fsdp" in kernel.sharding.spec for kernel in kernels)
  # The model that was passed has not changed.
  np.testing.assert_array_equal(
    tiny_model.final_norm[...], start["params"]["final_norm"]
  )


def test_no_array_has_both_tokens_and_vocabulary(tiny_model, view, batcher, episodes):
  """Neither pass computes logits of all 340 tokens at any position."""
  trainer = Trainer(tiny_model, sft_batch_loss, OPTIMIZER, view.decision_ids)
  (batch,) = batcher(WHOLE).micro_batches(episodes)
  T = batch.tokens_RxT.shape[1]
  text = trainer._gradient.lower(trainer.params, batch).as_text()
  shapes = [
    tuple(map(int, dims.split("x")))
    for dims in re.findall(r"tensor<([\dx]+)xf32>", text)
  ]
  assert any(340 in shape for shape in shapes) and any(T in shape for shape in shapes)
  assert not [
    shape for shape in shapes if 340 in shape and (T in shape or WHOLE in shape)
  ]


def test_the_first_step_in_bf16_is_on_policy(
  tiny_model, batcher, episodes, view, monkeypatch
):
  """All ratios are 1, whatever the rollouts recorded. So the loss is minus the mean of ADV."""
  ids = view.decision_ids
  trainer = Trainer(
    tiny_model, partial(bopo_loss, BOPO), OPTIMIZER, ids, dtype="bfloat16"
  )
  start = copy_of(trainer.state)
  # The anchor is the trainer itself, so the KL is 0.
  learner = Learner(BOPO, trainer, batcher(WHOLE, labels=SAMPLED), trainer)
  arguments = learner, [*map(RatedEpisode, episodes, ADV)], 0
  assert update_policy(*arguments)["loss"] == pytest.approx(-0.3, abs=1e-3)
  assert {x.dtype for x in jax.tree.leaves(trainer.params)} == {np.dtype("float32")}
  trainer.load(start)
  monkeypatch.setattr(
    trainer, "low_precision", False
  )  # The recorded log-probabilities are invented, so their ratios differ from 1.
  assert abs(update_policy(*arguments)["loss"] + 0.3) > 0.05


def updates_of(optimizer, gradients, value=0.0):
  """The updates of one parameter whose value stays; the value 0 has no weight decay."""
  state = optimizer.init(jnp.array(value))
  step = jax.jit(optimizer.update)
  updates = []
  for gradient in gradients:
    update, state = step(jnp.array(gradient), state, jnp.array(value))
    updates.append(float(update))
  return updates


def sft(updates=103, **settings):
  config = SFTConfig(updates=updates, learning_rate=0.6, **settings)
  return training.sft_optimizer(config)


def test_learning_rates_clipping_and_weight_decay():
  # Adam's step on a constant gradient is the learning rate. 3 % of 103 updates are warm-up:
  # quarters of the peak. The other 100 are half a cosine: at 0, 45, 90 and 180 degrees.
  rates = -np.array(updates_of(sft(), [0.5] * 104))
  expected = [0.15, 0.3, 0.45, 0.6, 0.6 * (1 + math.sqrt(0.5)) / 2, 0.3, 0.0]
  np.testing.assert_allclose(
    rates[[0, 1, 2, 3, 28, 53, 103]], expected, rtol=1e-4, atol=1e-6
  )
  assert updates_of(sft(updates=2), [0.5] * 2) == pytest.approx([-0.3, -0.6], rel=1e-4)
  # A large eps keeps the sizes of gradients. Adam's first step on g is lr * g / (|g| + eps).
  bopo = training.bopo_optimizer(BoPOConfig(learning_rate=0.6, adam_eps=0.1))
  for optimizer in (sft(updates=1, adam_eps=0.1), bopo):
    assert updates_of(optimizer, [0.001]) == pytest.approx(
      [-0.6 * 0.001 / 0.101], rel=1e-5
    )
  # Clipping turns a gradient of 1000 into 1.
  clipped, ones = (updates_of(sft(), [1.0, big, -big]) for big in (1000.0, 1.0))
  assert clipped == pytest.approx(ones) != updates_of(sft(), [0.5, 1.0, -1.0])
  # Weights decay: at a quarter and at half of the peak by 0.15 and 0.3 times 0.01 * 5.
  assert updates_of(sft(), [0.0, 0.0], 5.0) == pytest.approx(
    [-0.0075, -0.015], rel=1e-3
  )
