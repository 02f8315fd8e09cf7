"""Endpoints of API models: where each is served, its key, and what its answers come to."""

import base64
import contextlib
import dataclasses
import ipaddress
import itertools
import json
import os
import random
import re
from urllib.parse import urlsplit

from baar_jax.config import Config, ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY, RETRY
from baar_jax.llms.prices import prices_of

OPENAI_URL, OPENAI_KEY = "https://api.openai.com/v1", "OPENAI_API_KEY"
NO_KEY = "none"  # what an endpoint without keys is sent: the protocol wants some
RETRIED = (408, 409, 429)  # and all from 500 on
UNKNOWN = (408, 502, 504, 524)  # lost behind the endpoint: the model may have been at work
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
CONNECT_S = 10.0  # to connect to one of a host's addresses, and to agree on encryption
MOST_BYTES = 16 * 2**20  # of an answer
LONGEST_RETRY_AFTER_S = 300.0  # an endpoint that asks for more ends the run
LONGEST_COMPLAINT = 200  # characters of an endpoint's message in an error
SHARED = 6  # characters in a row of a message that may not be those of a key
CACHE_COUNTS = ("cached_tokens", "prompt_cache_hit_tokens")
CACHE_COUNTS += ("cache_write_tokens", "cache_creation_tokens")
MOST_TOKENS = 10**7  # of one call; no model reads or writes as many
# The HTTP library's names of what goes wrong before a request has left.
NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError")
NOT_SENT += ("LocalProtocolError", "UnsupportedProtocol")
DEAREST_TIER = 2.5  # a provider's dearest service tier over its list price (our choice)
# Service tiers that cost the list price or less; another one's price is not known.
TIERS = (None, "auto", "batch", "default", "flex", "on_demand", "standard")


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A model at an address."""

  model: str
  base_url: str
  variable: str | None  # that holds the key; "" needs none, None is the usual one

  @property
  def host(self) -> str:
    return urlsplit(self.base_url).hostname

  @property
  def own(self) -> bool:
    """Whether the address is of this machine or a private network."""
    try:
      return ipaddress.ip_address(self.host).is_private
    except ValueError:
      return "." not in self.host  # localhost, or a name within one's own network

  @property
  def openai(self) -> bool:
    """Whether the address is OpenAI's, in any of its regions."""
    return f".{self.host}".endswith(".api.openai.com")

  def key(self) -> str:
    """The key. Raises ValueError where it cannot be one, or a public endpoint's is not set.

    No variable is named: what is configured as one may be the key itself.
    """
    variable = OPENAI_KEY if self.variable is None and self.openai else self.variable
    key = os.environ.get(variable or "", "").strip()
    missing = not key and not self.own and variable != ""
    if missing or not (key.isascii() and key.isprintable()):
      problem = f"{self.model} at {self.host} needs a key of printable ASCII characters"
      choice = f"'' for no key; {OPENAI_KEY} at OpenAI's addresses"
      place = f"environment variable that --config.models.key_variables names ({choice})"
      raise ValueError(f"{problem}: set the {place}")
    return key or NO_KEY


def endpoints(config: ModelsConfig) -> list[Endpoint]:
  """Each model's endpoint, in the order of the names."""
  urls, variables = config.base_urls or (OPENAI_URL,), config.key_variables or (None,)
  columns = config.names, itertools.cycle(urls), itertools.cycle(variables)
  return [Endpoint(name, url.rstrip("/"), variable) for name, url, variable in zip(*columns)]


