"""Choose a model for each call of a client, and book its cost."""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from baar_jax.config import Config
from baar_jax.episode import SMALL, Step, Task
from baar_jax.llms.client import Stream, ask
from baar_jax.llms.prices import CHARS_PER_TOKEN, Outlook, open_billing
from baar_jax.llms.wire import PRESUMED
from baar_jax.rollout.rules import Policy, pick_affordable
from baar_jax.rollout.specs import Cap, Decision, Job, Live, PolicySpec
from baar_jax.router.view import list_remaining_caps
from baar_jax.serve.request import (
  CallFields,
  Conversation,
  Refusal,
  SessionScore,
  bound_tokens,
  read_messages,
)
from baar_jax.serve.routed import Budgets, ClientCall, RoutedCall, Upstream
from baar_jax.serve.sessions import ScoredSession, Session, Sessions, add_sessions
from baar_jax.store import Store
from baar_jax.train.jobs import cap_spec

# Beginning of every model name that clients may send, such as "baar" or "baar:small".
NAME = "baar"


class SelectedPolicy(NamedTuple):
  """The policy that a client's model name selects.

  Attributes:
    rule: the key of its decider in `Exchange.deciders`, such as "small" or "router".
    cost_weight: units of score per normalised dollar; None if the policy has none.
  """

  rule: str
  cost_weight: float | None


