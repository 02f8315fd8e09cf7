"""Define providers' endpoints, their protocols, and the outcomes of attempts."""

import base64
import contextlib
import dataclasses
import ipaddress
import itertools
import json
import os
import random
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage

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
# An attempt is repeated after these HTTP statuses, and after all from 500 on.
RETRIED = (408, 409, 429)
# An attempt that ends with one of these HTTP statuses may have been billed.
UNKNOWN = (408, 502, 504, 524)
UNAUTHORISED = (401, 403)
# After one of these error codes, the same conversation would fail again. So the attempt
# is not repeated.
HOPELESS = ("context_length_exceeded", "content_filter")
BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# If a provider asks to wait more seconds than this, the run ends.
LONGEST_RETRY_AFTER_S = 300.0
# A provider's error message is cut to this number of characters.
LONGEST_COMPLAINT = 200
# A message that has this number of consecutive characters of a key is not shown.
SHARED = 6
# Names of the HTTP library's exceptions that mean that no part of a request was sent.
# So nothing was billed.
NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError")
NOT_SENT += ("LocalProtocolError", "UnsupportedProtocol")


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
      problem = f"{self.model} at {self.host} needs a key of printable ASCII characters"
      remedy = "Set the environment variable that --config.models.key_variables names"
      choice = f"{OPENAI_KEY} at OpenAI's addresses; '' for an endpoint without keys"
      raise ValueError(f"{problem}. {remedy} ({choice}).")
    return key or NO_KEY


def endpoints(config: ModelsConfig) -> list[Endpoint]:
  """List the endpoint of each configured model.

  If there are fewer addresses than models, the list of addresses is repeated from its
  start. The same holds for the environment variables of the keys.
  """
  urls = itertools.cycle(config.base_urls or (OPENAI_URL,))
  variables = itertools.cycle(config.key_variables or (None,))
  forms = itertools.cycle(config.forms or ("",))
  result = []
  for name, url, *rest in zip(config.names, urls, variables, forms):
    result.append(Endpoint(name, url.rstrip("/"), *rest))
  return result


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
    limits: fields of a request that limit the tokens of a reply.
    counts_beside: whether `input_tokens` leaves out the tokens of prompt caches.
    endings: types or texts of the events that end a stream.
  """

  path: str
  history: str
  opening: tuple[str, ...]
  limits: tuple[str, ...]
  counts_beside = False
  endings: tuple[str, ...]

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

  def write_request(
    self, body: Mapping, endpoint: Endpoint, config: ModelsConfig
  ) -> dict:
    """Write a request for a model.

    A request without a limit on the tokens of a reply gets the configured limit.

    Args:
      body: the caller's request; its model is replaced.
      endpoint: the model's name and address.
      config: the settings, with the limit on the tokens of a reply.
    """
    request = {**body, "model": endpoint.model}
    if not any(map(body.get, self.limits)):
      request[self.limits[0]] = config.max_completion_tokens
    if endpoint.is_openai:
      request.setdefault("service_tier", "default")
    return request

  def read_turns(self, body: Mapping) -> list[Turn]:
    """Read the messages of a request.

    Raises:
      ValueError: a message has a wrong field, or there is no message.
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


