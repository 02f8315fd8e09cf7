"""Stages setup, profile, which plays both boundaries on train and dev tasks, and references."""

import collections
import itertools

from baar_jax.config import PROFILE_SEEDS, REFERENCE_SEEDS
from baar_jax.envs import engines
from baar_jax.episode import SPLITS
from baar_jax.mesh import exchange
from baar_jax.rollout.policies import ALWAYS_LARGE, STRATIFIED, TOGETHER, Job, rule_policy
from baar_jax.router.view import adopt_tokenizer, text_pieces, train_tokenizer
from baar_jax.router.weights import weights_directory
from baar_jax.run import Run
from baar_jax.train.dataset import load_profiles, load_references


def setup(run: Run) -> None:
  """Installs the environment's engine and provides its tasks, where they are missing."""
  c = run.config.env
  if c.kind in engines.ENGINES:
    sizes = [getattr(c, f"{split}_tasks") for split in SPLITS]
    engines.set_up(c.kind, c.data, sizes, run.print)
    run.tasks("train")  # shows whether they can be used


def main(run: Run) -> None:
  """Measures every task's difficulty and costs, and trains or adopts the tokenizer."""
  tasks = run.tasks("train") + run.tasks("dev")
  trials = max(run.config.profile.trials, *run.config.profile.robustness, 0)
  jobs = [Job(task, PROFILE_SEEDS + k) for task in tasks for k in range(trials)]
  for policy in run.boundaries:
    run.collect(f"profile {policy.name}", policy, jobs)
  train, dev = (load_profiles(run.store, run.config, split=split) for split in ("train", "dev"))
  for task in tasks:
    if task.id not in train | dev:
      run.print(f"left out: {task.id} has no trial of both boundaries")
  models = len(run.pair.names)
  if run.is_main and not (run.tokenizer / "tokenizer.json").exists():
    if run.config.router.weights:
      adopt_tokenizer(weights_directory(run.config.router.weights), run.tokenizer, models)
    else:
      episodes = {task_id: (*p.small, *p.large) for task_id, p in train.items()}
      texts = (text_pieces(task, e, models) for task in tasks for e in episodes.get(task.id, ()))
      pieces = itertools.chain.from_iterable(texts)
      train_tokenizer(pieces, run.config.router.vocab_size, run.tokenizer, models)
  exchange(None)  # waits until every process is here
  run.store.finish("profile")
  for split, profiles in (("train", train.values()), ("dev", dev.values())):
    mix = dict(collections.Counter(profile.difficulty for profile in profiles))
    inverted = sum(profile.cost_small > profile.cost_large for profile in profiles)
    counts = f"{len(profiles)} tasks, {mix}, SMALL dearer than LARGE on {inverted}"
    run.print(f"profile of {split}: {counts}")


def references(run: Run) -> None:
  """Collects the trajectory tau* of every training task, for SFT, and of every dev task."""
  run.require("profile")
  tasks, c = run.tasks("train") + run.tasks("dev"), run.config.references
  profiles = load_profiles(run.store, run.config)
  profiles |= load_profiles(run.store, run.config, split="dev")
  hard = [task for task in tasks if task.id in profiles and profiles[task.id].difficulty == "hard"]
  if not c.clone_large:
    jobs = [Job(task, REFERENCE_SEEDS + k) for task in hard for k in range(1, c.samples + 1)]
    run.collect("references", rule_policy(STRATIFIED, samples=c.samples), jobs)
  train = [task for task in hard if task.split == "train"]
  jobs = [Job(task, REFERENCE_SEEDS + k) for task in train for k in range(1, c.together + 1)]
  run.collect("together", rule_policy(TOGETHER, samples=c.together), jobs)
  trajectories = load_references(run.store, run.config, profiles)
  run.store.finish("references")
  chosen = [trajectories[task.id] for task in hard]
  fallback = sum(episode.policy == ALWAYS_LARGE for episode in chosen)
  large, steps = sum(e.large_calls for e in chosen), sum(len(e.steps) for e in chosen)
  run.print(
    f"references: {len(hard)} hard tasks, LARGE at {large / max(steps, 1):.0%} of their steps; "
    f"{fallback} had no stratified success and take a LARGE trial of the profile"
  )
