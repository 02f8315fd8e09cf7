"""Stage bench: how fast the router and the episodes are, as ratios within one run."""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from baar_jax.envs.base import Env
from baar_jax.episode import Episode
from baar_jax.rollout.live import Job
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.policies import random_large
from baar_jax.run import Run, memory_mb
from baar_jax.stages import bench_router, bench_training
from baar_jax.stages.bench_figures import Figures
from baar_jax.stages.bench_subject import describe, prepare

TASKS = 12
ROUNDS = 2  # of the tasks, measured
SEED = 7_000_000  # of episodes that are measured and not stored
WARM_UP = 2  # rounds of the tasks before the clock starts: Java compiles as it goes


def main(run: Run) -> None:
  """Measures the router on texts of its own, then the environment without a router.

  Prints a table and saves report/bench.json; of the run's results nothing changes.
  """
  run.alone("bench")
  if run.pair.kind != "scripted":
    raise ValueError("--stage=bench plays scripted models alone: set --config.models.kind=scripted")
  parts = [
    describe,
    bench_router.decisions,
    bench_router.scoring,
    bench_training.training,
    bench_training.arithmetic,
    bench_router.loading,
  ]
  figures = Figures()
  with run.progress(total=len(parts) + 1, desc="bench", unit="part") as bar:
    with tempfile.TemporaryDirectory() as directory, compiled_anew():
      subject = prepare(run.config, Path(directory))
      for part in parts:
        bar.set_postfix_str(part.__name__)
        part(subject, figures)
        bar.update()
    del subject
    bar.set_postfix_str("environment")
    environment(run, figures)
    bar.update()
  run.say(figures.table())
  path = run.dir / "report" / "bench.json"
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(figures.values, indent=2))


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
  """Takes nothing compiled from the disk, so that a first call shows what compiling takes."""
  directory = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


def environment(run: Run, figures: Figures) -> None:
  """Episodes through the rollout loop against the same actions without it."""
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

  kind, steps = run.config.env.kind, sum(len(episode.steps) for episode in episodes)
  figures.section(
    f"Environment: {kind} with the scripted pair",
    "random routing without a router, once after a warm-up; replay: the same actions with no "
    "models, policy or loop around them",
  )
  figures.add("environment", kind, "environment")
  figures.add("processes", len(processes), "processes")
  figures.add("episodes", len(episodes), "measured", "episodes")
  figures.add("steps", steps, "  in all", "steps")
  figures.add("steps_per_s", steps / loop_s, "rollout loop", "steps/s")
  figures.add("episodes_per_s", len(episodes) / loop_s, "  whole ones", "episodes/s")
  figures.add("replay_steps_per_s", steps / bare_s, "replay", "steps/s")
  figures.ratio("steps_per_s", "replay_steps_per_s", "{} x as fast as the replay")
  cpu_share = loop_cpu_s / loop_s / (os.cpu_count() or 1)
  figures.add("loop_cpu_share", cpu_share, "the loop's own share of all cores' time")
  now_mb = None if kind == "sandbox" else memory_mb(envs)
  figures.add("child_memory_mb", now_mb, "memory of the child processes", "MB")


def _replay(env: Env, episodes: Sequence[Episode]) -> None:
  """The episodes' actions, one after the other, with no models, policy or loop around them."""
  for episode in episodes:
    env.reset(episode.task_id)
    for step in episode.steps:
      env.step(step.action)
    env.score()
