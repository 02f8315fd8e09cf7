"""Choose a model for each call of a client, and book its cost."""

import asyncio
import contextlib
import dataclasses
import fnmatch
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import NamedTuple

from baar_jax.config import Config
from baar_jax.episode import SMALL, Episode, Step, Task
from baar_jax.llms import responses
from baar_jax.llms.client import Whole, ask
from baar_jax.llms.prices import CHARS_PER_TOKEN, Outlook, open_billing
from baar_jax.llms.usage import Meter
from baar_jax.llms.wire import PRESUMED, WireForm
from baar_jax.rollout.rules import Policy, pick_affordable
from baar_jax.rollout.specs import Cap, Decision, Job, Live, PolicySpec
from baar_jax.router.view import list_remaining_caps
from baar_jax.serve.request import (
  CallFields,
  History,
  Refusal,
  SessionScore,
  bound_tokens,
  find_lowest,
  hash_text,
  read_history,
)
from baar_jax.serve.routed import (
  Budgets,
  ClientCall,
  Delivery,
  RoutedCall,
  Upstream,
  pass_headers,
)
from baar_jax.serve.sessions import (
  Conversation,
  Purse,
  ScoredSession,
  Sessions,
  State,
  add_sessions,
)
from baar_jax.store import Store
from baar_jax.train.jobs import cap_spec

# Beginning of every model name that clients may send, such as "baar" or "baar:small".
NAME = "baar"
# Most finished answers that are kept for retries, and most responses for references.
MOST_ANSWERS = 256
# Seconds between two looks for conversations that are over.
WATCH_S = 10.0


class SelectedPolicy(NamedTuple):
  """The policy that a client's model name selects.

  Attributes:
    rule: the key of its decider in `Exchange.deciders`, such as "small" or "router".
    cost_weight: units of score per normalised dollar; None if the policy has none.
  """

  rule: str
  cost_weight: float | None


