"""SFT: what a batch holds, the optimizer's schedule, and going on after a stop."""

import itertools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from baar_jax.config import SFTConfig
from baar_jax.router.build import build_model
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.stages import profile as taxonomy
from baar_jax.stages import references, sft
from baar_jax.stages.pretrain import load_initial
from baar_jax.stages.sft import load_sft, make_optimizer
from baar_jax.train.dataset import balanced


def batches(hard, rest, size, share, count, seed=0):
  return list(itertools.islice(balanced(hard, rest, size, share, seed), count))


@pytest.mark.parametrize(
  "size, share, hards",
  [(10, 0.7, 7), (64, 0.7, 45), (8, 0.7, 6), (10, 1.0, 10), (10, 0.0, 0), (1, 0.7, 1)],
)
def test_share_of_hard_tasks(size, share, hards):
  # whatever the natural mix: here one in eleven is hard
  hard, rest = list(range(10)), list(range(100, 200))
  for batch in batches(hard, rest, size, share, 5):
    assert len(batch) == size
    assert sum(episode < 100 for episode in batch) == hards


def test_without_one_kind_the_other_fills_the_batch():
  assert all(sorted(b) == [1, 1, 2, 2] for b in batches([], [1, 2], 4, 0.7, 3))
  assert all(sorted(b) == [1, 1, 2, 2] for b in batches([1, 2], [], 4, 0.7, 3))


def test_each_pool_is_gone_through_before_it_repeats():
  hard, rest = list(range(6)), list(range(100, 104))
  found = batches(hard, rest, 4, 0.5, 12)  # 24 of each: 4 passes over hard, 6 over rest
  firsts = [e for batch in found for e in batch if e < 100]
  others = [e for batch in found for e in batch if e >= 100]
  assert all(sorted(firsts[i : i + 6]) == hard for i in range(0, 24, 6))
  assert all(sorted(others[i : i + 4]) == rest for i in range(0, 24, 4))
  assert len({tuple(firsts[i : i + 6]) for i in range(0, 24, 6)}) > 1  # in a new order


def test_batches_follow_from_the_seed():
  pools = list(range(20)), list(range(100, 120))
  assert batches(*pools, 8, 0.7, 4) == batches(*pools, 8, 0.7, 4)
  assert batches(*pools, 8, 0.7, 4) != batches(*pools, 8, 0.7, 4, seed=1)


def updates_of(config, gradients, value=0.0):
  """The optimizer's updates of one parameter that stays at `value`."""
  optimizer = make_optimizer(config)
  params = {"x": jnp.array(value)}
  state = optimizer.init(params)
  step = jax.jit(optimizer.update)
  found = []
  for gradient in gradients:
    update, state = step({"x": jnp.array(gradient)}, state, params)
    found.append(float(update["x"]))
  return found


def test_schedule():
  # Adam's step on a constant gradient is the learning rate. 3 % of 103 updates are warm-up
  # (3.09, so 3), in quarters; the other 100 a half cosine.
  config = SFTConfig(updates=103, learning_rate=0.6, weight_decay=0.0)
  rates = [-update for update in updates_of(config, [0.5] * 104)]
  assert rates[:3] == pytest.approx([0.15, 0.3, 0.45], rel=1e-4)
  assert rates[3] == pytest.approx(0.6, rel=1e-4)  # the peak
  assert rates[28] == pytest.approx(0.6 * (1 + math.sqrt(0.5)) / 2, rel=1e-4)  # cos 45 degrees
  assert rates[53] == pytest.approx(0.3, rel=1e-4)  # cos 90
  assert rates[103] == pytest.approx(0.0, abs=1e-6)


def test_a_large_eps_keeps_the_sizes_of_gradients():
  # Bias-corrected, Adam's first step on g is lr * g / (|g| + eps).
  for gradient in (0.5, 0.05, 0.001):
    config = SFTConfig(updates=1, learning_rate=0.6, weight_decay=0.0, adam_eps=0.1)
    assert updates_of(config, [gradient]) == pytest.approx([-0.6 * gradient / (gradient + 0.1)])


def test_gradients_are_clipped():
  config = SFTConfig(updates=100, learning_rate=0.6, weight_decay=0.0, clip_norm=1.0)
  # With clipping a gradient of 1000 is one of 1.
  assert updates_of(config, [1.0, 1000.0, -7.0]) == pytest.approx(
    updates_of(config, [1.0, 1.0, -1.0])
  )
  assert updates_of(config, [0.5, 1.0]) != pytest.approx(updates_of(config, [1.0, 1.0]))


