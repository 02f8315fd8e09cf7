"""The errors of the models and their calls, of budgets and the rollout loop."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hand import HandEnv, HandPair, HandPolicy, job
from standin import StandIn

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import EnvDied
from baar_jax.episode import Task, Usage
from baar_jax.llms import provider
from baar_jax.llms.chat import ChatPair
from baar_jax.llms.history import NoAnswer, read_chat
from baar_jax.llms.ledger import Calls, read_spent
from baar_jax.llms.prices import Price, cost_usd
from baar_jax.llms.usage import Meter
from baar_jax.rollout.budget import CallBudget, DollarBudget, reserve, unlimited
from baar_jax.rollout.loop import run_episodes

TASK = Task("t1", "train", "Do it.", 10)


@contextlib.contextmanager
def open_pair(
  tmp: Path, fault: str | None = None, **settings: object
) -> Iterator[ChatPair]:
  """Open a pair of models at a stand-in server, which has a fault."""
  with StandIn(fault=lambda *_: fault).running() as server:
    config = ModelsConfig(
      kind="chat",
      names=("small", "large"),
      prices=((1, 0.5, 4), (10, 5, 40)),
      base_urls=(server.url,),
      retries=0,
      max_completion_tokens=50,
      **settings,
    )
    pair = ChatPair(config, Calls(tmp / "episodes.sqlite"))
    with contextlib.closing(pair):
      yield pair


def reply(pair: ChatPair, step: int = 0) -> None:
  """Ask SMALL for the reply of a step."""
  messages = [{"role": "user", "content": "Act."}]
  pair.start(None, TASK, 7, unlimited)[0].reply(messages, step)


def ask(tmp: Path, fault: str | None = None, calls: int = 1, **settings) -> None:
  """Ask for replies, also after a call without an answer."""
  with open_pair(tmp, fault, **settings) as pair:
    for step in range(calls):
      with contextlib.suppress(NoAnswer):
        reply(pair, step)


def ask_in_vain(tmp: Path) -> None:
  with open_pair(tmp, "429") as pair:
    reply(pair)


def ask_while_stopping(tmp: Path) -> None:
  with open_pair(tmp) as pair:
    pair.stop()
    reply(pair)


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


def read_key(tmp: Path) -> None:
  os.environ.pop("BAAR_NO_SUCH_KEY", None)
  provider.Endpoint("small", "https://example.com/v1", "BAAR_NO_SUCH_KEY").key()


def name_proxy(tmp: Path, url: str) -> None:
  with mock.patch.dict(os.environ, ALL_PROXY=url), open_pair(tmp) as pair:
    reply(pair)


def reserve_too_much(tmp: Path) -> None:
  with reserve(None, DollarBudget(0.5, spent_usd=0.25), 0.375):
    pass


def call_without_budget(tmp: Path) -> None:
  CallBudget(0).reserve(1)


def fail_twice(tmp: Path) -> None:
  def fault(call: str) -> None:
    raise EnvDied("the process was killed")

  tape = []
  jobs = [job("t1"), job("t2")]
  env = HandEnv(tape, fault=fault)
  policy = HandPolicy(tape)
  list(run_episodes(jobs, policy, HandPair(tape), [env], max_failures=2))


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
    "small at 127.0.0.1 billed $0.004004, above the worst case of $0.000220. Set "
    "--config.models.token_limit_field to the field by which this endpoint limits a "
    "reply, then run the same command again.",
    ask,
    "dear",
  ),
  (
    "small at 127.0.0.1 answered 404: asked to answer 404. Every call would end like "
    "this. Correct the settings --config.models of this model, then run the same command "
    "again.",
    ask,
    "404",
  ),
  (
    "small at 127.0.0.1 answered 429, 2 times in a row (--config.models.max_failures). "
    "Check the endpoint and run the command again.",
    lambda tmp: ask(tmp, "429", calls=2, max_failures=2),
  ),
  ("small at 127.0.0.1 answered 429: asked to answer 429 (1 attempts)", ask_in_vain),
  ("small was not asked: the run is being stopped", ask_while_stopping),
  (
    "The provider states $2, but the prices give $1. Correct --config.models.prices.",
    lambda tmp: Price(1, 0.5, 4).price_answer(
      Meter(counts={"prompt": 10**6, "completion": 0}, cost_usd=2.0)
    ),
  ),
  (
    "small at 127.0.0.1 gave no whole answer (ExceptionGroup) (1 attempts)",
    name_proxy,
    "http://127.0.0.1:99999",
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
    "The model 'deepseek-chat' is not priced by tokens alone. Set "
    "--config.models.prices.",
    lambda tmp: cost_usd("deepseek-chat", Usage(1, 0, 1)),
  ),
  (
    "small at example.com needs a key of printable ASCII characters. Set the "
    "environment variable that --config.models.key_variables names (OPENAI_API_KEY at "
    "OpenAI's addresses; '' for an endpoint without keys).",
    read_key,
  ),
  (
    "Correct the field messages: messages must have at least one message.",
    lambda tmp: read_chat([]),
  ),
  ("No LARGE call remains of 0. Call SMALL instead.", call_without_budget),
  (
    "a call may cost $0.375000, but only $0.250000 remains of the cap of $0.5",
    reserve_too_much,
  ),
  (
    "A sum of dollars must be finite and >= 0, but it is -1.0. Correct this number.",
    lambda tmp: DollarBudget(-1.0),
  ),
  (
    "Episodes have failed 2 times in a row, the limit of --config.models.max_failures. "
    "The last failure is of task t1: the process was killed. Correct its cause, then "
    "run the same command again.",
    fail_twice,
  ),
]
