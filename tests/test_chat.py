"""Test API models: the real client asks a stand-in server that has faults."""

import asyncio
import contextlib
import functools
import socket
import zlib
from collections import Counter
from datetime import datetime, timedelta
from unittest.mock import MagicMock

import pytest
from standin import FAULTS, StandIn

from baar_jax.config import ModelsConfig
from baar_jax.episode import Task, Usage
from baar_jax.llms.chat import ChatPair
from baar_jax.llms.history import NoAnswer
from baar_jax.rollout.budget import (
  BudgetSpent,
  CapReached,
  DollarBudget,
  reserve,
  unlimited,
)
from baar_jax.store import Calls, read_spent

# Dollars per million tokens: input, cached input, output, cache write.
PRICES = (1.0, 0.5, 4.0), (10.0, 5.0, 40.0, 12.0)
TASK = Task("t1", "train", "Do it.", 10)
MESSAGES = [{"role": "system", "content": "Act."}, {"role": "user", "content": "Sée?"}]
# The stand-in counts one token for 4 characters and 3 tokens for a message. The prompt has
# 1 + 3 and 1 + 3 tokens. The reply "Thought: now.\n\nAction: go" has 25 characters, so it
# has 7 + 3 tokens.
USAGE = Usage(prompt_tokens=8, cached_tokens=0, completion_tokens=10)
REPLY_USD = (8 * 1.0 + 10 * 4.0) / 1e6
# The cost of the same call if its prompt is cached.
CACHED_USD = (8 * 0.5 + 10 * 4.0) / 1e6
# The worst case: the two messages have 4 and 5 bytes, and 16 tokens each on top; the reply
# has at most 50 tokens.
BOUND_USD = (41 * 1.0 + 50 * 4.0) / 1e6
# No server listens at this address.
DEAD = ("http://127.0.0.1:9/v1",)


@pytest.fixture
def server():
  with StandIn(retry_after="0").running() as standin:
    yield standin


@pytest.fixture
def connect(server, tmp_path, monkeypatch):
  """Return a function that opens models at the stand-in, with settings.

  Their waits are recorded in `slept`, without waiting.
  """
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  monkeypatch.setattr("baar_jax.llms.provider.random.random", lambda: 0.5)
  configure = functools.partial(
    ModelsConfig,
    kind="chat",
    names=("small", "large"),
    prices=PRICES,
    timeout_s=5.0,
    base_urls=(server.url,),
    max_completion_tokens=50,
  )
  with contextlib.ExitStack() as stack:

    def connecting(**settings):
      pair = ChatPair(configure(**settings), Calls(tmp_path / "episodes.sqlite"))
      # Models may be closed twice.
      stack.callback(pair.close)
      stack.callback(pair.close)
      pair.slept = []
      pair.stopping.wait = pair.slept.append
      return pair

    yield connecting


@pytest.fixture
def spent(tmp_path):
  return lambda: read_spent(tmp_path)


def ask(pair, model=0, messages=MESSAGES, step=0, seed=7, task=None, run=None):
  """Ask a model for a reply, under the budgets of a task and of a run."""
  pay = functools.partial(reserve, task, run)
  return pair.start(None, TASK, seed, pay)[model].reply(messages, step)


def billed(server) -> float:
  return float(server.usd({"small": PRICES[0]}))


@pytest.mark.parametrize("effort", [{}, {"reasoning_effort": "low"}])
def test_a_call_sends_and_reads_chat_completions(
  server, connect, spent, monkeypatch, effort
):
  monkeypatch.setenv("MY_KEY", "secret")
  pair = connect(temperature=0.3, key_variables=("MY_KEY",), **effort)
  reply = ask(pair)
  assert reply.text == "Thought: now.\n\nAction: go"
  assert reply.call.usage == USAGE
  assert reply.lost == ()
  # The seed is half of the checksum of the task, the trial, the step and the attempt.
  seed = zlib.crc32(b"t1|7|0|0") // 2
  sampling = {"temperature": 0.3, "seed": seed, "max_completion_tokens": 50} | effort
  assert server.seen == [{"model": "small", "messages": MESSAGES, **sampling}]
  assert server.headers[0]["authorization"] == "Bearer secret"
  ask(pair, model=1)
  assert server.seen[1]["model"] == "large"
  dearer_usd = pytest.approx(10 * REPLY_USD, rel=1e-12)
  assert spent() == Counter({0: REPLY_USD, 1: dearer_usd})
  # A reply of reasoning alone is a mistake of the agent, and is paid for once.
  server.fault = "cut"
  reply = ask(pair, messages=MESSAGES[1:])
  assert reply.text == ""
  assert reply.lost == ()
  assert len(server.seen) == 3