class Exchange:
  """Route the calls of all sessions: decide, call the model, and book the cost.

  All of its methods run in one event loop.

  Attributes:
    names: the names of the models, SMALL first.
    deciders: the decider of each rule, such as "small" or "router".
    served: the policy of each model name that clients may send.
  """

  def __init__(
    self,
    config: Config,
    store: Store,
    sessions: Sessions,
    policies: Mapping[str, Policy],
    label_policy: Callable[[PolicySpec], str],
  ):
    """Set up the policies, the upstream models and the stored sessions.

    Args:
      policies: the policies that clients can select, by rule.
      label_policy: writes a policy's label for readers.

    Raises:
      ValueError: a model has no price or no key.
    """
    self.config = config
    self.sessions = sessions
    self._store = store
    self._label_policy = label_policy
    self.names = config.models.names
    indices = range(len(self.names))
    self.upstreams = [Upstream(config.models, index) for index in indices]
    billing = open_billing(config.models)
    self.budgets = Budgets(config.serve, sessions, self.upstreams, billing)
    # Decisions whose calls the clients make themselves, until the client reports the
    # usage of the call. The key is the `decision_id`.
    self._reported: dict[int, RoutedCall] = {}
    self.deciders: dict[str, Decider] = {}
    policy_of_name = {}
    for rule, policy in policies.items():
      self.deciders[rule] = Decider(policy, config.serve.max_sessions)
      weights = policy.cost_weights
      policy_of_name[f"{NAME}:{rule}"] = SelectedPolicy(
        rule, min(weights, default=None)
      )
      for weight in weights:
        policy_of_name[f"{NAME}:cost_weight={weight:g}"] = SelectedPolicy(rule, weight)
    self.served = {
      NAME: policy_of_name[f"{NAME}:{config.serve.policy}"]
    } | policy_of_name

  def compile(self) -> None:
    """Compile all policies by JAX, so that no client waits for a compilation."""
    for decider in self.deciders.values():
      decider.policy.compile()

  def receive(self, headers: Mapping[str, str], body: dict) -> ClientCall:
    """Read a client's call, and find its session.

    The call's messages contain the previous reply, which tells the action of the
    session's last step.

    Raises:
      Refusal: the call has a wrong field, or contradicts its session.
    """
    fields = CallFields.read_call(headers, body)
    text = read_messages(body.get("messages"), body.get("tools"))
    session = self.find_or_begin(fields, text)
    self.complete_step(session, text, fields.score)
    return ClientCall(session, body, text, time.time() - (session.began_s or 0.0))

  def find_or_begin(self, fields: CallFields, text: Conversation) -> Session:
    """Find the session of a call, or begin a new one.

    Raises:
      Refusal: no policy has this name, the session has ended, or the session began with
        another name or cap.
    """
    serve_config = self.config.serve
    if fields.model_name not in self.served:
      names = ", ".join(self.served)
      problem = f"Unknown model. Send one of these: {names}."
      if "price=" in fields.model_name:
        problem = f"price= has been renamed to cost_weight=. {problem}"
      raise Refusal(404, problem, code="model_not_found")
    selected = self.served[fields.model_name]
    cap = fields.make_cap(Cap(serve_config.max_large_calls, serve_config.max_usd))
    id_ = fields.id or self.sessions.choose_id(
      text.fingerprint, is_new=not text.actions
    )
    session = self.sessions.find(id_)
    if session is None:
      session = Session(
        id_,
        selected.rule,
        selected.cost_weight,
        policy=self._find_spec(selected, cap).key,
        task_id=fields.task_id or text.fingerprint,
        description=text.task * serve_config.record_text,
        call_limit=cap.calls,
        usd_limit=cap.usd,
        began_s=time.time(),
      )
      self.sessions.add(session)
      return session
    is_conflict = session.score is not None
    is_conflict |= selected != SelectedPolicy(session.rule, session.cost_weight)
    # A cap is compared only if the call names one. Otherwise the caps of its session
    # hold.
    if fields.large_calls is not None:
      is_conflict |= cap.calls != session.call_limit
    if fields.usd_limit is not None:
      is_conflict |= cap.usd != session.usd_limit
    if is_conflict:
      problem = f"Session {id_} is scored already, or began with another model or cap"
      raise Refusal(409, f"{problem}. Send a new x-session-id to begin another one.")
    return session

  def _find_spec(self, selected: SelectedPolicy | Session, cap: Cap) -> PolicySpec:
    """Find the policy whose key a session's episode is stored under."""
    spec = self.deciders[selected.rule].policy.spec
    # The key of a policy that samples rollouts contains the number of the update that
    # learns from its episodes, so a session's cap must not change this key.
    if spec.rollout:
      return spec
    spec = dataclasses.replace(spec, cost_weight=selected.cost_weight)
    return cap_spec(spec, cap)

  def label(self, session: Session) -> str:
    """Return the label of a session's policy for readers.

    The label is the rule's name if this server does not serve the rule.
    """
    if session.rule not in self.deciders:
      return session.rule
    return self._label_policy(self._find_spec(session, session.cap))

  def complete_step(
    self, session: Session, text: Conversation, score: float | None
  ) -> None:
    """Store the action and the score of a session's last step.

    The messages of the next call contain the action. Nothing is stored if they do not
    contain exactly one action more than those of the last step's call.

    Args:
      text: the messages of the next call; their last action is the last step's.
      score: the score so far, in [0, 1]; the value heads learn from it. None if the
        client has sent no score.
    """
    if session.places and session.places[-1] == len(text.actions) - 1:
      step = session.steps[-1]
      step.action = text.actions[-1] * self.config.serve.record_text
      step.score = score

  async def decide(self, call: ClientCall) -> RoutedCall:
    """Choose the model that answers a call.

    The chosen model's call fits all budgets when this method returns. The caller must
    reserve its cost before the next await, because other tasks spend dollars too.

    Raises:
      Refusal: no model's call fits the budgets, or the session was scored during the
        decision.
    """
    session = call.session
    observation = call.text.observations[-1]
    async with session.deciding:
      affordable = await self.budgets.find_affordable(call)
      decision = Decision(affordable.models[0])
      if len(affordable.models) > 1:
        live = self._make_live(call)
        decision = await self.deciders[session.rule].decide(live)
        # Other calls may have spent dollars during the decision.
        affordable = await self.budgets.find_affordable(call)
      if session.score is not None:
        raise Refusal(
          409,
          f"Session {session.id} is scored already. "
          "Send a new x-session-id to begin another one.",
        )
      model = pick_affordable(decision.model, affordable.models)
    step = Step(
      observation * self.config.serve.record_text,
      model,
      action="",
      logp=decision.logp if model == decision.model else None,
      router_cost_usd=decision.cost_usd,
      router_latency_s=decision.latency_s,
      started_s=call.session_s,
    )
    return RoutedCall(call, self.budgets, step, affordable, decision.p_A)

  def _make_live(self, call: ClientCall) -> Live:
    """Make the live episode of a call's session, from which its policy decides."""
    session = call.session
    text = call.text
    # A client may repeat a call, which gives two steps at one place. The last one
    # counts.
    step_of_place = dict(zip(session.places, session.steps))
    unknown_step = Step("", SMALL, "")
    places = range(len(text.actions))
    steps = text.write_steps(
      [step_of_place.get(place, unknown_step) for place in places]
    )
    # The session's id seeds the policy's random draws, and the trial number below,
    # which sets the probability of LARGE in a stratified sample.
    task = Task(session.id, "test", text.task, self.config.env.max_steps)
    trial = random.Random(session.id).randint(1, self.config.references.samples)
    return Live(
      Job(task, "reference", trial),
      session.cap,
      models=len(self.upstreams),
      cost_weight=session.cost_weight,
      steps=steps,
      observation=text.observations[-1],
      remaining_caps=[
        *list_remaining_caps(session.cap, steps),
        session.remaining_caps,
      ],
      started_s=call.session_s,
    )

  def forecast(self, call: ClientCall) -> list[Outlook]:
    """Forecast a call at each model: its warm tokens and its dollars.

    The reply is expected to be as long as the session's mean reply.
    """
    live = self._make_live(call)
    tokens = [step.calls[-1].usage.completion_tokens for step in call.session.steps]
    reply_tokens = sum(tokens) / max(1, len(tokens))
    opening = [call.body.get("tools")]
    for message in call.body["messages"]:
      if message["role"] == "assistant":
        break
      opening.append(message)
    opening_tokens = bound_tokens(opening) // CHARS_PER_TOKEN
    billing = self.budgets.billing
    return billing.forecast_calls(live.history, opening_tokens, reply_tokens)

  async def forward(self, routed: RoutedCall) -> dict | Stream:
    """Call the chosen model.

    Returns:
      The model's answer or stream. The caller must book its cost.

    Raises:
      Refusal: all attempts failed, or a retry does not fit the budgets.
    """
    return await ask(routed, self.config.models.retries)

  def reserve_reported(self, routed: RoutedCall) -> int:
    """Reserve the cost of an attempt that the client makes itself.

    Returns:
      The `decision_id`, which the client sends with the call's usage.
    """
    number = routed.begin(reported=True).number
    self._reported[number] = routed
    return number

  def book_report(self, number: object, fields: dict) -> RoutedCall:
    """Book the usage that a client reports for a decision.

    Args:
      number: the `decision_id` that the client sent.
      fields: the body of the client's request, with `usage`.

    Raises:
      Refusal: no decision without a report has this number, or the usage is incomplete.
    """
    routed = self._reported.get(number) if type(number) is int else None
    if routed is None:
      raise Refusal(
        404,
        "No decision with this decision_id waits for a report. Send the decision_id "
        "that /v1/decision answered, and report each decision once.",
      )
    if routed.upstream.read_bill(fields).usd is None:
      raise Refusal(
        400,
        "The report's usage is incomplete. Send the field usage with prompt_tokens and "
        "completion_tokens.",
      )
    del self._reported[number]
    routed.book_reply(fields)
    return routed

  def finish(self, session: Session, scored: SessionScore) -> None:
    """End a session with its score, and store its episode.

    A decision whose call's usage was never reported counts at its worst case.

    Raises:
      Refusal: the session already has a score, has no step, or has a call in flight.
    """
    if session.score is not None or session.is_busy or not session.steps:
      raise Refusal(
        409,
        "This session is scored already, has had no call, or has a call in flight. "
        "Score it once, after the answer to its last call.",
      )
    for number in [*session.open]:
      self._reported.pop(number).end(PRESUMED)
    session.task_id = scored.task or session.task_id
    # If the server is killed before it saves the score, the client will send the score
    # again. The mark prevents a second copy of the episode.
    mark = f"session {session.id}"
    episode = session.make_episode(scored.score)
    ended = ScoredSession(mark, episode, session.description)
    add_sessions(self._store, self.config, [ended])
    self.sessions.finish(session, scored.score)

  def describe(self, session: Session) -> dict:
    """Return a session's caps, dollars and steps as JSON fields, without texts."""
    names = self.names
    left = session.remaining_caps
    steps = []
    for step in session.steps:
      step_fields = dict(model=names[step.model], cost_usd=step.spent_usd)
      steps.append(step_fields | vars(step.calls[-1].usage))
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


