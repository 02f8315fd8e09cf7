"""Read a client's request: its names, caps and model name, and its messages."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Self

from pydantic import BaseModel, Field, StringConstraints, ValidationError
from starlette.requests import Request

from baar_jax.config import Dollars, Share, explain
from baar_jax.llms.history import (
  KEPT_TURNS,
  SURROUNDINGS,
  History,
  Turn,
  hash_text,
  read_turns,
)
from baar_jax.llms.provider import read_json
from baar_serve.forms.wire import WireForm

# The value of `policy` that lets the trained router decide.
ROUTER = "router"
# The pattern of a cap on LARGE calls in a model name, such as "baar:K=5".
CALL_CAP = re.compile(r":K=(\d{1,9})(?![^:])")
Id = Annotated[
  str, StringConstraints(strip_whitespace=True, min_length=1, max_length=256)
]
Tokens = Annotated[int, Field(ge=1, le=10**7)]
# The most bytes of a request's body.
MOST_BYTES = 64 * 2**20
# Headers of a client that go on to the upstream model.
PASSED_HEADERS = ("anthropic-version", "anthropic-beta")
# Headers in which clients name their session, after this program's own.
SESSION_NAMES = (
  "x-session-id",  # opencode, too
  "x-claude-code-session-id",
  "session-id",  # Codex
  "session_id",
  "x-opencode-session",
  "x-litellm-session-id",  # LiteLLM and OpenHands
  "x-litellm-trace-id",
  "x-task-id",  # Cline
  "agent-session-id",  # Goose
)
# Headers in which clients name a conversation within a session. All names that a
# request has count together.
CONVERSATION_NAMES = (
  "x-baar-conversation",
  "x-claude-code-agent-id",
  "thread-id",  # Codex
  "x-openai-subagent",
)
# OpenCode names the session of a subagent's parent here. The subagent draws on the
# parent's purse.
PARENT_NAME = "x-parent-session-id"
# The session's id in the user's id of Claude Code, a text with other ids.
ID_IN_TEXT = re.compile(r"session_(?:id\W+)?([\w-]{8,})")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
CACHE_MARK = re.compile(r', "cache_control": \{[^{}]*\}')
# Reasoning that some models write into their text.
REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)
# The event that ends a reply, in chat completions and Messages.
END = re.compile(rb'"(finish|stop)_reason": ?"')


class Refusal(ValueError):
  """A refused request, as an error answer in OpenAI's form.

  Attributes:
    status: the HTTP status.
    error: the error of the answer's JSON body.
    headers: headers of the answer, such as the session's name.
  """

  headers: Mapping[str, str] = {}

  def __init__(
    self,
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    code: str | None = None,
    **fields: object,
  ):
    """Write the error of the answer.

    Args:
      status: the HTTP status.
      message: the text for the client.
      kind: the `error.type` of the body.
      code: the `error.code`; None means `kind`.
      fields: further fields of the error, such as `needed_usd`.
    """
    super().__init__(message)
    self.status = status
    code = code or kind
    self.error = dict(message=message, type=kind, param=None, code=code, **fields)


class StrictRecord(BaseModel):
  """A record of JSON fields. A field of another type is refused and not converted."""

  model_config = {"strict": True}

  @classmethod
  def read(cls, fields: Mapping) -> Self:
    """Check JSON fields, and return them as a record.

    Raises:
      Refusal: a field is missing, has another type, or is out of its bounds.
    """
    try:
      return cls.model_validate(fields)
    except ValidationError as error:
      raise Refusal(400, f"Correct {explain(error, 'field')}") from None


SESSION = "the session's name"
CONVERSATION = "the conversation's name"


class CallFields(StrictRecord):
  """The fields of a client's call that set its policy, its session and its caps.

  They come from the call's body and headers; see `ClientCall.fields`. None stands
  for a field that the client has not sent.

  Attributes:
    model: the name of the policy that decides, perhaps with a cap on LARGE calls, such
      as "baar:K=5".
    n: the number of replies that the client asks for.
    session: the session's name.
    conversation: the name of a conversation within the session; "" without one.
    usd_limit: the session's cap in US dollars, from the header x-baar-max-usd.
    call_limit: the session's cap on LARGE calls, from the header
      x-baar-max-large-calls. A cap in `model` counts too; see `large_calls`.
    score: the score that the client's agent has reached so far, in [0, 1].
  """

  model: str
  n: int | None = Field(None, ge=1, le=128)
  max_tokens: Tokens | None = None
  max_completion_tokens: Tokens | None = None
  max_output_tokens: Tokens | None = None
  stream_options: dict | None = None
  session: Id | None = Field(None, alias=SESSION)
  conversation: str = Field("", alias=CONVERSATION, max_length=1024)
  task_id: Id | None = Field(None, alias="x-baar-task")
  usd_limit: Dollars | None = Field(None, alias="x-baar-max-usd", strict=False)
  call_limit: int | None = Field(
    None, alias="x-baar-max-large-calls", strict=False, ge=0, le=10**9
  )
  score: Share | None = Field(None, alias="x-baar-score", strict=False)

  @property
  def model_name(self) -> str:
    """Return the field `model` without its caps."""
    return CALL_CAP.sub("", self.model)

  @property
  def large_calls(self) -> int | None:
    """Return the lowest cap on LARGE calls among the header and the model name."""
    limits = map(int, CALL_CAP.findall(self.model))
    return find_lowest(self.call_limit, *limits)


class Caps(StrictRecord):
  """The caps of a session.

  Attributes:
    max_usd: the cap in US dollars; None is no cap.
    max_large_calls: the cap on LARGE calls; None is no cap.
  """

  model_config = {"extra": "forbid"}
  max_usd: Dollars | None = None
  max_large_calls: int | None = Field(None, ge=0, le=10**9)


class ClientKey(Caps):
  """A client's key, as a table of the file `keys`, with the caps of each session.

  Attributes:
    sha256: the SHA-256 of the key in hexadecimal digits.
    operator: whether the client sees all sessions, and may change caps.
    name: the name of the table; "" without the file.
  """

  sha256: str = Field("", pattern="^([0-9a-f]{64})?$")
  operator: bool = False
  name: str = ""


class SessionScore(StrictRecord):
  """The score and the task's name, which a client sends to end a session."""

  model_config = {"extra": "forbid"}

  score: Share
  task: str | None = None