FREE = ("429", "500", "503", "409")
PAID = ("empty", "silent", "tool_calls")
LATE = ("stall", "trickle", "slow_headers")
LOST = (*LATE, "drop", "malformed", "408", "502", "504", "524")
LOST += ("error_of_200",)


@pytest.mark.parametrize("fault", [*FREE, *PAID, *LOST])
def test_a_failed_attempt_is_billed_and_repeated(
  server, connect, spent, monkeypatch, fault
):
  """The deadline is for the whole attempt, also if bytes keep coming."""
  refuse = lambda h, *_: h.send(200, b'{"error": "try again"}')  # noqa: E731
  monkeypatch.setitem(FAULTS, "error_of_200", refuse)
  server.fault = [fault]
  server.stall_s = 4.5
  pair = connect(timeout_s=1.5 if fault in LATE else 15.0)
  reply = ask(pair)
  retry = ("retry", REPLY_USD)
  presumed = ("presumed", BOUND_USD)
  lost = [retry] * (fault in PAID) + [presumed] * (fault in LOST)
  assert [(call.kind, call.cost_usd) for call in reply.lost] == lost
  assert len(server.seen) == 2 and pair.slept == [0.5]
  assert spent() == Counter({0: reply.call.cost_usd}) + Counter(dict(lost))


def test_only_a_call_that_was_not_sent_is_free(connect, spent, monkeypatch):
  problem = r"small at 127.0.0.1 gave .* \(ConnectError\) \(2 att"
  with pytest.raises(NoAnswer, match=problem):
    ask(connect(retries=1, base_urls=DEAD))
  monkeypatch.setattr("baar_jax.llms.provider.CONNECT_S", 0.2)
  # This server never agrees on encryption.
  with socket.create_server(("127.0.0.1", 0)) as silent:
    url = f"https://127.0.0.1:{silent.getsockname()[1]}/v1"
    with pytest.raises(NoAnswer, match="ConnectTimeout"):
      ask(connect(retries=0, timeout_s=1e6, base_urls=(url,)))
  assert not spent().total()
  pair = connect(retries=0)
  pair.models[0].client._client.send = MagicMock(side_effect=OSError)
  with pytest.raises(NoAnswer, match=r"\(OSError\)"):
    ask(pair)
  assert spent() == Counter(presumed=BOUND_USD)


@pytest.mark.parametrize("fault", ["429", "trickle", "slow_headers"])
def test_a_stopped_run_does_not_wait(server, connect, fault):
  """It waits neither for Retry-After, nor for the answer of a call in flight."""
  pair = connect()
  server.retry_after = "250"
  server.stall_s = 1.0
  server.fault = lambda *_: pair.stop() or fault
  # The real `wait` replaces the one that only records.
  del pair.stopping.wait
  with pytest.raises(NoAnswer, match="the run is being stopped"):
    ask(pair)
  assert len(server.seen) == 1


@pytest.mark.parametrize(
  "fault, header, wait_s", [("silent", "", 0), ("429", "7", 7), ("429", "soon", 0)]
)
def test_retries_are_bounded_and_obey_retry_after(
  server, connect, spent, fault, header, wait_s
):
  server.fault = fault
  server.retry_after = header
  pair = connect(retries=3, token_limit_field="max_tokens")
  with pytest.raises(NoAnswer, match=r"^small at 127.0.0.1 .* \(4 attempts\)"):
    ask(pair)
  # The random factor of a delay is 1, because the draw is 0.5.
  assert len(server.seen) == 4
  assert pair.slept == [wait_s + delay_s for delay_s in (0.5, 1.0, 2.0)]
  first = server.seen[0]
  assert first["max_tokens"] == 50 and "max_completion_tokens" not in first
  # The first prompt is new, and three times it is cached.
  usd = (REPLY_USD + 3 * CACHED_USD) * (fault == "silent")
  assert spent()["retry"] == pytest.approx(usd, rel=1e-12)


UNKNOWN = Counter(presumed=BOUND_USD)
# The bill is for 8 tokens at $1 per million and 1000 at $4. The worst case was 41 and 50.
IMPOSSIBLE = r"The usage is impossible: [^.]*\. Correct[^.]*\. E"
DEAR = r"billed \$0.004008, above the worst case of \$0.000241"


