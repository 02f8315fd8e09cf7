"""One call of a client: its session, the decision under its caps, the attempts, and its step."""

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from baar_jax.config import REFERENCE_SEEDS, Config
from baar_jax.episode import SMALL, Call, Step, Task, Usage
from baar_jax.llms.client import Stream, ask
from baar_jax.llms.wire import PRESUMED, REPLY, Outcome
from baar_jax.rollout.policies import ALWAYS_LARGE, FIRST_LARGE, Decision, Job, Policy, policy_name
from baar_jax.serve import request
from baar_jax.serve.decider import Decider, make_live
from baar_jax.serve.request import Asked, Cache, Conversation, Refusal, Scored, read_messages
from baar_jax.serve.sessions import Session, Sessions, Turn
from baar_jax.serve.upstream import Upstream

NAME = "baar"  # of the models that a client can ask for
EXHAUSTED = "budget_exhausted"  # the code of the error where no call fits
DESCRIBED = "id policy task_id score usd_limit call_limit spent_usd large_calls switch_usd"
DESCRIBED += " left_usd left_large_calls"


@dataclasses.dataclass
class TurnBooks:
  """The books of a client's call: its attempts in its session.

  With `serve.fallback` the models of the nearest ranks take over from one that failed.
  """

  exchange: "Exchange"
  turn: Turn
  has_others: bool
  failed: set[int] = dataclasses.field(default_factory=set)

  @property
  def upstream(self) -> Upstream:
    return self.exchange.upstreams[self.turn.step.model]

  @contextlib.contextmanager
  def reserve(self) -> Iterator[None]:
    sessions = self.exchange.sessions
    sessions.begin(self.turn)
    try:
      yield
    except BaseException:  # it may be billed, and its session outlives this call
      sessions.end(self.turn, PRESUMED)
      raise

  async def attempt(self) -> dict | Stream | Outcome:
    return await self.upstream.attempt(self.turn.body)

  def settle(self, outcome: dict | Stream | Outcome) -> dict | Stream | None:
    """Books a failed attempt; `Exchange.settle` books an answer, once its usage has come."""
    if not isinstance(outcome, Outcome):
      return outcome
    self.exchange.sessions.end(self.turn, outcome.kind)
    return None

  def refuse(self, outcome: Outcome, attempts: int) -> Refusal:
    return self.upstream.refuse(outcome)

  async def prepare(self, outcome: Outcome, wait_s: float, is_last: bool) -> bool:
    """Waits, and chooses a model that fits. Raises Refusal if there is none."""
    turn = self.turn
    step = turn.step
    await asyncio.sleep(wait_s)
    bounds, allowed = await self.exchange.find_room(turn.session, turn.body)
    model = step.model
    is_new = is_last or model not in allowed
    if is_new:
      self.failed.add(model)
      step.logp = None
      others = {*allowed} - self.failed if self.has_others else ()
      model = min(others, key=lambda other: abs(other - step.model), default=None)
    if model is None or turn.session.score is not None:
      raise self.upstream.refuse(outcome)
    step.model = model
    turn.most_usd = bounds[model]
    return is_new


