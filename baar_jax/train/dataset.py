"""What the stages have stored, as training data: profiles, references, batches."""

import collections
import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from baar_jax.config import Config
from baar_jax.episode import Episode, Task
from baar_jax.rollout.specs import PolicySpec, Purpose, seed_of
from baar_jax.store import Store
from baar_jax.train import rewards
from baar_jax.train.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  BOUNDARIES,
  ProfiledTasks,
  count_trials,
  exploration_specs,
  stratified_spec,
)
from baar_jax.train.rewards import Profile


def make_profile(
  small: Sequence[Episode], large: Sequence[Episode], easy_rate: float
) -> Profile:
  """Make a task's profile from its trials of always-SMALL and always-LARGE."""
  successes = []
  median_usd = []
  for trials in (small, large):
    successes.append([e.success for e in trials])
    median_usd.append(statistics.median(e.cost_usd for e in trials))
  difficulty = rewards.difficulty(*successes, easy_rate)
  return Profile(difficulty, *median_usd, small, large)


def group_by_task(episodes: Iterable[Episode]) -> dict[str, list[Episode]]:
  """Group episodes by task id, [] if a task has none."""
  groups = collections.defaultdict(list)
  for episode in episodes:
    groups[episode.task_id].append(episode)
  return groups


def load_profiles(
  store: Store, config: Config, *splits: str, trials: int | None = None
) -> dict[str, Profile]:
  """Load the profiles of the splits' tasks that have trials of both boundaries.

  Args:
    trials: how many of each task are read, from the first on; by default the config's.

  Returns:
    The profiles by task id, in the tasks' order.

  Raises:
    ValueError: there are none.
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
  """Make the profiles of tasks from the boundaries' trials among episodes.

  Returns:
    The profiles by task id, in the order of ids, of tasks that have trials of both.

  Raises:
    ValueError: there are none.
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
  """Tell hard tasks from the others; those without a profile are left out."""
  profiled = [task for task in tasks if task.id in profiles]
  hard = [task for task in profiled if profiles[task.id].hard]
  rest = [task for task in profiled if not profiles[task.id].hard]
  return ProfiledTasks(hard, rest)


def measure_robustness(store: Store, config: Config) -> list[dict]:
  """Measure how tasks' difficulties depend on the number of trials K (paper, appendix).

  Returns:
    A row per K of `profile.robustness`, of tasks with all trials under K and under
    `profile.trials`, the base: the share with the same label, and the Jaccard
    similarity of the sets of hard tasks, or None.
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
  """Compute the difficulty by the first trials of each task that has all of them."""
  end = seed_of("profile", trials)
  labels = {}
  for id_, profile in profiles.items():
    small = [e.success for e in profile.small if e.seed < end]
    large = [e.success for e in profile.large if e.seed < end]
    if len(small) == len(large) == trials:
      labels[id_] = rewards.difficulty(small, large, easy_rate)
  return labels


def _divide(part: int, whole: int) -> float | None:
  """Compute a share; None of nothing."""
  return part / whole if whole else None


def find_cheapest(episodes: Iterable[Episode]) -> Episode | None:
  """Find the cheapest episode; ties: fewer large calls, fewer steps, then the first."""
  return min(
    episodes, key=lambda e: (e.cost_usd, e.large_calls, len(e.steps)), default=None
  )


def choose_reference(profile: Profile, stratified: Sequence[Episode]) -> Episode:
  """Choose tau* of a task (paper: stratified sampling; our choice: ties, fallbacks).

  Args:
    stratified: the task's N episodes in the order of k; none unless it is hard, nor in
      the ablation `clone_large`. Without a success among them, LARGE's cheapest counts.
  """
  if profile.difficulty == "intractable":
    return find_cheapest(profile.small)
  candidates = stratified if profile.hard else profile.small
  best = find_cheapest(e for e in candidates if e.success)
  return best or find_cheapest(e for e in profile.large if e.success)


def load_references(
  store: Store, config: Config, profiles: Mapping[str, Profile]
) -> dict[str, Episode]:
  """Load the episode tau* by task id.

  Raises:
    ValueError: a hard task has no stratified episode yet.
  """
  stratified = group_by_task([])
  if not config.references.clone_large:
    # In the order of their seeds, so of k.
    stratified = group_by_task(store.episodes(stratified_spec(config).key))
    hard = [id_ for id_, profile in profiles.items() if profile.hard]
    if lacking := len(set(hard) - set(stratified)):
      lack = f"lacks references of {lacking} tasks: run --stage=references"
      raise ValueError(f"{config.runs}/{config.name} {lack}")
  return {
    id_: choose_reference(profile, stratified[id_]) for id_, profile in profiles.items()
  }


def load_pretraining_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the profile's first trials and the references' samples of training tasks."""
  samples = range(1, config.references.samples + 1)
  episodes = _load_samples(store, config, range(config.profile.trials), samples)
  explore_hard, _ = exploration_specs(config)
  return episodes + store.episodes(explore_hard.key)


def load_value_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the same, and samples of training tasks that are not hard.

  If hard tasks alone had episodes that mix the models, a mix would foretell a task that
  can be solved (our choice).
  """
  episodes = load_pretraining_episodes(store, config)
  _, explore_rest = exploration_specs(config)
  return episodes + store.episodes(explore_rest.key)


def load_threshold_episodes(store: Store, config: Config) -> list[Episode]:
  """Load a trial of each boundary and three stratified episodes of each training task.

  A router's thresholds are quantiles of its own p(LARGE) over these (our choice).
  """
  quarters = {max(1, config.references.samples * quarter // 4) for quarter in (1, 2, 3)}
  return _load_samples(store, config, {0}, quarters)


def _load_samples(
  store: Store, config: Config, trials: Iterable[int], samples: Iterable[int]
) -> list[Episode]:
  """Load trials of the boundaries and stratified episodes of training tasks."""
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
  """Load a policy's trials of a purpose on tasks, by the trials' numbers."""
  seeds = [seed_of(purpose, number) for number in numbers]
  return store.episodes(spec.key, {*itertools.product(ids, seeds)})


class ReferencePools(NamedTuple):
  """References by whether their task is hard."""

  hard: list[Episode]
  rest: list[Episode]


def load_reference_pools(store: Store, config: Config, split: str) -> ReferencePools:
  """Load the references of a split's tasks."""
  profiles = load_profiles(store, config, split)
  pools = ReferencePools([], [])
  for id_, episode in load_references(store, config, profiles).items():
    pool = pools.hard if profiles[id_].hard else pools.rest
    pool.append(episode)
  return pools


def mix_batches(
  hard: Sequence[Episode],
  rest: Sequence[Episode],
  size: int,
  hard_share: float,
  seed: int,
) -> Iterator[list[Episode]]:
  """Draw batches with a share of hard tasks; a pool is used up before it repeats."""
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
  """Draw batches from a queue; the whole pool joins it in a new order when it runs low.

  The pool is used up before it repeats, or with `newest_first` nearly so.
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
  """Draw batches of different tasks; all are used, in a new order, before a repeat."""
  draw = random.Random(f"{seed}|bopo")
  size = min(size, len(tasks))
  order: list[Task] = []
  while True:
    if len(order) < size:
      shuffled_tasks = draw.sample(tasks, len(tasks))
      # The tasks left over come first; one that would be in the batch twice comes last.
      order = sorted(shuffled_tasks, key=lambda task: task not in order) + order
    yield [order.pop() for _ in range(size)]
