"""Call upstream models for a client within its budgets, and book the costs."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from baar_jax.config import ServeConfig
from baar_jax.episode import SMALL, Call, Step, Usage
from baar_jax.llms.chat_completions import TIERS, read_usage
from baar_jax.llms.client import Client, Stream
from baar_jax.llms.prices import Billing, Read
from baar_jax.llms.wire import PRESUMED, REPLY, UNREADABLE, Outcome, is_json
from baar_jax.serve.request import (
  DIGESTED_FIELDS,
  ROUTER,
  Cache,
  Conversation,
  Refusal,
  bound_tokens,
  drop_nulls,
  find_lowest,
)
from baar_jax.serve.sessions import Attempt, Session, Sessions


class Bill(NamedTuple):
  """The cost of a reply, computed from the usage that the model reports.

  Attributes:
    usd: US dollars; None if the model reports no usage, or a service tier whose price
      is unknown.
    usage: the tokens; all 0 if the model reports no usage.
  """

  usd: float | None
  usage: Usage


class Upstream(Client):
  """An upstream model, to which this server forwards clients' calls."""

  def worst_case_usd(self, body: dict, caches: Mapping[int, Cache]) -> float:
    """Compute the worst case of an attempt in US dollars.

    The prompt's tokens are bounded by `bound_tokens`. If this model has already read
    the first messages in an earlier call, these messages count with the tokens that
    were billed for them.

    Args:
      body: the call's body.
      caches: the session's prompt caches, by model.
    """
    request = self.write(body)
    tokens = bound_tokens(body)
    cache = caches.get(self.config_index)
    if cache and cache.is_prefix_of(body):
      other_fields = dict(request)
      for name in ("model", "messages", *self.form.limits, *DIGESTED_FIELDS):
        other_fields.pop(name, None)
      new_messages = body["messages"][cache.messages :]
      tokens = cache.tokens + bound_tokens([other_fields, new_messages])
    return self.bound_usd(tokens, request)

  async def attempt(self, body: dict) -> dict | Stream | Outcome:
    """Send a call to this model once.

    Returns:
      A chat completion, a stream, or the failure.
    """
    answer = await self.send(body, self.config.timeout_s)
    if isinstance(answer, dict) and not is_completion(answer):
      return UNREADABLE
    return answer

  def refuse(self, outcome: Outcome) -> Refusal:
    """Make the error answer for a client after a failed attempt at this model."""
    # This server follows no redirects. A redirect (3xx) by the model's endpoint is
    # therefore reported as a bad gateway.
    status = outcome.status if outcome.status >= 400 else 502
    message = (
      outcome.message
      or f"The model {self.name} {outcome.problem}. Send the call again. "
      "If this error repeats, check --config.models of this server."
    )
    return Refusal(
      status, message, outcome.type or "upstream_error", outcome.code or None
    )

  def read_bill(self, fields: dict) -> Bill:
    """Read the usage in an answer or a stream's chunk, and compute its dollars."""
    usage = read_usage(fields)
    if usage is None:
      return Bill(None, Usage(0, 0, 0))
    if fields.get("service_tier") not in TIERS:
      return Bill(None, usage)
    return Bill(self.price.cost_usd(usage), usage)


def is_completion(answer: dict) -> bool:
  """Tell whether an answer is a chat completion: JSON with a list of choices."""
  choices = answer.get("choices")
  if not isinstance(choices, list) or not is_json(answer):
    return False
  return all(isinstance(choice, dict) for choice in choices)


# The `error.code` of a call whose worst case exceeds a budget at every model.
EXHAUSTED = "budget_exhausted"


