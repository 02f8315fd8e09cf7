"""A client's call: who decides, its caps and session, and its text as an episode."""

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, Self

from pydantic import (
  AliasChoices,
  AliasPath,
  BaseModel,
  Field,
  StringConstraints,
  ValidationError,
)
from starlette.requests import Request

from baar_jax.episode import Step
from baar_jax.llms.agent import parse_action
from baar_jax.llms.wire import read_json
from baar_jax.rollout.specs import Cap

ROUTER = "router"  # decides by the trained router
SAMPLE = "sample"  # decides by the router whose sessions BoPO learns from next
CAP = re.compile(r":K=(\d{1,9})(?![^:])")  # on large calls, in a model's name
Id = Annotated[
  str, StringConstraints(strip_whitespace=True, min_length=1, max_length=256)
]
Text = Annotated[str, Field(max_length=10**9)]  # also refuses half a pair of surrogates
Tokens = Annotated[int, Field(ge=1, le=10**7)]
PART_TOKENS = 50_000  # most of an image, a sound or a file in a message (our choice)
PART_KINDS = ("image_url", "video_url", "audio_url", "input_audio", "file")
DIGESTED = ("tools", "functions", "response_format")
VALUE_TOKENS = 8  # most that a template puts around a text or a number
ID = AliasChoices("session_id", AliasPath("metadata", "session_id"), "x-session-id")


class Refusal(ValueError):
  """An answer that is an error of OpenAI's form: its status and its body."""

  def __init__(
    self,
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    code: str | None = None,
    **fields: object,
  ):
    super().__init__(message)
    self.status = status
    self.code = code or kind
    error = dict(message=message, type=kind, param=None, code=self.code, **fields)
    self.body = {"error": error}


class Strict(BaseModel):
  """A record of a request, which converts nothing."""

  model_config = {"strict": True}

  @classmethod
  def read(cls, fields: Mapping) -> Self:
    """Read fields. Raises Refusal if one is missing or out of bounds."""
    try:
      return cls.model_validate(fields)
    except ValidationError as error:
      first = error.errors(include_input=False)[0]
      place = ".".join(map(str, first["loc"]))
      raise Refusal(400, f"request.{place}: {first['msg']}") from None


class Asked(Strict):
  """What this server reads of a call's body and headers; None is not said."""

  model: str  # its name may have caps
  n: int | None = Field(None, ge=1, le=128)
  max_tokens: Tokens | None = None
  max_completion_tokens: Tokens | None = None
  stream_options: dict | None = None
  id: Id | None = Field(None, validation_alias=ID)
  task_id: Id | None = Field(None, alias="x-baar-task")
  usd_limit: float | None = Field(
    None, alias="x-baar-max-usd", strict=False, ge=0, le=1e9
  )
  call_limit: int | None = Field(
    None, alias="x-baar-max-large-calls", strict=False, ge=0, le=10**9
  )
  # So far.
  score: float | None = Field(None, alias="x-baar-score", strict=False, ge=0, le=1)

  @classmethod
  def read_call(cls, headers: Mapping[str, str], body: dict) -> Self:
    """Read a call. Raises Refusal."""
    fields = drop_nulls(body)
    metadata = fields.get("metadata")
    fields["metadata"] = drop_nulls(metadata if isinstance(metadata, dict) else {})
    for name, value in headers.items():
      if name.startswith("x-"):
        fields[name] = value
    return cls.read(fields)

  @property
  def model_name(self) -> str:
    """Return the name of the model without its caps."""
    return CAP.sub("", self.model)

  @property
  def large_calls(self) -> int | None:
    """Return the lowest cap on large calls that is named."""
    limits = map(int, CAP.findall(self.model))
    return find_least(self.call_limit, *limits)

  def make_cap(self, default: Cap) -> Cap:
    """Return the session's cap: the client can only lower the default."""
    calls = find_least(self.large_calls, default.calls)
    return Cap(calls, find_least(self.usd_limit, default.usd))


class Scored(Strict):
  """How a session ends."""

  score: float = Field(ge=0, le=1)
  task: Id | None = None


async def read_body(request: Request, most_mb: float) -> dict:
  """Read the body, a JSON object. Raises Refusal."""
  if not request.headers.get("content-type", "").startswith("application/json"):
    # A page of another site may send anything else without being asked.
    raise Refusal(415, "send JSON with content-type: application/json")
  body = bytearray()
  async for part in request.stream():
    body += part
    if len(body) > most_mb * 2**20:
      raise Refusal(413, f"the body is over --config.serve.max_body_mb={most_mb:g}")
  fields = read_json(body)
  if fields is None:
    raise Refusal(400, "the body must be a JSON object")
  return fields


def drop_nulls(fields: Mapping) -> dict:
  """Return the fields that are said."""
  return {name: value for name, value in fields.items() if value is not None}


