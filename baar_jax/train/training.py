"""What a training gets of its run; a `Run` builds it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from tqdm import tqdm

from baar_jax.config import ablate
from baar_jax.episode import Episode
from baar_jax.rollout.live import Policy
from baar_jax.rollout.specs import Job
from baar_jax.store import Store
from baar_jax.train.checkpoint import RouterFiles

UNSTRATIFIED = "no-stratified"  # the ablation that changes what SFT imitates


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
  # Runs the jobs that are not stored yet: title, policy, jobs -> the episodes of all.
  collect: Callable[[str, Policy, Sequence[Job]], list[Episode]]
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
    return f"sft-{self.ablation}" if self.ablation == UNSTRATIFIED else "sft"
