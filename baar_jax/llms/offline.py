"""Models that need no key: recorded replies of real models, and scripts.

Recorded models give again what real models once replied, in tickets of functions.
Scripted models follow the environment's expert and make errors. They act in the real
environment, and have the prompts, token counts, list prices and prompt caches of API
models. Only the text of their replies is scripted. All error rates are our choice.
"""

import dataclasses
import os
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baar_jax.config import SEEDS, ModelsConfig
from baar_jax.envs.base import ERROR_WORDS, Env, Errors, Lapse, Oracle
from baar_jax.envs.code.adapter import (
  Function,
  Node,
  hash_functions,
  read_recording,
)
from baar_jax.episode import SMALL, Call, Reply, Reserve, Task
from baar_jax.llms.history import Agent, Messages, write_reply
from baar_jax.llms.prices import (
  CHARS_PER_TOKEN,
  STEP_S,
  Billing,
  Read,
  count_tokens,
  open_billing,
)

Sizes = tuple[int, int]  # tokens of a prompt and of its reply
THOUGHT = "The next thing to do for the task is this, given what was just observed."


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
    longest_reply: the limit on the tokens of a reply, which a worst case assumes.
    prompts: the prompts that each model has read, by the model's index in `billing`.
    replies_s: seconds of all replies so far.
  """

  billing: Billing
  reserve: Reserve
  longest_reply: int = 0
  prompts: dict[int, list[Prompt]] = dataclasses.field(default_factory=dict)
  replies_s: float = 0.0

  def bound_usd(self, model: int, sizes: Sizes) -> float:
    """Compute the worst case of a call in dollars, for which nothing is cached."""
    prompt_tokens, reply_tokens = sizes
    longest = max(reply_tokens, self.longest_reply)
    return self.billing.prices[model].worst_case_usd(prompt_tokens, longest)

  def pay(self, model: int, messages: Messages, sizes: Sizes, step: int) -> Call:
    """Make a call: pay for it, and keep its prompt in the cache.

    Args:
      model: index of the model in `billing`.
      messages: the prompt.
      sizes: the tokens of the prompt and of the reply.
      step: index of the episode's step.
    """
    tokens = [count_tokens(message["content"]) for message in messages]
    now_s = self.replies_s + step * STEP_S
    prompts = self.prompts.setdefault(model, [])
    reads = []
    for prompt in prompts:
      shared = _count_shared_tokens(prompt.messages, messages, tokens)
      # The counted tokens of a prompt may be others than the estimated ones.
      reads.append(Read(shared * sizes[0] // max(sum(tokens), 1), prompt.at_s))
    call = self.billing.bill(model, reads, *sizes, now_s)
    with self.reserve(self.bound_usd(model, sizes)) as cost:
      cost.usd = call.cost_usd
    prompts.append(Prompt(tuple(messages), now_s))
    self.replies_s += self.billing.wait_s(call)
    return call


def estimate_sizes(messages: Messages, text: str) -> Sizes:
  """Estimate the tokens of a prompt and of its reply."""
  prompt_tokens = sum(count_tokens(message["content"]) for message in messages)
  return prompt_tokens, count_tokens(text)


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


class OfflinePair:
  """Models that need no connection. Their calls take no time, so none is in flight."""

  def __init__(self, config: ModelsConfig):
    """Look up the prices of the models.

    Raises:
      ValueError: a model has no list price.
    """
    self.names = config.names
    self._billing = open_billing(config)

  def stop(self) -> None:
    """Stop all calls."""

  def close(self) -> None:
    """Close connections and files."""


class RecordedPair(OfflinePair):
  """The recorded models of a run.

  Attributes:
    path: the file of the recording.
    recording: the recording.
    id_of: the id of the function that each prompt of a first try asks for.
  """

  def __init__(self, config: ModelsConfig, functions: Sequence[Function]):
    """Read the recording.

    Args:
      config: the configuration of the models.
      functions: all functions of the environment.

    Raises:
      ValueError: the recording cannot be read, or has other models, functions or
        prompts; or a model has no price.
    """
    super().__init__(config)
    self.path = config.recording
    self.recording = read_recording(self.path)
    self.id_of = {function.prompt(): function.id for function in functions}
    header = self.recording.header
    if header["models"] != [*self.names]:
      names = tuple(header["models"])
      raise ValueError(
        f"the recording {self.path} has other models: set "
        f'--config.models.names="{names}"'
      )
    if header["functions"] != hash_functions(functions):
      raise ValueError(
        f"the recording {self.path} has other functions: set --config.env.options.data "
        "as it was recorded with, or record again with tools/record.py"
      )
    self.recording.check_prompts(functions)

  def start(
    self, env: Env, task: Task, seed: int, reserve: Reserve
  ) -> list["RecordedAgent"]:
    """Start one agent for each model in an episode."""
    longest_reply = self.recording.header["max_completion_tokens"]
    account = Account(self._billing, reserve, longest_reply)
    tried = {}
    return [
      RecordedAgent(self, model, account, task, seed, tried)
      for model in range(len(self.names))
    ]


def draw_trial(task_id: str, function: str, seed: int, trials: int) -> int:
  """Draw the recorded trial of a function in an episode (our choice).

  Of one purpose, as many trials in a row as there are recorded ones draw each once.

  Args:
    task_id: the ticket.
    function: the id of the function.
    seed: the seed of the episode.
    trials: the number of recorded trials.
  """
  order = [*range(trials)]
  random.Random(f"{task_id}|{function}|{seed // SEEDS}").shuffle(order)
  return order[seed % SEEDS % trials]


@dataclasses.dataclass(eq=False)
class RecordedAgent(Agent):
  """One recorded model during one episode.

  Attributes:
    tried: function and path of the reply that was acted on, for each step. All agents
      of an episode share this dict.
  """

  pair: RecordedPair
  model: int
  account: Account
  task: Task
  seed: int
  tried: dict[int, tuple[str, str]]

  def _find(self, messages: Messages, step: int) -> Node:
    """Find the recorded reply to a conversation.

    Raises:
      ValueError: the recording has no such reply.
    """
    recording = self.pair.recording
    function, before = self.tried.get(step - 1, ("", ""))
    if first := self.pair.id_of.get(messages[-1]["content"]):
      function = first
      before = ""
    trial = draw_trial(self.task.id, function, self.seed, recording.trials)
    path = f"{before}{self.model}"
    node = recording.nodes.get((function, trial, path))
    if node is None:
      raise ValueError(
        f"the recording {self.pair.path} has no reply to {function}, trial {trial}, "
        f"models {path}: record it with python -m tools.record"
      )
    return node

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the worst case of the call in dollars."""
    node = self._find(messages, step)
    sizes = (node.prompt_tokens, node.completion_tokens)
    return self.account.bound_usd(self.model, sizes)

  def reply(self, messages: Messages, step: int) -> Reply:
    """Give the recorded reply."""
    node = self._find(messages, step)
    sizes = (node.prompt_tokens, node.completion_tokens)
    call = self.account.pay(self.model, messages, sizes, step)
    # A rejected proposal of a cascade is overwritten by the reply that is acted on.
    self.tried[step] = (node.function, node.path)
    return Reply(node.reply, dataclasses.replace(call, latency_s=node.seconds))


