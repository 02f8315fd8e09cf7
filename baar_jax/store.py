"""The run's SQLite file of tasks, episodes and finished stages."""

import collections
import contextlib
import dataclasses
import itertools
import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from pydantic import TypeAdapter, ValidationError

from baar_jax.config import Config
from baar_jax.episode import SMALL, SPLITS, Episode, Task
from baar_jax.mesh import exchange

RESTORE = "restore a copy, or choose another --config.name"
# Processes exchange this number of episodes at a time.
SYNC_CHUNK = 256
KEY = ("policy", "task_id", "seed")
# Each five tasks that clients name go into these splits, in turn (our choice).
SPLIT_OF = ("train", "dev", "train", "test", "train")
BUDGETS = ("call_budget", "usd_budget")
# These fields of `env` became options; they had these defaults.
MOVED_OPTIONS = {"data": "", "short_tasks": True}
MOVED_OPTIONS |= dict.fromkeys(("train_split", "dev_split", "test_split"), "")
EPISODE = TypeAdapter(Episode)
TASK = TypeAdapter(Task)
EPISODE_NAME = "the episode of policy {}, task {}, seed {}"
# A file's user_version; it rises when policies get other names.
VERSION = 1
# Version 0 had the names on the left in the keys of policies.
RENAMED = {
  "price=": "cost_weight=",
  "bold=": "optimism=",
  "always(model=": "always(rank=",
  "together(samples=0,": "exploration(",
  "together(samples=": "exploration(steps=",
  "explored(samples=": "exploration-all(samples=",
  ",together=0,": ",",
  ",together=0)": ")",
  ",together=": ",steps=",
}


def summarize_episode(episode: Episode) -> dict[str, Any]:
  """Compute an episode's columns.

  Returns:
    `decisions` and `judgements` count steps. `large_usd` includes untaken proposals of
    models costlier than SMALL. `proposals_usd` leaves out replayed ones. `retries_usd`
    includes `lost_usd`. Tokens are completion tokens.
  """
  steps = episode.steps
  usd = collections.Counter()
  tokens = collections.Counter()
  decisions = 0
  judgements = 0
  for step in steps:
    decisions += step.logp is not None or step.router_cost_usd > 0
    judgements += any(call.kind == "judge" for call in step.calls)
    for call in step.calls:
      part = call.kind
      if part in ("act", "proposal") and call.model != SMALL:
        part = "large"
      elif part == "act":
        part = "small"
      tokens[part] += call.usage.completion_tokens
      cost_usd = call.cost_usd
      # The ledger takes proposals off the recorded calls, which count a replay once.
      if part == "proposal" and call.replayed:
        cost_usd = 0.0
      usd[part] += cost_usd
  names = ("score", "success", "stop", "call_budget", "usd_budget", "large_calls")
  names += ("cost_usd", "spent_usd", "reused")
  return {name: getattr(episode, name) for name in names} | {
    "steps": len(steps),
    "decisions": decisions,
    "judgements": judgements,
    "small_usd": usd["small"],
    "large_usd": usd["large"],
    "proposals_usd": usd["proposal"],
    "judge_usd": usd["judge"],
    # A lost attempt is a retry in no step.
    "retries_usd": usd["retry"] + episode.lost_usd,
    "router_usd": sum(step.router_cost_usd for step in steps),
    "presumed_usd": usd["presumed"],
    "small_tokens": tokens["small"],
    "large_tokens": tokens["large"],
    "proposal_tokens": tokens["proposal"],
    "judge_tokens": tokens["judge"],
    "router_latency_s": sum(step.router_latency_s for step in steps),
  }


COLUMNS = tuple(summarize_episode(Episode("", "", 0, [], 0.0, "")))
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS tasks (
  split TEXT, place INTEGER, task TEXT, PRIMARY KEY (split, place));
