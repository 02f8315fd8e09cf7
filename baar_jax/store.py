"""Store a run's tasks, episodes, finished stages and paid calls in a SQLite file."""

import collections
import contextlib
import dataclasses
import fcntl
import itertools
import json
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import pandas
from pydantic import TypeAdapter, ValidationError

from baar_jax.config import Config
from baar_jax.episode import PRESUMED, REPLY, Episode, Key, Purpose, Reply, Task
from baar_jax.mesh import exchange

# The file in a run's directory with what its episodes depend on, beside the policy.
CONDITIONS = "conditions.json"
RESTORE = "restore the run's directory from a copy, or choose another --config.name"
KEY = ("policy", "task_id", "purpose", "trial")
BUDGETS = ("call_budget", "usd_budget")
EPISODE = TypeAdapter(Episode)
TASK = TypeAdapter(Task)
# Version of a run's files (SQLite's user_version). It rises when a column, a field of a
# stored record, the form of a policy's key, the vocabulary or the value heads change.
# Other files are refused.
VERSION = 8
OTHER_VERSION = (
  "{} was made by an older or a newer version of this program: choose another run"
)


def summarize_episode(episode: Episode) -> dict[str, Any]:
  """Compute the values of an episode's columns in the table of episodes.

  Returns:
    The episode's own fields, and these sums over its steps, by name. Dollars are US
    dollars.
      steps: number of all steps.
      deciding_usd: the router's compute, and a judge's answers.
      counted_usd: the method's dollars of all calls, which a cap counts, with failed
        attempts that belong to no step (`lost_usd`).
      reused: False; `Store.adopt` marks its copies.
  """
  steps = episode.steps
  names = (
    "score",
    "success",
    "call_budget",
    "usd_budget",
    "large_calls",
    "cost_usd",
    "spent_usd",
  )
  return {name: getattr(episode, name) for name in names} | {
    "steps": len(steps),
    "deciding_usd": sum(step.router_cost_usd + step.usd("judge") for step in steps),
    "counted_usd": sum(step.counted_usd for step in steps) + episode.lost_usd,
    "reused": False,
  }


COLUMNS = tuple(summarize_episode(Episode("", "", "test", 0, [], 0.0, "")))
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS tasks (
  split TEXT, place INTEGER, task TEXT, PRIMARY KEY (split, place));
CREATE TABLE IF NOT EXISTS episodes (
  policy TEXT, task_id TEXT, purpose TEXT, trial INTEGER, {", ".join(COLUMNS)},
  episode TEXT, PRIMARY KEY ({", ".join(KEY)}), CHECK (
  ifnull(score BETWEEN 0 AND 1 AND cost_usd >= 0 AND spent_usd >= 0, 0)));
