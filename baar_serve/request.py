"""Read a client's request: its names, caps and model name, and its messages."""

import asyncio
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, Field, StringConstraints, ValidationError
from starlette.requests import Request

from baar_jax.config import Dollars, Share
from baar_jax.episode import SMALL, Step
from baar_jax.llms.chat_completions import FORM, parse_action
from baar_jax.llms.wire import Turn, WireForm, read_json

# Two values of `serve.policy`. Both let the trained router decide. With SAMPLE it
# samples its decisions, and BoPO's next update learns from the sessions.
ROUTER = "router"
SAMPLE = "sample"
# The `error.code` of a call whose worst case exceeds a budget at every model.
EXHAUSTED = "budget_exhausted"
# The `error.code` of a call that has waited too long for the calls beside it.
RESERVED = "budget_reserved"
# The pattern of a cap on LARGE calls in a model name, such as "baar:K=5".
CALL_CAP = re.compile(r":K=(\d{1,9})(?![^:])")
Id = Annotated[
  str, StringConstraints(strip_whitespace=True, min_length=1, max_length=256)
]
Tokens = Annotated[int, Field(ge=1, le=10**7)]
# Number of prompt tokens that a worst case assumes for an image, a sound or a file (our
# choice); the types of such parts, and the fields that hold their data or address.
PART_TOKENS = 50_000
PART_KINDS = (
  "image_url",
  "video_url",
  "audio_url",
  "input_audio",
  "file",
  "image",
  "document",
  "input_image",
  "input_file",
)
PART_FIELDS = {
  "image_url",
  "video_url",
  "audio_url",
  "input_audio",
  "file",
  "file_data",
  "file_id",
  "file_url",
  "source",
}
# Number of tokens that a chat template adds at most to each text or number of a request
# (our choice).
VALUE_TOKENS = 8
# Seconds within which a request's body must arrive.
BODY_S = 60.0
# Headers of a client that go on to the upstream model.
PASSED_HEADERS = ("anthropic-version", "anthropic-beta")
# Where clients name their session. The first place that a request has counts: a header,
# or a field of the body after "body.".
SESSION_NAMES = (
  "x-baar-session-id",
  "x-session-id",
  "url",  # the NAME in /s/NAME/v1
  "x-claude-code-session-id",
  "session-id",  # Codex
  "session_id",
  "x-codex-turn-metadata",
  "x-opencode-session",
  "x-litellm-session-id",  # LiteLLM and OpenHands
  "x-litellm-trace-id",
  "x-task-id",  # Cline
  "agent-session-id",  # Goose
  "body.session_id",
  "body.metadata.session_id",
  "body.litellm_session_id",
  "body.metadata.user_id",  # Claude Code
  "body.prompt_cache_key",
)
# Where clients name a conversation within a session. All names that a request has count
# together.
CONVERSATION_NAMES = (
  "x-baar-conversation",
  "x-claude-code-agent-id",
  "thread-id",  # Codex
  "x-openai-subagent",
)
# OpenCode names the session of a subagent's parent here. The subagent draws on the
# parent's purse.
PARENT_NAME = "x-parent-session-id"
# Places whose text has the session's id among other ids.
ID_IN_TEXT = re.compile(r"session_(?:id\W+)?([\w-]{8,})")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
CACHE_MARK = re.compile(r', "cache_control": \{[^{}]*\}')
# Reasoning that some models write into their text.
REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)
# The event that ends a reply, in chat completions and Messages.
END = re.compile(rb'"(finish|stop)_reason": ?"')
# Texts that Codex and Claude Code put before the task of the user.
SURROUNDINGS = re.compile(
  r"<(environment_context|system-reminder|user_instructions)>.*?</\1>", re.DOTALL
)


