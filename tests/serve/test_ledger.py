"""Test what the ledger of attempts has on disk, and the calls of a step."""

import asyncio

from baar_jax.episode import Call, Step, Usage
from baar_jax.llms.ledger import open_calls
from baar_jax.llms.provider import REPLY
from baar_jax.rollout.specs import Cap
from baar_serve import sessions as ledger
from baar_serve.records import read_usage
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
