"""The errors of a run's directory, its store, its stages and its report."""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import tiny
from errors_config import command
from report_store import BOUNDARIES, config, fill, specs

from baar_jax import run as run_file
from baar_jax.config import Config, ModelsConfig
from baar_jax.envs.appworld.adapter import AppWorld
from baar_jax.episode import SPLITS, Episode, Task
from baar_jax.report import frontier
from baar_jax.report.table import load_split
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import ALWAYS_SMALL, Planned
from baar_jax.rollout.specs import Job, PolicySpec
from baar_jax.run import Run
from baar_jax.store import VERSION, Store, read_config, read_run, require_file


@contextlib.contextmanager
def open_run(tmp: Path) -> Iterator[Run]:
  """Open a small run in `tmp`, with scripted models."""
  with contextlib.closing(Run(tiny.config(tmp))) as run:
    yield run


def store_damaged(tmp: Path) -> None:
  Store(tmp / "store").close()
  with (tmp / "store").open("r+b") as file:
    file.seek(100)
    file.write(b"\xff" * 3996)  # the page with the schema
  Store(tmp / "store")


def store_newer(tmp: Path) -> None:
  Store(tmp / "store").close()
  with contextlib.closing(sqlite3.connect(tmp / "store")) as db:
    db.execute(f"PRAGMA user_version = {VERSION + 1}")
  Store(tmp / "store")


def store_twice(tmp: Path) -> None:
  store = Store(tmp / "store")
  store.add(tiny.episode(), tiny.episode())


def damage_task(tmp: Path) -> None:
  store = Store(tmp / "store")
  store.put_tasks("train", [Task("t", "train", "do it", 9)])
  store._db.execute("UPDATE tasks SET task = '{}'")
  store.tasks("train")


def damage_score(tmp: Path) -> None:
  store = Store(tmp / "store")
  store.add(tiny.episode())
  store._db.execute("UPDATE episodes SET score = 2")
  store.table()


def make_used(tmp: Path) -> Path:
  """Make the directory of a run with tasks."""
  with open_run(tmp) as run:
    run.tasks("train")
    return run.dir


def damage_config(tmp: Path) -> None:
  directory = make_used(tmp)
  (directory / "config.json").write_text("{")
  read_config(directory)


def put_pipe(tmp: Path) -> None:
  directory = make_used(tmp)
  os.mkfifo(directory / "metrics.jsonl")
  read_config(directory)


def lose_store(tmp: Path) -> None:
  directory = make_used(tmp)
  (directory / "episodes.sqlite").unlink()
  read_config(directory)


def lose_run(tmp: Path) -> None:
  directory = make_used(tmp)
  for name in ("episodes.sqlite", "config.json"):
    (directory / name).unlink()
  (directory / "checkpoints").mkdir()
  Run(tiny.config(tmp))


def use_twice(tmp: Path) -> None:
  # A process does not lock itself out, so the lock of another one is simulated.
  with mock.patch.object(fcntl, "lockf", side_effect=BlockingIOError):
    Run(tiny.config(tmp))


def change_field(tmp: Path) -> None:
  make_used(tmp)
  config = tiny.config(tmp)
  config.bopo.kl_beta = 0.2
  Run(config)


def list_tasks(tmp: Path, *tasks: Task) -> None:
  with open_run(tmp) as run:
    for env in run.source.envs():
      env.tasks = lambda split: [*tasks]
    run.tasks("train")


def read_recorded(tmp: Path, act: Callable[[Run], object]) -> None:
  """Act on a run whose episodes are recorded: five tasks without episodes."""
  config = tiny.config(tmp, kind="recorded")
  config.models = ModelsConfig("chat")
  with contextlib.closing(Run(config)) as run:
    for split in SPLITS:
      run.store.put_tasks(split, [Task(f"{split}-fix", split, "fix", 9)])
    act(run)


def profile_recorded(run: Run, *episodes: Episode) -> None:
  run.store.add(*episodes)
  trials = [Job(task, "profile", 0) for task in run.tasks("train")]
  run.source.episodes("", Planned(ALWAYS_SMALL, trials), None)


def forget_texts() -> Episode:
  played = tiny.episode("train-fix", ALWAYS_SMALL.key)
  for step in played.steps:
    step.observation = step.action = ""
  return played


def differ(tmp: Path) -> None:
  # Two processes would need two interpreters; their exchange is simulated.
  first = Config()
  second = Config(seed=1)
  values = [run_file.flatten(first), run_file.flatten(second)]
  with mock.patch.object(run_file, "exchange", lambda _: values):
    run_file._open_mesh(first)


def confine(tmp: Path) -> None:
  with mock.patch.dict(vars(AppWorld.engine), is_confinable=False):
    AppWorld.engine.check_walls()


def report_unplayed(tmp: Path) -> None:
  store = fill(BOUNDARIES)
  load_split(store, [*specs(BOUNDARIES), PolicySpec("sft")], config(), "dev")


