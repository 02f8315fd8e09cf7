"""Define providers' endpoints, and the protocols that they speak."""

import base64
import dataclasses
import html
import ipaddress
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

# The kinds of outcomes of an attempt at a call, as they are stored.
REPLY = "reply"  # a usable reply
RETRY = "retry"  # billed, but without a usable reply
PRESUMED = "presumed"  # perhaps billed; counts at its worst case
FAILED = "failed"  # not billed
# The attempt has not ended. If the process was killed meanwhile, the attempt counts at
# its worst case.
OPEN = "open"
OPENAI_KEY = "OPENAI_API_KEY"
OPENAI_URL = "https://api.openai.com/v1"
# The key that is sent to an endpoint without keys, because the protocol requires one.
NO_KEY = "none"
BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# A provider's error message is cut to this number of characters.
LONGEST_COMPLAINT = 200
# A message that has this number of consecutive characters of a key is not shown.
SHARED = 6
# An escape of JSON or of Python.
ESCAPE = re.compile(r"\\(?:u|x)([0-9a-fA-F]{4}|[0-9a-fA-F]{2})")


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """The address of a model at its provider.

  Attributes:
    model: the model's name at this address.
    base_url: the address, without the path of a request.
    variable: the environment variable that has the key. "" means that no key is needed.
      None means OPENAI_API_KEY at OpenAI's addresses, and no key elsewhere.
    forms: the paths of the wire forms that it offers; "" is all.
  """

  model: str
  base_url: str
  variable: str | None
  forms: str = ""

  @property
  def host(self) -> str:
    """Return the host name in the address."""
    return urlsplit(self.base_url).hostname

  @property
  def is_private(self) -> bool:
    """Tell whether the address is on this machine or on a private network."""
    try:
      return ipaddress.ip_address(self.host).is_private
    except ValueError:
      # A host name without a dot is localhost, or a machine on the user's network.
      return "." not in self.host

  @property
  def is_openai(self) -> bool:
    """Tell whether the address is OpenAI's, in any region."""
    return f".{self.host}".endswith(".api.openai.com")

  def key(self) -> str:
    """Read the endpoint's key from the environment.

    Returns:
      The key; `NO_KEY` if none is needed and none is set.

    Raises:
      ValueError: a public endpoint has no key, or the key is not printable ASCII. The
        message does not show `variable`: a user may have put the key itself there.
    """
    variable = self.variable
    if variable is None and self.is_openai:
      variable = OPENAI_KEY
    key = os.environ.get(variable or "", "").strip()
    is_missing = not key and not self.is_private and variable != ""
    if is_missing or not (key.isascii() and key.isprintable()):
      raise ValueError(
        f"{self.model} at {self.host} needs a key of printable ASCII characters. Set "
        "the environment variable that --config.models.key_variables names "
        f"({OPENAI_KEY} at OpenAI's addresses; '' for an endpoint without keys)."
      )
    return key or NO_KEY


class Complaint(NamedTuple):
  """The error in the body of a provider's HTTP error; a missing field is ""."""

  message: str
  type: str
  code: str


class ToolCall(NamedTuple):
  """A tool call of a model: the tool's name, and its arguments as a text."""

  name: str
  arguments: str


class Turn(NamedTuple):
  """A message of a conversation, read from any wire form.

  Attributes:
    role: "assistant" for a model's reply; else "system", "user" or "tool".
    text: the text of the message, without reasoning.
    calls: the tool calls of a reply.
  """

  role: str
  text: str
  calls: tuple[ToolCall, ...] = ()


