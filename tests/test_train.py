"""Check trainings that are killed and resumed, that end early, or have bad numbers."""

import contextlib
import itertools
import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from baar_jax.families import family as family_file
from baar_jax.families import table
from baar_jax.families.family import load_router, open_encoder
from baar_jax.families.vanilla import Vanilla
from baar_jax.learn import checkpoint
from baar_jax.learn.trainer import Trainer
from baar_jax.paper import sft as sft_method
from baar_jax.paper.bopo import Update
from baar_jax.run import Run
from baar_jax.stages import collect

train_sft = partial(table.train, stage="sft")
train_bopo = partial(table.train, stage="bopo")
train_value = partial(table.train, stage="value")


def small_config(runs):
  config = tiny.config(runs)
  config.sft.updates = 3
  config.sft.check_every = 1
  config.bopo.updates = 4
  config.value.updates = 2
  config.value.heads = 1
  return config


@pytest.fixture(scope="module", autouse=True)
def save_often():
  """Write a checkpoint after every second update."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(family_file, "SAVE_EVERY", 2)
    patch.setattr(family_file, "SAVE_EVERY_ROLLOUTS", 2)
    yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, save_often):
  """A run whose trainings were not interrupted."""
  run = Run(small_config(tmp_path_factory.mktemp("unbroken")))
  collect.profile(run)
  for stage, state in ((collect.references, "referenced"), (train_sft, "imitated")):
    stage(run)
    shutil.copytree(run.dir, run.dir.parent / state)
  train_bopo(run)
  run.close()
  run.store = None
  return run


@pytest.fixture
def copied(unbroken, tmp_path):
  """copied(state): open a copy of the run, or the same copy again.
  The states are "referenced" (before SFT), "imitated" (after SFT) and "tiny" (after BoPO)."""
  with contextlib.ExitStack() as stack:

    def opening(state):
      config = small_config(tmp_path)
      if not (tmp_path / config.name).exists():
        shutil.copytree(unbroken.dir.parent / state, tmp_path / config.name)
      return stack.enter_context(contextlib.closing(Run(config)))

    yield opening


def leaves(run, family, lam=None, number=0):
  files = run.files(number)
  model = load_router(files, open_encoder(files), family, lam)
  return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.split(model)[1])]


def assert_same(leaves, others):
  for one, other in zip(leaves, others, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-6, equal_nan=False)


def logged(run, stage):
  lines = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if line["stage"] == stage]


def test_the_best_router_is_kept(copied, monkeypatch, capsys):
  """The loss is measured at every second update. An equal loss is no new best. A killed
  training goes on from its checkpoint of update 10, which has the best router of 8."""
  losses = [0.9, 0.6, 0.7, 0.5, 0.6, 0.5, 0.5]
  seen = []

  def loss(trainer, batches):
    seen.append([np.asarray(leaf) for leaf in jax.tree.leaves(trainer.params)])
    return losses[len(seen) - 1]

  monkeypatch.setattr(Trainer, "loss", loss)
  monkeypatch.setattr(sft_method, "PATIENCE", 2)
  log = Run.log
  lines = itertools.count(1)

  def log_and_die(*values, **fields):
    log(*values, **fields)
    if next(lines) == 12:
      raise KeyboardInterrupt

  def train():
    run = copied("referenced")
    run.config.sft.updates = 20
    run.config.sft.check_every = 2
    with contextlib.closing(run):
      train_sft(run)
    return run

  monkeypatch.setattr(Run, "log", log_and_die)
  with pytest.raises(KeyboardInterrupt):
    train()
  run = train()
  jax.tree.map(np.testing.assert_array_equal, leaves(run, "sft"), seen[3])
  measured = [line.get("dev_loss") for line in logged(run, "sft")]
  # Updates 11 and 12 are done again, from the same parameters.
  assert measured[1::2] == losses and measured[::2] == [None] * 7
  assert_same(seen[5], seen[6])
  line = "BoSFT, training seed 0: least dev loss 0.5 at update 8 of 12\n"
  assert line in capsys.readouterr().out


@pytest.mark.parametrize(
  "stage, state, name, saved",
  [
    (train_sft, "referenced", "sft", {"2", "3"}),
    # The SFT router's directory is opened too, so updates 1 and 3 are late.
    (train_bopo, "imitated", "bopo-lam0.1", {"3", "4"}),
  ],
)
def test_a_checkpoint_is_written_after_ten_minutes(
  copied, monkeypatch, stage, state, name, saved
):
  """400 seconds pass between two looks at the clock. No update's number is due."""
  seconds = itertools.count(0, 400)
  monkeypatch.setattr(family_file, "SAVE_EVERY", 50)
  monkeypatch.setattr(family_file, "SAVE_EVERY_ROLLOUTS", 50)
  monkeypatch.setattr(checkpoint, "monotonic", lambda: next(seconds))
  run = copied(state)
  stage(run)
  directory = run.dir / "checkpoints" / name
  assert {path.name for path in directory.glob("[1-9]*")} == saved