class Refusal(ValueError):
  """A refused request, as an error answer in OpenAI's form.

  Attributes:
    status: the HTTP status.
    code: the `error.code` of the body.
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
    self.code = code or kind
    self.error = dict(message=message, type=kind, param=None, code=self.code, **fields)


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


SESSION = "the session's name"
CONVERSATION = "the conversation's name"


class CallFields(StrictRecord):
  """The fields of a client's call that set its policy, its session and its caps.

  They come from the call's body and headers. None stands for a field that the client
  has not sent.

  Attributes:
    model: the name of the policy that decides, perhaps with a cap on LARGE calls, such
      as "baar:K=5".
    n: the number of replies that the client asks for.
    purse: the session's name; its purse has the caps.
    conversation: the name of a conversation within the session; "" without one.
    parent: the session of the agent that this agent works for.
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
  purse: Id | None = Field(None, alias=SESSION)
  conversation: str = Field("", alias=CONVERSATION, max_length=1024)
  parent: Id | None = Field(None, alias=PARENT_NAME)
  task_id: Id | None = Field(None, alias="x-baar-task")
  usd_limit: Dollars | None = Field(None, alias="x-baar-max-usd", strict=False)
  call_limit: int | None = Field(
    None, alias="x-baar-max-large-calls", strict=False, ge=0, le=10**9
  )
  score: Share | None = Field(None, alias="x-baar-score", strict=False)

  @classmethod
  def read_call(cls, headers: Mapping[str, str], body: dict) -> Self:
    """Read the fields of a call from its headers and its body.

    A field of the body with the value null counts as missing.

    Args:
      headers: the headers, and the session's name in the URL under the name "url".

    Raises:
      Refusal: a field is missing, has another type, or is out of its bounds.
    """
    places = {**headers}
    metadata = body.get("metadata")
    for prefix, fields in (("body.", body), ("body.metadata.", metadata)):
      for name, value in fields.items() if isinstance(fields, dict) else ():
        places[prefix + name] = value
    fields = drop_nulls(body)
    for name, value in headers.items():
      if name.startswith("x-"):
        fields[name] = value
    fields[SESSION] = next(find_names(places, SESSION_NAMES), None)
    names = [*find_names(places, CONVERSATION_NAMES)]
    if PARENT_NAME in headers:
      names.append(fields[SESSION] or "")
    # A conversation's name counts within its session.
    is_named = fields[SESSION] is not None
    fields[CONVERSATION] = "/".join(map(str, names)) * is_named
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


class ClientKey(StrictRecord):
  """A client's key, as a table of the file `serve.keys`.

  Attributes:
    sha256: the SHA-256 of the key in hexadecimal digits.
    operator: whether the client sees all sessions, and may change caps.
    max_usd: the cap of each session in US dollars; None is no cap.
    max_large_calls: the cap of each session on LARGE calls; None is no cap.
    usd_per_day: the cap of all sessions together on a day (UTC); None is no cap.
    name: the name of the table; "" without the file.
  """

  model_config = {"strict": True, "extra": "forbid"}
  sha256: str = Field("", pattern="^([0-9a-f]{64})?$")
  operator: bool = False
  max_usd: float | None = Field(None, ge=0)
  max_large_calls: int | None = Field(None, ge=0)
  usd_per_day: float | None = Field(None, ge=0)
  name: str = ""

  @property
  def client(self) -> str | None:
    """Return the name of the client whose sessions this key shows; None shows all."""
    return None if self.operator else self.name


class SessionScore(StrictRecord):
  """The score and the task's name, which a client sends to end a session.

  Attributes:
    conversation: the number of the conversation; None is the one with the most steps.
  """

  score: Share
  task: Id | None = None
  conversation: int | None = Field(None, ge=1, lt=2**63)


