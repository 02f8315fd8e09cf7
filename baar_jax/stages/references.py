"""Stage references: the trajectory tau* of every training task that SFT imitates."""

from baar_jax.config import Config
from baar_jax.rollout.entries import stratified_name
from baar_jax.rollout.live import Job, Live
from baar_jax.rollout.policies import RulePolicy, random_rule
from baar_jax.run import Run
from baar_jax.train.dataset import load_profiles, load_references


def stratified_random(config: Config) -> RulePolicy:
  """Episode k of 1..N picks LARGE at every step with probability k / N.

  k is the episode's seed.
  """

  def rule(live: Live) -> int:
    return random_rule(live, live.job.seed / config.references.samples)

  return RulePolicy(stratified_name(config), rule)


def main(run: Run) -> None:
  run.require("profile")
  config = run.config.references
  profiles = load_profiles(run.store, run.config)
  known = [task for task in run.tasks("train") if task.id in profiles]
  hard = [task for task in known if profiles[task.id].difficulty == "hard"]
  if not config.clone_large:
    jobs = [Job(task, k) for task in hard for k in range(1, config.samples + 1)]
    run.collect("references", stratified_random(run.config), jobs)
  references = load_references(run.store, run.config)
  run.store.finish("references")
  fallback = sum(references[task.id].policy == run.boundaries[-1].name for task in hard)
  large = sum(references[task.id].large_calls for task in hard)
  steps = sum(len(references[task.id].steps) for task in hard)
  run.say(
    f"references: {len(hard)} hard tasks, LARGE at {large / max(steps, 1):.0%} of their steps; "
    f"{fallback} had no stratified success and take a LARGE trial of the profile"
  )
