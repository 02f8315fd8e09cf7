"""Define the probabilities with which scripted models make errors at a step.

Every rate is our choice; docs/scripted_models.md gives the reasons. In a pair of
numbers, the first is SMALL's and the second is LARGE's.
"""

import dataclasses
import math
import random
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Oracle:
  """The expert's next step; only scripted models see it.

  Attributes:
    action: the expert's action.
    position: index of this step in the expert's plan. It stays the same until the step
      is done.
    critical: whether a weak model often gets this kind of step wrong.
    recovering: whether the action only undoes an earlier mistake.
  """

  action: str
  position: int
  critical: bool
  recovering: bool


@dataclasses.dataclass
class Lapse:
  """The chances that a model gets one step wrong.

  Attributes:
    rate: probability of an error.
    wrong: probability that an error is a wrong action. Otherwise it wastes the step.
    spoils: whether an error spoils the step: costlier models that try the same step of
      the plan later in this episode then fail more often.
  """

  rate: float
  wrong: float
  spoils: bool = False


class Errors:
  """Base class of the error rates of an environment.

  A model with skill 0 has SMALL's rates, a model with skill 1 has LARGE's. The rates of
  a model with another skill are interpolated linearly.
  """

  def __init__(self, models: int = 2, skills: Sequence[float] = ()) -> None:
    """Store the skill of each model.

    Args:
      models: number of models.
      skills: one number in [0, 1] per model, the cheapest first. Without them, skills
        rise from 0 to 1 in equal steps (our choice).
    """
    self.models = models
    self.skills = tuple(skills) or tuple(rank / (models - 1) for rank in range(models))

  def between(self, ends: tuple[float, float], model: int) -> float:
    """Interpolate a model's number between SMALL's and LARGE's.

    Args:
      ends: the numbers of SMALL and LARGE.
      model: the model's index by price.
    """
    skill = self.skills[model]
    return (1 - skill) * ends[0] + skill * ends[1]


class KnowledgeErrors(Errors):
  """Error rates that depend on the critical steps that a model does not know.

  Each task has a hidden tier (easy, hard or intractable) and a hardness around the mean
  of its tier. A model does not know a critical step with the probability
  sigmoid(SLOPE * (hardness - ability)). All trials of a task share these draws. The
  rates below apply to a user's environment; subclasses have those of the benchmarks.

  Attributes:
    ABILITY: ability of SMALL and LARGE.
    SLOPE: slope of the sigmoid.
    HARDNESS: mean hardness of the tasks of each tier.
    SPREAD: standard deviation of a task's hardness.
    DRAW: a text; together with the task's id, it seeds the random draw of the tier.
    PRIORS: rows of a regular expression and the probabilities of the tiers easy, hard
      and intractable. The first row whose expression is found in a task's id applies.
    ROUTINE: error rates at a routine step.
    KNOWN_EASY: error rates at a known critical step of an easy task.
    KNOWN: error rates at a known critical step of any other task.
    KNOWN_WRONG: share of wrong actions in errors at known critical steps.
    UNKNOWN: error rates at an unknown step.
    REPORTED: texts. If an action contains one of them, the environment reports the
      action's failure at once.
    REPORTED_UNKNOWN: error rates at an unknown step with such an action.
    SPOILED: error rate of all models but SMALL at a known step that SMALL has spoiled.
    DECISIVE_SHARE: share of decisive steps among the steps that SMALL does not know. At
      a decisive step, SMALL's errors are mostly wrong actions. At the other steps, lost
      steps, they mostly waste the step.
    DECISIVE: share of wrong actions in SMALL's errors at decisive steps.
    LOST: share of wrong actions in SMALL's errors at stalling steps.
    LARGE_UNKNOWN_WRONG: share of wrong actions in errors at unknown steps, for all
      models but SMALL.
  """

  ABILITY = (0.0, 3.8)
  SLOPE = 1.6
  HARDNESS = {"easy": -2.4, "hard": 1.6, "intractable": 5.2}
  SPREAD = 0.5
  DRAW = "tier"
  PRIORS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("", (0.30, 0.45, 0.25)),
  )
  ROUTINE = (0.14, 0.05)
  KNOWN_EASY = (0.06, 0.04)
  KNOWN = (0.12, 0.17)
  KNOWN_WRONG = (0.4, 0.9)
  UNKNOWN = REPORTED_UNKNOWN = (0.98, 0.95)
  REPORTED: tuple[str, ...] = ()
  SPOILED = 0.6
  DECISIVE_SHARE = 0.5
  DECISIVE = 0.8
  LOST = 0.02
  LARGE_UNKNOWN_WRONG = 0.6

  def tier(self, task_id: str) -> str:
    """Draw a task's hidden tier, with the task's id as the random seed."""
    draw = random.Random(f"{task_id}|{self.DRAW}")
    weights = next(row for pattern, row in self.PRIORS if re.search(pattern, task_id))
    return draw.choices([*self.HARDNESS], weights)[0]

  def unknown_share(self, model: int, task_id: str) -> float:
    """Compute the probability that a model does not know a critical step.

    Args:
      model: the model's index by price.
      task_id: the task with the step.
    """
    mean = self.HARDNESS[self.tier(task_id)]
    hardness = random.Random(f"{task_id}|hardness").gauss(mean, self.SPREAD)
    ability = self.between(self.ABILITY, model)
    return 1.0 / (1.0 + math.exp(-self.SLOPE * (hardness - ability)))

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    """Compute how a model may err at the expert's next step.

    Args:
      model: the model's index by price.
      task_id: the task of the episode.
      oracle: the expert's next step.
      spoiled: whether an earlier error of this episode has spoiled the step.
    """
    if not oracle.critical:
      return Lapse(self.between(self.ROUTINE, model), 0.0)
    rates = self.KNOWN_EASY if self.tier(task_id) == "easy" else self.KNOWN
    known_lapse = Lapse(
      self.between(rates, model), self.between(self.KNOWN_WRONG, model)
    )
    if oracle.recovering:
      return known_lapse
    # The random number is the same for all models, and SMALL's share of unknown steps
    # is the largest. So SMALL never knows a step that LARGE does not know.
    step = f"{task_id}|{oracle.position}"
    threshold = random.Random(f"{step}|unknown").random()
    if threshold < self.unknown_share(model, task_id):
      return self._unknown_lapse(model, step, oracle)
    if self.skills[model] > 0 and spoiled:
      known_lapse.rate = self.SPOILED
    return known_lapse

  def _unknown_lapse(self, model: int, step: str, oracle: Oracle) -> Lapse:
    """Compute how a model may err at a step that it does not know.

    Args:
      model: the model's index by price.
      step: the task's id and the step's position in the plan, as a text. The text seeds
        the random draw that decides for SMALL whether the step is decisive or lost; see
        DECISIVE_SHARE.
      oracle: the expert's next step.
    """
    is_reported = any(text in oracle.action for text in self.REPORTED)
    rate = self.between(self.REPORTED_UNKNOWN if is_reported else self.UNKNOWN, model)
    if self.skills[model] > 0:
      return Lapse(rate, self.LARGE_UNKNOWN_WRONG)
    decisive = random.Random(f"{step}|style").random() < self.DECISIVE_SHARE
    return Lapse(rate, self.DECISIVE if decisive else self.LOST, spoils=not is_reported)
