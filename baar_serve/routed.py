"""Call upstream models for a client within its budgets, and book the costs."""

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import AsyncIterator

from baar_jax.episode import FAILED, PRESUMED, REPLY, Call, Step
from baar_jax.llms.history import write_action
from baar_jax.llms.prices import ROUNDING
from baar_jax.llms.provider import Outcome, backoff_s, explain
from baar_serve.call import ClientCall
from baar_serve.client import LOST, Stream, Whole
from baar_serve.config import ServeConfig
from baar_serve.meter import NO_USAGE, AnswerMeter, Bill
from baar_serve.records import Attempt, Cache, Record
from baar_serve.request import (
  Refusal,
  hash_prefix,
  hash_turn,
  write_event,
)
from baar_serve.sessions import Sessions
from baar_serve.upstream import MALFORMED, Offer, Upstream


@dataclasses.dataclass(frozen=True)
class Budgets:
  """Compare calls with the budgets of their purse and of the run."""

  config: ServeConfig
  sessions: Sessions
  upstreams: list[Upstream]

  async def find_affordable(self, call: ClientCall) -> list[int]:
    """Find the models that offer a call's form and fit all budgets, ascending.

    What the call may cost at each model, affordable or not, is kept in `call.offers`.
    If only reservations forbid all calls, wait for the end of an attempt in flight, of
    whatever session, and try again. With `last_turn`, the first call of the main agent
    that does not fit beside the last turn's dollars becomes the last turn.

    Raises:
      Refusal: no model offers the form, no call would fit without reservations, or the
        wait has taken `models.timeout_s`.
    """
    purse = call.purse
    sessions = self.sessions
    offering = self._prepare(call)
    least = [call.offers[model].shrink(0.0) for model in offering]
    needed_usd = min(offer.worst_case_usd for offer in least)
    is_led = self.config.last_turn and sessions.is_led_by(call.conversation)
    until_s = asyncio.get_running_loop().time() + self.config.models.timeout_s
    try:
      while not purse.is_over:
        sessions.changed.clear()
        call.aside_usd = purse.aside_usd
        if call.is_last:
          call.aside_usd = 0.0
        elif is_led:
          call.aside_usd = min(call.offers[model].aside_usd for model in offering)
        old_usd = purse.aside_usd
        purse.set_aside(call.aside_usd)
        try:
          models = self._list_fitting(call, offering)
          unspent_usd = sessions.unspent_usd(purse)
        finally:
          purse.set_aside(old_usd)
        if models:
          return models
        if needed_usd * (1 + ROUNDING) > unspent_usd:
          break
        async with asyncio.timeout_at(until_s):
          await sessions.changed.wait()
    except TimeoutError:
      raise Refusal(
        503,
        "Calls in flight reserve what is left of a cap. Send the call again.",
        "budget_reserved",
      ) from None
    if is_led and not (call.is_last or purse.is_over):
      if not (call.conversation.records or purse.aside_usd):
        raise self._refuse(call, needed_usd + call.aside_usd, "With a last turn, the")
      call.begin_last_turn()
      return await self.find_affordable(call)
    raise self._refuse(call, needed_usd)

  def _prepare(self, call: ClientCall) -> list[int]:
    """Prepare a call for each model, and list the models that could answer it.

    Raises:
      Refusal: no model offers the form.
    """
    if not call.offers:
      call.warn(self.config.warn_share)
      for upstream in self.upstreams:
        call.offers.append(upstream.prepare(call, self.config))
    offering = []
    for model, upstream in enumerate(self.upstreams):
      if upstream.offers(call.form):
        offering.append(model)
    if not offering:
      raise Refusal(
        404,
        f"No model of this server offers {call.form.path}. "
        "Use another form (--config.models.forms).",
      )
    fitting = [model for model in offering if call.offers[model].fits_window]
    return fitting or [
      max(offering, key=lambda model: self.upstreams[model].limits.context_tokens)
    ]

  def _list_fitting(self, call: ClientCall, offering: list[int]) -> list[int]:
    """Offer a call to each model, and list those whose worst case fits all budgets."""
    room_usd = self.sessions.room_usd(call.purse)
    call.offers = [offer.shrink(room_usd) for offer in call.offers]
    models = []
    for model in offering:
      worst_case_usd = call.offers[model].worst_case_usd
      if self.sessions.allows(call.purse, model, worst_case_usd):
        models.append(model)
    return models

  def _refuse(
    self, call: ClientCall, needed_usd: float, subject: str = "The"
  ) -> Refusal:
    """Make the refusal of a call that fits no budget.

    Args:
      needed_usd: the least worst case of the call in US dollars.
      subject: the beginning of the sentence about these dollars.
    """
    purse = call.purse
    spent_usd = purse.dollars.settled_usd
    return Refusal(
      402,
      f"Session {purse.name} has cost ${spent_usd:.6f}. {subject} next call needs "
      f"${needed_usd:.6f}. The session's cap or --config.max_total_usd forbids it. "
      "End the task without a further call.",
      "insufficient_quota",
      "budget_exhausted",
      session=purse.name,
      spent_usd=spent_usd,
      cap_usd=purse.dollars.limit_usd,
      needed_usd=needed_usd,
    )


