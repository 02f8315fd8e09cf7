"""Who plays what: PolicySpec, Cap and Job; what is seen and decided: Live, Decision."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from baar_jax.config import ROLLOUT_RANGE, SamplePlan
from baar_jax.episode import SMALL, Step, Task

# The first seed of each purpose. The bounds of counts in the configuration keep the
# purposes apart. Rollouts have a range of seeds for each training seed.
Purpose = Literal["profile", "reference", "exploration", "dev", "test", "rollout"]
FIRST_SEED: dict[Purpose, int] = {
  "profile": 0,
  "reference": 1000,
  "exploration": 1000,
  "dev": 2000,
  "test": 3000,
  "rollout": 10_000,
}
PURPOSE_OF_SPLIT = {"train": "rollout", "dev": "dev", "test": "test"}


def seed_of(purpose: Purpose, trial: int, training_seed: int = 0) -> int:
  """Compute the engine's seed of a trial.

  No trial of another purpose on the task has it.
  """
  return FIRST_SEED[purpose] + ROLLOUT_RANGE * training_seed + trial


@dataclasses.dataclass(frozen=True)
class Cap:
  """What an episode may use at most; None is no cap."""

  calls: int | None = None  # of models costlier than SMALL (paper: K)
  usd: float | None = None  # dollars (paper: B_max)

  def __bool__(self) -> bool:
    return (self.calls, self.usd) != (None, None)

  def after(self, steps: Sequence[Step]) -> "Cap":
    """Return what some steps leave of the cap."""
    calls = self.calls
    usd = self.usd
    if calls is not None:
      calls -= sum(step.large_calls for step in steps)
    if usd is not None:
      usd = max(0.0, usd - sum(step.spent_usd for step in steps))
    return Cap(calls, usd)


@dataclasses.dataclass(frozen=True)
class PolicySpec:
  """A policy with all that its decisions depend on; None is a part that it lacks.

  The fields that `settings` lists are in the order in which `key` writes them.
  """

  family: str  # a row of the table in train/families.py
  # The model that a zero-shot router asks, and a digest of its settings.
  judge: str = ""
  # Which router: the weight of cost that it was trained with, the training seed of a
  # rollout (0 is not written), the update, and for how many training seeds it stands.
  lam: float | None = None
  seed: int | None = None
  update: int | None = None
  seeds: int | None = None
  # How it decides.
  threshold: float | None = None  # of p(LARGE)
  share: float | None = None  # of stored decisions above the threshold
  cost_weight: float | None = None  # units of score that a normalised dollar costs
  optimism: float | None = None  # ensemble deviations added to LARGE's advantage
  p: float | None = None  # probability of LARGE
  mu: float | None = None  # success that a dollar is worth
  rank: int | None = None  # of the model that always acts, from 1
  plans: tuple[SamplePlan, ...] = ()  # of stored samples
  rollout: bool = False  # samples models to learn from, before update `update`
  cap_conditioned: bool = False  # decides by what is left of its cap
  cap: Cap = Cap()

  @property
  def settings(self) -> dict[str, float]:
    """List the parameters of the policy, without its cap and its plans."""
    shown = dict(vars(self))
    for name in ("family", "judge", "plans", "rollout", "cap_conditioned", "cap"):
      del shown[name]
    if self.cap_conditioned or self.optimism is None or not (self.cap or self.optimism):
      del shown["optimism"]
    return {name: value for name, value in shown.items() if value is not None}

  @property
  def key(self) -> str:
    """Write the name under which the policy's episodes are stored.

    Two different policies never share a key. No code parses one.
    """
    settings = self.settings
    if self.rollout:
      update = settings.pop("update")
    parts = [*settings.items()]
    for plan in self.plans:
      parts.append((plan.kind, plan.count))
    if self.cap.calls is not None:
      parts.append(("K", self.cap.calls))
    if self.cap.usd is not None:
      parts.append(("usd", self.cap.usd))
    text = ",".join(f"{name}={value:g}" for name, value in parts)
    base = f"{self.family} {self.judge}".strip()
    key = f"{base}({text})" if text else base
    return f"{key}/{update}" if self.rollout else key

  def under(self, cap: Cap) -> "PolicySpec":
    """Return the same policy under a cap."""
    return dataclasses.replace(self, cap=cap)


@dataclasses.dataclass(frozen=True)
class Job:
  """One trial of a task: an episode to be played."""

  task: Task
  purpose: Purpose
  trial: int  # within the purpose: of references from 1, of rollouts over all updates
  training_seed: int = 0  # of rollouts

  @property
  def seed(self) -> int:
    """Return the engine's seed."""
    return seed_of(self.purpose, self.trial, self.training_seed)

  @property
  def key(self) -> tuple[str, int]:
    """Return (task_id, seed), the key of the episode among those of its policy."""
    return self.task.id, self.seed


@dataclasses.dataclass(frozen=True)
class Decision:
  """The choice of a model, its log-probability if sampled, and what deciding took."""

  model: int
  logp: float | None = None
  cost_usd: float = 0.0
  latency_s: float = 0.0
  p_A: Sequence[float] = ()  # the router's probability of each model, where it has some


@dataclasses.dataclass(eq=False)
class Live:
  """What a policy sees of an episode that waits for a decision."""

  job: Job
  cap: Cap = Cap()
  models: int = 2
  cost_weight: float | None = None  # one of the policy's; None is the least of them
  steps: list[Step] = dataclasses.field(default_factory=list)
  observation: str = ""
  # What a client says was left of its caps before each step, and is left now. Without
  # it that is counted from the cap and the steps.
  told: Sequence[Cap] = ()
  # Of a cascade, which sets them before each decision: the model that has proposed the
  # next action, and the action.
  proposer: int = SMALL
  proposal: str | None = None

  @property
  def task(self) -> Task:
    """Return the task that is played."""
    return self.job.task

  @property
  def left(self) -> Cap:
    """Return what is left of the caps now."""
    return self.told[-1] if self.told else self.cap.after(self.steps)

  @property
  def key(self) -> tuple[str, int]:
    """Tell the episode apart from all others that are live."""
    return self.job.key
