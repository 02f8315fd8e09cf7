"""Checkpoints (Orbax) of parameters, optimizer and progress, and the routers that they hold."""

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
from jax.sharding import Mesh

from baar_jax.config import Config
from baar_jax.mesh import split_parameters
from baar_jax.router import weights
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View, open_view

READING = "cannot be read ({}); remove that directory to go on from the one before"
WRITING = "stays the newest, none can be written ({}); make room there and run the command again"
UNSTRATIFIED = "no-stratified"  # the ablation that changes what SFT imitates


class Checkpoints:
  """The newest two checkpoints of a training, each of which is renamed when it is whole: a kill
  leaves the one before."""

  def __init__(self, directory: Path, create: bool = False):
    self.directory = directory.absolute()
    for name in ("absl", "asyncio"):  # Orbax logs with a traceback what it also raises
      logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # of what has failed
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=create)
    self._manager = ocp.CheckpointManager(self.directory, options=options)

  @property
  def last_update(self) -> int:
    """The number of updates in the newest checkpoint, 0 if there is none."""
    return self._manager.latest_step() or 0

  @property
  def newest(self) -> str:
    """The newest checkpoint's directory, or "none"."""
    return f"{self.directory}/{self.last_update}" if self.last_update else "none"

  @property
  def progress(self) -> dict:
    """What was saved beside the newest checkpoint's arrays; empty if there is none."""
    if not self.last_update:
      return {}
    args = ocp.args.Composite(progress=ocp.args.JsonRestore())
    with self._explain(READING):
      return dict(self._manager.restore(self.last_update, args=args)["progress"])

  def save(self, update: int, state: Mapping, **progress) -> None:
    """Writes named pytrees of arrays and what JSON can hold in the background; ValueError, also
    later, if it cannot. With `finished=True` the training has come to its end."""
    trees = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
    trees["progress"] = ocp.args.JsonSave(progress)
    with self._explain(WRITING):
      self._manager.save(update, args=ocp.args.Composite(**trees))

  def restore(self, like: Mapping) -> dict:
    """The newest checkpoint's pytrees, of the names, shapes, dtypes and shardings of `like`; a
    ValueError if it cannot be read so, or a number in it is not finite."""
    trees = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
    with self._explain(READING):
      restored = self._manager.restore(self.last_update, args=ocp.args.Composite(**trees))
      restored = {name: restored[name] for name in like}
      if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(restored)):
        raise ValueError("it holds numbers that are not finite")
    return restored

  def close(self) -> None:
    """Waits until everything is written."""
    with self._explain(WRITING):
      self._manager.close()

  @contextlib.contextmanager
  def _explain(self, problem: str) -> Iterator[None]:
    """Raises ValueError, of one line, for whatever Orbax raises: there is no common class."""
    # Where one read fails, the others in flight find their event loop closed, now or later.
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
      yield
      sys.unraisablehook = hook
    except Exception as error:
      reason = textwrap.shorten(str(error) or repr(error), 250)
      raise ValueError(f"checkpoint {self.newest} {problem.format(reason)}") from error


def check_metrics(stage: str, update: int, metrics: Mapping, newest: str = "none") -> None:
  """Raises ValueError, in every process, unless all metrics of an update are finite."""
  if bad := [f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value)]:
    stop = f"{stage} stopped: update {update} has {', '.join(bad)}; last good checkpoint: {newest}"
    raise ValueError(f"{stop}; set a lower learning rate under another --config.name")


def checkpoint_directory(directory, config: Config, family: str, lam=None, train_seed=0) -> Path:
  """Where in a run's directory the checkpoints of a router are; arguments as of `load_router`."""
  if family in ("cascade", "single-turn"):
    family += f"-{config.baselines.updates}"
  family += "" if lam is None else f"-lam{lam:g}"
  return directory / "checkpoints" / (f"{family}-seed{train_seed}" if train_seed else family)


def sft_family(ablation: str) -> str:
  """The SFT router that an ablation starts from; "" is no ablation."""
  return f"sft-{ablation}" if ablation == UNSTRATIFIED else "sft"


def load_initial(directory: Path, config: Config, view: View, mesh: Mesh, train_seed=0) -> Qwen2:
  """The router that SFT starts from. Unless it has all layers of pretrained weights, its decision
  tokens get equal rows (our choice), so that all are equally probable and past ones do not at first
  predict the next one."""
  if config.router.weights:
    model = weights.load_pretrained(view, mesh)
    if not config.router.layers:
      return model
  elif config.pretrain.epochs > 0:
    model = load_router(directory, config, mesh, "pretrain", train_seed=train_seed)
  else:
    model = weights.build_model(config.router, config.seed)
  weights.set_rows(model, view.decision_ids, [view.decision_ids] * len(view.decision_ids))
  return model


def load_router(
  directory: Path, config: Config, mesh: Mesh, family: str, lam=None, train_seed: int = 0
) -> Qwen2:
  """The trained router of a run's directory. Raises ValueError if its training has not ended.

  `family` is of `sft_family`, "pretrain", "bopo", a rival or an ablation, and `lam` the weight of
  cost where a family has several.
  """
  place = checkpoint_directory(directory, config, family, lam, train_seed)
  with contextlib.closing(Checkpoints(place)) as checkpoints:
    if checkpoints.progress.get("finished"):
      decision_ids = open_view(config, directory / "tokenizer").decision_ids
      shape = weights.find_shape(config.router, decision_ids)
      graphdef, like = nnx.split(weights.make_abstract_model(shape))
      shardings = split_parameters(like, mesh)
      like = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), like, shardings)
      restored = checkpoints.restore({"params": nnx.to_pure_dict(like)})
      nnx.replace_by_pure_dict(like, restored["params"])
      return nnx.merge(graphdef, like)
  stage = family if family in ("pretrain", "sft", "bopo") else "baselines"
  raise ValueError(f"{place} holds no finished router: run --stage={stage} first")
