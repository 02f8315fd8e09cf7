"""List every policy family, and the policies that a configuration evaluates.

The dry run, the stages and the report take all families from `FAMILIES`. To add a rule,
write its function and a row in rules.py. To add a rival that learns, write its file and
a row here.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from baar_jax.config import RECORDED, STORED, ZERO_SHOT, Config, ablate, require
from baar_jax.episode import Episode
from baar_jax.families.cascade import Cascade
from baar_jax.families.conditioned import Conditioned
from baar_jax.families.family import (
  BoPO,
  Family,
  Lesson,
  RouterFamily,
  RouterSpec,
  learn_stored,
)
from baar_jax.families.foresight import (
  CLAIRVOYANT,
  KNOWS_FUNCTION,
  SCHEDULE,
  Foresight,
)
from baar_jax.families.rules import RULES
from baar_jax.families.single_turn import SingleTurn
from baar_jax.families.vanilla import Vanilla
from baar_jax.families.zero_shot import ZeroShot
from baar_jax.paper.sft import mix_batches
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import SFT
from baar_jax.rollout.policy import Build
from baar_jax.rollout.specs import PolicySpec
from baar_jax.run import (
  UNSTRATIFIED,
  RouterFiles,
  Run,
  load_profiles,
  load_references,
)


class BoSFT(RouterFamily):
  """The router that imitates the reference trajectories (paper: BoSFT)."""

  stage: ClassVar[str] = SFT

  def prepare(self, run: Run, files: RouterFiles) -> Lesson:
    """Draw batches of references for the SFT router of a training seed.

    The loss on dev is measured on one batch of references of dev tasks, with the same
    share of hard tasks as in training.

    Raises:
      ValueError: references are missing.
    """
    size = files.config.sft.batch_episodes
    seed = files.seed
    train = load_pools(files, "train")
    dev = load_pools(files, "dev")
    # The dev batch has at least as many episodes as there are dev tasks.
    dev_size = max(size, sum(map(len, dev)))
    dev_batch = next(mix_batches(*dev, dev_size, seed=seed))
    return Lesson(mix_batches(*train, size, seed=seed), dev_batch)


def load_pools(files: RouterFiles, split: str) -> tuple[list[Episode], list[Episode]]:
  """Load the references of a split: those of hard tasks, and those of other tasks."""
  profiles = load_profiles(files.store, files.config, split)
  references = load_references(files.store, files.config, profiles)
  hard = []
  rest = []
  for id_, episode in references.items():
    pool = hard if profiles[id_].hard else rest
    pool.append(episode)
  return hard, rest


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
    if self.name == UNSTRATIFIED:
      learn_stored(run, files, FAMILIES[SFT])
    return files


ROWS = [
  *RULES,
  Foresight(CLAIRVOYANT, "clairvoyant"),
  Foresight(KNOWS_FUNCTION, "knows the function"),
  Foresight(SCHEDULE, "best schedule"),
  ZeroShot(ZERO_SHOT, "zero-shot router", is_rival=True),
  Conditioned(jobs.CONDITIONED, "budget-conditioned router"),
  BoSFT(jobs.SFT, "BoSFT"),
  BoPO(jobs.BOPO, "BoPO"),
  Cascade("cascade", "cascade", is_rival=True),
  SingleTurn("single-turn", "single-turn classifier", is_rival=True),
  Vanilla(jobs.VANILLA, "vanilla RL", is_rival=True),
  Ablation("no-stratified", "no stratified sampling"),
  Ablation("no-reference", "no reference advantage"),
  Ablation("no-hard-bonus", "no hard bonus"),
]
FAMILIES = {family.name: family for family in ROWS}


def list_families(config: Config) -> list[Family]:
  """Return the families of a run: rivals only if the configuration names them."""
  rivals = config.baselines.rivals
  return [row for row in ROWS if not row.is_rival or row.name in rivals]


def list_specs(config: Config) -> list[PolicySpec]:
  """Return all policies to evaluate, in the order of `FAMILIES`.

  Policies of the same router are adjacent.
  """
  specs = {}
  for family in list_families(config):
    for spec in family.points(config):
      # Values that are equal in six digits give the same key, and so are one policy.
      specs[spec.key] = spec
  return [*specs.values()]


def list_trained(config: Config) -> list[Family]:
  """Return the families that learn and are evaluated."""
  families = [family for family in list_families(config) if family.stage]
  return [family for family in families if [*family.points(config)]]


def open_with(files: RouterFiles) -> Build:
  """Return a function that opens policies with the routers of a training seed."""
  return lambda spec: FAMILIES[spec.family].open(spec, files)


def train(run: Run, stage: str) -> None:
  """Train the families of a stage, unless that was done."""
  for family in list_trained(run.config):
    if family.stage == stage:
      run.require("references")
      family.train(run)
  run.store.finish(stage)


def require_trained(run: Run) -> None:
  """Raise an error unless all trainings have ended; a recorded run needs none.

  Raises:
    ValueError: a training has not ended.
  """
  if run.config.env.kind != STORED:
    for family in list_trained(run.config):
      run.require(family.stage)


def check_baselines(config: Config) -> None:
  """Check the names of rivals, and that each ablation changes the configuration.

  Raises:
    ValueError: a rival is not in `FAMILIES` or needs value heads that are not trained,
      or the configuration already lacks the part that an ablation leaves out.
  """
  baselines = config.baselines
  names = sorted(family.name for family in ROWS if family.is_rival)
  are_rivals = {*names}.issuperset(baselines.rivals)
  require(are_rivals, "baselines.rivals", f"some of {', '.join(names)}")
  has_judge = ZERO_SHOT not in baselines.rivals or config.models.kind != RECORDED
  require(has_judge, "baselines.rivals", f"without {ZERO_SHOT} with recorded models")
  for name in baselines.ablations:
    requirement = f"without {name}: this configuration leaves that part out already"
    require(ablate(config, name) != config, "baselines.ablations", requirement)
