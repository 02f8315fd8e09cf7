"""A live episode: what a policy sees of it, and what it answers."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from baar_jax.envs.base import Env
from baar_jax.episode import SMALL, Step, Task
from baar_jax.llms import agent
from baar_jax.rollout.budget import CallBudget, DollarBudget, Purse


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


@dataclasses.dataclass(eq=False)
class Live:
  """A live episode: all that a policy may look at, and what the loop keeps beside it.

  A policy decides from task, steps, observation, call_budget, usd_budget, and what it has prepared.
  `agents` are for the privileged oracle policy and for a cascade's proposals.
  """

  job: Job
  env: Env
  call_budget: int | None
  budget: CallBudget | None
  usd_budget: float | None = None
  dollars: DollarBudget | None = None
  bounds_usd: Sequence[float] = ()  # the most that each model's call may cost, where it matters
  purse: Purse = Purse()  # what its calls are paid from
  agents: Sequence[agent.Agent] = ()
  forced: bool = False  # whether SMALL has to take the step to come: the policy found no money
  prepared_s: float = 0.0  # seconds that preparing the decision to come took
  proposal: agent.Reply | None = None  # of SMALL for the step to come, where a cascade asked for it
  advice: "Advice | None" = None  # of a model that was asked which one should act
  messages: agent.Messages = dataclasses.field(default_factory=list)
  steps: list[Step] = dataclasses.field(default_factory=list)
  observation: str = ""
  score: float = 0.0
  stop: str = ""
  restarts: int = 0

  @property
  def task(self) -> Task:
    return self.job.task

  @property
  def proposed(self) -> str | None:
    """The action that SMALL has proposed, empty if none can be read; None without a proposal."""
    if self.proposal is None:
      return None
    return agent.parse_action(self.proposal.text, self.env.code_actions) or ""


@dataclasses.dataclass(frozen=True)
class Advice:
  """What a model said about which one should act; its dollars and tokens are as in `Step`."""

  model: int
  judge_usd: float = 0.0
  judge_tokens: int = 0
  retry_usd: float = 0.0
  presumed_usd: float = 0.0


NO_ADVICE = Advice(SMALL)


class Policy(Protocol):
  """Chooses a model for each of the episodes that are ready.

  `name` is part of the episodes' key: it carries every parameter and checkpoint.
  """

  name: str

  def prepare(self, live: Live) -> None:
    """Asks models for what the next decision needs: `live.proposal` or `live.advice`.

    Called in a worker thread before an episode is ready, unless a budget leaves it no choice. May
    raise what `Agent.reply` does.
    """

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """One decision per episode, each of a model that the episode's budget allows."""

  def finish(self, live: Live) -> None:
    """Forgets an episode that ended or starts again."""
