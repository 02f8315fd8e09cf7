"""Which episodes each stage plays: declared once, for the stages and the dry run."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baar_jax.config import Config, SamplePlan
from baar_jax.episode import Task
from baar_jax.rollout.specs import Cap, Job, PolicySpec

SFT = "sft"
BOPO = "bopo"
ALWAYS = "always"  # an intermediate model
COMPARED = "compared"  # BoPO's points at the weight of cost of the ablations
ALWAYS_SMALL = PolicySpec("always-small")
ALWAYS_LARGE = PolicySpec("always-large")
BOUNDARIES = (ALWAYS_SMALL, ALWAYS_LARGE)
BOUNDARY_KEYS = (ALWAYS_SMALL.key, ALWAYS_LARGE.key)
FIRST_LARGE = "first-large"  # always-large under a cap: LARGE for the first K calls


def cap_spec(spec: PolicySpec, cap: Cap) -> PolicySpec:
  """Return a policy under a cap; always-LARGE becomes First-Large."""
  if spec == ALWAYS_LARGE and cap:
    return PolicySpec(FIRST_LARGE, cap=cap)
  return spec.under(cap)


class Planned(NamedTuple):
  """Episodes that a policy has to play."""

  spec: PolicySpec
  jobs: Sequence[Job]


@dataclasses.dataclass(frozen=True)
class ProfiledTasks:
  """Tasks by their difficulty in the profile."""

  hard: Sequence[Task]  # of all splits
  rest: Sequence[Task]


def count_trials(config: Config) -> int:
  """Count the trials of each boundary that the profile plays on a task."""
  return max((config.profile.trials, *config.profile.robustness))


def list_profile(config: Config, tasks: Iterable[Task]) -> list[Planned]:
  """List both boundaries' trials of training and dev tasks (paper: K trials each)."""
  trials = range(count_trials(config))
  jobs = [Job(task, "profile", k) for task in tasks for k in trials]
  return [Planned(spec, jobs) for spec in BOUNDARIES]


def stratified_spec(config: Config) -> PolicySpec:
  """Return the policy that plays the paper's stratified samples."""
  plan = SamplePlan("samples", config.references.samples)
  return PolicySpec("stratified", plans=(plan,))


def exploration_specs(config: Config) -> tuple[PolicySpec, PolicySpec]:
  """Return the policies that explore hard training tasks, and the others (our choice).

  Hard tasks have the paper's samples already.
  """
  plans = config.references.plans
  hard = tuple(plan for plan in plans if plan.kind != "samples")
  rest = tuple(plan for plan in plans if plan.all_tasks)
  explore_hard = PolicySpec("exploration", plans=hard)
  return explore_hard, PolicySpec("exploration-all", plans=rest)


def list_references(config: Config, tasks: ProfiledTasks) -> list[Planned]:
  """List the samples of tasks: those to choose references from, and the exploration."""
  hard_train = [task for task in tasks.hard if task.split == "train"]
  rest_train = [task for task in tasks.rest if task.split == "train"]
  explore_hard, explore_rest = exploration_specs(config)
  planned = [_list_samples(explore_hard, "exploration", hard_train)]
  if not config.references.clone_large:
    stratified = _list_samples(stratified_spec(config), "reference", tasks.hard)
    planned = [
      stratified,
      _list_samples(explore_rest, "exploration", rest_train),
      *planned,
    ]
  return planned


def _list_samples(spec: PolicySpec, purpose: str, tasks: Sequence[Task]) -> Planned:
  """List all samples of a policy's plans, on each task."""
  count = sum(plan.count for plan in spec.plans)
  trials = range(1, count + 1)
  return Planned(spec, [Job(task, purpose, k) for task in tasks for k in trials])


def rollout_spec(
  family: str, lam: float, update: int, training_seed: int = 0
) -> PolicySpec:
  """Return the policy whose episodes are rolled out for an update."""
  seed = training_seed or None
  return PolicySpec(family, lam=lam, seed=seed, update=update, rollout=True)


def list_rollouts(config: Config, spec: PolicySpec, tasks: Sequence[Task]) -> Planned:
  """List the episodes of an update: a group of each task (paper: group size 8)."""
  size = config.bopo.group_size
  first = size * (spec.update - 1)  # each update has other seeds
  trials = range(first, first + size)
  seed = spec.seed or 0
  jobs = [Job(task, "rollout", k, seed) for task in tasks for k in trials]
  return Planned(spec, jobs)


def list_evaluation(
  config: Config, tasks: Sequence[Task], split: str, training_seed: int = 0
) -> list[Job]:
  """List a policy's episodes on a split; the n-th trial plays one of the trainings."""
  tasks = tasks[: config.evaluate.tasks or None]
  trials = range(training_seed, config.evaluate.seeds, config.train_seeds)
  return [Job(task, split, k) for task in tasks for k in trials]


def list_ranks(config: Config, name: str = ALWAYS) -> list[PolicySpec]:
  """List the policies in which an intermediate model always acts."""
  ranks = range(2, len(config.models.names))
  return [PolicySpec(name, rank=rank) for rank in ranks]


def list_ranked_trials(config: Config, tasks: Sequence[Task]) -> list[Planned]:
  """List trials of the intermediate models, numbered as those of the boundaries."""
  trials = range(config.profile.trials)
  jobs = [Job(task, "profile", k) for task in tasks for k in trials]
  return [Planned(spec, jobs) for spec in list_ranks(config)]
