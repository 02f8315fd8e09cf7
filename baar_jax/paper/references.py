"""Turn stored episodes into profiles, references and batches of episodes."""

import collections
import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from baar_jax.config import Config
from baar_jax.episode import Episode, Task
from baar_jax.paper import rewards
from baar_jax.paper.rewards import Profile
from baar_jax.rollout.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  BOUNDARIES,
  ProfiledTasks,
  count_trials,
  exploration_specs,
  stratified_spec,
)
from baar_jax.rollout.specs import PolicySpec, Purpose, seed_of
from baar_jax.store import Store


def make_profile(
  small: Sequence[Episode], large: Sequence[Episode], easy_rate: float
) -> Profile:
  """Make the profile of one task from its trials.

  Args:
    small: the trials of always-SMALL, at least one.
    large: the trials of always-LARGE, at least one.
    easy_rate: the least success rate of always-SMALL on an easy task.
  """
  successes = []
  median_usd = []
  for trials in (small, large):
    successes.append([e.success for e in trials])
    median_usd.append(statistics.median(e.cost_usd for e in trials))
  difficulty = rewards.difficulty(*successes, easy_rate)
  return Profile(difficulty, *median_usd, small, large)


def group_by_task(episodes: Iterable[Episode]) -> dict[str, list[Episode]]:
  """Group episodes by task id; a task without episodes has []."""
  groups = collections.defaultdict(list)
  for episode in episodes:
    groups[episode.task_id].append(episode)
  return groups


def load_profiles(
  store: Store, config: Config, *splits: str, trials: int | None = None
) -> dict[str, Profile]:
  """Load the profiles of the tasks of some splits.

  A task without a trial of both boundaries is left out.

  Args:
    splits: "train", "dev" or both.
    trials: the number of trials to read per task and boundary, from the first on;
      None for `profile.trials`.

  Returns:
    The profiles by task id, in the order of the tasks.

  Raises:
    ValueError: no task has a profile.
  """
  numbers = range(trials or config.profile.trials)
  ids = [task.id for split in splits for task in store.tasks(split)]
  episodes = []
  for spec in BOUNDARIES:
    episodes += _load_trials(store, spec, "profile", numbers, ids)
  return profile_tasks(config, ids, episodes)


def profile_tasks(
  config: Config, ids: Iterable[str], episodes: Sequence[Episode]
) -> dict[str, Profile]:
  """Make the profiles of tasks from the trials of both boundaries.

  A task without a trial of both boundaries is left out.

  Args:
    ids: the ids of the tasks.
    episodes: the trials; episodes of other policies or tasks are ignored.

  Returns:
    The profiles by task id, in the order of `ids`.

  Raises:
    ValueError: no task has a profile.
  """
  small = group_by_task(e for e in episodes if e.policy == ALWAYS_SMALL.key)
  large = group_by_task(e for e in episodes if e.policy == ALWAYS_LARGE.key)
  profiles = {}
  for id_ in ids:
    if small[id_] and large[id_]:
      profiles[id_] = make_profile(small[id_], large[id_], config.profile.easy_rate)
  if not profiles:
    raise ValueError(
      f"{config.runs}/{config.name} has no profile: run --stage=profile first"
    )
  return profiles


def split_by_profile(
  tasks: Sequence[Task], profiles: Mapping[str, Profile]
) -> ProfiledTasks:
  """Split tasks into hard tasks and others; leave out tasks without a profile.

  Args:
    tasks: the tasks to split.
    profiles: profiles by task id.
  """
  profiled = [task for task in tasks if task.id in profiles]
  hard = [task for task in profiled if profiles[task.id].hard]
  rest = [task for task in profiled if not profiles[task.id].hard]
  return ProfiledTasks(hard, rest)


