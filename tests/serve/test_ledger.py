"""Test what the ledger of attempts has on disk."""

import asyncio

from baar_jax.llms.ledger import open_calls
from baar_jax.rollout.specs import Cap
from baar_serve import sessions as ledger
from baar_serve.sessions import Sessions


def test_each_commit_waits_for_the_disk(tmp_path):
  """Otherwise a power loss could forget attempts that were sent: FULL is 2."""
  db = open_calls(tmp_path / "a.sqlite")
  assert db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_one_wait_for_the_disk_serves_all_earlier_commits(tmp_path, monkeypatch):
  waits = []
  monkeypatch.setattr(ledger, "sync_file", lambda path: waits.append(path.name))

  async def open_three() -> None:
    sessions = Sessions(tmp_path / "a.sqlite", None)
    for name in ("a", "b", "c"):
      sessions.open_purse("", name, Cap())
    await asyncio.gather(*(sessions.reach_disk() for _ in range(3)))
    assert waits == ["a.sqlite-wal"]
    sessions.open_purse("", "d", Cap())
    await sessions.reach_disk()
    await sessions.reach_disk()

  asyncio.run(open_three())
  assert len(waits) == 2
