"""Micro-batches add up to the whole batch, steps lower the loss, and a saved state goes on."""

import dataclasses
import re
from functools import partial

import jax
import numpy as np
import optax
import pytest

from baar_jax.config import BoPOConfig, Config, EnvConfig, SFTConfig
from baar_jax.router.build import build_model
from baar_jax.router.view import View
from baar_jax.stages.bopo import improve, improvement
from baar_jax.stages.sft import imitation
from baar_jax.train.trainer import Batcher, Scorer, Trainer

LENGTHS = "SLSLLS"
EPISODES = 5


@pytest.fixture(scope="module")
def episodes(make_episode):
  """Of 1, 2, 4, 5 and 6 decisions, with log-probabilities where nothing was forced."""
  made = []
  for i, length in enumerate((5, 1, 6, 2, 4)):
    models = LENGTHS[i:] + LENGTHS[:i]
    logps = [None if (i, s) == (2, 3) else -0.3 - 0.1 * s for s in range(length)]
    made.append(make_episode(models[:length], logps=logps))
  return made


@pytest.fixture(scope="module")
def batcher(router_config, tokenizer_dir, make_task):
  """batcher(rows): cuts into micro-batches of so many rows, all of one length."""
  config = Config(
    env=EnvConfig(max_steps=6), router=dataclasses.replace(router_config, max_tokens=128)
  )
  view, task = View(config.router, tokenizer_dir), make_task()

  def make(rows: int) -> Batcher:
    sft = SFTConfig(micro_episodes=rows)
    return Batcher(dataclasses.replace(config, sft=sft), view, {task.id: task})

  return make


@pytest.fixture(scope="module")
def optimizer():
  """Its first step is plain gradient descent, so that the parameters show the gradient."""
  return optax.sgd(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def compiled(tiny_model, view, optimizer):
  trainer = Trainer(tiny_model, imitation, optimizer, view.decision_ids)
  return trainer, jax.tree.map(np.array, trainer.state)


@pytest.fixture
def trainer(compiled):
  """An SFT trainer at its start."""
  compiled[0].load(compiled[1])
  return compiled[0]


def sft_parts(micro):
  decisions = sum(batch.mask_BxS.sum() for _, batch in micro)
  return [(batch, batch.mask_BxS.sum() / decisions) for _, batch in micro]


def assert_same(trees, atol):
  jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=atol), *trees)


def moved(trainer, state) -> float:
  """The largest change of any parameter since that state."""
  changes = jax.tree.map(
    lambda now, was: np.abs(now - was).max(), trainer.state["params"], state["params"]
  )
  return max(jax.tree.leaves(changes))


def test_micro_batches_hold_every_episode_once(batcher, episodes):
  micro = batcher(2).micro_batches(episodes)
  # Short ones together: 1, 2 | 4, 5 | 6 decisions.
  assert [indices for indices, _ in micro] == [[1, 3], [4, 0], [2]]
  assert [batch.mask_BxS.sum(axis=1).tolist() for _, batch in micro] == [[1, 2], [4, 5], [6, 0]]
  assert all(batch.mask_BxS.shape == (2, 6) for _, batch in micro)
  forced = batcher(2).micro_batches(episodes, sampled_only=True)[2][1]
  assert forced.mask_BxS.sum(axis=1).tolist() == [5, 0]


def test_sft_micro_batches_make_the_step_of_one_batch(
  compiled, trainer, batcher, episodes, tiny_model
):
  metrics, states = [], []
  for rows in (2, EPISODES):
    trainer.load(compiled[1])
    metrics.append(trainer.step(sft_parts(batcher(rows).micro_batches(episodes))))
    states.append(jax.tree.map(np.array, trainer.state))
  assert moved(trainer, compiled[1]) > 0.001
  assert_same(states, atol=1e-5)
  assert_same(metrics, atol=1e-5)
  # The model that it started from is as it was.
  np.testing.assert_array_equal(tiny_model.final_norm[...], compiled[1]["params"]["final_norm"])
  assert np.abs(trainer.model.final_norm[...] - tiny_model.final_norm[...]).max() > 1e-5


def test_bopo_micro_batches_make_the_step_of_one_batch(
  compiled, tiny_model, batcher, episodes, filled, router_config, view, optimizer
):
  config = BoPOConfig(ratio_level="decision", kl_beta=0.5)
  other = filled(lambda: build_model(router_config, 0), seed=3)
  anchor = Scorer(other, view.decision_ids, None, "float32")
  trainer = Trainer(tiny_model, partial(improvement, config), optimizer, view.decision_ids)
  adv_B = np.array([1.0, -2.0, 0.5, 3.0, -1.0])
  metrics, states = [], []
  for rows in (2, EPISODES):
    trainer.load(compiled[1])
    metrics.append(improve(trainer, anchor, batcher(rows), episodes, adv_B, config, seed=0))
    states.append(jax.tree.map(np.array, trainer.state))
  assert moved(trainer, compiled[1]) > 0.001
  assert_same(states, atol=1e-5)
  assert_same(metrics, atol=1e-5)
  assert metrics[0]["kl"] > 0.01