# A ValueError ends the run, and NoAnswer ends one episode.
@pytest.mark.parametrize(
  "fault, error, message, cost",
  [
    *[
      (n, ValueError, f"answered {n}: ", Counter())
      for n in ("400", "401", "403", "404")
    ],
    ("echo", ValueError, "its message repeats the key", Counter()),
    ("quote", ValueError, "answered 401: check the key in the variable", Counter()),
    ("429 insufficient_quota", ValueError, "answered 429", Counter()),
    ("429", ValueError, "answered 429: it asks to wait 86400 s", Counter()),
    ("400 context_length_exceeded", NoAnswer, "answered 400", Counter()),
    ("400 longer than its Context Length", NoAnswer, "answered 400", Counter()),
    ("400 content_filter", NoAnswer, "answered 400", Counter()),
    ("redirect", ValueError, "answered 307", Counter()),
    ("filtered", NoAnswer, "refused this conversation", Counter(retry=REPLY_USD)),
    ("refusal", NoAnswer, "refused this conversation", Counter(retry=REPLY_USD)),
    ("priority", ValueError, "service tier", UNKNOWN),
    ("unpriced", ValueError, IMPOSSIBLE, UNKNOWN),
    ("no_completion", ValueError, "no tokens of a reply", UNKNOWN),
    ("dear", ValueError, DEAR, Counter({0: 0.004008})),
  ],
)
def test_an_error_that_no_retry_can_cure_is_raised_at_once(
  server, connect, spent, monkeypatch, fault, error, message, cost
):
  monkeypatch.setenv("MY_KEY", "sk-secret")
  server.fault = fault
  server.retry_after = "86400"
  pair = connect(key_variables=("MY_KEY",))
  budget = DollarBudget(1.0)
  with pytest.raises(error, match=f"^small at 127.0.0.1 .*{message}") as raised:
    ask(pair, run=budget)
  assert str(raised.value).isprintable() and "secret" not in str(raised.value)
  assert len(server.seen) == 1 and pair.slept == [] and spent() == cost
  assert budget.settled_usd == cost.total() == pytest.approx(1 - budget.remaining)
  assert billed(server) <= cost.total() + 1e-12


def test_a_recorded_reply_is_replayed(server, connect):
  """The task's budget pays for it again, but the run's budget does not."""
  server.fault = ["empty"]
  pair = connect()
  first = ask(pair)
  task = DollarBudget(1.0)
  run = DollarBudget(1.0)
  # Another object reads the file, as another process does.
  reply = ask(connect(), task=task, run=run)
  assert reply.call.replayed and not first.call.replayed and len(server.seen) == 2
  assert reply.text == first.text
  assert reply.call.usage == first.call.usage
  assert reply.lost == first.lost
  assert task.settled_usd == pytest.approx(REPLY_USD + CACHED_USD, rel=1e-12)
  assert run.settled_usd == 0.0
  # Each change of the call or of the sampling makes another request.
  ask(pair, model=1)
  ask(pair, messages=MESSAGES[:1])
  ask(pair, step=1)
  ask(pair, seed=8)
  ask(connect(temperature=0.1))
  ask(connect(max_completion_tokens=51))
  ask(connect(reasoning_effort="low"))
  assert len(server.seen) == 2 + 7


def test_without_prompt_caches_the_bill_stands_apart(server, connect, spent):
  """The provider caches the whole prompt of the second call."""
  pair = connect(prompt_cache=False)
  ask(pair)
  task, run = DollarBudget(1.0), DollarBudget(1.0)
  call = ask(pair, seed=8, task=task, run=run).call
  assert call.usage.cached_tokens == 8
  assert (call.cost_usd, call.spent_usd) == (REPLY_USD, CACHED_USD)
  assert (task.settled_usd, run.settled_usd) == (REPLY_USD, CACHED_USD)
  assert spent().total() == pytest.approx(REPLY_USD + CACHED_USD)


def test_the_worst_case_of_a_call_is_an_upper_bound(server, connect):
  small, large = connect().start(None, TASK, 7, unlimited)
  assert small.bound_usd(MESSAGES, 0) == BOUND_USD
  exactly = functools.partial(pytest.approx, rel=1e-12)
  # LARGE's prompt may be written to the prompt cache, at $12 in place of $10.
  assert large.bound_usd(MESSAGES, 0) == exactly((41 * 12 + 50 * 40) / 1e6)
  reply = small.reply(MESSAGES, 0)
  longer = [*MESSAGES, {"role": "assistant", "content": reply.text}, MESSAGES[1]]
  # 8 tokens were billed before. The new messages have 25 and 5 bytes, and 16 tokens each
  # on top.
  assert small.bound_usd(longer, 1) == exactly((8 + 62 + 200) / 1e6)
  assert large.bound_usd(longer, 1) == exactly((103 * 12 + 2000) / 1e6)
  # All 4 and 25 bytes of a new conversation count, although it begins with a known one.
  assert small.bound_usd(longer[::2], 1) == exactly((29 + 32 + 200) / 1e6)
  assert small.reply(longer, 1).call.usage == Usage(8 + 10 + 4, 8, 10)
  # At a public address the costliest service tier is assumed until the first answer.
  public = connect(base_urls=("https://api.together.xyz/v1",), key_variables=("",))
  (model, _) = public.start(None, TASK, 7, unlimited)
  assert model.bound_usd(MESSAGES, 0) == pytest.approx(2.5 * BOUND_USD)
  public.models[0].client.base_url = server.url
  ask(public)
  assert model.bound_usd(MESSAGES, 0) == BOUND_USD


