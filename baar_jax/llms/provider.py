"""Define endpoints, open HTTP clients, and read what providers answer."""

import contextlib
import dataclasses
import functools
import ipaddress
import itertools
import json
import math
import os
import random
import re
from collections.abc import Callable, Coroutine, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx2

from baar_jax.config import ModelsConfig
from baar_jax.episode import FAILED, PRESUMED, Usage

# Seconds to connect to one of a host's addresses and to agree on encryption.
CONNECT_S = 10.0

# After these exceptions no part of a request was sent, so nothing was billed. If the
# port of a proxy is impossible, connecting raises an ExceptionGroup.
NOT_SENT = (
  httpx2.ConnectError,
  httpx2.ConnectTimeout,
  httpx2.PoolTimeout,
  httpx2.ProxyError,
  httpx2.LocalProtocolError,
  httpx2.UnsupportedProtocol,
  ExceptionGroup,
)
# All exceptions of an attempt whose connection failed or timed out. A time-out is an
# OSError.
LOST = (OSError, ExceptionGroup, httpx2.RequestError)

# The variables may have a proxy's password, so this error does not show them.
WRONG_PROXY = (
  "ALL_PROXY, HTTP_PROXY, HTTPS_PROXY and NO_PROXY name no proxy that can be used: "
  "set http:// addresses, or unset the variables"
)
OPENAI_KEY = "OPENAI_API_KEY"
OPENAI_URL = "https://api.openai.com/v1"
# The key that is sent to an endpoint without keys, because the protocol requires one.
NO_KEY = "none"
BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# A provider's error message is cut to this number of characters.
LONGEST_COMPLAINT = 200
# A message with this many first characters of the key is not shown.
SHOWN = 12
# An attempt is repeated after these HTTP statuses, and after all from 500 on.
RETRIED = (408, 409, 429)
# An attempt that ends with one of these HTTP statuses may have been billed.
UNKNOWN = (408, 502, 504, 524)
UNAUTHORISED = (401, 403)
# Providers' words for a call that does not fit the model's window.
TOO_LONG = re.compile(
  "context (length|window|size)|prompt is too long|input (is too long|token count)"
)
# If a provider asks to wait more seconds than this, the run ends.
LONGEST_RETRY_AFTER_S = 300.0


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

  @functools.cached_property
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


def endpoints(config: ModelsConfig) -> list[Endpoint]:
  """List the endpoint of each configured model.

  If there are fewer addresses than models, the list of addresses is repeated from its
  start. The same holds for the environment variables of the keys.
  """
  urls = itertools.cycle(config.base_urls or (OPENAI_URL,))
  variables = itertools.cycle(config.key_variables or (None,))
  rows = zip(config.names, urls, variables)
  return [Endpoint(name, url.rstrip("/"), variable) for name, url, variable in rows]


