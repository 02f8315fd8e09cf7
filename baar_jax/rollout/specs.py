"""Define the records of policies, caps, jobs, live episodes and decisions.

A `PolicySpec` says what decides, a `Job` what is played, a `Cap` what may be spent. A
`Live` is what a policy sees before a decision, a `Decision` is what it returns.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

from baar_jax.config import ROLLOUT_RANGE, SamplePlan
from baar_jax.episode import SMALL, Call, Step, Task

# The seeds of each purpose of episodes start at the number in this table. The
# configuration limits the number of trials of a purpose, so the ranges of seeds do not
# overlap. Rollouts have one range for each training seed.
Purpose = Literal[
  "profile", "reference", "exploration", "dev", "test", "robustness", "rollout"
]
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


def seed_of(purpose: Purpose, trial: int, training_seed: int = 0) -> int:
  """Compute the seed of a trial, for the environment and the scripted models.

  Any two purposes have different seeds.

  Args:
    purpose: the purpose of the episode.
    trial: number of the trial within the purpose.
    training_seed: the training seed of a rollout.
  """
  return FIRST_SEED[purpose] + ROLLOUT_RANGE * training_seed + trial


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
    calls = self.calls
    usd = self.usd
    if calls is not None:
      calls -= sum(step.large_calls for step in steps)
    if usd is not None:
      usd = max(0.0, usd - sum(step.counted_usd for step in steps))
    return Cap(calls, usd)


@dataclasses.dataclass(frozen=True)
class PolicySpec:
  """The specification of a policy: all that its decisions depend on.

  Most parameters belong to one family only; a parameter that the policy does not have
  is None. The order of the fields is the order of the parameters in `key`.

  Attributes:
    family: the policy's family, a row of the table in rivals/families.py.
    judge: the model that a zero-shot router asks, with a digest of its settings.
    lam: the cost weight with which the router was trained.
    seed: the training seed of a rollout; None for seed 0.
    update: for a rollout, the training update that learns from the episode. For other
      episodes, the last update of the router's training.
    seeds: the number of routers, of different training seeds, that all play as this
      policy; None for 1.
    threshold: LARGE is chosen if its probability reaches this value.
    share: the threshold is set so that LARGE's probability reaches the threshold in
      this share of stored decisions.
    cost_weight: units of score that one normalised dollar costs.
    blind: 1 for a cap-blind policy of a family that also has cap-conditioned ones.
    p: probability with which a random policy chooses a model costlier than SMALL.
    mu: units of score that a policy of foresight gives up for the mean dollars of a
      ticket at which LARGE tries each function once.
    rank: rank of the model that always acts, from 1.
    plans: the sampling plans of a policy that follows them; see `take_sampled` in
      rollout/rules.py.
    rollout: whether the router samples its decisions, to learn from the episodes.
    cap_conditioned: whether the policy reads the remaining cap before it decides.
    cap: the limits of the policy's episodes.
  """

  family: str
  judge: str = ""
  lam: float | None = None
  seed: int | None = None
  update: int | None = None
  seeds: int | None = None
  threshold: float | None = None
  share: float | None = None
  cost_weight: float | None = None
  blind: int | None = None
  p: float | None = None
  mu: float | None = None
  rank: int | None = None
  plans: tuple[SamplePlan, ...] = ()
  rollout: bool = False
  cap_conditioned: bool = False
  cap: Cap = Cap()

  @property
  def settings(self) -> dict[str, float]:
    """Return the policy's parameters by name, without its cap and its plans.

    Parameters that are None are left out, and so is `blind` without a cap.
    """
    parameters = dict(vars(self))
    for name in ("family", "judge", "plans", "rollout", "cap_conditioned", "cap"):
      del parameters[name]
    if not self.cap:
      del parameters["blind"]
    return {name: value for name, value in parameters.items() if value is not None}

  @property
  def key(self) -> str:
    """Return the name under which the policy's episodes are stored.

    Two different policies never have the same key. Keys are only compared, never
    parsed.
    """
    settings = self.settings
    if self.rollout:
      update = settings.pop("update")
    pairs = [*settings.items()]
    for plan in self.plans:
      pairs.append((plan.kind, plan.count))
    if self.cap.calls is not None:
      pairs.append(("K", self.cap.calls))
    if self.cap.usd is not None:
      pairs.append(("usd", self.cap.usd))
    text = ",".join(f"{name}={value:g}" for name, value in pairs)
    base = f"{self.family} {self.judge}".strip()
    key = f"{base}({text})" if text else base
    return f"{key}/{update}" if self.rollout else key

  def under(self, cap: Cap) -> "PolicySpec":
    """Return the same policy under a cap."""
    return dataclasses.replace(self, cap=cap)


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
    """Return the seed of the trial; see `seed_of`."""
    return seed_of(self.purpose, self.trial, self.training_seed)

  @property
  def key(self) -> tuple[str, int]:
    """Return (task id, seed), which no other episode of the same policy has."""
    return self.task.id, self.seed


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
  def key(self) -> tuple[str, int]:
    """Return (task id, seed), which no other live episode has."""
    return self.job.key
