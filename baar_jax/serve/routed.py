"""A client's call: the models that fit its budgets, its attempts, and its step."""

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
from baar_jax.llms.client import Stream
from baar_jax.llms.wire import PRESUMED, REPLY, Outcome
from baar_jax.serve.request import (
  ROUTER,
  Cache,
  Conversation,
  Refusal,
  drop_nulls,
  find_least,
)
from baar_jax.serve.sessions import Attempt, Session, Sessions
from baar_jax.serve.upstream import Upstream

EXHAUSTED = "budget_exhausted"  # the code of the error if no call fits


@dataclasses.dataclass(frozen=True)
class ClientCall:
  """A call of a client as it has arrived, with its session."""

  session: Session
  body: dict
  text: Conversation
  start_s: float = dataclasses.field(default_factory=time.monotonic)

  @property
  def headers(self) -> dict[str, str]:
    """List what every answer says of the session."""
    session = self.session
    left = session.left
    return write_headers(
      {
        "session-id": quote(session.id, safe=" "),
        "session-usd": session.spent_usd,
        "left-usd": left.usd,
        "left-large-calls": left.calls,
      }
    )


class Room(NamedTuple):
  """The models whose call fits all budgets at one moment."""

  models: list[int]  # ascending, at least one
  bounds_usd: list[float]  # the worst case of a call of each model, also of the others


@dataclasses.dataclass(frozen=True)
class Budgets:
  """The models of the endpoint, and the budgets that their calls must fit."""

  config: ServeConfig
  sessions: Sessions
  upstreams: list[Upstream]

  async def find_room(self, call: ClientCall) -> Room:
    """Find the models whose call fits; spend the reserve last.

    Raises:
      Refusal: none fits, and no attempt in flight can give way.
    """
    session = call.session
    reserve_usd = find_least(self.config.reserve_usd, session.usd_limit)
    while True:
      session.changed.clear()
      caches = session.caches
      bounds_usd = [u.most_usd(call.body, caches) for u in self.upstreams]
      if session.dollars.allows(reserve_usd):
        fit = functools.partial(self.sessions.fit, session, bounds_usd)
        allowed = fit(reserve_usd) or fit(0.0)
        if allowed:
          return Room(allowed, bounds_usd)
      if not session.is_busy:
        break
      await session.changed.wait()
    spent_usd = session.spent_usd
    needed_usd = min(bounds_usd)
    spent = f"${spent_usd:.6f} is spent, and a call may cost ${needed_usd:.6f}"
    limit = "which the session's cap or --config.max_usd has no room for"
    raise Refusal(
      429,
      f"{spent}, {limit}: hand in the work",
      "insufficient_quota",
      EXHAUSTED,
      spent_usd=spent_usd,
      cap_usd=session.usd_limit,
      needed_usd=needed_usd,
    )

  def expect_usd(self, call: ClientCall) -> list[float]:
    """Compute each model's expected cost, with a reply of the session's mean length."""
    session = call.session
    tokens = [step.calls[-1].usage.completion_tokens for step in session.steps]
    reply = sum(tokens) / max(1, len(tokens))
    ttl_s = self.config.cache_ttl_s
    caches = session.caches
    return [u.expected_usd(call.body, caches, ttl_s, reply) for u in self.upstreams]


