"""The run's SQLite file: tasks, episodes and finished stages, each on disk before it counts."""

import collections
import dataclasses
import itertools
import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas
from pydantic import TypeAdapter, ValidationError

from baar_jax.config import Config
from baar_jax.episode import SMALL, SPLITS, Episode, Task
from baar_jax.mesh import exchange

RESTORE = "restore a copy, or choose another --config.name"
SYNC_CHUNK = 256  # episodes that processes exchange at a time
KEY = ("policy", "task_id", "seed")
SPLIT_OF = (
  "train",
  "dev",
  "train",
  "test",
  "train",
)  # of each five tasks that clients name
BUDGETS = ("call_budget", "usd_budget")
# Fields of `env` before its options, with their defaults.
MOVED_OPTIONS = {"data": "", "short_tasks": True}
MOVED_OPTIONS |= dict.fromkeys(("train_split", "dev_split", "test_split"), "")
EPISODE, TASK = TypeAdapter(Episode), TypeAdapter(Task)
EPISODE_NAME = "the episode of policy {}, task {}, seed {}"
VERSION = 1  # of a store's file
# In the keys of version 0: what stands for it now.
RENAMED = {
  "price=": "cost_weight=",
  "bold=": "optimism=",
  "always(model=": "always(rank=",
  "together(samples=0,": "exploration(",
  "together(samples=": "exploration(together=",
  "explored(samples=": "exploration-all(samples=",
  ",together=0,": ",",
  ",together=0)": ")",
}


def summarize_episode(episode: Episode) -> dict:
  """An episode's columns: `decisions` and `judgements` count steps, `retries_usd` includes
  `lost_usd`, tokens are completion tokens. `proposals_usd` is without replayed ones, because the
  ledger takes it off the recorded calls, where a replayed reply counts once. Proposals of models
  dearer than SMALL that were not taken are parts of `large_usd`."""
  steps, calls = episode.steps, [call for step in episode.steps for call in step.calls]
  usd, tokens = collections.Counter(), collections.Counter()
  for call in calls:
    part = "small" if call.kind == "act" else call.kind
    if call.kind in ("act", "proposal") and call.model != SMALL:
      part = "large"
    usd[part] += 0.0 if part == "proposal" and call.replayed else call.cost_usd
    tokens[part] += call.usage.completion_tokens
  fields = (
    "score",
    "success",
    "stop",
    "call_budget",
    "usd_budget",
    "large_calls",
    "cost_usd",
  )
  return {
    **{name: getattr(episode, name) for name in (*fields, "spent_usd", "reused")},
    "steps": len(steps),
    "decisions": sum(
      step.logp is not None or step.router_cost_usd > 0 for step in steps
    ),
    "judgements": sum(
      any(call.kind == "judge" for call in step.calls) for step in steps
    ),
    "small_usd": usd["small"],
    "large_usd": usd["large"],
    "proposals_usd": usd["proposal"],
    "judge_usd": usd["judge"],
    "retries_usd": usd["retry"]
    + episode.lost_usd,  # a lost attempt is a retry in no step
    "router_usd": sum(step.router_cost_usd for step in steps),
    "presumed_usd": usd["presumed"],
    **{
      f"{part}_tokens": tokens[part] for part in ("small", "large", "proposal", "judge")
    },
    "router_latency_s": sum(step.router_latency_s for step in steps),
  }


COLUMNS = tuple(summarize_episode(Episode("", "", 0, [], 0.0, "")))
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS tasks (
  split TEXT, place INTEGER, task TEXT, PRIMARY KEY (split, place));
CREATE TABLE IF NOT EXISTS episodes (
  policy TEXT, task_id TEXT, seed INTEGER, {", ".join(COLUMNS)}, equals TEXT, episode TEXT,
  PRIMARY KEY (policy, task_id, seed));
