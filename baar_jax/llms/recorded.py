"""Answer with the recorded replies of real models, in tickets of functions."""

import dataclasses
import random
from collections.abc import Sequence

from baar_jax.config import SEEDS, ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.envs.code.adapter import (
  Function,
  Node,
  hash_functions,
  read_recording,
)
from baar_jax.episode import Reply, Reserve, Task
from baar_jax.llms.history import Agent, Messages
from baar_jax.llms.prices import open_billing
from baar_jax.llms.scripted import Account


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
