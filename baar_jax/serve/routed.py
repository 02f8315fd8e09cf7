"""Call upstream models for a client within its budgets, and book the costs."""

import asyncio
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote

from baar_jax.config import ServeConfig
from baar_jax.episode import SMALL, Call, Step, Usage
from baar_jax.llms.calls import Cache, Record
from baar_jax.llms.client import LOST, Client, Stream, Whole
from baar_jax.llms.prices import Billing, Read
from baar_jax.llms.usage import ImpossibleUsage, Meter
from baar_jax.llms.wire import (
  FAILED,
  PRESUMED,
  REPLY,
  UNREADABLE,
  Outcome,
  WireForm,
  clean,
  explain,
  read_error,
)
from baar_jax.serve.request import (
  EXHAUSTED,
  RESERVED,
  ROUTER,
  History,
  Refusal,
  bound_tokens,
  find_lowest,
  hash_prefix,
  hash_turn,
  write_event,
  write_headers,
)
from baar_jax.serve.sessions import Attempt, Conversation, Purse, Sessions

# Seconds between two attempts at an upstream model that fails all the time.
PROBE_S = 30.0
# An answer that has another form than expected raises one of these exceptions.
MALFORMED = (LookupError, TypeError, AttributeError, ValueError)


class Upstream(Client):
  """An upstream model, to which this server forwards clients' calls.

  Attributes:
    failures: the number of failed attempts in a row.
    paused_until_s: until this time of the monotonic clock no attempt is made.
  """

  failures = 0
  paused_until_s = 0.0

  def worst_case_usd(self, call: "ClientCall") -> float:
    """Compute the worst case of an attempt in US dollars.

    The prompt's tokens are bounded by `bound_tokens`. If this model has already read
    the first messages in an earlier call, these messages count with the tokens that
    were billed for them.
    """
    form = call.form
    body = call.body
    request = self.write(form, body)
    tokens = call.bound_tokens
    conversation = call.conversation
    cache = conversation and conversation.caches.get(self.config_index)
    is_known = cache and cache.is_proven
    if is_known and hash_prefix(form, body, cache.messages) == cache.digest:
      other_fields = dict(request)
      for name in ("model", form.history, *form.limits, *form.opening):
        other_fields.pop(name, None)
      new_messages = body[form.history][cache.messages :]
      tokens = cache.tokens + bound_tokens([other_fields, new_messages])
    return self.bound_usd(form, tokens, request)

  async def attempt(self, call: "ClientCall") -> Whole | Stream | Outcome:
    """Send a call to this model once, unless it has failed all the time.

    Returns:
      A whole answer in the call's wire form, a stream, or the failure.
    """
    now_s = time.monotonic()
    if now_s < self.paused_until_s:
      problem = f"is not asked, because its last {self.failures} attempts failed"
      return Outcome(FAILED, problem, status=503, is_paused=True)
    if self.failures >= self.config.max_failures:
      self.paused_until_s = now_s + PROBE_S
    request = self.write(call.form, call.body)
    if self.endpoint.is_openai and call.conversation:
      # Calls with one key are more likely to find their prompt cache.
      request.setdefault("prompt_cache_key", f"baar-{call.conversation.id}")
    path = f"{call.form.path}?{call.query}".rstrip("?")
    answer = await self.send(
      call.form, request, self.config.timeout_s, path, call.passed_headers
    )
    if isinstance(answer, Whole):
      try:
        call.form.read_reply(answer.fields)
      except UnicodeError:  # Half a surrogate pair does no harm.
        pass
      except MALFORMED:
        answer = UNREADABLE
    has_failed = isinstance(answer, Outcome) and answer.status >= 500
    self.failures = self.failures + 1 if has_failed else 0
    if not has_failed:
      self.paused_until_s = 0.0
    return answer

  def refuse(self, outcome: Outcome, form: WireForm) -> Refusal:
    """Make the error answer for a client after a failed attempt at this model."""
    # This server follows no redirects. A redirect (3xx) by the model's endpoint is
    # therefore reported as a bad gateway.
    status = outcome.status if outcome.status >= 400 else 502
    message = (
      outcome.message
      or f"The model {self.name} {outcome.problem}. Send the call again. "
      "If this error repeats, check --config.models of this server."
    )
    if status == 404:
      message += (
        f". If the endpoint of {self.name} does not offer {form.path}, name the forms "
        "that it offers in --config.models.forms of this server."
      )
    return Refusal(
      status, message, outcome.type or "upstream_error", outcome.code or None
    )

  def read_failure(self, data: bytes) -> str:
    """Read the message in an error event of a stream, without the key."""
    return clean(read_error(data).message, self._key)


