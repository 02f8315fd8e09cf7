"""Read sessions that another program recorded: OpenAI chat lines, and ATIF.

ATIF is Harbor's Agent Trajectory Interchange Format, versions 1.0 to 1.7. Source:
docs/rfcs/0001-trajectory-format.md of Harbor.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from baar_jax.episode import Usage
from baar_jax.llms.history import ToolCall, Turn, read_content, read_turns
from baar_jax.llms.prices import count_tokens
from baar_jax.store import require_file
from baar_serve.config import ServeConfig
from baar_serve.forms import FORMS
from baar_serve.meter import AnswerMeter

SUFFIXES = (".json", ".jsonl")  # The files of a directory that are read.
# What records of other formats, and wrong values, raise.
WRONG = (LookupError, TypeError, AttributeError, ValueError, RecursionError)


class Entry(NamedTuple):
  """A message of a session; a reply also has its model and its provider's usage."""

  turn: Turn
  model: str | None = None
  usage: dict | None = None


class LoggedCall(NamedTuple):
  """One call of a model that another program has recorded.

  A session is the list of its calls, in their order. The calls of one session may come
  between those of others.

  Attributes:
    session: the session's name.
    task: the task's name; the same for all tries at one task. Without one in the log, a
      hash of the text.
    text: the task's text.
    model: the model's name, as the log has it; "unknown" without one.
    observation: what is new before the action: the results of the last action, and
      later texts of the user; "" before the first action.
    action: the reply: its tool calls and its text.
    usage: the billed tokens. Without a prompt's in the log, they are estimated from the
      characters, without a prompt cache, the system text and the tools.
    score: the session's score in [0, 1]; None if the log does not tell it here.
  """

  session: str
  task: str
  text: str
  model: str
  observation: str
  action: str
  usage: Usage
  score: float | None


def read_logs(config: ServeConfig) -> Iterator[LoggedCall]:
  """Read the calls of `--config.traces`, which may be a directory, with all below it.

  The scores of `--config.scores` replace those of the logs.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: no path is named, the scores are no JSON, or a record is wrong.
  """
  if not config.traces:
    raise ValueError("Set --config.traces to the file that is to be read.")
  scores = {}
  if config.scores:
    scores = json.loads(Path(config.scores).read_text())
  path = Path(config.traces)
  files = [path]
  if path.is_dir():
    files = [file for file in sorted(path.rglob("*")) if file.suffix in SUFFIXES]
  for file in files:
    for call in read_file(require_file(file)):
      score = scores.get(call.session, scores.get(call.task, call.score))
      yield call._replace(score=score)


def read_file(path: Path) -> Iterator[LoggedCall]:
  """Read the calls in each line of FILE.jsonl, or in all of FILE.json.

  Half of a last line is left out with a warning: it is still being written.

  Raises:
    ValueError: a line is no JSON, or a record is wrong.
  """
  texts = [path.read_bytes()]
  if path.suffix != ".json":
    texts = texts[0].splitlines(keepends=True)
  counts = Counter()
  for number, text in enumerate(texts, 1):
    if not text.strip():
      continue
    try:
      value = json.loads(text)
      for record in value if isinstance(value, list) else [value]:
        if "schema_version" in record:
          yield from read_atif(record, path.stem)
        else:
          yield read_chat(record, counts)
    except WRONG as error:
      is_json = not isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
      if not (is_json or text.endswith(b"\n") or path.suffix == ".json"):
        print(f"{path}, line {number}: half of a line was left out")
        return
      raise ValueError(
        f"{path}, line {number}: a field is missing or wrong, or these are neither "
        f"chat lines nor ATIF ({error!s:.200}). No session was imported. Correct the "
        "file (baar_serve/README.md), and import it again."
      ) from None


def read_chat(record: dict, counts: Counter) -> LoggedCall:
  """Read a chat line: a call with its whole history and its reply.

  Args:
    counts: the calls of each session before this one; it is added to them.

  Raises:
    ValueError: the n-th call of a session does not end with its n-th reply.
  """
  session = str(record["session"])
  counts[session] += 1
  number = counts[session]
  *history, turn = FORMS["chat/completions"].read_turns(record)
  reply = Entry(turn, record.get("model"), record.get("usage"))
  entries = [*map(Entry, history), reply]
  calls = [*list_calls(session, record.get("task"), entries, record.get("score"))]
  if len(calls) != number or turn.role != "assistant":
    raise ValueError(f"call {number} must end with assistant message {number}")
  return calls[-1]


def read_atif(record: dict, name: str) -> Iterator[LoggedCall]:
  """Read the calls of an ATIF trajectory; task and score are in its field `extra`.

  A step of the agent that was copied from another trajectory, or that no model wrote,
  is no call. Its results are read with the next observation.

  Args:
    name: the session's name, unless the trajectory has one.
  """
  extra = record.get("extra") or {}
  entries = []
  for step in record["steps"]:
    role = "assistant" if step["source"] == "agent" else step["source"]
    is_call = not step.get("is_copied_context") and step.get("llm_call_count") != 0
    if is_call or role != "assistant":
      tools = []
      for tool in step.get("tool_calls") or ():
        arguments = json.dumps(tool["arguments"])
        tools.append(ToolCall(tool["function_name"], arguments))
      turn = Turn(role, read_content(step["message"]), tuple(tools))
      model = step.get("model_name") or record["agent"].get("model_name")
      entries.append(Entry(turn, model, step.get("metrics")))
    for result in (step.get("observation") or {}).get("results", ()):
      entries.append(Entry(Turn("tool", read_content(result.get("content")))))
  session = str(record.get("session_id") or name)
  yield from list_calls(session, extra.get("task"), entries, extra.get("score"))


def list_calls(
  session: str, task: object, entries: list[Entry], score: float | None
) -> Iterator[LoggedCall]:
  """Yield the call of each reply of a session.

  Args:
    session: the session's name.
    task: the task's name; "" or None if the log has none.
    entries: all messages of the session, in their order.
    score: the session's score.

  Raises:
    ValueError: a usage is impossible.
  """
  history = read_turns([entry.turn for entry in entries])
  replies = [entry for entry in entries if entry.turn.role == "assistant"]
  prompt_tokens = count_tokens(history.task)
  for entry, observation, action in zip(replies, history.observations, history.actions):
    prompt_tokens += count_tokens(observation)
    usage = read_usage(entry.usage or {})
    usage = usage or Usage(prompt_tokens, 0, count_tokens(action))
    prompt_tokens = usage.prompt_tokens + usage.completion_tokens
    name = str(task or history.opening)
    model = entry.model or "unknown"
    yield LoggedCall(
      session, name, history.task, model, observation, action, usage, score
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
