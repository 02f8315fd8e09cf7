"""Find the purse and the conversation of each client's call."""

import collections
import dataclasses
import fnmatch
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from baar_jax.decide import Decider
from baar_jax.episode import FAILED, PRESUMED
from baar_jax.llms.history import bound_tokens
from baar_jax.rollout.jobs import ALWAYS_LARGE, FIRST_LARGE
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_serve.call import ClientCall
from baar_serve.config import ServeConfig
from baar_serve.records import Conversation, Purse, State
from baar_serve.request import (
  ClientHistory,
  Refusal,
  find_lowest,
  hash_prefix,
  read_history,
)
from baar_serve.sessions import DAY_S, LONGEST_WAIT_S, Sessions

# Beginning of every model name that clients may send, such as "baar" or "baar:small".
NAME = "baar"
# The rule that stands for the policy that a run still needs; see plan.py.
COLLECT = "collect"
# Programs whose work always offers tools, by the beginning of their user-agent. They
# send a session's title before its first call.
TOOL_AGENTS = ("claude-cli/", "opencode/")


class SelectedPolicy(NamedTuple):
  """The policy that a client's model name selects.

  Attributes:
    rule: the key of its decider in `Exchange.deciders`, such as "small" or "router".
    cost_weight: units of score per normalised dollar; None if the policy has none.
  """

  rule: str
  cost_weight: float | None = None


def read_policy(state: State) -> SelectedPolicy:
  """Return the policy that decides in a conversation."""
  return SelectedPolicy(state.rule, state.cost_weight)


