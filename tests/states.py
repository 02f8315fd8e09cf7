"""Save and restore states like those of a training, by the number of their update."""

import contextlib
from pathlib import Path

import jax.numpy as jnp

from baar_jax.learn.checkpoint import Checkpoints


def state(value: float):
  """A tree like that of a training: named and numbered leaves, and a scalar."""
  kernel = jnp.full((2, 30, 7), value, jnp.float32)
  params = {"layers": {"kernel": kernel}, "norm": jnp.ones(5)}
  optimizer = [jnp.array(int(value)), jnp.arange(6, dtype=jnp.float32) * value]
  return {"params": params, "optimizer": optimizer}


def save(directory: Path, *updates: int) -> None:
  """Write a checkpoint of each update, whose state has the update's number."""
  with contextlib.closing(Checkpoints(directory, create=True)) as checkpoints:
    for update in updates:
      checkpoints.save(update, state(update))


def restore(directory: Path, like=None):
  """Read the newest checkpoint: the number of its update, and its state."""
  with contextlib.closing(Checkpoints(directory)) as checkpoints:
    return checkpoints.last_update, checkpoints.restore(like or state(0))
