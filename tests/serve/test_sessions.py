"""Test the ledger of purses and conversations: full disks, kills and order."""

import asyncio
import itertools
import sqlite3
from collections import Counter
from unittest import mock

import pytest
from endpoint import ASK, PRICES, USD

from baar_jax.episode import FAILED, REPLY, Call, Step, Usage
from baar_jax.rollout.specs import Cap
from baar_jax.store import open_calls, read_spent
from baar_serve import sessions as ledger
from baar_serve.records import Record, State
from baar_serve.sessions import Sessions

STATE = State("small", None, "p", "t", "", "", 0.0)


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


def test_nothing_is_sent_before_the_disk_has_its_worst_case(
  client, upstream, monkeypatch
):
  def fail(path):
    raise sqlite3.OperationalError("disk I/O error")

  monkeypatch.setattr(ledger, "sync_file", fail)
  assert client.chat().status_code == 503 and not upstream.seen
  monkeypatch.undo()
  assert client.chat().status_code == 200
  assert len(upstream.seen) == 1
  assert client.session()["spent_usd"] == pytest.approx(USD)


def test_a_server_without_a_key_opens_no_ledger(open_client, monkeypatch):
  opened = mock.Mock()
  monkeypatch.setattr("baar_serve.exchange.Sessions", opened)
  with pytest.raises(ValueError, match="needs a key"):
    open_client(models={"base_urls": ("https://a.b",), "key_variables": ("NO_KEY",)})
  opened.assert_not_called()


@pytest.mark.parametrize("full_at", range(4))
def test_a_full_disk_leaves_the_session_whole(client, upstream, monkeypatch, full_at):
  """The disk is full at one of the four writes of a call, and then has room again."""
  sessions = client.http.app.exchange.sessions
  client.chat("other")
  writes = itertools.count()
  execute = sessions._execute

  def fail(statements):
    if next(writes) == full_at:
      raise sqlite3.OperationalError("database or disk is full")
    return execute(statements)

  monkeypatch.setattr(sessions, "_execute", fail)
  reply = client.chat()
  assert reply.status_code == (200 if next(writes) > full_at + 1 else 503)
  if reply.status_code == 503:
    assert "Free disk space" in reply.json()["error"]["message"]
  assert client.chat(messages=[*ASK, *ASK]).status_code == 200
  session = client.session()
  assert session["in_flight"] == 0
  assert len(session["steps"]) == len(upstream.seen) - 1
  assert session["spent_usd"] == pytest.approx(
    float(upstream.usd({"small": PRICES[0]})) - USD
  )
  assert client.score(1) == 200


def begin(sessions, purse, conversation=None, model=0, usd=0.25):
  """Begin an attempt."""
  return sessions.begin(purse, conversation, Step("", model, ""), usd)


def end(sessions, attempt, usd, place=0):
  """End an attempt with a reply."""
  call = Call(attempt.step.model, Usage(9, 0, 1), usd)
  record = Record(attempt.step, place, None, [])
  sessions.end(attempt, REPLY, call, record if attempt.conversation else None)


def test_a_restart_presumes_open_calls_and_forgets_failed_ones(tmp_path):
  """Of four LARGE calls, one failed, two had replies, and one was open at a kill."""
  path = tmp_path / "episodes.sqlite"
  sessions = Sessions(path, None)
  purse = sessions.open_purse("", "s", Cap(calls=5, usd=1.0))
  sessions.end(begin(sessions, purse, model=1), FAILED)
  for usd in (0.125, 0.0625):
    end(sessions, begin(sessions, purse, model=1), usd)
  begin(sessions, purse, model=1)
  assert (purse.large_calls, len(purse.open)) == (3, 1)
  again = Sessions(path, None)
  kinds = [kind for (kind,) in again.read("SELECT kind FROM calls ORDER BY id")]
  assert kinds == ["failed", "reply", "reply", "presumed"]
  purse = again.find_purse("", "s")
  assert (purse.large_calls, len(purse.open)) == (3, 0)
  # 1 - 0.125 - 0.0625 - 0.25, and 5 - 3 calls
  assert purse.remaining_caps == Cap(calls=2, usd=0.5625)
  assert read_spent(tmp_path) == Counter({1: 0.1875, "presumed": 0.25})


@pytest.fixture
def conversation(tmp_path):
  """Begin a conversation of new sessions."""
  sessions = Sessions(tmp_path / "a.sqlite", None)
  conversation = sessions.begin_conversation(
    sessions.open_purse("", "s", Cap()), "", STATE
  )
  conversation.sessions = sessions
  return conversation


def test_a_step_is_completed_on_disk_first(conversation, tmp_path):
  sessions = conversation.sessions
  end(sessions, begin(sessions, conversation.purse, conversation), 0.0)
  full = mock.patch.object(sessions, "_execute", side_effect=sqlite3.OperationalError)
  with full, pytest.raises(sqlite3.OperationalError):
    sessions.complete_step(conversation, "go", 0.5)
  (step,) = conversation.steps
  assert (step.action, step.score) == ("", None)
  sessions.complete_step(conversation, "go", 0.5)
  (again,) = Sessions(tmp_path / "a.sqlite", None).list_conversations("id > 0")
  for steps in (conversation.steps, again.steps):
    assert [(step.action, step.score) for step in steps] == [("go", 0.5)]
