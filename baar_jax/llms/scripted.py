"""Simulate models by scripts that follow the environment's expert and make errors.

Scripted models need no API key. They act in the real environment, and have the prompts,
token counts, list prices and prompt caches of API models. Only the text of their
replies is scripted. All error rates are our choice.
"""

import dataclasses
import math
import os
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import ERROR_WORDS, Env, Errors, Lapse, Oracle
from baar_jax.episode import SMALL, Call, Reply, Reserve, Task
from baar_jax.llms.history import Agent, Messages, write_reply
from baar_jax.llms.prices import (
  CHARS_PER_TOKEN,
  Billing,
  Read,
  count_tokens,
  open_billing,
)

THOUGHT = "The next thing to do for the task is this, given what was just observed."


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


class ScriptedPair:
  """The scripted models of a run.

  A reply depends only on the task, the seed, the step, the environment's state, and the
  steps of the plan that earlier errors have spoiled (see `Lapse.spoils`).
  """

  def __init__(
    self, config: ModelsConfig, env: type[Env], errors: Errors | None = None
  ):
    """Prepare the models.

    Args:
      config: the configuration of the models.
      env: the class of the environment.
      errors: the models' error rates; None means the environment's.

    Raises:
      ValueError: a model has no list price.
    """
    self.names = config.names
    self._config = config
    self._env = env
    self._billing = open_billing(config, env.cache_rule, env.step_s)
    self.prices = self._billing.prices
    self._errors = errors or env.Errors(len(config.names))

  def start(
    self, env: Env, task: Task, seed: int, reserve: Reserve
  ) -> list["ScriptedAgent"]:
    """Start one scripted agent for each model in an episode."""
    account = Account(self._billing, reserve)
    spoiled = {}
    return [
      ScriptedAgent(model, account, self._errors, env, task, seed, spoiled)
      for model in range(len(self.names))
    ]

  def judge(
    self, config: ModelsConfig
  ) -> Callable[[Task, int, Reserve], "ScriptedJudge"]:
    """Prepare a scripted judge: a rule at the price of the model in `config`.

    The judge stands in for the strong model that a zero-shot router asks. It has a
    prompt cache only if the models to choose from have one.
    """
    config = dataclasses.replace(config, prompt_cache=self._config.prompt_cache)
    billing = open_billing(config, self._env.cache_rule, self._env.step_s)

    def start(task: Task, seed: int, reserve: Reserve) -> ScriptedJudge:
      """Start the judge in an episode."""
      return ScriptedJudge(Account(billing, reserve))

    return start

  def stop(self) -> None:
    """Stop all calls. A scripted call takes no time, so none is in flight."""

  def close(self) -> None:
    """Close connections and files. Scripted models have none."""


class Prompt(NamedTuple):
  """A prompt that a model has read, and when."""

  messages: tuple[dict[str, str], ...]
  at_s: float


@dataclasses.dataclass(eq=False)
class Account:
  """Bill the calls of one episode, with estimated tokens and simulated time.

  Attributes:
    billing: the prices and prompt caches of the models.
    reserve: reserves the calls in the budgets.
    prompts: the prompts that each model has read, by the model's index in `billing`.
    replies_s: seconds of all replies so far.
  """

  billing: Billing
  reserve: Reserve
  prompts: dict[int, list[Prompt]] = dataclasses.field(default_factory=dict)
  replies_s: float = 0.0

  def bill(self, model: int, messages: Messages, text: str, step: int) -> Call:
    """Bill a call that is not made yet.

    Args:
      model: index of the model in `billing`.
      messages: the prompt.
      text: the reply.
      step: index of the episode's step.
    """
    tokens = [count_tokens(message["content"]) for message in messages]
    reads = [
      Read(_count_shared_tokens(prompt.messages, messages, tokens), prompt.at_s)
      for prompt in self.prompts.get(model, ())
    ]
    now_s = self._now_s(step)
    return self.billing.bill(model, reads, sum(tokens), count_tokens(text), now_s)

  def bound_usd(self, model: int, messages: Messages, text: str) -> float:
    """Compute the worst case of a call in dollars, for which nothing is cached."""
    tokens = sum(count_tokens(message["content"]) for message in messages)
    return self.billing.prices[model].worst_case_usd(tokens, count_tokens(text))

  def pay(self, model: int, messages: Messages, text: str, step: int) -> Call:
    """Make a call: pay for it, and keep its prompt in the cache."""
    call = self.bill(model, messages, text, step)
    with self.reserve(self.bound_usd(model, messages, text)) as cost:
      cost.usd = call.cost_usd
    self.prompts.setdefault(model, []).append(
      Prompt(tuple(messages), self._now_s(step))
    )
    self.replies_s += self.billing.wait_s(call)
    return call

  def _now_s(self, step: int) -> float:
    """Return the time of the next call at a step, in seconds."""
    return self.replies_s + step * self.billing.step_s


