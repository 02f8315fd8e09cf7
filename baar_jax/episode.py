"""Task, Call, Step, Episode: the records that every stage reads and writes."""

import dataclasses
import json

# Two models have these indices, by price. Of more, the costliest is the last.
SMALL = 0
LARGE = 1
# Training tasks, validation tasks and held-out tests. A task is in one split.
SPLITS = ("train", "dev", "test")


def decision_words(models: int) -> tuple[str, ...]:
  """Choose the words for the models in prompts and answers.

  The paper calls LARGE "BIG" there. More than two models go by rank (our choice).
  """
  if models == 2:
    return ("SMALL", "BIG")
  return tuple(f"M{rank}" for rank in range(1, models + 1))


@dataclasses.dataclass(frozen=True)
class Task:
  """One task of an environment."""

  id: str  # unique within the environment
  split: str  # one of SPLITS
  description: str  # the agent's instruction
  max_steps: int  # an episode ends after this number of agent steps


@dataclasses.dataclass(frozen=True)
class Usage:
  """The tokens of one call.

  `cached_tokens` and `cache_write_tokens` are parts of `prompt_tokens`.
  """

  prompt_tokens: int
  cached_tokens: int
  completion_tokens: int
  cache_write_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of a model.

  Kinds:
    act: the agent acted on the reply.
    proposal: a cascade did not take the reply.
    judge: a zero-shot router decided by the answer.
    retry: the call was billed but useless.
    presumed: a time-out or a lost connection may have been billed, up to `cost_usd`.
  """

  model: int  # index by price (0 is SMALL); a judge comes after the others
  usage: Usage  # the billed tokens
  cost_usd: float  # also if a replayed reply cost nothing now
  latency_s: float = 0.0  # seconds that the episode waited for the reply
  replayed: bool = False  # the reply was recorded before and is not paid for again
  kind: str = "act"


@dataclasses.dataclass(frozen=True)
class Reply:
  """A model's answer."""

  text: str
  call: Call  # the call with the answer, of kind "act"
  lost: tuple[Call, ...] = ()  # attempts before it, of kind "retry" or "presumed"

  def calls(self, kind: str) -> list[Call]:
    """Collect all calls, in order. The one with the answer gets this kind."""
    return [*self.lost, dataclasses.replace(self.call, kind=kind)]


@dataclasses.dataclass
class Step:
  """One decision, its model calls, and the action."""

  observation: str  # the agent saw it before it acted
  model: int  # index of the model that acted
  action: str  # sent to the environment
  # All calls for this step: the loop puts the newest first, the endpoint last.
  calls: list[Call] = dataclasses.field(default_factory=list)
  # Log-probability of the decision, in nats; None if a budget or a rule decided.
  logp: float | None = None
  router_cost_usd: float = 0.0  # the router's own computation, without a judge's calls
  router_latency_s: float = 0.0  # seconds that the episode waited for the decision
  proposal: str | None = None  # the last proposal before a cascade decided
  # Score of the episode after the action; None if the environment tells it at the end.
  score: float | None = None

  def usd(self, *kinds: str) -> float:
    """Add up the dollars of the calls of these kinds."""
    return sum(call.cost_usd for call in self.calls if call.kind in kinds)

  @property
  def cost_usd(self) -> float:
    """Add up the dollars of acts and of untaken proposals."""
    return self.usd("act", "proposal")

  @property
  def large_calls(self) -> int:
    """Count the calls of models costlier than SMALL (of more than two: our choice)."""
    large_calls = int(self.model != SMALL)
    for call in self.calls:
      large_calls += call.kind == "proposal" and call.model != SMALL
    return large_calls

  @property
  def spent_usd(self) -> float:
    """Add up the dollars of all calls: an upper bound of the step's bill."""
    return sum(call.cost_usd for call in self.calls)


@dataclasses.dataclass
class Episode:
  """One run of a policy on a task; (task_id, policy, seed) is its key."""

  task_id: str
  policy: str
  seed: int
  steps: list[Step]
  score: float  # in [0, 1]
  stop: str  # "done", "max_steps" or "budget"
  call_budget: int | None = None  # cap on large calls; None is no cap
  usd_budget: float | None = None  # cap on dollars (B_max); None is no cap
  reused: bool = False  # it equals another policy's episode and was not run again
  # Dollars in no step: failed attempts left too little for the call itself.
  lost_usd: float = 0.0

  @property
  def success(self) -> bool:
    """Tell whether the score is full."""
    return self.score >= 1

  @property
  def cost_usd(self) -> float:
    """Add up the dollars of acts and of untaken proposals."""
    return sum(step.cost_usd for step in self.steps)

  @property
  def spent_usd(self) -> float:
    """Add up the dollars of all calls, which `usd_budget` caps."""
    return sum(step.spent_usd for step in self.steps) + self.lost_usd

  @property
  def large_calls(self) -> int:
    """Count the calls of models costlier than SMALL, which `call_budget` caps."""
    return sum(step.large_calls for step in self.steps)

  def to_json(self) -> str:
    """Write the episode as JSON."""
    return json.dumps(self, default=vars, ensure_ascii=False, separators=(",", ":"))