@dataclasses.dataclass(eq=False)
class ClientCall:
  """A client's call, with the purse that pays and the conversation it belongs to.

  Attributes:
    form: the wire form.
    body: the JSON body; {} once a decision alone has been answered.
    history: the messages of the body, read as an unfinished episode.
    purse: the purse that pays.
    conversation: the conversation; None for a side call, which is no step.
    passed_headers: the client's headers that go on to the model.
    query: the query of the client's URL, which goes on, too.
    call_s: seconds from the conversation's first call to this one.
    start_s: when the call arrived, in seconds of the monotonic clock.
    bound_tokens: an upper bound on the tokens of the prompt.
    cache: what the call leaves in a prompt cache, without the tokens.
  """

  form: WireForm
  body: dict
  history: History
  purse: Purse
  conversation: Conversation | None
  passed_headers: dict[str, str] = dataclasses.field(default_factory=dict)
  query: str = ""
  start_s: float = dataclasses.field(default_factory=time.monotonic)

  def __post_init__(self) -> None:
    """Compute what is kept of the body."""
    self.call_s = 0.0
    if self.conversation:
      self.call_s = time.time() - self.conversation.state.began_s
    self.bound_tokens = bound_tokens(self.body)
    count = len(self.body[self.form.history])
    self.cache = Cache(count, hash_prefix(self.form, self.body, count), 0, 0.0)
    self.has_tools = bool(self.body.get("tools"))
    self.place = len(self.history.actions)

  @property
  def headers(self) -> dict[str, str]:
    """Return the headers of an answer with the purse's dollars and remaining caps."""
    purse = self.purse
    left = purse.remaining_caps
    return write_headers(
      {
        "session-id": quote(purse.name, safe=" "),
        "conversation": self.conversation and self.conversation.id,
        "session-usd": purse.dollars.settled_usd,
        "left-usd": left.usd,
        "left-large-calls": left.calls,
      }
    )


class AffordableModels(NamedTuple):
  """The models that a client's call can afford at this moment.

  Attributes:
    models: indices of the models whose call fits all budgets, ascending; at least one.
    worst_case_usd_A: the worst case of the call at every model, affordable or not.
  """

  models: list[int]
  worst_case_usd_A: list[float]


@dataclasses.dataclass(frozen=True)
class Budgets:
  """Compare calls with the budgets of their purse and of the run."""

  config: ServeConfig
  sessions: Sessions
  upstreams: list[Upstream]
  billing: Billing

  async def find_affordable(self, call: ClientCall) -> AffordableModels:
    """Find the models that offer a call's form and fit all budgets.

    A call must leave `serve.reserve_usd` of the purse's cap unspent. If no model's call
    does, a last call may spend this reserve, provided that all of it is left. If no
    call fits, wait for the end of the purse's attempts in flight, which may free
    dollars, and try again.

    Raises:
      Refusal: no call fits and no attempt of the purse is in flight, or the wait has
        taken `models.timeout_s`.
    """
    purse = call.purse
    reserve_usd = find_lowest(self.config.reserve_usd, purse.dollars.limit_usd)
    offering = set()
    for index, upstream in enumerate(self.upstreams):
      forms = upstream.endpoint.forms.split()
      if not forms or call.form.path in forms:
        offering.add(index)
    if not offering:
      problem = f"No model of this server offers {call.form.path}"
      raise Refusal(404, f"{problem}. Use another form (--config.models.forms).")
    worst_case_usd_A = [upstream.worst_case_usd(call) for upstream in self.upstreams]
    list_affordable = functools.partial(
      self.sessions.list_affordable, purse, worst_case_usd_A
    )
    until_s = time.monotonic() + self.upstreams[SMALL].config.timeout_s
    while True:
      purse.changed.clear()
      if purse.dollars.allows(reserve_usd):
        allowed = list_affordable(reserve_usd) or list_affordable(0.0)
        models = [model for model in allowed if model in offering]
        if models:
          return AffordableModels(models, worst_case_usd_A)
      if not purse.is_busy:
        break
      try:
        async with asyncio.timeout(until_s - time.monotonic()):
          await purse.changed.wait()
      except TimeoutError:
        problem = f"The calls of session {purse.name} in flight reserve its whole cap"
        raise Refusal(503, f"{problem}. Send the call again.", RESERVED) from None
    spent_usd = purse.dollars.settled_usd
    needed_usd = min(worst_case_usd_A[model] for model in offering)
    spent = f"This session has cost ${spent_usd:.6f}; a call may cost ${needed_usd:.6f}"
    limit = (
      "That exceeds the session's cap, the key's cap of the day, or the rest of "
      "--config.max_usd for all sessions"
    )
    raise Refusal(
      429,
      f"{spent}. {limit}. End the task without a further call.",
      "insufficient_quota",
      EXHAUSTED,
      spent_usd=spent_usd,
      cap_usd=purse.dollars.limit_usd,
      needed_usd=needed_usd,
    )


