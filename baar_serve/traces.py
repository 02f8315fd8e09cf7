"""Store sessions that another program recorded as episodes of a run.

python -m baar_serve.traces --config.name=mine --config.traces=FILE
"""

import collections
import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from baar_jax.config import Config
from baar_jax.episode import Call, Episode, Step
from baar_jax.llms.prices import prices_of
from baar_jax.llms.usage import Meter
from baar_jax.rollout.jobs import (
  BOUNDARIES,
  stratified_spec,
)
from baar_jax.run import Run
from baar_jax.store import require_file
from baar_serve.config import ServeConfig, open_run, run_command
from baar_serve.episodes import ScoredSession, add_sessions
from baar_serve.request import SessionScore, read_history

# The date in a model's name, such as gpt-4.1-2025-04-14.
DATE = re.compile(r"-(\d{4}-\d\d-\d\d|\d{8})$")


def load_file(config: ServeConfig) -> None:
  """Store the sessions of the file `--config.traces` in the run of `--config.name`.

  Raises:
    ValueError: no file is named, or it has a wrong record.
  """
  if not config.traces:
    raise ValueError("Set --config.traces to the file that is to be read.")
  with contextlib.closing(open_run(config)) as run:
    store_file(Path(config.traces), run)


def store_file(path: Path, run: Run) -> None:
  """Store the sessions of a file as episodes, each session once.

  Raises:
    ValueError: the file has a wrong or inconsistent record. Then no session is stored.
  """
  config = run.config
  text = require_file(path).read_text()
  lines = text.split("\n") if path.suffix == ".jsonl" else [text]
  calls_by_session = collections.defaultdict(list)
  sessions = []
  try:
    for number, line in enumerate(lines, 1):
      place = f"line {number}"
      for call in list_calls(line):
        calls_by_session[str(call["session"])].append(call)
    for id_, calls in calls_by_session.items():
      place = f"session {id_!r:.80}"
      sessions.append(read_session(id_, calls, config))
  except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
    problem = f"the record lacks a field, or its format is unknown ({error})"
    if isinstance(error, ValueError):
      problem = str(error).rstrip(".")
    remedy = "Correct the file (baar_serve/README.md), and import it again."
    line = f"{path}, {place}: {problem}. No session was imported. {remedy}"
    raise ValueError(line) from None
  new_count = add_sessions(run.store, config, sessions)
  run.print(
    f"Imported {new_count} sessions; {len(sessions) - new_count} were already stored."
  )


def list_calls(line: str) -> list[dict]:
  """Read the calls in a line: one chat completion, or an ATIF trajectory.

  baar_serve/README.md has both formats.

  Raises:
    ValueError: the line is no JSON.
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
  return calls


def read_session(id_: str, calls: Sequence[dict], config: Config) -> ScoredSession:
  """Read a recorded session as an episode.

  The dollars are computed from the tokens at the configuration's prices. If SMALL alone
  or LARGE alone answered, the episode is a trial of that boundary policy. Any other
  session counts as a stratified sample, however its models were chosen (our choice).

  Args:
    id_: the session's id.
    calls: the session's calls, the first one first.

  Raises:
    ValueError: a call's messages, model, usage or score is missing or wrong.
  """
  names = config.models.names
  prices = prices_of(config.models)
  steps = []
  score_fields = {}
  task_name = None
  for number, call in enumerate(calls, 1):
    messages = call["messages"]
    text = read_history(call)
    if len(text.actions) != number or messages[-1]["role"] != "assistant":
      raise ValueError(f"call {number} must end with assistant message {number}")
    # A provider answers with the dated name of a model.
    name = call["model"] if call["model"] in names else DATE.sub("", call["model"])
    if name not in names:
      raise ValueError(f"--config.models.names lacks the model {call['model']!r:.80}")
    model = names.index(name)
    meter = Meter()
    meter.note({"usage": call["usage"]})
    usage = meter.usage()
    cost = Call(model, usage, prices[model].cost_usd(usage))
    steps.append(Step(text.observations[-2], model, text.actions[-1], [cost]))
    if call.get("score") is not None:
      score_fields = call
    task_name = task_name or call.get("task")
  spec = stratified_spec(config)
  for boundary, model in zip(BOUNDARIES, (0, len(names) - 1)):
    if {step.model for step in steps} == {model}:
      spec = boundary
  score = SessionScore.read(score_fields).score
  task_id = str(task_name or text.opening)
  episode = Episode(task_id, spec.key, 0, steps, score, "done")
  return ScoredSession(f"import {id_}", episode, text.task)


if __name__ == "__main__":
  run_command(load_file)
