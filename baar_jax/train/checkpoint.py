"""Checkpoints (Orbax) of parameters, optimizer and progress; the routers in them."""

import contextlib
import logging
import math
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from baar_jax.mesh import split_parameters
from baar_jax.router import weights
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.train.jobs import BOPO, SFT
from baar_jax.train.training import RouterFiles

READING = "cannot be read ({}); remove that directory to go on from the one before"
WRITING = (
  "stays the newest, none can be written ({}); "
  "make room there and run the command again"
)


class Checkpoints:
  """The newest two checkpoints of a training.

  Each is renamed when it is whole: a kill leaves the one before.
  """

  def __init__(self, directory: Path, create: bool = False) -> None:
    """Open the directory; with `create` it may be missing."""
    self.directory = directory.absolute()
    for name in ("absl", "asyncio"):  # Orbax logs with a traceback what it also raises
      logging.getLogger(name).setLevel(logging.CRITICAL)
    # Coroutines of a save that has failed.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=create)
    self._manager = ocp.CheckpointManager(self.directory, options=options)

  @property
  def last_update(self) -> int:
    """Return the number of updates in the newest checkpoint, 0 if there is none."""
    return self._manager.latest_step() or 0

  @property
  def newest(self) -> str:
    """Return the newest checkpoint's directory, or "none"."""
    return f"{self.directory}/{self.last_update}" if self.last_update else "none"

  @property
  def progress(self) -> dict:
    """Return what was saved beside the newest arrays; empty if there is none."""
    if not self.last_update:
      return {}
    return self._read({"progress": ocp.args.JsonRestore()})["progress"]

  def save(self, update: int, state: Mapping, **progress: float) -> None:
    """Write named pytrees of arrays, and progress as JSON, in the background.

    With `finished=True` the training has come to its end.

    Raises:
      ValueError: it cannot be written; perhaps at a later save or at `close`.
    """
    trees = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
    trees["progress"] = ocp.args.JsonSave(progress)
    with self._explain(WRITING):
      self._manager.save(update, args=ocp.args.Composite(**trees))

  def restore(self, like: Mapping) -> dict:
    """Read the newest checkpoint's pytrees.

    Args:
      like: pytrees with the names, shapes, dtypes and shardings to read.

    Raises:
      ValueError: it cannot be read so, or a number in it is not finite.
    """
    trees = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
    return self._read(trees)

  def close(self) -> None:
    """Wait until everything is written."""
    with self._explain(WRITING):
      self._manager.close()

  def _read(self, items: Mapping) -> dict:
    """Read named items of the newest checkpoint; their arrays must be finite."""
    with self._explain(READING):
      args = ocp.args.Composite(**items)
      composite = self._manager.restore(self.last_update, args=args)
      restored = {name: composite[name] for name in items}
      for x in jax.tree.leaves(restored):
        if isinstance(x, jax.Array) and not jnp.isfinite(x).all():
          raise ValueError("it holds numbers that are not finite")
    return restored

  @contextlib.contextmanager
  def _explain(self, problem: str) -> Iterator[None]:
    """Raise ValueError, of one line, for all that Orbax raises.

    Its exceptions have no common class.
    """
    # If one read fails, the others in flight find their event loop closed.
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
      yield
      sys.unraisablehook = hook
    except Exception as error:
      reason = textwrap.shorten(str(error) or repr(error), 250)
      raise ValueError(f"checkpoint {self.newest} {problem.format(reason)}") from error


def check_metrics(
  stage: str, update: int, metrics: Mapping[str, float], newest: str = "none"
) -> None:
  """Raise ValueError, in every process, unless all metrics of an update are finite."""
  bad = [
    f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value)
  ]
  if bad:
    stop = f"{stage} stopped: update {update} has {', '.join(bad)}"
    advice = "set a lower learning rate under another --config.name"
    raise ValueError(f"{stop}; last good checkpoint: {newest}; {advice}")


def load_initial(files: RouterFiles, view: View) -> Qwen2:
  """Load the router that SFT starts from.

  Unless it has all layers of pretrained weights, its decision tokens get equal rows
  (our choice). So all are equally probable, and past ones do not at first predict the
  next one.
  """
  config = files.config
  if config.router.weights:
    model = weights.load_pretrained(view, files.mesh)
    if not config.router.layers:
      return model
  elif config.pretrain.epochs > 0:
    model = load_router(files, "pretrain")
  else:
    model = weights.build_model(config.router, config.seed)
  weights.set_rows(
    model, view.decision_ids, [view.decision_ids] * len(view.decision_ids)
  )
  return model


def load_router(files: RouterFiles, family: str, lam: float | None = None) -> Qwen2:
  """Load a trained router; family and lam are as of `RouterFiles.checkpoints`.

  Raises:
    ValueError: its training has not ended, or it cannot be read.
  """
  with open_finished(files, family, lam) as checkpoints:
    shape = weights.find_shape(files.config.router, files.open_view().decision_ids)
    graphdef, like = nnx.split(weights.make_abstract_model(shape))
    shardings = split_parameters(like, files.mesh)
    like = jax.tree.map(
      lambda x, sharding: x.update(sharding=sharding), like, shardings
    )
    restored = checkpoints.restore({"params": nnx.to_pure_dict(like)})
  nnx.replace_by_pure_dict(like, restored["params"])
  return nnx.merge(graphdef, like)


@contextlib.contextmanager
def open_finished(
  files: RouterFiles, family: str, lam: float | None = None
) -> Iterator[Checkpoints]:
  """Open the checkpoints of a trained router, without its parameters.

  Raises:
    ValueError: its training has not ended.
  """
  directory = files.checkpoints(family, lam)
  with contextlib.closing(Checkpoints(directory)) as checkpoints:
    if not checkpoints.progress.get("finished"):
      stage = family if family in ("pretrain", SFT, BOPO) else "baselines"
      problem = f"{directory} holds no finished router"
      raise ValueError(f"{problem}: run --stage={stage} first")
    yield checkpoints
