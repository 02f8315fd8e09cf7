"""Endpoints of API models: where each is served, its key, and what its answers come to."""

import base64
import contextlib
import dataclasses
import email.utils
import ipaddress
import itertools
import json
import os
import re
import time
from urllib.parse import urlsplit

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY, RETRY

OPENAI_URL, OPENAI_KEY = "https://api.openai.com/v1", "OPENAI_API_KEY"
NO_KEY = "none"  # what an endpoint without keys is sent: the protocol wants some
RETRIED = (408, 409, 429)  # and all from 500 on
UNKNOWN = (408, 502, 504, 524)  # lost behind the endpoint: the model may have been at work
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
  variable: str | None  # that holds the key; "" needs none, None is not configured

  @property
  def host(self) -> str:
    return urlsplit(self.base_url).hostname

  @property
  def own(self) -> bool:
    """Whether the address is of this machine or a private network."""
    if "." not in self.host and ":" not in self.host:
      return True  # localhost, or a name within one's own network
    try:
      return ipaddress.ip_address(self.host).is_private
    except ValueError:
      return False

  @property
  def openai(self) -> bool:
    """Whether the address is OpenAI's, in any of its regions."""
    return f".{self.host}".endswith(".api.openai.com")

  @property
  def source(self) -> str:
    """Where the key is from. A variable that is not set is not named: it may be a key itself."""
    if self.variable == OPENAI_KEY or (self.variable or "") in os.environ:
      return f"the environment variable {self.variable}"
    return "the environment variable that --config.models.key_variables names for it"

  def key(self) -> str:
    """The key. Raises ValueError where it cannot be one, or a public endpoint's is not set."""
    where = f"{self.model} at {self.host}"
    if self.variable is None and not self.own:
      raise ValueError(
        f"{where}: name the environment variable of its key in --config.models.key_variables, "
        "or '' if it needs none"
      )
    key = os.environ.get(self.variable, "").strip() if self.variable else NO_KEY
    if not (key.isascii() and key.isprintable()):
      raise ValueError(f"{self.source} holds characters of no key")
    if not key and not self.own:
      problem = f"{where} needs a key: set {self.source}"
      raise ValueError(f"{problem}, or name another in --config.models.key_variables")
    return key or NO_KEY


def endpoints(config: ModelsConfig) -> list[Endpoint]:
  """Each model's endpoint, in the order of the names.

  Where no variables are configured OpenAI's is for OpenAI's addresses alone.
  """
  urls, variables = config.base_urls or (OPENAI_URL,), config.key_variables or (None,)
  columns = config.names, itertools.cycle(urls), itertools.cycle(variables)
  rows = [Endpoint(name, url.rstrip("/"), variable) for name, url, variable in zip(*columns)]
  unnamed = [row.variable is None and row.openai for row in rows]
  return [dataclasses.replace(r, variable=OPENAI_KEY) if u else r for r, u in zip(rows, unnamed)]


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


def read_refusal(
  status: int, code: str | None, complaint: str, retry_after: str, endpoint: Endpoint, key: str
) -> Outcome:
  """The outcome that a status of 400 and above tells of; the key is never repeated."""
  too_long = status < 500 and "context length" in complaint.lower()
  complaint = clean(complaint, key)
  if too_long or code == "context_length_exceeded":
    return Outcome(FAILED, f"takes no conversation this long: {complaint}", hopeless=True)
  if status == 400 and code == "content_filter":
    return Outcome(FAILED, f"takes no conversation like this: {complaint}", hopeless=True)
  if code == "insufficient_quota":
    return Outcome(FAILED, "answered 429: this account's quota is used up", fatal=True)
  if status in RETRIED or status >= 500:
    kind = PRESUMED if status in UNKNOWN else FAILED
    wait_s, problem = read_wait_s(retry_after), f"answered {status}"
    if wait_s > LONGEST_RETRY_AFTER_S:
      wait = f"asks to wait {wait_s:.0f} s: the same command goes on then"
      return Outcome(kind, f"{problem} and {wait}", fatal=True)
    return Outcome(kind, problem, wait_s=wait_s)
  problem = f"{complaint}; see --config.models (its key is in {endpoint.source})"
  if status in (401, 403):  # the endpoint's message may quote a part of the key
    problem = f"check the key in {endpoint.source}"
  return Outcome(FAILED, f"answered {status}: {problem}", fatal=True)


def clean(complaint: str, key: str) -> str:
  """An endpoint's message as one short line, or what stands for one that repeats the key.

  A part of the key counts, also spaced, in hexadecimal digits, or in base64 at any offset.
  """
  line = " ".join(complaint.split())[:LONGEST_COMPLAINT]
  line = "".join(filter(str.isprintable, line))  # no control and no bidirectional character
  forms = [key, key[::-1], key.encode().hex()]
  forms += [base64.b64encode(bytes(i) + key.encode()).decode()[2 * i :] for i in range(3)]
  bare = [re.sub(r"[\W_]", "", text).lower() for text in (line, *forms)]
  for said, form in [(line, key), *((bare[0], form) for form in bare[1:])]:
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
    text, refused = read_text(message.get("content")), bool(message.get("refusal"))
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
  if text.strip():
    return Outcome(REPLY, text=text, usage=usage)
  if reason == "length":  # all tokens went into reasoning, as they would again
    return Outcome(REPLY, usage=usage)  # the agent's mistake
  if refused or reason == "content_filter":
    return Outcome(RETRY, "refused this conversation", usage=usage, hopeless=True)
  return Outcome(RETRY, "sent an answer without content", usage=usage)


def _read_object(pairs: list[tuple[str, object]]) -> dict:
  fields = dict(pairs)
  if len(fields) < len(pairs):
    raise KeyError("a key is there twice")
  return fields


def read_text(content: str | list[dict] | None) -> str:
  """The text of a message's content, which some send in parts; "" if it has none."""
  if isinstance(content, list):
    content = "".join(part["text"] for part in content if part.get("type") == "text")
  if not isinstance(content, str):
    return ""
  return content.encode(errors="replace").decode()  # half a pair of surrogates is no text


def read_usage(fields: dict) -> Usage:
  """Usage as OpenAI, LiteLLM and DeepSeek report it; the total and a cache's counts are optional.

  What the total counts beyond prompt and completion is billed as completion: some report the
  tokens of a model's reasoning so. Raises KeyError or ValueError for counts that cannot be.
  """
  prompt, completion = fields["prompt_tokens"], fields["completion_tokens"]
  objects = fields, fields.get("prompt_tokens_details") or {}
  optional = {name: n for counted in objects for name, n in counted.items() if n is not None}
  cached, hits, written, created = (optional.get(name, 0) for name in CACHE_COUNTS)
  misses, total = optional.get("prompt_cache_miss_tokens"), fields.get("total_tokens")
  counts = [prompt, completion, cached, hits, written, created]
  counts += [count for count in (misses, total) if count is not None]
  if any(type(count) is not int or not 0 <= count <= MOST_TOKENS for count in counts):
    raise ValueError("no count of tokens")
  total = prompt + completion if total is None else total
  cached, written = max(cached, hits), max(written, created)
  fits = 0 < prompt >= cached + written and misses in (None, prompt - hits)
  if not fits or total < prompt + completion:
    raise ValueError("counts that disagree")
  return Usage(prompt, cached, total - prompt, written)


def read_wait_s(retry_after: str) -> float:
  """Seconds that a Retry-After header asks to wait: a number, or the date until when."""
  with contextlib.suppress(ValueError):
    return max(0.0, float(retry_after))
  try:
    return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
  except (ValueError, OverflowError):
    return 0.0
