"""Stage references: the trajectory tau* of every training task that SFT imitates."""

import collections
from collections.abc import Sequence

from baar_jax.episode import Episode
from baar_jax.rollout.live import Job, Live
from baar_jax.rollout.policies import RulePolicy, random_rule
from baar_jax.run import Run
from baar_jax.stages.profile import Profile, load_profiles, success


def stratified_random(samples: int) -> RulePolicy:
  """Episode k of 1..samples picks LARGE at every step with probability k / samples.

  k is the episode's seed.
  """

  def rule(live: Live) -> int:
    return random_rule(live, live.job.seed / samples)

  return RulePolicy(f"stratified(samples={samples})", rule)


def cheapest(episodes: Sequence[Episode]) -> Episode | None:
  """The episode of least cost; ties: fewer large calls, then fewer steps, then the first."""
  key = lambda e: (e.cost_usd, e.large_calls, len(e.steps))  # noqa: E731
  return min(episodes, key=key, default=None)


def choose_reference(profile: Profile, stratified: Sequence[Episode], clone_large: bool) -> Episode:
  """tau* of a task (paper: stratified sampling; spec of ties and fallbacks: our choice).

  Args:
    profile: of the task.
    stratified: its N episodes in the order of k; empty unless the task is hard.
    clone_large: hard tasks take the cheapest successful LARGE trial (ablation).
  """
  if profile.difficulty == "intractable":
    return cheapest(profile.small)
  if profile.difficulty == "easy":
    return cheapest([e for e in profile.small if success(e)])
  found = None if clone_large else cheapest([e for e in stratified if success(e)])
  return found or cheapest([e for e in profile.large if success(e)])


def load_references(run: Run) -> dict[str, Episode]:
  """tau* by task id.

  Raises:
    ValueError: the stage has not been run to its end.
  """
  config = run.config.references
  profiles = load_profiles(run)
  stratified = collections.defaultdict(list)
  if not config.clone_large:
    for episode in run.store.episodes(stratified_random(config.samples).name):
      stratified[episode.task_id].append(episode)  # in the order of their seeds, so of k
    missing = [
      task_id
      for task_id, profile in profiles.items()
      if profile.difficulty == "hard" and not stratified[task_id]
    ]
    if missing:
      raise ValueError(
        f"{run.dir} lacks references of {len(missing)} tasks: run --stage=references"
      )
  return {
    task_id: choose_reference(profile, stratified[task_id], config.clone_large)
    for task_id, profile in profiles.items()
  }


def main(run: Run) -> None:
  run.require("profile")
  config = run.config.references
  profiles = load_profiles(run)
  known = [task for task in run.tasks("train") if task.id in profiles]
  hard = [task for task in known if profiles[task.id].difficulty == "hard"]
  if not config.clone_large:
    jobs = [Job(task, k) for task in hard for k in range(1, config.samples + 1)]
    run.collect("references", stratified_random(config.samples), jobs)
  references = load_references(run)
  run.finish("references")
  fallback = sum(references[task.id].policy == run.boundaries[-1].name for task in hard)
  large = sum(references[task.id].large_calls for task in hard)
  steps = sum(len(references[task.id].steps) for task in hard)
  run.say(
    f"references: {len(hard)} hard tasks, LARGE at {large / max(steps, 1):.0%} of their steps; "
    f"{fallback} had no stratified success and take a LARGE trial of the profile"
  )
