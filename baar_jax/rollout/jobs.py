"""Declare the episodes that each stage plays, for the stages and for the dry run."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from baar_jax.config import Config, SamplePlan
from baar_jax.episode import Episode, Task
from baar_jax.rollout.rules import Build
from baar_jax.rollout.specs import Job, PolicySpec

SFT = "sft"
BOPO = "bopo"
VANILLA = "vanilla"
RANDOM = "random"
ALWAYS = "always"  # The family of policies with one intermediate model at all steps.
# In reports, BoPO's points without a cap, which the ablations are compared with.
COMPARED = "compared"
ALWAYS_SMALL = PolicySpec("always-small")
ALWAYS_LARGE = PolicySpec("always-large")
BOUNDARIES = (ALWAYS_SMALL, ALWAYS_LARGE)
BOUNDARY_KEYS = (ALWAYS_SMALL.key, ALWAYS_LARGE.key)
# The family of always-LARGE under a cap: LARGE acts until the cap is spent, then SMALL.
FIRST_LARGE = "first-large"
CONDITIONED = "conditioned"  # The family of the budget-conditioned router.
# The labels of the families in this file, for readers.
LABELS = {
  ALWAYS_SMALL.family: "always-SMALL",
  ALWAYS_LARGE.family: "always-LARGE",
  FIRST_LARGE: "First-Large",
  CONDITIONED: "budget-conditioned router",
  SFT: "BoSFT",
  BOPO: "BoPO",
}


def label_family(family: str) -> str:
  """Return a policy family's name for readers; by default the family itself."""
  return LABELS.get(family, family)


class Planned(NamedTuple):
  """A policy and the episodes that it plays in a stage.

  Attributes:
    spec: the policy.
    jobs: its trials of tasks; each is one episode.
  """

  spec: PolicySpec
  jobs: Sequence[Job]


class Source(Protocol):
  """Give the episodes that a stage needs: play them, or read recorded ones."""

  def episodes(
    self, title: str, planned: Sequence[Planned], build: Build
  ) -> list[Episode]:
    """Return the episodes of all jobs, ordered by policy, task and seed.

    Args:
      title: the name for readers, in the progress bar and in printed lines.
      planned: the policies and their jobs.
      build: makes a policy; it is called only if an episode has to be played.

    Raises:
      ValueError: episodes are missing and cannot be played.
    """


class ProfiledTasks(NamedTuple):
  """Separate the hard tasks of one or more splits from the rest.

  Attributes:
    hard: the hard tasks.
    rest: the easy and the intractable tasks.
  """

  hard: Sequence[Task]
  rest: Sequence[Task]


def list_profile(config: Config, tasks: Iterable[Task]) -> list[Planned]:
  """Return the profile's trials of both boundaries on tasks (paper: 5 trials each).

  Training tasks also get the new trials of `profile.robustness`.
  """
  jobs = []
  for task in tasks:
    jobs += [Job(task, "profile", k) for k in range(config.profile.trials)]
    if task.split == "train":
      for count in dict.fromkeys(config.profile.robustness):
        jobs += [Job(task, "robustness", k) for k in new_trials(count)]
  return [Planned(spec, jobs) for spec in BOUNDARIES]


def new_trials(count: int) -> range:
  """Return the numbers of the new trials for one number of `profile.robustness`.

  They follow the trials of all smaller counts, so two counts never share a trial (our
  choice; labels by nested trials would agree too well).

  Args:
    count: the number of trials.
  """
  first = count * (count - 1) // 2
  return range(first, first + count)


def stratified_spec(config: Config) -> PolicySpec:
  """Return the policy of the paper's stratified samples (paper Eq. 3).

  Sample k of N calls LARGE at each step with probability k / N.
  """
  plan = SamplePlan("samples", config.references.samples)
  return PolicySpec("stratified", plans=(plan,))


def exploration_specs(config: Config) -> tuple[PolicySpec, PolicySpec]:
  """Return the policies that explore training tasks for the value heads (our choice).

  Hard tasks already have the stratified samples, so their exploration leaves out the
  plan "samples".

  Returns:
    The policy for hard tasks, and the policy for all other tasks.
  """
  plans = config.references.plans
  hard = tuple(plan for plan in plans if plan.kind != "samples")
  rest = tuple(plan for plan in plans if plan.all_tasks)
  explore_hard = PolicySpec("exploration", plans=hard)
  return explore_hard, PolicySpec("exploration-all", plans=rest)