CREATE TABLE IF NOT EXISTS finished (stage TEXT PRIMARY KEY);
PRAGMA user_version = {VERSION};
COMMIT;
"""


# Fields of the configuration that may change between the stages of one run. A changed
# field leaves stored results valid. It changes later trainings at most by the rounding
# of sums.
CHANGEABLE_FIELDS = """runs train_seeds env.processes env.live_per_process env.timeout_s
bopo.lam baselines profile.robustness evaluate value.cost_weights
value.capped_cost_weights distributed max_usd dry_run models.key_variables
models.token_limit_field models.timeout_s models.retries
sft.micro_episodes"""
CHANGEABLE = tuple(f"{name}." for name in CHANGEABLE_FIELDS.split())


class Store:
  """A SQLite file with a run's tasks, and its episodes by their KEY.

  An episode counts as played only after the transaction that stores it. SQLite's
  write-ahead log preserves finished transactions if the process is killed.
  """

  def __init__(self, path: Path | str, in_memory: bool = False):
    """Open the file, or create it.

    Args:
      path: the file; ":memory:" opens a store in memory, without a file.
      in_memory: whether to open a copy in memory, so that the file stays unchanged.

    Raises:
      sqlite3.Error: the file is no file of SQLite.
      ValueError: the file is no store of this version.
    """
    # Several threads use this connection, but never at the same time. So SQLite's
    # check that only one thread uses it is switched off.
    self._db = sqlite3.connect(path, check_same_thread=False)
    if in_memory:
      with contextlib.closing(self._db) as file:
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        file.backup(self._db)
    self._db.execute("PRAGMA journal_mode=WAL")
    self._db.execute("PRAGMA synchronous=NORMAL")
    (version,) = self._db.execute("PRAGMA user_version").fetchone()
    if not version:  # A new file has the version 0.
      self._db.executescript(_SCHEMA)
    if version not in (0, VERSION):
      raise ValueError(OTHER_VERSION.format(path))

  def put_tasks(self, split: str, tasks: Iterable[Task]) -> None:
    """Store all tasks of a split in their order. They replace the tasks stored before.

    Args:
      split: "train", "dev" or "test".
      tasks: all tasks of the split.
    """
    rows = [
      (split, place, json.dumps(vars(task) | {"split": split}))
      for place, task in enumerate(tasks)
    ]
    with self._db:
      self._db.execute("DELETE FROM tasks WHERE split = ?", (split,))
      self._db.executemany("INSERT INTO tasks VALUES (?, ?, ?)", rows)

  def tasks(self, split: str) -> list[Task]:
    """Read the tasks of a split, in their order.

    Raises:
      ValueError: a row is damaged.
    """
    query = "SELECT task FROM tasks WHERE split = ? ORDER BY place"
    rows = self._db.execute(query, (split,))
    return [TASK.validate_json(text) for (text,) in rows]

  def add(self, *episodes: Episode, finished: Iterable[str] = ()) -> None:
    """Store episodes and finished stages in one transaction.

    Args:
      episodes: the new episodes.
      finished: names to mark as finished, for the method `finished`.

    Raises:
      sqlite3.IntegrityError: an episode with the same KEY is stored; then the
        transaction stores nothing.
    """
    with self._db:
      for episode in episodes:
        key = (episode.policy, *episode.key)
        columns = summarize_episode(episode).values()
        row = (*key, *columns, episode.to_json())
        places = ", ".join("?" * len(row))
        self._db.execute(f"INSERT INTO episodes VALUES ({places})", row)
      self._db.executemany("INSERT OR IGNORE INTO finished VALUES (?)", zip(finished))

  def adopt(
    self, directory: Path, conditions: Mapping[str, Any], purposes: Sequence[Purpose]
  ) -> None:
    """Copy all tasks and some episodes of another run, marked as reused, or nothing.

    Args:
      directory: the other run's directory, which stays unchanged.
      conditions: what the episodes depend on; both runs must have the same.
      purposes: the purposes of the episodes to copy.

    Raises:
      ValueError: the other run has other conditions, or no episodes to copy.
    """
    before = json.loads(require_file(directory / CONDITIONS).read_text())
    for name, other, this in differences(before, conditions):
      raise ValueError(
        f"--config.reuse={directory} was played with other {name} ({other!r:.80}) than "
        f"this command's ({this!r:.80}): make them equal, or leave out --config.reuse"
      )
    path = require_file(directory / "episodes.sqlite")
    self._db.execute("ATTACH ? AS other", (str(path),))
    if self._db.execute("PRAGMA other.user_version").fetchone() != (VERSION,):
      raise ValueError(OTHER_VERSION.format(path))
    with self._db:
      self._db.execute("INSERT INTO tasks SELECT * FROM other.tasks")
      self._db.execute(
        "INSERT INTO episodes SELECT * FROM other.episodes "
        f"WHERE purpose IN ({', '.join('?' * len(purposes))})",
        purposes,
      )
      if not self._db.execute("UPDATE main.episodes SET reused = 1").rowcount:
        raise ValueError(
          f"--config.reuse={directory} has no episodes to copy: run its stages profile "
          "and references first"
        )
    self._db.execute("DETACH other")

  def keys(self, policy: str) -> set[Key]:
    """Return task, purpose and trial of a policy's stored episodes."""
    query = "SELECT task_id, purpose, trial FROM episodes WHERE policy = ?"
    return set(self._db.execute(query, (policy,)))

  def episodes(self, policy: str, keys: Collection[Key] | None = None) -> list[Episode]:
    """Read a policy's episodes, ordered by task, purpose and trial.

    Args:
      policy: the policy's key.
      keys: task, purpose and trial of the episodes to read; None reads all.

    Raises:
      ValueError: a row is damaged.
    """
    query = (
      "SELECT task_id, purpose, trial, episode FROM episodes WHERE policy = ? "
      "ORDER BY task_id, purpose, trial"
    )
    episodes = []
    for *key, text in self._db.execute(query, (policy,)):
      if keys is None or tuple(key) in keys:
        episodes.append(EPISODE.validate_json(text))
    return episodes

  def table(self, policies: Sequence[str] | None = None) -> pandas.DataFrame:
    """Read the columns of episodes as a table.

    Args:
      policies: keys of the policies; None reads all.

    Returns:
      A row per episode, ordered by KEY, with the columns KEY and COLUMNS. If an episode
        has no cap, the cap's column has NaN.
    """
    where = ""
    if policies is not None:
      where = f"WHERE policy IN ({', '.join('?' * len(policies))})"
    columns = ", ".join(KEY + COLUMNS)
    query = f"SELECT {columns} FROM episodes {where} ORDER BY {', '.join(KEY)}"
    table = pandas.read_sql(query, self._db, params=policies)
    return table.astype(
      dict.fromkeys(BUDGETS, float) | {"success": bool, "reused": bool}
    )

  def mean_latency_s(self, field: str = "latency_s") -> float | None:
    """Compute the mean seconds of a reply in all episodes; None without any.

    Args:
      field: "router_latency_s" has the mean seconds of a decision.
    """
    query = (
      "SELECT avg(atom) FROM (SELECT episode FROM episodes WHERE json_valid(episode)), "
      "json_tree(episode) WHERE key = ? AND atom > 0"
    )
    return self._db.execute(query, [field]).fetchone()[0]

  def sync(self, policy: str) -> None:
    """Copy a policy's episodes to the stores of all processes that lack them."""
    stored = self.keys(policy)
    keys_of_process = [set(map(tuple, keys)) for keys in exchange(sorted(stored))]
    missing = set.union(*keys_of_process) - set.intersection(*keys_of_process)
    if not missing:
      return
    sent = stored.intersection(missing)
    texts = [episode.to_json() for episode in self.episodes(policy, sent)]
    for episode in map(EPISODE.validate_json, itertools.chain(*exchange(texts))):
      if episode.key not in stored:
        self.add(episode)
        stored.add(episode.key)

  def finish(self, stage: str) -> None:
    """Mark a stage as finished."""
    self.add(finished=[stage])

  def finished(self, stage: str) -> bool:
    """Tell whether a stage is finished."""
    return bool(
      self._db.execute("SELECT 1 FROM finished WHERE stage = ?", (stage,)).fetchall()
    )

  def close(self) -> None:
    """Close the SQLite file."""
    self._db.close()


