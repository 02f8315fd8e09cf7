"""A client's call: its session, the decision under caps, the attempts, and its step."""

import asyncio
import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from baar_jax.config import Config, ServeConfig
from baar_jax.episode import SMALL, Call, Step, Task, Usage
from baar_jax.llms.client import Stream, ask
from baar_jax.llms.wire import PRESUMED, REPLY, Outcome
from baar_jax.rollout.specs import Cap, Decision, Job, Live
from baar_jax.rollout.turn import Policy
from baar_jax.router.view import list_left
from baar_jax.serve.decider import Decider
from baar_jax.serve.request import (
  ROUTER,
  Asked,
  Cache,
  Conversation,
  Refusal,
  Scored,
  drop_nulls,
  find_least,
  read_messages,
)
from baar_jax.serve.sessions import Attempt, Session, Sessions
from baar_jax.serve.upstream import Upstream
from baar_jax.train.jobs import cap_spec

NAME = "baar"  # of the models that a client can ask for
EXHAUSTED = "budget_exhausted"  # the code of the error if no call fits


class Served(NamedTuple):
  """What a client's name for a model stands for."""

  rule: str
  cost_weight: float | None


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
    usd, usage = self.upstream.cost(fields)
    latency_s = time.monotonic() - self.call.start_s
    call = Call(model, usage, self.most_usd, latency_s)
    outcome = PRESUMED
    if usd is not None:
      outcome = REPLY
      call = dataclasses.replace(call, cost_usd=usd)
      session.switch_usd += self._switch_usd(usage)
      session.caches[model] = Cache.read(self.call.body, usage.prompt_tokens)
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


