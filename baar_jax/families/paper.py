"""The paper's routers: BoSFT, BoPO, and the ablations of BoPO."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

from baar_jax.config import Config, ablate
from baar_jax.episode import Episode
from baar_jax.families.family import (
  Lesson,
  OnPolicyFamily,
  RouterFamily,
  RouterSpec,
  learn_stored,
)
from baar_jax.paper import bopo, losses
from baar_jax.paper.sft import mix_batches
from baar_jax.rollout.jobs import BOPO, SFT
from baar_jax.run import RouterFiles, Run, load_profiles, load_references


def draw_references(run: Run, files: RouterFiles) -> Lesson:
  """Draw batches of references for the SFT router of a training seed.

  The loss on dev is measured on one batch of references of dev tasks, with the same
  share of hard tasks as in training.

  Raises:
    ValueError: references are missing.
  """
  size = files.config.sft.batch_episodes
  seed = files.config.seed
  train = load_pools(run, files.config, "train")
  dev = load_pools(run, files.config, "dev")
  # The dev batch has at least as many episodes as there are dev tasks.
  dev_size = max(size, sum(map(len, dev)))
  dev_batch = next(mix_batches(*dev, dev_size, seed=seed))
  return Lesson(mix_batches(*train, size, seed=seed), dev_batch)


class BoSFT(RouterFamily):
  """The router that imitates the reference trajectories (paper: BoSFT)."""

  stage = SFT
  prepare = staticmethod(draw_references)


def load_pools(
  run: Run, config: Config, split: str
) -> tuple[list[Episode], list[Episode]]:
  """Load the references of a split: those of hard tasks, and those of other tasks."""
  profiles = load_profiles(run.store, config, split)
  hard = []
  rest = []
  for id_, episode in load_references(run.store, config, profiles).items():
    pool = hard if profiles[id_].hard else rest
    pool.append(episode)
  return hard, rest


class BoPO(OnPolicyFamily):
  """The router that learns from its own episodes, with references (paper: BoPO)."""

  stage: ClassVar[str] = BOPO
  update: ClassVar[Callable] = staticmethod(bopo.bopo)
  loss: ClassVar[Callable] = staticmethod(losses.bopo_loss)


@dataclasses.dataclass(frozen=True)
class Ablation(BoPO):
  """BoPO without one part; its name is a key of `config.ABLATIONS`.

  The paper has ablations in ScienceWorld alone; here every environment may have them.
  """

  stage: ClassVar[str] = "baselines"

  def points(self, config: Config) -> Iterator[RouterSpec]:
    """Yield the policies without a cap; none unless the configuration names them."""
    if self.name in config.baselines.ablations:
      yield from (spec for spec in super().points(config) if not spec.cap)

  def configure(self, run: Run, files: RouterFiles) -> RouterFiles:
    """Leave out the part; train an SFT router too, if the references change."""
    config = ablate(files.config, self.name)
    files = dataclasses.replace(files, config=config, ablation=self.name)
    if files.sft_family != SFT:
      learn_stored(run, files, files.sft_family, draw_references)
    return files
