"""A live episode: what a policy sees of it, and what it answers."""

import dataclasses
import functools
from collections.abc import Sequence

from baar_jax.envs.base import Env
from baar_jax.episode import Call, Reply, Step, Task
from baar_jax.llms import agent
from baar_jax.rollout.budget import CallBudget, DollarBudget, hold


@dataclasses.dataclass(frozen=True)
class Job:
  """An episode to be run."""

  task: Task
  seed: int


@dataclasses.dataclass(frozen=True)
class Decision:
  """A policy's choice: the model, its log-probability if sampled, and what deciding cost."""

  model: int
  logp: float | None = None
  cost_usd: float = 0.0
  latency_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class JudgeReply:
  """What a model answered that was asked which one should act, the calls, and their seconds."""

  model: int
  calls: list[Call]
  latency_s: float = 0.0


@dataclasses.dataclass(eq=False)
class Live:
  """An episode that is being run.

  A policy decides from `task`, `steps`, `observation`, `call_limit`, `usd_limit` and what its
  `prepare` has left. `agents` are for the privileged oracle and for a cascade's proposals.
  """

  job: Job
  env: Env  # runs this episode alone
  call_budget: CallBudget | None = None  # None is no cap, also below
  dollar_budget: DollarBudget | None = None
  run_budget: DollarBudget | None = None
  restarts: int = 0  # how often it began again because its environment died
  agents: Sequence[agent.Agent] = ()  # one per model
  messages: agent.Messages = dataclasses.field(default_factory=list)  # what the agents are shown
  steps: list[Step] = dataclasses.field(default_factory=list)
  observation: str = ""
  allowed: Sequence[int] = ()  # models whose next call fits, ascending; none ends the episode
  proposal_reply: Reply | None = None  # SMALL's, to a cascade for the next step; it is paid for
  judged: JudgeReply | None = None  # a judge's answer for the next step
  stop: str = ""  # with `score`, set when the episode is over
  score: float = 0.0

  @property
  def task(self) -> Task:
    return self.job.task

  @property
  def call_limit(self) -> int | None:
    return self.call_budget and self.call_budget.limit

  @property
  def usd_limit(self) -> float | None:
    return self.dollar_budget and self.dollar_budget.limit_usd

  @property
  def proposed(self) -> str | None:
    """The action that SMALL has proposed, empty if none can be read; None without a proposal."""
    if self.proposal_reply is None:
      return None
    return agent.parse_action(self.proposal_reply.text, self.env.code_actions) or ""

  @property
  def hold(self) -> agent.Hold:
    """`budget.hold` on the budgets of this episode and of the run."""
    return functools.partial(hold, self.dollar_budget, self.run_budget)


class Policy:
  """Chooses a model for each of the episodes that are ready.

  `name` is part of the episodes' key: it carries every parameter and checkpoint.
  """

  name: str

  def prepare(self, live: Live) -> None:
    """Asks models for what the next decision needs. By default nothing is needed.

    It sets `live.proposal_reply` or `live.judged`. Called in a worker thread before an episode is
    ready, unless a budget leaves it no choice. May raise what `Agent.reply` does.
    """

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """One decision per episode; a model that a budget forbids gives way to a cheaper one."""
    raise NotImplementedError

  def finish(self, live: Live) -> None:
    """Forgets an episode that ended or starts again. By default nothing was kept."""
