"""Task, Call, Step, Episode: the records that every stage reads and writes."""

import dataclasses
import json

SMALL, LARGE = 0, 1  # indices by price, of two models; the dearest of more is the last
DECISION_WORDS = (
  "SMALL",
  "BIG",
)  # in prompts and answers: the paper calls LARGE so there
# Of the tasks: to learn from, to choose by, and to measure on. A task is in one of them.
SPLITS = ("train", "dev", "test")


def decision_words(models: int) -> tuple[str, ...]:
  """What prompts and answers call the models: more than two go by their rank (our choice)."""
  return (
    DECISION_WORDS
    if models == 2
    else tuple(f"M{rank}" for rank in range(1, models + 1))
  )


@dataclasses.dataclass(frozen=True)
class Task:
  """One task of an environment."""

  id: str  # unique within the environment
  split: str  # one of SPLITS
  description: str  # what the agent is asked to do
  max_steps: int  # an episode ends after this many agent steps


@dataclasses.dataclass(frozen=True)
class Usage:
  """Tokens of one call; `cached_tokens` and `cache_write_tokens` are parts of `prompt_tokens`."""

  prompt_tokens: int
  cached_tokens: int
  completion_tokens: int
  cache_write_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of a model.

  Kinds: "act" is the reply that was acted on; "proposal" is a reply to a cascade that was not
  taken; "judge" is an answer that a zero-shot router decided by; "retry" was billed but
  useless; "presumed" may have been billed (a time-out, a lost connection), at most `cost_usd`.
  """

  model: int  # index, ordered by price (0 is SMALL); a judge comes after the others
  usage: Usage  # what was billed
  cost_usd: float  # whoever paid for it
  latency_s: float = 0.0  # seconds that the episode waited for the reply
  replayed: bool = False  # the reply was recorded before and is not paid for again
  kind: str = "act"


@dataclasses.dataclass(frozen=True)
class Reply:
  """A model's answer."""

  text: str
  call: Call  # that brought it, of kind "act"
  lost: tuple[Call, ...] = ()  # attempts before it, of kind "retry" or "presumed"

  def calls(self, kind: str) -> list[Call]:
    """All calls, in order; the one that brought the answer becomes of this kind."""
    return [*self.lost, dataclasses.replace(self.call, kind=kind)]


@dataclasses.dataclass
class Step:
  """One decision, the model calls that it led to, and the action."""

  observation: str  # what the agent saw before it acted
  model: int  # index of the model that acted
  action: str  # what was sent to the environment
  # All that were made for this step: the loop puts the newest first, the endpoint last.
  calls: list[Call] = dataclasses.field(default_factory=list)
  logp: float | None = (
    None  # of the decision, in nats; None where a budget or a rule made it
  )
  router_cost_usd: float = (
    0.0  # of the router's own computation, without a judge's calls
  )
  router_latency_s: float = 0.0  # seconds that the episode waited for the decision
  proposal: str | None = None  # what was proposed last before a cascade decided
  score: float | None = (
    None  # of the episode so far, after the action; None where it is not told
  )

  def usd(self, *kinds: str) -> float:
    """Dollars of the calls of these kinds."""
    return sum(call.cost_usd for call in self.calls if call.kind in kinds)

  @property
  def cost_usd(self) -> float:
    """Dollars of acts and of untaken proposals."""
    return self.usd("act", "proposal")

  @property
  def large_calls(self) -> int:
    """Calls of any model dearer than SMALL (with more than two models: our choice)."""
    untaken = sum(
      call.kind == "proposal" and call.model != SMALL for call in self.calls
    )
    return (self.model != SMALL) + untaken

  @property
  def spent_usd(self) -> float:
    """The most that all calls of this step can have been billed for."""
    return sum(call.cost_usd for call in self.calls)


@dataclasses.dataclass
class Episode:
  """One run of a policy on a task; task_id, policy and seed are its key."""

  task_id: str
  policy: str
  seed: int
  steps: list[Step]
  score: float  # in [0, 1]
  stop: str  # "done", "max_steps", "budget" or "error:<what>"
  call_budget: int | None = None  # cap on large calls it ran under; None is no cap
  usd_budget: float | None = None  # cap on dollars it ran under, B_max; None is no cap
  reused: bool = False  # it equals another policy's episode and was not run again
  # Dollars that are in no step: of attempts that left too little for the call that they were for.
  lost_usd: float = 0.0

  @property
  def success(self) -> bool:
    return self.score >= 1

  @property
  def cost_usd(self) -> float:
    """Dollars of acts and of untaken proposals."""
    return sum(step.cost_usd for step in self.steps)

  @property
  def spent_usd(self) -> float:
    """The most that the models can have billed for it: what `usd_budget` caps."""
    return sum(step.spent_usd for step in self.steps) + self.lost_usd

  @property
  def large_calls(self) -> int:
    """Calls of any model dearer than SMALL: what `call_budget` caps."""
    return sum(step.large_calls for step in self.steps)

  def to_json(self) -> str:
    return json.dumps(self, default=vars, ensure_ascii=False, separators=(",", ":"))