def test_bopo_reports_the_mean_of_its_steps(
  tiny_model, batcher, episodes, view, optimizer, monkeypatch
):
  config = BoPOConfig(epochs=2)
  anchor = Scorer(tiny_model, view.decision_ids, None, "float32")
  trainer = Trainer(tiny_model, partial(improvement, config), optimizer, view.decision_ids)
  answers = iter([{"loss": 1.0, "kl": 0.0}, {"loss": 4.0, "kl": 0.5}])
  monkeypatch.setattr(trainer, "step", lambda parts: next(answers))
  adv_B = np.zeros(len(episodes))
  metrics = improve(trainer, anchor, batcher(EPISODES), episodes, adv_B, config, seed=0)
  assert metrics == {"loss": 2.5, "kl": 0.25}


def test_steps_lower_the_loss_and_a_saved_state_goes_on(
  trainer, batcher, episodes, tiny_model, view, optimizer
):
  parts = sft_parts(batcher(EPISODES).micro_batches(episodes))
  first = [trainer.step(parts) for _ in range(3)]
  saved = jax.tree.map(np.array, trainer.state)
  later = [trainer.step(parts) for _ in range(3)]
  after = jax.tree.map(np.array, trainer.state)
  values = [metrics["loss"] for metrics in first + later]
  assert max(values[1:]) < values[0] and values[-1] < values[0] - 0.03
  assert all(metrics["gradient_norm"] > 0 for metrics in first)

  trainer.load(saved)
  assert [trainer.step(parts) for _ in range(3)] == later
  assert_same([trainer.state, after], atol=0)
  # Another trainer takes it over too, momentum and all.
  other = Trainer(tiny_model, imitation, optimizer, view.decision_ids)
  other.load(saved)
  assert_same([other.state, saved], atol=0)
  assert max(np.abs(leaf).max() for leaf in saved["optimizer"]) > 1e-3


def test_the_shapes_that_are_compiled_are_counted(tiny_model, batcher, episodes, view, optimizer):
  """Two lengths of rows, so two; other episodes of the same lengths bring no more."""
  trainer = Trainer(tiny_model, imitation, optimizer, view.decision_ids)
  assert trainer.compiled == 0
  for chosen in (episodes, episodes[::-1], episodes[1:3]):
    micro = batcher(2).micro_batches(chosen)
    trainer.step(sft_parts(micro))
    assert {batch.tokens_RxT.shape for _, batch in micro} <= {(2, 64), (2, 128)}
  assert trainer.compiled == 2


def test_bf16_computes_on_float32_weights(tiny_model, batcher, episodes, view, optimizer):
  parts = sft_parts(batcher(EPISODES).micro_batches(episodes))
  losses = {}
  for dtype in ("float32", "bfloat16"):
    trainer = Trainer(tiny_model, imitation, optimizer, view.decision_ids, dtype=dtype)
    losses[dtype] = trainer.step(parts)["loss"]
    assert {x.dtype for x in jax.tree.leaves(trainer.params)} == {np.dtype("float32")}
  assert losses["bfloat16"] != losses["float32"]
  assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=0.05)


def test_no_array_has_both_tokens_and_vocabulary(tiny_model, batcher, episodes, view, optimizer):
  """Neither forward nor backward: of 340 words only the decisions' logits are ever made."""
  trainer = Trainer(tiny_model, imitation, optimizer, view.decision_ids)
  batch, share = sft_parts(batcher(EPISODES).micro_batches(episodes))[0]
  T = batch.tokens_RxT.shape[1]
  text = trainer._gradient.lower(trainer.params, batch, share).as_text()
  shapes = [
    tuple(map(int, found.split("x"))) for found in re.findall(r"tensor<([\dx]+)xf32>", text)
  ]
  assert any(340 in shape for shape in shapes) and any(T in shape for shape in shapes)
  assert not [shape for shape in shapes if 340 in shape and (T in shape or EPISODES in shape)]


def test_in_bf16_the_first_step_is_on_policy(tiny_model, batcher, episodes, view, optimizer):
  """Whatever the rollouts noted: each ratio is 1, and the loss minus the mean advantage."""
  config = BoPOConfig(kl_beta=0.0)
  adv_B = np.array([1.0, -2.0, 0.5, 3.0, -1.0])  # mean 0.3
  losses = {}
  for dtype in ("float32", "bfloat16"):
    placed = view.decision_ids, None, dtype
    trainer = Trainer(tiny_model, partial(improvement, config), optimizer, *placed)
    anchor = Scorer(tiny_model, *placed)
    metrics = improve(trainer, anchor, batcher(EPISODES), episodes, adv_B, config, seed=0)
    losses[dtype] = metrics["loss"]
  assert losses["bfloat16"] == pytest.approx(-0.3, abs=1e-3)
  assert abs(losses["float32"] + 0.3) > 0.05  # float32 takes the rollouts' own, which are made up
