"""The ReAct agent: the conversation that a model is shown, and the action in its reply."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.episode import Reply, Task
from baar_jax.llms.prices import Price

Messages = list[dict[str, str]]
# hold(usd, replayed=False) reserves the most that a call can cost while it is made; the value of
# the context manager has `usd`, to be set to the call's cost. See `rollout.budget.hold`.
Hold = Callable[..., AbstractContextManager]

NO_ACTION = (
  "No action was found in the reply. Answer with 'Thought:' and then 'Action:'."
)
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)


class NoAnswer(RuntimeError):
  """A model gave no usable answer, however often it was asked; the episode ends in an error."""


class Agent(Protocol):
  """One model during one episode; a judge's questions in an episode are its steps."""

  def bound_usd(self, messages: Messages, step: int) -> float:
    """The most that one attempt at a reply can cost."""

  def reply(self, messages: Messages, step: int) -> Reply:
    """The answer at a step (from 0). Raises NoAnswer, or what `hold` does where it refuses."""


class Pair(Protocol):
  """The models to route between, cheapest first."""

  names: tuple[str, ...]
  prices: tuple[Price, ...]

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> Sequence[Agent]:
    """One agent per model, which may share what the episode has seen; `hold` pays their calls."""

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Hold], Agent]:
    """What starts the model that a zero-shot router asks. Raises ValueError without its price."""

  def stop(self) -> None:
    """Makes the calls in flight the last: nothing is tried again, and nothing waited for."""

  def close(self) -> None:
    """Frees what the models hold."""


def open_conversation(system_prompt: str, task: Task, observation: str) -> Messages:
  """The conversation before the first reply."""
  return [
    {"role": "system", "content": system_prompt},
    {"role": "user", "content": f"Task: {task.description}\n\n{observation}"},
  ]


def extend(messages: Messages, reply: str, observation: str) -> None:
  """Appends a reply and what came of it."""
  messages.append({"role": "assistant", "content": reply})
  messages.append({"role": "user", "content": observation})


def write_reply(thought: str, action: str, code: bool) -> str:
  """A ReAct reply; code is fenced."""
  written = f"\n```python\n{action}\n```" if code else f" {action}"
  return f"Thought: {thought}\n\nAction:{written}"


def parse_action(reply: str, code: bool = False) -> str | None:
  """The action of a ReAct reply; None is an agent's mistake, which is answered by `NO_ACTION`.

  It is the rest of the line after the last "Action:". With `code` it is the first fenced block
  after the first "Action:", or all that follows where nothing is fenced.
  """
  _, marker, after = reply.partition("Action:") if code else reply.rpartition("Action:")
  if code:
    block = _FENCED.search(after)
    action = (block[1] if block else after).strip()
  else:
    action = (after.strip().splitlines() or [""])[0].strip()
  return action if marker and action else None
