"""Define what every reader of logs yields, and what the readers share."""

import dataclasses
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from baar_jax.episode import Usage
from baar_jax.llms.history import Turn, read_turns
from baar_jax.llms.prices import count_tokens
from baar_serve.meter import AnswerMeter


@dataclasses.dataclass
class LoggedCall:
  """One call of a model that another program has recorded.

  A session is the list of its calls, in their order. The calls of one session may come
  between those of others.

  Attributes:
    session: the session's name.
    task: the task's name; the same for all tries at one task. Without one in the log, a
      hash of the text.
    text: the task's text.
    model: the model's name, as the log has it.
    observation: what is new before the action: the results of the last action, and
      later texts of the user; "" before the first action. What the log repeats from
      earlier calls is left out.
    action: the reply: its tool calls and its text.
    at_s: the time of the call in seconds since 1970; None if it is unknown.
    usage: the billed tokens.
    is_estimated: whether the log lacks the tokens, so that they are estimated from the
      characters, without a prompt cache, the system text and the tools.
    usd: the dollars that the log states; None if it states none.
    score: the session's score in [0, 1]; None if the log does not tell it here.
  """

  session: str
  task: str
  text: str
  model: str
  observation: str
  action: str
  at_s: float | None
  usage: Usage
  is_estimated: bool
  usd: float | None
  score: float | None


Calls = Iterator[LoggedCall]


@dataclasses.dataclass
class Log:
  """A file that is being read.

  Attributes:
    path: the file.
    seen: the ids of the replies that were read from other files.
    place: where the reader is, for messages.
  """

  path: Path
  seen: set[str]
  place: str = "line 1"

  def load(self) -> Iterator[dict]:
    """Load the lines of FILE.jsonl one after the other, or all of FILE.json.

    Raises:
      ValueError: a line is no JSON.
    """
    with self.path.open("rb") as file:
      texts = [file.read()] if self.path.suffix == ".json" else file
      for number, text in enumerate(texts, 1):
        self.place = f"line {number}"
        if text.strip():
          value = json.loads(text)
          yield from value if isinstance(value, list) else [value]


@dataclasses.dataclass
class Entry:
  """A message of a session, with what the log says of it.

  Attributes:
    turn: the message.
    model: the model of a reply.
    at: its time in seconds since 1970, or in ISO 8601; without a zone it is local.
    usage: its usage, in a provider's form.
    usd: its dollars.
  """

  turn: Turn
  model: str = ""
  at: str | float | None = None
  usage: dict | None = None
  usd: float | None = None


def write_calls(
  session: str, task: object, entries: list[Entry], score: float | None = None
) -> Calls:
  """Yield the call of each reply of a session.

  Args:
    session: the session's name.
    task: the task's name; "" or None if the log has none.
    entries: all messages of the session, in their order.
    score: the session's score.

  Raises:
    ValueError: a usage or a time is impossible.
  """
  history = read_turns([entry.turn for entry in entries])
  replies = [entry for entry in entries if entry.turn.role == "assistant"]
  prompt_tokens = count_tokens(history.task)
  for entry, observation, action in zip(replies, history.observations, history.actions):
    prompt_tokens += count_tokens(observation)
    stated = read_usage(entry.usage or {})
    at_s = entry.at
    if isinstance(at_s, str):
      at_s = datetime.fromisoformat(at_s).timestamp()
    usage = stated or Usage(prompt_tokens, 0, count_tokens(action))
    prompt_tokens = usage.prompt_tokens + usage.completion_tokens
    yield LoggedCall(
      session,
      str(task or history.opening),
      history.task,
      entry.model,
      observation,
      action,
      at_s,
      usage,
      stated is None,
      entry.usd,
      score,
    )


def read_usage(fields: dict) -> Usage | None:
  """Read the tokens of a usage; None if it has none of a prompt.

  Anthropic's input, unlike that of OpenAI, leaves out the tokens of the prompt cache.

  Raises:
    ImpossibleUsage: the usage cannot be true.
  """
  is_beside = "cache_read_input_tokens" in fields and "prompt_tokens" not in fields
  meter = AnswerMeter(counts_beside=is_beside)
  meter.note({"usage": fields})
  return meter.usage() if meter.counts.get("prompt") else None
