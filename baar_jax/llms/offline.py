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

Sizes = tuple[int, int] | None  # tokens of a prompt and of its reply
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
    prompts: the prompts that each model has read, by the model's index in `billing`.
    replies_s: seconds of all replies so far.
  """

  billing: Billing
  reserve: Reserve
  prompts: dict[int, list[Prompt]] = dataclasses.field(default_factory=dict)
  replies_s: float = 0.0

  def bill(
    self, model: int, messages: Messages, text: str, step: int, sizes: Sizes = None
  ) -> Call:
    """Bill a call that is not made yet.

    Args:
      model: index of the model in `billing`.
      messages: the prompt.
      text: the reply.
      step: index of the episode's step.
      sizes: the tokens of the prompt and of the reply, if they were counted.
    """
    tokens = [count_tokens(message["content"]) for message in messages]
    estimated = sum(tokens)
    prompt_tokens, reply_tokens = sizes or (estimated, count_tokens(text))
    reads = []
    for prompt in self.prompts.get(model, ()):
      shared = _count_shared_tokens(prompt.messages, messages, tokens)
      reads.append(Read(shared * prompt_tokens // max(estimated, 1), prompt.at_s))
    now_s = self._now_s(step)
    return self.billing.bill(model, reads, prompt_tokens, reply_tokens, now_s)

  def bound_usd(self, model: int, messages: Messages, text: str) -> float:
    """Compute the worst case of a call in dollars, for which nothing is cached."""
    tokens = sum(count_tokens(message["content"]) for message in messages)
    return self.billing.prices[model].worst_case_usd(tokens, count_tokens(text))

  def pay(
    self,
    model: int,
    messages: Messages,
    text: str,
    step: int,
    sizes: Sizes = None,
    bound_usd: float | None = None,
  ) -> Call:
    """Make a call: pay for it, and keep its prompt in the cache.

    Args:
      model, messages, text, step, sizes: see `bill`.
      bound_usd: the worst case of the call; None is that of this reply.
    """
    call = self.bill(model, messages, text, step, sizes)
    if bound_usd is None:
      bound_usd = self.bound_usd(model, messages, text)
    with self.reserve(bound_usd) as cost:
      cost.usd = call.cost_usd
    self.prompts.setdefault(model, []).append(
      Prompt(tuple(messages), self._now_s(step))
    )
    self.replies_s += self.billing.wait_s(call)
    return call

  def _now_s(self, step: int) -> float:
    """Return the time of the next call at a step, in seconds."""
    return self.replies_s + step * STEP_S


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


class RecordedPair:
  """The recorded models of a run."""

  def __init__(self, config: ModelsConfig, functions: Sequence[Function]):
    """Read the recording.

    Args:
      config: the configuration of the models.
      functions: all functions of the environment.

    Raises:
      ValueError: the recording cannot be read, or has other models, functions or
        prompts; or a model has no price.
    """
    self.names = config.names
    self._billing = open_billing(config)
    self._path = config.recording
    recording = read_recording(self._path)
    header = recording.header
    self._nodes = recording.nodes
    self._trials = recording.trials
    self._reply_tokens = header["max_completion_tokens"]
    self._id_of = {function.prompt(): function.id for function in functions}
    problem = ""
    if header["models"] != [*self.names]:
      names = tuple(header["models"])
      problem = f'has other models: set --config.models.names="{names}"'
    elif header["functions"] != hash_functions(functions):
      problem = (
        "has other functions: set --config.env.options.data as it was recorded with, "
        "or record again with tools/record.py"
      )
    if problem:
      raise ValueError(f"the recording {self._path} {problem}")
    recording.check_prompts(functions)

  def start(
    self, env: Env, task: Task, seed: int, reserve: Reserve
  ) -> list["RecordedAgent"]:
    """Start one agent for each model in an episode."""
    account = Account(self._billing, reserve)
    tried = {}
    return [
      RecordedAgent(self, model, account, task, seed, tried)
      for model in range(len(self.names))
    ]

  def find(
    self, messages: Messages, task: Task, seed: int, model: int, last: tuple[str, str]
  ) -> Node:
    """Find the recorded reply of a model to a conversation.

    Args:
      messages: the conversation.
      task: the ticket.
      seed: the seed of the episode, which decides the recorded trial.
      model: index of the model.
      last: function and path of the last try in this episode.

    Raises:
      ValueError: the recording has no such reply.
    """
    function = self._id_of.get(messages[-1]["content"])
    if function:
      last = (function, "")  # The first try at a function.
    function, before = last
    trial = draw_trial(task.id, function, seed, self._trials)
    node = self._nodes.get((function, trial, f"{before}{model}"))
    if node is None:
      raise ValueError(
        f"the recording {self._path} has no reply to {function}, trial {trial}, models "
        f"{before}{model}: record it with python -m tools.record"
      )
    return node

  def bound_usd(self, model: int, node: Node) -> float:
    """Compute the worst case of a call, with the longest reply, in dollars."""
    price = self._billing.prices[model]
    return price.worst_case_usd(node.prompt_tokens, self._reply_tokens)

  def stop(self) -> None:
    """Stop all calls. A recorded call takes no time, so none is in flight."""

  def close(self) -> None:
    """Close connections and files. Recorded models have none."""


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
    """Find the reply to a conversation."""
    last = self.tried.get(step - 1, ("", ""))
    return self.pair.find(messages, self.task, self.seed, self.model, last)

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the worst case of the call in dollars."""
    return self.pair.bound_usd(self.model, self._find(messages, step))

  def reply(self, messages: Messages, step: int) -> Reply:
    """Give the recorded reply."""
    node = self._find(messages, step)
    sizes = (node.prompt_tokens, node.completion_tokens)
    bound_usd = self.pair.bound_usd(self.model, node)
    call = self.account.pay(self.model, messages, node.reply, step, sizes, bound_usd)
    # A rejected proposal of a cascade is overwritten by the reply that is acted on.
    self.tried[step] = (node.function, node.path)
    return Reply(node.reply, dataclasses.replace(call, latency_s=node.seconds))


class ScriptedPair:
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
    self.names = config.names
    self._billing = open_billing(config)
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

    def start(task: Task, seed: int, reserve: Reserve) -> ScriptedJudge:
      """Start the judge in an episode."""
      return ScriptedJudge(Account(billing, reserve))

    return start

  def stop(self) -> None:
    """Stop all calls. A scripted call takes no time, so none is in flight."""

  def close(self) -> None:
    """Close connections and files. Scripted models have none."""


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
    return self._account.bound_usd(self._model, messages, text)

  def reply(self, messages: Messages, step: int) -> Reply:
    """Reply at a step, and record whether the reply is an error."""
    text, failed = self._compose(step)
    reply = Reply(text, self._account.pay(self._model, messages, text, step))
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
    call = self.account.pay(0, messages, words[rank], step)
    return Reply(words[rank], dataclasses.replace(call, model=len(words)))
