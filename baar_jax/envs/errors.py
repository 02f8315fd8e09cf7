"""How scripted models err at a step of the expert; the rates are design choices.

docs/environments.md says why each rule is as it is.
"""

import dataclasses
import math
import random
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Oracle:
  """The expert's knowledge about the next step; only scripted models see it."""

  action: str  # the expert's
  position: int  # of this step in the expert's plan; it stays until the step is done
  critical: bool  # whether a weak model gets this kind of step wrong
  recovering: bool  # whether the action only undoes an earlier mistake


@dataclasses.dataclass
class Lapse:
  """How a model may get one step wrong."""

  rate: float  # probability of an error
  wrong: float  # probability that an error is a wrong action, not a wasted step
  spoils: bool = False  # whether an error here spoils the state for the next try


class Errors:
  """Rates of error from SMALL's, of a model with skill 0, to LARGE's, with skill 1."""

  def __init__(self, models: int = 2, skills: Sequence[float] = ()) -> None:
    """Without `skills` they rise in equal steps by rank (our choice)."""
    self.models = models
    self.skills = tuple(skills) or tuple(rank / (models - 1) for rank in range(models))

  def between(self, ends: tuple[float, float], model: int) -> float:
    """Interpolate a model's number between SMALL's and LARGE's."""
    skill = self.skills[model]
    return (1 - skill) * ends[0] + skill * ends[1]


class KnowledgeErrors(Errors):
  """Critical steps that a model does not know how to do, the same in every trial.

  A model does not know one with a probability that rises with the task's hardness, by
  its hidden tier, over the model's ability. These rates are those of a user's
  environment; subclasses have the benchmarks'.
  """

  ABILITY = (0.0, 3.8)  # of SMALL and LARGE
  SLOPE = 1.6
  HARDNESS = {"easy": -2.4, "hard": 1.6, "intractable": 5.2}  # of a task, by its tier
  SPREAD = 0.5  # of a task's hardness around its tier's
  DRAW = "tier"  # hashed with a task's id for its tier
  UNKNOWN = TOLD_UNKNOWN = (0.98, 0.95)
  TOLD: tuple[str, ...] = ()  # an action with one of these is answered by its mistake
  KNOWN_EASY = (0.06, 0.04)
  KNOWN = (0.12, 0.17)
  ROUTINE = (0.14, 0.05)
  SPOILED = 0.6  # rate of all others where SMALL failed a step that it did not know
  DECISIVE_SHARE = 0.5  # of SMALL's unknown steps
  DECISIVE = 0.8  # share of wrong actions in SMALL's errors there
  LOST = 0.02  # the same at its other unknown steps
  LARGE_UNKNOWN_WRONG = 0.6  # also of models between
  KNOWN_WRONG = (0.4, 0.9)
  # How likely each tier is if a pattern is found in a task's id; the first row counts.
  PRIORS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("", (0.30, 0.45, 0.25)),
  )

  def tier(self, task_id: str) -> str:
    """Draw the task's hidden tier."""
    draw = random.Random(f"{task_id}|{self.DRAW}")
    weights = next(row for pattern, row in self.PRIORS if re.search(pattern, task_id))
    return draw.choices([*self.HARDNESS], weights)[0]

  def unknown_share(self, model: int, task_id: str) -> float:
    """Compute the probability that a model does not know a critical step."""
    mean = self.HARDNESS[self.tier(task_id)]
    hardness = random.Random(f"{task_id}|hardness").gauss(mean, self.SPREAD)
    ability = self.between(self.ABILITY, model)
    return 1.0 / (1.0 + math.exp(-self.SLOPE * (hardness - ability)))

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    """State how a model may err on the oracle's step.

    Args:
      model: its rank.
      task_id: the task's.
      oracle: the expert's step.
      spoiled: whether an earlier error on this step spoils it.
    """
    if not oracle.critical:
      return Lapse(self.between(self.ROUTINE, model), 0.0)
    rates = self.KNOWN_EASY if self.tier(task_id) == "easy" else self.KNOWN
    known = Lapse(self.between(rates, model), self.between(self.KNOWN_WRONG, model))
    if oracle.recovering:
      return known
    # One number for all models, so that LARGE's unknown steps are among SMALL's.
    step = f"{task_id}|{oracle.position}"
    unknown = random.Random(f"{step}|unknown").random()
    if unknown < self.unknown_share(model, task_id):
      return self._unknown_lapse(model, step, oracle)
    if self.skills[model] > 0 and spoiled:
      known.rate = self.SPOILED
    return known

  def _unknown_lapse(self, model: int, step: str, oracle: Oracle) -> Lapse:
    """State how a model may err on a step that it does not know."""
    told = any(part in oracle.action for part in self.TOLD)
    rate = self.between(self.TOLD_UNKNOWN if told else self.UNKNOWN, model)
    if self.skills[model] > 0:
      return Lapse(rate, self.LARGE_UNKNOWN_WRONG)
    decisive = random.Random(f"{step}|style").random() < self.DECISIVE_SHARE
    return Lapse(rate, self.DECISIVE if decisive else self.LOST, spoils=not told)