def flatten(config: Config) -> dict[str, object]:
  """Return a configuration's values by the name of the field, such as "bopo.lam"."""
  return pandas.json_normalize(dataclasses.asdict(config)).to_dict("records")[0]


def differences(old: Mapping, new: Mapping) -> Iterator[tuple[str, Any, Any]]:
  """Yield each name whose values differ, with both values; a missing one is None."""
  for name in old | new:
    if old.get(name) != new.get(name):
      yield name, old.get(name), new.get(name)


def require_file(path: Path) -> Path:
  """Require a path to be a regular file, before it is opened.

  Opening a named pipe would wait for a writer forever.

  Returns:
    The path.

  Raises:
    FileNotFoundError: there is no file, or it is a pipe, a directory or a device.
  """
  if not path.is_file():
    raise FileNotFoundError(f"{path} is missing or not a regular file")
  return path


def lock(path: Path) -> TextIO:
  """Open a file that no other process may have open, and make its directory.

  Raises:
    ValueError: another process has it.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  file = path.open("a")
  try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise ValueError(
      f"another process is using {path}: "
      "wait for its end or choose another --config.name"
    ) from None
  return file


def read_config(directory: Path) -> Config | None:
  """Read the configuration of a run's directory.

  Returns:
    The configuration, or None if the directory has none.

  Raises:
    ValueError: config.json cannot be read, or the store is missing. Without the store,
      the dollars that the run has spent are unknown.
  """
  path = directory / "config.json"
  if not path.exists():
    return None
  try:
    stored = TypeAdapter(Config).validate_json(require_file(path).read_bytes())
  except ValidationError:
    raise ValueError(
      f"{path} is damaged, or was made by an older version: {RESTORE}"
    ) from None
  for number in range(stored.distributed.processes):
    store = directory / (f"episodes-{number}.sqlite" if number else "episodes.sqlite")
    if not store.exists() or not store.stat().st_size:
      raise ValueError(
        f"{store} is missing or empty, so the spent dollars are unknown: {RESTORE}"
      )
  return stored


def read_run(directory: Path) -> Config:
  """Read the configuration of a run's directory, which must have one.

  Raises:
    ValueError: the directory has no configuration, its store has another version, or
      `read_config` raises.
  """
  config = read_config(directory)
  if not config:
    raise ValueError(
      f"{directory} is no directory of a run: it has no config.json; "
      "give the directory <runs>/<name> of a run"
    )
  path = directory / "episodes.sqlite"
  with path.open("rb") as file:
    # SQLite's header has user_version at byte 60; it is 0 while only the log has it.
    version = int.from_bytes(file.read(64)[60:], "big")
  if version not in (0, VERSION):
    raise ValueError(OTHER_VERSION.format(path))
  return config


# The kind of an attempt that has not ended. If the process was killed meanwhile, the
# attempt counts at its worst case.
OPEN = "open"
REPLY_ROW = TypeAdapter(Reply)

INSERT = "INSERT INTO calls (model, kind, usd, request) VALUES (?, ?, ?, ?)"
_CALLS = """
CREATE TABLE IF NOT EXISTS calls (
  id INTEGER PRIMARY KEY, model INTEGER, kind TEXT,
  usd REAL NOT NULL CHECK (usd >= 0), request TEXT, reply TEXT);
