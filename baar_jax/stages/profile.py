"""Stage profile: both boundaries on every training task -> each task's difficulty and costs."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from baar_jax.episode import Episode
from baar_jax.rollout.live import Job
from baar_jax.router.view import adopt_tokenizer, text_pieces, train_tokenizer
from baar_jax.run import Run
from baar_jax.train import rewards

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


def first_trials(episodes: Iterable[Episode], trials: int) -> list[Episode]:
  """The episodes of the first seeds: more than those may be stored, for `robustness`."""
  return [e for e in episodes if e.seed < trials]


def robustness(
  small: Iterable[Episode],
  large: Iterable[Episode],
  base_trials: int,
  trials: Sequence[int],
  easy_rate: float,
) -> list[dict]:
  """How far the labels depend on the number of trials K (paper, appendix).

  The trials of a smaller K are among those of a larger one, so the labels are not independent.

  Args:
    small, large: episodes of either boundary, of any seeds.
    base_trials: the K whose labels are the ones in use.
    trials: other K.
    easy_rate: as in `profile_tasks`.

  Returns:
    Per K: trials, tasks (those with all trials of both boundaries, under K and under the base),
    agreement (share of them with the same label), hard and base_hard (how many are hard), and
    hard_jaccard (of the two sets of hard tasks). None where there is no task, or none hard.
  """
  small, large = list(small), list(large)
  base = _labels(small, large, base_trials, easy_rate)
  rows = []
  for K in trials:
    other = _labels(small, large, K, easy_rate)
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


def _labels(
  small: Iterable[Episode], large: Iterable[Episode], trials: int, easy_rate: float
) -> dict[str, str]:
  """Difficulty by task from its first trials, of the tasks that have them all."""
  profiles = profile_tasks(first_trials(small, trials), first_trials(large, trials), easy_rate)
  return {
    task_id: profile.difficulty
    for task_id, profile in profiles.items()
    if len(profile.small) == len(profile.large) == trials
  }


def load_profiles(run: Run) -> dict[str, Profile]:
  """The profiles of the training tasks, in the tasks' order.

  Raises:
    ValueError: the profile has not been run.
  """
  c = run.config.profile
  known = profile_tasks(
    *(first_trials(run.store.episodes(policy.name), c.trials) for policy in run.boundaries),
    c.easy_rate,
  )
  profiles = {task.id: known[task.id] for task in run.store.tasks("train") if task.id in known}
  if not profiles:
    raise ValueError(f"{run.dir} has no profile: run --stage=profile first")
  return profiles


def main(run: Run) -> None:
  tasks = run.tasks("train")
  trials = max(run.config.profile.trials, *run.config.profile.robustness, 0)
  jobs = [Job(task, seed) for task in tasks for seed in range(trials)]
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