def _count_shared_tokens(
  earlier: Sequence[dict], messages: Messages, tokens: Sequence[int]
) -> int:
  """Count the first tokens that two prompts have in common.

  Args:
    earlier: the messages of one prompt.
    messages: the messages of the other prompt.
    tokens: the tokens of each of `messages`.
  """
  shared = 0
  for old, new, count in zip(earlier, messages, tokens):
    if old["content"] != new["content"]:
      prefix = os.path.commonprefix([old["content"], new["content"]])
      return shared + len(prefix) // CHARS_PER_TOKEN
    shared += count
  return shared


@dataclasses.dataclass(eq=False)
class ScriptedAgent(Agent):
  """One scripted model during one episode.

  Attributes:
    _spoiled: for each step, the position in the expert's plan that the step's error
      spoiled, or None. All agents of an episode share this dict.
  """

  _model: int
  _account: Account
  _errors: Errors
  _env: Env
  _task: Task
  _seed: int
  _spoiled: dict[int, int | None]

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
    usd = self._account.bill(self._model, messages, "", step).cost_usd
    return Prospect(lapse.rate * loss, known_share, usd)

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the cost of the reply in dollars, if nothing is cached."""
    text, _ = self._compose(step)
    return self._account.bound_usd(self._model, messages, text)

  def reply(self, messages: Messages, step: int) -> Reply:
    """Reply at a step, and record which position of the expert's plan it spoils."""
    text, spoiled_position = self._compose(step)
    reply = Reply(text, self._account.pay(self._model, messages, text, step))
    # A rejected proposal of a cascade spoils nothing, because the reply of the model
    # that acts overwrites the proposal's entry.
    self._spoiled[step] = spoiled_position
    return reply

  def _compose(self, step: int) -> tuple[str, int | None]:
    """Write the reply at a step, with an error at the model's error rates.

    Returns:
      The text of the reply, and the position of the plan that its action spoils (None
      if none).
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
      kind = "hasty" if self._model > SMALL else "lost"
      if draw.random() < lapse.wrong:
        kind = "wrong"
      action = self._env.mistake(kind, key)
      if lapse.spoils:
        spoiled_position = oracle.position
    return write_reply(THOUGHT, action, self._env.code_actions), spoiled_position


@dataclasses.dataclass(eq=False)
class ScriptedJudge(Agent):
  """Simulate the strong model that a zero-shot router asks, by a rule (our choice).

  The rule chooses the costliest model at the start, after a result with a word of
  `ERROR_WORDS`, and if the last action has brought the same result before. Otherwise it
  chooses the cheapest model.

  Attributes:
    account: bills the judge's calls.
  """

  account: Account

  def reply(self, messages: Messages, step: int) -> Reply:
    """Answer with one of the words in the prompt's question, the cheapest first."""
    prompt = messages[-1]["content"]
    words = re.search(r"act next, (.*)\?", prompt)[1].split(" or ")
    rounds = re.findall(r" action: (.*)\nresult: (.*)", prompt)
    rank = SMALL
    if not rounds or rounds[-1] in rounds[:-1] or ERROR_WORDS.search(rounds[-1][1]):
      rank = -1
    call = self.account.pay(0, messages, words[rank], step)
    return Reply(words[rank], dataclasses.replace(call, model=len(words)))
