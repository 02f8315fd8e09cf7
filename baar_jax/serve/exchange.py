"""The calls of clients: their sessions, decisions, reports and scores."""

import dataclasses
import random
from collections.abc import Mapping
from typing import NamedTuple

from baar_jax.config import Config
from baar_jax.episode import SMALL, Step, Task
from baar_jax.llms.client import Stream, ask
from baar_jax.llms.wire import PRESUMED
from baar_jax.rollout.specs import Cap, Decision, Job, Live
from baar_jax.rollout.turn import Policy
from baar_jax.router.view import list_left
from baar_jax.serve.decider import Decider
from baar_jax.serve.request import (
  ROUTER,
  Asked,
  Conversation,
  Refusal,
  Scored,
  read_messages,
)
from baar_jax.serve.routed import Budgets, ClientCall, RoutedCall
from baar_jax.serve.scored import ScoredSession, add_sessions
from baar_jax.serve.sessions import Session, Sessions
from baar_jax.serve.upstream import Upstream
from baar_jax.store import Store
from baar_jax.train.jobs import cap_spec

NAME = "baar"  # of the models that a client can ask for


class Served(NamedTuple):
  """What a client's name for a model stands for."""

  rule: str
  cost_weight: float | None


class Exchange:
  """Decides, forwards and accounts for the calls of all sessions, in one event loop."""

  def __init__(
    self,
    config: Config,
    store: Store,
    sessions: Sessions,
    policies: Mapping[str, Policy],
  ):
    """Take the policies by rule. Raises ValueError for a model without price or key."""
    self.config = config
    self.sessions = sessions
    self._store = store
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

  def compile(self) -> None:
    """Compile the policies, so that no client waits for it."""
    for decider in self.deciders.values():
      decider.policy.compile()

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
    if asked.model_name not in self.served:
      names = ", ".join(self.served)
      raise Refusal(404, f"model must be one of {names}", code="model_not_found")
    served = self.served[asked.model_name]
    cap = asked.make_cap(Cap(c.max_large_calls, c.max_usd))
    id_ = asked.id or self.sessions.choose_id(text.fingerprint, is_new=not text.actions)
    session = self.sessions.find(id_)
    if session is None:
      session = Session(
        id_,
        served.rule,
        served.cost_weight,
        policy=self._name_policy(served, cap),
        task_id=asked.task_id or text.fingerprint,
        description=text.task * c.record_text,
        call_limit=cap.calls,
        usd_limit=cap.usd,
      )
      self.sessions.add(session)
      return session
    is_other = session.score is not None
    is_other |= served != Served(session.rule, session.price)
    # A call that names no cap goes on under the session's.
    if asked.large_calls is not None:
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
    if routed.upstream.read_bill(fields).usd is None:
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
    # It is stored once, whatever is killed.
    mark = f"session {session.id}"
    episode = session.make_episode(scored.score)
    ended = ScoredSession(mark, episode, session.description)
    add_sessions(self._store, self.config, [ended])
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
