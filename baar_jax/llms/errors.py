"""The scripted pair's rates of error in each environment; all of them are design choices."""

import dataclasses
import math
import random
import re
from typing import Protocol

from baar_jax.envs.base import Oracle
from baar_jax.episode import LARGE


@dataclasses.dataclass
class Lapse:
  """How a model may get one step wrong."""

  rate: float  # probability of an error
  wrong: float  # probability that an error is a wrong action rather than a wasted step
  spoils: bool = False  # whether an error here spoils the state for the next try


class Errors(Protocol):
  """An environment's error model."""

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    """How `model` may err on the step that `oracle` describes; `spoiled` says whether an error
    that spoils was made on this step of the plan before."""


def uniform(*key: object) -> float:
  """A number in [0, 1) drawn by hashing the key."""
  return random.Random("|".join(map(str, key))).random()


class SandboxErrors:
  """The sandbox: plain locks are easy for both; a critical one SMALL mostly gets wrong.

  A wrong action rings the alarm, which is fatal; a wasted step jams the lock.
  """

  PLAIN = (Lapse(0.10, 0.05), Lapse(0.02, 0.05))  # of SMALL and LARGE
  CRITICAL = (Lapse(0.80, 0.5), Lapse(0.10, 0.3))

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    return (self.CRITICAL if oracle.critical else self.PLAIN)[model]


class KnowledgeErrors:
  """Critical steps that a model does not know how to do, the same in every trial.

  How hard a task's critical steps are is hidden and drawn per task: within reach of both models,
  of LARGE alone, or of neither. A model does not know a critical step with a probability that
  rises with the task's hardness over the model's ability; what LARGE does not know SMALL does not
  know either. The rates are our choice: they were set once, on other tasks, so that the pair's ends
  lie where the paper's do. Two rules (SMALL is decisively wrong on half of what it does not know
  and lost on the rest; it spoils the step for LARGE) keep a random router from being nearly as good
  as an informed one. The rates here are for a user's environment; subclasses have the benchmarks'.
  """

  ABILITY = (0.0, 3.8)  # of SMALL and LARGE
  SLOPE = 1.6
  TIERS = ("easy", "hard", "intractable")
  HARDNESS = {"easy": -2.4, "hard": 1.6, "intractable": 5.2}
  SPREAD = 0.5  # of a task's hardness around its tier's
  DRAW = "tier"  # hashed with a task's id for its tier
  UNKNOWN = (0.98, 0.95)
  KNOWN = (
    {"easy": 0.06, "hard": 0.12, "intractable": 0.12},
    {"easy": 0.04, "hard": 0.17, "intractable": 0.17},
  )
  ROUTINE = (0.14, 0.05)
  SPOILED = 0.6  # LARGE's rate where SMALL failed a step that it did not know
  DECISIVE_SHARE, DECISIVE, LOST = 0.5, 0.8, 0.02  # SMALL's unknown steps: share, wrong, wrong
  LARGE_UNKNOWN_WRONG = 0.6
  KNOWN_WRONG = (0.4, 0.9)
  # How likely each tier is where one of these patterns is found in a task's id; the first row that
  # fits counts, and the last one fits all.
  PRIORS: tuple[tuple[tuple[str, ...], tuple[float, float, float]], ...] = (
    (("",), (0.30, 0.45, 0.25)),
  )

  def tier(self, task_id: str) -> str:
    """The task's hidden tier."""
    weights = next(row for parts, row in self.PRIORS if any(re.search(p, task_id) for p in parts))
    return random.Random(f"{task_id}|{self.DRAW}").choices(self.TIERS, weights)[0]

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    if not oracle.critical:
      return Lapse(self.ROUTINE[model], 0.0)
    tier = self.tier(task_id)
    known = Lapse(self.KNOWN[model][tier], self.KNOWN_WRONG[model])
    if oracle.recovering:
      return known
    hardness = random.Random(f"{task_id}|hardness").gauss(self.HARDNESS[tier], self.SPREAD)
    unknown_share = 1.0 / (1.0 + math.exp(-self.SLOPE * (hardness - self.ABILITY[model])))
    # One number for both models, so that LARGE's unknown steps are among SMALL's.
    if uniform(task_id, oracle.position, "unknown") < unknown_share:
      if model == LARGE:
        return Lapse(self.UNKNOWN[model], self.LARGE_UNKNOWN_WRONG)
      decisive = uniform(task_id, oracle.position, "style") < self.DECISIVE_SHARE
      return Lapse(self.UNKNOWN[model], self.DECISIVE if decisive else self.LOST, spoils=True)
    if model == LARGE and spoiled:
      return dataclasses.replace(known, rate=self.SPOILED)
    return known


