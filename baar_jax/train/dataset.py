"""What the stages have stored, as training data: profiles, references, and batches of them."""

import collections
import dataclasses
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from baar_jax.config import PROFILE_SEEDS, REFERENCE_SEEDS, Config
from baar_jax.episode import Episode, Task
from baar_jax.rollout.policies import BOUNDARIES, EXPLORED, STRATIFIED, TOGETHER, samples_name
from baar_jax.store import Store
from baar_jax.train import rewards


@dataclasses.dataclass(frozen=True)
class Profile:
  """What the boundaries showed of a task."""

  difficulty: str  # "easy", "hard" or "intractable"
  cost_small: float  # median dollars of an episode of always-SMALL
  cost_large: float
  small: Sequence[Episode]  # the trials of always-SMALL
  large: Sequence[Episode]


def load_profiles(
  store: Store, config: Config, *splits: str, trials: int | None = None
) -> dict[str, Profile]:
  """The profiles of the splits' tasks with trials of both boundaries, in the tasks' order.

  They are of the first `trials`, by default the config's. Raises ValueError if there are none.
  """
  trials, profiles = trials or config.profile.trials, {}
  by_task = {task.id: ([], []) for split in splits for task in store.tasks(split)}
  for boundary, name in enumerate(BOUNDARIES):
    for episode in store.episodes(name):
      if episode.seed < PROFILE_SEEDS + trials and episode.task_id in by_task:
        by_task[episode.task_id][boundary].append(episode)
  for task_id, (small, large) in by_task.items():
    if small and large:
      successes = [e.success for e in small], [e.success for e in large]
      difficulty = rewards.difficulty(*successes, config.profile.easy_rate)
      median_usd = [statistics.median(e.cost_usd for e in group) for group in (small, large)]
      profiles[task_id] = Profile(difficulty, *median_usd, small, large)
  if not profiles:
    raise ValueError(f"{config.runs}/{config.name} has no profile: run --stage=profile first")
  return profiles


def measure_robustness(store: Store, config: Config) -> list[dict]:
  """How far the tasks' difficulties depend on the number of trials K (paper, appendix).

  A row per K of `profile.robustness`, of tasks with all trials under K and under `profile.trials`,
  the base: the share with the same label, and the Jaccard similarity of the hard sets, or None.
  """

  def classify(trials: int) -> dict[str, str]:
    profiles = load_profiles(store, config, "train", trials=trials).items()
    return {t: p.difficulty for t, p in profiles if len(p.small) == len(p.large) == trials}

  rows, base = [], classify(config.profile.trials)
  for K in config.profile.robustness:
    other = classify(K)
    tasks = base.keys() & other.keys()
    base_hard, hard = ({t for t in tasks if labels[t] == "hard"} for labels in (base, other))
    agreement = sum(base[t] == other[t] for t in tasks) / len(tasks) if tasks else None
    jaccard = len(hard & base_hard) / len(hard | base_hard) if hard | base_hard else None
    row = {"trials": K, "tasks": len(tasks), "agreement": agreement, "hard": len(hard)}
    rows.append(row | {"base_hard": len(base_hard), "hard_jaccard": jaccard})
  return rows


def find_cheapest(episodes: Iterable[Episode]) -> Episode | None:
  """The episode of least cost; ties: fewer large calls, then fewer steps, then the first."""
  return min(episodes, key=lambda e: (e.cost_usd, e.large_calls, len(e.steps)), default=None)


def choose_reference(profile: Profile, stratified: Sequence[Episode]) -> Episode:
  """tau* of a task (paper: stratified sampling; ties and fallbacks are our choice).

  `stratified` are the task's N episodes in the order of k, none unless it is hard, nor in the
  ablation `clone_large`: without a success among them it takes the cheapest of LARGE's.
  """
  if profile.difficulty == "intractable":
    return find_cheapest(profile.small)
  if profile.difficulty == "easy":
    return find_cheapest(e for e in profile.small if e.success)
  mixed = find_cheapest(e for e in stratified if e.success)
  return mixed or find_cheapest(e for e in profile.large if e.success)


