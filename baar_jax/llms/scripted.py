"""The keyless models: scripts that follow the environment's expert and err at stated rates.

They act in the real environment through the same prompts, token counts and list prices as API
models would; only the text of their replies is scripted. All rates of error are design choices.
"""

import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import SMALL, Call, Reply, Task, Usage, decision_words
from baar_jax.llms.agent import Agent, Hold, Messages, Pair, write_reply
from baar_jax.llms.prices import Price, prices_of

CHARS_PER_TOKEN = 4  # our choice: no tokenizer of the priced models is available offline
THOUGHT = "The next thing to do for the task is this, given what was just observed."


@dataclasses.dataclass
class Lapse:
  """How a model may get one step wrong."""

  rate: float  # probability of an error
  wrong: float  # probability that an error is a wrong action rather than a wasted step
  spoils: bool = False  # whether an error here spoils the state for the next try


class Prospect(NamedTuple):
  """What is known of a model's next call by the error model alone."""

  # Expected share of the task. A wrong action or an error that spoils the step loses all of it, a
  # wasted step one part of the steps that are left (our choice).
  loss: float
  known_share: float  # of the task's critical steps
  usd: float


class Errors:
  """Rates of error from SMALL's, of a model with skill 0, to LARGE's, of one with skill 1.

  Without `skills` they rise in equal steps by rank (our choice).
  """

  def __init__(self, models: int = 2, skills: Sequence[float] = ()):
    self.models = models
    self.skills = tuple(skills) or tuple(model / (models - 1) for model in range(models))

  def between(self, ends: tuple[float, float], model: int) -> float:
    """A model's number, from SMALL's to LARGE's."""
    return (1 - self.skills[model]) * ends[0] + self.skills[model] * ends[1]


class SandboxErrors(Errors):
  """The sandbox: plain locks are easy for all models; a critical one SMALL mostly gets wrong."""

  PLAIN = (0.10, 0.05), (0.02, 0.05)  # rate and wrong, of SMALL and LARGE
  CRITICAL = (0.80, 0.5), (0.10, 0.3)

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    rates = self.CRITICAL if oracle.critical else self.PLAIN
    return Lapse(*(self.between(ends, model) for ends in zip(*rates)))


class KnowledgeErrors(Errors):
  """Critical steps that a model does not know how to do, the same in every trial.

  A model does not know one with a probability that rises with the task's hardness, by its hidden
  tier, over the model's ability. These rates are for a user's environment; subclasses have the
  benchmarks'. docs/environments.md says why each rule is as it is.
  """

  ABILITY = (0.0, 3.8)  # of SMALL and LARGE
  SLOPE = 1.6
  HARDNESS = {"easy": -2.4, "hard": 1.6, "intractable": 5.2}  # of a task, by its tier
  SPREAD = 0.5  # of a task's hardness around its tier's
  DRAW = "tier"  # hashed with a task's id for its tier
  UNKNOWN = TOLD_UNKNOWN = (0.98, 0.95)
  TOLD: tuple[str, ...] = ()  # an action with one of these is answered by what is wrong
  KNOWN_EASY, KNOWN = (0.06, 0.04), (0.12, 0.17)
  ROUTINE = (0.14, 0.05)
  SPOILED = 0.6  # rate of all others where SMALL failed a step that it did not know
  DECISIVE_SHARE, DECISIVE, LOST = 0.5, 0.8, 0.02  # SMALL's unknown steps: share, wrong, wrong
  LARGE_UNKNOWN_WRONG = 0.6  # also of models between
  KNOWN_WRONG = (0.4, 0.9)
  # How likely each tier is where a pattern is found in a task's id; the first row that fits counts.
  PRIORS: tuple[tuple[str, tuple[float, float, float]], ...] = (("", (0.30, 0.45, 0.25)),)

  def tier(self, task_id: str) -> str:
    """The task's hidden tier."""
    weights = next(row for pattern, row in self.PRIORS if re.search(pattern, task_id))
    return random.Random(f"{task_id}|{self.DRAW}").choices([*self.HARDNESS], weights)[0]

  def unknown_share(self, model: int, task_id: str) -> float:
    """The probability that a model does not know a critical step of the task."""
    mean = self.HARDNESS[self.tier(task_id)]
    hardness = random.Random(f"{task_id}|hardness").gauss(mean, self.SPREAD)
    ability = self.between(self.ABILITY, model)
    return 1.0 / (1.0 + math.exp(-self.SLOPE * (hardness - ability)))

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    """How a model may err on the oracle's step; `spoiled` if an error on it before spoils it."""
    if not oracle.critical:
      return Lapse(self.between(self.ROUTINE, model), 0.0)
    rates = self.KNOWN_EASY if self.tier(task_id) == "easy" else self.KNOWN
    known = Lapse(self.between(rates, model), self.between(self.KNOWN_WRONG, model))
    if oracle.recovering:
      return known
    # One number for all models, so that LARGE's unknown steps are among SMALL's.
    step = f"{task_id}|{oracle.position}"
    if random.Random(f"{step}|unknown").random() < self.unknown_share(model, task_id):
      told = any(part in oracle.action for part in self.TOLD)
      rate = self.between(self.TOLD_UNKNOWN if told else self.UNKNOWN, model)
      if self.skills[model] > 0:
        return Lapse(rate, self.LARGE_UNKNOWN_WRONG)
      decisive = random.Random(f"{step}|style").random() < self.DECISIVE_SHARE
      return Lapse(rate, self.DECISIVE if decisive else self.LOST, spoils=not told)
    if self.skills[model] > 0 and spoiled:
      return dataclasses.replace(known, rate=self.SPOILED)
    return known


