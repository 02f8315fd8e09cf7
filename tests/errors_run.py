"""The errors of a run's directory, its store, its stages and its report."""

import fcntl
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest import mock

import tickets
import tiny
from errors_config import command
from report_store import BOUNDARIES, config, fill, specs

from baar_jax.config import Config, ModelsConfig
from baar_jax.envs import engines
from baar_jax.envs.code.adapter import read_recording
from baar_jax.episode import SPLITS, Episode, Task
from baar_jax.families.family import RouterSpec
from baar_jax.report import frontier
from baar_jax.report.table import load_split
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import ALWAYS_SMALL
from baar_jax.rollout.source import env_arguments
from baar_jax.rollout.specs import Job
from baar_jax.run import Run
from baar_jax.store import CONDITIONS, Store, read_config, read_run

TASK = Task("t", "train", "do it", 9)


def damage_file(tmp: Path) -> None:
  Store(tmp / "store").close()
  with (tmp / "store").open("r+b") as file:
    file.seek(100)
    file.write(b"\xff" * 3996)  # the page with the schema
  Store(tmp / "store")


def make_older(path: Path) -> None:
  with closing(sqlite3.connect(path)) as db:
    db.execute("PRAGMA user_version = 4")


def open_older(tmp: Path) -> None:
  Store(tmp / "store").close()
  make_older(tmp / "store")
  Store(tmp / "store")


def change_run(
  tmp: Path, change: Callable[[Path], object], kl_beta: float | None = None
) -> None:
  """Change the directory of a run with tasks, and open it again."""
  config = tiny.config(tmp)
  with closing(Run(config)) as run:
    run.tasks("train")
  change(run.dir)
  if kl_beta is not None:
    config.bopo.kl_beta = kl_beta
  Run(config)


def lose_tasks(tmp: Path) -> None:
  (tmp / "tiny" / "checkpoints").mkdir(parents=True)
  Run(tiny.config(tmp))


def use_twice(tmp: Path) -> None:
  # A process does not lock itself out, so the lock of another one is simulated.
  with mock.patch.object(fcntl, "lockf", side_effect=BlockingIOError):
    Run(tiny.config(tmp))


def read_recorded(tmp: Path, act: Callable[[Run], object]) -> None:
  """Act on a run whose episodes are recorded: three tasks without episodes."""
  config = tiny.config(tmp, kind="stored")
  config.models = ModelsConfig("chat")
  with closing(Run(config)) as run:
    for split in SPLITS:
      run.store.put_tasks(split, [Task(f"{split}-fix", split, "fix", 9)])
    act(run)


def profile_recorded(run: Run, *episodes: Episode) -> None:
  run.store.add(*episodes)
  trials = [Job(task, "profile", 0) for task in run.tasks("train")]
  run.play("", {ALWAYS_SMALL: trials}, None)


def reuse(tmp: Path, change: Callable[[Config], object]) -> None:
  """Open a run that reuses another one, after a change of its configuration or files."""
  with closing(Run(tiny.config(tmp))) as run:
    run.tasks("train")
    run.store.add(tiny.episode("t", ALWAYS_SMALL.key))
  config = tiny.config(tmp, "again")
  config.reuse = str(run.dir)
  change(config)
  Run(config)


def change_prompts(config: Config) -> None:
  path = Path(config.reuse, CONDITIONS)
  path.write_text(path.read_text().replace("Action:", "Do:"))


def reuse_older(config: Config) -> None:
  make_older(Path(config.reuse, "episodes.sqlite"))


def change_recording(tmp: Path) -> None:
  config = tickets.configure(tmp)
  for trials in (1, 2):
    tickets.record(config, (), trials)
    read_recording.cache_clear()
    with closing(Run(config)) as run:
      run.tasks("train")


def confine(tmp: Path) -> None:
  """Play tickets live where agents' code cannot be confined."""
  live = tickets.configure(tmp)
  live.models.kind = "chat"
  live.env.options = {}
  with mock.patch.object(engines, "can_confine", lambda engine: False):
    env_arguments(live)


def report_unplayed(tmp: Path) -> None:
  store = fill(BOUNDARIES)
  load_split(store, [*specs(BOUNDARIES), RouterSpec("sft")], config(), "dev")


def report_nothing(tmp: Path) -> None:
  load_split(Store(":memory:"), specs(BOUNDARIES), config(), "test")


CASES = [
  ("...install it (...bubblewrap), or...--config.env.options.trusted=True...", confine),
  (
    "--config.distributed.fsdp=1000 must divide...Set a divisor, or 0...",
    command,
    "--config.distributed.fsdp=1000",
  ),
  ("...malformed...", damage_file),
  (
    "TMP/store was made by an older or a newer version...choose another run",
    open_older,
  ),
  (
    "TMP/tiny/config.json is damaged, or was made by an older version: restore...",
    change_run,
    lambda run: (run / "config.json").write_text("{"),
  ),
  (
    "TMP/tiny/config.json is missing or not a regular file",
    change_run,
    lambda run: (run / "config.json").unlink() or os.mkfifo(run / "config.json"),
  ),
  (
    "TMP/tiny/episodes.sqlite is missing or empty...dollars are unknown: restore...",
    change_run,
    lambda run: (run / "episodes.sqlite").unlink(),
  ),
  (
    "TMP/tiny has bopo.kl_beta=0.04, this command has 0.2: set --config.bopo.kl_beta...",
    change_run,
    read_config,
    0.2,
  ),
  ("TMP/tiny has checkpoints, and its store has no tasks: restore...", lose_tasks),
  ("TMP is no directory of a run...give the directory <runs>/<name>...", read_run),
  ("another process is using TMP/tiny/lock: wait...", use_twice),
  (
    "no train task is recorded yet: record five tasks first",
    read_recorded,
    lambda run: run.source.list_tasks("train"),
  ),
  (
    "1 of 1 episodes of always-small are missing, such as 1 of 'train-fix': record...",
    read_recorded,
    profile_recorded,
  ),
  (
    "...only always-SMALL and always-LARGE are recorded: record another...",
    read_recorded,
    lambda run: run.source.list_playable(jobs.BOUNDARIES),
  ),
  (
    "--config.reuse=TMP/tiny was played with other env.max_steps (10)...(9): make...",
    reuse,
    lambda config: vars(config.env).update(max_steps=9),
  ),
  ("--config.reuse=TMP/tiny was played with other prompts...", reuse, change_prompts),
  ("TMP/tiny/episodes.sqlite was made by an older or...", reuse, reuse_older),
  ("TMP/tiny was played with another state of the recording TMP...", change_recording),
  (
    "--config.models.names is ('gpt-4.1', 'gpt-4.1-mini')...name the cheapest first...",
    command,
    "--config.models.names=('gpt-4.1', 'gpt-4.1-mini')",
  ),
  (
    "...has not finished the stage references: run --stage=references first",
    command,
    "--stage=sft",
  ),
  (
    "sft lacks episodes on dev: play or record them first (--stage=evaluate)",
    report_unplayed,
  ),
  ("no task and trial of test...play or record them first...", report_nothing),
  (
    "always-LARGE must cost more and score more...(5.0, 0.6) and (5.0, 0.4)...",
    lambda tmp: frontier.area([3.0], [0.5], (5.0, 0.4), (5.0, 0.6)),
  ),
  (
    "got costs [nan] and scores [0.5]...",
    lambda tmp: frontier.pareto([float("nan")], [0.5]),
  ),
]
