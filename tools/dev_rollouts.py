"""Play policies of several runs on the same dev tasks.

Usage: PYTHONPATH=. python tools/dev_rollouts.py RUN... [--dev_tasks=N] [--test_tasks=N]

The runs need the stages up to `value`, the same environment and the same scripted
models. The tool plays the rules and the policies on value heads of each run. All
policies share the environments, which remember the answers to each sequence of actions.
So a sequence of actions in a task is played once for all policies of all runs. The
episodes are stored in each run, and `tests/dev_table.py` compares them. Policies with a
cap on dollars are left out.

With `dev_tasks` the dev tasks of the runs become the first `dev_tasks` of dev and the
first `test_tasks` of test; without it they stay as they are. Use only test tasks that
older tables have already shown.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from baar_jax.config import Config
from baar_jax.envs.base import Env
from baar_jax.envs.process import open_envs
from baar_jax.episode import Task
from baar_jax.mesh import one_device
from baar_jax.rollout.loop import Pair, run_episodes
from baar_jax.rollout.specs import PolicySpec
from baar_jax.run import env_arguments, open_pair
from baar_jax.store import Store, read_run
from baar_jax.train.checkpoint import RouterFiles
from baar_jax.train.families import FAMILIES, Loader, list_specs
from baar_jax.train.jobs import CONDITIONED, list_evaluation

DEV_TASKS = flags.DEFINE_integer("dev_tasks", 0, "Number of tasks from dev.")
TEST_TASKS = flags.DEFINE_integer("test_tasks", 0, "Number of tasks from test.")
PROCESSES = 4  # number of environments, each in a process of its own


def list_played(config: Config) -> list[PolicySpec]:
  """List a run's rules, and its policies on value heads."""
  specs = []
  for spec in list_specs(config):
    family = FAMILIES[spec.family]
    is_played = not (family.train or family.is_rival) or spec.family == CONDITIONED
    if is_played and spec.cap.usd is None:
      specs.append(spec)
  return specs


def play(
  directory: Path, tasks: Sequence[Task], pair: Pair, envs: Sequence[Env]
) -> None:
  """Play and store the episodes of a run's policies that are not stored yet.

  Args:
    directory: the directory of the run.
    tasks: the new dev tasks of the run.
    pair: the models.
    envs: the environments.
  """
  config = read_run(directory)
  store = Store(directory / "episodes.sqlite")
  store.put_tasks("dev", tasks)
  for number in range(config.train_seeds):
    seeded = dataclasses.replace(config, seed=config.seed + number)
    files = RouterFiles(directory, seeded, one_device(), number)
    loader = Loader(files, len(envs), pair, store)
    jobs = list_evaluation(config, tasks, "dev", number)
    for spec in list_played(config):
      stored = store.keys(spec.key)
      missing = [job for job in jobs if job.key not in stored]
      if missing:
        print(f"{directory} training seed {number}: {spec.key}", flush=True)
        for episode in run_episodes(missing, loader.build(spec), pair, envs):
          store.add(episode)


def main(argv: list[str]) -> None:
  """Play the policies of all runs."""
  directories = [Path(name) for name in argv[1:]]
  first = directories[0]
  config = read_run(first)
  pair = open_pair(config, first / "episodes.sqlite")
  arguments = env_arguments(config)
  if DEV_TASKS.value:
    arguments |= {"dev_tasks": DEV_TASKS.value, "test_tasks": TEST_TASKS.value}
  envs = open_envs(config.env.kind, arguments, PROCESSES, 1, config.env.timeout_s)
  tasks = Store(first / "episodes.sqlite").tasks("dev")
  if DEV_TASKS.value:
    tasks = envs[0].tasks("dev")
    tasks += envs[0].tasks("test") if TEST_TASKS.value else []
  try:
    for directory in directories:
      play(directory, tasks, pair, envs)
  finally:
    for env in envs:
      env.close()


if __name__ == "__main__":
  app.run(main)