class Complaint(NamedTuple):
  """The error in the body of a provider's HTTP error; a missing field is ""."""

  message: str
  type: str
  code: str
  param: str


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
    is_overflow: whether the call does not fit the model's window.
    wait_s: seconds that the provider asks to wait before the next attempt.
    status: the HTTP status of an error that the provider answered. For a failure
      without an answer, 504 after a time-out, else 502.
    message: the provider's error message, without the key.
    type: the provider's type of the error.
    code: the provider's code of the error.
    param: the field of the request that the provider names.
    headers: the provider's headers about retries.
  """

  kind: str
  problem: str = ""
  text: str = ""
  usage: Usage = Usage(0, 0, 0)
  fatal: bool = False
  hopeless: bool = False
  is_overflow: bool = False
  wait_s: float = 0.0
  status: int = 502
  message: str = ""
  type: str = ""
  code: str = ""
  param: str = ""
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


UNREADABLE = Outcome(PRESUMED, "sent an answer that cannot be read")


def read_refusal(
  status: int, body: bytes, headers: Mapping[str, str], key: str
) -> Outcome:
  """Make the outcome of an answer with an HTTP status other than success.

  No text in the outcome contains the key.

  Args:
    status: the HTTP status.
    body: the body of the answer.
    headers: the answer's headers about retries.
    key: the key for the endpoint.
  """
  text = body.decode(errors="replace")
  error = read_error(text)
  message = error.message or text
  code = error.code
  is_overflow = code == "context_length_exceeded" or (
    status < 500 and bool(TOO_LONG.search(message.lower()))
  )
  # The same conversation would fail again, so the attempt is not repeated.
  hopeless = is_overflow or code == "content_filter"
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
    wait_s = max(wait_s, float(headers.get("retry-after", "")))
  if wait_s > LONGEST_RETRY_AFTER_S:
    may_pass = False
    reason = f"it asks to wait {wait_s:.0f} s"
  return Outcome(
    kind=PRESUMED if status in UNKNOWN else FAILED,
    problem=f"answered {status}: {reason}",
    fatal=not may_pass and not hopeless,
    hopeless=hopeless,
    is_overflow=is_overflow,
    wait_s=wait_s,
    status=status,
    message=complaint * is_shown,
    type=clean(error.type, key),
    code=clean(code, key),
    param=clean(error.param, key),
    headers=headers,
  )


def read_error(text: str | bytes) -> Complaint:
  """Read the message, type and code in the body of an HTTP error, in any wire form.

  A field that is missing in the body is "" in the result.
  """
  fields = read_json(text) or {}
  error = fields.get("error", fields)
  if not isinstance(error, dict):
    error = {}
  return Complaint(*(str(error.get(name) or "") for name in Complaint._fields))


def backoff_s(attempt: int) -> float:
  """Draw the seconds to wait after a failed attempt, on average more each time.

  Args:
    attempt: number of failed attempts before this one.
  """
  return min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (0.5 + random.random())


def clean(complaint: str, key: str) -> str:
  """Shorten a provider's message to one printable line, or replace it.

  Args:
    complaint: the provider's message.
    key: the key for the provider's endpoint.

  Returns:
    The line; a fixed text if the message contains the beginning of the key.
  """
  # Control characters, and characters that change the direction of writing, could
  # falsify the terminal's display.
  line = "".join(filter(str.isprintable, " ".join(complaint.split())))
  if key != NO_KEY and key[:SHOWN].lower() in line.lower():
    return "its message repeats the key"
  return line[:LONGEST_COMPLAINT]


def explain(failure: Exception) -> Outcome:
  """Make the outcome of a time-out or a lost connection."""
  kind = FAILED if isinstance(failure, NOT_SENT) else PRESUMED
  status = 504 if isinstance(failure, TimeoutError) else 502
  problem = f"gave no whole answer ({type(failure).__name__})"
  return Outcome(kind, problem, status=status)


def open_http(
  timeout_s: float, *hooks: Callable[[httpx2.Request], Coroutine[None, None, None]]
) -> httpx2.AsyncClient:
  """Open an HTTP client without redirects and cookies; it does not connect yet.

  Its only time-out is the one for connecting. The caller sets a deadline for the whole
  answer.

  Args:
    timeout_s: the seconds of a whole call.
    hooks: functions that change each request before it is sent.

  Raises:
    ValueError: the environment names a proxy that cannot be used.
  """
  try:
    return httpx2.AsyncClient(
      headers={"accept-encoding": "identity"},
      # A connection is not used twice: bytes that are left over from one answer would
      # be taken for the next one.
      limits=httpx2.Limits(max_keepalive_connections=0),
      # Cookies are not kept, so that the provider cannot link calls by cookies.
      cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
      follow_redirects=False,
      timeout=httpx2.Timeout(None, connect=min(CONNECT_S, timeout_s)),
      event_hooks={"request": hooks},
    )
  except (ImportError, ValueError, httpx2.InvalidURL):
    raise ValueError(WRONG_PROXY) from None


# Providers' service tiers that cost the list price or less. The prices of all other
# tiers count as unknown.
TIERS = ("auto", "batch", "default", "flex", "on_demand", "standard")
# The parts of a usage that have counts, too; and the names of the counts. Names with
# the same value are aliases, and must agree.
SECTIONS = (
  "prompt_tokens_details",
  "input_tokens_details",
  "completion_tokens_details",
  "output_tokens_details",
  "cache_creation",
  "cache_creation_token_details",
)
COUNTS = {
  "prompt_tokens": "prompt",
  "input_tokens": "prompt",
  "completion_tokens": "completion",
  "output_tokens": "completion",
  "total_tokens": "total",
  "reasoning_tokens": "reasoning",
  "thinking_tokens": "reasoning",
  "cached_tokens": "cached",
  "cache_read_tokens": "cached",
  "cache_read_input_tokens": "cached",
  "prompt_cache_hit_tokens": "cached",
  "prompt_cache_miss_tokens": "missed",
  "cache_write_tokens": "written",
  "cache_creation_tokens": "written",
  "cache_creation_input_tokens": "written",
  "ephemeral_5m_input_tokens": "minutes",
  "ephemeral_1h_input_tokens": "hour",
}
UNUSED = ("input_tokens", "output_tokens")
# More tokens in one call are implausible, so they are refused.
MOST_TOKENS = 10**7


class ImpossibleUsage(ValueError):
  """Report a usage that cannot be true, or that cannot be priced."""


@dataclasses.dataclass
class Meter:
  """Collect the usage of one answer from its JSON objects: the whole, or events.

  Attributes:
    counts: the newest counts, by the values of `COUNTS`.
    cost_usd: the dollars that the provider itself states; 0 without.
    problem: the reason why the usage is impossible; "" so far.
  """

  counts: dict[str, int] = dataclasses.field(default_factory=dict)
  cost_usd: float = 0.0
  problem: str = ""

  def read(self, text: str | bytes) -> dict | None:
    """Read a JSON object, and note the usage in it.

    Returns:
      The object; None if the text is not one.
    """
    fields = read_json(text)
    if fields is None:
      return None
    # The events of a stream may have the answer, and so the usage, in a field.
    for holder in (fields, fields.get("response"), fields.get("message")):
      if isinstance(holder, dict):
        self.note(holder)
    return fields

  def note(self, holder: Mapping) -> None:
    """Note the usage of an object, if it has one, and what it says of its price."""
    usage = holder.get("usage")
    if not isinstance(usage, dict):
      if usage is not None:
        self.problem = "it is no JSON object"
      usage = {}
    self.note_terms(holder)
    self.note_terms(usage)
    self.cost_usd = max(self.cost_usd, read_cost(usage))
    counts = {}
    self._collect(usage, counts)
    self.merge(counts)

  def note_terms(self, fields: Mapping) -> None:
    """Note the service tier among the fields of an answer or of its usage."""
    if fields.get("service_tier") not in (None, *TIERS):
      self.problem = "the price of the service tier is not known"

  def merge(self, counts: dict[str, int]) -> None:
    """Merge the counts of a later event into those of earlier ones.

    A later event may split the prompt in another way, but must not make it smaller. A
    zero leaves a count as it is.
    """
    for name in ("prompt", "completion"):
      count = counts.get(name, 0)
      old = self.counts.get(name, 0)
      if 0 < count < old:
        self.problem = "a count shrinks within a stream"
      if old:
        counts[name] = max(count, old)
    self.counts |= counts

  def _collect(self, section: Mapping, counts: dict[str, int]) -> None:
    """Collect the counts of a usage and of its details, by the values of `COUNTS`."""
    for name, count in section.items():
      # A gateway may send zeros under the names of another form.
      is_unused = count == 0 and name in UNUSED and "prompt_tokens" in section
      if count is None or is_unused:
        continue
      if name in SECTIONS and isinstance(count, dict):
        self._collect(count, counts)
        continue
      if name not in (*SECTIONS, *COUNTS):
        continue
      is_count = type(count) is int and 0 <= count <= MOST_TOKENS
      if name in SECTIONS or not is_count:
        self.problem = f"{name} is not a whole number from 0 to {MOST_TOKENS:,}"
      elif counts.setdefault(COUNTS[name], count) != count:
        self.problem = f"{name} disagrees with another name of the same count"

  def usage(self) -> Usage:
    """Compute the tokens of the answer.

    If the total exceeds prompt plus completion, the excess counts as completion,
    because some providers report reasoning only in the total.

    Raises:
      ImpossibleUsage: the usage is missing or impossible; the message is one line.
    """
    counts = self.counts
    prompt = counts.get("prompt", 0)
    cached = counts.get("cached", 0)
    hour = counts.get("hour", 0)
    by_lifetime = hour + counts.get("minutes", 0)
    written = counts.get("written", by_lifetime)
    misses = prompt - cached
    minimum = prompt + counts.get("completion", 0)
    total = counts.get("total", minimum)
    completion = total - prompt
    problem = self.problem
    if not prompt or "completion" not in counts:
      problem = problem or "it must have the tokens of the prompt and of the reply"
    is_split = by_lifetime in (0, written)
    is_fitting = cached + written <= prompt and misses == counts.get("missed", misses)
    is_whole = minimum <= total and counts.get("reasoning", 0) <= completion
    if not (is_split and is_fitting and is_whole):
      problem = problem or "the counts disagree: a part exceeds its whole"
    if problem:
      raise ImpossibleUsage(f"The usage is impossible: {problem}. Correct the usage.")
    return Usage(prompt, cached, completion, written, hour)


def read_cost(usage: Mapping) -> float:
  """Read the dollars that a provider states in a usage; 0 if it states none.

  Some state an object with the total, or, if the key is the user's own, 0 beside what
  the model's own provider charges.
  """
  cost = usage.get("cost")
  details = usage.get("cost_details")
  stated = [cost]
  if isinstance(cost, dict):
    stated.append(cost.get("total_cost"))
  if isinstance(details, dict):
    stated.append(details.get("upstream_inference_cost"))
  return max((x for x in stated if type(x) in (int, float)), default=0.0)


def read_number(text: str) -> float:
  """Read a number of a JSON text.

  Raises:
    ValueError: it is not finite.
  """
  number = float(text)
  if not math.isfinite(number):
    raise ValueError(f"{text} is not finite")
  return number


def read_json(text: str | bytes) -> dict | None:
  """Read a JSON object; return None if the text is none, or has NaN or infinities."""
  try:
    fields = json.loads(text, parse_float=read_number, parse_constant=read_number)
  except (ValueError, RecursionError):
    return None
  return fields if isinstance(fields, dict) else None
