"""Checkpoints of a router (Orbax): parameters, optimizer and progress."""

import contextlib
import logging
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from baar_jax.config import Config
from baar_jax.mesh import split_parameters
from baar_jax.router import weights
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View, open_view

READING = "checkpoint {directory}/{update} cannot be read ({reason}); "
READING += "remove that directory to go on from the one before"
WRITING = "no checkpoint after update {update} can be written to {directory} ({reason}); "
WRITING += "make room there and run the same command again"
UNSTRATIFIED = "no-stratified"  # the ablation that changes what SFT imitates


class Checkpoints:
  """The checkpoints of one training run in one directory; the newest two are kept.

  Each is written under another name and renamed when it is whole: a kill leaves the one before.
  """

  def __init__(self, directory: Path, create: bool = False):
    self.directory = directory.absolute()
    for name in ("absl", "asyncio"):  # Orbax logs with a traceback what it also raises
      logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # of what has failed
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=create)
    self._manager = ocp.CheckpointManager(self.directory, options=options)

  @property
  def update(self) -> int:
    """The number of updates in the newest checkpoint, 0 if there is none."""
    return self._manager.latest_step() or 0

  @property
  def progress(self) -> dict:
    """What the newest checkpoint's training has to remember; empty if there is none."""
    if self.update == 0:
      return {}
    with self._explain(READING):
      args = ocp.args.Composite(progress=ocp.args.JsonRestore())
      return dict(self._manager.restore(self.update, args=args)["progress"])

  def save(self, update: int, state: Mapping, **progress) -> None:
    """Writes named pytrees of arrays and what JSON can hold in the background; ValueError, also
    later, if it cannot. With `finished=True` the training has come to its end."""
    trees = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
    trees["progress"] = ocp.args.JsonSave(progress)
    with self._explain(WRITING):
      self._manager.save(update, args=ocp.args.Composite(**trees))

  def restore(self, like: Mapping) -> dict:
    """The newest checkpoint's pytrees, of the names, shapes, dtypes and shardings of `like`.

    Raises ValueError if there is none, it cannot be read so, or a number in it is not finite.
    """
    if self.update == 0:
      raise ValueError(f"{self.directory} holds no checkpoint")
    trees = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
    with self._explain(READING):
      restored = self._manager.restore(self.update, args=ocp.args.Composite(**trees))
      restored = {name: restored[name] for name in like}
      if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(restored)):
        raise ValueError("it holds numbers that are not finite")
    return restored

  def close(self) -> None:
    """Waits until everything is written."""
    with self._explain(WRITING):
      self._manager.close()

  @contextlib.contextmanager
  def _explain(self, text: str) -> Iterator[None]:
    """Raises ValueError, of one line, for whatever Orbax raises: there is no common class."""
    # Where one read fails, the others in flight find their event loop closed, now or later.
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
      yield
      sys.unraisablehook = hook
    except Exception as error:
      reason = textwrap.shorten(str(error) or repr(error), 250)
      values = {"directory": self.directory, "update": self.update, "reason": reason}
      raise ValueError(text.format(**values)) from error


def checkpoint_directory(
  directory: Path, config: Config, family: str, lam=None, train_seed: int = 0
) -> Path:
  """Where in a run's directory the checkpoints of a router are; arguments as of `load_router`."""
  if family in ("cascade", "single-turn"):
    family += f"-{config.baselines.updates}"
  family += "" if lam is None else f"-lam{lam:g}"
  return directory / "checkpoints" / (f"{family}-seed{train_seed}" if train_seed else family)


def sft_family(ablation: str) -> str:
  """The SFT router that an ablation starts from; "" is no ablation."""
  return f"sft-{ablation}" if ablation == UNSTRATIFIED else "sft"


def load_initial(
  directory: Path, config: Config, view: View, mesh: Mesh, train_seed: int = 0
) -> Qwen2:
  """The router that SFT starts from: a checkpoint's, or one whose decisions start alike, because it
  is small, or lacks the last layers, whose output the words' rows are for.

  Raises ValueError if it is still to be pretrained, or the checkpoint cannot be loaded.
  """
  if config.router.weights:
    model = weights.load_pretrained(view, mesh)
    if not config.router.layers:
      return model
  elif config.pretrain.epochs > 0:
    model = load_router(directory, config, mesh, "pretrain", train_seed=train_seed)
  else:
    model = weights.build_model(config.router, config.seed)
  weights.start_alike(model, view.decision_ids)
  return model


def load_router(
  directory: Path, config: Config, mesh: Mesh, family: str, lam=None, train_seed: int = 0
) -> Qwen2:
  """The trained router of a run's directory: of its newest checkpoint, the parameters alone.

  `family` is of `sft_family`, "pretrain", "bopo", a rival or an ablation, and `lam` the weight of
  cost where a family has several. Raises ValueError if its training has not come to its end.
  """
  stage = family if family in ("pretrain", "sft", "bopo") else "baselines"
  decision_ids = open_view(config, directory / "tokenizer").decision_ids
  place = checkpoint_directory(directory, config, family, lam, train_seed)
  if place.exists():
    with contextlib.closing(Checkpoints(place)) as checkpoints:
      if checkpoints.progress.get("finished"):
        shape = weights.find_shape(config.router, decision_ids)
        graphdef, params = nnx.split(weights.make_abstract_model(shape))
        place_leaf = lambda x, sharding: x.update(sharding=sharding)  # noqa: E731
        like = jax.tree.map(place_leaf, params, split_parameters(params, mesh))
        restored = checkpoints.restore({"params": nnx.to_pure_dict(like)})
        nnx.replace_by_pure_dict(like, restored["params"])
        return nnx.merge(graphdef, like)
  raise ValueError(f"{place} holds no finished router: run --stage={stage} first")
