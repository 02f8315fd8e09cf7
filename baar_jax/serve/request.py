"""Read a client's request: its session, caps and model name, and its messages."""

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

# Two values of `serve.policy`. Both let the trained router decide. With SAMPLE it
# samples its decisions, and BoPO's next update learns from the sessions.
ROUTER = "router"
SAMPLE = "sample"
# The pattern of a cap on LARGE calls in a model name, such as "baar:K=5".
CALL_CAP = re.compile(r":K=(\d{1,9})(?![^:])")
Id = Annotated[
  str, StringConstraints(strip_whitespace=True, min_length=1, max_length=256)
]
# A bound on the length makes Pydantic refuse texts with half a surrogate pair, which
# UTF-8 cannot encode.
Text = Annotated[str, Field(max_length=10**9)]
Tokens = Annotated[int, Field(ge=1, le=10**7)]
# Number of prompt tokens that a worst case assumes for an image, a sound or a file (our
# choice).
PART_TOKENS = 50_000
PART_KINDS = ("image_url", "video_url", "audio_url", "input_audio", "file")
# Fields of a request that a model reads before the messages. If one of them changes,
# the model's prompt cache no longer fits.
DIGESTED_FIELDS = ("tools", "functions", "response_format")
# Number of tokens that a chat template adds at most to each text or number of a request
# (our choice).
VALUE_TOKENS = 8
# Names of the body's field and the header that may hold a session's id. The first one
# in this order that a request has counts.
SESSION_ID = AliasChoices(
  "session_id", AliasPath("metadata", "session_id"), "x-session-id"
)


class Refusal(ValueError):
  """A refused request, as an error answer in OpenAI's form.

  Attributes:
    status: the HTTP status.
    code: the `error.code` of the body.
    body: the JSON body of the answer.
  """

  def __init__(
    self,
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    code: str | None = None,
    **fields: object,
  ):
    """Write the body of the error answer.

    Args:
      status: the HTTP status.
      message: the text for the client.
      kind: the `error.type` of the body.
      code: the `error.code`; None means `kind`.
      fields: further fields of the error, such as `needed_usd`.
    """
    super().__init__(message)
    self.status = status
    self.code = code or kind
    error = dict(message=message, type=kind, param=None, code=self.code, **fields)
    self.body = {"error": error}


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
      problem = error.errors(include_input=False)[0]
      place = ".".join(map(str, problem["loc"]))
      raise Refusal(400, f"Correct the field {place}: {problem['msg']}") from None


class CallFields(StrictRecord):
  """The fields of a client's call that set its policy, its session and its caps.

  They come from the call's body and headers. None stands for a field that the client
  has not sent.

  Attributes:
    model: the name of the policy that decides, perhaps with a cap on LARGE calls, such
      as "baar:K=5".
    n: the number of replies that the client asks for.
    id: the session's id.
    usd_limit: the session's cap in US dollars, from the header x-baar-max-usd.
    call_limit: the session's cap on LARGE calls, from the header
      x-baar-max-large-calls. A cap in `model` counts too; see `large_calls`.
    score: the score that the client's agent has reached so far, in [0, 1].
  """

  model: str
  n: int | None = Field(None, ge=1, le=128)
  max_tokens: Tokens | None = None
  max_completion_tokens: Tokens | None = None
  stream_options: dict | None = None
  id: Id | None = Field(None, validation_alias=SESSION_ID)
  task_id: Id | None = Field(None, alias="x-baar-task")
  usd_limit: float | None = Field(
    None, alias="x-baar-max-usd", strict=False, ge=0, le=1e9
  )
  call_limit: int | None = Field(
    None, alias="x-baar-max-large-calls", strict=False, ge=0, le=10**9
  )
  score: float | None = Field(None, alias="x-baar-score", strict=False, ge=0, le=1)

  @classmethod
  def read_call(cls, headers: Mapping[str, str], body: dict) -> Self:
    """Read the fields of a call from its headers and its body.

    A field of the body with the value null counts as missing.

    Raises:
      Refusal: a field is missing, has another type, or is out of its bounds.
    """
    fields = drop_nulls(body)
    metadata = fields.get("metadata")
    fields["metadata"] = drop_nulls(metadata if isinstance(metadata, dict) else {})
    for name, value in headers.items():
      if name.startswith("x-"):
        fields[name] = value
    return cls.read(fields)

  @property
  def model_name(self) -> str:
    """Return the field `model` without its caps."""
    return CALL_CAP.sub("", self.model)

  @property
  def large_calls(self) -> int | None:
    """Return the lowest cap on LARGE calls among the header and the model name."""
    limits = map(int, CALL_CAP.findall(self.model))
    return find_lowest(self.call_limit, *limits)

  def make_cap(self, default: Cap) -> Cap:
    """Return the session's caps.

    A client can only lower a default cap: of both, the lower one holds.

    Args:
      default: the server's default caps.
    """
    calls = find_lowest(self.large_calls, default.calls)
    return Cap(calls, find_lowest(self.usd_limit, default.usd))


class SessionScore(StrictRecord):
  """The score and the task's name, which a client sends to end a session."""

  score: float = Field(ge=0, le=1)
  task: Id | None = None


