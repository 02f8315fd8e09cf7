"""Read a chat as a task and observations, and write the conversations of runs.

A run's conversations have the ReAct form, in our own words, because the paper prints no
prompt of the agent.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from baar_jax.episode import SMALL, Reply, Step, Task

Messages = list[dict[str, str]]
NO_ACTION = (
  "No action was found in the reply. Answer with 'Thought:' and then 'Action:'."
)
NO_CODE = (
  "No code was found in the reply. Answer with one fenced block that begins with "
  "```python."
)
# What agents put before or beside the task of the user, and a reply that they write
# themselves. Each row is of the agents that are named at its end.
SURROUNDINGS = re.compile(
  r"""(?sx)
  <(environment_context|user_instructions)>.*?</\1>         # Codex
  | \A\#\ AGENTS\.md\ instructions.*?</INSTRUCTIONS>        # Codex
  | <system-reminder>.*?</system-reminder>                 # Claude Code, qwen-code
  | <environment_details>.*?</environment_details>         # Cline, Roo Code
  | <session_context>.*?</session_context>                 # Gemini CLI
  | \AThis\ is\ the\ (Qwen\ Code|Gemini\ CLI)\.\ We\ are\ setting\ up\ the\ context.*
  | \AGot\ it\.\ Thanks\ for\ the\ context!\Z               # qwen-code, Gemini CLI
  """
)
# Types of parts that hold a model's reasoning.
REASONING_TYPES = ("thinking", "redacted_thinking", "reasoning")
# Number of prompt tokens that a worst case assumes for an image, a sound or a file (our
# choice); the types of such parts, and the fields that hold their data or address.
PART_TOKENS = 50_000
MEDIA = (
  "image_url",
  "video_url",
  "audio_url",
  "input_audio",
  "file",
  "image",
  "document",
  "input_image",
  "input_file",
  "file_data",
  "file_id",
  "file_url",
  "source",
)
# Number of tokens that a chat template adds at most to each text or number of a request
# (our choice).
VALUE_TOKENS = 8
# Most replies whose actions are kept, because each call of a chat repeats its history.
KEPT_TURNS = 1 << 12
_FENCED = re.compile(r"(?s)```[ \t]*([\w+.-]*)[ \t]*\n(.*?)\n?[ \t]*```")
_LANGUAGES = ("", "python", "python3", "py")
# What a model thinks before its reply. A chat template may have opened it, and a reply
# that is cut leaves it open.
_THINKING = re.compile(r"(?s)\A((?!<think>).)*?</think>|<think>.*?(</think>|\Z)")


class ToolCall(NamedTuple):
  """A tool call of a model: the tool's name, and its arguments as a text."""

  name: str
  arguments: str


class Turn(NamedTuple):
  """A message of a conversation, read from any wire form.

  Attributes:
    role: "assistant" for a model's reply; else "system", "user" or "tool".
    text: the text of the message, without reasoning.
    calls: the tool calls of a reply.
  """

  role: str
  text: str
  calls: tuple[ToolCall, ...] = ()


@dataclasses.dataclass(frozen=True)
class History:
  """An unfinished episode, read from the messages of a chat.

  Attributes:
    task: the text of the task.
    observations: a text before each action, and one after the last action.
    actions: a text for each reply of the assistant.
  """

  task: str
  observations: list[str]
  actions: list[str]

  @property
  def opening(self) -> str:
    """Return a hash of the task."""
    return hash_text(self.task)

  def write_steps(self, steps: Mapping[int, Step]) -> list[Step]:
    """Return copies of steps with this history's observations and actions.

    Args:
      steps: the steps by place; steps that are missing count as steps of SMALL.
    """
    copies = []
    for place, action in enumerate(self.actions):
      step = steps.get(place) or Step("", SMALL, "")
      text = self.observations[place]
      copies.append(dataclasses.replace(step, observation=text, action=action))
    return copies


def read_message(message: Mapping) -> Turn:
  """Read a message of a chat completion.

  Raises:
    ValueError: a field of the message has another type.
  """
  calls = []
  called = check_objects(message.get("tool_calls") or [], "tool_calls")
  if message.get("function_call"):  # The older form of a single call.
    called = [*called, {"function": message["function_call"]}]
  for call in called:
    function = call.get("function") or call.get("custom") or {}
    if not isinstance(function, dict):
      raise ValueError("tool_calls must have the function as a JSON object")
    arguments = write_arguments(function.get("arguments") or function.get("input"))
    calls.append(ToolCall(check_text(function.get("name", "")), arguments))
  text = read_content(message.get("content")) or read_content(message.get("refusal"))
  return Turn(check_text(message.get("role")), text, tuple(calls))


def write_arguments(arguments: object) -> str:
  """Write the arguments of a tool call as a text; some models send a JSON object."""
  if isinstance(arguments, dict):
    return json.dumps(arguments)
  return check_text(arguments or "")


def read_content(content: object) -> str:
  """Read the text of a message's content: a text, or a list of parts.

  Reasoning is left out. Another part without a text is read as its type in brackets,
  such as "[image_url]".

  Raises:
    ValueError: the content is neither a text nor a list of parts.
  """
  if content is None:
    return ""
  if isinstance(content, str):
    return check_text(content)
  texts = []
  for part in check_objects(content, "content"):
    text = part.get("text")
    if part.get("type") in REASONING_TYPES:
      continue
    texts.append(f"[{part.get('type')}]" if text is None else check_text(text))
  return "\n".join(texts)