class ListQuery(StrictRecord):
  """The filters of a list of sessions.

  Attributes:
    client: the name of a client's key; "" is all.
    name: a part of the session's name.
    before_s: only sessions that changed before this time, in seconds since 1970.
    limit: the largest number of sessions.
  """

  client: str = ""
  name: str = ""
  before_s: float = Field(1e12, strict=False)
  limit: int = Field(100, strict=False, ge=1, le=100)


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
  try:
    async with asyncio.timeout(BODY_S):
      async for chunk in request.stream():
        body += chunk
        if len(body) > limit_mb * 2**20:
          raise Refusal(
            413,
            f"The body exceeds --config.serve.max_body_mb={limit_mb:g}. "
            "Send a smaller body, or raise this limit.",
          )
  except TimeoutError:
    raise Refusal(
      408, f"The body took longer than {BODY_S:g} seconds. Send the call again."
    ) from None
  fields = read_json(body)
  if fields is None:
    raise Refusal(400, "The body cannot be read. Send a JSON object.")
  return fields


def find_names(places: Mapping[str, object], names: Sequence[str]) -> Iterator[object]:
  """Find the names that a request has in some places, in their order.

  Args:
    places: the headers and the fields of the body, by place.
    names: places of `SESSION_NAMES` or `CONVERSATION_NAMES`.
  """
  for place in names:
    value = places.get(place)
    if place in ("x-codex-turn-metadata", "body.metadata.user_id"):
      found = ID_IN_TEXT.search(str(value))
      value = found and found[1]
    # Some clients send one prompt_cache_key for all tasks. An id names a session.
    if place == "body.prompt_cache_key" and not UUID.fullmatch(str(value)):
      value = None
    if value is not None:
      yield value


def drop_nulls(fields: Mapping) -> dict:
  """Return a copy of the fields without those that are None."""
  return {name: value for name, value in fields.items() if value is not None}


def find_lowest(*caps: float | None) -> float | None:
  """Return the lowest of the caps. None stands for no cap."""
  return min((cap for cap in caps if cap is not None), default=None)


class History(NamedTuple):
  """An unfinished episode, read from the messages of a client's call.

  Attributes:
    task: the text of the task.
    observations: a text before each action, and one after the last action.
    actions: a text for each reply of the assistant.
    atoms: a hash of each text and each tool call of the assistant, in order.
    opening: a hash of the task.
    opening_chars: the number of characters before the first action.
  """

  task: str
  observations: list[str]
  actions: list[str]
  atoms: list[str]
  opening: str
  opening_chars: int

  def write_steps(self, steps: Mapping[int, Step]) -> list[Step]:
    """Return copies of steps with this history's observations and actions.

    Args:
      steps: the steps by place; steps that are missing count as steps of SMALL.
    """
    copies = []
    for place, action in enumerate(self.actions):
      step = steps.get(place) or Step("", SMALL, "")
      text = self.observations[place]
      copies.append(dataclasses.replace(step, observation=text, action=action))
    return copies


def read_history(body: Mapping, form: WireForm = FORM) -> History:
  """Read the messages of a call as an unfinished episode (our choice).

  The first user text is the task. A text "Task: ...\\n\\n..." is the task and the first
  observation, as in the conversations of training. Each reply is an action. The texts
  between two replies are one observation.

  Args:
    body: the call's body.
    form: the wire form of the call.

  Raises:
    Refusal: a message has a wrong field, or there is no message, or the call has a
      field whose effect on the cost is unknown.
  """
  for field in form.unpriced:
    if body.get(field) not in (None, False, "standard", "global"):
      problem = f"This server refuses {field}, which changes the cost of a call"
      raise Refusal(400, f"{problem}. Leave it out, and send all messages.")
  try:
    turns = form.read_turns(body)
  except ValueError as error:
    raise Refusal(400, f"Correct the field {form.history}: {error}.") from None
  system = []
  task = None
  actions = []
  results = [[]]
  atoms = []
  opening_chars = 0
  for turn in turns:
    if not actions:
      opening_chars += len(turn.text)
    text = SURROUNDINGS.sub("", turn.text).strip()
    if turn.role == "assistant":
      actions.append(write_action(turn))
      atoms += hash_turn(turn)
      results.append([])
    elif turn.role in ("system", "developer") and not actions:
      system.append(turn.text)
    elif turn.role == "user" and task is None and (text or not turn.text):
      task = text
    elif turn.text:
      results[-1].append(turn.text)
  if task is None:
    task = "\n".join(system)
  head, blank, observation = task.partition("\n\n")
  if blank and head.startswith("Task: "):
    task = head.removeprefix("Task: ")
    results[0].insert(0, observation)
  observations = ["\n".join(texts) for texts in results]
  return History(task, observations, actions, atoms, hash_text(task), opening_chars)


