"""The keyless pair: scripted models that follow the environment's expert and err at stated rates.

They act in the real environment through the same prompts, token counts and list prices as API
models would; only the text of their replies is made here. All rates stand in this file.
"""

import dataclasses
import math
import random
import re
from collections.abc import Sequence
from typing import Protocol

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import DECISION_WORDS, SMALL, Call, Task, Usage
from baar_jax.llms.agent import Agent, Hold, Judge, Messages, Reply, write_reply
from baar_jax.llms.prices import Price, prices_of

CHARS_PER_TOKEN = 4  # no tokenizer of the priced models is available offline: a stated estimate
LARGE = 1
JUDGE = 2  # index of the judge's calls


@dataclasses.dataclass
class Lapse:
  """How a model may get one step wrong.

  Attributes:
    rate: probability of an error.
    wrong: probability that an error is a wrong action rather than a wasted step.
    spoils: whether an error here spoils the state for the next try.
  """

  rate: float
  wrong: float
  spoils: bool = False


class Errors(Protocol):
  """An environment's error model."""

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    """How `model` may err on the step that `oracle` describes.

    Args:
      spoiled: whether an error that spoils was made on this step of the plan before.
    """


class ScriptedPair:
  """SMALL and LARGE as scripts; deterministic given (task, seed, step) and the state."""

  kind = "scripted"

  def __init__(self, names: tuple[str, ...], errors: Errors, prices: Sequence[Price] = ()):
    """Takes list prices where none are given. Raises ValueError if a model has none."""
    if len(names) != 2:
      raise ValueError(f"the scripted pair needs 2 model names, got {len(names)}: {names}")
    self.names = names
    self.prices = tuple(prices) or prices_of(names)
    self._errors = errors

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> list["ScriptedAgent"]:
    spoiled: dict[int, int] = {}
    shared = self._errors, env, task, seed, spoiled, hold
    return [ScriptedAgent(model, self.prices[model], *shared) for model in (SMALL, LARGE)]

  def judge(self, config: ModelsConfig) -> "ScriptedJudge":
    return ScriptedJudge(prices_of(config.names, config.prices)[0])

  def stop(self) -> None:
    pass

  def close(self) -> None:
    pass


class ScriptedAgent(Agent):
  """One scripted model during one episode."""

  def __init__(
    self,
    model: int,
    price: Price,
    errors: Errors,
    env: Env,
    task: Task,
    seed: int,
    spoiled: dict[int, int],
    hold: Hold,
  ):
    self._model = model
    self._price = price
    self._errors = errors
    self._env = env
    self._task = task
    self._seed = seed
    self._spoiled = spoiled  # step -> position of the plan; shared by the episode's agents
    self._hold = hold
    self._composed: tuple[int, Reply, int | None] | None = None  # of the step to come

  def _lapse(self, oracle: Oracle, step: float = math.inf) -> Lapse:
    before = (position for at, position in self._spoiled.items() if at < step)
    spoiled = oracle.position in before
    return self._errors.lapse(self._model, self._task.id, oracle, spoiled)

  def error_rate(self) -> float:
    """The probability that this model errs on the step to come; privileged."""
    return self._lapse(self._env.oracle()).rate

  def bound_usd(self, messages: Messages, step: int) -> float:
    """What the reply will cost, exactly."""
    if self._composed is None or self._composed[0] != step:
      self._composed = step, *self._compose(messages, step)
    return self._composed[1].call.cost_usd

  def reply(self, messages: Messages, step: int) -> Reply:
    usd = self.bound_usd(messages, step)
    with self._hold(usd) as cost:
      cost.usd = usd
    _, reply, spoiled = self._composed
    self._spoiled.pop(step, None)  # a proposal that this reply takes the place of was not acted on
    if spoiled is not None:
      self._spoiled[step] = spoiled
    return reply

  def _compose(self, messages: Messages, step: int) -> tuple[Reply, int | None]:
    """The reply, and which position of the plan it spoils, if any."""
    oracle = self._env.oracle()
    lapse = self._lapse(oracle, step)
    key = f"{self._task.id}|{self._seed}|{step}"
    draw = random.Random(key)  # the same numbers for both models: policies differ by choice alone
    action, spoiled = oracle.action, None
    if draw.random() < lapse.rate:
      wasted = "lost" if self._model == SMALL else "hasty"
      kind = "wrong" if draw.random() < lapse.wrong else wasted
      action = self._env.mistake(kind, key)
      if lapse.spoils:
        spoiled = oracle.position
    thought = "The next thing to do for the task is this, given what was just observed."
    text = write_reply(thought, action, self._env.code_actions)
    prompt_tokens = sum(count_tokens(message["content"]) for message in messages)
    usage = Usage(prompt_tokens, 0, count_tokens(text))
    return Reply(text, Call(self._model, usage, self._price.cost_usd(usage))), spoiled


class ScriptedJudge(Judge):
  """Stands in for a strong model that is asked SMALL or BIG; it reads the same text.

  By rule: BIG at the start, and where the last result says that something went wrong or has been
  seen before after the same action. What a strong model would say is not known here.
  """

  WRONG = ("no known action", "nothing happens", "error", "exception", "fail", "can't", "jams")

  def __init__(self, price: Price):
    self.price = price

  def ask(self, messages: Messages, task: Task, seed: int, place: int, hold: Hold) -> Reply:
    prompt = messages[-1]["content"]
    done = re.findall(r" action: (.*)\nresult: (.*)", prompt)
    stuck = done and (done[-1] in done[:-1] or any(w in done[-1][1].lower() for w in self.WRONG))
    answer = DECISION_WORDS[LARGE if stuck or not done else SMALL]
    usage = Usage(count_tokens(prompt), 0, count_tokens(answer))
    usd = self.price.cost_usd(usage)
    with hold(usd) as cost:
      cost.usd = usd
    return Reply(answer, Call(JUDGE, usage, usd))


def count_tokens(text: str) -> int:
  """Estimated tokens of a text: 4 characters each, rounded up (our choice)."""
  return -(-len(text) // CHARS_PER_TOKEN)


def uniform(*key: object) -> float:
  """A number in [0, 1) drawn by hashing the key."""
  return random.Random("|".join(map(str, key))).random()


def sigmoid(x: float) -> float:
  return 1.0 / (1.0 + math.exp(-x))


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
  know either. All of it is a design choice of a simulation: the rates were set once, on other
  tasks, so that the pair's two ends lie where the paper's do, and two rules (SMALL is decisively
  wrong on half of what it does not know and lost on the rest; it spoils the step for LARGE) keep
  a random router from being nearly as good as an informed one.

  The rates here are for an environment of one's own; subclasses have those of the benchmarks.
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
    unknown_share = sigmoid(self.SLOPE * (hardness - self.ABILITY[model]))
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

  The expert knows where everything is; a model has to search, so about half of the steps between
  critical ones lead elsewhere. Nothing there is fatal, so a model that could try again and again
  would win in the end: what it does not know it hardly ever gets right, and a step that SMALL has
  spoiled LARGE seldom saves.
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
  login or a loop over pages that went wrong says so, and is soon put right (a design choice, too).
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
