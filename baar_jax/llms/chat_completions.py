"""Define the wire form of OpenAI's chat completions, and conversations in it.

An agent's conversation has the ReAct form.
"""

import re
import time
from collections.abc import Mapping
from typing import Protocol

from baar_jax.episode import Reply, Task
from baar_jax.llms.wire import (
  Endpoint,
  ToolCall,
  Turn,
  WireForm,
  check_objects,
  check_text,
  read_content,
)


def read_message(message: Mapping) -> Turn:
  """Read a message of a chat completion.

  Raises:
    ValueError: a field of the message has another type.
  """
  calls = []
  for call in check_objects(message.get("tool_calls") or [], "tool_calls"):
    function = call.get("function") or call.get("custom") or {}
    if not isinstance(function, dict):
      raise ValueError("tool_calls must have the function as a JSON object")
    arguments = function.get("arguments") or function.get("input") or ""
    calls.append(ToolCall(check_text(function.get("name", "")), check_text(arguments)))
  text = read_content(message.get("content"))
  return Turn(check_text(message.get("role")), text, tuple(calls))


# Most tool calls of a reply that are read.
MOST_CALLS = 1000


class ChatCompletions(WireForm):
  """OpenAI's chat completions."""

  path = "chat/completions"
  history = "messages"
  opening = ("tools", "functions", "response_format")
  limits = ("max_completion_tokens", "max_tokens")
  endings = ("[DONE]",)
  # LiteLLM, and so aider and mini-swe-agent, repeat a call after most other statuses.
  last_status = 404

  def write_request(self, body: Mapping, endpoint: Endpoint) -> dict:
    """Write a request for a model; a streamed request also asks for the usage."""
    request = {**body}
    request.pop("session_id", None)
    if body.get("stream"):
      options = body.get("stream_options") or {}
      request["stream_options"] = options | {"include_usage": True}
    return super().write_request(request, endpoint)

  def read_entry(self, entry: Mapping) -> list[Turn]:
    """Read a message."""
    return [read_message(entry)]

  def read_reply(self, answer: Mapping) -> Turn:
    """Read the message of the first choice."""
    choices = check_objects(answer.get("choices"), "choices")
    if not choices:
      return Turn("assistant", "")
    message = choices[0].get("message")
    return read_message({"role": "assistant"} | check_objects([message], "message")[0])

  def collect(self, answer: dict, event: Mapping) -> None:
    """Add a chunk to the message of the first choice."""
    choices = answer.setdefault("choices", [{"message": {"content": ""}}])
    message = choices[0]["message"]
    for choice in event.get("choices") or ():
      if choice.get("index", 0) == 0:
        delta = choice.get("delta") or {}
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
          _extend_call(message.setdefault("tool_calls", []), part)

  def is_hidden(self, event: Mapping, body: Mapping) -> bool:
    """Tell whether an event has the usage, and the client has not asked for it."""
    options = body.get("stream_options") or {}
    is_usage = event.get("usage") is not None and not event.get("choices")
    return is_usage and not options.get("include_usage")

  def write_answer(self, text: str, model: str) -> dict:
    """Write a chat completion whose reply is a text and which cost nothing."""
    message = dict(role="assistant", content=text)
    reason = "stop" if text else "length"
    return dict(
      id="baar",
      object="chat.completion",
      created=int(time.time()),
      model=model,
      choices=[dict(index=0, message=message, finish_reason=reason)],
      usage=dict(cost=0.0, prompt_tokens=0, completion_tokens=0, total_tokens=0),
    )

  def write_stream(self, answer: Mapping) -> list[dict | str]:
    """Write a chat completion as a stream of one chunk."""
    choices = [
      dict(choice, delta=choice.get("message")) for choice in answer["choices"]
    ]
    return [
      dict(answer, object="chat.completion.chunk", choices=choices),
      *self.endings,
    ]


def _extend_call(calls: list[dict], part: Mapping) -> None:
  """Add a part of a streamed tool call to the calls of its message."""
  index = min(part.get("index") or 0, MOST_CALLS)
  while len(calls) <= index:
    calls.append({"function": {"name": "", "arguments": ""}})
  for source in ("function", "custom"):
    fields = part.get(source) or {}
    function = calls[index]["function"]
    function["name"] += fields.get("name") or ""
    function["arguments"] += fields.get("arguments") or fields.get("input") or ""


FORM = ChatCompletions()


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
