"""The calls of API models in the run's SQLite files, with cost and reply."""

import collections
import contextlib
import dataclasses
import json
import sqlite3
import threading
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from baar_jax.episode import Reply
from baar_jax.llms.wire import OPEN, PRESUMED, REPLY, RETRY

REPLY_ROW = TypeAdapter(Reply)
UNREADABLE = "{}: call {} cannot be read: restore a copy of the file"
IS_COST = "typeof(usd) = 'real' AND usd BETWEEN 0 AND 1e12"

INSERT = "INSERT INTO calls (model, kind, usd, request) VALUES (?, ?, ?, ?)"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
  id INTEGER PRIMARY KEY, model INTEGER, kind TEXT, usd REAL, request TEXT, reply TEXT,
  problem TEXT);
CREATE INDEX IF NOT EXISTS calls_by_request ON calls (request) WHERE reply IS NOT NULL;
"""


@dataclasses.dataclass(frozen=True)
class Spent:
  """The dollars of all calls so far."""

  replies_usd: tuple[float, ...] = (0.0, 0.0)  # usable replies, by model
  retries_usd: float = 0.0  # attempts that were billed and useless
  presumed_usd: float = 0.0  # worst case of attempts that may have been billed

  @property
  def at_most_usd(self) -> float:
    """Add up all calls, in the worst case."""
    return sum(self.replies_usd) + self.retries_usd + self.presumed_usd


def open_calls(path: Path | str) -> sqlite3.Connection:
  """Open the file of a `Store`, with its table of calls."""
  db = sqlite3.connect(path, check_same_thread=False, timeout=60)
  db.execute("PRAGMA journal_mode=WAL")
  db.execute("PRAGMA synchronous=NORMAL")
  db.executescript(_SCHEMA)
  return db


class Calls:
  """The attempts at calls: each is on disk before it is made and when it has ended.

  Threads may share the object. A killed process leaves its calls open, at their worst
  case.
  """

  def __init__(self, path: Path | str):
    """Open the file of a `Store`."""
    self._lock = threading.Lock()
    self._path = path
    self._db = open_calls(path)

  def begin(self, model: int, worst_usd: float, request: str) -> int:
    """Record an attempt that is about to be made; return its number."""
    with self._lock, self._db:
      return self._db.execute(INSERT, (model, OPEN, worst_usd, request)).lastrowid

  def end(
    self,
    call: int,
    kind: str,
    usd: float,
    reply: Reply | None = None,
    problem: str | None = None,
  ) -> None:
    """Record the end of an attempt.

    Args:
      reply: the reply, if it may be replayed.
      problem: the reason for no reply; "" if there is one. None counts as neither.
    """
    text = None
    if reply is not None:
      text = json.dumps(reply, default=vars, ensure_ascii=False)
    update = "UPDATE calls SET kind = ?, usd = ?, reply = ?, problem = ? WHERE id = ?"
    with self._lock, self._db:
      self._db.execute(update, (kind, usd, text, problem, call))

  def find(self, request: str) -> Reply | None:
    """Find the recorded reply to a request, and mark it as replayed."""
    select = "SELECT id, reply FROM calls WHERE request = ? AND reply IS NOT NULL"
    with self._lock:
      row = self._db.execute(select, (request,)).fetchone()
    if row is None:
      return None
    try:
      reply = REPLY_ROW.validate_json(row[1])
    except ValidationError:
      raise ValueError(UNREADABLE.format(self._path, row[0])) from None
    call = dataclasses.replace(reply.call, replayed=True, latency_s=0.0)
    return dataclasses.replace(reply, call=call)

  def find_failure(self, model: int, limit: int) -> str:
    """Find the problem that a model's last `limit` attempts share, else ""."""
    select = (
      "SELECT problem FROM calls WHERE model = ? AND problem IS NOT NULL "
      "ORDER BY id DESC LIMIT ?"
    )
    with self._lock:
      rows = self._db.execute(select, (model, limit)).fetchall()
    if len(rows) < limit or len({*rows}) != 1:
      return ""
    return rows[0][0]

  def close(self) -> None:
    """Close the file."""
    with self._lock:
      self._db.close()


def read_spent(directory: Path, models: int) -> Spent:
  """Add up the calls of a run's processes; the last of `models` is the judge."""
  # Dollars of replies are by model, all others by kind.
  usd = collections.Counter()
  others = directory.glob("episodes-[0-9]*.sqlite")
  for path in sorted([*others, *directory.glob("episodes.sqlite")]):
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as db:
      if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'calls'").fetchone():
        continue
      if row := db.execute(f"SELECT id FROM calls WHERE NOT ({IS_COST})").fetchone():
        raise ValueError(UNREADABLE.format(path, row[0]))
      sums = db.execute("SELECT model, kind, sum(usd) FROM calls GROUP BY 1, 2")
      for model, kind, sum_usd in sums:
        usd[model if kind == REPLY else kind] += sum_usd
  replies_usd = tuple(float(usd[model]) for model in range(models))
  presumed_usd = float(usd[PRESUMED] + usd[OPEN])
  return Spent(replies_usd, float(usd[RETRY]), presumed_usd)