@dataclasses.dataclass(eq=False)
class RoutedCall:
  """A client's call and the model chosen for it, with the costs of its attempts.

  `baar_jax.llms.client.ask` makes the attempts with the methods of this class.

  Attributes:
    step: the conversation's next step; `step.model` is the chosen model.
    affordable: the affordable models when the model was last chosen.
    p_A: the router's probability of each model; empty unless a router decided.
    failed: the models that no longer answer this call, because all of their retries
      failed or they no longer fitted the budgets.
    last_attempt: the newest attempt; None before the first.
    usd: US dollars of all attempts; None until the reply is booked.
    answer: the whole answer, as far as it is known.
  """

  call: ClientCall
  budgets: Budgets
  step: Step
  affordable: AffordableModels
  p_A: Sequence[float]
  failed: set[int] = dataclasses.field(default_factory=set)
  last_attempt: Attempt | None = None
  usd: float | None = None
  answer: dict = dataclasses.field(default_factory=dict)

  @property
  def upstream(self) -> Upstream:
    """Return the upstream model that was chosen."""
    return self.budgets.upstreams[self.step.model]

  @property
  def worst_case_usd(self) -> float:
    """Return the worst case of an attempt at the chosen model in US dollars."""
    return self.affordable.worst_case_usd_A[self.step.model]

  @property
  def has_others(self) -> bool:
    """Tell whether another model may answer if the chosen one fails.

    `serve.fallback` permits this if the router decides, not a fixed policy.
    """
    conversation = self.call.conversation
    is_routed = conversation is not None and conversation.state.rule == ROUTER
    return self.budgets.config.fallback and is_routed

  @property
  def large_p(self) -> float:
    """Return the probability of a LARGE call; 0 or 1 unless a router decided."""
    return 1 - self.p_A[SMALL] if self.p_A else float(self.step.model != SMALL)

  @property
  def headers(self) -> dict[str, str]:
    """Return the headers of the answer to the client.

    The headers of a stream have no dollars, because its cost is known at its end.
    """
    values = {
      "selected-model": self.upstream.name,
      "cost-usd": self.usd,
      "p-large": self.large_p,
    }
    return self.call.headers | write_headers(values)

  def begin(self, reported: bool = False) -> Attempt:
    """Begin an attempt, and reserve its worst case in all budgets.

    Args:
      reported: True if the client makes the attempt itself, and reports its usage.
    """
    call = self.call
    self.last_attempt = self.budgets.sessions.begin(
      call.purse, call.conversation, self.step, self.worst_case_usd, reported
    )
    return self.last_attempt

  def end(
    self, kind: str, call: Call | None = None, record: Record | None = None
  ) -> None:
    """End the newest attempt, and settle its cost.

    Args:
      kind: the outcome, one of the constants of llms/wire.py such as REPLY.
      call: the billed call; None if the attempt had no answer.
      record: the step that the attempt completed; None if there is none.
    """
    attempt = self.last_attempt
    self.last_attempt = None
    self.budgets.sessions.end(attempt, kind, call, record)

  @contextlib.contextmanager
  def reserve(self) -> Iterator[None]:
    """Reserve the worst case of an attempt, which is made inside the `with` block.

    If an exception ends the block, the attempt is booked at its worst case.
    """
    self.begin()
    try:
      yield
    except BaseException:
      # The upstream may bill an attempt that was cancelled, so the purse must pay for
      # it.
      if self.last_attempt:
        self.end(PRESUMED)
      raise

  async def attempt(self) -> Whole | Stream | Outcome:
    """Make an attempt at the chosen model."""
    return await self.upstream.attempt(self.call)

  def settle(self, outcome: Whole | Stream | Outcome) -> Whole | Stream | None:
    """Settle the newest attempt if it has failed.

    After an answer the reservation stays until `book_reply` settles its cost.

    Returns:
      The answer, or None after a failure.
    """
    if not isinstance(outcome, Outcome):
      return outcome
    self.end(outcome.kind)
    return None

  def refuse(self, outcome: Outcome, attempts: int = 1) -> Refusal:
    """Make the error answer for a client after the last attempt has failed."""
    return self.upstream.refuse(outcome, self.call.form)

  async def prepare(self, outcome: Outcome, wait_s: float, is_last: bool) -> bool:
    """Choose the model of the next attempt, after a wait.

    The same model tries again, unless it has no retry left or its call no longer fits
    the budgets. Then an affordable model that has not failed takes its place, if
    `has_others` permits. The one whose index is nearest is taken.

    Args:
      outcome: the failure of the last attempt.
      wait_s: the seconds to wait.
      is_last: True if the model has no retry left.

    Returns:
      True if another model was chosen.

    Raises:
      Refusal: no model may try, or the conversation was scored during the wait.
    """
    await asyncio.sleep(wait_s)
    self.affordable = await self.budgets.find_affordable(self.call)
    model = self.step.model
    is_new = is_last or model not in self.affordable.models
    if is_new:
      self.failed.add(model)
      self.step.logp = None
      ranks = {*self.affordable.models} - self.failed if self.has_others else ()
      model = min(ranks, key=lambda rank: abs(rank - self.step.model), default=None)
    conversation = self.call.conversation
    if model is None or conversation and conversation.score is not None:
      raise self.refuse(outcome)
    self.step.model = model
    return is_new

  async def relay(self, stream: Stream) -> AsyncIterator[bytes]:
    """Yield the events of a stream as they come, and book the reply's cost.

    A stream that breaks off is booked at its worst case.
    """
    form = self.call.form
    meter = Meter(form.counts_beside)
    message = ""
    try:
      async with contextlib.aclosing(stream.response):
        async for block, data in stream.events():
          event = meter.read(data) or {}
          kind = event.get("type") or data.decode(errors="replace")
          if event.get("error") or kind == "error":
            message = self.upstream.read_failure(data)
            raise ConnectionError("the stream has an error")
          with contextlib.suppress(*MALFORMED):
            form.collect(self.answer, event)
          if kind in form.endings:
            break
          if data and not event:
            raise ConnectionError("the stream has an event that is not a JSON object")
          if not form.is_hidden(event, self.call.body):
            yield block
    except LOST as failure:
      self.book_reply()
      outcome = dataclasses.replace(explain(failure), message=message)
      refusal = self.refuse(outcome)
      event = form.write_failure(refusal.body["error"], refusal.status)
      yield write_event(event)
      return
    self.book_reply(meter)
    yield block

  def book_reply(self, meter: Meter | None = None) -> None:
    """Settle the reply's cost, and append it to the conversation as a step.

    Args:
      meter: the usage of the answer; None if the stream broke before its end. If the
        usage is impossible, the reply is booked at its worst case.
    """
    model = self.step.model
    call = self.call
    usage = Usage(0, 0, 0)
    usd = None
    if meter:
      try:
        usage, usd = self.upstream.price_usage(meter)
      except ImpossibleUsage as error:
        problem = f"{self.upstream.name} counts at its worst case. {error}"
        print(f"error: {problem}", file=sys.stderr)
    billed = Call(model, usage, self.worst_case_usd, time.monotonic() - call.start_s)
    outcome = PRESUMED
    cache = None
    switch_usd = 0.0
    if usd is not None:
      outcome = REPLY
      billed = dataclasses.replace(billed, cost_usd=usd)
      cache = dataclasses.replace(
        call.cache, tokens=usage.prompt_tokens, at_s=time.time()
      )
      # What a client reports proves nothing about later calls of this server.
      cache.is_proven = self.last_attempt.number not in call.purse.reported
      switch_usd = self._switch_usd(billed)
    elif meter is None:
      billed = dataclasses.replace(billed, kind=PRESUMED)
    self.usd = billed.cost_usd + self.step.spent_usd
    record = None
    if call.conversation:
      atoms = []
      with contextlib.suppress(*MALFORMED):
        atoms = hash_turn(call.form.read_reply(self.answer))
      size = call.bound_tokens
      record = Record(
        self.step, call.place, cache, switch_usd, atoms, size, call.has_tools
      )
    self.end(outcome, billed, record)

  def _switch_usd(self, call: Call) -> float:
    """Compute the dollars that a call cost because the model has changed.

    If this model had also answered the previous step, it would have that step's prompt
    and reply in its prompt cache. The result is the call's cost minus its cost with
    this cache; 0 if the model has not changed.
    """
    conversation = self.call.conversation
    if not conversation or not conversation.records:
      return 0.0
    step = conversation.records[-1].step
    if step.model == call.model:
      return 0.0
    last = step.calls[-1].usage
    read = Read(last.prompt_tokens + last.completion_tokens, step.started_s or 0.0)
    usage = call.usage
    warm = self.budgets.billing.bill(
      call.model,
      [read],
      usage.prompt_tokens,
      usage.completion_tokens,
      self.call.call_s,
    )
    return max(0.0, call.cost_usd - warm.cost_usd)
