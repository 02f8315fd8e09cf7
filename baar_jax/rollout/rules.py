"""Define the interface of policies, one step of an episode, and policies by rule.

An agent is a model in one episode: it answers the conversation so far, and it knows the
worst case of its next call (llms/history.py). `Policy.act` plays a step up to the
agent's reply. `StepContext` keeps it within the budgets (paper Eq. 9).
"""

import dataclasses
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from baar_jax.envs.base import ERROR_WORDS
from baar_jax.episode import SMALL, Reply, Step
from baar_jax.llms.history import Agent, Messages
from baar_jax.rollout.budget import BudgetSpent, CallBudget, DollarBudget, reserve
from baar_jax.rollout.specs import Decision, Live, PolicySpec


@dataclasses.dataclass
class EpisodeBudgets:
  """The budgets that limit an episode's calls.

  Attributes:
    calls: the episode's budget of calls.
    dollars: the episode's budget in dollars.
    run: the budget of the whole run in dollars; None is no cap.
  """

  calls: CallBudget
  dollars: DollarBudget
  run: DollarBudget | None = None

  def reserve(self, usd: float, replayed: bool = False) -> AbstractContextManager:
    """Reserve the worst case of a call in the dollar budgets; see `budget.reserve`."""
    return reserve(self.dollars, self.run, usd, replayed)


Draft = Step | None  # See `Live.draft`.


class Move(NamedTuple):
  """A decision, and the reply of the decided model."""

  decision: Decision
  reply: Reply


@dataclasses.dataclass
class StepContext:
  """Give a policy what it needs to play one step of a live episode.

  Attributes:
    live: the policy's view of the episode.
    agents: one agent for each model, the cheapest first.
    messages: the conversation so far, the agents' prompt.
    budgets: the budgets of the episode's calls.
    code_actions: whether the environment's actions are code.
    allowed: indices of the models whose call fits the budgets, ascending.
  """

  live: Live
  agents: Sequence[Agent]
  messages: Messages
  budgets: EpisodeBudgets
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
      fits = self.budgets.calls.allows(model)
      has_cap = self.budgets.dollars.limit_usd is not None
      # The worst case is computed only if there is a cap on dollars, because the
      # computation is slow.
      if fits and has_cap and model != paid_model:
        fits = self.budgets.dollars.allows(agent.bound_usd(self.messages, self.number))
      if fits or model == paid_model:
        models.append(model)
    return models

  def decide(self, draft: Draft = None) -> Generator[Draft, Decision, Decision]:
    """Wait for the policy's decision.

    If the budgets allow at most one model, nobody has to decide.

    Args:
      draft: see `Live.draft`.
    """
    if len(self.allowed) > 1:
      return (yield draft)
    return Decision(SMALL)

  def ask(self, call: Callable[[], Reply]) -> Reply | None:
    """Make a call that the decision needs, such as a judge's answer.

    Args:
      call: function that makes the call and pays for it.

    Returns:
      The reply; None if the call does not fit the budgets, and then only SMALL may act.
    """
    try:
      reply = call()
    except BudgetSpent:
      self.allowed = [model for model in self.affordable() if model == SMALL]
      return None
    self.allowed = self.affordable(reply.call.model)
    return reply

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
      self.budgets.calls.reserve(chosen)
      try:
        return Move(decision, self.agents[chosen].reply(self.messages, self.number))
      except BudgetSpent:
        # The model brought no reply: its failed attempts cost dollars, and too few
        # dollars remain for another attempt. So the reserved LARGE call is given back.
        self.budgets.calls.settle(chosen, is_called=False)
      paid_model = paid.call.model if paid else None
      self.allowed = [m for m in self.affordable(paid_model) if m < chosen]
    return None


class Policy:
  """Choose a model for each step of an episode.

  `choose` decides for all ready episodes at once, in the loop's thread. `act` plays one
  step of one episode in a worker thread. It may call models before the decision.

  Attributes:
    cost_weights: the cost weights from which a client may choose for its episode; empty
      if the policy has no such choice.
    spec: the policy's specification.
  """

  cost_weights: Sequence[float] = ()

  def __init__(self, spec: PolicySpec):
    """Make a policy from its specification."""
    self.spec = spec

  def act(self, context: StepContext) -> Generator[Draft, Decision, Move | None]:
    """Play a step up to the reply to act on.

    The generator yields the episode's `draft` when `choose` must decide, and receives
    the decision.

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


def take_small(live: Live, spec: PolicySpec) -> int:
  """Choose SMALL (paper: always-small)."""
  return SMALL


def take_large(live: Live, spec: PolicySpec) -> int:
  """Choose LARGE (paper: always-large).

  Under a cap on calls, SMALL acts once the cap is spent, so this rule is First-Large.
  """
  return live.models - 1


def take_large_after_failure(live: Live, spec: PolicySpec) -> int:
  """Choose LARGE right after a failure, otherwise SMALL (our choice).

  A failure is a word of `ERROR_WORDS` in the first line of the last observation.
  """
  if live.steps and ERROR_WORDS.search(live.observation.partition("\n")[0]):
    return live.models - 1
  return SMALL


def take_rank(live: Live, spec: PolicySpec) -> int:
  """Choose the model of a fixed rank, counted from 1 (our choice)."""
  return spec.rank - 1


def take_randomly(live: Live, spec: PolicySpec) -> int:
  """Choose a random model costlier than SMALL with probability p, otherwise SMALL."""
  return draw_model(live, spec.p)


def draw_model(live: Live, p: float) -> int:
  """Draw a model costlier than SMALL with probability p, otherwise SMALL.

  All models costlier than SMALL are equally probable. The draw depends only on task,
  seed and step (our choice).
  """
  draw = random.Random(f"random|{live.task.id}|{live.job.seed}|{len(live.steps)}")
  return draw.choice(range(1, live.models)) if draw.random() < p else SMALL


def take_sampled(live: Live, spec: PolicySpec) -> int:
  """Choose the model by the sampling plan to which the trial belongs.

  The trials of a task are numbered through all plans, one plan after the other. Trial k
  of a plan's N trials chooses as follows:

  - Plan "samples": LARGE with probability k / N at each step (paper: stratified
    sampling).
  - Plan "steps": a counter counts the steps so far. If k is odd, LARGE acts until the
    counter reaches k / (2 N) of the task's `max_steps`, and SMALL acts afterwards. If k
    is even, SMALL acts first and LARGE afterwards.
  - Plan "repeats": the same, but the counter counts repeated observations.

  The last two plans are our choice. From these plans the value heads learn the effect
  of spending early, of spending late or giving up, and of spending once observations
  repeat. With more than two models, a random model costlier than SMALL takes LARGE's
  place.
  """
  k = live.job.trial
  for plan in spec.plans:
    if k <= plan.count:
      break
    k -= plan.count
  if plan.kind == "samples":
    return draw_model(live, k / plan.count)
  clock = len(live.steps)
  if plan.kind == "repeats":
    observations = [*(step.observation for step in live.steps), live.observation]
    clock = len(observations) - len(set(observations))
  is_early = clock < k / (2 * plan.count) * live.task.max_steps
  return draw_model(live, float(is_early == k % 2))
