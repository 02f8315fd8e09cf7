"""Define the records that every stage reads and writes: Task, Call, Step, Episode.

An episode is a task that a policy plays once. At each of its steps the policy decides
which model acts, and the calls of the step are what the decision cost.
"""

import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

# Indices of models by price, the cheapest first. The constant LARGE is right for two
# models only. With more models, LARGE is the last one.
SMALL = 0
LARGE = 1
# The splits of tasks: for training, for validation, and for held-out tests. No task is
# in two splits.
SPLITS = ("train", "dev", "test")
# What an episode is played for.
Purpose = Literal[
  "profile", "reference", "exploration", "dev", "test", "robustness", "rollout"
]
Key = tuple[str, Purpose, int]  # task, purpose and trial of an episode
# The kinds of outcomes of an attempt at a call, as they are stored.
REPLY = "reply"  # a usable reply
RETRY = "retry"  # billed, but without a usable reply
PRESUMED = "presumed"  # perhaps billed; counts at its worst case
FAILED = "failed"  # not billed


@dataclasses.dataclass(frozen=True)
class Task:
  """One task of an environment.

  Attributes:
    id: unique within the environment.
    split: one of `SPLITS`.
    description: the agent's instruction.
    max_steps: an episode ends after this number of steps.
  """

  id: str
  split: str
  description: str
  max_steps: int


@dataclasses.dataclass(frozen=True)
class Usage:
  """The tokens of one call.

  Attributes:
    prompt_tokens: all tokens of the prompt.
    cached_tokens: tokens of the prompt that were read from the prompt cache.
    completion_tokens: the tokens of the reply, reasoning included.
    cache_write_tokens: tokens of the prompt that were written to the prompt cache.
    hour_write_tokens: those of them that were written for an hour.
  """

  prompt_tokens: int
  cached_tokens: int
  completion_tokens: int
  cache_write_tokens: int = 0
  hour_write_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of a model.

  Attributes:
    model: index of the model by price; 0 is SMALL. The index of a judge is the number
      of models to route between.
    usage: the billed tokens.
    cost_usd: the method's dollars of the call, also if the reply is replayed.
    latency_s: seconds that the episode waited for the reply. No report has them; the
      paper computes latency from token rates.
    replayed: whether the reply was recorded before, so that the provider is not paid.
    kind: "act" if the agent acted on the reply;
      "proposal" if a cascade asked for the reply but did not take it;
      "judge" if a zero-shot router asked which model to choose;
      "retry" if the attempt was billed and brought no usable reply;
      "presumed" if the attempt's outcome is unknown; `cost_usd` is its worst case.
    billed_usd: dollars that the provider bills, if they differ from `cost_usd` because
      of `models.prompt_cache=False`; None if they do not.
  """

  model: int
  usage: Usage
  cost_usd: float
  latency_s: float = 0.0
  replayed: bool = False
  kind: str = "act"
  billed_usd: float | None = None

  @property
  def spent_usd(self) -> float:
    """Return the dollars that the provider bills."""
    return self.cost_usd if self.billed_usd is None else self.billed_usd


@dataclasses.dataclass
class Cost:
  """The cost of a call; the caller sets it before the call's reservation closes.

  Attributes:
    usd: the method's dollars, which the cap of a task counts.
    billed_usd: the provider's dollars, which the cap of the run counts; None if they
      are the same.
  """

  usd: float = 0.0
  billed_usd: float | None = None


# The type of functions reserve(usd, replayed=False). Such a function returns a context
# manager, which reserves the worst case `usd` of a call in the budgets. When the call
# has ended, the context manager settles the Cost that the call has set.
# `rollout.budget.reserve` is one implementation.
Reserve = Callable[..., AbstractContextManager]


@dataclasses.dataclass(frozen=True)
class Reply:
  """A model's reply, with its calls.

  Attributes:
    text: the text of the reply.
    call: the call that brought the reply, of kind "act".
    lost: earlier attempts without a reply, of kind "retry" or "presumed".
  """

  text: str
  call: Call
  lost: tuple[Call, ...] = ()

  def calls(self, kind: str) -> list[Call]:
    """Collect all calls for the reply, in order.

    Args:
      kind: the kind to give the call that brought the reply.
    """
    return [*self.lost, dataclasses.replace(self.call, kind=kind)]


@dataclasses.dataclass
class Step:
  """One step of an episode: the observation, the decision, its calls and the action.

  Attributes:
    observation: the observation before the action.
    model: index of the model that acted.
    action: the action, as sent to the environment; "" if the reply had none.
    calls: all calls of the step. The calls of the model that acted come first: failed
      attempts, then the reply. The calls of other models follow.
    logp: log-probability of the decision, in nats; None if a budget or a rule decided.
    router_cost_usd: dollars of the router's computation, without the calls of a judge.
    router_latency_s: seconds that the episode waited for the decision.
    proposal: the last action that a model proposed in a cascade; None if no action was
      proposed.
    score: the score after the action; None if the environment has no score per step.
    started_s: seconds on a clock when the step began, of which only differences count;
      None in runs that play tasks, whose time is simulated.
  """

  observation: str
  model: int
  action: str
  calls: list[Call] = dataclasses.field(default_factory=list)
  logp: float | None = None
  router_cost_usd: float = 0.0
  router_latency_s: float = 0.0
  proposal: str | None = None
  score: float | None = None
  started_s: float | None = None

  def usd(self, *kinds: str) -> float:
    """Add up the dollars of the step's calls of the given kinds."""
    return sum(call.cost_usd for call in self.calls if call.kind in kinds)

  @property
  def cost_usd(self) -> float:
    """Return the dollars of the calls that act and of proposals (paper: c(a_t))."""
    return self.usd("act", "proposal")

  @property
  def large_calls(self) -> int:
    """Return the number of calls of models costlier than SMALL.

    The number includes proposals that were not taken. With more than two models, calls
    of intermediate models count as well (our choice).
    """
    large_calls = int(self.model != SMALL)
    for call in self.calls:
      large_calls += call.kind == "proposal" and call.model != SMALL
    return large_calls

  @property
  def counted_usd(self) -> float:
    """Return the method's dollars of all calls, which the cap of a task counts."""
    return sum(call.cost_usd for call in self.calls)

  @property
  def spent_usd(self) -> float:
    """Return the billed dollars of all calls."""
    return sum(call.spent_usd for call in self.calls)


