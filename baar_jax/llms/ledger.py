"""Record the calls of API models in the run's SQLite files, with costs and replies."""

import collections
import contextlib
import dataclasses
import json
import sqlite3
import threading
from pathlib import Path

from pydantic import TypeAdapter

from baar_jax.episode import Reply

# The kinds of outcomes of an attempt at a call, as they are stored.
REPLY = "reply"  # a usable reply
RETRY = "retry"  # billed, but without a usable reply
PRESUMED = "presumed"  # perhaps billed; counts at its worst case
FAILED = "failed"  # not billed
# The attempt has not ended. If the process was killed meanwhile, the attempt counts at
# its worst case.
OPEN = "open"
REPLY_ROW = TypeAdapter(Reply)

INSERT = "INSERT INTO calls (model, kind, usd, request) VALUES (?, ?, ?, ?)"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
  id INTEGER PRIMARY KEY, model INTEGER, kind TEXT,
  usd REAL NOT NULL CHECK (usd >= 0), request TEXT, reply TEXT);
CREATE INDEX IF NOT EXISTS calls_by_request ON calls (request) WHERE reply IS NOT NULL;
"""


@dataclasses.dataclass(frozen=True)
class Spent:
  """The dollars of all calls so far.

  Attributes:
    replies_usd: dollars of usable replies, one sum per model.
    retries_usd: dollars of attempts that were billed but brought no usable reply.
    presumed_usd: the sum of the worst cases of attempts that may have been billed.
  """

  replies_usd: tuple[float, ...] = (0.0, 0.0)
  retries_usd: float = 0.0
  presumed_usd: float = 0.0

  @property
  def at_most_usd(self) -> float:
    """Return an upper bound on the dollars: unknown outcomes count as billed."""
    return sum(self.replies_usd) + self.retries_usd + self.presumed_usd


def open_calls(path: Path | str) -> sqlite3.Connection:
  """Open a SQLite file of episodes, and create its table of calls if needed.

  Each commit waits until the disk has the data, so that even a power loss forgets no
  call that was sent.
  """
  db = sqlite3.connect(path, check_same_thread=False, timeout=60)
  db.execute("PRAGMA journal_mode=WAL")
  db.execute("PRAGMA synchronous=FULL")
  db.executescript(_SCHEMA)
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


def read_spent(directory: Path, models: int) -> Spent:
  """Add up the dollars of all calls that a run's processes have recorded.

  Args:
    directory: the run's directory.
    models: number of models to report. If a judge is to be reported, it counts as one
      more model, after the models to route between.
  """
  # Dollars by key. The key of replies is the index of their model. The key of other
  # attempts is the kind of their outcome.
  usd = collections.Counter()
  later_processes = directory.glob("episodes-[0-9]*.sqlite")
  for path in sorted([*later_processes, *directory.glob("episodes.sqlite")]):
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as db:
      if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'calls'").fetchone():
        continue
      sums = db.execute("SELECT model, kind, sum(usd) FROM calls GROUP BY 1, 2")
      for model, kind, sum_usd in sums:
        usd[model if kind == REPLY else kind] += sum_usd
  replies_usd = tuple(float(usd[model]) for model in range(models))
  return Spent(replies_usd, float(usd[RETRY]), float(usd[PRESUMED] + usd[OPEN]))
