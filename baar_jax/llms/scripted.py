"""The keyless pair: scripted models that follow the environment's expert and err at stated rates.

They act in the real environment through the same prompts, token counts and list prices as API
models would; only the text of their replies is made here. All rates stand in this file.
"""

import dataclasses
import math
import random
from typing import Protocol

from baar_jax.agent import Agent, Messages, Reply
from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import SMALL, Task
from baar_jax.llms.prices import Usage

CHARS_PER_TOKEN = 4  # no tokenizer of the priced models is available offline: a stated estimate
LARGE = 1


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

  def __init__(self, names: tuple[str, ...], errors: Errors):
    if len(names) != 2:
      raise ValueError(f"the scripted pair needs 2 model names, got {len(names)}: {names}")
    self.names = names
    self._errors = errors

  def start(self, env: Env, task: Task, seed: int) -> list["ScriptedAgent"]:
    spoiled: set[int] = set()
    return [
      ScriptedAgent(model, self._errors, env, task, seed, spoiled) for model in (SMALL, LARGE)
    ]


class ScriptedAgent(Agent):
  """One scripted model during one episode."""

  def __init__(
    self, model: int, errors: Errors, env: Env, task: Task, seed: int, spoiled: set[int]
  ):
    self._model = model
    self._errors = errors
    self._env = env
    self._task = task
    self._seed = seed
    self._spoiled = spoiled  # positions of the plan; shared by the episode's agents

  def _lapse(self, oracle: Oracle) -> Lapse:
    spoiled = oracle.position in self._spoiled
    return self._errors.lapse(self._model, self._task.id, oracle, spoiled)

  def error_rate(self) -> float:
    """The probability that this model errs on the step to come; privileged."""
    return self._lapse(self._env.oracle()).rate

  def reply(self, messages: Messages, step: int) -> Reply:
    oracle = self._env.oracle()
    lapse = self._lapse(oracle)
    key = f"{self._task.id}|{self._seed}|{step}"
    draw = random.Random(key)  # the same numbers for both models: policies differ by choice alone
    action = oracle.action
    if draw.random() < lapse.rate:
      wasted = "lost" if self._model == SMALL else "hasty"
      kind = "wrong" if draw.random() < lapse.wrong else wasted
      action = self._env.mistake(kind, key)
      if lapse.spoils:
        self._spoiled.add(oracle.position)
    thought = "The next thing to do for the task is this, given what was just observed."
    text = f"Thought: {thought}\n\nAction: {action}"
    prompt_tokens = sum(count_tokens(message["content"]) for message in messages)
    return Reply(text, Usage(prompt_tokens, 0, count_tokens(text)))


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
