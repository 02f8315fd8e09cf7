"""The errors of training: stored data, checkpoints, value heads, losses and rewards."""

import math
from pathlib import Path
from types import SimpleNamespace

import tiny
from errors_config import command

from baar_jax.config import Config
from baar_jax.learn.batches import draw_batches
from baar_jax.paper import references, rewards
from baar_jax.run import load_references as load_stored_references
from baar_jax.stages import collect
from baar_jax.store import Store


def lose_vocabulary(tmp: Path) -> None:
  """A run has checkpoints, and its vocabulary was deleted."""
  (tmp / "checkpoints").mkdir()
  collect.update_vocabulary(SimpleNamespace(dir=tmp))


def load_references(tmp: Path) -> None:
  """A hard task has a profile, and no stratified samples."""
  small, large = [tiny.episode(score=0.0)], [tiny.episode(score=1.0)]
  profiles = {"t": references.make_profile(small, large)}
  load_stored_references(Store(":memory:"), Config(runs=str(tmp)), profiles)


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
