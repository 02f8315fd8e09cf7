"""Read mini-SWE-agent's FILE.traj.json: a trajectory a file, of version 1 or 2.

Source: SWE-agent/mini-swe-agent, `save_traj`, `DefaultAgent.serialize`, the models.
"""

import re

from baar_jax.llms.history import read_message
from baar_serve.forms import FORMS
from baar_serve.logs.record import Calls, Entry, Log, write_calls

# Version 1 states the exit code in the observation only.
CODE = re.compile(r"<returncode>(-?\d+)</returncode>")


def read(log: Log) -> Calls:
  """Read the calls of each trajectory; without an `instance_id` the file names it."""
  responses = FORMS["responses"]
  for record in log.records:
    name = record.get("instance_id") or log.path.name.removesuffix(".traj.json")
    entries = []
    for message in record["messages"]:
      extra = message.get("extra") or {}
      # With OpenAI's Responses, a reply is the whole answer.
      answer = extra.get("response") or message
      model = answer.get("model") or record["info"]["config"]["model"]["model_name"]
      if message.get("object") == "response":
        turn = responses.read_reply(message)
      elif message.get("type"):
        (turn,) = responses.read_entry(message)
      else:
        turn = read_message(message)
      code = extra.get("returncode")
      stated = CODE.search(turn.text)
      if code is None and stated:
        code = int(stated[1])
      entries.append(
        Entry(
          turn,
          model,
          extra.get("timestamp"),
          answer.get("usage"),
          extra.get("cost"),
          code,
        )
      )
    yield from write_calls(f"{log.path.parent.name}/{name}", name, entries)