CREATE TABLE IF NOT EXISTS finished (stage TEXT PRIMARY KEY);
"""


class Store:
  """Episodes by (policy, task_id, seed), and their tasks; WAL keeps them through kill -9."""

  def __init__(self, path: Path | str):
    """Opens or creates the file. Raises ValueError if it cannot be used as a store."""
    self._path = path
    try:
      self._db = sqlite3.connect(path, check_same_thread=False)  # threads take turns
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
    """Saves the tasks of a split, which they are then said to be of, in their order."""
    texts = (json.dumps(vars(task) | {"split": split}) for task in tasks)
    rows = [(split, place, text) for place, text in enumerate(texts)]
    with self._db:
      self._db.execute("DELETE FROM tasks WHERE split = ?", (split,))
      self._db.executemany("INSERT INTO tasks VALUES (?, ?, ?)", rows)

  def name_task(self, task_id: str, description: str, max_steps: int) -> Task:
    """The task that clients know by this name. A new one comes into a split, where it stays: of
    each five the second into dev, the fourth into test, the others into train (our choice)."""
    known = {task.id: task for split in SPLITS for task in self.tasks(split)}
    if task_id not in known:
      split = SPLIT_OF[len(known) % len(SPLIT_OF)]
      known[task_id] = Task(task_id, split, description, max_steps)
      self.put_tasks(split, [task for task in known.values() if task.split == split])
    return known[task_id]

  def tasks(self, split: str) -> list[Task]:
    query = "SELECT place, task FROM tasks WHERE split = ? ORDER BY place"
    rows = self._db.execute(query, (split,))
    return [self._read(TASK, text, f"{split} task {place}") for place, text in rows]

  def add(self, *episodes: Episode, finished: Iterable[str] = ()) -> None:
    """Stores episodes, and marks as of `finish`, in one transaction. Raises ValueError if the key
    of one is taken, and then stores none."""
    with self._db:
      for e in episodes:
        key = e.policy, e.task_id, e.seed
        row = (*key, *summarize_episode(e).values(), None, e.to_json())
        try:
          self._db.execute(
            f"INSERT INTO episodes VALUES ({', '.join('?' * len(row))})", row
          )
        except sqlite3.IntegrityError:
          raise ValueError(f"episode {key} is already stored in {self._path}") from None
      self._db.executemany(
        "INSERT INTO finished VALUES (?)", [(mark,) for mark in finished]
      )

  def add_equal(
    self, policy: str, call_budget: int, other: str, keys: Iterable[tuple[str, int]]
  ) -> None:
    """Stores episodes of `other` that a cap did not change under `policy` too, without their text,
    marked as reused; `keys` are their (task_id, seed)."""
    copied = ", ".join(
      name for name in COLUMNS if name not in ("call_budget", "reused")
    )
    with self._db:
      self._db.executemany(
        f"INSERT INTO episodes (policy, call_budget, reused, task_id, seed, equals, {copied}) "
        f"SELECT ?, ?, 1, task_id, seed, coalesce(equals, policy), {copied} "
        "FROM episodes WHERE policy = ? AND task_id = ? AND seed = ?",
        [(policy, call_budget, other, *key) for key in keys],
      )

  def keys(self, policy: str) -> set[tuple[str, int]]:
    """(task_id, seed) of every stored episode of a policy."""
    return set(
      self._db.execute("SELECT task_id, seed FROM episodes WHERE policy = ?", (policy,))
    )

  def episodes(
    self, policy: str, keys: Collection[tuple[str, int]] | None = None
  ) -> list[Episode]:
    """Read a policy's episodes, by task and seed: all, or those of (task_id, seed)."""
    query = (
      "SELECT e.task_id, e.seed, coalesce(e.episode, o.episode), e.call_budget, e.reused "
      "FROM episodes e LEFT JOIN episodes o "
      "ON o.policy = e.equals AND o.task_id = e.task_id AND o.seed = e.seed "
      "WHERE e.policy = ? ORDER BY e.task_id, e.seed"
    )
    episodes = []
    for task_id, seed, text, call_budget, reused in self._db.execute(query, (policy,)):
      if keys is not None and (task_id, seed) not in keys:
        continue
      episode = self._read(EPISODE, text, EPISODE_NAME.format(policy, task_id, seed))
      fields = {"policy": policy, "call_budget": call_budget, "reused": bool(reused)}
      episodes.append(dataclasses.replace(episode, **fields))
    return episodes

  def _read(self, record: TypeAdapter, text: str, name: str) -> Episode | Task:
    """The record of a row, which its name tells apart. Raises ValueError if it cannot be read."""
    try:
      return record.validate_json(text)
    except ValidationError:
      raise self._unreadable(name) from None

  def _unreadable(self, name: str) -> ValueError:
    return ValueError(
      f"{self._path}: {name} cannot be read: restore a copy of the file"
    )

  def table(self, policies: Sequence[str] | None = None) -> pandas.DataFrame:
    """The summaries of these policies' episodes, or of all: a row each, by KEY."""
    where = (
      "" if policies is None else f"WHERE policy IN ({', '.join('?' * len(policies))})"
    )
    query = f"SELECT {', '.join(KEY + COLUMNS)} FROM episodes {where} ORDER BY {', '.join(KEY)}"
    table = pandas.read_sql(query, self._db, params=policies)
    numbers = table.drop(columns=["policy", "task_id", "stop"])
    numbers = numbers.apply(pandas.to_numeric, errors="coerce").astype(float)
    fine = np.isfinite(numbers) & (numbers >= 0)
    fine[[*BUDGETS]] |= table[[*BUDGETS]].isna()  # no cap
    bad_keys = table[[*KEY]][~fine.all(axis=1) | (numbers.score > 1)]
    if len(bad_keys):
      raise self._unreadable(EPISODE_NAME.format(*bad_keys.iloc[0]))
    return table.astype(
      dict.fromkeys(BUDGETS, float) | {"success": bool, "reused": bool}
    )

  def sync(self, policy: str) -> None:
    """Gives the store of every process the episodes of a policy that any process has."""
    stored = self.keys(policy)
    keys_of_process = [set(map(tuple, keys)) for keys in exchange(sorted(stored))]
    lacking = sorted(set.union(*keys_of_process) - set.intersection(*keys_of_process))
    for start in range(0, len(lacking), SYNC_CHUNK):
      sent = stored.intersection(lacking[start : start + SYNC_CHUNK])
      texts = [
        e.to_json() for e in self.episodes(policy) if (e.task_id, e.seed) in sent
      ]
      for episode in map(EPISODE.validate_json, itertools.chain(*exchange(texts))):
        if (episode.task_id, episode.seed) not in stored:
          self.add(episode)
          stored.add((episode.task_id, episode.seed))

  def finish(self, stage: str) -> None:
    """Records that a stage has been run to its end."""
    with self._db:
      self._db.execute("INSERT OR IGNORE INTO finished VALUES (?)", (stage,))

  def finished(self, stage: str) -> bool:
    query = "SELECT 1 FROM finished WHERE stage = ?"
    return bool(self._db.execute(query, (stage,)).fetchall())

  def close(self) -> None:
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
  """Convert a section in which the environment's options were fields of its own.

  Only values that differ from their defaults become options.
  """
  options = {}
  for name, default in MOVED_OPTIONS.items():
    value = env.pop(name, default)
    if value != default:
      options[name] = value
  return env | {"options": options | env.get("options", {})}


def move_plans(references: dict) -> dict:
  """Convert a section in which each kind of plan was a field of its own."""
  for_all = references.pop("explored", False)
  plans = []
  if for_all:
    plans.append(("samples", references.get("samples"), True))
  for kind in ("together", "repeats"):
    count = references.pop(kind, 0)
    if count:
      plans.append((kind, count, for_all))
  return {"plans": plans} | references


def read_config(directory: Path) -> Config | None:
  """The configuration that a run's directory was made with; None where there is none.

  Raises ValueError if it cannot be read, or if a store is gone, and what was spent with it.
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
