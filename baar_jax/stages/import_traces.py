"""Stage import: chat completions and Harbor's ATIF traces become episodes."""

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from baar_jax.config import SERVED, Config
from baar_jax.episode import Call, Episode, Step
from baar_jax.llms.chat_completions import read_counts
from baar_jax.llms.prices import prices_of
from baar_jax.run import Run
from baar_jax.serve.request import Scored, read_messages
from baar_jax.serve.scored import ScoredSession, add_sessions
from baar_jax.train.jobs import BOUNDARIES, stratified_spec

# Of ATIF's metrics.
SUMS = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
USD_EPS = 1e-6  # dollars that are told may be rounded


class RecordedCall(TypedDict, total=False):
  """A call of a recorded session; docs/serving.md tells what must be there."""

  session: str
  model: str
  messages: list[dict]  # the last one is the reply
  usage: dict  # OpenAI's, or ATIF's metrics
  tools: object
  task: str
  score: float


def main(run: Run) -> None:
  """Store the sessions of --config.traces, of a file all or none, each once.

  Raises:
    ValueError: a part is missing or does not add up; it has one line.
  """
  config = run.config
  path = config.traces
  if config.env.kind != SERVED or not path:
    needed = "--config.env.kind=served and --config.traces=FILE"
    raise ValueError(f"--stage=import needs {needed}")
  text = Path(path).read_text()
  lines = text.split("\n") if path.endswith(".jsonl") else [text]
  calls = collections.defaultdict(list)  # by session
  sessions = []
  try:
    for number, line in enumerate(lines, 1):
      place = f"line {number}"
      for call in list_calls(line):
        calls[str(call["session"])].append(call)
    for id_, recorded in calls.items():
      place = f"session {id_!r:.80}"
      sessions.append(read_session(id_, recorded, config))
  except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
    problem = f"{path}, {place}: no record of a known format ({error})"
    if isinstance(error, ValueError):
      problem = f"{path}, {place}: {error}"
    line = f"{problem}; nothing is imported (docs/serving.md)"
    raise ValueError(line) from None
  new = add_sessions(run.store, config, sessions)
  run.print(f"imported {new} sessions; {len(sessions) - new} were there before")


def list_calls(line: str) -> list[RecordedCall]:
  """Read the call in a line, or the calls of an ATIF trajectory.

  Raises:
    ValueError: the trajectory's metrics do not add up.
  """
  if not line.strip():
    return []
  record = json.loads(line)
  if "schema_version" not in record:
    return [record]
  messages = []
  calls = []
  for step in record["steps"]:
    tools = []
    for tool in step.get("tool_calls") or ():
      arguments = json.dumps(tool["arguments"])
      tools.append({"function": dict(name=tool["function_name"], arguments=arguments)})
    role = "assistant" if step["source"] == "agent" else step["source"]
    messages.append(dict(role=role, content=step["message"], tool_calls=tools))
    if role == "assistant":
      model = step.get("model_name") or record["agent"]["model_name"]
      call = dict(model=model, messages=[*messages], usage=step["metrics"])
      calls.append({"session": record["session_id"]} | record["extra"] | call)
    for result in (step.get("observation") or {}).get("results", ()):
      messages.append(dict(role="tool", content=result.get("content")))
  totals = record.get("final_metrics") or {}
  for name in SUMS:
    told = [call["usage"].get(name) for call in calls]
    parts = [part for part in told if part is not None]
    total = totals.get(f"total_{name}")
    is_told = parts or name != "cost_usd"
    if is_told and total is not None and abs(total - sum(parts)) > USD_EPS:
      raise ValueError(f"total_{name} is {total}, and its steps have {sum(parts)}")
  return calls


def read_session(
  id_: str, calls: Sequence[RecordedCall], config: Config
) -> ScoredSession:
  """Read a session.

  Dollars are by the config's prices. Calls that are all SMALL's or all LARGE's are a
  trial of that boundary, mixed ones a stratified sample, whatever has mixed them (our
  choice).
  """
  names = config.models.names
  prices = prices_of(names, config.models.prices)
  steps = []
  scored = {}
  task = None
  for number, call in enumerate(calls, 1):
    messages = call["messages"]
    text = read_messages(messages, call.get("tools"))
    if len(text.actions) != number or messages[-1]["role"] != "assistant":
      raise ValueError(f"the messages of call {number} do not end with reply {number}")
    if call["model"] not in names:
      known = "is not in --config.models.names"
      raise ValueError(f"the model {call['model']!r:.80} {known}")
    model = names.index(call["model"])
    usage = read_counts(call["usage"])
    cost = Call(model, usage, prices[model].cost_usd(usage))
    steps.append(Step(text.observations[-2], model, text.actions[-1], [cost]))
    if call.get("score") is not None:
      scored = call
    task = task or call.get("task")
  spec = stratified_spec(config)
  for boundary, model in zip(BOUNDARIES, (0, len(names) - 1)):
    if {step.model for step in steps} == {model}:
      spec = boundary
  score = Scored.read(scored).score
  task_id = str(task or text.fingerprint)
  episode = Episode(task_id, spec.key, 0, steps, score, "done")
  return ScoredSession(f"import {id_}", episode, text.task)