def check_text(text: object) -> str:
  """Return a text.

  Raises:
    ValueError: it is no text, or it has half a surrogate pair, which UTF-8 lacks.
  """
  if not isinstance(text, str):
    raise ValueError("a text is missing, or is not a text")
  text.encode()
  return text


def check_objects(values: object, field: str) -> list[dict]:
  """Return a list of JSON objects.

  Args:
    values: the value of the field.
    field: the name of the field.

  Raises:
    ValueError: it is no list of JSON objects.
  """
  if not isinstance(values, list) or not all(isinstance(v, dict) for v in values):
    raise ValueError(f"{field} must be a list of JSON objects")
  return values


def read_turns(turns: Sequence[Turn]) -> History:
  """Read the messages of a chat as an unfinished episode (our choice).

  The first user text is the task. A text "Task: ...\\n\\n..." is the task and the first
  observation, as in the conversations of training. Each reply is an action. The texts
  between two replies are one observation.
  """
  system = []
  task = None
  actions = []
  results = [[]]
  for turn in turns:
    text = SURROUNDINGS.sub("", turn.text).strip()
    if turn.role == "assistant":
      actions.append(write_action(turn))
      results.append([])
    elif turn.role in ("system", "developer") and not actions:
      system.append(turn.text)
    elif turn.role == "user" and task is None and (text or not turn.text):
      task = text
    elif turn.text:
      results[-1].append(turn.text)
  if task is None:
    task = "\n".join(system)
  head, blank, observation = task.partition("\n\n")
  if blank and head.startswith("Task: "):
    task = head.removeprefix("Task: ")
    results[0].insert(0, observation)
  return History(task, ["\n".join(texts) for texts in results], actions)


def read_chat(messages: Sequence[Mapping]) -> History:
  """Read the messages of a chat completion as an unfinished episode.

  Raises:
    ValueError: a message has a wrong field, or there is no message.
  """
  try:
    turns = [read_message(entry) for entry in check_objects(messages, "messages")]
    if not turns:
      raise ValueError("messages must have at least one message")
  except ValueError as error:
    raise ValueError(f"Correct the field messages: {error}.") from None
  return read_turns(turns)


@functools.lru_cache(KEPT_TURNS)
def write_action(turn: Turn) -> str:
  """Write the action that a reply stands for: its tool calls and its text.

  If the text is a ReAct reply ("Thought: ... Action: ..."), only the part after
  "Action:" counts.
  """
  calls = [f"{call.name} {call.arguments}".strip() for call in turn.calls]
  action = turn.text.strip()
  if "Action:" in action:
    action = parse_action(action, code="```" in action) or action
  return "\n".join(filter(None, [*calls, action]))


def hash_text(text: str) -> str:
  """Return a short hash of a text."""
  return hashlib.sha256(text.encode()).hexdigest()[:32]


def count_bytes(text: str) -> int:
  """Count the bytes of a text. A token has at least one byte."""
  return len(text.encode(errors="replace"))


def bound_tokens(value: object, count: Callable[[str], int] = count_bytes) -> int:
  """Compute an upper bound on the prompt tokens of a JSON value.

  Texts and numbers also get the tokens of a chat template, and media PART_TOKENS.

  Args:
    count: an upper bound on the tokens of a text.
  """
  if isinstance(value, str):
    return count(value) + VALUE_TOKENS
  if isinstance(value, list | tuple):
    tokens = 0
    for entry in value:
      tokens += bound_tokens(entry, count)
    return tokens
  if not isinstance(value, dict):
    return 4 * VALUE_TOKENS
  if value.get("type") in MEDIA and value.keys() & MEDIA:
    rest = [entry for name, entry in value.items() if name not in MEDIA]
    source = value.get("source")
    # The source of a document may be a text.
    if isinstance(source, dict) and source.get("type") in ("text", "content"):
      rest.append(source)
    return PART_TOKENS + bound_tokens(rest, count)
  tokens = 0
  for name, entry in value.items():
    tokens += count(name) + VALUE_TOKENS + bound_tokens(entry, count)
  return tokens


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


def open_conversation(
  system_prompt: str, task: Task, observation: str, opening: str = ""
) -> Messages:
  """Write the messages before the first reply of a conversation.

  Args:
    system_prompt: the agent's instructions.
    task: the task.
    observation: the newest observation.
    opening: if set, the agent reads only the observation from this text on, in place of
      the task and all of the observation; see `Env.opening`.
  """
  text = f"Task: {task.description}\n\n{observation}"
  if opening:
    text = opening + observation.partition(opening)[2]
  return [
    {"role": "system", "content": system_prompt},
    {"role": "user", "content": text},
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
  """Read the action in a ReAct reply. What stands in <think> does not count.

  Args:
    reply: the text of the reply.
    code: whether actions are code. If not, the action is the first line of text after
      the last "Action:". If so, it is the first fenced block after the first "Action:",
      or of a reply without "Action:". Without a fenced block, it is all text after the
      first "Action:".

  Returns:
    The action; None if the reply has none. The agent's next observation is then
    `NO_ACTION` or `NO_CODE`.
  """
  reply = _THINKING.sub("", reply)
  if code:
    # The word may also stand within a block of code.
    has_marker = "Action:" in _FENCED.sub("", reply)
    after = reply.partition("Action:")[2] if has_marker else reply
    for block in _FENCED.finditer(after):
      if block[1].lower() in _LANGUAGES:
        return block[2].strip() or None
    action = after if has_marker else ""
  else:
    action = next(iter(reply.rpartition("Action:")[2].strip().splitlines()), "")
    if "Action:" not in reply:
      return None
  return action.strip() or None