def test_weights_decay():
  # No gradient: at a quarter and at half of the peak the updates are -0.15 and -0.3 * 0.01 * 5.
  config = SFTConfig(updates=103, learning_rate=0.6, weight_decay=0.01)
  assert updates_of(config, [0.0, 0.0], value=5.0) == pytest.approx([-0.0075, -0.015], rel=1e-3)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
  """The directory of a run that has its references."""
  config = tiny.config(tmp_path_factory.mktemp("profiled"))
  config.sft.updates = 5
  with tiny.compiled_once():
    run = Run(config)
    taxonomy.main(run)
    references.main(run)
    run.close()
    yield run


@pytest.fixture
def copied(profiled, tmp_path):
  """copied("a"): the profiled run, opened in a place of its own or again where it was."""
  runs = []

  def opening(place):
    config = tiny.config(tmp_path / place)
    config.sft.updates = 5
    if not (tmp_path / place).exists():
      shutil.copytree(profiled.dir, tmp_path / place / config.name)
    runs.append(Run(config))
    return runs[-1]

  yield opening
  for run in runs:
    run.close()


def leaves(model):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.split(model)[1])]


def logged(run):
  return [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]


def test_a_stopped_run_goes_on_to_the_same_parameters(copied, monkeypatch):
  monkeypatch.setattr(sft, "SAVE_EVERY", 2)
  unbroken = copied("unbroken")
  sft.main(unbroken)
  assert [line["update"] for line in logged(unbroken)] == [1, 2, 3, 4, 5]

  broken = copied("broken")
  log = broken.log

  def stop(**values):
    log(**values)
    if values["update"] == 3:  # by now 2 is on its way to the disk
      raise KeyboardInterrupt

  monkeypatch.setattr(broken, "log", stop)
  checkpoints = sft.Checkpoints

  class Waiting(checkpoints):
    def save(self, *args):
      super().save(*args)
      self._manager.wait_until_finished()

  monkeypatch.setattr(sft, "Checkpoints", Waiting)
  with pytest.raises(KeyboardInterrupt):
    sft.main(broken)
  resumed = copied("broken")
  with pytest.raises(ValueError, match="has 2 of 5 updates: run --stage=sft first"):
    load_sft(resumed)
  sft.main(resumed)
  lines = logged(resumed)
  assert [line["update"] for line in lines] == [1, 2, 3, 3, 4, 5]
  assert lines[2] == lines[3]  # the same batch and the same parameters
  for one, other in zip(leaves(load_sft(resumed)), leaves(load_sft(unbroken)), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-6)
  assert all(np.isfinite(leaf).all() for leaf in leaves(load_sft(resumed)))

  sft.main(resumed)  # finished: nothing more is done
  assert len(logged(resumed)) == 6


def test_the_decisions_of_a_router_from_random_weights_start_alike(profiled):
  view = View(profiled.config.router, profiled.tokenizer)
  model = load_initial(profiled, view)
  hidden_D = np.random.default_rng(0).normal(size=profiled.config.router.hidden_size)
  small, large = np.asarray(model.logits(hidden_D, np.array(view.decision_ids)))
  assert small == large != 0


def test_without_references_the_stage_is_named(tmp_path, profiled):
  run = Run(tiny.config(tmp_path))
  with pytest.raises(ValueError, match="run --stage=references first"):
    sft.main(run)
  with pytest.raises(ValueError, match="tokenizer.json is missing: run --stage=profile first"):
    load_sft(run)
  shutil.copytree(profiled.tokenizer, run.tokenizer)
  with pytest.raises(ValueError, match="has 0 of 2 updates: run --stage=sft first"):
    load_sft(run)
  run.close()


def test_no_parameter_is_weakly_typed(profiled):
  # After the first update it would be a strong one, and everything is compiled again.
  params = nnx.split(build_model(profiled.config.router, 0))[1]
  assert [leaf.weak_type for leaf in jax.tree.leaves(params)] == [False] * 14


@pytest.mark.parametrize("updates, rates", [(1, [0.6]), (2, [0.3, 0.6])])
def test_a_schedule_of_few_updates(updates, rates):
  config = SFTConfig(updates=updates, learning_rate=0.6, weight_decay=0.0)
  assert [-u for u in updates_of(config, [0.5] * updates)] == pytest.approx(rates, rel=1e-4)
