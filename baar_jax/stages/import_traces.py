"""Stage import: recorded traces become episodes: chat completions in JSONL, and ATIF (Harbor's)."""

import json
from pathlib import Path

from baar_jax.config import SERVED, Config
from baar_jax.episode import SMALL, Call, Episode, Step
from baar_jax.llms.chat_completions import read_counts
from baar_jax.llms.prices import prices_of
from baar_jax.train.jobs import ALWAYS_LARGE, ALWAYS_SMALL, stratified_spec
from baar_jax.run import Run
from baar_jax.serve.request import Scored, read_messages
from baar_jax.serve.sessions import add_sessions

SUMS = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")  # of ATIF's metrics
USD_EPS = 1e-6  # dollars that are told may be rounded


def main(run: Run) -> None:
  """Stores the sessions of --config.traces that are not there yet, of a file all or none.

  Raises ValueError, of one line, where a part of it is missing or does not add up.
  """
  c, calls, sessions = run.config, {}, {}
  if c.env.kind != SERVED or not c.traces:
    raise ValueError("--stage=import needs --config.env.kind=served and --config.traces=FILE")
  text = Path(c.traces).read_text()
  lines = text.split("\n") if c.traces.endswith(".jsonl") else [text]
  try:
    for number, line in enumerate(lines, 1):
      place = f"line {number}"
      for call in list_calls(json.loads(line)) if line.strip() else ():
        calls.setdefault(str(call["session"]), []).append(call)
    for id_ in calls:
      place = f"session {id_!r:.80}"
      sessions[f"import {id_}"] = read_session(calls[id_], c)
  except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
    problem = error if isinstance(error, ValueError) else f"no record of a known format ({error})"
    line = f"{c.traces}, {place}: {problem}; nothing is imported (docs/serving.md)"
    raise ValueError(line) from None
  new = add_sessions(run.store, c, sessions)
  run.print(f"imported {new} sessions; {len(sessions) - new} were there before")


def list_calls(record: dict) -> list[dict]:
  """The call that a record is, or those of an ATIF trajectory, whose metrics must add up."""
  if "schema_version" not in record:
    return [record]
  messages, calls, totals = [], [], record.get("final_metrics") or {}
  common = {"session": record["session_id"]} | record["extra"]
  for step in record["steps"]:
    tools = [
      {"function": {"name": tool["function_name"], "arguments": json.dumps(tool["arguments"])}}
      for tool in step.get("tool_calls") or ()
    ]
    role = "assistant" if step["source"] == "agent" else step["source"]
    messages.append({"role": role, "content": step["message"], "tool_calls": tools})
    if role == "assistant":
      model = step.get("model_name") or record["agent"]["model_name"]
      calls.append(common | {"model": model, "messages": [*messages], "usage": step["metrics"]})
    for result in (step.get("observation") or {}).get("results", ()):
      messages.append({"role": "tool", "content": result.get("content")})
  for name in SUMS:
    parts = [call["usage"][name] for call in calls if call["usage"].get(name) is not None]
    total = totals.get(f"total_{name}") if parts or name != "cost_usd" else None
    if total is not None and abs(total - sum(parts)) > USD_EPS:
      raise ValueError(f"total_{name} is {total}, and its steps have {sum(parts)}")
  return calls


def read_session(calls: list[dict], config: Config) -> tuple[Episode, str]:
  """The episode of a session, and its task's text.

  Dollars are by the config's prices. Calls that are all SMALL's or all LARGE's are a trial of that
  boundary, mixed ones a stratified sample, whatever has mixed them (our choice).
  """
  names, steps = config.models.names, []
  prices = prices_of(names, config.models.prices)
  for number, call in enumerate(calls, 1):
    text = read_messages(call["messages"], call.get("tools"))
    if len(text.actions) != number or call["messages"][-1]["role"] != "assistant":
      raise ValueError(f"the messages of call {number} do not end with reply {number}")
    if call["model"] not in names:
      raise ValueError(f"the model {call['model']!r:.80} is not in --config.models.names")
    model = names.index(call["model"])
    usage = read_counts(call["usage"])
    cost = Call(model, usage, prices[model].cost_usd(usage))
    steps.append(Step(text.observations[-2], model, text.actions[-1], [cost]))
  scored = [call for call in calls if call.get("score") is not None]
  score = Scored.read(scored[-1] if scored else {}).score
  boundaries = {(SMALL,): ALWAYS_SMALL, (len(names) - 1,): ALWAYS_LARGE}
  models = tuple({step.model for step in steps})
  policy = boundaries.get(models, stratified_spec(config)).key
  task = next((call["task"] for call in calls if call.get("task")), text.fingerprint)
  return Episode(str(task), policy, 0, steps, score, "done"), text.task
