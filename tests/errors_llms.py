"""The errors of the ledger, of prices and of proxies."""

import functools
import gzip
import os
from pathlib import Path
from unittest import mock

import tickets
from hand import job

from baar_jax.envs.base import make
from baar_jax.envs.code.adapter import Code, read_recording
from baar_jax.episode import Usage
from baar_jax.llms.history import read_chat
from baar_jax.llms.prices import Price, cost_usd
from baar_jax.llms.provider import Meter, open_http
from baar_jax.rollout.budget import unlimited
from baar_jax.run import open_pair
from baar_jax.store import Calls


def name_proxy(tmp: Path, url: str) -> None:
  with mock.patch.dict(os.environ, ALL_PROXY=url):
    open_http(1.0)


def ask_recorded(tmp: Path, trials: int = 1, **header: object) -> None:
  """Ask SMALL for its recorded first reply."""
  config = tickets.configure(tmp)
  tickets.record(config, (), trials, **header)
  (agent, _) = open_pair(config, tmp).start(None, job().task, 0, unlimited)
  (function, *_) = make("code", config.env.options).functions
  agent.bound_usd([{"content": function.prompt()}], 0)


def change_instructions(tmp: Path) -> None:
  """Play a recording after the agents' instructions have changed."""
  config = tickets.configure(tmp)
  tickets.record(config, ())
  with mock.patch.object(Code, "system_prompt", "Write code."):
    open_pair(config, tmp)


def read_damaged_recording(tmp: Path, content: bytes) -> None:
  (tmp / "file.gz").write_bytes(content)
  read_recording(str(tmp / "file.gz"))


EMPTY = gzip.compress(b"[]")
FORMAT_ALONE = gzip.compress(b'{"format": "baar_jax recording 1", "models": []}')
CASES = [
  (
    "cannot read the recording TMP/file.gz (it is none): restore it, or make it with...",
    read_damaged_recording,
    EMPTY,
  ),
  ("...end-of-stream...", read_damaged_recording, EMPTY[:-8]),
  (
    "...(its first line lacks functions, max_completion_tokens)...",
    read_damaged_recording,
    FORMAT_ALONE,
  ),
  (
    "...has other models: set --config.models.names=\"('a', 'b')\"",
    functools.partial(ask_recorded, models="ab"),
  ),
  ("...has other functions...", functools.partial(ask_recorded, functions="")),
  ("...has no reply to traina, trial 0, models 0: ...", ask_recorded, 0),
  ("...has another prompt for deva, trial 0, models 0: ...", change_instructions),
  ("...usd >= 0", lambda tmp: Calls(tmp / "calls").begin(0, -1.0, "r")),
  # A reply of 1,000 tokens at $4 per million, although its limit is 50 tokens. The
  # prompt has at most 4 bytes and 16 tokens, at $1 per million.
  (
    "The provider states $2, but the prices give $1. Correct --config.models.prices.",
    lambda tmp: Price(1, 0.5, 4).read_usage(
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
    "The model 'gpt-audio' is not priced by tokens alone. ...",
    lambda tmp: cost_usd("gpt-audio", Usage(1, 0, 1)),
  ),
  (
    "Correct the field messages: messages must have at least one message.",
    lambda tmp: read_chat([]),
  ),
]