def list_references(config: Config, tasks: ProfiledTasks) -> list[Planned]:
  """Return the stratified samples and the exploration of tasks.

  The stratified samples are for hard tasks of all splits; references are chosen among
  these samples. The exploration is for training tasks. If `references.clone_large` is
  set (an ablation), only the exploration of hard tasks is listed.
  """
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
  """Return all samples of a policy's plans on each task, numbered from 1.

  Args:
    spec: the policy with its plans.
    purpose: "reference" or "exploration"; it decides the seeds of the samples.
    tasks: the tasks to play.
  """
  count = sum(plan.count for plan in spec.plans)
  trials = range(1, count + 1)
  return Planned(spec, [Job(task, purpose, k) for task in tasks for k in trials])


def rollout_spec(
  family: str, lam: float, update: int, training_seed: int = 0
) -> PolicySpec:
  """Return the policy that samples the rollouts of one update.

  Args:
    family: the family that learns from the rollouts.
    lam: the cost weight of the training.
    update: the number of the update, from 1.
    training_seed: the number of the training seed, from 0.
  """
  seed = training_seed or None
  return PolicySpec(family, lam=lam, seed=seed, update=update, rollout=True)


def list_rollouts(config: Config, spec: PolicySpec, tasks: Sequence[Task]) -> Planned:
  """Return the rollouts of one update: one group per task (paper: group size 8).

  Args:
    config: supplies the size of a group.
    spec: the policy that samples the rollouts of this update; see `rollout_spec`.
    tasks: the tasks of the update.
  """
  size = config.bopo.group_size
  # Each update has its own trial numbers, and so its own seeds.
  first = size * (spec.update - 1)
  trials = range(first, first + size)
  seed = spec.seed or 0
  jobs = [Job(task, "rollout", k, seed) for task in tasks for k in trials]
  return Planned(spec, jobs)


def list_evaluation(
  config: Config, tasks: Sequence[Task], split: str, training_seed: int = 0
) -> list[Job]:
  """Return the evaluation episodes of one training seed's router on a split.

  Evaluation seed s plays the router of training seed s modulo `train_seeds`. The paper
  repeats whole experiments; here all training seeds share one profile (our choice).

  Args:
    config: supplies the numbers of tasks and of seeds.
    tasks: the tasks of the split.
    split: "dev" or "test".
    training_seed: the number of the training seed, from 0.
  """
  trials = range(training_seed, config.evaluate.seeds, config.train_seeds)
  return [Job(task, split, k) for task in tasks for k in trials]


def list_ranks(config: Config) -> list[PolicySpec]:
  """Return the policies in which one intermediate model always acts."""
  ranks = range(2, len(config.models.names))
  return [PolicySpec(ALWAYS, rank=rank) for rank in ranks]


def list_ranked_trials(config: Config, tasks: Sequence[Task]) -> list[Planned]:
  """Return the trials in which an intermediate model always acts.

  The trials have the same seeds as the trials of both boundaries in the profile.
  """
  trials = range(config.profile.trials)
  jobs = [Job(task, "profile", k) for task in tasks for k in trials]
  return [Planned(spec, jobs) for spec in list_ranks(config)]


def draw_task_batches(
  tasks: Sequence[Task], size: int, seed: int
) -> Iterator[list[Task]]:
  """Draw batches of different tasks, without end.

  All tasks are used, in a new random order, before one repeats.

  Args:
    size: the number of tasks in a batch; at most all tasks.
    seed: the seed of the draws.
  """
  draw = random.Random(f"{seed}|bopo")
  size = min(size, len(tasks))
  order: list[Task] = []
  while True:
    if len(order) < size:
      shuffled_tasks = draw.sample(tasks, len(tasks))
      # Batches are taken from the end of `order`, so leftover tasks stay at the end. A
      # leftover task's new copy goes to the start, so that no batch has a task twice.
      order = sorted(shuffled_tasks, key=lambda task: task not in order) + order
    yield [order.pop() for _ in range(size)]


def list_updates(
  config: Config, spec: PolicySpec, tasks: Sequence[Task], training_seed: int = 0
) -> Iterator[Planned]:
  """Yield the rollouts of each update of a training, without end.

  Args:
    config: the configuration of the training seed, with its own `seed`.
    spec: a policy of the family and the cost weight that are trained.
    tasks: the tasks to learn from.
    training_seed: the number of the training seed, from 0.
  """
  batches = draw_task_batches(tasks, config.bopo.tasks_per_update, config.seed)
  for update, batch in enumerate(batches, 1):
    rollout = rollout_spec(spec.family, spec.lam, update, training_seed)
    yield list_rollouts(config, rollout, batch)