class Decider:
  """Decide for the sessions of one policy, in batches.

  The policy remembers at most `rows` sessions: those with the newest decisions.

  Attributes:
    lives: the live episode of each session that has a row in the KV cache, by
      `Live.key`. The session with the newest decision is last.
  """

  def __init__(self, policy: Policy, rows: int):
    """Set up a decider without any sessions.

    Args:
      rows: the number of sessions that the policy's KV cache can hold.
    """
    self.policy = policy
    self.lives: dict[tuple[str, int], Live] = {}
    self._rows = rows
    # The calls that wait for a decision. They are stored by call and not by session,
    # because a client may drop a call and send the next one while the dropped call is
    # being decided.
    self._ready: dict[Live, asyncio.Future[Decision]] = {}
    self._lock = asyncio.Lock()

  async def decide(self, live: Live) -> Decision:
    """Choose a session's next model, in one batch with all waiting sessions.

    The first waiting call runs the policy in a thread. The other calls await the
    result.
    """
    result = asyncio.get_running_loop().create_future()
    self._ready[live] = result
    try:
      async with self._lock:
        while not result.done():
          waiting = [call for call, future in self._ready.items() if not future.done()]
          batch = waiting[: self._rows]
          decisions = await asyncio.to_thread(self.choose, batch)
          for call, decision in zip(batch, decisions):
            # A call is missing here if its client has dropped it meanwhile.
            if call in self._ready:
              self._ready[call].set_result(decision)
      return result.result()
    finally:
      # An error of the policy ends this call alone. The other waiting calls run the
      # policy again.
      del self._ready[live]

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Return the policy's decisions for different sessions.

    There must be at most as many sessions as the policy's KV cache has rows.
    """
    for live in ready:
      self.remember(live)
    return self.policy.choose(ready)

  def remember(self, live: Live) -> None:
    """Keep a session's live episode, as the one with the newest decision.

    If there are more sessions than rows in the KV cache, free the row of the session
    whose last decision is the oldest.
    """
    self.lives.pop(live.key, None)
    self.lives[live.key] = live
    if len(self.lives) > self._rows:
      oldest = next(iter(self.lives))
      self.policy.finish(self.lives.pop(oldest))