async def read_body(request: Request, limit_mb: float) -> dict:
  """Read a request's body, which must be a JSON object.

  Args:
    limit_mb: the largest body, in MiB.

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
    if len(body) > limit_mb * 2**20:
      raise Refusal(
        413,
        f"The body exceeds --config.serve.max_body_mb={limit_mb:g}. "
        "Send a smaller body, or raise this limit.",
      )
  fields = read_json(body)
  if fields is None:
    raise Refusal(400, "The body cannot be read. Send a JSON object.")
  return fields


def drop_nulls(fields: Mapping) -> dict:
  """Return a copy of the fields without those that are None."""
  return {name: value for name, value in fields.items() if value is not None}


def find_lowest(*caps: float | None) -> float | None:
  """Return the lowest of the caps. None stands for no cap."""
  return min((cap for cap in caps if cap is not None), default=None)


class ContentPart(StrictRecord):
  """A part of a message's content: a text, an image, a sound or a file."""

  type: str
  text: Text | None = None

  def __str__(self) -> str:
    """Return the part's text, or its type in brackets, such as "[image_url]"."""
    return f"[{self.type}]" if self.text is None else self.text


class Function(StrictRecord):
  """The function that a tool call names, with its arguments."""

  name: Text = ""
  arguments: Text = Field("", validation_alias=AliasChoices("arguments", "input"))

  def __str__(self) -> str:
    """Return the function's name and its arguments, separated by a space."""
    return f"{self.name} {self.arguments}".strip()


class ToolCall(StrictRecord):
  """A tool call in an assistant message."""

  function: Function = Field(
    Function(), validation_alias=AliasChoices("function", "custom")
  )


class Message(StrictRecord):
  """A message of a chat completion: the fields that an episode is made of."""

  role: str
  content: Text | list[ContentPart] | None = None
  tool_calls: list[ToolCall] | None = None

  @property
  def text(self) -> str:
    """Return the message's text, with its content parts joined by line breaks."""
    if isinstance(self.content, str):
      return self.content
    return "\n".join(map(str, self.content or ()))

  @property
  def action(self) -> str:
    """Return the action that an assistant message stands for.

    The action is the message's tool calls and its text. If the text is a ReAct reply
    ("Thought: ... Action: ..."), only the part after "Action:" counts.
    """
    calls = [str(call.function) for call in self.tool_calls or ()]
    action = parse_action(self.text, code="```" in self.text) or self.text.strip()
    return "\n".join(filter(None, [*calls, action]))


class Chat(StrictRecord):
  """The messages of a chat completion."""

  messages: list[Message] = Field(min_length=1)


class Conversation(NamedTuple):
  """An unfinished episode, read from the messages of a client's call.

  Attributes:
    task: the text of the task.
    observations: a text before each action, and one after the last action.
    actions: a text for each assistant message.
    fingerprint: a hash of the system text, the tools and the first user message. If the
      client sends no session id, the hash identifies the session.
  """

  task: str
  observations: list[str]
  actions: list[str]
  fingerprint: str

  def write_steps(self, steps: Sequence[Step]) -> list[Step]:
    """Return copies of steps with this conversation's observations and actions."""
    copies = []
    for text, action, step in zip(self.observations, self.actions, steps):
      copies.append(dataclasses.replace(step, observation=text, action=action))
    return copies


def read_messages(messages: Sequence[Mapping], tools: object = None) -> Conversation:
  """Read chat-completions messages as an unfinished episode (our choice).

  The first user text is the task. A text "Task: ...\\n\\n..." is the task and the first
  observation, as in the conversations of training. Each assistant message is an action.
  The texts between two assistant messages are one observation.

  Args:
    tools: the tools of the call; only the fingerprint depends on them.

  Raises:
    Refusal: a message has a wrong field, or there is no message.
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
  """The beginning of a session's prompts that a model may have in its prompt cache.

  Attributes:
    messages: the number of messages in this prefix.
    digest: a hash of the prefix. A call with another hash does not begin with this
      prefix.
    tokens: the prompt tokens of the prefix, as billed.
    at_s: when the model read the prefix, in seconds since 1970.
  """

  messages: int
  digest: str
  tokens: int
  at_s: float

  @classmethod
  def after(cls, body: dict, tokens: int) -> Self:
    """Return what a model's prompt cache holds after a call.

    Args:
      body: the call's body.
      tokens: the prompt tokens that were billed.
    """
    count = len(body["messages"])
    return cls(count, _digest(body, count), tokens, time.time())

  def is_prefix_of(self, body: dict) -> bool:
    """Tell whether the call with this body begins with the cached prefix."""
    return _digest(body, self.messages) == self.digest


def bound_tokens(value: object) -> int:
  """Compute an upper bound on the prompt tokens of a JSON value.

  Every byte counts as a token, because a token has at least one byte. Texts and numbers
  also get the tokens of a chat template, and media PART_TOKENS.
  """
  if isinstance(value, str):
    return len(value.encode(errors="replace")) + VALUE_TOKENS
  if isinstance(value, list):
    return sum(map(bound_tokens, value))
  if not isinstance(value, dict):
    return 4 * VALUE_TOKENS
  kind = value.get("type")
  if kind in PART_KINDS:
    rest = [entry for name, entry in value.items() if name != kind]
    return PART_TOKENS + bound_tokens(rest)
  return sum(map(bound_tokens, (*value, *value.values())))


def _digest(body: dict, messages: int) -> str:
  """Return a hash of a call's DIGESTED_FIELDS and of its first messages."""
  fields = [body.get(name) for name in DIGESTED_FIELDS]
  text = json.dumps([fields, body["messages"][:messages]])
  return hashlib.sha256(text.encode()).hexdigest()
