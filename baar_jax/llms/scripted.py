"""The keyless pair: scripted models that follow the environment's expert and err at stated rates.

They act in the real environment through the same prompts, token counts and list prices as API
models would; only the text of their replies is scripted. Their rates of error are in errors.py.
"""

import dataclasses
import math
import random
import re
from collections.abc import Sequence

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import DECISION_WORDS, LARGE, SMALL, Call, Reply, Task, Usage
from baar_jax.llms.agent import Agent, Hold, Judge, Messages, Pair, write_reply
from baar_jax.llms.errors import Errors, Lapse
from baar_jax.llms.prices import Price, prices_of

CHARS_PER_TOKEN = 4  # no tokenizer of the priced models is available offline: a stated estimate
JUDGE = 2  # index of the judge's calls


class ScriptedPair(Pair):
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


@dataclasses.dataclass(eq=False)
class ScriptedAgent(Agent):
  """One scripted model during one episode."""

  _model: int
  _price: Price
  _errors: Errors
  _env: Env
  _task: Task
  _seed: int
  _spoiled: dict[int, int]  # step -> position of the plan; shared by the episode's agents
  _hold: Hold
  _composed: tuple[int, Reply, int | None] | None = None  # of the next step

  def _lapse(self, oracle: Oracle, step: float = math.inf) -> Lapse:
    before = [position for at, position in self._spoiled.items() if at < step]
    return self._errors.lapse(self._model, self._task.id, oracle, oracle.position in before)

  def error_rate(self) -> float:
    """The probability that this model errs on the next step; privileged."""
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
    self._spoiled.pop(step, None)  # a proposal that this reply replaces was not acted on
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
      spoiled = oracle.position if lapse.spoils else None
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
