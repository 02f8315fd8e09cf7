"""What the stages have stored, as training data: profiles, references, and batches of them."""

import collections
import dataclasses
import random
import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from baar_jax.config import Config
from baar_jax.episode import SMALL, Episode, Task
from baar_jax.rollout.entries import BOUNDARIES, stratified_name
from baar_jax.store import Store
from baar_jax.train import rewards


@dataclasses.dataclass(frozen=True)
class Profile:
  """What the boundaries showed of a task.

  Attributes:
    difficulty: "easy", "hard" or "intractable".
    cost_small, cost_large: median dollars of an episode.
    small, large: the trials.
  """

  difficulty: str
  cost_small: float
  cost_large: float
  small: Sequence[Episode]
  large: Sequence[Episode]


def profile_tasks(
  small: Iterable[Episode], large: Iterable[Episode], easy_rate: float
) -> dict[str, Profile]:
  """Difficulty and median costs of every task that has trials of both boundaries (paper 4.1)."""
  trials: dict[str, tuple[list, list]] = collections.defaultdict(lambda: ([], []))
  for boundary, episodes in enumerate((small, large)):
    for episode in episodes:
      trials[episode.task_id][boundary].append(episode)
  return {
    task_id: Profile(
      rewards.difficulty(*([e.success for e in episodes] for episodes in both), easy_rate),
      *(statistics.median(e.cost_usd for e in episodes) for episodes in both),
      *both,
    )
    for task_id, both in trials.items()
    if all(both)
  }


def load_profiles(store: Store, config: Config) -> dict[str, Profile]:
  """The profiles of the training tasks, in the tasks' order.

  Raises:
    ValueError: the profile has not been run.
  """
  profiles = _first_profiles(store, config, config.profile.trials)
  if not profiles:
    raise ValueError(f"{config.runs}/{config.name} has no profile: run --stage=profile first")
  return profiles


def robustness(store: Store, config: Config) -> list[dict]:
  """How far the labels of the training tasks depend on the number of trials K (paper, appendix).

  The trials of a smaller K are among those of a larger one, so the labels are not independent.

  Returns:
    Per K of `profile.robustness`: trials, tasks (those with all trials of both boundaries, under K
    and under `profile.trials`, the base), agreement (share of them with the same label), hard and
    base_hard (how many are hard), and hard_jaccard (of the two sets of hard tasks). None where
    there is no task, or none hard.
  """

  def difficulties(trials: int) -> dict[str, str]:
    return {
      task_id: profile.difficulty
      for task_id, profile in _first_profiles(store, config, trials).items()
      if len(profile.small) == len(profile.large) == trials
    }

  base = difficulties(config.profile.trials) if config.profile.robustness else {}
  rows = []
  for K in config.profile.robustness:
    other = difficulties(K)
    tasks = base.keys() & other.keys()
    hard, base_hard = ({t for t in tasks if of[t] == "hard"} for of in (other, base))
    either = hard | base_hard
    rows.append(
      {
        "trials": K,
        "tasks": len(tasks),
        "agreement": sum(base[t] == other[t] for t in tasks) / len(tasks) if tasks else None,
        "hard": len(hard),
        "base_hard": len(base_hard),
        "hard_jaccard": len(hard & base_hard) / len(either) if either else None,
      }
    )
  return rows


def _first_profiles(store: Store, config: Config, trials: int) -> dict[str, Profile]:
  """The training tasks' profiles from the first trials alone: `robustness` may have stored more."""
  episodes = ([e for e in store.episodes(name) if e.seed < trials] for name in BOUNDARIES)
  profiles = profile_tasks(*episodes, config.profile.easy_rate)
  return {task.id: profiles[task.id] for task in store.tasks("train") if task.id in profiles}


def cheapest(episodes: Iterable[Episode]) -> Episode | None:
  """The episode of least cost; ties: fewer large calls, then fewer steps, then the first."""
  key = lambda e: (e.cost_usd, e.large_calls, len(e.steps))  # noqa: E731
  return min(episodes, key=key, default=None)


def choose_reference(profile: Profile, stratified: Sequence[Episode], clone_large: bool) -> Episode:
  """tau* of a task (paper: stratified sampling; ties and fallbacks are our choice).

  Args:
    profile: of the task.
    stratified: its N episodes in the order of k; empty unless the task is hard.
    clone_large: hard tasks take the cheapest successful LARGE trial (ablation).
  """
  if profile.difficulty == "intractable":
    return cheapest(profile.small)
  if profile.difficulty == "easy":
    return cheapest(e for e in profile.small if e.success)
  mixed = None if clone_large else cheapest(e for e in stratified if e.success)
  return mixed or cheapest(e for e in profile.large if e.success)


