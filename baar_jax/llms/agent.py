"""The ReAct agent: the conversation of an episode, and the action in a reply."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from baar_jax.episode import Reply, Task

Messages = list[dict[str, str]]
# hold(usd, replayed=False) makes a reservation while a call is made.
# The call sets `usd` of its value to the cost. See `rollout.budget.hold`.
Hold = Callable[..., AbstractContextManager]

NO_ACTION = (
  "No action was found in the reply. Answer with 'Thought:' and then 'Action:'."
)
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)


class NoAnswer(RuntimeError):
  """A model gave no usable answer to any attempt; the episode ends in an error."""


class Agent(Protocol):
  """One model during one episode; a judge's questions in an episode are its steps."""

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the worst case in dollars of one attempt at a reply."""

  def reply(self, messages: Messages, step: int) -> Reply:
    """Answer at a step (from 0). Raises NoAnswer, or the refusal of `hold`."""


def open_conversation(system_prompt: str, task: Task, observation: str) -> Messages:
  """Open the conversation, before the first reply."""
  return [
    {"role": "system", "content": system_prompt},
    {"role": "user", "content": f"Task: {task.description}\n\n{observation}"},
  ]


def extend(messages: Messages, reply: str, observation: str) -> None:
  """Append a reply and the next observation."""
  messages.append({"role": "assistant", "content": reply})
  messages.append({"role": "user", "content": observation})


def write_reply(thought: str, action: str, code: bool) -> str:
  """Write a ReAct reply; code is fenced."""
  written = f"\n```python\n{action}\n```" if code else f" {action}"
  return f"Thought: {thought}\n\nAction:{written}"


def parse_action(reply: str, code: bool = False) -> str | None:
  """Find the action in a ReAct reply: the rest of the line after the last "Action:".

  Args:
    code: the action is the first fenced block after the first "Action:", or all that
      follows if nothing is fenced.

  Returns:
    None for an agent's mistake, which `NO_ACTION` answers.
  """
  if code:
    _, marker, after = reply.partition("Action:")
    block = _FENCED.search(after)
    action = block[1] if block else after
  else:
    _, marker, after = reply.rpartition("Action:")
    action = next(iter(after.strip().splitlines()), "")
  if not marker:
    return None
  return action.strip() or None