class Desk:
  """Find the purse and the conversation of each call, or begin new ones.

  Attributes:
    policies: the policy of each model name that clients may send.
    assigned: the policy of sessions that are to have one whatever the client asks for,
      by the session's name.
    assign: returns the policy that the run still needs of a task, by the task's name;
      None unless the configured policy is COLLECT.
  """

  assign: Callable[[str], SelectedPolicy] | None = None

  def __init__(
    self,
    config: ServeConfig,
    sessions: Sessions,
    deciders: Mapping[str, Decider],
  ):
    """Set up the model names.

    Args:
      deciders: the deciders of the policies that clients can select, by rule.
    """
    self._config = config
    self._names = config.models.names
    self._sessions = sessions
    self._deciders = deciders
    self.assigned: dict[str, SelectedPolicy] = {}
    policy_of_name = {}
    for rule, decider in deciders.items():
      policy = decider.policy
      policy_of_name[f"{NAME}:{rule}"] = SelectedPolicy(rule, policy.cost_weight)
      for weight in policy.cost_weights:
        policy_of_name[f"{NAME}:cost_weight={weight:g}"] = SelectedPolicy(rule, weight)
    self.policies = {NAME: policy_of_name[f"{NAME}:{config.policy}"]} | policy_of_name

  def receive(self, call: ClientCall) -> None:
    """Find the purse and the conversation of a client's call.

    The call's messages contain the previous reply, which tells the action of the
    conversation's last step.

    Raises:
      Refusal: the call has a wrong field, or the ledger cannot be written.
    """
    self._sessions.commit()
    key = call.key
    fields = call.fields
    history = read_history(call.body, call.form)
    selected = self.assigned.get(fields.session) or self._select(fields.model_name)
    purse = fields.session and self._sessions.find_purse(key.name, fields.session)
    conversation = self._match(call, history, selected, purse)
    if conversation and not purse:
      purse = conversation.purse
    limits = Cap(
      find_lowest(self._config.max_large_calls, key.max_large_calls),
      find_lowest(self._config.max_usd, key.max_usd),
    )
    if purse:
      limits = purse.cap
    # A client can only lower the caps.
    cap = Cap(
      find_lowest(limits.calls, fields.large_calls),
      find_lowest(limits.usd, fields.usd_limit),
    )
    if purse is None:
      purse = self._sessions.open_purse(key.name, fields.session or "", cap)
    if cap != purse.cap:
      self._sessions.change_caps(purse, cap)
    task_id = fields.task_id or history.opening
    is_side = not conversation and self._is_side_call(purse, call)
    if selected.rule == COLLECT and not is_side:
      begun = self._sessions.list_conversations("purse = ?", purse.id)
      selected = read_policy(begun[-1].state) if begun else self.assign(task_id)
    policy = self.find_spec(selected, cap).key
    if conversation and conversation.state.policy != policy:
      conversation = None
    if conversation is None and not is_side:
      state = State(
        selected.rule,
        selected.cost_weight,
        policy,
        task_id=task_id,
        description=history.task * self._config.record_text,
        opening=history.opening,
        began_s=time.time(),
      )
      conversation = self._sessions.begin_conversation(
        purse, fields.conversation, state
      )
    if conversation:
      # So an equal call that comes before this one's attempt takes its own twin.
      conversation.changed_s = time.time()
    records = conversation.records if conversation else ()
    # The history has one reply more than that of the last step's call.
    if records and records[-1].place == len(history.actions) - 1:
      action = history.actions[-1] * self._config.record_text
      self._sessions.complete_step(conversation, action, fields.score)
    call.place(history, purse, conversation)

  def _select(self, name: str) -> SelectedPolicy:
    """Find the policy of a model name, or of the name that it is an alias of.

    Raises:
      Refusal: no policy has this name.
    """
    if name in self.policies:
      return self.policies[name]
    for pattern, alias in self._config.aliases:
      if fnmatch.fnmatchcase(name, pattern) and alias in self.policies:
        return self.policies[alias]
    raise Refusal(
      404,
      f"Unknown model. Send one of these: {', '.join(self.policies)}.",
      code="model_not_found",
    )

  def _match(
    self,
    call: ClientCall,
    history: ClientHistory,
    selected: SelectedPolicy,
    purse: Purse | None,
  ) -> Conversation | None:
    """Find the conversation that a call continues; None if it begins a new one.

    A name of the conversation decides, else the replies in the call's history. In a
    named session, a client may have rewritten all replies: then a longer history of the
    same task continues its conversation.

    A call without a name continues only a conversation whose replies it has all, or one
    of the same task whose last reply it has or which has all of its replies: tasks of
    other sessions may have some equal replies, and a new task may begin with examples
    that are equal to replies of another one.

    Of several conversations, the call continues one whose replies it has all, in their
    order; then one of the same task; then one that no changed cap has ended; then one
    that is not ahead of the call; then the one with most of the call's replies; then
    the longest; then one whose session has no call in flight; then one whose last
    prompt, with all ids, begins the call's; then one without a refusal; then the one
    that has waited longest, but not too long. A client may leave out the texts of
    replies that have tool calls, so it may seem ahead.
    """
    fields = call.fields
    atoms = history.atoms
    place = len(history.actions)
    candidates = []
    if fields.conversation:
      candidates = self._sessions.list_conversations(
        "purse = ? AND name = ? AND changed_s > 0",
        purse and purse.id,
        fields.conversation,
      )
    elif purse or not fields.session:
      candidates = self._sessions.find_matches(call.key.name, purse, atoms, place)
      if purse and not candidates:
        for found in self._sessions.list_conversations(
          "purse = ? AND name = '' AND changed_s > 0", purse.id
        ):
          if found.state.opening == history.opening and found.last_place < place:
            candidates.append(found)
    ranks = {}
    for found in candidates:
      played = read_policy(found.state)
      if selected != played and selected.rule != COLLECT:
        continue
      is_same_task = found.state.opening == history.opening
      has_all = found.has_replies(atoms, found.records)
      own = found.atoms
      has_no_other = own >= {*atoms}
      is_longer = found.last_place < place or has_no_other
      has_some = has_no_other or found.has_replies(atoms, found.records[-1:])
      is_ours = purse or has_all or is_same_task and has_some
      if not (is_longer and is_ours or fields.conversation):
        continue
      ranks[found] = (
        has_all,
        is_same_task,
        found.state.policy == self.find_spec(played, found.purse.cap).key,
        found.last_place < place,
        len(own.intersection(atoms)),
        len(found.records),
        not found.purse.callers,
        any(
          hash_prefix(call.form, call.body, cache.messages) == cache.digest
          for record in found.records[-1:]
          if (cache := record.cache)
        ),
        not self._sessions.count_refusals(found.purse),
        time.time() - found.changed_s < LONGEST_WAIT_S,
        -found.changed_s,
      )
    return max(ranks, key=ranks.get, default=None)

  def _is_side_call(self, purse: Purse, call: ClientCall) -> bool:
    """Tell whether a call is a title, a summary or the like, beside the work.

    Such a call offers no tools and continues no conversation. It comes from one of
    `TOOL_AGENTS`, or it is shorter than the last call of a conversation of the purse
    that offered tools.
    """
    if call.body.get("tools"):
      return False
    if call.headers.get("user-agent", "").startswith(TOOL_AGENTS):
      return True
    tokens = bound_tokens(call.body)
    open_ones = "purse = ? AND changed_s > 0"
    for conversation in self._sessions.list_conversations(open_ones, purse.id):
      records = conversation.records
      if records and tokens < records[-1].bound_tokens:
        return True
    return False

  def find_spec(self, selected: SelectedPolicy, cap: Cap) -> PolicySpec:
    """Find the policy whose key a conversation's episode is stored under."""
    spec = self._deciders[selected.rule].policy.spec
    if selected.cost_weight is not None:
      spec = dataclasses.replace(spec, cost_weight=selected.cost_weight)
    if spec == ALWAYS_LARGE and cap:
      return PolicySpec(FIRST_LARGE, cap=cap)
    return spec.under(cap)

  def list_totals(self, client: str | None, minute: float) -> list[dict]:
    """Add up the dollars of all time, of today (UTC), by model and by policy.

    Args:
      client: the name of the client's key; None adds up those of all clients.
      minute: the time in minutes since 1970.

    Returns:
      A row of the page for each sum, with what LARGE would have cost.
    """
    today_s = minute * 60 // DAY_S * DAY_S
    rows = []
    for label, calls, usd, large_usd in self._sessions.total(client, today_s):
      rows.append(
        dict(
          total=dict(enumerate(self._names)).get(label, label),
          calls=calls,
          usd=usd,
          always_large_usd=large_usd,
          saved_usd=large_usd - usd,
        )
      )
    return rows

  def summarize(self, purse: Purse) -> dict:
    """Return a session as a row of the page."""
    session = self.describe(purse)
    models = collections.Counter()
    score = None
    conversation = dict(description="side calls")
    for conversation in session["conversations"]:
      for step in conversation["steps"]:
        models[step["model"]] += 1
      if conversation["score"] is not None:
        score = conversation["score"]
    # The last one is the oldest, which has the session's task.
    return dict(
      session=purse.name,
      task=conversation["description"] or conversation["task_id"],
      models=", ".join(f"{name} {count}" for name, count in models.items()),
      score=score,
      usd=session["spent_usd"],
      cap_usd=session["usd_limit"],
      refused=session["refusals"],
      failed=len(session["failures"]),
      in_flight=session["in_flight"],
      client=purse.client,
      changed_s=purse.changed_s,
    )

  def describe(self, purse: Purse, has_texts: bool = False) -> dict:
    """Return a session's caps, dollars, conversations and failures as JSON.

    Args:
      has_texts: whether the steps have their texts, as far as these are recorded.
    """
    conversations = []
    for conversation in self._sessions.list_conversations("purse = ?", purse.id):
      steps = []
      for record in conversation.records:
        step = record.step
        fields = dict(model=self._names[step.model], cost_usd=step.spent_usd)
        if has_texts:
          fields |= dict(observation=step.observation, action=step.action)
        steps.append(fields | vars(step.calls[-1].usage))
      fields = dict(
        id=conversation.id,
        name=conversation.name,
        score=conversation.score,
        steps=steps,
      )
      conversations.append(vars(conversation.state) | fields)
    left = purse.remaining_caps
    select = (
      "SELECT at_s, model, kind, usd FROM attempts JOIN calls USING (id) "
      "WHERE purse = ? AND kind IN (?, ?)"
    )
    failures = [
      dict(at_s=at_s, model=self._names[model], outcome=outcome, cost_usd=usd)
      for at_s, model, outcome, usd in self._sessions.read(
        select, purse.id, PRESUMED, FAILED
      )
    ]
    return dict(
      id=purse.name,
      client=purse.client,
      usd_limit=purse.cap.usd,
      call_limit=purse.cap.calls,
      spent_usd=purse.dollars.settled_usd,
      large_calls=purse.large_calls,
      left_usd=left.usd,
      left_large_calls=left.calls,
      last_turn_usd=purse.aside_usd,
      in_flight=len(purse.open),
      changed_s=purse.changed_s,
      refusals=self._sessions.count_refusals(purse),
      conversations=conversations,
      failures=failures,
    )
