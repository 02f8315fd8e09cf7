"""Read ATIF, Harbor's Agent Trajectory Interchange Format: a trajectory a record.

Source: docs/rfcs/0001-trajectory-format.md of Harbor, versions 1.0 to 1.7.
"""

import json

from baar_jax.llms.history import ToolCall, Turn, read_content
from baar_serve.logs.record import Calls, Entry, Log, write_calls


def read(log: Log) -> Calls:
  """Read the calls of each trajectory; task and score are in its field `extra`."""
  for record in log.load():
    extra = record.get("extra") or {}
    session = str(record.get("session_id") or log.path.stem)
    entries = []
    for step in record["steps"]:
      tools = []
      for tool in step.get("tool_calls") or ():
        arguments = json.dumps(tool["arguments"])
        tools.append(ToolCall(tool["function_name"], arguments))
      role = "assistant" if step["source"] == "agent" else step["source"]
      turn = Turn(role, read_content(step["message"]), tuple(tools))
      metrics = step.get("metrics") or {}
      model = step.get("model_name") or record["agent"].get("model_name")
      at = step.get("timestamp")
      entries.append(Entry(turn, model, at, metrics, metrics.get("cost_usd")))
      for result in (step.get("observation") or {}).get("results", ()):
        entries.append(Entry(Turn("tool", read_content(result.get("content")))))
    yield from write_calls(session, extra.get("task"), entries, extra.get("score"))
