"""Define providers' endpoints, their protocols, and the outcomes of attempts."""

import base64
import contextlib
import dataclasses
import importlib
import ipaddress
import itertools
import json
import os
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypedDict
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
  """

  model: str
  base_url: str
  variable: str | None

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
  result = []
  for name, url, variable in zip(config.names, urls, variables):
    result.append(Endpoint(name, url.rstrip("/"), variable))
  return result


class Complaint(TypedDict):
  """The error in the body of a provider's HTTP error; a missing field is ""."""

  message: str
  type: str
  code: str


@dataclasses.dataclass(frozen=True)
class WireForm:
  """A protocol in which a provider's models are called.

  All other code uses OpenAI's chat completions. A wire form translates requests from
  chat completions to the protocol, and answers back.

  Attributes:
    path: path of requests, below the endpoint's base URL.
    limits: fields of a translated request that limit the tokens of a reply.
    headers: makes the headers that carry an endpoint's key and account.
    write: translates a request for a model, and limits the tokens of its reply.
    read_answer: translates the body of an answer to a chat completion; {} if it cannot
      be read.
    read_error: reads the error in the body of an HTTP error.
    read_chunks: translates the events of a stream to chunks of a chat completion.
  """

  path: str
  limits: tuple[str, ...]
  headers: Callable[[Endpoint, str], Mapping[str, str]]
  write: Callable[[dict, Endpoint, ModelsConfig], dict]
  read_answer: Callable[[bytes], dict]
  read_error: Callable[[str], Complaint]
  read_chunks: Callable[[AsyncIterator[str]], AsyncIterator[dict]]


def load_form(name: str) -> WireForm:
  """Load a wire form: the value FORM in the file NAME.py of this folder.

  Raises:
    ValueError: there is no such file, or it has no FORM.
  """
  with contextlib.suppress(ModuleNotFoundError):
    form = vars(importlib.import_module(f"{__package__}.{name}")).get("FORM")
    if form:
      return form
  expected = "chat_completions, or to the name of a file in baar_jax/llms with a FORM"
  raise ValueError(f"--config.models.wire is {name!r}. Set it to {expected}.")


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
  message = error["message"] or body
  code = error["code"]
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
    type=clean(error["type"], key),
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
