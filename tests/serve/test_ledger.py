"""Test the ledger of attempts against a power loss at each write of its files."""

import contextlib
import sqlite3

import apsw
import pytest

from baar_jax.episode import Call, Step, Usage
from baar_jax.llms import ledger as calls
from baar_jax.llms.provider import REPLY
from baar_jax.rollout.specs import Cap
from baar_serve.records import read_usage
from baar_serve.sessions import Sessions


class Disk(apsw.VFS):
  """Keep what is safe of each file: its bytes at the last sync.

  Attributes:
    safe: by path, the bytes that a power loss leaves.
    on_write: is called before each write and each sync.
  """

  def __init__(self):
    super().__init__("disk", "")
    self.safe: dict[str, bytes] = {}
    self.on_write = lambda: None

  def xOpen(self, name, flags):
    return File(self, name, flags)

  def xDelete(self, name, sync):
    super().xDelete(name, sync)
    self.safe.pop(name, None)


class File(apsw.VFSFile):
  def __init__(self, disk, name, flags):
    super().__init__("", name, flags)
    self._disk = disk
    self._path = name.filename() if isinstance(name, apsw.URIFilename) else name

  def xWrite(self, data, offset):
    self._disk.on_write()
    super().xWrite(data, offset)

  def xSync(self, flags):
    self._disk.on_write()
    super().xSync(flags)
    self._disk.safe[self._path] = self.xRead(self.xFileSize(), 0)


class Database(apsw.Connection):
  """Look like a connection of sqlite3, on a `Disk`."""

  def __init__(self, path, **settings):
    super().__init__(str(path), vfs="disk")

  level = "FULL"

  def execute(self, statement, *values):
    statement = statement.replace("FULL", self.level)
    return Rows(super().execute(statement, *values), self)

  def executescript(self, script):
    super().execute(script)

  def __enter__(self):
    super().execute("BEGIN")

  def __exit__(self, kind, *error):
    super().execute("ROLLBACK" if kind else "COMMIT")


class Rows:
  def __init__(self, cursor, db):
    self.fetchone, self.fetchall = cursor.fetchone, cursor.fetchall
    self.lastrowid = db.last_insert_rowid()


@pytest.mark.parametrize("level, is_safe", [("FULL", True), ("NORMAL", False)])
def test_a_power_loss_forgets_nothing_that_was_sent(
  tmp_path, monkeypatch, level, is_safe
):
  """The table of calls has each attempt that was sent, at its worst case or its cost.
  A database that does not wait for the disk would lose some."""
  disk = Disk()
  monkeypatch.setattr(Database, "level", level)
  monkeypatch.setattr(calls.sqlite3, "connect", Database)
  sent = {}
  losses = []
  disk.on_write = lambda: losses.append((dict(disk.safe), dict(sent)))
  sessions = Sessions(tmp_path / "a.sqlite", None)
  purse = sessions.open_purse("", "s", Cap(usd=9.0))
  for _ in range(3):
    attempt = sessions.begin(purse, None, Step("", 0, ""), 1.0)
    sent[attempt.number] = {1.0}  # The request is on its way.
    disk.on_write()
    sent[attempt.number] = {1.0, 0.25}
    sessions.end(attempt, REPLY, Call(0, Usage(9, 0, 1), 0.25))
    sent[attempt.number] = {0.25}
    disk.on_write()
  monkeypatch.undo()
  forgotten = 0
  for place, (safe, known) in enumerate(losses):
    copy = tmp_path / str(place)
    copy.mkdir()
    for path, content in safe.items():
      (copy / path.rpartition("/")[2]).write_bytes(content)
    with contextlib.closing(sqlite3.connect(copy / "a.sqlite")) as db:
      usd = {}
      with contextlib.suppress(sqlite3.OperationalError):  # No table is safe yet.
        usd = dict(db.execute("SELECT id, usd FROM calls").fetchall())
    for number, possible in known.items():
      forgotten += usd.get(number) not in possible
  assert len(losses) > 20
  assert (forgotten == 0) == is_safe


def test_the_calls_of_the_model_that_acted_come_first(tmp_path):
  """As in a run: LARGE acted, after one failed attempt at it and one at SMALL."""
  sessions = Sessions(tmp_path / "a.sqlite", None)
  purse = sessions.open_purse("", "s", Cap(usd=9.0))
  step = Step("", 0, "")
  for model, tokens in ((0, 1), (1, 2), (1, 3)):
    step.model = model
    attempt = sessions.begin(purse, None, step, 1.0)
    sessions.end(attempt, REPLY, Call(model, Usage(9, 0, tokens), 0.25))
  assert [call.usage.completion_tokens for call in step.calls] == [2, 3, 1]
  assert read_usage(step) == Usage(9, 0, 3)
