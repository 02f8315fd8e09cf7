"""Profile tasks by their boundary trials, and choose reference trajectories.

Paper: Task Difficulty Taxonomy, and stratified sampling (Eqs. 3 and 4). Eq. 3's random
choices are made in `families/rules.py`, when the samples are played; this file reads
the played episodes. `ALWAYS_SMALL` and `ALWAYS_LARGE` are the boundary policies, and an
episode names its policy by the key.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from baar_jax.episode import Episode
from baar_jax.llms.prices import TINY_USD
from baar_jax.paper import rewards
from baar_jax.rollout.jobs import ALWAYS_LARGE, ALWAYS_SMALL


@dataclasses.dataclass(frozen=True)
class Profile:
  """Describe the difficulty and the boundary costs of one task, with its trials.

  Attributes:
    difficulty: "easy", "hard" or "intractable".
    cost_small: median US dollars of an episode of always-SMALL.
    cost_large: median US dollars of an episode of always-LARGE.
    small: the trials of always-SMALL.
    large: the trials of always-LARGE.
  """

  difficulty: str
  cost_small: float
  cost_large: float
  small: Sequence[Episode]
  large: Sequence[Episode]

  @property
  def hard(self) -> bool:
    """Return whether the difficulty is "hard"."""
    return self.difficulty == "hard"


def make_profile(small: Sequence[Episode], large: Sequence[Episode]) -> Profile:
  """Make the profile of one task from its trials, at least one of each boundary.

  The boundary costs are medians, without failed attempts at calls (our choice; the
  paper does not define them).

  Args:
    small: the trials of always-SMALL.
    large: the trials of always-LARGE.
  """
  difficulty = rewards.difficulty(
    [trial.success for trial in small], [trial.success for trial in large]
  )
  # The mean is too sensitive to one runaway episode.
  cost_small = statistics.median(episode.cost_usd for episode in small)
  cost_large = statistics.median(episode.cost_usd for episode in large)
  return Profile(difficulty, cost_small, cost_large, small, large)


def group_by_task(episodes: Iterable[Episode]) -> dict[str, list[Episode]]:
  """Group episodes by task id; a task without episodes has []."""
  groups = collections.defaultdict(list)
  for episode in episodes:
    groups[episode.task_id].append(episode)
  return groups


def profile_tasks(
  ids: Iterable[str], episodes: Sequence[Episode]
) -> dict[str, Profile]:
  """Make the profiles of tasks from the trials of both boundaries.

  A task without a trial of both boundaries is left out.

  Args:
    ids: the ids of the tasks.
    episodes: the trials; episodes of other policies or tasks are ignored.

  Returns:
    The profiles by task id, in the order of `ids`.
  """
  small = group_by_task(e for e in episodes if e.policy == ALWAYS_SMALL.key)
  large = group_by_task(e for e in episodes if e.policy == ALWAYS_LARGE.key)
  profiles = {}
  for id_ in ids:
    if small[id_] and large[id_]:
      profiles[id_] = make_profile(small[id_], large[id_])
  return profiles


def mean_large_usd(profiles: Iterable[Profile]) -> float:
  """Average the median dollars of always-LARGE over tasks; at least `TINY_USD`.

  For the value heads and vanilla RL, this is one normalised dollar (our choice).
  """
  return max(TINY_USD, np.mean([profile.cost_large for profile in profiles]))


def find_cheapest(episodes: Iterable[Episode]) -> Episode | None:
  """Find the episode with the least dollars; None if there is no episode.

  Ties go to fewer LARGE calls, then to fewer steps, then to the earlier episode.
  """
  return min(
    episodes, key=lambda e: (e.cost_usd, e.large_calls, len(e.steps)), default=None
  )


def choose_reference(profile: Profile, stratified: Sequence[Episode]) -> Episode:
  """Choose the reference trajectory tau* of a task (paper Eq. 4).

  - Easy: the cheapest success of always-SMALL.
  - Intractable: the cheapest trial of always-SMALL.
  - Hard: the cheapest success among the stratified samples. If none succeeded, the
    cheapest success of always-LARGE (our choice, as are the ties of `find_cheapest`).

  For easy and intractable tasks the paper only says "the trajectory", so the choice
  among their trials is ours. In its ablation without stratified samples the reference
  is always-LARGE's raw trajectory; here it is the cheapest success.

  Args:
    profile: the profile of the task.
    stratified: the samples of a hard task in the order of k = 1..N; empty for other
      tasks, and for the ablation that clones always-LARGE instead.
  """
  if profile.difficulty == "intractable":
    return find_cheapest(profile.small)
  candidates = stratified if profile.hard else profile.small
  best = find_cheapest(e for e in candidates if e.success)
  return best or find_cheapest(e for e in profile.large if e.success)


def choose_references(
  profiles: Mapping[str, Profile], stratified: Iterable[Episode]
) -> dict[str, Episode]:
  """Choose the reference trajectory tau* of each task with a profile.

  Args:
    profiles: the profiles by task id.
    stratified: the stratified samples of hard tasks, in the order of k; empty for the
      ablation that clones always-LARGE instead.

  Returns:
    Episodes by task id.
  """
  samples = group_by_task(stratified)
  references = {}
  for id_, profile in profiles.items():
    references[id_] = choose_reference(profile, samples[id_])
  return references
