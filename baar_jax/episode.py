"""Task, Step, Episode: the records that every stage reads and writes."""

import dataclasses
import json

SMALL = 0
DECISION_WORDS = ("SMALL", "BIG")  # the two models in prompts and answers


@dataclasses.dataclass(frozen=True)
class Task:
  """One task of an environment.

  Attributes:
    id: unique within the environment.
    split: "train", "dev" or "test".
    description: what the agent is asked to do.
    max_steps: an episode ends after this many agent steps.
  """

  id: str
  split: str
  description: str
  max_steps: int


@dataclasses.dataclass
class Step:
  """One model call and the action that came of it.

  Attributes:
    observation: what the agent saw before it acted.
    model: index of the model that acted, ordered by price (0 is SMALL).
    action: what was sent to the environment.
    cost_usd: dollars of the model call, whoever paid for it (see `replayed`).
    prompt_tokens, cached_tokens, completion_tokens: its usage; cached are part of prompt.
    cache_write_tokens: another part of prompt, where a provider bills it apart.
    retry_usd: dollars of attempts at the call that were billed and useless.
    presumed_usd: the most that attempts may have cost of which nobody knows whether they were
      billed: time-outs and lost connections.
    replayed: whether the reply had been recorded before, so that it was not paid for again.
    proposal: the action that SMALL proposed before a cascade decided; None without a cascade.
    proposal_usd: dollars of a proposal that was not taken.
    proposal_tokens: completion tokens of a proposal that was not taken.
    proposal_replayed: whether that one had been recorded before.
    judge_usd: dollars of the calls that a zero-shot router decided by.
    judge_tokens: their completion tokens.
    router_cost_usd: dollars of the routing decision, priced apart.
    latency_s: seconds of the models' calls, a proposal's among them.
    router_latency_s: seconds that the episode waited for the decision, a judge's among them.
    logp: log-probability of the decision in nats where a router chose; None where it was forced
      by a budget or made by a policy without probabilities.
  """

  observation: str
  model: int
  action: str
  cost_usd: float
  prompt_tokens: int
  cached_tokens: int
  completion_tokens: int
  router_cost_usd: float = 0.0
  latency_s: float = 0.0
  logp: float | None = None
  cache_write_tokens: int = 0
  retry_usd: float = 0.0
  presumed_usd: float = 0.0
  replayed: bool = False
  router_latency_s: float = 0.0
  proposal: str | None = None
  proposal_usd: float = 0.0
  proposal_replayed: bool = False
  judge_usd: float = 0.0
  proposal_tokens: int = 0
  judge_tokens: int = 0

  @property
  def calls_usd(self) -> float:
    """Dollars of the models that were asked for an action, retries apart."""
    return self.cost_usd + self.proposal_usd

  @property
  def spent_usd(self) -> float:
    """The most that all models asked for this step can have been billed for."""
    return self.calls_usd + self.judge_usd + self.retry_usd + self.presumed_usd


@dataclasses.dataclass
class Episode:
  """One run of a policy on a task.

  Attributes:
    task_id, policy, seed: the episode's key.
    steps: in order.
    score: in [0, 1].
    stop: "done", "max_steps", "budget" or "error:<what>".
    call_budget: cap on large calls it ran under; None is no cap.
    usd_budget: cap on dollars it ran under, B_max; None is no cap.
    reused: whether it is another policy's, which decides the same: it was not run again.
    lost_usd: dollars of its budget that are in no step: of attempts after which it could not afford
      the call, and took a cheaper model or ended.
  """

  task_id: str
  policy: str
  seed: int
  steps: list[Step]
  score: float
  stop: str
  call_budget: int | None = None
  usd_budget: float | None = None
  reused: bool = False
  lost_usd: float = 0.0

  @property
  def cost_usd(self) -> float:
    return sum(step.calls_usd for step in self.steps)

  @property
  def router_cost_usd(self) -> float:
    """Of deciding, by a router's compute or by a model that was asked; not part of `cost_usd`."""
    return sum(step.router_cost_usd + step.judge_usd for step in self.steps)

  @property
  def spent_usd(self) -> float:
    """The most that it can have been billed for by the models: what B_max caps."""
    return sum(step.spent_usd for step in self.steps) + self.lost_usd

  @property
  def large_calls(self) -> int:
    """Calls of any model dearer than SMALL (with more than two models: our choice)."""
    return sum(step.model != SMALL for step in self.steps)

  def to_json(self) -> str:
    fields = vars(self) | {"steps": [vars(step) for step in self.steps]}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))

  @classmethod
  def from_json(cls, text: str) -> "Episode":
    fields = json.loads(text)
    fields["steps"] = [Step(**step) for step in fields["steps"]]
    return cls(**fields)