class ScienceWorldErrors(KnowledgeErrors):
  """ScienceWorld: how hard a task is depends on its type."""

  PRIORS = (
    ("find-|lifespan-", (0.56, 0.40, 0.04)),
    ("power-component|use-thermometer|paint-secondary|identify-life", (0.18, 0.67, 0.15)),
    ("", (0.10, 0.63, 0.27)),
  )


class ALFWorldErrors(KnowledgeErrors):
  """ALFWorld: how hard a game is depends on its type of task; a model has to search there."""

  DRAW = "tier 28"  # of the first 40 the one whose shares in 126 made games are nearest to PRIORS'
  ROUTINE = (0.55, 0.45)
  UNKNOWN = (0.99, 0.97)
  SPOILED = 0.97
  PRIORS = (
    ("pick_and_place_simple", (0.64, 0.24, 0.12)),
    ("look_at_obj_in_light", (0.57, 0.23, 0.20)),
    ("pick_clean", (0.41, 0.23, 0.36)),
    ("pick_heat|pick_cool", (0.33, 0.22, 0.45)),
    ("pick_two", (0.20, 0.16, 0.64)),
  )


class AppWorldErrors(KnowledgeErrors):
  """AppWorld: how hard a task is depends on its difficulty level, from 1 to 3."""

  HARDNESS = {"easy": -2.4, "hard": 0.3, "intractable": 5.2}
  KNOWN_EASY, KNOWN = (0.06, 0.04), (0.10, 0.08)
  KNOWN_WRONG = (0.4, 0.6)
  DECISIVE_SHARE = 0.7
  TOLD, TOLD_UNKNOWN = ("login(", "page_index"), (0.6, 0.5)
  PRIORS = (
    ("^d1", (0.58, 0.30, 0.12)),
    ("^d2", (0.42, 0.32, 0.26)),
    ("^d3", (0.28, 0.29, 0.43)),
    ("", (0.42, 0.30, 0.28)),  # the downloaded tasks, whose ids do not show their level
  )


ERRORS: dict[str, type[Errors]] = {
  "sandbox": SandboxErrors,
  "scienceworld": ScienceWorldErrors,
  "alfworld": ALFWorldErrors,
  "appworld": AppWorldErrors,
}


class ScriptedPair(Pair):
  """The models as scripts; deterministic given (task, seed, step) and the state."""

  def __init__(self, names: tuple[str, ...], errors: Errors, prices: Sequence = ()):
    self.names, self.prices, self._errors = names, prices_of(names, prices), errors

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> list["ScriptedAgent"]:
    shared = self._errors, env, task, seed, {}, hold
    return [ScriptedAgent(model, price, *shared) for model, price in enumerate(self.prices)]

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Hold], "ScriptedJudge"]:
    (price,) = prices_of(config.names, config.prices)
    return functools.partial(ScriptedJudge, price, models=len(self.names))


