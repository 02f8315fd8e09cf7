"""Define what every reader of logs yields, and what the readers share."""

import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from baar_jax.episode import Usage
from baar_jax.llms.history import Turn, read_turns
from baar_jax.llms.prices import count_tokens
from baar_serve.meter import AnswerMeter


@dataclasses.dataclass(frozen=True)
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
    usage: the billed tokens; None if they are unknown.
    cost_usd: the dollars that the log states; None if it states none.
    return_code: the exit code that `observation` reports, the last one that is not 0;
      1 for an error without a code; None if the log does not tell.
    score: the session's score in [0, 1]; None if the log does not tell it here.
  """

  session: str
  task: str
  text: str
  model: str
  observation: str
  action: str
  at_s: float | None = None
  usage: Usage | None = None
  cost_usd: float | None = None
  return_code: int | None = None
  score: float | None = None

  def estimate_usage(self, read_tokens: int) -> Usage:
    """Estimate the tokens of the call from its characters, without a prompt cache.

    The system text and the tools are not in the record, so they are left out.

    Args:
      read_tokens: the tokens of the session's last prompt and reply; 0 before them.
    """
    prompt_tokens = read_tokens or count_tokens(self.text)
    prompt_tokens += count_tokens(self.observation)
    return Usage(prompt_tokens, 0, count_tokens(self.action))


Calls = Iterator[LoggedCall]


@dataclasses.dataclass
class Log:
  """A file that is being read.

  Attributes:
    path: the file.
    seen: the ids of the replies that were read from other files.
    records: the JSON records that are still to be read.
    place: where the reader is, for messages.
  """

  path: Path
  seen: set[str]
  records: Iterator[dict] = ()
  place: str = "line 1"

  def load(self) -> Iterator[dict]:
    """Load the lines of FILE.jsonl one after the other, or all of FILE.json.

    Raises:
      ValueError: a line is no JSON.
    """
    with self.path.open("rb") as file:
      if self.path.suffix == ".json":
        value = json.load(file)
        yield from value if isinstance(value, list) else [value]
        return
      for number, line in enumerate(file, 1):
        self.place = f"line {number}"
        if line.strip():
          yield json.loads(line)


@dataclasses.dataclass
class Entry:
  """A message of a session, with what the log says of it.

  Attributes:
    turn: the message.
    model: the model of a reply.
    at: its time in seconds since 1970, or in ISO 8601; without a zone it is UTC.
    usage: its usage, in a provider's form.
    cost_usd: its dollars.
    return_code: the exit code that a result reports; None if the log does not tell.
  """

  turn: Turn
  model: str = ""
  at: str | float | None = None
  usage: dict | None = None
  cost_usd: float | None = None
  return_code: int | None = None

  def read_time(self) -> float | None:
    """Return the time in seconds since 1970; None if it is unknown.

    Raises:
      ValueError: it is no time.
    """
    if not isinstance(self.at, str):
      return self.at
    moment = datetime.fromisoformat(self.at)
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()

  def read_usage(self) -> Usage | None:
    """Return the tokens; None if the usage has none of a prompt.

    Anthropic's input leaves out the tokens of the prompt cache.

    Raises:
      ImpossibleUsage: the usage cannot be true.
    """
    if not self.usage:
      return None
    meter = AnswerMeter(counts_beside="prompt_tokens" not in self.usage)
    meter.note({"usage": self.usage})
    return meter.usage() if meter.counts.get("prompt") else None


def write_calls(
  session: str, task: str, entries: list[Entry], score: float | None = None
) -> Calls:
  """Yield the call of each reply of a session.

  Args:
    session: the session's name.
    task: the task's name; "" if the log has none.
    entries: all messages of the session, in their order.
    score: the session's score.

  Raises:
    ValueError: a usage or a time is impossible.
  """
  history = read_turns([entry.turn for entry in entries])
  steps = zip(history.observations, history.actions)
  code = None
  for entry in entries:
    if entry.turn.role != "assistant":
      if entry.return_code is not None:
        code = entry.return_code or code or 0
      continue
    yield LoggedCall(
      session,
      task or history.opening,
      history.task,
      entry.model,
      *next(steps),
      entry.read_time(),
      entry.read_usage(),
      entry.cost_usd,
      code,
      score,
    )
    code = None