class ScienceWorldErrors(KnowledgeErrors):
  """ScienceWorld: how hard a task is depends on its type."""

  PRIORS = (
    (("find-", "lifespan-"), (0.56, 0.40, 0.04)),
    (
      ("power-component", "use-thermometer", "chemistry-mix-paint-secondary", "identify-life"),
      (0.18, 0.67, 0.15),
    ),
    (("",), (0.10, 0.63, 0.27)),
  )


class ALFWorldErrors(KnowledgeErrors):
  """ALFWorld: how hard a game is depends on its type of task.

  A model has to search, so about half of the steps between critical ones lead elsewhere. Nothing
  there is fatal, so a model that could try again and again would win in the end: what it does not
  know it hardly ever gets right, and a step that SMALL has spoiled LARGE seldom saves.
  """

  DRAW = "tier 28"  # of the first 40 the one whose shares in 126 made games are nearest to PRIORS'
  ROUTINE = (0.55, 0.45)
  UNKNOWN = (0.99, 0.97)
  SPOILED = 0.97
  PRIORS = (
    (("pick_and_place_simple",), (0.64, 0.24, 0.12)),
    (("look_at_obj_in_light",), (0.57, 0.23, 0.20)),
    (("pick_clean",), (0.41, 0.23, 0.36)),
    (("pick_heat", "pick_cool"), (0.33, 0.22, 0.45)),
    (("pick_two",), (0.20, 0.16, 0.64)),
  )


class AppWorldErrors(KnowledgeErrors):
  """AppWorld: how hard a task is depends on its difficulty level, from 1 to 3.

  A wrong write or answer is fatal more often than elsewhere, so known steps fail less often. A
  login or a loop over pages that went wrong says so and is soon corrected.
  """

  HARDNESS = {"easy": -2.4, "hard": 0.3, "intractable": 5.2}
  KNOWN = (
    {"easy": 0.06, "hard": 0.10, "intractable": 0.10},
    {"easy": 0.04, "hard": 0.08, "intractable": 0.08},
  )
  KNOWN_WRONG = (0.4, 0.6)
  DECISIVE_SHARE = 0.7
  TOLD = ("login(", "page_index")  # an action with one of these is answered by what is wrong
  TOLD_UNKNOWN = (0.6, 0.5)
  PRIORS = (
    (("^d1",), (0.58, 0.30, 0.12)),
    (("^d2",), (0.42, 0.32, 0.26)),
    (("^d3",), (0.28, 0.29, 0.43)),
    (("",), (0.42, 0.30, 0.28)),  # the downloaded tasks, whose ids do not show their level
  )

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    lapse = super().lapse(model, task_id, oracle, spoiled)
    told = any(part in oracle.action for part in self.TOLD)
    if told and lapse.rate == self.UNKNOWN[model]:
      return dataclasses.replace(lapse, rate=self.TOLD_UNKNOWN[model], spoils=False)
    return lapse


ERRORS: dict[str, type[Errors]] = {
  "sandbox": SandboxErrors,
  "scienceworld": ScienceWorldErrors,
  "alfworld": ALFWorldErrors,
  "appworld": AppWorldErrors,
}