CREATE TABLE IF NOT EXISTS episodes (
  policy TEXT, task_id TEXT, seed INTEGER, {", ".join(COLUMNS)},
  equals TEXT, episode TEXT,
  PRIMARY KEY (policy, task_id, seed));
CREATE TABLE IF NOT EXISTS finished (stage TEXT PRIMARY KEY);
"""


class Store:
  """Episodes by (policy, task_id, seed), and their tasks.

  Everything is on disk before it counts; WAL keeps it through kill -9.
  """

  def __init__(self, path: Path | str, in_memory: bool = False):
    """Open the file, or create it.

    Args:
      in_memory: a copy is opened, and the file stays as it is.

    Raises:
      ValueError: the file cannot be used as a store.
    """
    self._path = path
    try:
      # Threads take turns.
      self._db = sqlite3.connect(path, check_same_thread=False)
      if in_memory:
        with contextlib.closing(self._db) as file:
          self._db = sqlite3.connect(":memory:", check_same_thread=False)
          file.backup(self._db)
      self._db.execute("PRAGMA journal_mode=WAL")
      self._db.execute("PRAGMA synchronous=NORMAL")
      (version,) = self._db.execute("PRAGMA user_version").fetchone()
      if version <= VERSION:
        self._db.executescript(_SCHEMA)
      columns = [row[1] for row in self._db.execute("PRAGMA table_info(episodes)")]
      fits = version <= VERSION and columns == [*KEY, *COLUMNS, "equals", "episode"]
      if fits and version < VERSION:
        self._convert()
    except sqlite3.Error as error:
      problem = f"{path} cannot be used as an episode store ({error})"
      raise ValueError(f"{problem}; move it away or restore a copy") from error
    if not fits:
      problem = f"{path} was made by another version of this program"
      raise ValueError(f"{problem}: choose another --config.name")

  def _convert(self) -> None:
    """Rename the policies of a store that an older version made, once."""
    policy = "policy"
    for old, new in RENAMED.items():
      policy = f"replace({policy}, '{old}', '{new}')"
    equals = policy.replace("policy", "equals", 1)
    has_sessions = "SELECT 1 FROM sqlite_master WHERE name = 'sessions'"
    with self._db:
      self._db.execute(f"UPDATE episodes SET policy = {policy}, equals = {equals}")
      if self._db.execute(has_sessions).fetchone():
        stored = policy.replace("policy", "json_extract(state, '$.policy')", 1)
        self._db.execute(
          f"UPDATE sessions SET state = json_set(state, '$.policy', {stored})"
        )
      self._db.execute(f"PRAGMA user_version = {VERSION}")

  def put_tasks(self, split: str, tasks: Iterable[Task]) -> None:
    """Save the tasks of a split in their order, in place of earlier ones."""
    rows = []
    for place, task in enumerate(tasks):
      rows.append((split, place, json.dumps(vars(task) | {"split": split})))
    with self._db:
      self._db.execute("DELETE FROM tasks WHERE split = ?", (split,))
      self._db.executemany("INSERT INTO tasks VALUES (?, ?, ?)", rows)

  def name_task(self, task_id: str, description: str, max_steps: int) -> Task:
    """Find the task that clients know by this name.

    A new task gets its split from SPLIT_OF, and keeps it.
    """
    named = {task.id: task for split in SPLITS for task in self.tasks(split)}
    if task_id not in named:
      split = SPLIT_OF[len(named) % len(SPLIT_OF)]
      named[task_id] = Task(task_id, split, description, max_steps)
      self.put_tasks(split, [*self.tasks(split), named[task_id]])
    return named[task_id]

  def tasks(self, split: str) -> list[Task]:
    """Read the tasks of a split, in their order."""
    query = "SELECT place, task FROM tasks WHERE split = ? ORDER BY place"
    rows = self._db.execute(query, (split,))
    return [self._read(TASK, text, f"{split} task {place}") for place, text in rows]

  def add(self, *episodes: Episode, finished: Iterable[str] = ()) -> None:
    """Store episodes, and marks of `finish`, in one transaction.

    Raises:
      ValueError: the key of an episode is taken; nothing is stored.
    """
    with self._db:
      for episode in episodes:
        key = (episode.policy, episode.task_id, episode.seed)
        columns = summarize_episode(episode).values()
        row = (*key, *columns, None, episode.to_json())
        places = ", ".join("?" * len(row))
        try:
          self._db.execute(f"INSERT INTO episodes VALUES ({places})", row)
        except sqlite3.IntegrityError:
          raise ValueError(f"episode {key} is already stored in {self._path}") from None
      self._db.executemany("INSERT INTO finished VALUES (?)", zip(finished))

  def add_equal(
    self, policy: str, call_budget: int, other: str, keys: Iterable[tuple[str, int]]
  ) -> None:
    """Store episodes that a cap did not change under a capped policy, too.

    They are marked as reused, and refer to the text of the others.

    Args:
      policy: the capped policy.
      other: the policy whose episodes they equal.
      keys: (task_id, seed) of the episodes.
    """
    changed = ("call_budget", "reused")
    copied = ", ".join(name for name in COLUMNS if name not in changed)
    insert = (
      "INSERT INTO episodes "
      f"(policy, call_budget, reused, task_id, seed, equals, {copied}) "
      f"SELECT ?, ?, 1, task_id, seed, coalesce(equals, policy), {copied} "
      "FROM episodes WHERE policy = ? AND task_id = ? AND seed = ?"
    )
    with self._db:
      for key in keys:
        self._db.execute(insert, (policy, call_budget, other, *key))

  def keys(self, policy: str) -> set[tuple[str, int]]:
    """Find (task_id, seed) of every stored episode of a policy."""
    query = "SELECT task_id, seed FROM episodes WHERE policy = ?"
    return set(self._db.execute(query, (policy,)))

  def episodes(
    self, policy: str, keys: Collection[tuple[str, int]] | None = None
  ) -> list[Episode]:
    """Read a policy's episodes, by task and seed: all, or those of (task_id, seed)."""
    query = (
      "SELECT e.task_id, e.seed, coalesce(e.episode, o.episode), "
      "e.call_budget, e.reused FROM episodes e LEFT JOIN episodes o "
      "ON o.policy = e.equals AND o.task_id = e.task_id AND o.seed = e.seed "
      "WHERE e.policy = ? ORDER BY e.task_id, e.seed"
    )
    episodes = []
    for task_id, seed, text, call_budget, reused in self._db.execute(query, (policy,)):
      if keys is not None and (task_id, seed) not in keys:
        continue
      episode = self._read(EPISODE, text, EPISODE_NAME.format(policy, task_id, seed))
      episode = dataclasses.replace(
        episode, policy=policy, call_budget=call_budget, reused=bool(reused)
      )
      episodes.append(episode)
    return episodes

  def _read(self, record: TypeAdapter, text: str, name: str) -> Episode | Task:
    """Read the record of a row. Raises ValueError with its name if it is damaged."""
    try:
      return record.validate_json(text)
    except ValidationError:
      raise self._unreadable(name) from None

  def _unreadable(self, name: str) -> ValueError:
    """Make the error of a row that cannot be read."""
    return ValueError(
      f"{self._path}: {name} cannot be read: restore a copy of the file"
    )

  def table(self, policies: Sequence[str] | None = None) -> pandas.DataFrame:
    """Read the columns of these policies' episodes, or of all: a row each, by KEY."""
    where = ""
    if policies is not None:
      where = f"WHERE policy IN ({', '.join('?' * len(policies))})"
    columns = ", ".join(KEY + COLUMNS)
    query = f"SELECT {columns} FROM episodes {where} ORDER BY {', '.join(KEY)}"
    table = pandas.read_sql(query, self._db, params=policies)
    numbers = table.drop(columns=["policy", "task_id", "stop"])
    numbers = numbers.apply(pandas.to_numeric, errors="coerce").astype(float)
    fine = np.isfinite(numbers) & (numbers >= 0)
    # None is no cap.
    fine[[*BUDGETS]] |= table[[*BUDGETS]].isna()
    bad_keys = table[[*KEY]][~fine.all(axis=1) | (numbers.score > 1)]
    if len(bad_keys):
      raise self._unreadable(EPISODE_NAME.format(*bad_keys.iloc[0]))
    types = dict.fromkeys(BUDGETS, float) | {"success": bool, "reused": bool}
    return table.astype(types)

  def sync(self, policy: str) -> None:
    """Copy the episodes of a policy to the stores of all processes."""
    stored = self.keys(policy)
    keys_of_process = [set(map(tuple, keys)) for keys in exchange(sorted(stored))]
    lacking = sorted(set.union(*keys_of_process) - set.intersection(*keys_of_process))
    for start in range(0, len(lacking), SYNC_CHUNK):
      sent = stored.intersection(lacking[start : start + SYNC_CHUNK])
      texts = [episode.to_json() for episode in self.episodes(policy, sent)]
      for episode in map(EPISODE.validate_json, itertools.chain(*exchange(texts))):
        key = (episode.task_id, episode.seed)
        if key not in stored:
          self.add(episode)
          stored.add(key)

  def finish(self, stage: str) -> None:
    """Mark a stage as run to its end."""
    with self._db:
      self._db.execute("INSERT OR IGNORE INTO finished VALUES (?)", (stage,))

  def finished(self, stage: str) -> bool:
    """Tell whether a stage has been run to its end."""
    query = "SELECT 1 FROM finished WHERE stage = ?"
    return bool(self._db.execute(query, (stage,)).fetchall())

  def close(self) -> None:
    """Close the file."""
    self._db.close()