def measure_robustness(store: Store, config: Config) -> list[dict]:
  """Measure how much the difficulties depend on the number of trials (paper: appendix).

  Each number of trials in `profile.robustness` is compared with the base, the number
  `profile.trials`. Only training tasks that have all trials of both numbers count.

  Returns:
    One row per number in `profile.robustness`. `trials` is this number. `tasks` is the
    number of compared tasks, and `agreement` the share of them with the same
    difficulty. `hard` and `base_hard` count the hard tasks under this number and under
    the base. `hard_jaccard` is the Jaccard similarity of the two sets of hard tasks. A
    share is None if there is nothing to compare.
  """
  rows = []
  profiles = load_profiles(store, config, "train", trials=count_trials(config))
  base = _label_by_trials(profiles, config.profile.trials, config.profile.easy_rate)
  for K in config.profile.robustness:
    labels = _label_by_trials(profiles, K, config.profile.easy_rate)
    tasks = base.keys() & labels.keys()
    equal = sum(base[id_] == labels[id_] for id_ in tasks)
    base_hard = {id_ for id_ in tasks if base[id_] == "hard"}
    hard = {id_ for id_ in tasks if labels[id_] == "hard"}
    row = {
      "trials": K,
      "tasks": len(tasks),
      "agreement": _divide(equal, len(tasks)),
      "hard": len(hard),
      "base_hard": len(base_hard),
      "hard_jaccard": _divide(len(hard & base_hard), len(hard | base_hard)),
    }
    rows.append(row)
  return rows


def _label_by_trials(
  profiles: Mapping[str, Profile], trials: int, easy_rate: float
) -> dict[str, str]:
  """Label each task with its difficulty by its first trials.

  A task that lacks one of these trials is left out.

  Args:
    trials: the number of trials of each boundary to use.
  """
  end = seed_of("profile", trials)
  labels = {}
  for id_, profile in profiles.items():
    small = [e.success for e in profile.small if e.seed < end]
    large = [e.success for e in profile.large if e.seed < end]
    if len(small) == len(large) == trials:
      labels[id_] = rewards.difficulty(small, large, easy_rate)
  return labels


def _divide(part: int, whole: int) -> float | None:
  """Compute part / whole; None if the whole is 0."""
  return part / whole if whole else None


def find_cheapest(episodes: Iterable[Episode]) -> Episode | None:
  """Find the episode with the least dollars; None if there is no episode.

  Ties go to fewer LARGE calls, then to fewer steps, then to the earlier episode.
  """
  return min(
    episodes, key=lambda e: (e.cost_usd, e.large_calls, len(e.steps)), default=None
  )


def choose_reference(profile: Profile, stratified: Sequence[Episode]) -> Episode:
  """Choose the reference trajectory tau* of a task (paper: stratified sampling).

  - Easy: the cheapest success of always-SMALL.
  - Intractable: the cheapest trial of always-SMALL.
  - Hard: the cheapest success among the stratified samples. If none succeeded, the
    cheapest success of always-LARGE (our choice, as are the ties of `find_cheapest`).

  Args:
    profile: the profile of the task.
    stratified: the samples of a hard task in the order of k = 1..N; empty for other
      tasks and for the ablation `clone_large`.
  """
  if profile.difficulty == "intractable":
    return find_cheapest(profile.small)
  candidates = stratified if profile.hard else profile.small
  best = find_cheapest(e for e in candidates if e.success)
  return best or find_cheapest(e for e in profile.large if e.success)


def load_references(
  store: Store, config: Config, profiles: Mapping[str, Profile]
) -> dict[str, Episode]:
  """Load the reference trajectory tau* of each task with a profile.

  Returns:
    Episodes by task id.

  Raises:
    ValueError: a hard task has no stratified sample yet.
  """
  stratified = group_by_task([])
  if not config.references.clone_large:
    # The store sorts by seed, and seeds ascend with k. So samples come in order of k.
    stratified = group_by_task(store.episodes(stratified_spec(config).key))
    hard = [id_ for id_, profile in profiles.items() if profile.hard]
    if missing := len(set(hard) - set(stratified)):
      problem = f"lacks references of {missing} hard tasks: run --stage=references"
      raise ValueError(f"{config.runs}/{config.name} {problem}")
  return {
    id_: choose_reference(profile, stratified[id_]) for id_, profile in profiles.items()
  }


def load_pretraining_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the episodes of training tasks that pretraining learns from.

  These are the first `profile.trials` trials of both boundaries, the stratified samples
  and the exploration of hard tasks.
  """
  samples = range(1, config.references.samples + 1)
  episodes = _load_samples(store, config, range(config.profile.trials), samples)
  explore_hard, _ = exploration_specs(config)
  return episodes + store.episodes(explore_hard.key)


def load_value_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the episodes of training tasks that the value heads learn from.

  These are the episodes of `load_pretraining_episodes`, and the exploration of tasks
  that are not hard (our choice). Without this exploration, only hard tasks would have
  episodes that mix the models. Then the heads would learn that a task with a mix of
  models is a task that can be solved.
  """
  episodes = load_pretraining_episodes(store, config)
  _, explore_rest = exploration_specs(config)
  return episodes + store.episodes(explore_rest.key)