def load_references(store: Store, config: Config, profiles: Mapping[str, Profile]) -> dict:
  """The episode tau* by task id. Raises ValueError if a hard task has no stratified episode yet."""
  stratified = collections.defaultdict(list)
  if not config.references.clone_large:
    for episode in store.episodes(samples_name(config, STRATIFIED)):
      stratified[episode.task_id].append(episode)  # in the order of their seeds, so of k
    hard = [id_ for id_, profile in profiles.items() if profile.difficulty == "hard"]
    if lacking := sum(not stratified[id_] for id_ in hard):
      lack = f"lacks references of {lacking} tasks: run --stage=references"
      raise ValueError(f"{config.runs}/{config.name} {lack}")
  return {id_: choose_reference(profile, stratified[id_]) for id_, profile in profiles.items()}


def load_pretraining_episodes(store: Store, config: Config) -> list[Episode]:
  """What the profile's first trials and the references stored of training tasks."""
  samples = range(1, config.references.samples + 1)
  episodes = _load_episodes(store, config, range(config.profile.trials), samples)
  return episodes + store.episodes(samples_name(config, TOGETHER))


def load_value_episodes(store: Store, config: Config) -> list[Episode]:
  """The same, and samples of training tasks that are not hard: if hard tasks alone had episodes
  that mix the models, a mix would foretell a task that can be solved (our choice)."""
  return load_pretraining_episodes(store, config) + store.episodes(samples_name(config, EXPLORED))


def load_threshold_episodes(store: Store, config: Config) -> list[Episode]:
  """One trial of each boundary and three stratified episodes of every training task that has them:
  a router's thresholds are quantiles of its own p(LARGE) over these (our choice)."""
  quarters = {max(1, config.references.samples * quarter // 4) for quarter in (1, 2, 3)}
  return _load_episodes(store, config, {0}, quarters)


def _load_episodes(store: Store, config: Config, trials: Iterable[int], samples: Iterable[int]):
  """Training tasks' trials of the boundaries and stratified episodes, by their numbers."""
  seeds = dict.fromkeys(BOUNDARIES, {PROFILE_SEEDS + k for k in trials})
  seeds[samples_name(config, STRATIFIED)] = {REFERENCE_SEEDS + k for k in samples}
  train = {task.id for task in store.tasks("train")}
  episodes = [e for name in seeds for e in store.episodes(name) if e.seed in seeds[name]]
  return [e for e in episodes if e.task_id in train]


def draw_sft_batches(store: Store, config: Config, split: str = "train") -> Iterator[list[Episode]]:
  """Batches of references, a set share of them of hard tasks; a batch of dev has room for all."""
  profiles = load_profiles(store, config, split)
  references = load_references(store, config, profiles).values()
  hard = [e for e in references if profiles[e.task_id].difficulty == "hard"]
  rest = [e for e in references if profiles[e.task_id].difficulty != "hard"]
  size = max(config.sft.batch_episodes, len(references) if split == "dev" else 0)
  return mix_batches(hard, rest, size, config.sft.hard_share, config.seed)


def mix_batches(hard, rest, size: int, hard_share: float, seed: int) -> Iterator[list[Episode]]:
  """Batches with a set share of hard tasks; each pool is used up before it repeats."""
  hard_count = round(size * hard_share) if hard and rest else size * bool(hard)
  hard_batches = draw_batches(hard, hard_count, f"{seed}|hard")
  rest_batches = draw_batches(rest, size - hard_count, f"{seed}|rest")
  while True:
    yield next(hard_batches) + next(rest_batches)


def draw_batches(pool, size: int, seed, newest_first=False) -> Iterator[list[Episode]]:
  """Batches from a queue, to which the whole pool is added in a new order when it runs low: it is
  used up before it repeats, or with `newest_first` nearly so."""
  if size and not pool:
    raise ValueError("there are no stored episodes to learn from: run --stage=references first")
  draw = random.Random(seed)
  queue: list[Episode] = []
  while True:
    while len(queue) < size:
      queue += draw.sample(pool, len(pool))
    yield [queue.pop(-1 if newest_first else 0) for _ in range(size)]


def draw_task_batches(tasks: Sequence[Task], size: int, seed: int) -> Iterator[list[Task]]:
  """Batches of different tasks; all are used, in a new order, before any repeats."""
  draw = random.Random(f"{seed}|bopo")
  size = min(size, len(tasks))
  order: list[Task] = []
  while True:
    if len(order) < size:
      shuffled_tasks = draw.sample(tasks, len(tasks))
      # The tasks left over come first; a task that would be in the batch twice comes last.
      order = sorted(shuffled_tasks, key=lambda task: task not in order) + order
    yield [order.pop() for _ in range(size)]