class ScriptedPair(OfflinePair):
  """The scripted models of a run.

  A reply depends only on the task, the seed, the step, the model, the environment's
  state, and the tries that failed at the expert's next step so far.
  """

  def __init__(self, config: ModelsConfig, env: type[Env]):
    """Prepare the models.

    Args:
      config: the configuration of the models.
      env: the class of the environment.

    Raises:
      ValueError: a model has no list price.
    """
    super().__init__(config)
    self._errors = dataclasses.replace(env.errors, models=len(config.names))

  def start(
    self, env: Env, task: Task, seed: int, reserve: Reserve
  ) -> list["ScriptedAgent"]:
    """Start one scripted agent for each model in an episode."""
    account = Account(self._billing, reserve)
    failed = {}
    return [
      ScriptedAgent(model, account, self._errors, env, task, seed, failed)
      for model in range(len(self.names))
    ]

  def judge(
    self, config: ModelsConfig
  ) -> Callable[[Task, int, Reserve], "ScriptedJudge"]:
    """Prepare a scripted judge: a rule at the price of the model in `config`.

    The judge stands in for the strong model that a zero-shot router asks.
    """
    billing = open_billing(config)
    return lambda task, seed, reserve: ScriptedJudge(Account(billing, reserve))


@dataclasses.dataclass(eq=False)
class ScriptedAgent(Agent):
  """One scripted model during one episode.

  Attributes:
    _failed: for each step the position of the expert's plan at which the model that
      acted erred, or None. All agents of an episode share this dict.
  """

  _model: int
  _account: Account
  _errors: Errors
  _env: Env
  _task: Task
  _seed: int
  _failed: dict[int, int | None]

  def _find_lapse(self, oracle: Oracle, step: int) -> Lapse:
    """Look up the model's error rates at a step, after the failed tries at it."""
    failed = any(
      at < step and position == oracle.position for at, position in self._failed.items()
    )
    return self._errors.lapse(self._model, self._task.id, oracle, failed)

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the cost of the reply in dollars, if nothing is cached."""
    text, _ = self._compose(step)
    return self._account.bound_usd(self._model, estimate_sizes(messages, text))

  def reply(self, messages: Messages, step: int) -> Reply:
    """Reply at a step, and record whether the reply is an error."""
    text, failed = self._compose(step)
    sizes = estimate_sizes(messages, text)
    reply = Reply(text, self._account.pay(self._model, messages, sizes, step))
    # The error of a rejected proposal of a cascade does not count, because the reply of
    # the model that acts overwrites the proposal's entry.
    self._failed[step] = failed
    return reply

  def _compose(self, step: int) -> tuple[str, int | None]:
    """Write the reply at a step, with an error at the model's error rates.

    Returns:
      The text of the reply, and the position of the expert's plan if it is an error.
    """
    oracle = self._env.oracle()
    lapse = self._find_lapse(oracle, step)
    # Each model has its own random numbers. All policies share them.
    key = f"{self._task.id}|{self._seed}|{step}|{self._model}"
    draw = random.Random(key)
    action = oracle.action
    failed = None
    if draw.random() < lapse.rate:
      kind = "wrong" if draw.random() < lapse.wrong else "wasted"
      action = self._env.mistake(kind, key)
      failed = oracle.position
    return write_reply(THOUGHT, action, self._env.code_actions), failed


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
    sizes = estimate_sizes(messages, words[rank])
    call = self.account.pay(0, messages, sizes, step)
    return Reply(words[rank], dataclasses.replace(call, model=len(words)))
