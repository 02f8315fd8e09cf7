"""Define the records of policies, caps, jobs, live episodes and decisions.

A `PolicySpec` says what decides, a `Job` what is played, a `Cap` what may be spent. A
`Live` is what a policy sees before a decision, a `Decision` is what it returns.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self

from baar_jax.config import ROLLOUT_RANGE, SamplePlan
from baar_jax.episode import SMALL, Call, Key, Purpose, Reply, Step, Task

# The seeds of each purpose start at the number in this table; see `Job.seed`.
FIRST_SEED: dict[Purpose, int] = {
  "profile": 0,
  "reference": 1000,
  "dev": 2000,
  "test": 3000,
  "exploration": 4000,
  "robustness": 5000,
  "rollout": 10_000,
}
# The purposes for which only untrained policies play.
UNTRAINED: tuple[Purpose, ...] = ("profile", "reference", "exploration", "robustness")


@dataclasses.dataclass(frozen=True)
class Cap:
  """The limits of an episode; None is no limit.

  Attributes:
    calls: limit on calls of models costlier than SMALL (paper: K).
    usd: limit on dollars (paper: B_max).
  """

  calls: int | None = None
  usd: float | None = None

  def __bool__(self) -> bool:
    """Tell whether there is a limit."""
    return self != Cap()

  def after(self, steps: Sequence[Step]) -> "Cap":
    """Compute the cap that remains after an episode's first steps."""
    large_calls = sum(step.large_calls for step in steps)
    return self.minus(large_calls, sum(step.counted_usd for step in steps))

  def minus(self, large_calls: int, usd: float) -> "Cap":
    """Compute the cap that remains after some LARGE calls and dollars."""
    calls_left = self.calls
    usd_left = self.usd
    if calls_left is not None:
      calls_left -= large_calls
    if usd_left is not None:
      usd_left = max(0.0, usd_left - usd)
    return Cap(calls_left, usd_left)


@dataclasses.dataclass(frozen=True)
class PolicySpec:
  """The specification of a policy: all that its decisions depend on.

  A family with parameters has a subclass with a field for each of them; a parameter
  that the policy does not have is None.

  Attributes:
    family: the policy's family, a name in families/table.py.
    cap: the limits of the policy's episodes.
    cap_conditioned: whether the policy reads the remaining cap before it decides.
  """

  family: str
  cap: Cap = dataclasses.field(default=Cap(), kw_only=True)
  cap_conditioned: bool = dataclasses.field(default=False, kw_only=True)

  @property
  def parameters(self) -> dict[str, object]:
    """Return the parameters of the family that are not None, by name."""
    shared = {field.name for field in dataclasses.fields(PolicySpec)}
    values = vars(self).items()
    return {name: x for name, x in values if name not in shared and x is not None}

  @property
  def key(self) -> str:
    """Return the name under which the policy's episodes are stored.

    Two different policies never have the same key. Keys are only compared, never
    parsed.
    """
    base = self.family
    pairs = []
    for name, value in self.parameters.items():
      if isinstance(value, str):
        base += f" {value}"
      elif isinstance(value, tuple):
        pairs += [(plan.kind, plan.count) for plan in value]
      else:
        pairs.append((name, value))
    if self.cap.calls is not None:
      pairs.append(("K", self.cap.calls))
    if self.cap.usd is not None:
      pairs.append(("usd", self.cap.usd))
    text = ",".join(f"{name}={value:g}" for name, value in pairs)
    return f"{base}({text})" if text else base

  def under(self, cap: Cap) -> Self:
    """Return the same policy under a cap."""
    return dataclasses.replace(self, cap=cap)


@dataclasses.dataclass(frozen=True)
class SampledSpec(PolicySpec):
  """A policy that follows sampling plans; see `take_sampled` in families/rules.py.

  Attributes:
    plans: the plans, one after the other.
  """

  plans: tuple[SamplePlan, ...]


@dataclasses.dataclass(frozen=True)
class RolloutSpec(PolicySpec):
  """A router that samples its decisions, in one update of its training.

  Attributes:
    lam: the cost weight of the training.
    training_seed: the number of the training seed, from 0.
    update: the number of the update that learns from the episodes, from 1.
  """

  lam: float
  training_seed: int
  update: int

  @property
  def key(self) -> str:
    """Return the key of the training, with the number of the update."""
    seed = f",seed={self.training_seed}" if self.training_seed else ""
    return f"{self.family}(lam={self.lam:g}{seed})/{self.update}"


