"""The errors of training: stored data, checkpoints, value heads, losses and rewards."""

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import tiny
from errors_config import command
from test_checkpoint import restore, save, state

from baar_jax import open
from baar_jax.config import BoPOConfig, Config
from baar_jax.learn.batches import draw_batches
from baar_jax.learn.checkpoint import Checkpoints, check_metrics
from baar_jax.open import RouterFiles, load_router
from baar_jax.paper import bopo, losses, references, rewards
from baar_jax.rollout.jobs import Planned
from baar_jax.rollout.specs import PolicySpec
from baar_jax.store import Store

CHECKPOINT = (
  "cannot read checkpoint TMP/sft/1 ({}): remove this directory and run the same command"
  " again, to continue from the previous checkpoint"
)
HEADS = (
  "TMP/checkpoints/value/value_heads.npz is missing or damaged ({}): delete it if it exists, "
  "then run --stage=value"
)


def restore_numbers_that_are_not_finite(tmp: Path) -> None:
  poisoned = state(1)
  poisoned["optimizer"][1] = poisoned["optimizer"][1].at[1].set(math.nan)
  with contextlib.closing(Checkpoints(tmp / "sft", create=True)) as checkpoints:
    checkpoints.save(1, poisoned)
  restore(tmp / "sft")


def restore_a_damaged_checkpoint(tmp: Path) -> None:
  save(tmp / "sft", 1)
  (tmp / "sft/1/params/_METADATA").write_text("{")
  restore(tmp / "sft")


def load_heads(tmp: Path, *arrays: np.ndarray) -> None:
  path = tmp / "checkpoints/value/value_heads.npz"
  path.parent.mkdir(parents=True)
  if arrays:
    np.savez(path, *arrays)
  open.load_heads(RouterFiles(tmp, Config(), mesh=None))


def load_references(tmp: Path) -> None:
  """A hard task has a profile, and no stratified samples."""
  profile = references.make_profile(
    [tiny.episode(score=0.0)], [tiny.episode(score=1.0)]
  )
  config = Config(runs=str(tmp))
  open.load_references(Store(tmp / "episodes.sqlite"), config, {"t": profile})


def roll_out(tmp: Path) -> None:
  """All rollouts end in errors, so that no episode is stored."""
  source = SimpleNamespace(episodes=lambda *_: [])
  learner = SimpleNamespace(config=BoPOConfig(), act=None)
  spec = PolicySpec("bopo", lam=0.1, update=1, rollout=True)
  bopo.roll_out(source, learner, Planned(spec, []))


CASES = [
  # Stored data.
  (
    "TMP/sandbox has no profile: run --stage=profile first",
    command,
    "--config=sandbox.py",
    "--stage=report",
  ),
  (
    "TMP/quickstart lacks references of 1 hard tasks: run --stage=references",
    load_references,
  ),
  (
    "there are no stored episodes to learn from: run --stage=references first",
    lambda tmp: next(draw_batches([], 4, seed=0)),
  ),
  (
    "BoPO, λ 0.1, training seed 0, update 1: no task has 2 episodes: "
    "correct the errors above, and run the same command again",
    roll_out,
  ),
  # Checkpoints.
  (
    CHECKPOINT.format("it has numbers that are not finite"),
    restore_numbers_that_are_not_finite,
  ),
  (
    CHECKPOINT.format("..."),
    restore_a_damaged_checkpoint,
  ),
  # tests/test_checkpoint.py has the error of a full disk: Orbax needs its own process.
  (
    "sft stopped: update 3 has loss nan; last good checkpoint: none; "
    "train again with a lower learning rate under another --config.name",
    lambda tmp: check_metrics("sft", 3, {"loss": math.nan, "gradient_norm": 1.0}),
  ),
  (
    "TMP/checkpoints/sft has no finished router: run --stage=sft first",
    lambda tmp: load_router(RouterFiles(tmp, Config(), mesh=None), "sft"),
  ),
  (
    HEADS.format("[Errno 2] ..."),
    load_heads,
  ),
  # The heads of another version read inputs of another width.
  (
    HEADS.format("another version wrote it"),
    load_heads,
    *[np.ones((1, 99, 1))] * 20,
  ),
  # The configuration of ablations.
  (
    "--config.baselines.ablations must be without no-hard-bonus: "
    "this configuration leaves that part out already",
    command,
    "--config.bopo.r_hard=0.0",
    "--config.baselines.ablations=('no-hard-bonus',)",
  ),
  # Functions of losses and rewards, called with wrong values.
  (
    "ratio_level is 'token'; use 'trajectory' or 'decision'",
    lambda tmp: losses.policy_loss(
      jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.ones(1), jnp.ones((1, 2), bool), "token"
    ),
  ),
  (
    "got no trials: pass at least one of always-SMALL and one of always-LARGE",
    lambda tmp: rewards.difficulty([True], []),
  ),
  (
    "got rewards [ 0. nan] and reference reward 1.0:"
    " pass one non-empty group of finite numbers",
    lambda tmp: rewards.reference_advantage([0.0, math.nan], 1.0),
  ),
]