class Exchange:
  """Decides, forwards and accounts for the calls of all sessions; used by one event loop."""

  def __init__(self, config: Config, sessions: Sessions, policies: Mapping[str, Policy]):
    """Takes the policies by rule. Raises ValueError where a model lacks its price or key."""
    self.config, self.sessions = config, sessions
    self.upstreams = [Upstream(config.models, place) for place in range(len(config.models.names))]
    rows = config.serve.max_sessions
    self.deciders = {rule: Decider(policy, rows) for rule, policy in policies.items()}
    self.reported: dict[int, Turn] = {}  # by number, in flight until clients report their usage
    words = {rule: (rule, min(p.prices, default=None)) for rule, p in policies.items()}
    words |= {f"price={usd:g}": (rule, usd) for rule, p in policies.items() for usd in p.prices}
    # The rule and the price of a dollar that a client's name for a model stands for.
    self.policies = {NAME: words[config.serve.policy]}
    self.policies |= {f"{NAME}:{word}": policy for word, policy in words.items()}

  def open(self, headers: Mapping[str, str], body: dict) -> tuple[Session, Conversation]:
    """The session of a call, which may be new, and its text. Raises Refusal."""
    c, asked = self.config.serve, Asked.read_call(headers, body)
    text = read_messages(body.get("messages"), body.get("tools"))
    if (policy := self.policies.get(asked.model)) is None:
      names = ", ".join(self.policies)
      raise Refusal(404, f"model must be one of {names}", code="model_not_found")
    pairs = (asked.call_limit, c.max_large_calls), (asked.usd_limit, c.max_usd)
    limits = [request.find_least(*pair) for pair in pairs]
    id_ = asked.id or self.sessions.name(text.fingerprint, is_new=not text.actions)
    session = self.sessions.find(id_)
    if session is None:
      rule, price = policy
      name = self.deciders[rule].policy.name
      if rule != "sample":  # whose name tells the update that learns from it
        name = name_policy(name, price, *limits)
      task_id, description = asked.task_id or text.fingerprint, text.task * c.record_text
      session = Session(id_, rule, price, name, task_id, description, *limits)
      self.sessions.add(session)
    changes = zip(pairs, limits, (session.call_limit, session.usd_limit))
    same = all(cap is None or limit == begun for (cap, _), limit, begun in changes)
    if session.score is not None or policy != (session.rule, session.price) or not same:
      problem = f"session {id_} is scored, or was begun with another model or cap"
      raise Refusal(409, f"{problem}: take another x-session-id")
    if session.places and session.places[-1] == len(text.actions) - 1:
      step = session.steps[-1]
      step.action = text.actions[-1] if c.record_text else ""
      step.score = asked.score  # what the values learn from: see `train.values`
    return session, text

  async def decide(self, session: Session, body: dict, text: Conversation) -> Turn:
    """Choose the model that acts next. Its worst case fits until the event loop goes on.

    Raises:
      Refusal: no model fits.
    """
    c = self.config.serve
    async with session.deciding:
      _, allowed = await self.find_room(session, body)
      decision = Decision(allowed[0])
      if len(allowed) > 1:
        decision = await self._ask(session, text)
      bounds, allowed = await self.find_room(session, body)  # others have called meanwhile
      if session.score is not None:
        raise Refusal(409, f"session {session.id} is scored")
      model = max((m for m in allowed if m <= decision.model), default=allowed[0])
      if c.route_by_cache and session.rule == "router":
        usd_A = self.expect_usd(session, body)
        dearer = [m for m in allowed if m > model and m in session.caches]
        model = max((m for m in dearer if usd_A[m] <= usd_A[model]), default=model)
      step = Step(text.observations[-1] if c.record_text else "", model, "")
      step.logp = decision.logp if model == decision.model else None
      step.router_cost_usd, step.router_latency_s = decision.cost_usd, decision.latency_s
    return Turn(session, body, len(text.actions), step, decision.p_A, bounds[model])

  def expect_usd(self, session: Session, body: dict) -> list[float]:
    """What a call of each model is expected to cost, with a reply of the session's mean length."""
    ttl_s, steps = self.config.serve.cache_ttl_s, session.steps
    reply = sum(s.calls[-1].usage.completion_tokens for s in steps) / max(1, len(steps))
    models = enumerate(self.upstreams)
    return [u.expected_usd(body, session.caches.get(m), ttl_s, reply) for m, u in models]

  async def find_room(self, session: Session, body: dict) -> tuple[list[float], list[int]]:
    """Return each model's worst case and the models that fit; spend the reserve last.

    Raises:
      Refusal: none fits, and no attempt in flight can give way.
    """
    reserve_usd = request.find_least(self.config.serve.reserve_usd, session.usd_limit)
    models = range(len(self.upstreams))
    while True:
      session.changed.clear()
      bounds = [self.upstreams[m].most_usd(body, session.caches.get(m)) for m in models]
      for keep_usd in (reserve_usd, 0.0) if session.dollars.allows(reserve_usd) else ():
        if fit := [m for m in models if self.sessions.fits(session, m, bounds[m], keep_usd)]:
          return bounds, fit
      if not self._is_busy(session):
        break
      await session.changed.wait()
    spent, needed = session.spent_usd, min(bounds)
    text = f"${spent:.6f} is spent, and a call may cost ${needed:.6f}, which the session's cap or "
    text += "--config.max_usd has no room for: hand in the work"
    fields = {"spent_usd": spent, "cap_usd": session.usd_limit, "needed_usd": needed}
    raise Refusal(429, text, "insufficient_quota", EXHAUSTED, **fields)

  async def _ask(self, session: Session, text: Conversation) -> Decision:
    """What the session's policy decides from its text and from what is left of its caps."""
    # What is drawn depends on the session, also its stratum.
    task = Task(session.id, "test", text.task, self.config.env.max_steps)
    stratum = random.Random(session.id).randint(1, self.config.references.samples)
    by_place = dict(zip(session.places, session.steps))  # of several calls for one the last counts
    steps = [by_place.get(place, Step("", SMALL, "")) for place in range(len(text.actions))]
    job, left = Job(task, REFERENCE_SEEDS + stratum), (session.left_usd, session.left_large_calls)
    live = make_live(job, text, steps, left, self.config.models.names)
    live.price = session.price
    return await self.deciders[session.rule].decide(live)

  async def forward(self, turn: Turn) -> dict | Stream:
    """Return the answer to a turn, still to be settled. Raises Refusal with its error."""
    has_others = self.config.serve.fallback and turn.session.rule == "router"
    return await ask(TurnBooks(self, turn, has_others), self.config.models.retries)

  def settle(self, turn: Turn, fields: dict, whole: bool = True) -> None:
    """Books the reply of a turn, once, as its step, by the usage in the fields of its answer or
    last chunk, else at the most that it can have cost. `whole` is whether the client has all."""
    if turn.usd is not None:
      return
    session, model = turn.session, turn.step.model
    usd, usage = self.upstreams[model].cost(fields)
    known, latency_s = usd is not None, time.monotonic() - turn.start_s
    cost_usd = usd if known else turn.most_usd
    kind = "act" if whole or known else "presumed"
    turn.usd = cost_usd + sum(call.cost_usd for call in turn.step.calls)
    if known:
      session.switch_usd += self._switch_usd(session, model, usage)
      session.caches[model] = Cache.read(turn.body, usage.prompt_tokens)
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

  def finish(self, session: Session, scored: Scored) -> None:
    """Ends a session with its score. What is not reported counts in full. Raises Refusal."""
    if session.score is not None or self._is_busy(session) or not session.steps:
      raise Refusal(409, "a session is scored once, after a call, when none is in flight")
    for number in [*session.open]:
      self.sessions.end(self.reported.pop(number), PRESUMED)
    session.task_id = scored.task or session.task_id
    self.sessions.finish(session, scored.score)

  def _is_busy(self, session: Session) -> bool:
    """Whether an attempt is in flight that ends without a report."""
    return not session.open.keys() <= self.reported.keys()

  def headers(self, session: Session, turn: Turn | None = None) -> dict[str, str]:
    """What every answer says; the dollars of a stream are in its last chunk."""
    values = {"session-id": quote(session.id, safe=" "), "session-usd": session.spent_usd}
    values |= {"left-usd": session.left_usd, "left-large-calls": session.left_large_calls}
    if turn is not None:
      values |= {"selected-model": self.upstreams[turn.step.model].name, "cost-usd": turn.usd}
      values["p-large"] = turn.large_p
    said = request.drop_nulls(values).items()
    return {f"x-baar-{k}": f"{v:.9f}" if isinstance(v, float) else str(v) for k, v in said}

  def describe(self, session: Session) -> dict:
    """A session for people and programs; texts are not in it."""
    names = [u.name for u in self.upstreams]
    shown = {name: getattr(session, name) for name in DESCRIBED.split()}
    shown["caches"] = {names[m]: vars(cache) for m, cache in session.caches.items()}
    shown["steps"] = [
      {"model": names[step.model], "cost_usd": step.spent_usd} | vars(step.calls[-1].usage)
      for step in session.steps
    ]
    return shown | {"in_flight": len(session.open)}


def name_policy(name: str, price: float | None, call_limit: int | None, usd_limit: float | None):
  """The name of a policy at a price under caps, as `policies.entries` writes it."""
  settings = request.drop_nulls({"price": price, "K": call_limit, "usd": usd_limit})
  if name == ALWAYS_LARGE and settings:  # a rule has no price
    name = FIRST_LARGE
  return policy_name(name, settings).replace(")(", ",")
