"""Read LiteLLM's logs: records of its StandardLoggingPayload, or its spend logs.

Source: litellm/types/utils.py and tests/logging_callback_tests/gcs_pub_sub_body of
BerriAI/litellm.
"""

import json

from baar_jax.llms.history import Turn
from baar_serve.forms import FORMS
from baar_serve.logs.record import Calls, Entry, Log, write_calls

# The wire form of a response, by the field that holds the reply.
PATHS = {"choices": "chat/completions", "output": "responses", "content": "messages"}


def read(log: Log) -> Calls:
  """Read the calls that succeeded; a trace is a session.

  Spend logs have the request as a text, or no texts at all.
  """
  for record in log.load():
    if record.get("status") == "failure":
      continue
    response = unpack(record.get("response"))
    turns = []
    turn = Turn("assistant", "")
    for field in PATHS.keys() & response.keys():
      form = FORMS[PATHS[field]]
      body = unpack(record.get("proxy_server_request"))
      turns = form.read_turns(body or {form.history: record["messages"]})
      turn = form.read_reply(response)
    metadata = unpack(record.get("metadata"))
    reply = Entry(
      turn,
      record["model"],
      record.get("startTime"),
      response.get("usage") or metadata.get("usage_object") or record,
      record.get("response_cost", record.get("spend")),
    )
    session = record.get("trace_id") or record.get("session_id") or record["id"]
    yield [*write_calls(session, "", [*map(Entry, turns), reply])][-1]


def unpack(value: object) -> dict:
  """Return a JSON object, which spend logs hold as a text; {} if it is none."""
  if isinstance(value, str) and value.startswith("{"):
    value = json.loads(value)
  return value if isinstance(value, dict) else {}
