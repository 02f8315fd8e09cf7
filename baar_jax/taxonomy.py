"""Stage profile: both boundaries on every training task -> each task's difficulty and costs."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from baar_jax import rewards
from baar_jax.episode import Episode
from baar_jax.rollout import Job
from baar_jax.run import Run
from baar_jax.view import adopt_tokenizer, text_pieces, train_tokenizer

SUCCESS_SCORE = 1.0


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


def success(episode: Episode) -> bool:
  return episode.score >= SUCCESS_SCORE


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
      rewards.difficulty(*([success(e) for e in episodes] for episodes in both), easy_rate),
      *(statistics.median(e.cost_usd for e in episodes) for episodes in both),
      *both,
    )
    for task_id, both in trials.items()
    if all(both)
  }


def load_profiles(run: Run) -> dict[str, Profile]:
  """The profiles of the training tasks, in the tasks' order.

  Raises:
    ValueError: the profile has not been run.
  """
  known = profile_tasks(
    *(run.store.episodes(policy.name) for policy in run.boundaries), run.config.profile.easy_rate
  )
  profiles = {task.id: known[task.id] for task in run.store.tasks("train") if task.id in known}
  if not profiles:
    raise ValueError(f"{run.dir} has no profile: run --stage=profile first")
  return profiles


def main(run: Run) -> None:
  tasks = run.tasks("train")
  jobs = [Job(task, seed) for task in tasks for seed in range(run.config.profile.trials)]
  for policy in run.boundaries:
    run.collect(f"profile {policy.name}", policy, jobs)
  profiles = load_profiles(run)
  for task in tasks:
    if task.id not in profiles:
      run.say(f"left out: {task.id} has no trial of both boundaries")
  if run.first and not (run.tokenizer / "tokenizer.json").exists():
    if run.config.router.weights:
      adopt_tokenizer(Path(run.config.router.weights), run.tokenizer)
    else:
      train_tokenizer(_texts(run, profiles), run.config.router.vocab_size, run.tokenizer)
  run.wait()
  mix = collections.Counter(profile.difficulty for profile in profiles.values())
  inverted = sum(profile.cost_small > profile.cost_large for profile in profiles.values())
  run.finish("profile")
  run.say(f"profile: {len(profiles)} tasks, {dict(mix)}, SMALL dearer than LARGE on {inverted}")


def _texts(run: Run, profiles: dict[str, Profile]):
  """What the router's tokenizer is trained on: the pieces of text of the profile's episodes."""
  for task in run.store.tasks("train"):
    profile = profiles.get(task.id)
    for episode in (*profile.small, *profile.large) if profile else ():
      yield from text_pieces(task, episode)