class WireForm:
  """A protocol in which clients call this program, and in which it calls models.

  No form is translated to another one: a call reaches the model in the form of its
  client. Each subclass is in a file of its own.

  Attributes:
    path: path of requests, below a base URL that ends with the version.
    history: field of a request that has the messages.
    opening: fields of a request that a model reads before the messages. If one of them
      changes, the model's prompt cache no longer fits.
    system: field of a request that has the system text; "" if it is in the messages.
    limits: fields of a request that limit the tokens of a reply.
    unpriced: fields of a request whose effect on the cost only the provider knows.
    counts_beside: whether `input_tokens` leaves out the tokens of prompt caches.
    endings: types or texts of the events that end a stream.
    last_status: HTTP status at which clients that have repeated a refused call stop.
  """

  path: str
  history: str
  system = ""
  opening: tuple[str, ...]
  limits: tuple[str, ...]
  unpriced: tuple[str, ...] = ()
  counts_beside = False
  endings: tuple[str, ...]
  last_status = 400

  def list_headers(self, endpoint: Endpoint, key: str) -> dict[str, str]:
    """Make the request headers that carry the key, and for OpenAI also the account.

    Args:
      endpoint: the address of the model.
      key: the key for this address.

    Returns:
      The value of each header, by its name in lower case.
    """
    headers = {}
    if endpoint.is_openai:
      import openai

      # OpenAI's client makes headers from the environment variables OPENAI_ORG_ID,
      # OPENAI_CUSTOM_HEADERS and similar ones.
      for name, value in openai.AsyncOpenAI(api_key=key).default_headers.items():
        if isinstance(value, str):
          headers[name.lower()] = value
    headers["authorization"] = f"Bearer {key}"
    return headers

  def find_limit(self, body: Mapping) -> int:
    """Return the caller's limit on the tokens of a reply; 0 without one."""
    return max(body.get(name) or 0 for name in self.limits)

  def limit_reply(self, request: dict, tokens: int, field: str) -> dict:
    """Return a copy of a request that limits the tokens of the reply.

    Args:
      tokens: the limit, which replaces a higher one.
      field: the field for a request without a limit, if this form has it.
    """
    names = [name for name in self.limits if request.get(name)]
    if not names:
      names = [field if field in self.limits else self.limits[0]]
    limited = {**request}
    for name in names:
      limited[name] = min(tokens, request.get(name) or tokens)
    return limited

  def write_request(self, body: Mapping, endpoint: Endpoint) -> dict:
    """Write a request for a model.

    Args:
      body: the caller's request; its model is replaced.
      endpoint: the model's name and address.
    """
    request = {**body, "model": endpoint.model}
    if endpoint.is_openai:
      request.setdefault("service_tier", "default")
    return request

  def read_turns(self, body: Mapping) -> list[Turn]:
    """Read the system text and the messages of a request.

    Raises:
      ValueError: a message has a wrong field, or there is no message.
    """
    turns = []
    for entry in check_objects(body.get(self.history), self.history):
      turns += self.read_entry(entry)
    if not turns:
      raise ValueError(f"{self.history} must have at least one message")
    if body.get(self.system):
      turns.insert(0, Turn("system", read_content(body[self.system])))
    return turns

  def read_entry(self, entry: Mapping) -> list[Turn]:
    """Read an entry of a request's messages; reasoning has no turn.

    Raises:
      ValueError: a field has another type.
    """
    raise NotImplementedError

  def read_reply(self, answer: Mapping) -> Turn:
    """Read the model's reply in a whole answer.

    Raises:
      ValueError: the answer has another form.
    """
    raise NotImplementedError

  def collect(self, answer: dict, event: Mapping) -> None:
    """Add an event of a stream to the whole answer that `read_reply` reads."""
    raise NotImplementedError

  def is_hidden(self, event: Mapping, body: Mapping) -> bool:
    """Tell whether the client has not asked for an event of its stream."""
    return False

  def write_answer(self, text: str, model: str) -> dict:
    """Write a whole answer whose reply is a text and which cost nothing."""
    raise NotImplementedError

  def write_stream(self, answer: Mapping) -> list[dict | str]:
    """Write a whole answer as the events of a stream."""
    raise NotImplementedError

  def write_error(self, error: dict, status: int) -> dict:
    """Write the body of an error.

    Args:
      error: the error in OpenAI's form: message, type, code and further fields.
      status: the HTTP status.
    """
    return {"error": error}

  def write_failure(self, error: dict, status: int) -> dict:
    """Write the event of a stream that breaks off with an error."""
    return self.write_error(error, status)


# Types of parts and names of fields that hold reasoning, and settings of reasoning.
REASONING_TYPES = ("thinking", "redacted_thinking", "reasoning")
REASONING_FIELDS = (
  "encrypted_content",
  "extra_content",
  "include",
  "provider_specific_fields",
  "reasoning",
  "reasoning_details",
  "reasoning_effort",
  "thinking",
  "thinking_blocks",
)
# An item of Responses that has an id is refused without its reasoning.
ITEM_TYPES = ("message", "function_call", "custom_tool_call")
# Fields whose contents belong to tools.
ARGUMENTS = ("arguments", "tools")


