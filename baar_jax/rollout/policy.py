"""Define the interface of policies, and one step of an episode.

An agent is a model in one episode: it answers the conversation so far, and it knows the
worst case of its next call (llms/history.py). `Policy.play` plays a step up to the
agent's reply. `StepContext` keeps it within the budgets (paper Eq. 9).
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from baar_jax.episode import SMALL, Reply, Reserve
from baar_jax.llms.history import Agent, Messages
from baar_jax.rollout.budget import BudgetSpent, CallBudget, DollarBudget
from baar_jax.rollout.specs import Decision, Live, PolicySpec


class Move(NamedTuple):
  """A decision, and the reply of the decided model."""

  decision: Decision
  reply: Reply

  def pay(self, other: Reply, kind: str) -> "Move":
    """Add the calls of another reply that the decision needed, as calls of a kind."""
    calls = [*other.calls(kind), *self.decision.calls]
    return self._replace(decision=self.decision._replace(calls=calls))


@dataclasses.dataclass
class StepContext:
  """Give a policy what it needs to play one step of a live episode.

  Attributes:
    live: the policy's view of the episode.
    agents: one agent for each model, the cheapest first.
    messages: the conversation so far, the agents' prompt.
    calls: the episode's budget of calls.
    dollars: the episode's budget in dollars.
    reserve: reserves the worst case of a call in `dollars` and in the run's budget.
    code_actions: whether the environment's actions are code.
    allowed: indices of the models whose call fits the budgets, ascending.
  """

  live: Live
  agents: Sequence[Agent]
  messages: Messages
  calls: CallBudget
  dollars: DollarBudget
  reserve: Reserve
  code_actions: bool = False

  def __post_init__(self) -> None:
    """List the affordable models."""
    self.allowed = self.affordable()

  @property
  def number(self) -> int:
    """Return the index of this step, from 0."""
    return len(self.live.steps)

  def affordable(self, paid_model: int | None = None) -> list[int]:
    """List the models whose next call fits the budgets in its worst case.

    Args:
      paid_model: a model whose reply for this step is already paid for. It always
        fits.

    Returns:
      Indices of the models, ascending.
    """
    models = []
    for model, agent in enumerate(self.agents):
      fits = self.calls.allows(model)
      has_cap = self.dollars.limit_usd is not None
      # The worst case is computed only if there is a cap on dollars, because the
      # computation is slow.
      if fits and has_cap and model != paid_model:
        fits = self.dollars.allows(agent.bound_usd(self.messages, self.number))
      if fits or model == paid_model:
        models.append(model)
    return models

  def ask(self, agent: Agent, messages: Messages) -> Reply | None:
    """Make a call that the decision needs, such as a judge's answer.

    Args:
      agent: the model to ask.
      messages: its prompt.

    Returns:
      The reply; None if the call does not fit the budgets, and then only SMALL may act.
    """
    try:
      reply = agent.reply(messages, self.number)
    except BudgetSpent:
      self.allowed = [model for model in self.affordable() if model == SMALL]
      return None
    self.allowed = self.affordable(reply.call.model)
    return reply

  def decide(self) -> Generator[None, Decision, Decision]:
    """Wait for a decision, unless the budgets allow at most one model."""
    if len(self.allowed) > 1:
      return (yield)
    return Decision(SMALL)

  def take(self, decision: Decision, paid: Reply | None = None) -> Move | None:
    """Get the reply to act on, from the decided model if the budgets allow it.

    If they forbid it, another model replies; see `Decision.within`. Eq. 9 forbids LARGE
    alone; a cap on dollars may forbid SMALL, too, and end the episode (our choice).

    Args:
      decision: the policy's decision.
      paid: a model's reply for this step that is already paid for. If that model is to
        act, its reply is used without a new call.

    Returns:
      The reply, with the decision for the model that replied; None if the budgets allow
      no model.
    """
    while self.allowed:
      decision = decision.within(self.allowed)
      chosen = decision.model
      if paid and chosen == paid.call.model:
        return Move(decision, paid)
      reservation = self.calls.reserve(chosen)
      try:
        reply = self.agents[chosen].reply(self.messages, self.number)
      except BudgetSpent:
        # The model brought no reply: its failed attempts cost dollars, and too few
        # dollars remain for another attempt. So the reserved LARGE call is given back.
        self.calls.settle(reservation, SMALL)
      else:
        self.calls.settle(reservation, chosen)
        return Move(decision, reply)
      paid_model = paid.call.model if paid else None
      self.allowed = [m for m in self.affordable(paid_model) if m < chosen]
    return None


class Policy:
  """Choose a model for each step of an episode.

  `choose` decides for all ready episodes at once, in the loop's thread.

  Attributes:
    cost_weight: the cost weight of an episode that names none; None if the policy has
      no cost weight.
    cost_weights: the cost weights from which a client may choose for its episode; empty
      if the policy has no such choice.
    is_quick: whether a decision takes less time than a change of threads.
    spec: the policy's specification.
  """

  cost_weight: float | None = None
  cost_weights: Sequence[float] = ()
  is_quick = False

  def __init__(self, spec: PolicySpec):
    """Make a policy from its specification."""
    self.spec = spec

  def play(self, context: StepContext) -> Generator[None, Decision, Move | None]:
    """Play a step up to the reply to act on.

    By default a policy decides once. The generator yields when `choose` must decide,
    and receives the decision.

    Returns:
      The decision and the reply; None if the episode's budgets allow no model.
    """
    decision = yield from context.decide()
    return context.take(decision)

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Choose a model for each episode that waits for a decision.

    A decision may name a model that a budget forbids; see `Decision.within`.
    """
    raise NotImplementedError

  def finish(self, live: Live) -> None:
    """Free what the policy stores for an episode that ended or restarts.

    By default a policy stores nothing.
    """

  def compile(self) -> None:
    """Compile the computation of decisions before the first episode.

    By default there is nothing to compile.
    """


# A function that makes a policy from its specification.
Build = Callable[[PolicySpec], Policy]


class RulePolicy(Policy):
  """Choose a model by a rule, a function of the episode and the policy's parameters."""

  def __init__(self, spec: PolicySpec, rule: Callable[[Live, PolicySpec], int]):
    """Make a policy from its specification and a rule.

    Args:
      spec: the policy's specification.
      rule: function of an episode and the specification; returns a model's index.
    """
    super().__init__(spec)
    self._rule = rule

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Choose the model of each episode by the rule."""
    return [Decision(self._rule(live, self.spec)) for live in ready]