def write_action(turn: Turn) -> str:
  """Write the action that a reply stands for: its tool calls and its text.

  If the text is a ReAct reply ("Thought: ... Action: ..."), only the part after
  "Action:" counts.
  """
  calls = [f"{call.name} {call.arguments}".strip() for call in turn.calls]
  action = parse_action(turn.text, code="```" in turn.text) or turn.text.strip()
  return "\n".join(filter(None, [*calls, action]))


def hash_turn(turn: Turn) -> list[str]:
  """Hash a reply's text and each of its tool calls, without ids and layout.

  A client may send a reply back with other spaces, without its reasoning, or in several
  messages.
  """
  atoms = []
  text = " ".join(REASONING.sub("", turn.text).split())
  if text:
    atoms.append(hash_text(text))
  for call in turn.calls:
    # No arguments are "" or "{}".
    arguments = read_json(call.arguments) or call.arguments.strip("{} ")
    atoms.append(hash_text(json.dumps([call.name, arguments], sort_keys=True)))
  return atoms


def hash_text(text: str) -> str:
  """Return a short hash of a text."""
  return hashlib.sha256(text.encode()).hexdigest()[:32]


def count_bytes(text: str) -> int:
  """Count the bytes of a text. A token has at least one byte."""
  return len(text.encode(errors="replace"))


def bound_tokens(value: object, count: Callable[[str], int] = count_bytes) -> int:
  """Compute an upper bound on the prompt tokens of a JSON value.

  Texts and numbers also get the tokens of a chat template, and media PART_TOKENS.

  Args:
    count: an upper bound on the tokens of a text.
  """
  if isinstance(value, str):
    return count(value) + VALUE_TOKENS
  if isinstance(value, list | tuple):
    return sum(bound_tokens(entry, count) for entry in value)
  if not isinstance(value, dict):
    return 4 * VALUE_TOKENS
  data = value.keys() & PART_FIELDS
  if value.get("type") in PART_KINDS and data:
    rest = [entry for name, entry in value.items() if name not in data]
    source = value.get("source")
    # The source of a document may be a text.
    if isinstance(source, dict) and source.get("type") in ("text", "content"):
      rest.append(source)
    return PART_TOKENS + bound_tokens(rest, count)
  return bound_tokens((*value, *value.values()), count)


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


def write_event(data: dict | str) -> bytes:
  """Write one server-sent event. Its data is the text, or the JSON of the dict.

  An event with a type also has it as its name.
  """
  if isinstance(data, str):
    return f"data: {data}\n\n".encode()
  name = f"event: {data['type']}\n" if "type" in data else ""
  return f"{name}data: {json.dumps(data)}\n\n".encode()


def write_headers(values: Mapping[str, str | float | None]) -> dict[str, str]:
  """Return the values that are not None as headers with the prefix `x-baar-`."""
  headers = {}
  for name, value in drop_nulls(values).items():
    text = f"{value:.9f}" if isinstance(value, float) else str(value)
    headers[f"x-baar-{name}"] = text
  return headers


def read_headers(request: Request) -> dict[str, str]:
  """Return a request's headers, its query, and the session's name in its URL."""
  headers = dict(request.headers)
  headers["query"] = request.url.query
  if name := request.path_params.get("session"):
    headers["url"] = name
  return headers