def drop_reasoning(value: object) -> object:
  """Return a copy of a JSON value without reasoning, and without settings of it."""
  if isinstance(value, list):
    return [
      drop_reasoning(part)
      for part in value
      if not (isinstance(part, dict) and part.get("type") in REASONING_TYPES)
    ]
  if not isinstance(value, dict):
    return value
  dropped = [*REASONING_FIELDS]
  if value.get("type") in ITEM_TYPES:
    dropped.append("id")
  kept = {}
  for name, part in value.items():
    is_argument = name in ARGUMENTS or name == "input" and isinstance(part, dict)
    if name not in dropped:
      kept[name] = part if is_argument else drop_reasoning(part)
  return kept


def pick_headers(headers: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
  """Return the headers of these names, as far as there are any."""
  return {name: headers[name] for name in names if name in headers}


def read_error(text: str | bytes) -> Complaint:
  """Read the message, type and code in the body of an HTTP error, in any wire form.

  A field that is missing in the body is "" in the result.
  """
  fields = read_json(text) or {}
  error = fields.get("error", fields)
  if not isinstance(error, dict):
    error = {}
  return Complaint(*(str(error.get(name) or "") for name in Complaint._fields))


def read_content(content: object) -> str:
  """Read the text of a message's content: a text, or a list of parts.

  A part without a text is read as its type in brackets, such as "[image_url]".

  Raises:
    ValueError: the content is neither a text nor a list of parts.
  """
  if content is None:
    return ""
  if isinstance(content, str):
    return check_text(content)
  texts = []
  for part in check_objects(content, "content"):
    text = part.get("text")
    texts.append(f"[{part.get('type')}]" if text is None else check_text(text))
  return "\n".join(texts)


def check_text(text: object) -> str:
  """Return a text.

  Raises:
    ValueError: it is no text, or it has half a surrogate pair, which UTF-8 lacks.
  """
  if not isinstance(text, str):
    raise ValueError("a text is missing, or is not a text")
  text.encode()
  return text


def check_objects(values: object, field: str) -> list[dict]:
  """Return a list of JSON objects.

  Args:
    values: the value of the field.
    field: the name of the field.

  Raises:
    ValueError: it is no list of JSON objects.
  """
  if not isinstance(values, list) or not all(isinstance(v, dict) for v in values):
    raise ValueError(f"{field} must be a list of JSON objects")
  return values


def read_json(
  text: str | bytes, read_object: Callable[[list], dict] | None = None
) -> dict | None:
  """Read a JSON object; return None if the text is not one, or has NaN or infinities.

  Args:
    text: the JSON text.
    read_object: makes each object from its pairs of a name and a value.
  """
  try:
    fields = json.loads(text, object_pairs_hook=read_object)
    json.dumps(fields, allow_nan=False)
  except (ValueError, RecursionError):
    return None
  return fields if isinstance(fields, dict) else None


def backoff_s(attempt: int) -> float:
  """Draw the seconds to wait after a failed attempt, on average more each time.

  Args:
    attempt: number of failed attempts before this one.
  """
  return min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (0.5 + random.random())


def clean(complaint: str, key: str) -> str:
  """Shorten a provider's message to one printable line, or replace it.

  If the message contains a part of the key, the result is a fixed text without any of
  the message. The check also finds a part of the key with other punctuation, spaces or
  case, a part in base64 or hexadecimal digits, and a part in escapes of URLs, HTML,
  JSON or Python.

  Args:
    complaint: the provider's message.
    key: the key for the provider's endpoint.
  """
  line = " ".join(complaint.split())[:LONGEST_COMPLAINT]
  # Control characters, and characters that change the direction of writing, could
  # falsify the terminal's display.
  line = "".join(filter(str.isprintable, line))
  plain = ESCAPE.sub(
    lambda escape: chr(int(escape[1], 16)), html.unescape(unquote(line))
  )
  secrets = [key, key.encode().hex()]
  for offset in range(3):
    coded = base64.b64encode(bytes(offset) + key.encode()).decode()
    secrets.append(coded[2 * offset :])
  is_leak = False
  for text in (line, plain):
    is_leak |= _shares(text, key)
    for secret in secrets:
      is_leak |= _shares(_strip(text), _strip(secret))
  if is_leak and key != NO_KEY:
    return "its message repeats a part of the key"
  return line


def _strip(text: str) -> str:
  """Keep only the letters and digits of a text, in lower case."""
  return re.sub(r"[\W_]", "", text).lower()


def _shares(text: str, secret: str) -> bool:
  """Tell whether a text contains `SHARED` consecutive characters of a secret.

  If the secret has fewer characters, tell whether the text contains the whole secret.
  """
  for start in range(max(1, len(secret) - SHARED + 1)):
    part = secret[start : start + SHARED]
    if part and part in text:
      return True
  return False