@dataclasses.dataclass(eq=False)
class RoutedCall:
  """A call of a client whose model is decided, and the books of its attempts."""

  call: ClientCall
  budgets: Budgets
  step: Step
  room: Room  # when the model was chosen
  p_A: Sequence[float]  # the router's probability of each model, if it has some
  failed: set[int] = dataclasses.field(default_factory=set)  # models
  held: Attempt | None = None  # the last attempt; None before the first
  usd: float | None = None  # of all attempts; None until the reply is booked

  @property
  def session(self) -> Session:
    """Return the session of the call."""
    return self.call.session

  @property
  def upstream(self) -> Upstream:
    """Return the model that the step names."""
    return self.budgets.upstreams[self.step.model]

  @property
  def most_usd(self) -> float:
    """Return the worst case of an attempt."""
    return self.room.bounds_usd[self.step.model]

  @property
  def has_others(self) -> bool:
    """Tell whether the nearest models take over from one that failed."""
    return self.budgets.config.fallback and self.session.rule == ROUTER

  @property
  def large_p(self) -> float:
    """Return the probability of a model dearer than SMALL; of a rule 0 or 1."""
    return 1 - self.p_A[SMALL] if self.p_A else float(self.step.model != SMALL)

  @property
  def headers(self) -> dict[str, str]:
    """List what its answer says; the dollars of a stream are in its last chunk."""
    values = {
      "selected-model": self.upstream.name,
      "cost-usd": self.usd,
      "p-large": self.large_p,
    }
    return self.call.headers | write_headers(values)

  def begin(self, reported: bool = False) -> Attempt:
    """Take an attempt from all budgets; its client makes and reports a reported one."""
    sessions = self.budgets.sessions
    self.held = sessions.begin(self.session, self.step, self.most_usd, reported)
    return self.held

  def end(self, kind: str, call: Call | None = None) -> None:
    """Close the attempt; `call` is of one with an answer."""
    self.budgets.sessions.end(self.held, kind, call)

  @contextlib.contextmanager
  def reserve(self) -> Iterator[None]:
    """Hold the worst case of an attempt while it is made."""
    self.begin()
    try:
      yield
    except BaseException:  # it may be billed, and its session outlives this call
      if self.held.number in self.session.open:
        self.end(PRESUMED)
      raise

  async def attempt(self) -> dict | Stream | Outcome:
    """Make an attempt."""
    return await self.upstream.attempt(self.call.body)

  def settle(self, outcome: dict | Stream | Outcome) -> dict | Stream | None:
    """Book a failed attempt; `book_reply` books an answer when its usage comes."""
    if not isinstance(outcome, Outcome):
      return outcome
    self.end(outcome.kind)
    return None

  def refuse(self, outcome: Outcome, attempts: int = 1) -> Refusal:
    """Make the error that tells of the last attempt."""
    return self.upstream.refuse(outcome)

  async def prepare(self, outcome: Outcome, wait_s: float, is_last: bool) -> bool:
    """Wait, and choose a model that fits. Raises Refusal if there is none."""
    await asyncio.sleep(wait_s)
    self.room = await self.budgets.find_room(self.call)
    model = self.step.model
    is_new = is_last or model not in self.room.models
    if is_new:
      self.failed.add(model)
      self.step.logp = None
      others = {*self.room.models} - self.failed if self.has_others else ()
      model = min(others, key=lambda other: abs(other - self.step.model), default=None)
    if model is None or self.session.score is not None:
      raise self.refuse(outcome)
    self.step.model = model
    return is_new

  def book_reply(self, fields: dict, whole: bool = True) -> None:
    """Book the reply, once, as the session's next step.

    Args:
      fields: of its answer or last chunk. Without usage in them it counts at its worst
        case.
      whole: whether the client has all of it.
    """
    if self.usd is not None:
      return
    session = self.session
    model = self.step.model
    bill = self.upstream.read_bill(fields)
    latency_s = time.monotonic() - self.call.start_s
    call = Call(model, bill.usage, self.most_usd, latency_s)
    outcome = PRESUMED
    if bill.usd is not None:
      outcome = REPLY
      call = dataclasses.replace(call, cost_usd=bill.usd)
      session.switch_usd += self._switch_usd(bill.usage)
      session.caches[model] = Cache.after(self.call.body, bill.usage.prompt_tokens)
    elif not whole:
      call = dataclasses.replace(call, kind=PRESUMED)
    self.usd = call.cost_usd + self.step.spent_usd
    session.steps.append(self.step)
    session.places.append(len(self.call.text.actions))
    self.end(outcome, call)

  def _switch_usd(self, usage: Usage) -> float:
    """Compute the dollars for reading anew what another model has just read."""
    steps = self.session.steps
    if not steps or steps[-1].model == self.step.model:
      return 0.0
    last = steps[-1].calls[-1].usage
    prompt = usage.prompt_tokens
    seen = min(last.prompt_tokens + last.completion_tokens, prompt)
    price = self.upstream.price
    warm_usd = price.cost_usd(Usage(prompt, max(seen, usage.cached_tokens), 0))
    return max(0.0, price.cost_usd(Usage(prompt, usage.cached_tokens, 0)) - warm_usd)


def write_headers(values: Mapping[str, str | float | None]) -> dict[str, str]:
  """Write the headers of values; None is left out."""
  headers = {}
  for name, value in drop_nulls(values).items():
    text = f"{value:.9f}" if isinstance(value, float) else str(value)
    headers[f"x-baar-{name}"] = text
  return headers
