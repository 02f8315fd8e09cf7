"""The run's SQLite file: tasks, episodes and finished stages, each on disk before it counts."""

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from baar_jax.episode import Episode, Task

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks (
  split TEXT, place INTEGER, id TEXT, description TEXT, max_steps INTEGER,
  PRIMARY KEY (split, place));
CREATE TABLE IF NOT EXISTS episodes (
  policy TEXT, task_id TEXT, seed INTEGER, episode TEXT,
  PRIMARY KEY (policy, task_id, seed));
CREATE TABLE IF NOT EXISTS finished (stage TEXT PRIMARY KEY);
"""


class Store:
  """Episodes by (policy, task_id, seed), and the tasks that they were run on.

  Used from one thread. WAL keeps every committed episode through kill -9.
  """

  def __init__(self, path: Path | str):
    """Opens or creates the file. Raises ValueError if it cannot be used as a store."""
    self._path = path
    try:
      self._db = sqlite3.connect(path)
      self._db.execute("PRAGMA journal_mode=WAL")
      self._db.execute("PRAGMA synchronous=NORMAL")
      self._db.executescript(_SCHEMA)
    except sqlite3.Error as error:
      raise ValueError(
        f"{path} cannot be used as an episode store ({error}); move it away or restore a copy"
      ) from error

  def put_tasks(self, split: str, tasks: Iterable[Task]) -> None:
    """Saves a split's tasks in their order, in one transaction."""
    rows = [(split, i, t.id, t.description, t.max_steps) for i, t in enumerate(tasks)]
    with self._db:
      self._db.execute("DELETE FROM tasks WHERE split = ?", (split,))
      self._db.executemany("INSERT INTO tasks VALUES (?, ?, ?, ?, ?)", rows)

  def tasks(self, split: str) -> list[Task]:
    rows = self._db.execute(
      "SELECT id, split, description, max_steps FROM tasks WHERE split = ? ORDER BY place",
      (split,),
    )
    return [Task(*row) for row in rows]

  def add(self, episode: Episode) -> None:
    """Stores an episode in one transaction. Raises ValueError if its key is taken."""
    row = (episode.policy, episode.task_id, episode.seed, episode.to_json())
    try:
      with self._db:
        self._db.execute("INSERT INTO episodes VALUES (?, ?, ?, ?)", row)
    except sqlite3.IntegrityError:
      raise ValueError(f"episode {row[:3]} is already stored in {self._path}") from None

  def keys(self, policy: str) -> set[tuple[str, int]]:
    """(task_id, seed) of every stored episode of a policy."""
    return set(self._db.execute("SELECT task_id, seed FROM episodes WHERE policy = ?", (policy,)))

  def episodes(self, policy: str) -> list[Episode]:
    """A policy's episodes, by task and seed."""
    rows = self._db.execute(
      "SELECT episode FROM episodes WHERE policy = ? ORDER BY task_id, seed", (policy,)
    )
    return [Episode.from_json(text) for (text,) in rows]

  def all_episodes(self) -> Iterator[Episode]:
    """Every episode of every policy, one at a time."""
    for (text,) in self._db.execute("SELECT episode FROM episodes"):
      yield Episode.from_json(text)

  def finish(self, stage: str) -> None:
    """Notes that a stage has been run to its end."""
    with self._db:
      self._db.execute("INSERT OR IGNORE INTO finished VALUES (?)", (stage,))

  def finished(self, stage: str) -> bool:
    found = self._db.execute("SELECT 1 FROM finished WHERE stage = ?", (stage,))
    return found.fetchone() is not None

  def count(self) -> int:
    return self._db.execute("SELECT COUNT(*) FROM episodes").fetchone()[0]

  def close(self) -> None:
    self._db.close()
