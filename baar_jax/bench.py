"""Stage bench: how fast episodes run, as ratios within one run."""

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from baar_jax.envs.base import Env
from baar_jax.envs.process import memory_mb
from baar_jax.episode import Episode
from baar_jax.policies import random_large
from baar_jax.rollout import Job, run_episodes
from baar_jax.run import Run

TASKS = 30
ROUNDS = 4  # of the tasks, measured
SEED = 7_000_000  # of episodes that are measured and not stored
WARM_UP = 4  # rounds of the tasks before the clock starts: Java compiles as it goes


def main(run: Run) -> None:
  """Episodes through the rollout loop against the same actions without it.

  Nothing is routed by a model. Prints a table and saves report/bench.json.
  """
  tasks = run.tasks("test")[:TASKS]
  envs = run.envs()
  policy = random_large(0.5, "bench")
  warm = [Job(task, SEED + s) for task in tasks for s in range(WARM_UP)]
  list(run_episodes(warm, policy, run.pair, envs))

  jobs = [Job(task, SEED + WARM_UP + s) for task in tasks for s in range(ROUNDS)]
  start, cpu = time.monotonic(), time.process_time()
  episodes = list(run_episodes(jobs, policy, run.pair, envs))
  loop_s, loop_cpu_s = time.monotonic() - start, time.process_time() - cpu
  # One environment per process, each with its share of the episodes.
  processes = envs[: run.live_episodes // run.config.env.live_per_process]
  start = time.monotonic()
  with ThreadPoolExecutor(len(processes)) as threads:
    shares = [episodes[i :: len(processes)] for i in range(len(processes))]
    list(threads.map(_replay, processes, shares))
  bare_s = time.monotonic() - start

  steps = sum(len(episode.steps) for episode in episodes)
  figures = {
    "environment": run.config.env.kind,
    "processes": len(processes),
    "cores": os.cpu_count(),
    "episodes": len(episodes),
    "steps": steps,
    "steps_per_s": steps / loop_s,
    "episodes_per_s": len(episodes) / loop_s,
    "replay_steps_per_s": steps / bare_s,
    "loop_time_over_replay_time": loop_s / bare_s,
    "loop_cpu_share": loop_cpu_s / loop_s / (os.cpu_count() or 1),
    "child_memory_mb": memory_mb(envs) if run.config.env.kind != "sandbox" else None,
  }
  for name, value in figures.items():
    print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}")
  path = run.dir / "report" / "bench.json"
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(figures, indent=2))


def _replay(env: Env, episodes: Sequence[Episode]) -> None:
  """The episodes' actions, one after the other, with no models, policy or loop around them."""
  for episode in episodes:
    env.reset(episode.task_id)
    for step in episode.steps:
      env.step(step.action)
    env.score()
