"""A live episode, what a policy answers to it, and the policies that need no training."""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from baar_jax.config import REFERENCE_SEEDS
from baar_jax.envs.base import Env
from baar_jax.episode import SMALL, Call, Reply, Step, Task
from baar_jax.llms import agent
from baar_jax.rollout.budget import CallBudget, DollarBudget, hold
from baar_jax.rollout.entries import ALWAYS, ALWAYS_LARGE, ALWAYS_SMALL, FIRST_LARGE, Entry


@dataclasses.dataclass(frozen=True)
class Job:
  """An episode to be run."""

  task: Task
  seed: int


@dataclasses.dataclass(frozen=True)
class Decision:
  """The choice of a model, its log-probability if sampled, and what deciding took."""

  model: int
  logp: float | None = None
  cost_usd: float = 0.0
  latency_s: float = 0.0
  calls: Sequence[Call] = ()  # of a judge that was asked, or for proposals that were passed over
  p_A: Sequence[float] = ()  # the router's probability of each model, where it has some


@dataclasses.dataclass(eq=False)
class Live:
  """An episode that is being run.

  A policy decides from `task`, `steps`, `observation`, `call_limit`, `usd_limit` and what its
  `prepare` has left. `agents` are for the privileged rule and for a cascade's proposals.
  """

  job: Job
  env: Env  # runs this episode alone
  call_budget: CallBudget = dataclasses.field(default_factory=lambda: CallBudget(None))
  dollar_budget: DollarBudget | None = None  # None is no cap, also below
  run_budget: DollarBudget | None = None
  price: float | None = None  # of a dollar, of the policy's prices; None is the least of them
  restarts: int = 0  # how often it was run again because its environment died
  agents: Sequence[agent.Agent] = ()  # one per model
  messages: agent.Messages = dataclasses.field(default_factory=list)  # what the agents are shown
  steps: list[Step] = dataclasses.field(default_factory=list)
  observation: str = ""
  allowed: Sequence[int] = ()  # models whose next call fits, ascending; none ends the episode
  proposal_reply: Reply | None = None  # a cascade: the last for the next step; it is paid for
  # For the next step, with its calls: a judge's decision, or a cascade's to pass over proposals.
  judgement: Decision | None = None
  decision: Decision = Decision(SMALL)  # for the next step
  coroutine: Iterator[None] | None = None  # plays the episode; it yields where it needs a decision
  stop: str = ""  # as of `Episode`, once the episode is over
  error: BaseException | None = None  # the one that has ended the episode
  score: float = 0.0

  @property
  def task(self) -> Task:
    return self.job.task

  @property
  def call_limit(self) -> int | None:
    return self.call_budget.limit

  @property
  def usd_limit(self) -> float | None:
    return self.dollar_budget and self.dollar_budget.limit_usd

  @property
  def proposer(self) -> int:
    """The model of the last proposal, SMALL without one."""
    return self.proposal_reply.call.model if self.proposal_reply else SMALL

  @property
  def proposal(self) -> str | None:
    """The action that is proposed, empty if its reply has none; None without a proposal."""
    if self.proposal_reply is None:
      return None
    return agent.parse_action(self.proposal_reply.text, self.env.code_actions) or ""

  @property
  def hold(self) -> agent.Hold:
    """`budget.hold` on the budgets of this episode and of the run."""
    return functools.partial(hold, self.dollar_budget, self.run_budget)


class Policy:
  """Chooses a model for each episode that is ready: by a rule, unless a subclass does it."""

  prices: Sequence[float] = ()  # of a dollar, where it decides by the episode's

  def __init__(self, name: str, rule: Callable[[Live], int]):
    self.name = name  # part of the episodes' key: it carries every parameter and checkpoint
    self._rule = rule

  def prepare(self, live: Live) -> None:
    """Asks models for what the next decision needs; it may set `proposal_reply` or `judgement`.

    Called in a worker thread, unless a budget leaves no choice. May raise what `Agent.reply` does.
    """

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """One decision per episode; a model that a budget forbids gives way to a cheaper one."""
    return [Decision(self._rule(live)) for live in ready]

  def finish(self, live: Live) -> None:
    """Frees what is kept of an episode that ended or starts again: here nothing."""


def always(model: int, name: str) -> Policy:
  """The same model at every step."""
  return Policy(name, lambda live: model)


def random_rule(live: Live, p: float) -> int:
  """One of the models dearer than SMALL, evenly, with probability p, else SMALL (our choice).

  The draw depends on task, seed and step.
  """
  draw = random.Random(f"random|{live.task.id}|{live.job.seed}|{len(live.steps)}")
  return draw.choice(range(1, len(live.agents))) if draw.random() < p else SMALL


def stratified_rule(live: Live, samples: int) -> int:
  """LARGE with probability k / N at each step of episode k of N `samples` (paper)."""
  return random_rule(live, (live.job.seed - REFERENCE_SEEDS) / samples)


def together_rule(live: Live, samples: int) -> int:
  """LARGE at the first k / (2 N) of the task's steps, or for even k of N `samples` at all others.

  So what first-large does is among what the values learn from (our choice).
  """
  k = live.job.seed - REFERENCE_SEEDS
  early = len(live.steps) < k / (2 * samples) * live.task.max_steps
  return random_rule(live, float(early == k % 2))


def privileged_rule(live: Live, mu: float) -> int:
  """The model that gains the most over SMALL, where a dollar more costs `mu` of the task.

  It reads the scripted models' errors, which no router sees, so its sweep over `mu` bounds what
  routers can reach; it is no optimum, as it looks one step ahead (our choice). The gain is SMALL's
  loss minus a model's, as far as that knows the task: one that it cannot do is given up.
  """
  small, *dearer = (agent.prospect(live.messages, len(live.steps)) for agent in live.agents)
  gains = [m.known_share * (small.loss - m.loss) - mu * (m.usd - small.usd) for m in dearer]
  return int(np.argmax([0.0, *gains]))  # SMALL where none is better


def rule_policy(entry: Entry) -> Policy | None:
  """The policy of an entry that decides by one of these rules, else None."""
  rules = {
    ALWAYS_SMALL: lambda live: SMALL,
    ALWAYS_LARGE: lambda live: len(live.agents) - 1,
    ALWAYS: lambda live: entry.parameters["model"] - 1,
    FIRST_LARGE: lambda live: len(live.agents) - 1,  # as long as its budget allows
    "random": lambda live: random_rule(live, entry.parameters["p"]),
    "privileged": lambda live: privileged_rule(live, entry.parameters["mu"]),
  }
  return Policy(entry.policy, rules[entry.family]) if entry.family in rules else None
