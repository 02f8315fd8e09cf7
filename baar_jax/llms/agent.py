"""Write the ReAct conversation of an agent, and read the action in a reply."""

import re
from typing import Protocol

from baar_jax.episode import Reply, Task

Messages = list[dict[str, str]]


NO_ACTION = (
  "No action was found in the reply. Answer with 'Thought:' and then 'Action:'."
)
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)


class NoAnswer(RuntimeError):
  """Report that every attempt at a call failed; the episode ends in an error."""


class Agent(Protocol):
  """One model during one episode.

  A judge (the model that a zero-shot router asks) is an Agent, too. For a judge, each
  question of the router is a step.
  """

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the worst case of one attempt at a reply, in dollars.

    Args:
      messages: the conversation so far.
      step: index of the episode's step, from 0.
    """

  def reply(self, messages: Messages, step: int) -> Reply:
    """Reply to a conversation.

    Args:
      messages: the conversation so far.
      step: index of the episode's step, from 0.

    Raises:
      NoAnswer: every attempt failed.
      BudgetSpent: the call does not fit the episode's budget.
      CapReached: the call does not fit the run's budget.
    """


def open_conversation(system_prompt: str, task: Task, observation: str) -> Messages:
  """Write the messages before the first reply: system prompt, task, observation."""
  return [
    {"role": "system", "content": system_prompt},
    {"role": "user", "content": f"Task: {task.description}\n\n{observation}"},
  ]


def extend(messages: Messages, reply: str, observation: str) -> None:
  """Append a reply and the next observation to the messages."""
  messages.append({"role": "assistant", "content": reply})
  messages.append({"role": "user", "content": observation})


def write_reply(thought: str, action: str, code: bool) -> str:
  """Write a ReAct reply.

  Args:
    thought: the text after "Thought:".
    action: the text after "Action:".
    code: whether the action is Python code, to be written as a fenced block.
  """
  formatted_action = f"\n```python\n{action}\n```" if code else f" {action}"
  return f"Thought: {thought}\n\nAction:{formatted_action}"


def parse_action(reply: str, code: bool = False) -> str | None:
  """Read the action in a ReAct reply.

  Args:
    reply: the text of the reply.
    code: whether actions are code. If not, the action is the first line of text after
      the last "Action:". If so, the action is the first fenced block after the first
      "Action:"; without a fenced block, it is all text after the first "Action:".

  Returns:
    The action; None if the reply has none. The agent's next observation is then
    `NO_ACTION`.
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