def convert_config(stored: object) -> object:
  """Convert a stored configuration of an older version; any other stays as it is."""
  if not isinstance(stored, dict):
    return stored
  converted = dict(stored)
  for name, convert in (("env", move_options), ("references", move_plans)):
    if isinstance(stored.get(name), dict):
      converted[name] = convert(dict(stored[name]))
  return converted


def move_options(env: dict) -> dict:
  """Convert a section `env` whose options were fields of its own.

  Only values that differ from their defaults become options.
  """
  options = {}
  for name, default in MOVED_OPTIONS.items():
    value = env.pop(name, default)
    if value != default:
      options[name] = value
  return env | {"options": options | env.get("options", {})}


def move_plans(references: dict) -> dict:
  """Convert a section `references` whose kinds of plans were fields."""
  for_all = references.pop("explored", False)
  plans = []
  if for_all:
    plans.append(("samples", references.get("samples"), True))
  for name, kind in (("together", "steps"), ("repeats", "repeats")):
    count = references.pop(name, 0)
    if count:
      plans.append((kind, count, for_all))
  return {"plans": plans} | references


def read_config(directory: Path) -> Config | None:
  """Read the configuration that a run's directory was made with, or None.

  Raises:
    ValueError: it cannot be read, or a store is gone and with it the spent dollars.
  """
  path = directory / "config.json"
  if not path.exists():
    return None
  try:
    stored = TypeAdapter(Config).validate_python(
      convert_config(json.loads(path.read_bytes()))
    )
  except (ValueError, TypeError, RecursionError):
    raise ValueError(f"{path} is no configuration of this version: {RESTORE}") from None
  for number in range(stored.distributed.processes):
    store = directory / (f"episodes-{number}.sqlite" if number else "episodes.sqlite")
    if not store.exists() or not store.stat().st_size:
      raise ValueError(
        f"{store} is gone or empty, and with it what was spent: {RESTORE}"
      )
  return stored


def read_run(directory: Path) -> Config:
  """Read the configuration of a run's directory. Raises ValueError if it has none."""
  config = read_config(directory)
  if not config:
    raise ValueError(f"{directory} is no directory of a run: it has no config.json")
  return config