@dataclasses.dataclass
class Episode:
  """One episode: a policy plays a task once.

  Attributes:
    task_id: the task.
    policy: the key of the policy; see `PolicySpec.key`.
    purpose: what the episode is played for.
    trial: the number of the trial; see `Job`.
    steps: the steps, in order.
    score: the result, in [0, 1].
    stop: why the episode ended: "done" (the environment or client ended it),
      "max_steps", or "budget" (no model was affordable).
    call_budget: cap on the calls of models costlier than SMALL; None is no cap.
    usd_budget: cap on the method's dollars of all calls and failed attempts (B_max);
      None is no cap.
    lost_usd: dollars of failed attempts at calls that no step contains.
    success_score: the lowest score of a success; see Env.success_score.
  """

  task_id: str
  policy: str
  purpose: Purpose
  trial: int
  steps: list[Step]
  score: float
  stop: str
  call_budget: int | None = None
  usd_budget: float | None = None
  lost_usd: float = 0.0
  success_score: float = 1.0

  @property
  def key(self) -> Key:
    """Return task, purpose and trial, which no other episode of its policy has."""
    return self.task_id, self.purpose, self.trial

  @property
  def success(self) -> bool:
    """Tell whether the episode's score counts as a success."""
    return self.score >= self.success_score

  @property
  def cost_usd(self) -> float:
    """Return the cost of all steps in dollars (paper: C(tau)).

    It leaves out failed attempts and the answers of a judge, which `spent_usd` has.
    """
    return sum(step.cost_usd for step in self.steps)

  @property
  def spent_usd(self) -> float:
    """Return the billed dollars of all calls and failed attempts."""
    return sum(step.spent_usd for step in self.steps) + self.lost_usd

  @property
  def large_calls(self) -> int:
    """Return the number of calls of models costlier than SMALL; see `call_budget`."""
    return sum(step.large_calls for step in self.steps)

  def to_json(self) -> str:
    """Write the episode as JSON."""
    return json.dumps(self, default=vars, ensure_ascii=False, separators=(",", ":"))