def report_nothing(tmp: Path) -> None:
  load_split(Store(":memory:"), specs(BOUNDARIES), config(), "test")


CASES = [
  (
    "...bubblewrap does not work here: install it (...bubblewrap), or run everything in "
    "a container, with --config.env.options.trusted=True (no wall at all)",
    confine,
  ),
  (
    "--config.distributed.fsdp=1000 must divide the number of devices, .... "
    "Set a divisor, or 0 for all devices.",
    command,
    "--config.distributed.fsdp=1000",
  ),
  (
    "TMP/store is no episode store that SQLite can use (...): free disk space, restore the file from a copy, or move it away",
    store_damaged,
  ),
  (
    "TMP/store was made by an older or a newer version of this program: choose another --config.name",
    store_newer,
  ),
  (
    "the episode ('p', 't', 0) is already stored in TMP/store: store each key once",
    store_twice,
  ),
  ("TMP/store: train task 0 cannot be read: restore a copy of the file", damage_task),
  (
    "TMP/store: the episode of policy p, task t, seed 0 cannot be read: restore a copy of the file",
    damage_score,
  ),
  (
    "TMP/tiny/config.json is damaged, or was made by an older version: restore the run's directory from a copy, or choose another --config.name",
    damage_config,
  ),
  (
    "TMP/tiny/episodes.sqlite is missing or empty, so the spent dollars are unknown: restore the run's directory from a copy, or choose another --config.name",
    lose_store,
  ),
  (
    "TMP is no directory of a run: it has no config.json; give the directory <runs>/<name> of a run",
    read_run,
  ),
  (
    "another process is using TMP/tiny: wait for its end or choose another --config.name",
    use_twice,
  ),
  (
    "TMP/tiny has checkpoints, and its store has no tasks: restore the run's directory from a copy, or choose another --config.name",
    lose_run,
  ),
  (
    "TMP/tiny has bopo.kl_beta=0.04, this command has 0.2: set --config.bopo.kl_beta back, or choose another --config.name",
    change_field,
  ),
  (
    "no train task is recorded yet: record five tasks first",
    read_recorded,
    lambda run: run.source.list_tasks("train"),
  ),
  (
    "--config.env.kind=sandbox lists the task 't' twice: list each task once, in one split",
    list_tasks,
    *[Task("t", "train", "do it", 9)] * 2,
  ),
  (
    "--config.env.kind=sandbox lists max_steps=-1 of 't': list 1 or more",
    list_tasks,
    Task("t", "train", "do it", -1),
  ),
  (
    "TMP/tiny/metrics.jsonl is not a regular file: restore the run's directory from a copy, or choose another --config.name",
    put_pipe,
  ),
  ("TMP/none is missing or not a regular file", lambda tmp: require_file(tmp / "none")),
  (
    "1 of 1 episodes of always-SMALL are missing, such as 1 of 'train-fix': record them first",
    read_recorded,
    profile_recorded,
  ),
  (
    "episodes of always-SMALL were recorded without texts to learn from: record new ones...",
    read_recorded,
    lambda run: profile_recorded(run, forget_texts()),
  ),
  (
    "on dev and test only always-SMALL and always-LARGE are recorded: record another...",
    read_recorded,
    lambda run: run.source.policies(jobs.BOUNDARIES, None),
  ),
  (
    "the processes have different --config.seed: start all processes with the same value",
    differ,
  ),
  (
    "The model 'gpt-9' has no list price. Set --config.models.prices.",
    command,
    "--config.models.names=('gpt-9', 'gpt-4.1')",
  ),
  (
    "--config.models.names is ('gpt-4.1', 'gpt-4.1-mini'); one of them is costlier than the next: name the cheapest first, or set --config.models.prices",
    command,
    "--config.models.names=('gpt-4.1', 'gpt-4.1-mini')",
  ),
  (
    "TMP/quickstart has not finished the stage profile: run --stage=profile first",
    command,
    "--stage=references",
  ),
  (
    "TMP/quickstart has not finished the stage references: run --stage=references first",
    command,
    "--stage=pretrain",
  ),
  (
    "TMP/quickstart has not finished the stage references: run --stage=references first",
    command,
    "--stage=sft",
  ),
  (
    "BoSFT lacks episodes on dev: run --stage=evaluate first",
    report_unplayed,
  ),
  (
    "no task and seed of test has an episode of every policy: run --stage=evaluate first",
    report_nothing,
  ),
  (
    "always-LARGE must cost more and score more than always-SMALL, but their (cost, score) are (5.0, 0.6) and (5.0, 0.4): pass other boundaries",
    lambda tmp: frontier.area([3.0], [0.5], (5.0, 0.4), (5.0, 0.6)),
  ),
  (
    "got costs [nan] and scores [0.5]: pass a finite cost and a finite score for each point",
    lambda tmp: frontier.pareto([float("nan")], [0.5]),
  ),
]
