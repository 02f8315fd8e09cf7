"""One step of an episode in progress, and the Policy class."""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager

from baar_jax.episode import SMALL, Reply, Step
from baar_jax.llms.agent import Agent, Messages
from baar_jax.rollout.budget import BudgetSpent, CallBudget, DollarBudget, hold
from baar_jax.rollout.specs import Decision, Live, PolicySpec


@dataclasses.dataclass
class Purse:
  """The budgets that an episode's calls draw on."""

  calls: CallBudget
  dollars: DollarBudget
  run: DollarBudget | None = None  # of the whole run; None is no cap

  def hold(self, usd: float, replayed: bool = False) -> AbstractContextManager:
    """Reserve the most that a call can cost; see `budget.hold`."""
    return hold(self.dollars, self.run, usd, replayed)


@dataclasses.dataclass
class Turn:
  """A step in progress: the models that may be called, and the calls made so far."""

  live: Live
  agents: Sequence[Agent]  # one per model
  messages: Messages  # what they are shown
  purse: Purse
  code_actions: bool = False
  step: Step = dataclasses.field(init=False)
  allowed: list[int] = dataclasses.field(init=False)  # models, ascending

  def __post_init__(self) -> None:
    self.step = Step(self.live.observation, SMALL, "")
    self.allowed = self.affordable()

  @property
  def number(self) -> int:
    """Return how many steps came before."""
    return len(self.live.steps)

  def affordable(self, paid: int | None = None) -> list[int]:
    """List the models, ascending, whose next call fits the budgets whatever it costs.

    Args:
      paid: a model whose reply is there and paid for; it always fits.
    """
    models = []
    for model, player in enumerate(self.agents):
      fits = self.purse.calls.allows(model)
      limited = self.purse.dollars.limit_usd is not None
      if fits and limited and model != paid:  # counting tokens is slow
        fits = self.purse.dollars.allows(player.bound_usd(self.messages, self.number))
      if fits or model == paid:
        models.append(model)
    return models

  def decide(self) -> Generator[None, Decision, None]:
    """Wait for the policy's decision, if there is a choice; note it in the step."""
    if len(self.allowed) > 1:
      decision = yield
      self.step.model = decision.model
      self.step.logp = decision.logp
      self.step.router_cost_usd += decision.cost_usd
      self.step.router_latency_s += decision.latency_s

  def ask(self, call: Callable[[], Reply]) -> Reply | None:
    """Make a call that the decision needs; return its reply, which is paid for.

    If the budgets cannot pay for it, only SMALL is left to act, and None is returned.
    """
    try:
      reply = call()
    except BudgetSpent:
      self.allowed = [model for model in self.affordable() if model == SMALL]
      return None
    self.allowed = self.affordable(paid=reply.call.model)
    return reply

  def take(self, proposal: Reply | None = None) -> Reply | None:
    """Return the reply of the step's model, or of the nearest cheaper one allowed.

    Where none is cheaper, the cheapest allowed model replies. The step then names the
    model that replied; its `logp` is kept only if that was decided.

    Args:
      proposal: a reply for this step that is there and paid for.

    Returns:
      The reply; None if the budgets are spent.
    """
    model = self.step.model
    while self.allowed:
      cheaper = [other for other in self.allowed if other <= model]
      chosen = cheaper[-1] if cheaper else self.allowed[0]
      if chosen != self.step.model:
        self.step.model = chosen
        self.step.logp = None
      if proposal and chosen == proposal.call.model:
        return proposal
      self.purse.calls.reserve(chosen)
      try:
        return self.agents[chosen].reply(self.messages, self.number)
      except BudgetSpent:  # its attempts have spent what it needs
        self.purse.calls.settle(chosen, made=False)
      paid = proposal.call.model if proposal else None
      self.allowed = [m for m in self.affordable(paid) if m < chosen]
    return None


class Policy:
  """Chooses a model for each step of an episode.

  `choose` decides for all episodes that are ready at once. A policy that asks a model
  before it decides does so in `act`, in a worker thread.
  """

  cost_weights: Sequence[float] = ()  # of which an episode may name one

  def __init__(self, spec: PolicySpec):
    self.spec = spec

  def act(self, turn: Turn) -> Generator[None, Decision, Reply | None]:
    """Play a step up to the reply to act on; each `yield` waits for a decision.

    Returns:
      The reply; None if the episode's budgets are spent.
    """
    yield from turn.decide()
    return turn.take()

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decide for episodes; a turn replaces a model that a budget forbids."""
    raise NotImplementedError

  def finish(self, live: Live) -> None:
    """Free what is kept of an episode that ended or starts again: here nothing."""

  def compile(self) -> None:
    """Compile what decisions run, so that none waits for it: here nothing."""


class RulePolicy(Policy):
  """Decides by a rule: a function of the episode and the policy's parameters."""

  def __init__(self, spec: PolicySpec, rule: Callable[[Live, PolicySpec], int]):
    super().__init__(spec)
    self._rule = rule

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decide by the rule, for each episode by itself."""
    return [Decision(self._rule(live, self.spec)) for live in ready]