@dataclasses.dataclass(eq=False)
class ScriptedAgent(Agent):
  """One scripted model during one episode."""

  _model: int
  _price: Price
  _errors: Errors
  _env: Env
  _task: Task
  _seed: int
  _spoiled: dict[int, int | None]  # step -> position of the plan; shared by the episode's agents
  _hold: Hold

  def _lapse(self, oracle: Oracle, step: float = math.inf) -> Lapse:
    before = [position for at, position in self._spoiled.items() if at < step]
    return self._errors.lapse(self._model, self._task.id, oracle, oracle.position in before)

  def prospect(self, messages: Messages, step: int) -> Prospect:
    """What the next call may bring; privileged. The reply, which costs little, is left out."""
    lapse, left = self._lapse(self._env.oracle()), self._task.max_steps - step
    loss = 1.0 if lapse.spoils else lapse.wrong + (1 - lapse.wrong) / left
    known_share = 1 - self._errors.unknown_share(self._model, self._task.id)
    usd = write_call(self._model, self._price, messages, "").call.cost_usd
    return Prospect(lapse.rate * loss, known_share, usd)

  def bound_usd(self, messages: Messages, step: int) -> float:
    """What the reply will cost, exactly."""
    return self._compose(messages, step)[0].call.cost_usd

  def reply(self, messages: Messages, step: int) -> Reply:
    reply, spoiled = self._compose(messages, step)
    with self._hold(reply.call.cost_usd) as cost:
      cost.usd = reply.call.cost_usd
    self._spoiled[step] = spoiled  # also in place of a proposal's, which was not acted on
    return reply

  def _compose(self, messages: Messages, step: int) -> tuple[Reply, int | None]:
    """The reply, and which position of the plan it spoils, if any."""
    oracle = self._env.oracle()
    lapse = self._lapse(oracle, step)
    key = f"{self._task.id}|{self._seed}|{step}"
    draw = random.Random(key)  # the same numbers for all models: policies differ by choice alone
    action, spoiled = oracle.action, None
    if draw.random() < lapse.rate:
      wasted = "hasty" if self._errors.skills[self._model] > 0 else "lost"
      kind = "wrong" if draw.random() < lapse.wrong else wasted
      action = self._env.mistake(kind, key)
      spoiled = oracle.position if lapse.spoils else None
    text = write_reply(THOUGHT, action, self._env.code_actions)
    return write_call(self._model, self._price, messages, text), spoiled


@dataclasses.dataclass(eq=False)
class ScriptedJudge(Agent):
  """Stands in for a strong model that is asked which one should act, by a rule of our own.

  The dearest at the start, and where the last result says that something went wrong or is one that
  came before after the same action; else the cheapest.
  """

  WRONG = ("no known action", "nothing happens", "error", "exception", "fail", "can't", "jams")

  price: Price
  task: Task
  seed: int
  hold: Hold
  models: int = 2

  def reply(self, messages: Messages, step: int) -> Reply:
    done = re.findall(r" action: (.*)\nresult: (.*)", messages[-1]["content"])
    stuck = done and (done[-1] in done[:-1] or any(w in done[-1][1].lower() for w in self.WRONG))
    answer = decision_words(self.models)[-1 if stuck or not done else SMALL]
    reply = write_call(self.models, self.price, messages, answer)
    with self.hold(reply.call.cost_usd) as cost:
      cost.usd = reply.call.cost_usd
    return reply


def write_call(model: int, price: Price, messages: Messages, text: str) -> Reply:
  """The text as a model's reply to a conversation, with its tokens (rounded up) and its price."""
  texts = [text, *(message["content"] for message in messages)]
  completion, *prompt = (-(-len(text) // CHARS_PER_TOKEN) for text in texts)
  usage = Usage(sum(prompt), 0, completion)
  return Reply(text, Call(model, usage, price.cost_usd(usage)))
