"""The part of a run that a training reads and reports to; a `Run` builds it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import Mesh
from tqdm import tqdm

from baar_jax.config import Config, ablate
from baar_jax.episode import Episode
from baar_jax.rollout.specs import Job, PolicySpec
from baar_jax.rollout.turn import Policy
from baar_jax.router.view import View
from baar_jax.store import Store
from baar_jax.train.jobs import SFT

FIXED = ("pretrain", "value", SFT)  # a run cannot change their settings
UNSTRATIFIED = "no-stratified"  # the ablation that changes SFT's references


@dataclasses.dataclass(frozen=True)
class RouterFiles:
  """The routers of one training seed in a run's directory."""

  directory: Path  # the run's
  config: Config
  mesh: Mesh
  number: int = 0  # the training seed

  @property
  def tokenizer(self) -> Path:
    """Return the directory of the tokenizer."""
    return self.directory / "tokenizer"

  def open_view(self, proposals: bool = False) -> View:
    """Open the view that a router reads; a cascade's scorer is shown proposals."""
    models = len(self.config.models.names)
    return View(self.config.router, self.tokenizer, proposals, models)

  def open_trunk_view(self) -> View:
    """Open the view of the value heads' trunk: its text is the same under each cap."""
    router = dataclasses.replace(self.config.router, show_budget=False)
    config = dataclasses.replace(self.config, router=router)
    return dataclasses.replace(self, config=config).open_view()

  def checkpoints(self, family: str, lam: float | None = None) -> Path:
    """Return the directory of a router's checkpoints.

    That of a rival that learns from stored episodes names its number of updates, which
    may change within a run: with another number it is trained anew.

    Args:
      family: "pretrain", "value", "sft", "bopo", a rival, or an ablation; of an SFT
        router of an ablation `Training.sft_family`.
      lam: the weight of cost, if the family has several.
    """
    name = family
    if lam is None and not family.startswith(FIXED):
      name += f"-{self.config.baselines.updates}"
    if lam is not None:
      name += f"-lam{lam:g}"
    if self.number:
      name += f"-seed{self.number}"
    return self.directory / "checkpoints" / name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(RouterFiles):
  """One training seed of a run, perhaps of an ablation: what it reads and reports to.

  The seed and the left-out part of the method are already in `config`.
  """

  store: Store
  live_episodes: int
  is_main: bool  # this process writes files
  log: Callable[..., None]  # appends named values to the run's metrics
  progress: Callable[[str, int, int, str], tqdm]  # title, total, done, unit
  print: Callable[[str], None]
  # `Run.collect`: title, policy, jobs, and what builds the policy -> their episodes.
  collect: Callable[
    [str, PolicySpec, Sequence[Job], Callable[[PolicySpec], Policy]], list[Episode]
  ]
  ablation: str = ""  # a key of `config.ABLATIONS`

  def ablate(self, name: str) -> "Training":
    """Return the training without one part of the method."""
    log = functools.partial(self.log, ablation=name)
    config = ablate(self.config, name)
    return dataclasses.replace(self, config=config, log=log, ablation=name)

  @property
  def models(self) -> int:
    """Return the number of models."""
    return len(self.config.models.names)

  @property
  def sft_family(self) -> str:
    """Return the family of the SFT router that the training starts from."""
    return f"{SFT}-{self.ablation}" if self.ablation == UNSTRATIFIED else SFT
