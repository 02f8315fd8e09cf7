"""The keyless models: scripts that follow the environment's expert and make errors.

They act in the real environment through the same prompts, token counts and list prices
as API models. Only the text of their replies is scripted. All error rates are design
choices.
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

# The priced models have no tokenizer offline (our choice).
CHARS_PER_TOKEN = 4
THOUGHT = "The next thing to do for the task is this, given what was just observed."
WRONG = re.compile("no known action|nothing happens|error|exception|fail|can't|jams")


class Prospect(NamedTuple):
  """The error model's forecast of a model's next call."""

  # Expected share of the task's score. A wrong action or a spoiled step loses it all.
  # A wasted step loses one part of the remaining steps (our choice).
  loss: float
  known_share: float  # share of the task's critical steps that the model knows
  usd: float


class ScriptedPair(Pair):
  """The models as scripts; deterministic given (task, seed, step) and the state."""

  def __init__(
    self, names: tuple[str, ...], errors: Errors, prices: Sequence[Sequence[float]] = ()
  ):
    self.names = names
    self.prices = prices_of(names, prices)
    self._errors = errors

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> list["ScriptedAgent"]:
    """Start one script for each model in an episode."""
    spoiled = {}
    agents = []
    for model, price in enumerate(self.prices):
      agents.append(
        ScriptedAgent(model, price, self._errors, env, task, seed, spoiled, hold)
      )
    return agents

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Hold], "ScriptedJudge"]:
    """Open the stand-in for a zero-shot router's model, at its price."""
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
  # The plan's position that each step spoiled; the episode's agents share it.
  _spoiled: dict[int, int | None]
  _hold: Hold

  def _lapse(self, oracle: Oracle, step: float = math.inf) -> Lapse:
    """Find how the model may err, given the steps that were spoiled before."""
    before = [position for at, position in self._spoiled.items() if at < step]
    is_spoiled = oracle.position in before
    return self._errors.lapse(self._model, self._task.id, oracle, is_spoiled)

  def prospect(self, messages: Messages, step: int) -> Prospect:
    """Forecast the next call; only privileged policies may know.

    The dollars leave out the reply, which costs little.
    """
    lapse = self._lapse(self._env.oracle())
    loss = 1.0
    if not lapse.spoils:
      loss = lapse.wrong + (1 - lapse.wrong) / (self._task.max_steps - step)
    known_share = 1 - self._errors.unknown_share(self._model, self._task.id)
    usd = write_call(self._model, self._price, messages, "").call.cost_usd
    return Prospect(lapse.rate * loss, known_share, usd)

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the exact cost of the reply."""
    reply, _ = self._compose(messages, step)
    return reply.call.cost_usd

  def reply(self, messages: Messages, step: int) -> Reply:
    """Answer at a step, and remember the position that the answer spoils."""
    reply, spoiled = self._compose(messages, step)
    with self._hold(reply.call.cost_usd) as cost:
      cost.usd = reply.call.cost_usd
    # It replaces the entry of a proposal, which was not acted on.
    self._spoiled[step] = spoiled
    return reply

  def _compose(self, messages: Messages, step: int) -> tuple[Reply, int | None]:
    """Write the reply; return it and the plan's position that it spoils, if any."""
    oracle = self._env.oracle()
    lapse = self._lapse(oracle, step)
    key = f"{self._task.id}|{self._seed}|{step}"
    # All models draw the same numbers: policies differ by choice alone.
    draw = random.Random(key)
    action = oracle.action
    spoiled = None
    if draw.random() < lapse.rate:
      kind = "hasty" if self._errors.skills[self._model] > 0 else "lost"
      if draw.random() < lapse.wrong:
        kind = "wrong"
      action = self._env.mistake(kind, key)
      if lapse.spoils:
        spoiled = oracle.position
    text = write_reply(THOUGHT, action, self._env.code_actions)
    return write_call(self._model, self._price, messages, text), spoiled


@dataclasses.dataclass(eq=False)
class ScriptedJudge(Agent):
  """Stand in for a strong model that is asked to choose, by a rule of our own.

  It chooses the costliest model at the start, after an error, and if the last action
  had the same result before; else the cheapest.
  """

  price: Price
  task: Task
  seed: int
  hold: Hold
  models: int = 2

  def reply(self, messages: Messages, step: int) -> Reply:
    """Answer with the word for a model."""
    rounds = re.findall(r" action: (.*)\nresult: (.*)", messages[-1]["content"])
    rank = SMALL
    if not rounds or rounds[-1] in rounds[:-1] or WRONG.search(rounds[-1][1].lower()):
      rank = -1
    answer = decision_words(self.models)[rank]
    reply = write_call(self.models, self.price, messages, answer)
    with self.hold(reply.call.cost_usd) as cost:
      cost.usd = reply.call.cost_usd
    return reply


def write_call(model: int, price: Price, messages: Messages, text: str) -> Reply:
  """Make a model's reply of a text, with its tokens and its cost."""
  prompt_tokens = sum(_count_tokens(message["content"]) for message in messages)
  usage = Usage(prompt_tokens, 0, _count_tokens(text))
  return Reply(text, Call(model, usage, price.cost_usd(usage)))


def _count_tokens(text: str) -> int:
  return math.ceil(len(text) / CHARS_PER_TOKEN)
