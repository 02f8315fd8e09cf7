"""Write sessions that another program recorded, and read them into a run."""

import json

from endpoint import assistant, user

from baar_serve import traces
from baar_serve.config import ServeConfig

USAGE = dict(prompt_tokens=100, completion_tokens=10, cached_tokens=40)


def load(run, records, name="traces.jsonl"):
  """Write records to a file, and read it into a run."""
  lines = [json.dumps(record, ensure_ascii=False) for record in records]
  (run.dir / name).write_text("\n".join(lines))
  traces.store_file(ServeConfig(traces=str(run.dir / name)), run)


def chat(models=("small", "large-2026-01-31"), **changes):
  """Yield one line for each call of a session, with `changes` in the first one."""
  messages = [user("Fix it.")]
  for number, model in enumerate(models):
    messages = [*messages, assistant(f"act {number}\u2028")]
    call = dict(session="a", task="fix", model=model, usage=USAGE, score=1.0)
    yield call | dict(messages=messages) | changes
    messages = [*messages, user(f"result {number}")]
    changes = {}


def atif(**changes):
  """Write a trajectory of two calls, with changes."""
  call = dict(tool_call_id="1", function_name="look", arguments=dict(at="door"))
  metrics = USAGE | dict(cost_usd=0.001)
  act = dict(source="agent", message="", tool_calls=[call], metrics=metrics)
  act["observation"] = dict(results=[dict(source_call_id="1", content="It is open.")])
  done = dict(source="agent", model_name="large", message="done", metrics=metrics)
  steps = [
    dict(source="system", message="Act."),
    dict(source="user", message="Fix it."),
    act,
    done,
  ]
  record = dict(
    schema_version="ATIF-v1.4",
    session_id="b",
    agent=dict(model_name="large"),
    steps=steps,
    extra=dict(score=0.5, task="door"),
  )
  return record | changes