def test_a_list_price_is_the_day_s_and_a_reservation_the_higher(
  server, connect, monkeypatch
):
  """The prices of this model double on 2026-12-01, from $2, $0.1 and $10."""

  class Clock(datetime):
    @classmethod
    def now(cls, zone):
      return cls(2026, 11, day, 23, 59, tzinfo=zone) + timedelta(minutes=minutes)

  monkeypatch.setattr("baar_jax.llms.prices.datetime", Clock)
  day = 29
  minutes = 0
  pair = connect(names=("gemini-4-argon",), prices=())
  (model,) = pair.start(None, TASK, 7, unlimited)
  # The worst case is 41 tokens of the prompt and 50 of the reply. 8 are new or cached,
  # and 10 are the reply's.
  for day, minutes, bound, cost in (
    (29, 0, 41 * 2 + 50 * 10, 8 * 2 + 10 * 10),
    (30, 0, 41 * 4 + 50 * 20, 8 * 0.1 + 10 * 10),
    (30, 1, 41 * 4 + 50 * 20, 8 * 0.2 + 10 * 20),
  ):
    assert model.bound_usd(MESSAGES, 0) == pytest.approx(bound / 1e6)
    reply = ask(pair, seed=day + minutes)
    assert reply.call.cost_usd == pytest.approx(cost / 1e6)


def test_a_call_is_made_if_and_only_if_it_fits(server, connect, spent):
  pair = connect()
  assert ask(pair, run=DollarBudget(BOUND_USD))
  little = DollarBudget(BOUND_USD * 0.999)
  problem = r"a call may cost \$0.000241, but only \$0.000241 remains"
  with pytest.raises(CapReached, match=problem):
    ask(pair, seed=8, run=little)
  with pytest.raises(BudgetSpent, match=problem):
    ask(pair, seed=8, task=little)
  assert len(server.seen) == 1
  server.fault = "drop"
  task = DollarBudget(1.0)
  run = DollarBudget(2.5 * BOUND_USD)
  # The second retry does not fit.
  with pytest.raises(CapReached):
    ask(pair, seed=8, task=task, run=run)
  assert len(server.seen) == 3
  assert run.settled_usd == task.settled_usd == spent()["presumed"] == 2 * BOUND_USD
  # All reservations are closed.
  remaining_usd = 1.0 - 2 * BOUND_USD, 0.5 * BOUND_USD
  assert (task.remaining, run.remaining) == pytest.approx(remaining_usd, rel=1e-12)


@pytest.mark.parametrize("moment", ["request", "response"])
def test_a_cancelled_call_counts_at_its_worst_case(server, connect, spent, moment):
  async def cancel(message):
    raise asyncio.CancelledError

  pair = connect(retries=1)
  pair.models[0].client._client.event_hooks = {moment: [cancel]}
  run = DollarBudget(1.0)
  with pytest.raises(NoAnswer, match="did not answer before the run was stopped"):
    ask(pair, run=run)
  assert run.settled_usd == spent()["presumed"] == 2 * BOUND_USD
  assert run.remaining == pytest.approx(1.0 - 2 * BOUND_USD)
  assert billed(server) <= 2 * BOUND_USD


def test_openai_s_key_and_account_are_sent_to_openai_only(server, connect, monkeypatch):
  values = dict(
    API_KEY="secret",
    ORG_ID="org-mine",
    PROJECT_ID="proj-mine",
    CUSTOM_HEADERS="Authorization: Bearer mine\nX-Mine: mine",
  )
  for name, value in values.items():
    monkeypatch.setenv(f"OPENAI_{name}", value)
  pair = connect()
  ask(pair)
  names = "accept accept-encoding authorization connection content-length content-type"
  names += " host user-agent x-stainless-raw-response"
  assert sorted(server.headers[0]) == names.split()
  assert server.headers[0]["authorization"] == "Bearer none"
  pair = connect(base_urls=("https://api.openai.com/v1",))
  pair.models[0].client.base_url = server.url
  ask(pair)
  assert {"org-mine", "proj-mine", "mine"} < set(server.headers[1].values())
  # Only OpenAI is asked for a service tier.
  assert server.seen[1]["service_tier"] == "default"