class Exchange:
  """Decides, forwards and accounts for the calls of all sessions, in one event loop."""

  def __init__(
    self, config: Config, sessions: Sessions, policies: Mapping[str, Policy]
  ):
    """Take the policies by rule. Raises ValueError for a model without price or key."""
    self.config = config
    self.sessions = sessions
    self.names = config.models.names
    places = range(len(self.names))
    self.upstreams = [Upstream(config.models, place) for place in places]
    self.budgets = Budgets(config.serve, sessions, self.upstreams)
    # By number: the calls in flight until clients report their usage.
    self._reported: dict[int, RoutedCall] = {}
    self.deciders: dict[str, Decider] = {}
    named = {}
    for rule, policy in policies.items():
      self.deciders[rule] = Decider(policy, config.serve.max_sessions)
      weights = policy.cost_weights
      named[f"{NAME}:{rule}"] = Served(rule, min(weights, default=None))
      for weight in weights:
        named[f"{NAME}:price={weight:g}"] = Served(rule, weight)
    self.served = {NAME: named[f"{NAME}:{config.serve.policy}"]} | named

  def receive(self, headers: Mapping[str, str], body: dict) -> ClientCall:
    """Read a call; open its session, and complete the session's last step.

    Raises:
      Refusal: it is no call, or does not fit its session.
    """
    asked = Asked.read_call(headers, body)
    text = read_messages(body.get("messages"), body.get("tools"))
    session = self.open(asked, text)
    self.complete(session, text, asked.score)
    return ClientCall(session, body, text)

  def open(self, asked: Asked, text: Conversation) -> Session:
    """Open the session of a call, which may be new. Raises Refusal."""
    c = self.config.serve
    if asked.model not in self.served:
      names = ", ".join(self.served)
      raise Refusal(404, f"model must be one of {names}", code="model_not_found")
    served = self.served[asked.model]
    cap = asked.lower(Cap(c.max_large_calls, c.max_usd))
    id_ = asked.id or self.sessions.name(text.fingerprint, is_new=not text.actions)
    session = self.sessions.find(id_)
    if session is None:
      task_id = asked.task_id or text.fingerprint
      description = text.task * c.record_text
      key = self._name_policy(served, cap)
      session = Session(
        id_,
        served.rule,
        served.cost_weight,
        key,
        task_id,
        description,
        cap.calls,
        cap.usd,
      )
      self.sessions.add(session)
    is_other = session.score is not None
    is_other |= served != Served(session.rule, session.price)
    # A call that names no cap goes on under the session's.
    if asked.call_limit is not None:
      is_other |= cap.calls != session.call_limit
    if asked.usd_limit is not None:
      is_other |= cap.usd != session.usd_limit
    if is_other:
      problem = f"session {id_} is scored, or was begun with another model or cap"
      raise Refusal(409, f"{problem}: take another x-session-id")
    return session

  def _name_policy(self, served: Served, cap: Cap) -> str:
    """Return the key under which a session's episode is stored."""
    spec = self.deciders[served.rule].policy.spec
    if spec.rollout:  # its key tells the update that learns from it
      return spec.key
    spec = dataclasses.replace(spec, cost_weight=served.cost_weight)
    return cap_spec(spec, cap).key

  def complete(self, session: Session, text: Conversation, score: float | None) -> None:
    """Complete a session's last step with the action that its client took."""
    if session.places and session.places[-1] == len(text.actions) - 1:
      step = session.steps[-1]
      step.action = text.actions[-1] * self.config.serve.record_text
      step.score = score  # what the values learn from: see `train.values`

  async def decide(self, call: ClientCall) -> RoutedCall:
    """Choose the model that acts next; it fits until the event loop goes on.

    Raises:
      Refusal: no model fits.
    """
    session = call.session
    observation = call.text.observations[-1]
    async with session.deciding:
      room = await self.budgets.find_room(call)
      decision = Decision(room.models[0])
      if len(room.models) > 1:
        live = self._make_live(session, call.text)
        decision = await self.deciders[session.rule].decide(live)
        room = await self.budgets.find_room(call)  # others have called meanwhile
      if session.score is not None:
        raise Refusal(409, f"session {session.id} is scored")
      model = self._pick(call, decision.model, room.models)
    step = Step(
      observation * self.config.serve.record_text,
      model,
      action="",
      logp=decision.logp if model == decision.model else None,
      router_cost_usd=decision.cost_usd,
      router_latency_s=decision.latency_s,
    )
    return RoutedCall(call, self.budgets, step, room, decision.p_A)

  def _make_live(self, session: Session, text: Conversation) -> Live:
    """Make what the session's policy sees of it."""
    # Of several calls for one place the last counts.
    made = dict(zip(session.places, session.steps))
    unknown = Step("", SMALL, "")
    places = range(len(text.actions))
    steps = text.write_steps([made.get(place, unknown) for place in places])
    # What is drawn depends on the session, as does its stratum.
    task = Task(session.id, "test", text.task, self.config.env.max_steps)
    trial = random.Random(session.id).randint(1, self.config.references.samples)
    return Live(
      Job(task, "reference", trial),
      session.cap,
      models=len(self.upstreams),
      cost_weight=session.price,
      steps=steps,
      observation=text.observations[-1],
      told=[*list_left(session.cap, steps), session.left],
    )

  def _pick(self, call: ClientCall, model: int, allowed: list[int]) -> int:
    """Pick the decided model, or the next cheaper one, or one whose cache is warm."""
    cheaper = [other for other in allowed if other <= model]
    picked = cheaper[-1] if cheaper else allowed[0]
    session = call.session
    if not self.config.serve.route_by_cache or session.rule != ROUTER:
      return picked
    usd_A = self.budgets.expect_usd(call)
    most_usd = usd_A[picked]
    for other in allowed:
      if other > picked and other in session.caches and usd_A[other] <= most_usd:
        picked = other
    return picked

  async def forward(self, routed: RoutedCall) -> dict | Stream:
    """Return the answer to a call, still to be booked. Raises Refusal."""
    return await ask(routed, self.config.models.retries)

  def promise(self, routed: RoutedCall) -> int:
    """Begin the attempt that the client itself makes; return the decision's number."""
    number = routed.begin(reported=True).number
    self._reported[number] = routed
    return number

  def report(self, number: object, fields: dict) -> RoutedCall:
    """Book the usage that a client reports of its own attempt. Raises Refusal."""
    routed = self._reported.get(number) if type(number) is int else None
    if routed is None:
      raise Refusal(404, "decision_id is of no decision that is still to be reported")
    if routed.upstream.cost(fields)[0] is None:
      problem = "usage must have the prompt_tokens and completion_tokens of the reply"
      raise Refusal(400, problem)
    del self._reported[number]
    routed.book_reply(fields)
    return routed

  def finish(self, session: Session, scored: Scored) -> None:
    """End a session with its score; calls in flight count in full. Raises Refusal."""
    if session.score is not None or session.is_busy or not session.steps:
      problem = "a session is scored once, after a call, when none is in flight"
      raise Refusal(409, problem)
    for number in [*session.open]:
      self._reported.pop(number).end(PRESUMED)
    session.task_id = scored.task or session.task_id
    self.sessions.finish(session, scored.score)

  def describe(self, session: Session) -> dict:
    """Describe a session for people and programs; texts are not in it."""
    names = self.names
    left = session.left
    steps = []
    for step in session.steps:
      shown = dict(model=names[step.model], cost_usd=step.spent_usd)
      steps.append(shown | vars(step.calls[-1].usage))
    return dict(
      id=session.id,
      policy=session.policy,
      task_id=session.task_id,
      score=session.score,
      usd_limit=session.usd_limit,
      call_limit=session.call_limit,
      spent_usd=session.spent_usd,
      large_calls=session.large_calls,
      switch_usd=session.switch_usd,
      left_usd=left.usd,
      left_large_calls=left.calls,
      caches={names[model]: vars(cache) for model, cache in session.caches.items()},
      steps=steps,
      in_flight=len(session.open),
    )


def write_headers(values: Mapping[str, str | float | None]) -> dict[str, str]:
  """Write the headers of values; None is left out."""
  headers = {}
  for name, value in drop_nulls(values).items():
    text = f"{value:.9f}" if isinstance(value, float) else str(value)
    headers[f"x-baar-{name}"] = text
  return headers