def load_threshold_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the training episodes at whose decisions thresholds are computed.

  A threshold is a quantile of the router's p(LARGE) at the decisions of these episodes.
  The episodes are one trial of each boundary per task, and the stratified samples
  k = N/4, N/2 and 3N/4 (our choice).
  """
  quarters = {max(1, config.references.samples * quarter // 4) for quarter in (1, 2, 3)}
  return _load_samples(store, config, {0}, quarters)


def _load_samples(
  store: Store, config: Config, trials: Iterable[int], samples: Iterable[int]
) -> list[Episode]:
  """Load trials of both boundaries, and stratified samples, of all training tasks.

  Args:
    trials: the numbers of the trials, from 0.
    samples: the numbers k of the stratified samples, from 1.
  """
  train = [task.id for task in store.tasks("train")]
  episodes = []
  for boundary in BOUNDARIES:
    episodes += _load_trials(store, boundary, "profile", trials, train)
  stratified = stratified_spec(config)
  return episodes + _load_trials(store, stratified, "reference", samples, train)


def _load_trials(
  store: Store,
  spec: PolicySpec,
  purpose: Purpose,
  numbers: Iterable[int],
  ids: Iterable[str],
) -> list[Episode]:
  """Load the stored trials of a policy on tasks, and skip missing ones.

  Args:
    store: the stored episodes.
    spec: the policy.
    purpose: the purpose of the trials, such as "profile"; it decides their seeds.
    numbers: the numbers of the trials.
    ids: the ids of the tasks.
  """
  seeds = [seed_of(purpose, number) for number in numbers]
  return store.episodes(spec.key, {*itertools.product(ids, seeds)})


def load_reference_pools(
  store: Store, config: Config, split: str
) -> tuple[list[Episode], list[Episode]]:
  """Load the references of a split: those of hard tasks, and those of other tasks."""
  profiles = load_profiles(store, config, split)
  hard = []
  rest = []
  for id_, episode in load_references(store, config, profiles).items():
    pool = hard if profiles[id_].hard else rest
    pool.append(episode)
  return hard, rest


def mix_batches(
  hard: Sequence[Episode],
  rest: Sequence[Episode],
  size: int,
  hard_share: float,
  seed: int,
) -> Iterator[list[Episode]]:
  """Draw batches of references with a fixed share of hard tasks, without end.

  No reference repeats before all references in `hard`, or in `rest`, were drawn. If
  `hard` or `rest` is empty, the batches come from the other sequence alone.

  Args:
    hard: the references of hard tasks.
    rest: the references of the other tasks.
    size: the number of episodes in a batch.
    hard_share: the share of episodes of hard tasks, in [0, 1] (paper: about 0.7).
    seed: the seed of the draws.
  """
  hard_count = size * bool(hard)
  if hard and rest:
    hard_count = round(size * hard_share)
  hard_batches = draw_batches(hard, hard_count, f"{seed}|hard")
  rest_batches = draw_batches(rest, size - hard_count, f"{seed}|rest")
  while True:
    yield next(hard_batches) + next(rest_batches)


def draw_batches(
  pool: Sequence[Episode], size: int, seed: int | str, newest_first: bool = False
) -> Iterator[list[Episode]]:
  """Draw batches of episodes from a queue, without end.

  If the queue has too few episodes for a batch, the whole pool is appended in a new
  random order. So all episodes are drawn before one repeats.

  Args:
    pool: the episodes to draw from.
    size: the number of episodes in a batch.
    seed: the seed of the draws.
    newest_first: whether batches come from the end of the queue, the newest order. Then
      an episode may repeat although a few others were not drawn.

  Raises:
    ValueError: the pool is empty, and the size is not 0.
  """
  if size and not pool:
    raise ValueError(
      "there are no stored episodes to learn from: run --stage=references first"
    )
  draw = random.Random(seed)
  end = -1 if newest_first else 0
  queue: list[Episode] = []
  while True:
    while len(queue) < size:
      queue += draw.sample(pool, len(pool))
    yield [queue.pop(end) for _ in range(size)]


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
