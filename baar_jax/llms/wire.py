"""The wire: where a model is asked, in which protocol, and the outcomes of attempts."""

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

# The kinds of outcomes. A call that is open when its process has ended may be billed.
REPLY = "reply"
RETRY = "retry"  # billed, and useless
PRESUMED = "presumed"  # perhaps billed
FAILED = "failed"  # not billed
OPEN = "open"
OPENAI_KEY = "OPENAI_API_KEY"
OPENAI_URL = "https://api.openai.com/v1"
NO_KEY = "none"  # The key for an endpoint without keys: the protocol wants some.
RETRIED = (408, 409, 429)  # Statuses that may pass, as may all from 500 on.
UNKNOWN = (
  408,
  502,
  504,
  524,
)  # Lost behind the endpoint: the model may have been at work.
UNAUTHORISED = (401, 403)
HOPELESS = ("context_length_exceeded", "content_filter")
BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
LONGEST_RETRY_AFTER_S = 300.0  # An endpoint that asks for more ends the run.
LONGEST_COMPLAINT = 200  # characters of an endpoint's message in an error
SHARED = 6  # characters in a row that a message may not share with a key
# The HTTP library's names of failures before a request has left.
NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError")
NOT_SENT += ("LocalProtocolError", "UnsupportedProtocol")


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A model at an address.

  Attributes:
    variable: environment variable of the key; "" means no key, None the usual one.
  """

  model: str
  base_url: str
  variable: str | None

  @property
  def host(self) -> str:
    """Return the address's host name."""
    return urlsplit(self.base_url).hostname

  @property
  def is_private(self) -> bool:
    """Tell whether the address is of this machine or a private network."""
    try:
      return ipaddress.ip_address(self.host).is_private
    except ValueError:
      return "." not in self.host  # localhost, or a name within the user's network

  @property
  def is_openai(self) -> bool:
    """Tell whether the address is OpenAI's, in any of its regions."""
    return f".{self.host}".endswith(".api.openai.com")

  def key(self) -> str:
    """Read the key from the environment.

    Raises:
      ValueError: the key of a public endpoint is not set, or it cannot be a key. The
        message names no variable: the user may have configured the key itself as one.
    """
    variable = self.variable
    if variable is None and self.is_openai:
      variable = OPENAI_KEY
    key = os.environ.get(variable or "", "").strip()
    is_missing = not key and not self.is_private and variable != ""
    if is_missing or not (key.isascii() and key.isprintable()):
      problem = f"{self.model} at {self.host} needs a key of printable ASCII characters"
      choice = f"'' for no key; {OPENAI_KEY} at OpenAI's addresses"
      place = (
        f"environment variable that --config.models.key_variables names ({choice})"
      )
      raise ValueError(f"{problem}: set the {place}")
    return key or NO_KEY


def endpoints(config: ModelsConfig) -> list[Endpoint]:
  """List the models' endpoints in the order of the names."""
  urls = itertools.cycle(config.base_urls or (OPENAI_URL,))
  variables = itertools.cycle(config.key_variables or (None,))
  served = []
  for name, url, variable in zip(config.names, urls, variables):
    served.append(Endpoint(name, url.rstrip("/"), variable))
  return served


class Complaint(TypedDict):
  """The error that an endpoint tells; "" for a part that is missing."""

  message: str
  type: str
  code: str


@dataclasses.dataclass(frozen=True)
class WireForm:
  """A protocol of upstream models.

  The rest of the program reads and writes OpenAI's chat completions; a form translates.

  Attributes:
    path: where requests go, below the endpoint's base URL.
    limits: fields of a written request that limit the tokens of a reply.
    headers: lists the headers that carry an endpoint's key and account.
    write: writes a chat-completions request for a model, with a limit of tokens.
    read_answer: reads a body as a chat completion; {} if it cannot be read.
    read_error: reads the complaint in the body of a refusal.
    read_chunks: reads the events of a stream as chunks of a chat completion.
  """

  path: str
  limits: tuple[str, ...]
  headers: Callable[[Endpoint, str], Mapping[str, str]]
  write: Callable[[dict, Endpoint, ModelsConfig], dict]
  read_answer: Callable[[bytes], dict]
  read_error: Callable[[str], Complaint]
  read_chunks: Callable[[AsyncIterator[str]], AsyncIterator[dict]]