def load_references(
  store: Store, config: Config, profiles: Mapping[str, Profile] | None = None
) -> dict[str, Episode]:
  """tau* by task id; `load_profiles` is called where no profiles are given.

  Raises:
    ValueError: the stage has not been run to its end.
  """
  profiles, clone_large = profiles or load_profiles(store, config), config.references.clone_large
  stratified = collections.defaultdict(list)
  for episode in () if clone_large else store.episodes(stratified_name(config)):
    stratified[episode.task_id].append(episode)  # in the order of their seeds, so of k
  hard = [task_id for task_id, profile in profiles.items() if profile.difficulty == "hard"]
  missing = sum(not stratified[task_id] for task_id in hard)
  if missing and not clone_large:
    place = f"{config.runs}/{config.name}"
    raise ValueError(f"{place} lacks references of {missing} tasks: run --stage=references")
  return {
    task_id: choose_reference(profile, stratified[task_id], clone_large)
    for task_id, profile in profiles.items()
  }


def paid_episodes(store: Store, config: Config) -> list[Episode]:
  """What the profile's first trials and the references stored of training tasks."""
  trials = dict.fromkeys(BOUNDARIES, range(config.profile.trials))
  return _seeds(store, trials | {stratified_name(config): range(config.references.samples + 1)})


def threshold_episodes(store: Store, config: Config) -> list[Episode]:
  """One trial of each boundary and three stratified episodes of every training task that has them.

  Raises ValueError if there are none.
  """
  quarters = {max(1, config.references.samples * quarter // 4) for quarter in (1, 2, 3)}
  seeds = dict.fromkeys(BOUNDARIES, {0}) | {stratified_name(config): quarters}
  episodes = _seeds(store, seeds)
  if not episodes:
    place = f"{config.runs}/{config.name}"
    raise ValueError(f"{place} has no training episodes: run --stage=profile first")
  return episodes


def _seeds(store: Store, seeds: Mapping[str, Container[int]]) -> list[Episode]:
  """The episodes of training tasks with the seeds that are listed for each policy."""
  train = {task.id for task in store.tasks("train")}
  episodes = [e for name in seeds for e in store.episodes(name) if e.seed in seeds[name]]
  return [e for e in episodes if e.task_id in train]


def proposed(episode: Episode) -> Episode:
  """The episode as a cascade would have seen it: where SMALL acted, its action was proposed."""
  steps = [
    dataclasses.replace(step, proposal=step.action if step.model == SMALL else None)
    for step in episode.steps
  ]
  return dataclasses.replace(episode, steps=steps)


def sft_batches(store: Store, config: Config) -> Iterator[list[Episode]]:
  """References with a set share of those of hard tasks."""
  profiles = load_profiles(store, config)
  references = load_references(store, config, profiles).values()
  hard = [e for e in references if profiles[e.task_id].difficulty == "hard"]
  rest = [e for e in references if profiles[e.task_id].difficulty != "hard"]
  return balanced(hard, rest, config.sft.batch_episodes, config.sft.hard_share, config.seed)


def balanced(
  hard: Sequence[Episode], rest: Sequence[Episode], size: int, hard_share: float, seed: int
) -> Iterator[list[Episode]]:
  """Batches with a set share of hard tasks; each pool is gone through before it repeats."""
  hards = round(size * hard_share) if hard and rest else size * bool(hard)
  hard_batches = _cycle(hard, hards, f"{seed}|hard")
  rest_batches = _cycle(rest, size - hards, f"{seed}|rest")
  while True:
    yield next(hard_batches) + next(rest_batches)


def shuffled(pool: Sequence[Episode], size: int, seed: str) -> Iterator[list[Episode]]:
  """Batches of a pool that is gone through before it repeats. Raises ValueError if it is empty."""
  if not pool:
    raise ValueError("there are no stored episodes to learn from: run --stage=references first")
  yield from _cycle(pool, size, seed)


def _cycle(pool: Sequence[Episode], size: int, seed: str) -> Iterator[list[Episode]]:
  draw = random.Random(seed)
  queue: list[Episode] = []
  while True:
    while len(queue) < size:
      queue += draw.sample(pool, len(pool))
    yield [queue.pop(0) for _ in range(size)]


def stacked(pool: Sequence[Episode], size: int, seed: int) -> Iterator[list[Episode]]:
  """Batches from the top of a stack, on which the pool is put in a new order when it runs low."""
  draw = random.Random(seed)
  stack: list[Episode] = []
  while True:
    while len(stack) < size:
      stack += draw.sample(pool, len(pool))
    yield [stack.pop() for _ in range(size)]


def task_batches(tasks: Sequence[Task], size: int, seed: int) -> Iterator[list[Task]]:
  """Batches of different tasks; all are gone through, in a new order, before any repeats."""
  draw = random.Random(f"{seed}|bopo")
  size = min(size, len(tasks))
  order: list[Task] = []
  while True:
    if len(order) < size:
      shuffled_tasks = draw.sample(tasks, len(tasks))
      # The tasks left over come first; a task that would be in the batch twice comes last.
      order = sorted(shuffled_tasks, key=lambda task: task not in order) + order
    yield [order.pop() for _ in range(size)]
