"""Check trainings: killed and resumed, with bad numbers, with dynamic sampling."""

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from baar_jax.config import Config
from baar_jax.learn.trainer import Trainer
from baar_jax.open import load_router
from baar_jax.paper import bopo as bopo_method
from baar_jax.paper import sft as sft_method
from baar_jax.paper.bopo import RatedEpisode
from baar_jax.rivals import families, vanilla
from baar_jax.rollout.specs import PolicySpec
from baar_jax.run import Run
from baar_jax.stages import collect, train
from baar_jax.store import Store


def sft(run):
  train.bosft(run)


def bopo(run):
  train.bopo(run)


def small_config(runs):
  config = tiny.config(runs)
  config.sft.updates = 3
  config.sft.check_every = 1
  config.bopo.updates = 4
  return config


@pytest.fixture(scope="module", autouse=True)
def save_often():
  """Write a checkpoint after every second update; a gradient step has two episodes."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train, "SAVE_EVERY", 2)
    patch.setattr(train, "SAVE_EVERY_ROLLOUTS", 2)
    patch.setattr(bopo_method, "BATCH_EPISODES", 2)
    yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, save_often):
  """A run whose trainings were not interrupted."""
  run = Run(small_config(tmp_path_factory.mktemp("unbroken")))
  collect.profile(run)
  for stage, state in ((collect.references, "referenced"), (sft, "imitated")):
    stage(run)
    shutil.copytree(run.dir, run.dir.parent / state)
  run.before_bopo = len(run.store.table())
  bopo(run)
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
  model = load_router(run.files(number), family, lam)
  return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.split(model)[1])]


def assert_same(leaves, others):
  for one, other in zip(leaves, others, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-6, equal_nan=False)


def cascade(run):
  train.train_rival(run, run.files(), "cascade")


def logged(run, stage):
  lines = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if line["stage"] == stage]


def train_and_die(stage, run, owner, method, calls):
  """Interrupt a stage after some calls of a method."""
  call = getattr(owner, method)
  left = itertools.count(1 - calls)

  def call_or_die(*values, **fields):
    call(*values, **fields)
    if next(left) == 0:
      raise KeyboardInterrupt

  with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(owner, method, call_or_die)
    stage(run)


@pytest.mark.parametrize(
  "stage, lam, kills, updates",
  [
    # The checkpoint of update 2 is complete. So update 3 is done again from it.
    (sft, None, [(Run, "log", 3, 0)], [1, 2, 3, 3]),
    # It is killed in the rollouts of update 3, and before its checkpoint. An update has
    # 4 episodes.
    (bopo, 0.1, [(Store, "add", 9, 9), (Run, "log", 1, 12)], [1, 2, 3, 3, 4]),
  ],
)
def test_a_killed_training_ends_with_the_same_parameters(
  copied, unbroken, stage, lam, kills, updates
):
  name = stage.__name__
  state = "imitated" if lam else "referenced"
  for owner, method, calls, episodes in kills:
    run = copied(state)
    train_and_die(stage, run, owner, method, calls)
    assert len(run.store.table()) - unbroken.before_bopo == episodes
    run.close()
  run = copied(state)
  problem = rf"{name}\S* has no finished router: run --stage={name} "
  with pytest.raises(ValueError, match=problem):
    leaves(run, name, lam)
  for _ in range(2):  # The second time, nothing is left to do.
    stage(run)
    lines = logged(run, name)
    whole = logged(unbroken, name)
    assert [line["update"] for line in lines] == updates
    assert [line["update"] for line in whole] == sorted({*updates})
    assert all(line in whole for line in lines)
    assert len(run.store.table()) - unbroken.before_bopo == (16 if lam else 0)
  assert_same(leaves(run, name, lam), leaves(unbroken, name, lam))


@pytest.mark.parametrize(
  "losses, best", [([0.9, 0.7, 0.8, 0.7], 2), ([0.9, 0.6, 0.7, 0.5, 0.6], 4)]
)
def test_the_best_update_is_kept(copied, monkeypatch, capsys, losses, best):
  """A training ends after two checks without a new best. An equal loss is no new best."""
  seen = {}

  def loss(trainer, batches):
    # the optimizer's count of steps
    update = int(jax.tree.leaves(trainer.optimizer_state)[0])
    seen[update] = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.params)]
    return losses[update - 1]

  monkeypatch.setattr(Trainer, "loss", loss)
  run = copied("referenced")
  run.config.sft.updates = 5
  monkeypatch.setattr(sft_method, "PATIENCE", 2)
  sft(run)
  assert_same(leaves(run, "sft"), seen[best])
  assert [line["update"] for line in logged(run, "sft")] == [*seen]
  assert [*seen] == [*range(1, len(losses) + 1)]
  line = f"least dev loss {losses[best - 1]} at update {best} of {len(losses)}"
  assert f"BoSFT, training seed 0: {line}\n" in capsys.readouterr().out


def test_another_training_seed_is_added_to_a_run(copied):
  """The new one has its own draws, and its rollouts have other seeds."""
  run = copied("tiny")
  before = leaves(run, "bopo", 0.1)
  run.config.train_seeds = 2
  run.config.evaluate.seeds = 2
  sft(run)
  bopo(run)
  assert_same(leaves(run, "bopo", 0.1), before)
  for family, lam in (("sft", None), ("bopo", 0.1)):
    with pytest.raises(AssertionError):
      assert_same(leaves(run, family, lam), leaves(run, family, lam, number=1))
  firsts = {"0.1)/1": 10_000, "0.1)/2": 10_002, "0.1,seed=1)/2": 1_010_002}
  for name, first in firsts.items():
    seeds = {e.seed for e in run.store.episodes(f"bopo(lam={name}")}
    assert seeds == {first, first + 1}


@pytest.mark.parametrize(
  "name, stage, place, rollouts",
  [("cascade", cascade, "cascade", 0), ("bopo", bopo, "bopo-lam0.1", 3)],
)
def test_a_training_stops_if_a_metric_is_not_finite(
  copied, monkeypatch, name, stage, place, rollouts
):
  """It stops in update 3. That is not saved, and no more episodes are rolled out."""
  run = copied("imitated")
  step = Trainer.step
  count = itertools.count()
  directory = run.dir / "checkpoints" / place
  run.config.sft.updates = 4

  def poison(trainer, batches):
    # BoPO takes two gradient steps per update.
    if next(count) == (4 if rollouts else 2):
      trainer.params = jax.tree.map(lambda x: x * np.nan, trainer.params)
    return step(trainer, batches)

  monkeypatch.setattr(Trainer, "step", poison)
  with pytest.raises(ValueError) as error:
    stage(run)
  good = f"last good checkpoint: {directory / '2'};"
  problem = f"{name} stopped: update 3 has .*loss nan, .*gradient_norm nan"
  pattern = f"{problem}.*{re.escape(good)}.*"
  assert re.fullmatch(pattern, str(error.value))  # one line
  assert [path.name for path in directory.iterdir() if path.is_dir()] == ["2"]
  policies = run.store.table().policy.unique()
  assert sum("/" in policy for policy in policies) == rollouts


@pytest.mark.parametrize(
  "limit, pools, counts",
  [
    # It takes as many gradient steps as BoPO: 4 x 2.
    (3, ("1122", "2233", "4444", "5566"), (24, 8)),
    # It has at most `limit` times as many updates as BoPO.
    (1, ("1122", "2233", "4444"), (16, 6)),
  ],
)
def test_vanilla_rl_learns_from_full_batches_of_kept_groups(
  copied, monkeypatch, limit, pools, counts
):
  """A batch has two groups of two episodes; odd updates keep one, even ones two."""

  def keep(groups, *_):
    kept = groups[: 2 - int(groups[0][0].policy[-1]) % 2]
    episodes = [episode for group in kept for episode in group]
    return [RatedEpisode(episode, 1.0) for episode in episodes], {"success": 0.5}

  update_policy = Mock(wraps=vanilla.update_policy)
  monkeypatch.setattr(vanilla, "update_policy", update_policy)
  monkeypatch.setattr(vanilla, "rate", keep)
  row = families.FAMILIES["vanilla"]
  learns = dataclasses.replace(row.learns, batches=limit)
  row = dataclasses.replace(row, learns=learns)
  monkeypatch.setitem(families.FAMILIES, "vanilla", row)
  run = copied("imitated")
  run.config.bopo.vanilla_learning_rate = 0.01
  train.train_rollouts(run, run.files(), PolicySpec("vanilla", lam=0.1))
  learned = [call.args[1] for call in update_policy.call_args_list]
  assert ["".join(e.policy[-1] for e, _ in pool) for pool in learned] == [*pools]
  lines = logged(run, "vanilla")
  stepped = [str(line["update"]) for line in lines if "loss" in line]
  assert stepped == [pool[-1] for pool in pools]
  assert (lines[-1]["episodes"], lines[-1]["gradient_steps"]) == counts


def test_vanilla_rl_has_optimizer_settings_of_its_own():
  config = Config()
  config.bopo.vanilla_learning_rate = 0.5
  config.bopo.adam_eps = 0.25
  configured = vanilla.configure(config).bopo
  assert (configured.learning_rate, configured.adam_eps) == (0.5, 1e-8)
  assert config.bopo.learning_rate == 1e-6