@dataclasses.dataclass(eq=False)
class RoutedCall:
  """A client's call and the model chosen for it, with the costs of its attempts.

  Attributes:
    step: the conversation's next step; `step.model` is the chosen model.
    last_attempt: the newest attempt; None before the first.
    usd: US dollars of all attempts; None until the reply is booked.
    answer: the whole answer, as far as it is known.
  """

  call: ClientCall
  budgets: Budgets
  step: Step
  last_attempt: Attempt | None = None
  usd: float | None = None
  answer: dict = dataclasses.field(default_factory=dict)

  @property
  def upstream(self) -> Upstream:
    """Return the upstream model that was chosen."""
    return self.budgets.upstreams[self.step.model]

  @property
  def offer(self) -> Offer:
    """Return what an attempt at the chosen model may cost."""
    return self.call.offers[self.step.model]

  @property
  def headers(self) -> dict[str, str]:
    """Return the headers of the answer to the client."""
    return self.call.answer_headers | {"x-baar-selected-model": self.upstream.name}

  def begin(self) -> None:
    """Begin an attempt, and reserve its worst case in all budgets."""
    call = self.call
    request = self.offer.request
    # The next call has the newest message without the note.
    count = len(request[call.form.history]) - bool(call.note)
    call.prefix = (count, hash_prefix(call.form, request, count))
    aside_usd = None if call.is_last else call.aside_usd
    self.last_attempt = self.budgets.sessions.begin(
      call.purse, call.conversation, self.step, self.offer.worst_case_usd, aside_usd
    )

  def end(
    self, kind: str, call: Call | None = None, record: Record | None = None
  ) -> None:
    """End the newest attempt, and settle its cost.

    Args:
      kind: the outcome, one of the constants of episode.py such as REPLY.
      call: the billed call; None if the attempt had no answer.
      record: the step that the attempt completed; None if there is none.
    """
    attempt = self.last_attempt
    self.last_attempt = None
    large_usd = None
    large = self.budgets.upstreams[-1]
    if kind == REPLY and self.upstream is not large:
      large_usd = large.price.cost_usd(call.usage)
    self.budgets.sessions.end(attempt, kind, call, record, large_usd)

  async def ask(self, retries: int) -> Whole | Stream:
    """Repeat the attempts at a call until one succeeds.

    The reservation of the last attempt stays until `book_reply` settles its cost, also
    after an exception.

    Args:
      retries: the number of attempts after the first one.

    Raises:
      Refusal: all attempts failed, or no further one can succeed or be afforded.
    """
    number = 0
    while True:
      self.begin()
      try:
        await self.budgets.sessions.reach_disk()
      except BaseException:
        self.end(FAILED)  # Nothing was sent.
        raise
      # The caller books an attempt that is cancelled, because it may be billed.
      answer = await self.upstream.attempt(self.call, self.offer)
      if not isinstance(answer, Outcome):
        return answer
      self.end(answer.kind)
      if answer.fatal or answer.hopeless or number == retries:
        raise self.upstream.refuse(answer)
      await asyncio.sleep(answer.wait_s + backoff_s(number))
      number += 1
      models = []
      with contextlib.suppress(Refusal):
        models = await self.budgets.find_affordable(self.call)
      conversation = self.call.conversation
      is_scored = conversation and conversation.score is not None
      if is_scored or self.step.model not in models:
        # The attempts have spent the budget, or the task has ended meanwhile. Their
        # failure is the cause.
        raise self.upstream.refuse(answer)

  async def relay(self, stream: Stream, until_s: float) -> AsyncIterator[bytes]:
    """Yield the events of a stream as they come, and book the reply's cost.

    A stream that breaks off is booked at its worst case.

    Args:
      until_s: the deadline, in seconds of the event loop's clock.
    """
    form = self.call.form
    meter = stream.meter
    message = ""
    try:
      with contextlib.closing(stream.response):
        async for block, data in stream.events(until_s):
          event = meter.read(data) or {}
          kind = event.get("type") or data.decode(errors="replace")
          if event.get("error") or kind == "error":
            message = self.upstream.read_failure(data)
            raise ConnectionError("the stream has an error")
          with contextlib.suppress(*MALFORMED):
            form.collect(self.answer, event)
          if kind in form.endings:
            break
          if not form.is_hidden(event, self.call.body):
            yield block
    except LOST as failure:
      self.book_reply()
      outcome = dataclasses.replace(explain(failure), message=message)
      refusal = self.upstream.refuse(outcome)
      yield write_event(form.write_failure(refusal.error))
      return
    self.book_reply(meter)
    yield block

  def book_reply(self, meter: AnswerMeter | None = None) -> None:
    """Settle the reply's cost, and append it to the conversation as a step.

    Args:
      meter: the usage of the answer; None if the stream broke before its end, which is
        booked at its worst case.
    """
    call = self.call
    upstream = self.upstream
    bill = Bill(NO_USAGE, self.offer.worst_case_usd, "")
    if meter:
      count = call.body.get("n") or 1
      is_cut = self.offer.is_sent and len(meter.cut) == count
      most_tokens = count * self.offer.reply_tokens * is_cut
      bill = upstream.bill(meter, bill.usd, most_tokens)
    if bill.problem:
      problem = f"error: {upstream.name} counts as ${bill.usd:.6f}. {bill.problem}"
      print(problem, file=sys.stderr)
    kind = "act" if meter else PRESUMED
    latency_s = time.monotonic() - call.start_s
    billed = Call(self.step.model, bill.usage, bill.usd, latency_s, kind=kind)
    cache = None
    outcome = PRESUMED
    if bill.usage != NO_USAGE:
      outcome = REPLY
      upstream.multiples = {"service_tier": 1.0} | meter.multiples
      if call.prefix:
        cache = Cache(*call.prefix, bill.usage.prompt_tokens)
    self.usd = billed.cost_usd + self.step.spent_usd
    record = None
    if call.conversation:
      atoms = []
      with contextlib.suppress(*MALFORMED):
        turn = call.form.read_reply(self.answer)
        atoms = [*hash_turn(turn)]
        self.step.action = write_action(turn) * self.budgets.config.record_text
      record = Record(
        self.step,
        len(call.history.actions),
        cache,
        atoms,
        call.bound_tokens * bool(call.body.get("tools")),
      )
    self.end(outcome, billed, record)
