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

from baar_jax.config import Config
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


@dataclasses.dataclass(eq=False)
class Turn:
  """A call of a client, from its arrival to its step, and the books of its attempts."""

  exchange: "Exchange"
  session: Session
  body: dict
  text: Conversation
  step: Step | None = None  # once it is decided
  p_A: Sequence[float] = ()  # the router's probability of each model, if it has some
  bounds_usd: Sequence[float] = ()  # each model's worst case
  held: Attempt | None = None  # the last attempt
  failed: set[int] = dataclasses.field(default_factory=set)  # models
  start_s: float = dataclasses.field(default_factory=time.monotonic)
  usd: float | None = None  # of all attempts, once the turn has ended

  @property
  def upstream(self) -> Upstream:
    """Return the model that the step names."""
    return self.exchange.upstreams[self.step.model]

  @property
  def most_usd(self) -> float:
    """Return the worst case of an attempt."""
    return self.bounds_usd[self.step.model]

  @property
  def has_others(self) -> bool:
    """Tell whether the nearest models take over from one that failed."""
    return self.exchange.config.serve.fallback and self.session.rule == ROUTER

  @property
  def large_p(self) -> float:
    """Return the probability of a model dearer than SMALL; of a rule 0 or 1."""
    return 1 - self.p_A[SMALL] if self.p_A else float(self.step.model != SMALL)

  @property
  def headers(self) -> dict[str, str]:
    """List what every answer says; the dollars of a stream are in its last chunk."""
    session = self.session
    values = {
      "session-id": quote(session.id, safe=" "),
      "session-usd": session.spent_usd,
      "left-usd": session.left.usd,
      "left-large-calls": session.left.calls,
    }
    if self.step:
      values["selected-model"] = self.upstream.name
      values["cost-usd"] = self.usd
      values["p-large"] = self.large_p
    headers = {}
    for name, value in drop_nulls(values).items():
      text = f"{value:.9f}" if isinstance(value, float) else str(value)
      headers[f"x-baar-{name}"] = text
    return headers

  def begin(self) -> None:
    """Take an attempt from all budgets."""
    self.held = self.exchange.sessions.begin(self.session, self.step, self.most_usd)

  def end(self, kind: str, call: Call | None = None) -> None:
    """Close the attempt; `call` is of one with an answer."""
    self.exchange.sessions.end(self.held, kind, call)

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
    return await self.upstream.attempt(self.body)

  def settle(self, outcome: dict | Stream | Outcome) -> dict | Stream | None:
    """Book a failed attempt; `Exchange.settle` books an answer when its usage comes."""
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
    allowed = await self.exchange.find_room(self)
    model = self.step.model
    is_new = is_last or model not in allowed
    if is_new:
      self.failed.add(model)
      self.step.logp = None
      others = {*allowed} - self.failed if self.has_others else ()
      model = min(others, key=lambda other: abs(other - self.step.model), default=None)
    if model is None or self.session.score is not None:
      raise self.refuse(outcome)
    self.step.model = model
    return is_new


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
    # By number: the turns in flight until clients report their usage.
    self.reported: dict[int, Turn] = {}
    self.deciders: dict[str, Decider] = {}
    named = {}
    for rule, policy in policies.items():
      self.deciders[rule] = Decider(policy, config.serve.max_sessions)
      weights = policy.cost_weights
      named[f"{NAME}:{rule}"] = Served(rule, min(weights, default=None))
      for weight in weights:
        named[f"{NAME}:price={weight:g}"] = Served(rule, weight)
    self.served = {NAME: named[f"{NAME}:{config.serve.policy}"]} | named

  def receive(self, headers: Mapping[str, str], body: dict) -> Turn:
    """Read a call; open its session, and complete the session's last step.

    Raises:
      Refusal: it is no call, or does not fit its session.
    """
    asked = Asked.read_call(headers, body)
    text = read_messages(body.get("messages"), body.get("tools"))
    session = self.open(asked, text)
    self.complete(session, text, asked.score)
    return Turn(self, session, body, text)

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
      session = Session(id_, *served, key, task_id, description, cap.calls, cap.usd)
      self.sessions.add(session)
    is_other = session.score is not None or served != (session.rule, session.price)
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

  async def decide(self, turn: Turn) -> None:
    """Choose the model that acts next; it fits until the event loop goes on.

    Raises:
      Refusal: no model fits.
    """
    session = turn.session
    async with session.deciding:
      allowed = await self.find_room(turn)
      decision = Decision(allowed[0])
      if len(allowed) > 1:
        live = self._make_live(session, turn.text)
        decision = await self.deciders[session.rule].decide(live)
        allowed = await self.find_room(turn)  # others have called meanwhile
      if session.score is not None:
        raise Refusal(409, f"session {session.id} is scored")
      model = self._pick(turn, decision.model, allowed)
    turn.p_A = decision.p_A
    turn.step = Step(
      turn.text.observations[-1] * self.config.serve.record_text,
      model,
      action="",
      logp=decision.logp if model == decision.model else None,
      router_cost_usd=decision.cost_usd,
      router_latency_s=decision.latency_s,
    )

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

  def _pick(self, turn: Turn, model: int, allowed: list[int]) -> int:
    """Pick the decided model, or the next cheaper one, or one whose cache is warm."""
    cheaper = [other for other in allowed if other <= model]
    picked = cheaper[-1] if cheaper else allowed[0]
    if not self.config.serve.route_by_cache or turn.session.rule != ROUTER:
      return picked
    usd_A = self.expect_usd(turn)
    most_usd = usd_A[picked]
    for other in allowed:
      if other > picked and other in turn.session.caches and usd_A[other] <= most_usd:
        picked = other
    return picked

  def expect_usd(self, turn: Turn) -> list[float]:
    """Compute each model's expected cost, with a reply of the session's mean length."""
    session = turn.session
    tokens = [step.calls[-1].usage.completion_tokens for step in session.steps]
    reply = sum(tokens) / max(1, len(tokens))
    ttl_s = self.config.serve.cache_ttl_s
    caches = session.caches
    return [u.expected_usd(turn.body, caches, ttl_s, reply) for u in self.upstreams]

  async def find_room(self, turn: Turn) -> list[int]:
    """Find the models whose call fits, ascending; spend the reserve last.

    Raises:
      Refusal: none fits, and no attempt in flight can give way.
    """
    session = turn.session
    reserve_usd = find_least(self.config.serve.reserve_usd, session.usd_limit)
    while True:
      session.changed.clear()
      caches = session.caches
      turn.bounds_usd = [u.most_usd(turn.body, caches) for u in self.upstreams]
      if session.dollars.allows(reserve_usd):
        fit = functools.partial(self.sessions.fit, session, turn.bounds_usd)
        allowed = fit(reserve_usd) or fit(0.0)
        if allowed:
          return allowed
      if not self._is_busy(session):
        break
      await session.changed.wait()
    spent_usd = session.spent_usd
    needed_usd = min(turn.bounds_usd)
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

  async def forward(self, turn: Turn) -> dict | Stream:
    """Return the answer to a turn, still to be settled. Raises Refusal."""
    return await ask(turn, self.config.models.retries)

  def settle(self, turn: Turn, fields: dict, whole: bool = True) -> None:
    """Book the reply of a turn, once, as its step.

    Args:
      fields: of its answer or last chunk. Without usage in them it counts at its worst
        case.
      whole: whether the client has all of it.
    """
    if turn.usd is not None:
      return
    session = turn.session
    model = turn.step.model
    usd, usage = turn.upstream.cost(fields)
    latency_s = time.monotonic() - turn.start_s
    call = Call(model, usage, turn.most_usd, latency_s)
    outcome = PRESUMED
    if usd is not None:
      outcome = REPLY
      call = dataclasses.replace(call, cost_usd=usd)
      session.switch_usd += self._switch_usd(session, model, usage)
      session.caches[model] = Cache.read(turn.body, usage.prompt_tokens)
    elif not whole:
      call = dataclasses.replace(call, kind=PRESUMED)
    turn.usd = call.cost_usd + turn.step.spent_usd
    session.steps.append(turn.step)
    session.places.append(len(turn.text.actions))
    turn.end(outcome, call)

  def _switch_usd(self, session: Session, model: int, usage: Usage) -> float:
    """Compute the dollars for reading anew what another model has just read."""
    if not session.steps or session.steps[-1].model == model:
      return 0.0
    last = session.steps[-1].calls[-1].usage
    prompt = usage.prompt_tokens
    seen = min(last.prompt_tokens + last.completion_tokens, prompt)
    price = self.upstreams[model].price
    warm_usd = price.cost_usd(Usage(prompt, max(seen, usage.cached_tokens), 0))
    return max(0.0, price.cost_usd(Usage(prompt, usage.cached_tokens, 0)) - warm_usd)

  def finish(self, session: Session, scored: Scored) -> None:
    """End a session with its score; calls in flight count in full. Raises Refusal."""
    if session.score is not None or self._is_busy(session) or not session.steps:
      problem = "a session is scored once, after a call, when none is in flight"
      raise Refusal(409, problem)
    for number in [*session.open]:
      self.reported.pop(number).end(PRESUMED)
    session.task_id = scored.task or session.task_id
    self.sessions.finish(session, scored.score)

  def _is_busy(self, session: Session) -> bool:
    """Tell whether an attempt is in flight that ends without a report."""
    return not session.open.keys() <= self.reported.keys()

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