class ClientKey(NamedTuple):
  """What a client's key allows.

  Attributes:
    name: the name of the key; "" without `serve.keys`.
    is_operator: whether the client sees all sessions, and may change caps.
    cap: the caps of each of its sessions.
  """

  name: str = ""
  is_operator: bool = True
  cap: Cap = Cap()


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
    # The newest answers by the client, the names and the hash of their call's body.
    self._deliveries: dict[tuple, Delivery] = {}
    # The items of the newest responses, by the client and their id.
    self._items: dict[tuple[str, str], list] = {}
    # Tasks whose results nobody awaits: the event loop keeps only weak references.
    self._tasks: set[asyncio.Task] = set()
    # The conversations whose outcome was asked for.
    self._asked: set[int] = set()
    self._start_s = time.time()
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

  def receive(
    self,
    key: ClientKey,
    form: WireForm,
    headers: Mapping[str, str],
    body: dict,
    is_repeated: bool = False,
  ) -> ClientCall:
    """Read a client's call, and find its purse and its conversation.

    The call's messages contain the previous reply, which tells the action of the
    conversation's last step.

    Args:
      key: the client's key.
      form: the wire form of the call.
      headers: the headers, and the session's name in the URL under the name "url".
      body: the JSON body.
      is_repeated: whether an equal call was answered lately. Without names, it begins a
        conversation of its own.

    Raises:
      Refusal: the call has a wrong field, or the ledger cannot be written.
    """
    self.sessions.commit()
    fields = CallFields.read_call(headers, body)
    self._resolve_items(key, form, body)
    history = read_history(body, form)
    selected = self._select(fields.model_name)
    purse = self._find_purse(key, fields)
    conversation = self._match(key, fields, history, selected, purse)
    if conversation and not purse:
      purse = conversation.purse
      if is_repeated:
        conversation = None
    serve_config = self.config.serve
    cap = fields.make_cap(
      Cap(
        find_lowest(serve_config.max_large_calls, key.cap.calls),
        find_lowest(serve_config.max_usd, key.cap.usd),
      )
    )
    if purse is None:
      purse = self.sessions.open_purse(key.name, fields.purse or "", cap)
    else:
      self._lower_caps(purse, fields)
    is_side = conversation is None and self._is_side_call(purse, history, body)
    spec_key = self._find_spec(selected, purse.cap).key
    if conversation and conversation.state.policy != spec_key:
      conversation = None
    if conversation is None and not is_side:
      state = State(
        selected.rule,
        selected.cost_weight,
        spec_key,
        task_id=fields.task_id or history.opening,
        description=history.task * serve_config.record_text,
        opening=history.opening,
        began_s=time.time(),
      )
      conversation = self.sessions.begin_conversation(purse, fields.conversation, state)
    if conversation:
      self._complete_step(conversation, history, fields.score)
    return ClientCall(form, body, history, purse, conversation, pass_headers(headers))

  def _select(self, name: str) -> SelectedPolicy:
    """Find the policy of a model name, or of the name that it is an alias of.

    Raises:
      Refusal: no policy has this name.
    """
    if name in self.served:
      return self.served[name]
    for pattern, alias in self.config.serve.aliases:
      if fnmatch.fnmatchcase(name, pattern) and alias in self.served:
        return self.served[alias]
    names = ", ".join(self.served)
    problem = f"Unknown model. Send one of these: {names}."
    if "price=" in name:
      problem = f"price= has been renamed to cost_weight=. {problem}"
    raise Refusal(404, problem, code="model_not_found")

  def _find_purse(self, key: ClientKey, fields: CallFields) -> Purse | None:
    """Find the purse that a call names; None if it is new or has no name."""
    sessions = self.sessions
    if fields.parent:
      # The parent may be a subagent, too. Then it is a conversation of the purse.
      condition = "name = ? AND purse IN (SELECT id FROM purses WHERE client = ?)"
      values = (fields.parent, key.name)
      for conversation in sessions.list_conversations(condition, *values):
        return conversation.purse
      fields.purse = fields.parent
    return fields.purse and sessions.find_purse(key.name, fields.purse)

  def _lower_caps(self, purse: Purse, fields: CallFields) -> None:
    """Lower the caps of a purse to those that a call names, if these are lower."""
    cap = purse.cap
    calls = find_lowest(cap.calls, fields.large_calls)
    lowered = Cap(calls, find_lowest(cap.usd, fields.usd_limit))
    if lowered != cap:
      self.sessions.change_caps(purse, lowered)

  def _match(
    self,
    key: ClientKey,
    fields: CallFields,
    history: History,
    selected: SelectedPolicy,
    purse: Purse | None,
  ) -> Conversation | None:
    """Find the conversation that a call continues; None if it begins a new one.

    A name of the conversation decides, else the replies in the call's history. In a
    named session, a client may have rewritten all replies: then a history of the same
    task that is at least as long continues its conversation.

    Of several conversations, the call continues the longest one whose replies it has
    all, in their order; else the newest one whose last reply it has; else the newest.
    """
    atoms = history.atoms
    candidates = []
    if not fields.conversation:
      candidates = self.sessions.find_matches(key.name, purse, atoms)
    if purse and not candidates:
      for found in self.sessions.list_conversations("purse = ?", purse.id):
        places = [record.place for record in found.records]
        is_same_task = found.state.opening == history.opening
        is_same_task &= len(history.actions) >= max(places, default=0)
        if found.name == fields.conversation and (found.name or is_same_task):
          candidates.append(found)
    since_s = time.time() - self.config.serve.idle_s
    alive = []
    whole = []
    recent = []
    for found in candidates:
      is_same = selected == SelectedPolicy(found.state.rule, found.state.cost_weight)
      if not is_same or found.score is not None or found.changed_s < since_s:
        continue
      alive.append(found)
      if found.has_replies(atoms, found.records):
        whole.append(found)
      if found.has_replies(atoms, found.records[-1:]):
        recent.append(found)
    if whole:
      # Of equal conversations, the one that has waited longest.
      return max(whole, key=lambda found: (len(found.records), -found.changed_s))
    return next(iter(recent or alive), None)

  def _is_side_call(self, purse: Purse, history: History, body: Mapping) -> bool:
    """Tell whether a call is a title, a summary or the like, beside the work.

    Such a call offers no tools, is the first of its history, and is shorter than the
    last call of a conversation of the purse that offered tools.
    """
    if body.get("tools") or not self.config.serve.side_calls:
      return False
    size = bound_tokens(body)
    for conversation in self.sessions.list_conversations("purse = ?", purse.id):
      records = conversation.records
      if records and records[-1].has_tools and size < records[-1].size:
        return True
    return False

  def _resolve_items(self, key: ClientKey, form: WireForm, body: dict) -> None:
    """Replace references to earlier responses by their recorded items.

    Raises:
      Refusal: this server does not have the response or the item.
    """
    if form is not responses.FORM:
      return
    given = body.get("input")
    if isinstance(given, str):
      given = [{"role": "user", "content": given}]
    earlier = body.pop("previous_response_id", None)
    items = []
    if earlier or body.get("conversation"):
      items += self._find_items(key, earlier)
    for item in given if isinstance(given, list) else ():
      if isinstance(item, dict) and item.get("type") == "item_reference":
        items += self._find_items(key, item.get("id"))
      else:
        items.append(item)
    body["input"] = items

  def _find_items(self, key: ClientKey, id_: object) -> list:
    """Return the items of a recorded response, or the recorded item, with this id."""
    items = self._items.get((key.name, str(id_)))
    if items is None:
      problem = f"This server does not have the response or item {str(id_)[:80]}"
      raise Refusal(400, f"{problem}. Set store: false, and send the whole history.")
    return items

  def _record_items(self, key: ClientKey, body: Mapping, answer: Mapping) -> None:
    """Record the items of a response, which later calls may refer to."""
    output = answer.get("output")
    if not isinstance(output, list) or body.get("store") is False:
      return
    self._items[key.name, str(answer.get("id"))] = [*body["input"], *output]
    for item in output:
      if isinstance(item, dict):
        self._items[key.name, str(item.get("id"))] = [item]
    while len(self._items) > MOST_ANSWERS:
      self._items.pop(next(iter(self._items)))

  def _find_spec(self, selected: SelectedPolicy | State, cap: Cap) -> PolicySpec:
    """Find the policy whose key a conversation's episode is stored under."""
    spec = self.deciders[selected.rule].policy.spec
    # The key of a policy that samples rollouts contains the number of the update that
    # learns from its episodes, so a session's cap must not change this key.
    if spec.rollout:
      return spec
    spec = dataclasses.replace(spec, cost_weight=selected.cost_weight)
    return cap_spec(spec, cap)

  def label(self, conversation: Conversation) -> str:
    """Return the label of a conversation's policy for readers.

    The label is the rule's name if this server does not serve the rule.
    """
    state = conversation.state
    if state.rule not in self.deciders:
      return state.rule
    return self._label_policy(self._find_spec(state, conversation.purse.cap))

  def _complete_step(
    self, conversation: Conversation, history: History, score: float | None
  ) -> None:
    """Store the action and the score of a conversation's last step.

    The messages of the next call contain the action. Nothing is stored if they do not
    contain exactly one action more than those of the last step's call.

    Args:
      history: the messages of the next call; their last action is the last step's.
      score: the score so far, in [0, 1]; the value heads learn from it. None if the
        client has sent no score.
    """
    records = conversation.records
    if records and records[-1].place == len(history.actions) - 1:
      action = history.actions[-1] * self.config.serve.record_text
      self.sessions.complete_step(conversation, action, score)

  def deliver(
    self, key: ClientKey, form: WireForm, headers: Mapping[str, str], body: dict
  ) -> Delivery:
    """Answer a call, or find the answer that is being made for a retry of it.

    A call with an equal body is a retry if its session has a name and the answer is
    still being made, if a client has left the answer, or if the client says so
    (x-stainless-retry-count).

    Raises:
      Refusal: the call has a wrong field.
    """
    fields = CallFields.read_call(headers, body)
    digest = hash_text(json.dumps(body, sort_keys=True))
    place = (key.name, fields.purse, fields.conversation, digest)
    delivery = self._deliveries.get(place)
    if delivery and delivery.is_repeatable:
      is_retry = headers.get("x-stainless-retry-count", "0") != "0"
      is_retry |= fields.purse is not None and not delivery.is_done
      if is_retry or delivery.is_dropped:
        delivery.is_dropped = False
        return delivery
    call = self.receive(key, form, headers, body, delivery is not None)
    delivery = Delivery()
    self._deliveries[place] = delivery
    for old_place in [*self._deliveries][: len(self._deliveries) - MOST_ANSWERS]:
      if self._deliveries[old_place].is_done:
        del self._deliveries[old_place]
    is_final = headers.get("x-baar-session-final") == "true"
    self.start(self._make(delivery, key, call, is_final))
    return delivery

  def start(self, work: Coroutine) -> None:
    """Start a task, and keep it until its end."""
    task = asyncio.get_running_loop().create_task(work)
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)

  async def _make(
    self, delivery: Delivery, key: ClientKey, call: ClientCall, is_final: bool
  ) -> None:
    """Make an answer to its end: decide, call the model, and book the cost."""
    routed = None
    try:
      routed = await self.decide(call)
      answer = await ask(routed, self.config.models.retries)
      if isinstance(answer, Whole):
        routed.book_reply(answer.meter, answer.fields)
        self._record_items(key, call.body, answer.fields)
        usage = answer.fields.get("usage")
        usage = dict(usage if isinstance(usage, dict) else {}, cost=routed.usd)
        fields = answer.fields | {"usage": usage, "model": routed.upstream.name}
        delivery.begun.set_result((fields, routed.headers))
      else:
        delivery.begun.set_result(({}, routed.headers))
        final = await routed.relay(answer, delivery)
        self._record_items(key, call.body, final)
      if is_final and call.conversation:
        await self._end(call.conversation)
    except Exception as error:
      if not delivery.begun.done():
        delivery.begun.set_exception(error)
        delivery.begun.exception()  # The client may have left.
      elif not isinstance(error, Refusal):
        print(f"error: {type(error).__name__} in a stream", file=sys.stderr)
    finally:
      if routed and routed.last_attempt:
        routed.book_reply()
      delivery.finish()

  async def decide(self, call: ClientCall) -> RoutedCall:
    """Choose the model that answers a call; a side call goes to SMALL.

    The chosen model's call fits all budgets when this method returns. The caller must
    reserve its cost before the next await, because other tasks spend dollars too.

    Raises:
      Refusal: no model's call fits the budgets, or the conversation was scored during
        the decision.
    """
    conversation = call.conversation
    affordable = await self.budgets.find_affordable(call)
    decision = Decision(affordable.models[0])
    model = decision.model
    if conversation:
      async with conversation.deciding:
        if len(affordable.models) > 1:
          live = self._make_live(call)
          decision = await self.deciders[conversation.state.rule].decide(live)
          # Other calls may have spent dollars during the decision.
          affordable = await self.budgets.find_affordable(call)
      if conversation.score is not None:
        raise Refusal(
          409, "The task was scored during this call. Send the call of the next task."
        )
      model = pick_affordable(decision.model, affordable.models)
    step = Step(
      call.history.observations[-1] * self.config.serve.record_text,
      model,
      action="",
      logp=decision.logp if model == decision.model else None,
      router_cost_usd=decision.cost_usd,
      router_latency_s=decision.latency_s,
      started_s=call.call_s,
    )
    return RoutedCall(call, self.budgets, step, affordable, decision.p_A)

  def _make_live(self, call: ClientCall) -> Live:
    """Make the live episode of a call's conversation, from which its policy decides."""
    conversation = call.conversation
    history = call.history
    # A client may repeat a call, which gives two steps at one place. The last one
    # counts.
    step_of_place = {record.place: record.step for record in conversation.records}
    unknown_step = Step("", SMALL, "")
    places = range(len(history.actions))
    steps = history.write_steps(
      [step_of_place.get(place, unknown_step) for place in places]
    )
    # The id seeds the policy's random draws, and the trial number below, which sets the
    # probability of LARGE in a stratified sample.
    purse = conversation.purse
    id_ = f"{purse.client}/{purse.name}/{conversation.id}"
    task = Task(id_, "test", history.task, self.config.env.max_steps)
    trial = random.Random(id_).randint(1, self.config.references.samples)
    return Live(
      Job(task, "reference", trial),
      purse.cap,
      models=len(self.upstreams),
      cost_weight=conversation.state.cost_weight,
      steps=steps,
      observation=history.observations[-1],
      remaining_caps=[
        *list_remaining_caps(purse.cap, steps),
        purse.remaining_caps,
      ],
      started_s=call.call_s,
    )

  def forecast(self, call: ClientCall) -> list[Outlook]:
    """Forecast a call at each model: its warm tokens and its dollars.

    The reply is expected to be as long as the conversation's mean reply.
    """
    live = self._make_live(call)
    steps = call.conversation.steps
    tokens = [step.calls[-1].usage.completion_tokens for step in steps]
    reply_tokens = sum(tokens) / max(1, len(tokens))
    opening = [call.body.get(name) for name in call.form.opening]
    opening_chars = bound_tokens(opening) + call.history.opening_chars
    opening_tokens = opening_chars // CHARS_PER_TOKEN
    billing = self.budgets.billing
    return billing.forecast_calls(live.history, opening_tokens, reply_tokens)

  def reserve_reported(self, routed: RoutedCall) -> int:
    """Reserve the cost of an attempt that the client makes itself.

    After `serve.report_s` without a report, the attempt is booked at its worst case.
    Until then its numbers are kept, and not its texts.

    Returns:
      The `decision_id`, which the client sends with the call's usage.
    """
    number = routed.begin(reported=True).number
    routed.call.body = {}
    routed.call.history = routed.call.history._replace(observations=[])
    self._reported[number] = routed
    loop = asyncio.get_running_loop()
    loop.call_later(self.config.serve.report_s, self._expire, number)
    return number

  def _expire(self, number: int) -> None:
    """Book a decision without a report at its worst case."""
    if routed := self._reported.pop(number, None):
      routed.end(PRESUMED)

  def book_report(self, number: object, fields: dict) -> RoutedCall:
    """Book the usage that a client reports for a decision.

    Args:
      number: the `decision_id` that the client sent.
      fields: the body of the client's request, with `usage`.

    Raises:
      Refusal: no decision without a report has this number.
      ImpossibleUsage: the usage is missing or impossible.
    """
    routed = self._reported.get(number) if type(number) is int else None
    if routed is None:
      raise Refusal(
        404,
        "No decision with this decision_id waits for a report. Send the decision_id "
        "that /v1/decision answered, and report each decision once.",
      )
    meter = Meter(routed.call.form.counts_beside)
    meter.note(fields)
    routed.upstream.price_usage(meter)
    del self._reported[number]
    routed.book_reply(meter)
    return routed

  def score(self, purse: Purse, scored: SessionScore) -> None:
    """End the task of a session with its score, and store its episode.

    The score is of the newest conversation with the most steps, and all others of the
    purse end without one. A decision whose call's usage was never reported counts at
    its worst case.

    Raises:
      Refusal: the task already has a score, has no step, or has a call in flight.
    """
    conversations = self.sessions.list_conversations(
      "purse = ? AND changed_s >= 0 AND id = ifnull(?, id)",
      purse.id,
      scored.conversation,
    )
    conversations.sort(key=lambda found: -len(found.records))
    if purse.is_busy or not conversations or not conversations[0].records:
      raise Refusal(
        409,
        "This session is scored already, has had no call, or has a call in flight. "
        "Score it once, after the answer to its last call.",
      )
    for number in [*purse.open]:
      self._expire(number)
    main, *others = conversations
    main.state.task_id = scored.task or main.state.task_id
    # If the server is killed before it saves the score, the client will send the score
    # again. The mark prevents a second copy of the episode.
    mark = f"conversation {main.id}"
    cap = purse.cap
    episode = Episode(
      main.state.task_id,
      main.state.policy,
      seed=0,
      steps=main.steps,
      score=scored.score,
      stop="done",
      call_budget=cap.calls,
      usd_budget=cap.usd,
      lost_usd=self.sessions.lost_usd(main),
    )
    ended = ScoredSession(mark, episode, main.state.description)
    add_sessions(self._store, self.config, [ended])
    self.sessions.finish(main, scored.score)
    for conversation in others:
      self.sessions.finish(conversation)

  async def watch(self) -> None:
    """End the conversations whose last call is long ago, as long as the server runs."""
    idle_s = self.config.serve.idle_s
    while True:
      await asyncio.sleep(min(WATCH_S, idle_s))
      over = self.sessions.list_conversations(
        "score IS NULL AND changed_s BETWEEN ? AND ?",
        self._start_s - idle_s,
        time.time() - idle_s,
      )
      for conversation in over:
        if conversation.id not in self._asked:
          await self._end(conversation)

  async def _end(self, conversation: Conversation) -> None:
    """End a conversation, with the score that `serve.outcome` prints, if there is one.

    If the command fails, is late or prints no score, there is no score.
    """
    self._asked.add(conversation.id)
    serve_config = self.config.serve
    purse = conversation.purse
    try:
      if not serve_config.outcome:
        raise ValueError("no command")
      command = [*shlex.split(serve_config.outcome), purse.name]
      process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
      )
      try:
        async with asyncio.timeout(serve_config.outcome_s):
          output, _ = await process.communicate()
      finally:
        with contextlib.suppress(ProcessLookupError):
          process.kill()
      fields = {"score": float(output), "conversation": conversation.id}
      self.score(purse, SessionScore.read(fields))
    except (ValueError, OSError):
      with contextlib.suppress(Refusal):
        self.sessions.finish(conversation, changed_s=0.0)

  def describe(self, purse: Purse) -> dict:
    """Return a session's caps, dollars and conversations as JSON, without texts."""
    names = self.names
    left = purse.remaining_caps
    conversations = []
    for conversation in self.sessions.list_conversations("purse = ?", purse.id):
      steps = []
      switch_usd = 0.0
      for record in conversation.records:
        step = record.step
        fields = dict(model=names[step.model], cost_usd=step.spent_usd)
        steps.append(fields | vars(step.calls[-1].usage))
        switch_usd += record.switch_usd
      caches = {}
      for model, cache in conversation.caches.items():
        caches[names[model]] = vars(cache)
      state = conversation.state
      conversations.append(
        dict(
          id=conversation.id,
          name=conversation.name,
          policy=state.policy,
          label=self.label(conversation),
          task_id=state.task_id,
          score=conversation.score,
          switch_usd=switch_usd,
          caches=caches,
          count=len(steps),
          steps=steps,
        )
      )
    return dict(
      id=purse.name,
      client=purse.client,
      usd_limit=purse.cap.usd,
      call_limit=purse.cap.calls,
      spent_usd=purse.dollars.settled_usd,
      large_calls=purse.large_calls,
      left_usd=left.usd,
      left_large_calls=left.calls,
      in_flight=len(purse.open),
      conversations=conversations,
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
