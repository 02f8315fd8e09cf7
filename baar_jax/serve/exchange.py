"""One call of a client: its session, the decision under its caps, the attempts, and its step."""

import asyncio
import dataclasses
import functools
import random
import re
import time
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from baar_jax.config import Config
from baar_jax.episode import SMALL, Call, Step, Task, Usage
from baar_jax.llms.calls import PRESUMED, REPLY
from baar_jax.llms.chat import BACKOFF_S, LONGEST_BACKOFF_S
from baar_jax.rollout.budget import CallBudget, DollarBudget
from baar_jax.rollout.entries import ALWAYS_LARGE, FIRST_LARGE
from baar_jax.rollout.live import Decision, Job, Live
from baar_jax.serve.batching import Decider
from baar_jax.serve.messages import Conversation
from baar_jax.serve.sessions import Cache, Session, Sessions, Turn
from baar_jax.serve.upstream import Answer, Refusal, Upstream, digest

NAME = "baar"  # of the models that a client can ask for
LONGEST_ID, MOST_CAP = 256, 10**9
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

  @property
  def names(self) -> list[str]:
    """The model names that a client can ask for; any other K works too."""
    caps = (f"K={K}" for K in self.config.evaluate.call_budgets)
    return [NAME, *(f"{NAME}:{word}" for word in (*self.deciders, *self.prices, *caps))]

  @functools.cached_property
  def prices(self) -> dict[str, float]:
    """The prices of a dollar that a client can name, where the router is told one."""
    router = self.deciders.get("router")
    return {f"price={price:g}": price for price in (router.policy.prices if router else ())}

  def find_session(self, headers: Mapping[str, str], body: dict, text: Conversation) -> Session:
    """The session of a call, which may be new. Raises Refusal."""
    c, (rule, calls, price) = self.config.serve, self._read_name(body.get("model"))
    calls.append(read_number(headers, "x-baar-max-large-calls", int))
    asked = find_least(calls), read_number(headers, "x-baar-max-usd", float)
    limits = [find_least(caps) for caps in zip(asked, (c.max_large_calls, c.max_usd))]
    metadata = body["metadata"] if isinstance(body.get("metadata"), dict) else {}
    given = [body.get("session_id"), metadata.get("session_id"), headers.get("x-session-id")]
    id_ = next((check_id(x, "the session id") for x in given if x is not None), text.fingerprint)
    session, number = self.sessions.find(id_), 1
    while session and session.score is not None and id_ == text.fingerprint:
      number += 1  # the next trial of a client that names none
      session = self.sessions.find(f"{id_}-{number}")
    if session is None:
      id_ += f"-{number}" if number > 1 else ""
      task_id = check_id(headers.get("x-baar-task", text.fingerprint), "x-baar-task")
      description = text.task if c.record_text else ""
      session = Session(id_, rule, self.deciders[rule].policy.name, task_id, description, *limits)
      if rule == "router":
        session.price = min(self.prices.values(), default=None) if price is None else price
        session.policy = name_capped(session)
      self.sessions.add(session)
    if session.score is not None:
      raise Refusal(409, f"session {id_} is scored: take another x-session-id", CONFLICT)
    begun = session.call_limit, session.usd_limit
    same = all(cap in (None, limit) for cap, limit in zip(asked, begun)) or [*begun] == limits
    if rule != session.rule or price not in (None, session.price) or not same:
      problem = f"session {id_} was begun as {NAME}:{session.rule} or with another price or cap"
      raise Refusal(409, f"{problem}: take another x-session-id", CONFLICT)
    score = read_number(headers, "x-baar-score", float, 1)
    if score is not None and session.places and session.places[-1] == len(text.actions) - 1:
      session.steps[-1].score = score  # what the values learn from: see `train.values`
    return session

  def _read_name(self, name: object) -> tuple[str, list[int | None], float | None]:
    """The rule, the caps on large calls and the price of a dollar that a model name stands for."""
    rule, caps, price = self.config.serve.policy, [], None
    first, *words = name.split(":") if isinstance(name, str) else [""]
    for word in words:
      if cap := re.fullmatch(r"K=(\d{1,9})", word):
        caps.append(int(cap[1]))
      elif word in self.prices:
        price = self.prices[word]
      else:
        rule = word
    priced = price is None or rule == "router"
    if first != NAME or rule not in self.deciders or not priced:
      raise Refusal(404, f"model must be one of {', '.join(self.names)}", code="model_not_found")
    return rule, caps, price

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

  async def _wait_for_room(self, session: Session, body: dict) -> tuple[list[float], list[int]]:
    """What a call of each model can cost, and those that fit; attempts in flight may give way."""
    while True:
      caches = map(session.caches.get, range(len(self.upstreams)))
      bounds = [u.bound_usd(body, cache) for u, cache in zip(self.upstreams, caches)]
      keep_usd = 0.0 if session.usd_limit is None else self.config.serve.reserve_usd
      costs = list(enumerate(bounds))
      allowed = [m for m, usd in costs if self.sessions.fits(session, m, usd + keep_usd)]
      session.changed.clear()
      if not allowed and not session.busy and not session.last_call:
        allowed = [m for m, usd in costs if self.sessions.fits(session, m, usd)]
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
    """The model's reply, still to be settled. Raises Refusal with an upstream's error."""
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
      backoff_s = min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (0.5 + random.random())
      await asyncio.sleep(answer.wait_s + backoff_s)
      if not self.sessions.fits(session, SMALL, turn.most_usd):
        self._give_up(turn, None)
        break
      self.sessions.begin(turn)
    raise answer.refusal

  def _give_up(self, turn: Turn, lost: Call | None) -> None:
    """Gives back the large call of a turn without attempts that may be billed."""
    if not turn.step.calls and lost is None:
      turn.session.calls.settle(turn.step.model, made=False)
      turn.session.large_calls -= turn.step.model != SMALL

  def settle(self, turn: Turn, usd: float | None, usage: Usage, whole: bool) -> None:
    """Books the reply of a turn as its step; without `usd` at the most that it can have cost.

    `whole` is whether the client has all of it. A turn that is settled stays as it is.
    """
    if turn.usd is not None:
      return
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
  """The name of a session's policy, at its price under its caps, as `rollout.entries` writes it."""
  base, caps = session.policy, {"price": session.price}
  caps |= {"K": session.call_limit, "usd": session.usd_limit}
  if base == ALWAYS_LARGE and session.call_limit is not None:
    base = FIRST_LARGE
  texts = [f"{k}={v:g}" for k, v in caps.items() if v is not None and f"{k}=" not in base]
  start = f"{base[:-1]}," if base.endswith(")") else f"{base}("
  return f"{start}{','.join(texts)})" if texts else base


def check_id(value: object, name: str) -> str:
  fine = isinstance(value, str) and value.isprintable() and value.strip()
  if not fine or len(value) > LONGEST_ID:
    raise Refusal(400, f"{name} must be a text of 1 to {LONGEST_ID} characters")
  return value


def find_least(caps: Sequence[float | None]) -> float | None:
  """The least of these caps; None, which is no cap, where there is none."""
  return min((cap for cap in caps if cap is not None), default=None)


def read_number(
  headers: Mapping[str, str], name: str, number: type, most: int = MOST_CAP
) -> float | int | None:
  """A number from a header; None without one."""
  if name not in headers:
    return None
  try:
    value = number(headers[name])
  except ValueError:
    value = -1
  if not 0 <= value <= most:
    text = f"{name} must be a number from 0 to {most}{', a whole one' * (number is int)}"
    raise Refusal(400, text)
  return value
