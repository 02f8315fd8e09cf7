"""Read mini-SWE-agent's FILE.traj.json: a trajectory a file, of version 1 or 2.

Source: SWE-agent/mini-swe-agent, `save_traj`, `DefaultAgent.serialize`, the models.
"""

from baar_jax.llms.history import read_message
from baar_serve.logs.record import Calls, Entry, Log, write_calls


def read(log: Log) -> Calls:
  """Read the calls of each trajectory; its file names the session."""
  for record in log.load():
    entries = []
    for message in record["messages"]:
      extra = message.get("extra") or {}
      answer = extra.get("response") or message
      model = answer.get("model") or record["info"]["config"]["model"]["model_name"]
      turn = read_message(message)
      at = extra.get("timestamp")
      entries.append(Entry(turn, model, at, answer.get("usage"), extra.get("cost")))
    yield from write_calls(str(log.path), record.get("instance_id"), entries)
