"""The errors of training: stored data, checkpoints, value heads, losses and rewards."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import tiny
from errors_config import command
from states import restore, save, state

from baar_jax.config import BoPOConfig, Config
from baar_jax.families.conditioned import load_heads
from baar_jax.families.family import load_router
from baar_jax.learn.batches import draw_batches
from baar_jax.learn.checkpoint import Checkpoints
from baar_jax.paper import bopo, references, rewards
from baar_jax.rollout.specs import RolloutSpec
from baar_jax.run import RouterFiles
from baar_jax.run import load_references as load_stored_references
from baar_jax.stages import collect
from baar_jax.store import Store


def restore_state(tmp: Path, changes: Mapping) -> None:
  """Restore a checkpoint whose state has changed."""
  with contextlib.closing(Checkpoints(tmp / "sft", create=True)) as checkpoints:
    checkpoints.save(1, state(1) | changes)
  restore(tmp / "sft")


def restore_damaged(tmp: Path) -> None:
  save(tmp / "sft", 1)
  (tmp / "sft/1/params/_METADATA").write_text("{")
  restore(tmp / "sft")


def lose_vocabulary(tmp: Path) -> None:
  """A run has checkpoints, and its vocabulary was deleted."""
  (tmp / "checkpoints").mkdir()
  collect.update_vocabulary(SimpleNamespace(dir=tmp))


def load_references(tmp: Path) -> None:
  """A hard task has a profile, and no stratified samples."""
  small, large = [tiny.episode(score=0.0)], [tiny.episode(score=1.0)]
  profiles = {"t": references.make_profile(small, large)}
  load_stored_references(Store(":memory:"), Config(runs=str(tmp)), profiles)


def roll_out(tmp: Path) -> None:
  """All rollouts end in errors, so that no episode is stored."""
  learner = SimpleNamespace(config=BoPOConfig(), act=None, label="BoPO")
  bopo.roll_out(lambda *_: [], learner, RolloutSpec("bopo", 0.1, 0, 1), [])


CASES = [
  # Stored data.
  (
    "TMP/sandbox has no profile trials: run --stage=profile first",
    command,
    "--config=examples/sandbox.py",
    "--stage=report",
  ),
  ("...lacks references of 1 hard tasks: run --stage=references", load_references),
  ("TMP/vocabulary.npz is missing...restore it, or delete ...", lose_vocabulary),
  (
    "...no stored episodes...run --stage=references...",
    lambda tmp: next(draw_batches([], 4, seed=0)),
  ),
  (
    "BoPO, λ 0.1, training seed 0, update 1: no task has 2 episodes: correct...",
    roll_out,
  ),
  # Checkpoints. tests/test_checkpoint.py has the error of a full disk, which needs a
  # process of its own.
  (
    "cannot read checkpoint TMP/sft/1 (...not finite): remove this directory...",
    restore_state,
    {"optimizer": [jnp.array(1), jnp.full(6, math.nan)]},
  ),
  ("cannot read checkpoint TMP/sft/1 (...): remove this directory...", restore_damaged),
  (
    "TMP/checkpoints/sft has no finished router: run --stage=sft first",
    lambda tmp: load_router(RouterFiles(tmp, Config(), mesh=None), "sft"),
  ),
  (
    "TMP/checkpoints/value/value_heads.npz is missing...--stage=value",
    lambda tmp: load_heads(RouterFiles(tmp, Config(), mesh=None)),
  ),
  (
    "only text routers have Hugging Face's format: train with --config.router.weights set",
    command,
    "--stage=export",
  ),
  # The configuration of ablations.
  (
    "--config.baselines.ablations must be without no-hard-bonus...",
    command,
    "--config.bopo.r_hard=0.0",
    "--config.baselines.ablations=('no-hard-bonus',)",
  ),
  # Functions of rewards, called with wrong values.
  (
    "got no trials...at least one of always-SMALL and one of always-LARGE",
    lambda tmp: rewards.difficulty([True], []),
  ),
  (
    "got rewards [ 0. nan] and reference reward 1.0...finite numbers",
    lambda tmp: rewards.reference_advantage([0.0, math.nan], 1.0),
  ),
]