@dataclasses.dataclass(frozen=True)
class ClientCall:
  """A client's call, with the session that it belongs to.

  Attributes:
    session: the session that the call belongs to.
    body: the JSON body.
    text: the messages of the body, read as an unfinished episode.
    session_s: seconds from the session's first request to this one.
    start_s: when the call arrived, in seconds of the monotonic clock.
  """

  session: Session
  body: dict
  text: Conversation
  session_s: float
  start_s: float = dataclasses.field(default_factory=time.monotonic)

  @property
  def headers(self) -> dict[str, str]:
    """Return the headers of an answer with the session's dollars and remaining caps."""
    session = self.session
    left = session.remaining_caps
    return write_headers(
      {
        "session-id": quote(session.id, safe=" "),
        "session-usd": session.spent_usd,
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
  """Compare calls with the budgets of their session and of the run."""

  config: ServeConfig
  sessions: Sessions
  upstreams: list[Upstream]
  billing: Billing

  async def find_affordable(self, call: ClientCall) -> AffordableModels:
    """Find the models whose call fits all budgets.

    A call must leave `serve.reserve_usd` of the session's cap unspent. If no model's
    call does, a last call may spend this reserve, provided that all of it is left. If
    no call fits, wait for the end of the session's attempts in flight, which may free
    dollars, and try again.

    Raises:
      Refusal: no call fits, and no attempt of the session is in flight.
    """
    session = call.session
    reserve_usd = find_lowest(self.config.reserve_usd, session.usd_limit)
    while True:
      session.changed.clear()
      caches = session.caches
      worst_case_usd_A = [
        upstream.worst_case_usd(call.body, caches) for upstream in self.upstreams
      ]
      if session.dollars.allows(reserve_usd):
        list_affordable = functools.partial(
          self.sessions.list_affordable, session, worst_case_usd_A
        )
        allowed = list_affordable(reserve_usd) or list_affordable(0.0)
        if allowed:
          return AffordableModels(allowed, worst_case_usd_A)
      if not session.is_busy:
        break
      await session.changed.wait()
    spent_usd = session.spent_usd
    needed_usd = min(worst_case_usd_A)
    spent = f"This session has cost ${spent_usd:.6f}; a call may cost ${needed_usd:.6f}"
    limit = (
      "That exceeds the session's cap, or the rest of --config.max_usd for all sessions"
    )
    raise Refusal(
      429,
      f"{spent}. {limit}. End the task without a further call.",
      "insufficient_quota",
      EXHAUSTED,
      spent_usd=spent_usd,
      cap_usd=session.usd_limit,
      needed_usd=needed_usd,
    )


@dataclasses.dataclass(eq=False)
class RoutedCall:
  """A client's call and the model chosen for it, with the costs of its attempts.

  `baar_jax.llms.client.ask` makes the attempts with the methods of this class.

  Attributes:
    step: the session's next step; `step.model` is the chosen model.
    affordable: the affordable models when the model was last chosen.
    p_A: the router's probability of each model; empty unless a router decided.
    failed: the models that no longer answer this call, because all of their retries
      failed or they no longer fitted the budgets.
    last_attempt: the newest attempt; None before the first.
    usd: US dollars of all attempts; None until the reply is booked.
  """

  call: ClientCall
  budgets: Budgets
  step: Step
  affordable: AffordableModels
  p_A: Sequence[float]
  failed: set[int] = dataclasses.field(default_factory=set)
  last_attempt: Attempt | None = None
  usd: float | None = None

  @property
  def session(self) -> Session:
    """Return the session that the call belongs to."""
    return self.call.session

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
    return self.budgets.config.fallback and self.session.rule == ROUTER

  @property
  def large_p(self) -> float:
    """Return the probability of a LARGE call; 0 or 1 unless a router decided."""
    return 1 - self.p_A[SMALL] if self.p_A else float(self.step.model != SMALL)

  @property
  def headers(self) -> dict[str, str]:
    """Return the headers of the answer to the client.

    The headers of a stream have no dollars, because its cost is known at its end. Its
    last chunk has them.
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
    sessions = self.budgets.sessions
    self.last_attempt = sessions.begin(
      self.session, self.step, self.worst_case_usd, reported
    )
    return self.last_attempt

  def end(self, kind: str, call: Call | None = None) -> None:
    """End the newest attempt, and settle its cost.

    Args:
      kind: the outcome, one of the constants of llms/wire.py such as REPLY.
      call: the billed call; None if the attempt had no answer.
    """
    self.budgets.sessions.end(self.last_attempt, kind, call)

  @contextlib.contextmanager
  def reserve(self) -> Iterator[None]:
    """Reserve the worst case of an attempt, which is made inside the `with` block.

    If an exception ends the block, the attempt is booked at its worst case.
    """
    self.begin()
    try:
      yield
    except BaseException:
      # The upstream may bill an attempt that was cancelled, so the session must pay for
      # it.
      if self.last_attempt.number in self.session.open:
        self.end(PRESUMED)
      raise

  async def attempt(self) -> dict | Stream | Outcome:
    """Make an attempt at the chosen model."""
    return await self.upstream.attempt(self.call.body)

  def settle(self, outcome: dict | Stream | Outcome) -> dict | Stream | None:
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
    return self.upstream.refuse(outcome)

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
      Refusal: no model may try, or the session was scored during the wait.
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
    if model is None or self.session.score is not None:
      raise self.refuse(outcome)
    self.step.model = model
    return is_new

  def book_reply(self, fields: dict, is_whole: bool = True) -> None:
    """Settle the reply's cost, and append it to the session as a step.

    A second call of this method does nothing.

    Args:
      fields: the answer, or a stream's last chunk. If it reports no usage, or a service
        tier whose price is unknown, the reply is booked at its worst case.
      is_whole: False if the stream broke before its end.
    """
    if self.usd is not None:
      return
    session = self.session
    model = self.step.model
    bill = self.upstream.read_bill(fields)
    latency_s = time.monotonic() - self.call.start_s
    call = Call(model, bill.usage, self.worst_case_usd, latency_s)
    outcome = PRESUMED
    if bill.usd is not None:
      outcome = REPLY
      call = dataclasses.replace(call, cost_usd=bill.usd)
      session.switch_usd += self._switch_usd(call)
      session.caches[model] = Cache.after(self.call.body, bill.usage.prompt_tokens)
    elif not is_whole:
      call = dataclasses.replace(call, kind=PRESUMED)
    self.usd = call.cost_usd + self.step.spent_usd
    session.steps.append(self.step)
    session.places.append(len(self.call.text.actions))
    self.end(outcome, call)

  def _switch_usd(self, call: Call) -> float:
    """Compute the dollars that a call cost because the model has changed.

    If this model had also answered the previous step, it would have that step's prompt
    and reply in its prompt cache. The result is the call's cost minus its cost with
    this cache; 0 if the model has not changed.
    """
    steps = self.session.steps
    if not steps or steps[-1].model == call.model:
      return 0.0
    last = steps[-1].calls[-1].usage
    read = Read(last.prompt_tokens + last.completion_tokens, steps[-1].started_s or 0.0)
    usage = call.usage
    warm = self.budgets.billing.bill(
      call.model,
      [read],
      usage.prompt_tokens,
      usage.completion_tokens,
      self.call.session_s,
    )
    return max(0.0, call.cost_usd - warm.cost_usd)


def write_headers(values: Mapping[str, str | float | None]) -> dict[str, str]:
  """Return the values that are not None as headers with the prefix `x-baar-`."""
  headers = {}
  for name, value in drop_nulls(values).items():
    text = f"{value:.9f}" if isinstance(value, float) else str(value)
    headers[f"x-baar-{name}"] = text
  return headers
