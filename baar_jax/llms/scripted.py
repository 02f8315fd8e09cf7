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
from baar_jax.envs.errors import Errors, Lapse
from baar_jax.episode import SMALL, Call, Reply, Task, Usage, decision_words
from baar_jax.llms.agent import Agent, Hold, Messages, write_reply
from baar_jax.llms.pair import Pair
from baar_jax.llms.prices import Price, prices_of

CHARS_PER_TOKEN = (
  4  # our choice: no tokenizer of the priced models is available offline
)
THOUGHT = "The next thing to do for the task is this, given what was just observed."


class Prospect(NamedTuple):
  """What is known of a model's next call by the error model alone."""

  # Expected share of the task. A wrong action or an error that spoils the step loses all of it, a
  # wasted step one part of the steps that are left (our choice).
  loss: float
  known_share: float  # of the task's critical steps
  usd: float


class ScriptedPair(Pair):
  """The models as scripts; deterministic given (task, seed, step) and the state."""

  def __init__(self, names: tuple[str, ...], errors: Errors, prices: Sequence = ()):
    self.names, self.prices, self._errors = names, prices_of(names, prices), errors

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> list["ScriptedAgent"]:
    shared = self._errors, env, task, seed, {}, hold
    return [
      ScriptedAgent(model, price, *shared) for model, price in enumerate(self.prices)
    ]

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
  _spoiled: dict[
    int, int | None
  ]  # step -> position of the plan; shared by the episode's agents
  _hold: Hold

  def _lapse(self, oracle: Oracle, step: float = math.inf) -> Lapse:
    before = [position for at, position in self._spoiled.items() if at < step]
    return self._errors.lapse(
      self._model, self._task.id, oracle, oracle.position in before
    )

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
    self._spoiled[step] = (
      spoiled  # also in place of a proposal's, which was not acted on
    )
    return reply

  def _compose(self, messages: Messages, step: int) -> tuple[Reply, int | None]:
    """The reply, and which position of the plan it spoils, if any."""
    oracle = self._env.oracle()
    lapse = self._lapse(oracle, step)
    key = f"{self._task.id}|{self._seed}|{step}"
    draw = random.Random(
      key
    )  # the same numbers for all models: policies differ by choice alone
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

  WRONG = (
    "no known action",
    "nothing happens",
    "error",
    "exception",
    "fail",
    "can't",
    "jams",
  )

  price: Price
  task: Task
  seed: int
  hold: Hold
  models: int = 2

  def reply(self, messages: Messages, step: int) -> Reply:
    done = re.findall(r" action: (.*)\nresult: (.*)", messages[-1]["content"])
    stuck = done and (
      done[-1] in done[:-1] or any(w in done[-1][1].lower() for w in self.WRONG)
    )
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