def find_least(*caps: float | None) -> float | None:
  """Find the least of these caps; None, which is no cap, if there is none."""
  return min((cap for cap in caps if cap is not None), default=None)


class Part(Strict):
  """A part of a message."""

  type: str
  text: Text | None = None

  def __str__(self) -> str:
    return f"[{self.type}]" if self.text is None else self.text


class Function(Strict):
  """The function of a tool call."""

  name: Text = ""
  arguments: Text = Field("", validation_alias=AliasChoices("arguments", "input"))

  def __str__(self) -> str:
    return f"{self.name} {self.arguments}".strip()


class ToolCall(Strict):
  """A tool call of a reply."""

  function: Function = Field(
    Function(), validation_alias=AliasChoices("function", "custom")
  )


class Message(Strict):
  """What an episode takes from a message of OpenAI's chat completions."""

  role: str
  content: Text | list[Part] | None = None
  tool_calls: list[ToolCall] | None = None

  @property
  def text(self) -> str:
    """Join its texts; a part that is none is named, such as "[image_url]"."""
    if isinstance(self.content, str):
      return self.content
    return "\n".join(map(str, self.content or ()))

  @property
  def action(self) -> str:
    """Join its tool calls, and the action of a ReAct reply or all of its text."""
    calls = [str(call.function) for call in self.tool_calls or ()]
    action = parse_action(self.text, code="```" in self.text) or self.text.strip()
    return "\n".join(filter(None, [*calls, action]))


class Chat(Strict):
  """The messages of a call."""

  messages: list[Message] = Field(min_length=1)


class Conversation(NamedTuple):
  """The episode in a list of messages, with one observation more than actions."""

  task: str  # for the agent
  observations: list[str]  # the first is before any action; the last waits for the next
  actions: list[str]  # one for each assistant message
  fingerprint: str  # the same for all calls of a session that names no id

  def write_steps(self, steps: Sequence[Step]) -> list[Step]:
    """Write the steps of the text, with the models and calls of these ones."""
    texts = zip(self.observations, self.actions, steps)
    return [Step(seen, made.model, action, made.calls) for seen, action, made in texts]


def read_messages(messages: Sequence[Mapping], tools: object = None) -> Conversation:
  """Read messages of OpenAI's chat completions as an episode (our choice).

  The first user text is the task; one of the form "Task: ...\\n\\n..." is split into
  the task and the first observation, as training's conversations begin. Each assistant
  message is an action; all texts between two of them are one result.

  Raises:
    Refusal: the messages are none.
  """
  opening = []
  first_user = None
  actions = []
  results = [[]]
  for message in Chat.read({"messages": messages}).messages:
    if message.role == "assistant":
      actions.append(message.action)
      results.append([])
    elif message.role in ("system", "developer") and not actions:
      opening.append(message.text)
    elif message.role == "user" and first_user is None:
      first_user = message.text
    elif message.text:
      results[-1].append(message.text)
  task = "\n".join(opening) if first_user is None else first_user
  head, blank, observation = task.partition("\n\n")
  if blank and head.startswith("Task: "):
    task = head.removeprefix("Task: ")
    results[0].insert(0, observation)
  identity = json.dumps([opening, tools, first_user], sort_keys=True, default=str)
  fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:32]
  observations = ["\n".join(texts) for texts in results]
  return Conversation(task, observations, actions, fingerprint)


@dataclasses.dataclass
class Cache:
  """What a model's endpoint has read of a session, and may read at the cached price."""

  messages: int  # of the conversation; the digest tells them from others
  digest: str
  tokens: int  # of their prompt, as it was billed
  at_s: float  # seconds of the epoch

  @classmethod
  def after(cls, body: dict, tokens: int) -> Self:
    """Return what is warm now that a prompt of so many tokens has been read."""
    count = len(body["messages"])
    return cls(count, _digest(body, count), tokens, time.time())

  def begins(self, body: dict) -> bool:
    """Tell whether a call begins with what was read."""
    return _digest(body, self.messages) == self.digest


def count_tokens(value: object) -> int:
  """Bound the prompt tokens of JSON: no token is shorter than a byte."""
  if isinstance(value, str):
    return len(value.encode(errors="replace")) + VALUE_TOKENS
  if isinstance(value, list):
    return sum(map(count_tokens, value))
  if not isinstance(value, dict):
    return 4 * VALUE_TOKENS
  kind = value.get("type")
  if kind in PART_KINDS:
    rest = [entry for name, entry in value.items() if name != kind]
    return PART_TOKENS + count_tokens(rest)
  return sum(map(count_tokens, (*value, *value.values())))


def _digest(body: dict, messages: int) -> str:
  parts = [body.get(name) for name in DIGESTED]
  text = json.dumps([parts, body["messages"][:messages]])
  return hashlib.sha256(text.encode()).hexdigest()
