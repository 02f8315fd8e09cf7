"""Stage profile: both boundaries on every training task -> each task's difficulty and costs."""

import collections
import itertools
from pathlib import Path

from baar_jax.mesh import exchange
from baar_jax.rollout.live import Job
from baar_jax.router.tokenizer import adopt_tokenizer, train_tokenizer
from baar_jax.router.view import text_pieces
from baar_jax.run import Run
from baar_jax.train.dataset import load_profiles


def main(run: Run) -> None:
  tasks = run.tasks("train")
  trials = max(run.config.profile.trials, *run.config.profile.robustness, 0)
  jobs = [Job(task, seed) for task in tasks for seed in range(trials)]
  for policy in run.boundaries:
    run.collect(f"profile {policy.name}", policy, jobs)
  profiles = load_profiles(run.store, run.config)
  for task in tasks:
    if task.id not in profiles:
      run.print(f"left out: {task.id} has no trial of both boundaries")
  if run.is_main and not (run.tokenizer / "tokenizer.json").exists():
    if run.config.router.weights:
      adopt_tokenizer(Path(run.config.router.weights), run.tokenizer)
    else:
      episodes = {task_id: (*p.small, *p.large) for task_id, p in profiles.items()}
      texts = (text_pieces(task, e) for task in tasks for e in episodes.get(task.id, ()))
      pieces = itertools.chain.from_iterable(texts)
      train_tokenizer(pieces, run.config.router.vocab_size, run.tokenizer)
  exchange(None)  # waits until every process is here
  mix = collections.Counter(profile.difficulty for profile in profiles.values())
  inverted = sum(profile.cost_small > profile.cost_large for profile in profiles.values())
  run.store.finish("profile")
  run.print(f"profile: {len(profiles)} tasks, {dict(mix)}, SMALL dearer than LARGE on {inverted}")
