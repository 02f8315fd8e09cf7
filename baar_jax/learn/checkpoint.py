"""Save and restore checkpoints of trainings (Orbax), and arrays in files of NumPy."""

import contextlib
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from baar_jax.mesh import exchange
from baar_jax.router.qwen2 import check_finite

SAVE_EVERY_S = 600  # the seconds between two checkpoints, if updates take long


# Messages about checkpoints. The first {} is the newest checkpoint's directory, the
# second {} is the reason.
READING = (
  "cannot read checkpoint {} ({}): remove this directory and run the same command"
  " again, to continue from the previous checkpoint"
)
WRITING = (
  "cannot write a checkpoint; the newest is {} ({}): "
  "free disk space and run the same command again"
)


class Checkpoints:
  """Keep the newest two checkpoints of a training.

  A checkpoint gets its final name when it is complete. So the previous checkpoint stays
  intact if the process is killed during a save.
  """

  def __init__(self, directory: Path, create: bool = False) -> None:
    """Open the directory of a training's checkpoints.

    Args:
      directory: the directory of the checkpoints.
      create: whether to make the directory if it is missing.
    """
    self.directory = directory.absolute()
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=create)
    self._manager = ocp.CheckpointManager(self.directory, options=options)
    self._saved_s = monotonic()

  @property
  def last_update(self) -> int:
    """Return the number of updates in the newest checkpoint; 0 if there is none."""
    return self._manager.latest_step() or 0

  @property
  def newest(self) -> str:
    """Return the newest checkpoint's directory, or "none"."""
    return f"{self.directory}/{self.last_update}" if self.last_update else "none"

  @property
  def progress(self) -> dict:
    """Return the progress that the newest checkpoint has; {} if there is no checkpoint.

    Raises:
      ValueError: the checkpoint cannot be read.
    """
    if not self.last_update:
      return {}
    return self._read({"progress": ocp.args.JsonRestore()})["progress"]

  def is_due(self, update: int, every: int) -> bool:
    """Tell whether to save: after `every` updates, or after `SAVE_EVERY_S`.

    All processes must call this function together. The clock of the first one decides.

    Args:
      update: the number of updates so far.
      every: the number of updates between two checkpoints.
    """
    late = exchange(monotonic() - self._saved_s >= SAVE_EVERY_S)[0]
    return late or update - self.last_update >= every

  def save(self, update: int, state: Mapping, **progress: float) -> None:
    """Write a checkpoint, on a GPU in the background.

    Args:
      update: the number of updates so far, the name of the checkpoint.
      state: pytrees of arrays, by name.
      progress: values to store as JSON; `finished=True` marks the end of the training.

    Raises:
      ValueError: a checkpoint cannot be written. A later `save`, or `close`, may raise
        this error instead.
    """
    trees = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
    trees["progress"] = ocp.args.JsonSave(progress)
    with self.explain(WRITING):
      self._manager.save(update, args=ocp.args.Composite(**trees))
      # On a CPU, arrays are written from where they are. So the next gradient step
      # would have to copy all that it overwrites.
      if jax.default_backend() == "cpu":
        self._manager.wait_until_finished()
    self._saved_s = monotonic()

  def restore(self, like: Mapping) -> dict:
    """Read pytrees of the newest checkpoint.

    Args:
      like: pytrees with the expected names, shapes, dtypes and shardings.

    Raises:
      ValueError: the checkpoint is damaged, has another structure, or has a number that
        is not finite.
    """
    trees = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
    return self._read(trees)

  def close(self) -> None:
    """Wait until all checkpoints are written, and close the directory.

    Raises:
      ValueError: a checkpoint cannot be written.
    """
    with self.explain(WRITING):
      self._manager.close()

  def _read(self, items: Mapping) -> dict:
    """Read named items of the newest checkpoint, and check their numbers."""
    with self.explain(READING):
      args = ocp.args.Composite(**items)
      composite = self._manager.restore(self.last_update, args=args)
      restored = {name: composite[name] for name in items}
      for x in jax.tree.leaves(restored):
        if isinstance(x, jax.Array) and not jnp.isfinite(x).all():
          raise ValueError("it has numbers that are not finite")
    return restored

  @contextlib.contextmanager
  def explain(self, problem: str) -> Iterator[None]:
    """Turn every exception of a checkpoint into a ValueError of one line.

    Orbax's exceptions have no common class, so every exception is caught.

    Args:
      problem: `READING` or `WRITING`.
    """
    try:
      yield
    except Exception as error:
      reason = textwrap.shorten(str(error) or repr(error), 250)
      raise ValueError(problem.format(self.newest, reason)) from error


def hide_repeated_errors() -> None:
  """Hide what Orbax's threads print of a failed read or write, whose error it raises.

  A command calls this before its work. It holds for the whole process.
  """
  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = lambda _: None


class ParameterFile:
  """Keep one version of a router's parameters in a file, not in memory.

  Each process has its own file, with the parts of its own devices. The file has no
  name, and ends with the process, so that no other training can read it.
  """

  def __init__(self, directory: Path) -> None:
    """Open an empty file on the disk of a directory."""
    self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115

  def write(self, params: Any) -> None:
    """Write a pytree of arrays over the one that the file has.

    Raises:
      OSError: the disk is full.
    """
    self._file.seek(0)
    for x in jax.tree.leaves(params):
      for shard in x.addressable_shards:
        np.save(self._file, shard.data)

  def read(self, like: Any) -> Any:
    """Read the arrays that were written last; without any, return `like`.

    Args:
      like: pytree of arrays with the shapes and shardings of those in the file.
    """
    if not self._file.tell():
      return like
    self._file.seek(0)

    def load(x: jax.Array) -> jax.Array:
      """Read the parts of one array onto their devices."""
      parts = []
      for shard in x.addressable_shards:
        parts.append(jax.device_put(np.load(self._file), shard.device))
      return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

    return jax.tree.map(load, like)


def save_arrays(path: Path, *arrays: np.ndarray | str) -> None:
  """Write arrays to a file, which gets its name when it is complete."""
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_suffix(".tmp.npz")
  np.savez(draft, *arrays)
  draft.replace(path)


@contextlib.contextmanager
def open_arrays(path: Path, stage: str) -> Iterator[list[np.ndarray]]:
  """Read the arrays of a file.

  Args:
    path: the file.
    stage: the stage that writes it.

  Raises:
    ValueError: the file is missing, or this or the block that reads it has failed.
  """
  try:
    with np.load(path) as stored:
      arrays = [*stored.values()]
    for x in arrays:
      if x.shape or x.dtype.kind != "U":
        check_finite(x, "arrays")
    yield arrays
  except (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OSError,
    EOFError,
    zipfile.BadZipFile,
  ) as error:
    problem = str(error).partition("\n")[0]
    raise ValueError(
      f"{path} is missing or damaged ({problem}): delete it if it exists, then run "
      f"--stage={stage}"
    ) from error
