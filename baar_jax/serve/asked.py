"""What a client asks for beside its messages: who decides, under which caps, in which session."""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request

CAP = re.compile(r":K=(\d{1,9})(?![^:])")  # on large calls, in a model's name
LONGEST_ID, MOST_CAP = 256, 10**9
LIMITS = ("max_tokens", "max_completion_tokens")
MOST = {"n": 128} | dict.fromkeys(LIMITS, 10**7)  # of fields that are counts


class Refusal(Exception):
  """An answer that is an error of OpenAI's form: its status and its body."""

  def __init__(self, status: int, message: str, kind="invalid_request_error", code=None, **fields):
    self.status, self.message = status, message
    error = {"message": message, "type": kind, "param": None, "code": code or kind}
    self.body = {"error": error | fields}


class Asked(NamedTuple):
  """What a call asks for; None is not said."""

  rule: str
  price: float | None  # of a dollar, for the router that knows its budget
  call_limit: int | None
  usd_limit: float | None
  id: str | None
  task_id: str | None
  score: float | None  # of the episode so far


async def read_body(request: Request, most_mb: float) -> dict:
  """The body, a JSON object. Raises Refusal."""
  if not request.headers.get("content-type", "").startswith("application/json"):
    # A page of another site may send anything else without being asked.
    raise Refusal(415, "send JSON with content-type: application/json")
  body = bytearray()
  async for part in request.stream():
    body += part
    if len(body) > most_mb * 2**20:
      raise Refusal(413, f"the body is over --config.serve.max_body_mb={most_mb:g}")
  try:
    fields = json.loads(body, parse_constant=int)  # NaN and the like are no JSON
    json.dumps(fields, ensure_ascii=False).encode()  # nor is half a character
  except (ValueError, RecursionError):
    fields = None
  if not isinstance(fields, dict):
    raise Refusal(400, "the body must be a JSON object")
  return fields


def read_asked(
  headers: Mapping[str, str], body: dict, policies: Mapping[str, tuple[str, float | None]]
) -> Asked:
  """What the headers and the body of a call ask for, where `policies` are the rules and prices of
  models' names. Raises Refusal for what cannot be given."""
  name = body.get("model") if isinstance(body.get("model"), str) else ""
  policy = policies.get(CAP.sub("", name))
  if policy is None:
    raise Refusal(404, f"model must be one of {', '.join(policies)}", code="model_not_found")
  for field, most in MOST.items():
    value = body.get(field)
    if value is not None and (type(value) is not int or not 1 <= value <= most):
      raise Refusal(400, f"{field} must be an integer from 1 to {most}")
  if type(body.get("stream") or False) is not bool:
    raise Refusal(400, "stream must be true or false")
  if not isinstance(body.get("stream_options") or {}, dict):
    raise Refusal(400, "stream_options must be an object")
  calls = *map(int, CAP.findall(name)), read_number(headers, "x-baar-max-large-calls", int)
  caps = find_least(*calls), read_number(headers, "x-baar-max-usd", float)
  metadata = body["metadata"] if isinstance(body.get("metadata"), dict) else {}
  given = body.get("session_id"), metadata.get("session_id"), headers.get("x-session-id")
  id_ = check_id(next((id_ for id_ in given if id_ is not None), None), "the session id")
  task_id = check_id(headers.get("x-baar-task"), "x-baar-task")
  return Asked(*policy, *caps, id_, task_id, read_number(headers, "x-baar-score", float, 1))


def check_id(value: object, name: str) -> str | None:
  """The value, None where there is none. Raises Refusal where it is no name of anything."""
  fine = isinstance(value, str) and value.isprintable() and value.strip()
  if value is not None and (not fine or len(value) > LONGEST_ID):
    raise Refusal(400, f"{name} must be a text of 1 to {LONGEST_ID} characters")
  return value


def find_least(*caps: float | None) -> float | None:
  """The least of these caps; None, which is no cap, where there is none."""
  return min((cap for cap in caps if cap is not None), default=None)


def read_number(headers: Mapping[str, str], name: str, number: type, most=MOST_CAP) -> float | None:
  """A number from a header; None without one."""
  if name not in headers:
    return None
  try:
    value = number(headers[name])
  except ValueError:
    value = -1
  if not 0 <= value <= most:
    whole = "a whole number" if number is int else "a number"
    raise Refusal(400, f"{name} must be {whole} from 0 to {most}")
  return value
