"""Declare the episodes that each stage plays, for the stages and for the dry run."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from baar_jax.config import Config, SamplePlan
from baar_jax.episode import Episode, Task
from baar_jax.rollout.policy import Build
from baar_jax.rollout.specs import Job, PolicySpec, RolloutSpec, SampledSpec

SFT = "sft"
BOPO = "bopo"
VANILLA = "vanilla"
RANDOM = "random"
ALWAYS = "always"  # The family of policies with one intermediate model at all steps.
ALWAYS_SMALL = PolicySpec("always-small")
ALWAYS_LARGE = PolicySpec("always-large")
BOUNDARIES = (ALWAYS_SMALL, ALWAYS_LARGE)
BOUNDARY_KEYS = (ALWAYS_SMALL.key, ALWAYS_LARGE.key)
# The family of always-LARGE under a cap: LARGE acts until the cap is spent, then SMALL.
FIRST_LARGE = "first-large"
CONDITIONED = "conditioned"  # The family of the budget-conditioned router.
# Policies with the episodes that each of them plays.
Plan = Mapping[PolicySpec, Sequence[Job]]
# Return the episodes of a plan, ordered by policy, task and trial: play them, or read
# recorded ones. The arguments are a title for readers, the plan, and what makes a
# policy, which is called only if an episode has to be played. ValueError is raised if
# episodes are missing and cannot be played.
Play = Callable[[str, Plan, Build], list[Episode]]
# The rollouts of one update of a training: the policy that samples them, and its jobs.
Rollouts = tuple[RolloutSpec, Sequence[Job]]


@dataclasses.dataclass(frozen=True)
class RankSpec(PolicySpec):
  """A policy in which one model always acts.

  Attributes:
    rank: the rank of the model, from 1.
  """

  rank: int


def list_profile(config: Config, tasks: Iterable[Task]) -> Plan:
  """Return the profile's trials of both boundaries on tasks (paper: 5 trials each).

  Training tasks also get the new trials of `profile.robustness`.
  """
  jobs = []
  for task in tasks:
    jobs += [Job(task, "profile", k) for k in range(config.profile.trials)]
    if task.split == "train":
      for count in dict.fromkeys(config.profile.robustness):
        jobs += [Job(task, "robustness", k) for k in new_trials(count)]
  return dict.fromkeys(BOUNDARIES, jobs)


def new_trials(count: int) -> range:
  """Return the numbers of the new trials for one number of `profile.robustness`.

  They follow the trials of all smaller counts, so two counts never share a trial (our
  choice; labels by nested trials would agree too well).

  Args:
    count: the number of trials.
  """
  first = count * (count - 1) // 2
  return range(first, first + count)


def stratified_spec(config: Config) -> SampledSpec:
  """Return the policy of the paper's stratified samples (paper Eq. 3).

  Sample k of N calls LARGE at each step with probability k / N.
  """
  plan = SamplePlan("samples", config.references.samples)
  return SampledSpec("stratified", (plan,))


def exploration_specs(config: Config) -> tuple[SampledSpec, SampledSpec]:
  """Return the policies that explore training tasks for the value heads (our choice).

  Hard tasks already have the stratified samples, so their exploration leaves out the
  plan "samples".

  Returns:
    The policy for hard tasks, and the policy for all other tasks.
  """
  plans = config.references.plans
  hard = tuple(plan for plan in plans if plan.kind != "samples")
  rest = tuple(plan for plan in plans if plan.all_tasks)
  explore_hard = SampledSpec("exploration", hard)
  return explore_hard, SampledSpec("exploration-all", rest)


def list_references(
  config: Config, tasks: Iterable[Task], is_hard: Mapping[str, bool]
) -> Plan:
  """Return the stratified samples and the exploration of tasks.

  The stratified samples are for hard tasks of all splits; references are chosen among
  these samples. The exploration is for training tasks. If `references.clone_large` is
  set (an ablation), only the exploration of hard tasks is listed.

  Args:
    config: supplies the numbers of samples.
    tasks: the training and dev tasks.
    is_hard: whether a task is hard, by its id; tasks that it lacks are left out.
  """
  profiled = [task for task in tasks if task.id in is_hard]
  hard = [task for task in profiled if is_hard[task.id]]
  hard_train = [task for task in hard if task.split == "train"]
  rest = [task for task in profiled if not is_hard[task.id]]
  rest_train = [task for task in rest if task.split == "train"]
  stratified = stratified_spec(config)
  explore_hard, explore_rest = exploration_specs(config)
  plan = {}
  if not config.references.clone_large:
    plan[stratified] = _list_samples(stratified, "reference", hard)
    plan[explore_rest] = _list_samples(explore_rest, "exploration", rest_train)
  plan[explore_hard] = _list_samples(explore_hard, "exploration", hard_train)
  return plan


def _list_samples(spec: SampledSpec, purpose: str, tasks: Sequence[Task]) -> list[Job]:
  """Return all samples of a policy's plans on each task, numbered from 1.

  Args:
    spec: the policy with its plans.
    purpose: "reference" or "exploration".
    tasks: the tasks to play.
  """
  count = sum(plan.count for plan in spec.plans)
  return [Job(task, purpose, k) for task in tasks for k in range(1, count + 1)]


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


def list_ranks(config: Config) -> list[RankSpec]:
  """Return the policies in which one intermediate model always acts."""
  return [RankSpec(ALWAYS, rank) for rank in range(2, len(config.models.names))]


def list_ranked_trials(config: Config, tasks: Sequence[Task]) -> Plan:
  """Return the trials in which an intermediate model always acts.

  The trials have the same numbers as the trials of both boundaries in the profile.
  """
  trials = range(config.profile.trials)
  jobs = [Job(task, "profile", k) for task in tasks for k in trials]
  return dict.fromkeys(list_ranks(config), jobs)


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
  config: Config, family: str, lam: float, tasks: Sequence[Task], training_seed: int = 0
) -> Iterator[Rollouts]:
  """Yield the rollouts of each update of a training, without end.

  An update has one group of trials for each of its tasks (paper: group size 8).

  Args:
    config: the configuration of the run.
    family: the family that learns from the rollouts.
    lam: the cost weight of the training.
    tasks: the tasks to learn from.
    training_seed: the number of the training seed, from 0.
  """
  size = config.bopo.group_size
  seed = config.seed + training_seed
  batches = draw_task_batches(tasks, config.bopo.tasks_per_update, seed)
  for update, batch in enumerate(batches, 1):
    spec = RolloutSpec(family, lam, training_seed, update)
    # Each update has its own trial numbers, and so its own seeds.
    trials = range(size * (update - 1), size * update)
    jobs = [Job(task, "rollout", k, training_seed) for task in batch for k in trials]
    yield spec, jobs
