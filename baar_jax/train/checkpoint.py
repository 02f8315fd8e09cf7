"""Checkpoints of a router: parameters, optimizer, update, and the config beside them (Orbax)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import orbax.checkpoint as ocp

from baar_jax.config import Config


class Checkpoints:
  """The checkpoints of one training run, in a directory of their own; the newest two are kept.

  Each is written to a temporary directory and renamed when it is whole, so that a kill leaves
  the one before.
  """

  def __init__(self, directory: Path, config: Config | None = None):
    """Opens the directory; it is created if a config, saved with every checkpoint, is given."""
    self._directory = directory.absolute()
    self._config = config
    self._manager = ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(max_to_keep=2, create=config is not None),
    )

  @property
  def update(self) -> int | None:
    """The number of updates in the newest checkpoint, None if there is none."""
    return self._manager.latest_step()

  def save(self, update: int, state: Mapping) -> None:
    """Writes a checkpoint of named pytrees of arrays, in the background."""
    self._manager.save(
      update,
      args=ocp.args.Composite(
        **{name: ocp.args.StandardSave(tree) for name, tree in state.items()},
        config=ocp.args.JsonSave(dataclasses.asdict(self._config)),
      ),
    )

  def restore(self, like: Mapping) -> dict:
    """The newest checkpoint's pytrees.

    Args:
      like: by name, pytrees of the same structure, shapes and dtypes, arrays or abstract; what is
        not named is not read. Arrays come back with the shardings of these.

    Raises:
      ValueError: there is none, or it cannot be read into that structure.
    """
    if self.update is None:
      raise ValueError(f"{self._directory} holds no checkpoint")
    try:
      found = self._manager.restore(
        self.update,
        args=ocp.args.Composite(
          **{name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
        ),
      )
      return {name: found[name] for name in like}
    except (ValueError, KeyError, OSError, TypeError) as error:
      reason = str(error).splitlines()[0]
      raise ValueError(
        f"checkpoint {self._directory / str(self.update)} cannot be read ({reason}); "
        "remove that directory to go on from the one before"
      ) from error

  def close(self) -> None:
    """Waits until everything is written."""
    self._manager.wait_until_finished()
    self._manager.close()