CREATE INDEX IF NOT EXISTS calls_by_request ON calls (request) WHERE reply IS NOT NULL;
"""


def open_calls(path: Path | str) -> sqlite3.Connection:
  """Open a SQLite file of episodes, and create its table of calls if needed.

  Each commit waits until the disk has the data, so that even a power loss forgets no
  call that was sent.
  """
  db = sqlite3.connect(path, check_same_thread=False, timeout=60)
  db.execute("PRAGMA journal_mode=WAL")
  db.execute("PRAGMA synchronous=FULL")
  db.executescript(_CALLS)
  return db


class Calls:
  """Record each attempt at a call on disk, both before and after the attempt.

  Threads may share the object. If the process is killed, its unfinished calls keep the
  kind OPEN and count at their worst case.
  """

  def __init__(self, path: Path | str):
    """Open the SQLite file in which this process also stores its episodes."""
    self._lock = threading.Lock()
    self._db = open_calls(path)

  def begin(self, model: int, worst_usd: float, request: str) -> int:
    """Record an attempt that is about to be made.

    Args:
      model: index of the model.
      worst_usd: the worst case of the attempt.
      request: hash of the request.

    Returns:
      The number of the attempt, for `end`.
    """
    with self._lock, self._db:
      return self._db.execute(INSERT, (model, OPEN, worst_usd, request)).lastrowid

  def end(
    self,
    call: int,
    kind: str,
    usd: float,
    reply: Reply | None = None,
  ) -> None:
    """Record the end of an attempt.

    Args:
      call: the number of the attempt, as `begin` returned it.
      kind: the kind of outcome, such as REPLY; see `provider.Outcome`.
      usd: the cost of the attempt.
      reply: the reply to replay if the same request comes again.
    """
    text = None
    if reply is not None:
      text = json.dumps(reply, default=vars, ensure_ascii=False)
    update = "UPDATE calls SET kind = ?, usd = ?, reply = ? WHERE id = ?"
    with self._lock, self._db:
      self._db.execute(update, (kind, usd, text, call))

  def find(self, request: str) -> Reply | None:
    """Find the recorded reply to a request, and mark it as replayed.

    Args:
      request: hash of the request.

    Returns:
      The reply; None if the request has no recorded reply.

    Raises:
      ValueError: the recorded reply is damaged.
    """
    select = "SELECT reply FROM calls WHERE request = ? AND reply IS NOT NULL"
    with self._lock:
      row = self._db.execute(select, (request,)).fetchone()
    if row is None:
      return None
    reply = REPLY_ROW.validate_json(row[0])
    call = dataclasses.replace(reply.call, replayed=True)
    return dataclasses.replace(reply, call=call)

  def close(self) -> None:
    """Close the SQLite file."""
    with self._lock:
      self._db.close()


def read_spent(directory: Path) -> collections.Counter[int | str]:
  """Add up the dollars of all calls that a run's processes have recorded.

  Args:
    directory: the run's directory.

  Returns:
    The dollars of usable replies by the index of their model, and those of other
    attempts by the kind of their outcome. An attempt that has not ended is PRESUMED.
    The total is an upper bound, because unknown outcomes count at their worst case.
  """
  spent_usd = collections.Counter()
  later_processes = directory.glob("episodes-[0-9]*.sqlite")
  for path in sorted([*later_processes, *directory.glob("episodes.sqlite")]):
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as db:
      if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'calls'").fetchone():
        continue
      sums = db.execute("SELECT model, kind, sum(usd) FROM calls GROUP BY 1, 2")
      for model, kind, usd in sums:
        key = {REPLY: model, OPEN: PRESUMED}.get(kind, kind)
        spent_usd[key] += usd
  return spent_usd
