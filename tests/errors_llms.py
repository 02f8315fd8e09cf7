"""The errors of the ledger, of prices and of proxies."""

import contextlib
import os
import sqlite3
from pathlib import Path
from unittest import mock

from baar_jax.episode import Usage
from baar_jax.llms.history import read_chat
from baar_jax.llms.ledger import Calls, read_spent
from baar_jax.llms.prices import Price, cost_usd
from baar_jax.llms.provider import open_http
from baar_jax.llms.usage import Meter


def damage(tmp: Path, change: str) -> Calls:
  """Record a call, and damage its record."""
  calls = Calls(tmp / "episodes.sqlite")
  calls.begin(0, 0.5, "hash")
  with contextlib.closing(sqlite3.connect(tmp / "episodes.sqlite")) as db, db:
    db.execute(f"UPDATE calls SET {change}")
  return calls


def read_damaged_reply(tmp: Path) -> None:
  with contextlib.closing(damage(tmp, "reply = '{}'")) as calls:
    calls.find("hash")


def read_damaged_cost(tmp: Path) -> None:
  damage(tmp, "usd = -1").close()
  read_spent(tmp, 2)


def name_proxy(tmp: Path, url: str) -> None:
  with mock.patch.dict(os.environ, ALL_PROXY=url):
    open_http(1.0)


CASES = [
  (
    "TMP/episodes.sqlite: call 1 cannot be read. Restore a copy of the file, then run "
    "again.",
    read_damaged_reply,
  ),
  (
    "TMP/episodes.sqlite: call 1 cannot be read. Restore a copy of the file, then run "
    "again.",
    read_damaged_cost,
  ),
  # A reply of 1,000 tokens at $4 per million, although its limit is 50 tokens. The
  # prompt has at most 4 bytes and 16 tokens, at $1 per million.
  (
    "The provider states $2, but the prices give $1. Correct --config.models.prices.",
    lambda tmp: Price(1, 0.5, 4).price_answer(
      Meter(counts={"prompt": 10**6, "completion": 0}, cost_usd=2.0)
    ),
  ),
  *[
    (
      "ALL_PROXY, HTTP_PROXY, HTTPS_PROXY and NO_PROXY name no proxy that can be used: "
      "set http:// addresses, or unset the variables",
      name_proxy,
      url,
    )
    for url in ("socks5://sk-secret@127.0.0.1:9", "ftp://127.0.0.1")
  ],
  (
    "The model 'gpt-9' has no list price. Set --config.models.prices.",
    lambda tmp: cost_usd("gpt-9", Usage(1, 0, 1)),
  ),
  (
    "The model 'gpt-audio' is not priced by tokens alone. ...",
    lambda tmp: cost_usd("gpt-audio", Usage(1, 0, 1)),
  ),
  (
    "Correct the field messages: messages must have at least one message.",
    lambda tmp: read_chat([]),
  ),
]