def read_error(text: str | bytes) -> Complaint:
  """Read the message, type and code in the body of an HTTP error, in any wire form.

  A field that is missing in the body is "" in the result.
  """
  fields = read_json(text) or {}
  error = fields.get("error", fields)
  if not isinstance(error, dict):
    error = {}
  return Complaint(
    message=str(error.get("message") or ""),
    type=str(error.get("type") or ""),
    code=str(error.get("code") or ""),
  )


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


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of one attempt at a call.

  Attributes:
    kind: REPLY after a usable reply, otherwise RETRY, PRESUMED or FAILED.
    problem: the reason why there is no usable reply, as a clause such as "answered
      429"; error messages put the model's name before this clause.
    text: the text of the reply.
    usage: tokens of an attempt of kind REPLY or RETRY.
    fatal: whether no call to this endpoint can succeed.
    hopeless: whether this call cannot succeed, although other calls may.
    is_paused: whether the model was not asked, because it has failed all the time.
    wait_s: seconds that the provider asks to wait before the next attempt.
    status: the HTTP status of an error that the provider answered. For a failure
      without an answer, 504 after a time-out, else 502.
    message: the provider's error message, without the key.
    type: the provider's type of the error.
    code: the provider's code of the error.
  """

  kind: str
  problem: str = ""
  text: str = ""
  usage: Usage = Usage(0, 0, 0)
  fatal: bool = False
  hopeless: bool = False
  is_paused: bool = False
  wait_s: float = 0.0
  status: int = 502
  message: str = ""
  type: str = ""
  code: str = ""


UNREADABLE = Outcome(PRESUMED, "sent an answer that cannot be read")


def read_json(text: str | bytes) -> dict | None:
  """Read a JSON object; return None if the text is not one."""
  try:
    fields = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return fields if isinstance(fields, dict) and is_json(fields) else None


def is_json(value: object) -> bool:
  """Tell whether a value can be written as strict JSON, without NaN and infinities."""
  try:
    json.dumps(value, allow_nan=False)
  except (ValueError, RecursionError):
    return False
  return True


def backoff_s(attempt: int) -> float:
  """Draw the seconds to wait after a failed attempt, on average more each time.

  Args:
    attempt: number of failed attempts before this one.
  """
  return min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (0.5 + random.random())


def explain(failure: Exception) -> Outcome:
  """Make the outcome of a time-out or a lost connection."""
  cause = type(failure).__name__
  kind = FAILED if cause in NOT_SENT else PRESUMED
  status = 504 if isinstance(failure, TimeoutError) else 502
  return Outcome(kind, f"gave no whole answer ({cause})", status=status)


def read_refusal(
  status: int, body: str, error: Complaint, retry_after: str, key: str
) -> Outcome:
  """Make the outcome of an answer with an HTTP status other than success.

  No text in the outcome contains a part of the key.

  Args:
    status: the HTTP status.
    body: the text of the answer.
    error: the error in the body.
    retry_after: the value of the header Retry-After; "" if the header is missing.
    key: the key for the endpoint.
  """
  message = error.message or body
  code = error.code
  is_too_long = status < 500 and "context length" in message.lower()
  hopeless = is_too_long or code in HOPELESS
  may_pass = (status in RETRIED or status >= 500) and code != "insufficient_quota"
  complaint = clean(message, key)
  # A provider that rejects a key may quote a part of the key. So the message of such an
  # answer is not shown.
  is_shown = status >= 400 and status not in UNAUTHORISED
  reason = complaint
  if status in UNAUTHORISED:
    reason = "check the key in the variable that --config.models.key_variables names"
  wait_s = 0.0
  # The header Retry-After may also be a date; a date is ignored.
  with contextlib.suppress(ValueError):
    wait_s = max(wait_s, float(retry_after))
  if wait_s > LONGEST_RETRY_AFTER_S:
    may_pass = False
    reason = f"it asks to wait {wait_s:.0f} s"
  return Outcome(
    kind=PRESUMED if status in UNKNOWN else FAILED,
    problem=f"answered {status}: {reason}",
    fatal=not may_pass and not hopeless,
    hopeless=hopeless,
    wait_s=wait_s,
    status=status,
    message=complaint * is_shown,
    type=clean(error.type, key),
    code=clean(code, key),
  )


def clean(complaint: str, key: str) -> str:
  """Shorten a provider's message to one printable line, or replace it.

  If the message contains a part of the key, the result is a fixed text without any of
  the message. The check also finds a part of the key with other punctuation, spaces or
  case, and a part in base64.

  Args:
    complaint: the provider's message.
    key: the key for the provider's endpoint.
  """
  line = " ".join(complaint.split())[:LONGEST_COMPLAINT]
  # Control characters, and characters that change the direction of writing, could
  # falsify the terminal's display.
  line = "".join(filter(str.isprintable, line))
  is_leak = _shares(line, key)
  for offset in range(3):
    coded = base64.b64encode(bytes(offset) + key.encode()).decode()
    for secret in (key, coded[2 * offset :]):
      is_leak |= _shares(_strip(line), _strip(secret))
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
