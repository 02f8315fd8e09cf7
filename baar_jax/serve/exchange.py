"""One call of a client: its session, the decision under its caps, the attempts, and its step."""

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from baar_jax.config import Config
from baar_jax.episode import SMALL, Call, Step, Task, Usage
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY
from baar_jax.llms.endpoints import backoff_s
from baar_jax.rollout.budget import CallBudget, DollarBudget
from baar_jax.rollout.policies import ALWAYS_LARGE, FIRST_LARGE, Decision, Job, Live
from baar_jax.serve.asked import Refusal, find_least, read_asked
from baar_jax.serve.batching import Decider
from baar_jax.serve.messages import Conversation
from baar_jax.serve.sessions import Cache, Session, Sessions, Turn
from baar_jax.serve.upstream import Answer, Upstream, digest

NAME = "baar"  # of the models that a client can ask for
CONFLICT, NOT_FOUND = "conflict", "not_found"
DESCRIBED = "id policy task_id score usd_limit call_limit spent_usd large_calls switch_usd"
DESCRIBED += " left_usd left_large_calls"
UNCUT = ("router", "sample", "small")  # rules that decide by what is left, or never for LARGE


@dataclasses.dataclass
class Exchange:
  """Decides, forwards and accounts for the calls of all sessions; used by one event loop."""

  config: Config
  sessions: Sessions
  upstreams: Sequence[Upstream]
  deciders: Mapping[str, Decider]  # by rule

  def __post_init__(self):
    prices = self.deciders["router"].policy.prices if "router" in self.deciders else ()
    words = {rule: (rule, None) for rule in self.deciders}
    words |= {"router": ("router", min(prices))} if prices else {}
    words |= {f"price={price:g}": ("router", price) for price in prices}
    # The rule and the price of a dollar that a client's name for a model stands for.
    self.policies = {NAME: words[self.config.serve.policy]}
    self.policies |= {f"{NAME}:{word}": policy for word, policy in words.items()}

  def find_session(self, headers: Mapping[str, str], body: dict, text: Conversation) -> Session:
    """The session of a call, which may be new. Raises Refusal."""
    c, asked = self.config.serve, read_asked(headers, body, self.policies)
    pairs = (asked.call_limit, c.max_large_calls), (asked.usd_limit, c.max_usd)
    limits, id_ = [find_least(*pair) for pair in pairs], asked.id or text.fingerprint
    session, number = self.sessions.find(id_), 1
    while session and session.score is not None and asked.id is None:
      number += 1  # the next trial of a client that names none
      session = self.sessions.find(f"{id_}-{number}")
    if session is None:
      id_ += f"-{number}" if number > 1 else ""
      policy, task_id = self.deciders[asked.rule].policy.name, asked.task_id or text.fingerprint
      session = Session(id_, asked.rule, policy, task_id, text.task * c.record_text, *limits)
      session.named, session.price = asked.id is not None, asked.price
      if asked.rule == "router":
        session.policy = name_capped(session)
      self.sessions.add(session)
    if session.score is not None:
      raise Refusal(409, f"session {id_} is scored: take another x-session-id", CONFLICT)
    begun = session.call_limit, session.usd_limit
    same = [*begun] == limits or all(pair[0] in (None, cap) for pair, cap in zip(pairs, begun))
    if (asked.rule, asked.price) != (session.rule, session.price) or not same:
      problem = f"session {id_} was begun as {NAME}:{session.rule} or with another price or cap"
      raise Refusal(409, f"{problem}: take another x-session-id", CONFLICT)
    if asked.score is not None and session.places and session.places[-1] == len(text.actions) - 1:
      session.steps[-1].score = asked.score  # what the values learn from: see `train.values`
    return session

  async def decide(self, session: Session, body: dict, text: Conversation) -> Turn:
    """The model that acts next, with its worst case held. Raises Refusal where none fits."""
    recorded, place = self.config.serve.record_text, len(text.actions)
    async with session.deciding:
      while True:
        bounds, allowed = await self._wait_for_room(session, body)
        decision = Decision(allowed[0])
        if len(allowed) > 1:
          decision = await self._ask(session, text)
        if session.score is not None:
          raise Refusal(409, f"session {session.id} is scored", CONFLICT)
        model = max((m for m in allowed if m <= decision.model), default=allowed[0])
        if self.config.serve.route_by_cache and session.rule == "router":
          usd_A = self.expect_usd(session, body)
          dearer = [m for m in allowed if m > model and m in session.caches]
          model = max((m for m in dearer if usd_A[m] <= usd_A[model]), default=model)
        if self.sessions.fits(session, model, bounds[model]):  # still
          break
      if len(allowed) < len(bounds) and session.rule not in UNCUT:
        session.policy = name_capped(session)  # its episode is none without a cap
      if recorded and session.places and session.places[-1] == place - 1:
        session.steps[-1].action = text.actions[-1]
      logp = decision.logp if model == decision.model else None
      step = Step(text.observations[-1] if recorded else "", model, "", [], logp)
      step.router_cost_usd, step.router_latency_s = decision.cost_usd, decision.latency_s
      large_p = 1 - decision.p_A[SMALL] if decision.p_A else float(model != SMALL)
      turn = Turn(session, body, place, step, large_p, bounds[model], decision.p_A)
      self.sessions.begin(turn)
    return turn

  def expect_usd(self, session: Session, body: dict) -> list[float]:
    """What a call of each model is expected to cost, with a reply of the session's mean length."""
    ttl_s, steps = self.config.serve.cache_ttl_s, session.steps
    reply = sum(s.calls[-1].usage.completion_tokens for s in steps) / max(1, len(steps))
    models = enumerate(self.upstreams)
    return [u.expected_usd(body, session.caches.get(m), ttl_s, reply) for m, u in models]

  async def _wait_for_room(self, session: Session, body: dict) -> tuple[list[float], list[int]]:
    """What a call of each model can cost, and those that fit; attempts in flight may give way."""
    while True:
      bounds, allowed = self._find_room(session, body, self.config.serve.reserve_usd)
      session.changed.clear()
      if not allowed and not session.busy and not session.last_call:
        bounds, allowed = self._find_room(session, body)
        session.last_call = bool(allowed)
      if allowed:
        return bounds, allowed
      if session.busy:
        await session.changed.wait()
      else:
        spent, needed, cap = session.dollars.settled_usd, min(bounds), session.usd_limit
        of = "under --config.max_usd" if session.dollars.allows(needed) else f"of ${cap:g}"
        text = f"${spent:.6f} {of} is spent, and a call may cost ${needed:.6f}: hand in the work"
        fields = {"spent_usd": spent, "cap_usd": cap, "needed_usd": needed}
        raise Refusal(429, text, "insufficient_quota", "budget_exhausted", **fields)

  def _find_room(self, session: Session, body: dict, keep_usd=0.0) -> tuple[list[float], list[int]]:
    """What a call of each model can cost, and those that fit now with `keep_usd` left of a cap."""
    keep_usd = 0.0 if session.usd_limit is None else keep_usd
    models = enumerate(self.upstreams)
    bounds = [upstream.bound_usd(body, session.caches.get(m)) for m, upstream in models]
    fits = [self.sessions.fits(session, m, usd + keep_usd) for m, usd in enumerate(bounds)]
    return bounds, [m for m, fit in enumerate(fits) if fit]

  async def _ask(self, session: Session, text: Conversation) -> Decision:
    """What the session's policy decides from its text and from what is left of its caps."""
    if session.live is None:
      task = Task(session.task_id, "test", text.task, self.config.env.max_steps)
      job = Job(task, session.seed)
      session.live = Live(job, None, agents=self.upstreams, price=session.price)
    live, steps = session.live, session.acted(len(text.actions))
    live.steps = [
      dataclasses.replace(step, observation=observation, action=action)
      for step, observation, action in zip(steps, text.observations, text.actions)
    ]
    live.observation = text.observations[-1]
    # The view and the heads take what the text's steps have spent off these limits.
    if session.call_limit is not None:
      made = sum(step.model != SMALL for step in live.steps)
      live.call_budget = CallBudget(session.left_large_calls + made)
    if session.usd_limit is not None:
      spent_usd = sum(step.spent_usd for step in live.steps)
      live.dollar_budget = DollarBudget(session.left_usd + spent_usd)
    return await self.deciders[session.rule].decide(live)

  async def forward(self, turn: Turn) -> Answer:
    """The reply of the model that acts, still to be settled. Raises Refusal with its error.

    With `serve.fallback` the models of the nearest ranks take over from one whose retries failed.
    """
    session, failed, c = turn.session, set(), self.config.serve
    while (answer := await self._attempt_often(turn)).kind != REPLY:
      failed.add(first := turn.step.model)
      bounds, allowed = self._find_room(session, turn.body, c.reserve_usd)
      others = {*allowed} - failed if c.fallback and session.rule == "router" else ()
      if not answer.retry or not others or session.score is not None:
        raise answer.refusal
      turn.step.model = min(others, key=lambda model: abs(model - first))
      turn.step.logp, turn.most_usd, turn.number = None, bounds[turn.step.model], 0
      self.sessions.begin(turn)
    return answer

  async def _attempt_often(self, turn: Turn) -> Answer:
    """A reply of the turn's model, or what the last attempt came to; then nothing is held."""
    session, model = turn.session, turn.step.model
    retries = self.upstreams[model].config.retries
    for attempt in range(retries + 1):
      try:
        answer = await self.upstreams[model].attempt(turn.body)
      except BaseException:
        self.sessions.end(turn, PRESUMED, turn.lost())
        raise
      if answer.kind == REPLY:
        return answer
      lost = turn.lost() if answer.kind == PRESUMED else None
      if last := attempt == retries or not answer.retry:
        self._give_up(turn, lost)
      self.sessions.end(turn, answer.kind, lost)
      if last:
        break
      await asyncio.sleep(answer.wait_s + backoff_s(attempt))
      if session.score is not None or not self.sessions.fits(session, SMALL, turn.most_usd):
        self._give_up(turn, None)
        break
      self.sessions.begin(turn)
    return answer

  def cancel(self, turn: Turn) -> None:
    """Gives back all of a turn whose call was not made."""
    self._give_up(turn, None)
    self.sessions.end(turn, FAILED, None)

  def _give_up(self, turn: Turn, lost: Call | None) -> None:
    """Gives back the large call of a model without attempts that may be billed."""
    session, model = turn.session, turn.step.model
    if lost is None and all(call.model != model for call in turn.step.calls):
      session.calls.settle(model, made=False)
      session.large_calls -= model != SMALL
      session.last_call = False

  def settle(self, turn: Turn, usd: float | None, usage: Usage, whole: bool) -> None:
    """Books the reply of a turn as its step; without `usd` at the most that it can have cost.

    `whole` is whether the client has all of it.
    """
    session, model, known = turn.session, turn.step.model, usd is not None
    cost_usd, latency_s = usd if known else turn.most_usd, time.monotonic() - turn.start_s
    kind = "act" if whole or known else "presumed"
    turn.usd = cost_usd + sum(call.cost_usd for call in turn.step.calls)
    if known:
      session.switch_usd += self._switch_usd(session, model, usage)
      count = len(turn.body["messages"])
      cache = Cache(count, digest(turn.body, count), usage.prompt_tokens, time.time())
      session.caches[model] = cache
    session.steps.append(turn.step)
    session.places.append(turn.place)
    call = Call(model, usage, cost_usd, latency_s, kind=kind)
    self.sessions.end(turn, REPLY if known else PRESUMED, call)

  def _switch_usd(self, session: Session, model: int, usage: Usage) -> float:
    """Dollars for what another model had just read, and this one has not found in its cache."""
    if not session.steps or session.steps[-1].model == model:
      return 0.0
    last, price = session.steps[-1].calls[-1].usage, self.upstreams[model].price
    seen = min(last.prompt_tokens + last.completion_tokens, usage.prompt_tokens)
    warm, paid = (Usage(usage.prompt_tokens, max(n, usage.cached_tokens), 0) for n in (seen, 0))
    return max(0.0, price.cost_usd(paid) - price.cost_usd(warm))

  def headers(self, session: Session, turn: Turn | None = None) -> dict[str, str]:
    """What every answer says; the dollars of a stream are in its last chunk."""
    values = {"session-id": quote(session.id, safe=" "), "session-usd": session.spent_usd}
    values |= {"left-usd": session.left_usd, "left-large-calls": session.left_large_calls}
    values["session-source"] = None if session.named else "fingerprint"
    if turn is not None:
      values |= {"selected-model": self.upstreams[turn.step.model].name, "p-large": turn.large_p}
      values["cost-usd"] = turn.usd
    for name in [name for name, value in values.items() if isinstance(value, float)]:
      values[name] = f"{values[name]:.9f}"
    return {f"x-baar-{name}": str(value) for name, value in values.items() if value is not None}

  def describe(self, session: Session) -> dict:
    """A session for people and programs; texts are not in it."""
    names = [u.name for u in self.upstreams]
    shown = {name: getattr(session, name) for name in DESCRIBED.split()}
    shown["caches"] = {names[m]: dataclasses.asdict(x) for m, x in session.caches.items()}
    shown["steps"] = [
      {"model": names[step.model], "cost_usd": step.spent_usd}
      | dataclasses.asdict(step.calls[-1].usage)
      for step in session.steps
    ]
    return shown | {"in_flight": len(session.open)}

  async def close(self) -> None:
    for decider in self.deciders.values():
      decider.close()
    for upstream in self.upstreams:
      await upstream.client.aclose()


def name_capped(session: Session) -> str:
  """The name of a session's policy, at its price under its caps, as of `policies.entries`."""
  base, caps = session.policy, {"price": session.price}
  caps |= {"K": session.call_limit, "usd": session.usd_limit}
  if base == ALWAYS_LARGE and session.call_limit is not None:
    base = FIRST_LARGE
  texts = [f"{k}={v:g}" for k, v in caps.items() if v is not None and f"{k}=" not in base]
  start = f"{base[:-1]}," if base.endswith(")") else f"{base}("
  return f"{start}{','.join(texts)})" if texts else base