def test_another_training_seed_is_added_to_a_run(copied):
  """The new one has its own draws."""
  run = copied("tiny")
  before = leaves(run, "bopo", 0.1)
  run.config.train_seeds = 2
  run.config.evaluate.seeds = 2
  train_sft(run)
  train_bopo(run)
  assert_same(leaves(run, "bopo", 0.1), before)
  for family, lam in (("sft", None), ("bopo", 0.1)):
    with pytest.raises(AssertionError):
      assert_same(leaves(run, family, lam), leaves(run, family, lam, number=1))
  for name, first in {"0.1)/1": 0, "0.1)/2": 2, "0.1,seed=1)/2": 2}.items():
    trials = {e.trial for e in run.store.episodes(f"bopo(lam={name}")}
    assert trials == {first, first + 1}


@pytest.mark.parametrize(
  "stage, state, name, rollouts",
  [
    (train_sft, "referenced", "sft", 0),
    (train_bopo, "imitated", "bopo-lam0.1", 3),
  ],
)
def test_a_training_stops_if_a_metric_is_not_finite(
  copied, monkeypatch, stage, state, name, rollouts
):
  """It stops in update 3. That is not saved, and no more episodes are rolled out."""
  run = copied(state)
  step = Trainer.step
  count = itertools.count()

  def poison(trainer, batches):
    if next(count) == 2:
      trainer.params = jax.tree.map(lambda x: x * np.nan, trainer.params)
    return step(trainer, batches)

  monkeypatch.setattr(Trainer, "step", poison)
  problem = "stopped: update 3 has .*loss nan, .*gradient_norm nan.* good checkpoint: "
  with pytest.raises(ValueError, match=f"{problem}.*/checkpoints/{name}/2;"):
    stage(run)
  assert not (run.dir / "checkpoints" / name / "3").exists()
  policies = run.store.table().policy.unique()
  assert sum("/" in policy for policy in policies) == rollouts


@pytest.mark.parametrize("limit, steps", [(3, [0, 1, 1, 0, 1, 1]), (1, [0, 1, 1, 1])])
def test_a_rival_takes_as_many_gradient_steps_as_bopo(
  copied, monkeypatch, limit, steps
):
  """These are 4, and at most `limit` times as many updates. While episodes wait, no
  checkpoint is saved."""
  saved = []

  def update(play, profiles, references, learner, rollouts):
    for number, (spec, _) in enumerate(rollouts):
      saved.append(any((run.dir / "checkpoints" / "vanilla-lam0.1").glob("[1-9]*")))
      assert spec.update == number + 1
      yield Update(number + 1, 4, {}, (steps + [1] * 9)[number], waiting=number)

  monkeypatch.setattr(Vanilla, "update", staticmethod(update))
  monkeypatch.setattr(Vanilla, "batches", limit)
  run = copied("imitated")
  table.FAMILIES["vanilla"].train(run)
  last = logged(run, "vanilla")[-1]
  assert (last["episodes"], last["gradient_steps"]) == (4 * len(steps), sum(steps))
  assert saved == [False] * len(steps) and leaves(run, "vanilla", 0.1)


def test_value_heads_are_fitted_once(copied):
  run = copied("referenced")
  path = run.dir / "checkpoints" / "value" / "value_heads.npz"
  train_value(run)
  assert [line["update"] for line in logged(run, "value")] == [2]
  before = path.stat().st_mtime_ns
  train_value(run)
  assert path.stat().st_mtime_ns == before