@dataclasses.dataclass(frozen=True)
class Job:
  """One trial of a task: an episode that is to be played.

  Attributes:
    task: the task.
    purpose: the purpose of the episode.
    trial: number of the trial within the purpose. Trials of references and exploration
      are counted from 1, all others from 0. Rollouts are counted through all updates.
    training_seed: the training seed of a rollout.
  """

  task: Task
  purpose: Purpose
  trial: int
  training_seed: int = 0

  @property
  def seed(self) -> int:
    """Return the seed of the trial, for the environment and the scripted models.

    The configuration limits the trials of a purpose, so no two purposes share a seed.
    """
    first = FIRST_SEED[self.purpose] + ROLLOUT_RANGE * self.training_seed
    return first + self.trial

  @property
  def key(self) -> Key:
    """Return task, purpose and trial, which no other episode of its policy has."""
    return self.task.id, self.purpose, self.trial


class Decision(NamedTuple):
  """A policy's choice of a model for one step.

  Attributes:
    model: index of the model.
    logp: log-probability of the choice, in nats; None if a budget or a rule decided.
    cost_usd: dollars of the router's compute.
    latency_s: seconds that the decision took.
    p_A: the router's probability of each model; empty if it has none.
    calls: the calls that the decision needed, such as that of a judge.
    proposal: the last action that a model proposed; None if no action was proposed.
  """

  model: int
  logp: float | None = None
  cost_usd: float = 0.0
  latency_s: float = 0.0
  p_A: Sequence[float] = ()
  calls: Sequence[Call] = ()
  proposal: str | None = None

  def within(self, allowed: Sequence[int]) -> "Decision":
    """Replace a model that the budgets forbid (paper Eq. 9).

    The nearest cheaper model that they allow takes its place; if there is none, the
    cheapest model that they allow. Then a budget decided, so there is no `logp`.

    Args:
      allowed: the models whose call fits the budgets, ascending; at least one.
    """
    cheaper = (model for model in allowed if model <= self.model)
    model = max(cheaper, default=allowed[0])
    return self if model == self.model else self._replace(model=model, logp=None)

  def make_step(
    self,
    observation: str,
    calls: Sequence[Call] = (),
    action: str = "",
    score: float | None = None,
    started_s: float | None = None,
  ) -> Step:
    """Make the record of the step in which the decided model acted.

    Args:
      observation: the observation before the action.
      calls: the calls of the model that acted.
      action: the action, as sent to the environment.
      score: see `Step.score`.
      started_s: see `Step.started_s`.
    """
    return Step(
      observation,
      self.model,
      action,
      calls=[*calls, *self.calls],
      logp=self.logp,
      router_cost_usd=self.cost_usd,
      router_latency_s=self.latency_s,
      proposal=self.proposal,
      score=score,
      started_s=started_s,
    )


@dataclasses.dataclass(eq=False)
class Live:
  """A live episode, as its policy sees the episode before a decision.

  Attributes:
    job: the trial that is played.
    cap: the limits of the episode.
    models: number of models to choose from.
    cost_weight: a cost weight chosen for this episode; None is the policy's default.
    steps: the steps so far.
    observation: the last observation.
    remaining_caps: the remaining cap before each step and before this decision, if a
      program outside a run knows them (decide.py). If empty, they are computed from
      `cap` and `steps`.
    paid: the reply of a judge that was paid for this decision.
    draft: the step that waits for this decision, if more than its observation is known:
      a policy may show its router a proposed action.
    started_s: seconds on a clock when this step began; None if time is simulated.
  """

  job: Job
  cap: Cap = Cap()
  models: int = 2
  cost_weight: float | None = None
  steps: list[Step] = dataclasses.field(default_factory=list)
  observation: str = ""
  remaining_caps: Sequence[Cap] = ()
  paid: Reply | None = None
  draft: Step | None = None
  started_s: float | None = None

  @property
  def task(self) -> Task:
    """Return the task of the episode."""
    return self.job.task

  @property
  def remaining_cap(self) -> Cap:
    """Return the remaining cap of the episode before this decision."""
    return (
      self.remaining_caps[-1] if self.remaining_caps else self.cap.after(self.steps)
    )

  @property
  def history(self) -> list[Step]:
    """Return the steps so far, and the step that waits for its decision.

    The last step has no action.
    """
    pending = self.draft or Step(self.observation, SMALL, "", started_s=self.started_s)
    return [*self.steps, pending]

  @property
  def key(self) -> Key:
    """Return task, purpose and trial, which no other live episode has."""
    return self.job.key
