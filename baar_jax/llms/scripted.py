"""Simulate models by scripts that follow the environment's expert and make errors.

Scripted models need no API key. They act in the real environment, and have the prompts,
token counts and list prices of API models. Only the text of their replies is scripted.
All error rates are our choice.
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
from baar_jax.llms.agent import Agent, Messages, Reserve, write_reply
from baar_jax.llms.prices import Pair, Price, prices_of

# Tokens are estimated from characters, because the tokenizers of API models are not
# available offline (our choice).
CHARS_PER_TOKEN = 4
THOUGHT = "The next thing to do for the task is this, given what was just observed."
WRONG = re.compile("no known action|nothing happens|error|exception|fail|can't|jams")


class Prospect(NamedTuple):
  """A forecast of a model's next call, from the scripted models' error rates.

  Attributes:
    loss: expected loss, as a share of the task's score. A wrong action, or an error
      that spoils the step for later calls, counts as the loss of the whole score. A
      wasted step counts as the loss of 1 / (remaining steps) of the score (our choice).
    known_share: share of the task's critical steps that the model knows how to do.
    usd: cost of the call in dollars, without the reply.
  """

  loss: float
  known_share: float
  usd: float


class ScriptedPair(Pair):
  """The scripted models of a run.

  A reply depends only on the task, the seed, the step, the environment's state, and the
  steps of the plan that earlier errors have spoiled (see `Lapse.spoils`).
  """

  def __init__(
    self, names: tuple[str, ...], errors: Errors, prices: Sequence[Sequence[float]] = ()
  ):
    """Prepare the models.

    Args:
      names: the models' names, cheapest first.
      errors: the models' error rates in the environment.
      prices: the rows of `ModelsConfig.prices`; without rows, list prices are used.

    Raises:
      ValueError: a model has no list price.
    """
    self.names = names
    self.prices = prices_of(names, prices)
    self._errors = errors

  def start(
    self, env: Env, task: Task, seed: int, reserve: Reserve
  ) -> list["ScriptedAgent"]:
    """Start one scripted agent for each model in an episode."""
    spoiled = {}
    agents = []
    for model, price in enumerate(self.prices):
      agents.append(
        ScriptedAgent(model, price, self._errors, env, task, seed, spoiled, reserve)
      )
    return agents

  def judge(
    self, config: ModelsConfig
  ) -> Callable[[Task, int, Reserve], "ScriptedJudge"]:
    """Prepare a scripted judge: a rule at the price of the model in `config`.

    The judge stands in for the strong model that a zero-shot router asks.
    """
    (price,) = prices_of(config.names, config.prices)
    return functools.partial(ScriptedJudge, price, models=len(self.names))


@dataclasses.dataclass(eq=False)
class ScriptedAgent(Agent):
  """One scripted model during one episode.

  Attributes:
    _spoiled: for each step, the position in the expert's plan that the step's error
      spoiled, or None. All agents of an episode share this dict.
  """

  _model: int
  _price: Price
  _errors: Errors
  _env: Env
  _task: Task
  _seed: int
  _spoiled: dict[int, int | None]
  _reserve: Reserve

  def _find_lapse(self, oracle: Oracle, step: float = math.inf) -> Lapse:
    """Look up the model's error rates at the current position of the expert's plan.

    Args:
      oracle: the expert's next action and its position.
      step: index of the current step. Only errors of earlier steps count as spoiling;
        by default, the errors of all steps count.
    """
    is_spoiled = any(
      spoiling_step < step and position == oracle.position
      for spoiling_step, position in self._spoiled.items()
    )
    return self._errors.lapse(self._model, self._task.id, oracle, is_spoiled)

  def prospect(self, messages: Messages, step: int) -> Prospect:
    """Forecast the loss and the cost of the model's next call.

    Only the privileged policy may use this forecast, because a router cannot see the
    error rates. The cost leaves out the reply, which is cheap.
    """
    lapse = self._find_lapse(self._env.oracle())
    loss = 1.0
    if not lapse.spoils:
      loss = lapse.wrong + (1 - lapse.wrong) / (self._task.max_steps - step)
    known_share = 1 - self._errors.unknown_share(self._model, self._task.id)
    usd = write_call(self._model, self._price, messages, "").call.cost_usd
    return Prospect(lapse.rate * loss, known_share, usd)

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the exact cost of the reply, in dollars; it is the worst case, too."""
    reply, _ = self._compose(messages, step)
    return reply.call.cost_usd

  def reply(self, messages: Messages, step: int) -> Reply:
    """Reply at a step, and record which position of the expert's plan it spoils."""
    reply, spoiled_position = self._compose(messages, step)
    with self._reserve(reply.call.cost_usd) as cost:
      cost.usd = reply.call.cost_usd
    # A rejected proposal of a cascade spoils nothing, because the reply of the model
    # that acts overwrites the proposal's entry.
    self._spoiled[step] = spoiled_position
    return reply

  def _compose(self, messages: Messages, step: int) -> tuple[Reply, int | None]:
    """Write the reply at a step, with an error at the model's error rates.

    Returns:
      The reply, and the position of the plan that its action spoils (None if none).
    """
    oracle = self._env.oracle()
    lapse = self._find_lapse(oracle, step)
    key = f"{self._task.id}|{self._seed}|{step}"
    # All models share the random numbers of a step, so that policies differ only by
    # their choices.
    draw = random.Random(key)
    action = oracle.action
    spoiled_position = None
    if draw.random() < lapse.rate:
      kind = "hasty" if self._errors.skills[self._model] > 0 else "lost"
      if draw.random() < lapse.wrong:
        kind = "wrong"
      action = self._env.mistake(kind, key)
      if lapse.spoils:
        spoiled_position = oracle.position
    text = write_reply(THOUGHT, action, self._env.code_actions)
    return write_call(self._model, self._price, messages, text), spoiled_position


@dataclasses.dataclass(eq=False)
class ScriptedJudge(Agent):
  """Simulate the strong model that a zero-shot router asks, by a rule (our choice).

  The rule chooses the costliest model at the start, after a result with a word of
  `WRONG`, and if the last action has brought the same result before. Otherwise it
  chooses the cheapest model.

  Attributes:
    models: number of models to choose from.
  """

  price: Price
  task: Task
  seed: int
  reserve: Reserve
  models: int = 2

  def reply(self, messages: Messages, step: int) -> Reply:
    """Answer with the word that names the chosen model; see `decision_words`."""
    rounds = re.findall(r" action: (.*)\nresult: (.*)", messages[-1]["content"])
    rank = SMALL
    if not rounds or rounds[-1] in rounds[:-1] or WRONG.search(rounds[-1][1].lower()):
      rank = -1
    answer = decision_words(self.models)[rank]
    reply = write_call(self.models, self.price, messages, answer)
    with self.reserve(reply.call.cost_usd) as cost:
      cost.usd = reply.call.cost_usd
    return reply


def write_call(model: int, price: Price, messages: Messages, text: str) -> Reply:
  """Make a model's reply from its text, with estimated tokens and their cost.

  Args:
    model: index of the model by price.
    price: the model's price.
    messages: the prompt.
    text: the text of the reply.
  """
  prompt_tokens = sum(_count_tokens(message["content"]) for message in messages)
  usage = Usage(prompt_tokens, 0, _count_tokens(text))
  return Reply(text, Call(model, usage, price.cost_usd(usage)))


def _count_tokens(text: str) -> int:
  """Estimate the tokens of a text."""
  return math.ceil(len(text) / CHARS_PER_TOKEN)
