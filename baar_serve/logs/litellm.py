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
  for record in log.records:
    if record.get("status") == "failure":
      continue
    response = unpack(record.get("response"))
    history = []
    reply = Entry(Turn("assistant", ""), record["model"], record.get("startTime"))
    for field in PATHS.keys() & response.keys():
      form = FORMS[PATHS[field]]
      body = unpack(record.get("proxy_server_request"))
      body = body or {form.history: record["messages"]}
      history = [*map(Entry, form.read_turns(body))]
      reply.turn = form.read_reply(response)
    usage_object = unpack(record.get("metadata")).get("usage_object")
    reply.usage = response.get("usage") or usage_object or record
    reply.cost_usd = record.get("response_cost", record.get("spend"))
    session = ""
    for name in ("request_id", "id", "session_id", "trace_id"):
      session = record.get(name) or session
    yield [*write_calls(session, "", [*history, reply])][-1]


def unpack(value: object) -> dict:
  """Return a JSON object, which spend logs hold as a text; {} if it is none."""
  if isinstance(value, str) and value.startswith("{"):
    value = json.loads(value)
  return value if isinstance(value, dict) else {}