async def read_body(request: Request) -> dict:
  """Read a request's body, which must be a JSON object.

  Raises:
    Refusal: the body is not declared as JSON, is too large, or is no JSON object.
  """
  if not request.headers.get("content-type", "").startswith("application/json"):
    # A browser asks this server before a page of another site may send it JSON. Some
    # other types need no such question, so only JSON is accepted.
    raise Refusal(415, "Send the body as JSON, with content-type: application/json.")
  body = bytearray()
  async for chunk in request.stream():
    body += chunk
    if len(body) > MOST_BYTES:
      raise Refusal(413, "The body is too large. Send a smaller one.")
  fields = read_json(body)
  if fields is None:
    raise Refusal(400, "The body cannot be read. Send a JSON object.")
  return fields


def find_names(fields: Mapping[str, object], *names: str) -> Iterator[object]:
  """Find the names of a session or a conversation in some fields, in their order."""
  for name in names:
    value = fields.get(name)
    if name == "user_id":
      found = ID_IN_TEXT.search(str(value))
      value = found and found[1]
    # Some clients send one prompt_cache_key for all tasks. An id names a session.
    if name == "prompt_cache_key" and not UUID.fullmatch(str(value)):
      value = None
    if value is not None:
      yield value


def drop_nulls(fields: Mapping) -> dict:
  """Return a copy of the fields without those that are None."""
  return {name: value for name, value in fields.items() if value is not None}


def find_lowest(*caps: float | None) -> float | None:
  """Return the lowest of the caps. None stands for no cap."""
  return min((cap for cap in caps if cap is not None), default=None)


@dataclasses.dataclass(frozen=True)
class ClientHistory(History):
  """The history of a client's call, with what tells conversations apart.

  Attributes:
    atoms: a hash of each text and each tool call of the assistant, in order.
  """

  atoms: list[str]


def read_history(body: Mapping, form: WireForm) -> ClientHistory:
  """Read the messages of a call as an unfinished episode; see `read_turns`.

  Args:
    body: the call's body.
    form: the wire form of the call.

  Raises:
    Refusal: a message has a wrong field, or there is no message, or the call has a
      field whose effect on the cost is unknown.
  """
  for field in form.unpriced:
    if body.get(field) not in (None, False, "standard", "global"):
      raise Refusal(
        400,
        f"This server refuses {field}, which changes the cost of a call. "
        "Leave it out, and send all messages.",
      )
  try:
    turns = form.read_turns(body)
  except ValueError as error:
    raise Refusal(400, f"Correct the field {form.history}: {error}.") from None
  atoms = []
  own_turns = []
  for turn in turns:
    if turn.role == "assistant":
      if turn.text and not (turn.calls or SURROUNDINGS.sub("", turn.text).strip()):
        continue  # The client has written this reply.
      atoms += hash_turn(turn)
    own_turns.append(turn)
  return ClientHistory(**vars(read_turns(own_turns)), atoms=atoms)


@functools.lru_cache(KEPT_TURNS)
def hash_turn(turn: Turn) -> tuple[str, ...]:
  """Hash a reply's text and each of its tool calls, without ids and layout.

  A client may send a reply back with other spaces, without its reasoning, or in several
  messages.
  """
  atoms = []
  text = " ".join(REASONING.sub("", turn.text).split())
  if text:
    atoms.append(hash_text(text))
  for call in turn.calls:
    # No arguments are "", "{}" or "null".
    arguments = read_json(call.arguments) or call.arguments.strip("{} ")
    if arguments == "null":
      arguments = ""
    atoms.append(hash_text(json.dumps([call.name, arguments], sort_keys=True)))
  return tuple(atoms)


def hash_prefix(form: WireForm, body: Mapping, messages: int) -> str:
  """Return a hash of what a model reads first of a call.

  Args:
    form: the wire form of the call.
    body: the call's body.
    messages: the number of messages that count.
  """
  fields = [body.get(name) for name in form.opening]
  text = json.dumps([fields, body[form.history][:messages]])
  # Clients move this mark from message to message.
  return hash_text(CACHE_MARK.sub("", text))


def write_event(data: dict) -> bytes:
  """Write one server-sent event. An event with a type also has it as its name."""
  name = f"event: {data['type']}\n" if "type" in data else ""
  return f"{name}data: {json.dumps(data)}\n\n".encode()