def load_form(name: str) -> WireForm:
  """Load a wire form: FORM of the file in this folder that has its name.

  Raises:
    ValueError: there is no such form.
  """
  with contextlib.suppress(ModuleNotFoundError):
    form = vars(importlib.import_module(f"{__package__}.{name}")).get("FORM")
    if form:
      return form
  expected = "chat_completions, or a file in baar_jax/llms that has a FORM"
  raise ValueError(f"--config.models.wire is {name!r}; take {expected}")


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of one attempt.

  Attributes:
    kind: REPLY; without a usable one RETRY, PRESUMED or FAILED.
    problem: why there is no usable reply.
    usage: tokens of a reply or a retry.
    fatal: neither this nor another call can succeed.
    hopeless: this call cannot succeed.
    wait_s: seconds that the endpoint asks to wait before the next attempt.
    status: of a refusal, as are message, type and code; else a gateway's.
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
  """Read an object of JSON; None if the text is none."""
  try:
    fields = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return fields if isinstance(fields, dict) and is_json(fields) else None


def is_json(value: object) -> bool:
  """Tell whether a value is JSON: NaN is none, nor is the infinity of 1e999."""
  try:
    json.dumps(value, allow_nan=False)
  except (ValueError, RecursionError):
    return False
  return True


def backoff_s(attempt: int) -> float:
  """Draw the seconds to wait after an attempt (from 0) has failed."""
  return min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (0.5 + random.random())


def explain(failure: Exception) -> Outcome:
  """Explain a time-out or a lost connection."""
  cause = type(failure).__name__
  kind = FAILED if cause in NOT_SENT else PRESUMED
  status = 504 if isinstance(failure, TimeoutError) else 502
  return Outcome(kind, f"gave no whole answer ({cause})", status=status)


def read_refusal(
  status: int, body: str, error: Complaint, retry_after: str, key: str
) -> Outcome:
  """Read a status other than success; the key is never repeated.

  Args:
    error: of the body.
    retry_after: the header; "" if there is none.
  """
  message = error["message"] or body
  code = error["code"]
  is_too_long = status < 500 and "context length" in message.lower()
  hopeless = is_too_long or code in HOPELESS
  may_pass = (status in RETRIED or status >= 500) and code != "insufficient_quota"
  complaint = clean(message, key)
  # The message of an unauthorised call may quote a part of the key.
  is_shown = status >= 400 and status not in UNAUTHORISED
  reason = complaint
  if status in UNAUTHORISED:
    reason = "check the key in the variable that --config.models.key_variables names"
  wait_s = 0.0
  with contextlib.suppress(ValueError):  # The header may hold a date.
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
  """Shorten a message to one line, or withhold it if it repeats a part of the key.

  A part of the key counts, also spaced, or in base64 at any offset.
  """
  line = " ".join(complaint.split())[:LONGEST_COMPLAINT]
  line = "".join(
    filter(str.isprintable, line)
  )  # no control and no bidirectional character
  is_leak = _shares(line, key)
  for offset in range(3):
    coded = base64.b64encode(bytes(offset) + key.encode()).decode()
    for secret in (key, coded[2 * offset :]):
      is_leak |= _shares(_strip(line), _strip(secret))
  if is_leak and key != NO_KEY:
    return "its message repeats a part of the key"
  return line


def _strip(text: str) -> str:
  return re.sub(r"[\W_]", "", text).lower()


def _shares(text: str, secret: str) -> bool:
  """Tell whether a text has SHARED characters in a row of a secret, or a short one."""
  for start in range(max(1, len(secret) - SHARED + 1)):
    part = secret[start : start + SHARED]
    if part and part in text:
      return True
  return False