def check_models(config: Config) -> None:
  """Raises ValueError where a model has no price or no key, or is dearer than the next one."""
  groups = {"models": config.models}
  if "zero-shot" in config.baselines.rivals:
    groups["baselines.judge"] = config.baselines.judge
  for group_name, group in groups.items():
    try:
      prices = prices_of(group.names, group.prices)
      for endpoint in endpoints(group) if config.models.kind == "chat" else ():
        endpoint.key()
        _ = urlsplit(endpoint.base_url).port  # raises ValueError above 65535
    except ValueError as error:
      raise ValueError(str(error).replace(".models.", f".{group_name}.")) from None
    if any(a.input > b.input and a.output > b.output for a, b in itertools.pairwise(prices)):
      problem = f"--config.{group_name}.names is {group.names!r}; one of them is dearer than the"
      raise ValueError(f"{problem} next: name the cheapest first, by the list's prices or your own")


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of one attempt at a chat completion."""

  kind: str  # REPLY; without a usable one RETRY, PRESUMED or FAILED, for the reason in `problem`
  problem: str = ""
  text: str = ""
  usage: Usage = Usage(0, 0, 0)  # of a reply or a retry
  fatal: bool = False  # asking again cannot help, nor can asking anything else
  hopeless: bool = False  # asking this again cannot help
  wait_s: float = 0.0  # seconds that the endpoint asks to wait before the next attempt
  # Of an endpoint's refusal, as far as they can be shown, else what a gateway answers with.
  status: int = 502
  message: str = ""
  type: str = ""
  code: str = ""


def read_json(text: str | bytes) -> object:
  """What the text holds; None where it is no JSON."""
  try:
    fields = json.loads(text)
    json.dumps(fields, allow_nan=False)  # NaN is no JSON, nor is what 1e999 becomes
    return fields
  except (ValueError, RecursionError):
    return None


def backoff_s(attempt: int) -> float:
  """Seconds to wait after an attempt (from 0) has failed."""
  return min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (0.5 + random.random())


def explain(failure: Exception) -> Outcome:
  """The outcome that a time-out or a lost connection is."""
  cause, late = type(failure).__name__, isinstance(failure, TimeoutError)
  kind, problem = FAILED if cause in NOT_SENT else PRESUMED, f"gave no whole answer ({cause})"
  return Outcome(kind, problem, status=504 if late else 502)


def read_refusal(status: int, body: str, retry_after: str, key: str) -> Outcome:
  """The outcome that a status other than one of success tells of; the key is never repeated."""
  fields = read_json(body)
  error = fields.get("error", fields) if isinstance(fields, dict) else None
  error = error if isinstance(error, dict) else {}
  message, type_, code = (str(error.get(name) or "") for name in ("message", "type", "code"))
  too_long = status < 500 and "context length" in (message or body).lower()
  hopeless = too_long or code in ("context_length_exceeded", "content_filter")
  passes = (status in RETRIED or status >= 500) and code != "insufficient_quota"
  said, wait_s = clean(message or body, key), 0.0
  shows_message = status >= 400 and status not in (401, 403)  # these may quote a part of the key
  message = said if shows_message else ""
  if status in (401, 403):
    said = "check the key in the variable that --config.models.key_variables names"
  with contextlib.suppress(ValueError):  # it is none, or a date
    wait_s = max(0.0, float(retry_after))
  if wait_s > LONGEST_RETRY_AFTER_S:
    passes, said = False, f"it asks to wait {wait_s:.0f} s"
  return Outcome(
    kind=PRESUMED if status in UNKNOWN else FAILED,
    problem=f"answered {status}: {said}",
    fatal=not passes and not hopeless,
    hopeless=hopeless,
    wait_s=wait_s,
    status=status,
    message=message,
    type=clean(type_, key),
    code=clean(code, key),
  )


def clean(complaint: str, key: str) -> str:
  """An endpoint's message as one short line, or what stands for one that repeats the key.

  A part of the key counts, also spaced, or in base64 at any offset.
  """
  line = " ".join(complaint.split())[:LONGEST_COMPLAINT]
  line = "".join(filter(str.isprintable, line))  # no control and no bidirectional character
  coded = [base64.b64encode(bytes(i) + key.encode()).decode()[2 * i :] for i in range(3)]
  bare, *forms = [re.sub(r"[\W_]", "", text).lower() for text in (line, key, *coded)]
  for said, form in [(line, key), *((bare, form) for form in forms)]:
    parts = {form[i : i + SHARED] for i in range(max(1, len(form) - SHARED + 1))} - {""}
    if key != NO_KEY and any(part in said for part in parts):
      return "its message repeats a part of the key"
  return line


def read_answer(body: bytes) -> Outcome:
  """The outcome that a response's body tells of."""
  try:
    fields = json.loads(body, object_pairs_hook=_read_object)
  except (ValueError, RecursionError):
    fields = None
  except KeyError:
    fields = {"usage": None}
  if not isinstance(fields, dict) or not fields.keys() & {"choices", "usage"}:
    return Outcome(PRESUMED, "sent an answer that cannot be read")
  try:
    choice = fields["choices"][0]
    message, reason = choice["message"], choice.get("finish_reason")
    # Half a pair of surrogates is no text.
    text = (message.get("content") or "").encode(errors="replace").decode()
    refused = bool(message.get("refusal")) or reason == "content_filter"
  except (KeyError, IndexError, TypeError, AttributeError):
    text, reason, refused = "", None, False
  try:
    usage = read_usage(fields["usage"])
    if text.strip() and not usage.completion_tokens:
      raise ValueError("a text without tokens")
  except (ValueError, KeyError, TypeError, AttributeError):
    problem = "sent an answer whose usage is missing or impossible, so that it cannot be priced"
    return Outcome(PRESUMED, problem, fatal=True)
  if fields.get("service_tier") not in TIERS:
    return Outcome(PRESUMED, "answered from a service tier whose price is not known", fatal=True)
  if text.strip() or reason == "length":  # without a text all tokens went into reasoning
    return Outcome(REPLY, text=text, usage=usage)
  problem = "refused this conversation" if refused else "sent an answer without content"
  return Outcome(RETRY, problem, usage=usage, hopeless=refused)


def _read_object(pairs: list[tuple[str, object]]) -> dict:
  fields = dict(pairs)
  if len(fields) < len(pairs):
    raise KeyError("a key is there twice")
  return fields


def read_usage(fields: dict) -> Usage:
  """Usage as OpenAI, LiteLLM and DeepSeek report it; the total and a cache's counts are optional.

  What the total counts beyond prompt and completion is billed as completion: some report reasoning
  so. Raises KeyError, TypeError or ValueError for counts that cannot be.
  """
  prompt, completion = fields["prompt_tokens"], fields["completion_tokens"]
  objects = fields, fields.get("prompt_tokens_details") or {}
  told = {name: count for part in objects for name, count in part.items() if count is not None}
  cached, hits, written, created = counts = [told.get(name, 0) for name in CACHE_COUNTS]
  misses, total = told.get("prompt_cache_miss_tokens", prompt - hits), fields.get("total_tokens")
  counts += [prompt, completion, misses, 0 if total is None else total]
  if any(type(count) is not int or not 0 <= count <= MOST_TOKENS for count in counts):
    raise ValueError("no count of tokens")
  total = prompt + completion if total is None else total
  cached, written = max(cached, hits), max(written, created)
  fits = 0 < prompt >= cached + written and misses == prompt - hits
  if not fits or total < prompt + completion:
    raise ValueError("counts that disagree")
  return Usage(prompt, cached, total - prompt, written)
