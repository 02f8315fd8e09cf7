"""The models' endpoints: what a call may cost, one attempt at it, and what its answer comes to."""

import asyncio
import dataclasses
import hashlib
import json
import time
from collections.abc import AsyncIterator

import httpx2

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms import endpoints
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY
from baar_jax.llms.prices import prices_of
from baar_jax.serve.asked import LIMITS, Refusal
from baar_jax.serve.sessions import Cache

PART_TOKENS = 50_000  # most of an image, a sound or a file in a message (our choice)
PART_KINDS = ("image_url", "video_url", "audio_url", "input_audio", "file")
DIGESTED = ("tools", "functions", "response_format")
VALUE_TOKENS = 8  # most that a template puts around a text or a number
BYTES_PER_TOKEN = 4  # of what is expected (our choice)


@dataclasses.dataclass
class Answer:
  """What came of one attempt."""

  kind: str  # REPLY, or without one PRESUMED or FAILED
  refusal: Refusal | None = None  # for the client, where there is no reply
  retry: bool = False
  wait_s: float = 0.0
  fields: dict = dataclasses.field(default_factory=dict)  # the reply's body, if it is no stream
  usd: float | None = None  # None is not known: the most
  usage: Usage = Usage(0, 0, 0)
  response: httpx2.Response | None = None  # of a stream
  until_s: float = 0.0  # of a stream, by the loop's clock


class Upstream:
  """One model at its endpoint."""

  def __init__(self, config: ModelsConfig, place: int):
    """Takes the configuration's model at `place`. Raises ValueError without its price or key."""
    self._endpoint, self.config = endpoints.endpoints(config)[place], config
    self.name, self._key = self._endpoint.model, self._endpoint.key()
    self.price = prices_of(config.names, config.prices)[place]
    limits = httpx2.Limits(max_connections=config.concurrency)
    timeout = httpx2.Timeout(None, connect=min(endpoints.CONNECT_S, config.timeout_s))
    headers = {"authorization": f"Bearer {self._key}", "accept-encoding": "identity"}
    headers["content-type"] = "application/json"
    self.client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout)

  def write(self, body: dict) -> dict:
    """The request for this model: with a limit of tokens, and streams with their usage."""
    body = body | {"model": self.name}
    body.pop("session_id", None)
    if not any(body.get(name) for name in LIMITS):
      body[self.config.token_limit_field] = self.config.max_completion_tokens
    if body.get("stream"):
      body["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
    return ({"service_tier": "default"} if self._endpoint.openai else {}) | body

  def bound_usd(self, body: dict, cache: Cache | None) -> float:
    """The most that one attempt can cost; what was billed for a prompt's beginning is known."""
    body, tokens = self.write(body), count_tokens(body)
    if matches(body, cache):
      known = "model", "messages", *LIMITS, *DIGESTED
      others = {k: v for k, v in body.items() if k not in known}
      tokens = cache.tokens + count_tokens([others, body["messages"][cache.messages :]])
    completion = max(body.get(name) or 0 for name in LIMITS) * (body.get("n") or 1)
    usual = self._endpoint.own or self._endpoint.openai and body["service_tier"] == "default"
    return (1.0 if usual else endpoints.DEAREST_TIER) * self.price.most_usd(tokens, completion)

  def expected_usd(self, body: dict, cache: Cache | None, ttl_s: float, reply: float) -> float:
    """What a call with `reply` tokens is expected to cost, if a cache stays warm for `ttl_s`."""
    known, messages = (cache.tokens, cache.messages) if matches(body, cache) else (0, 0)
    tokens = known + count_tokens(body["messages"][messages:]) // BYTES_PER_TOKEN
    warm = known and time.time() < cache.at_s + ttl_s
    return self.price.cost_usd(Usage(tokens, known if warm else 0, reply))

  async def attempt(self, body: dict) -> Answer:
    """One attempt, which ends in time. What fails is an Answer too; only a cancellation raises."""
    url, content = f"{self._endpoint.base_url}/chat/completions", json.dumps(self.write(body))
    clock, limit = asyncio.get_running_loop().time, asyncio.timeout(None)

    async def start_clock(event: str, info: dict) -> None:  # it has waited for a free connection
      if event.endswith("send_request_headers.started"):
        limit.reschedule(clock() + self.config.timeout_s)

    try:
      async with limit:
        trace = {"trace": start_clock}
        request = self.client.build_request("POST", url, content=content, extensions=trace)
        response = await self.client.send(request, stream=True)
        kind = response.headers.get("content-type", "")
        if response.status_code == 200 and kind.startswith("text/event-stream"):
          return Answer(REPLY, response=response, until_s=limit.when())
        try:
          text = b"".join([part async for part in read_parts(response)])
        finally:
          await response.aclose()
    except (TimeoutError, httpx2.RequestError) as failure:
      return self.explain(failure)
    try:
      fields = json.loads(text)
    except (ValueError, RecursionError):
      fields = None
    if response.status_code != 200:
      return self._refuse(response, fields, text.decode(errors="replace"))
    if not isinstance(fields, dict) or not isinstance(fields.get("choices"), list):
      return self.explain(httpx2.ReadError("an answer that is none"))
    usd, usage = self.cost(fields)
    return Answer(REPLY, fields=fields, usd=usd, usage=usage)

  def explain(self, failure: Exception) -> Answer:
    """What a time-out or a lost connection comes to."""
    cause, late = type(failure).__name__, isinstance(failure, TimeoutError)
    text = f"{self.name} gave no whole answer ({cause})"
    refusal = Refusal(504 if late else 502, text, "upstream_error")
    return Answer(FAILED if cause in endpoints.NOT_SENT else PRESUMED, refusal, retry=True)

  def cost(self, fields: dict) -> tuple[float | None, Usage]:
    """Dollars (None where they cannot be told) and tokens that an answer or a chunk reports."""
    try:
      usage = endpoints.read_usage(fields["usage"])
      known = fields.get("service_tier") in endpoints.TIERS
      return self.price.cost_usd(usage) if known else None, usage
    except (ValueError, KeyError, TypeError, AttributeError):
      return None, Usage(0, 0, 0)

  def _refuse(self, response: httpx2.Response, fields: object, text: str) -> Answer:
    """An endpoint's own error with its status; it repeats no part of the key."""
    status, said = response.status_code, {"message": text}
    if isinstance(fields, dict) and isinstance(fields.get("error"), dict):
      said = fields["error"]
    message, kind, code = (
      endpoints.clean(str(said.get(name) or ""), self._key) for name in ("message", "type", "code")
    )
    wait = response.headers.get("retry-after", "")
    outcome = endpoints.read_refusal(status, code, message, wait, self._key)
    if status < 400:
      status, message = 502, f"{self.name} answered with a redirect, which is not followed"
    elif status in (401, 403):  # the message may quote a part of the key
      message = outcome.problem
    refusal = Refusal(status, message, kind or "upstream_error", code)
    retry = not outcome.fatal and not outcome.hopeless
    return Answer(outcome.kind, refusal, retry, outcome.wait_s)


def count_tokens(value: object) -> int:
  """The most prompt tokens of JSON: no token is shorter than a byte."""
  if isinstance(value, str):
    return len(value.encode(errors="replace")) + VALUE_TOKENS
  if isinstance(value, dict):
    if (kind := value.get("type")) in PART_KINDS:
      return PART_TOKENS + count_tokens([v for k, v in value.items() if k != kind])
    return sum(count_tokens(key) + count_tokens(entry) for key, entry in value.items())
  return sum(map(count_tokens, value)) if isinstance(value, list) else 4 * VALUE_TOKENS


def digest(body: dict, messages: int) -> str:
  """Tells prompts apart that begin with so many messages."""
  parts = [body.get(name) for name in DIGESTED]
  return hashlib.sha256(json.dumps([parts, body["messages"][:messages]]).encode()).hexdigest()


def matches(body: dict, cache: Cache | None) -> bool:
  return cache is not None and digest(body, cache.messages) == cache.digest


async def read_parts(response: httpx2.Response) -> AsyncIterator[bytes]:
  """The body as it comes, up to `endpoints.MOST_BYTES`."""
  async for part in response.aiter_raw():
    if response.num_bytes_downloaded > endpoints.MOST_BYTES:
      raise httpx2.ReadError("too many bytes")
    yield part


async def read_chunks(answer: Answer) -> AsyncIterator[dict]:
  """The chunks of a stream up to its end mark, as they come.

  Raises TimeoutError when it is late, and httpx2.ReadError where it is broken.
  """
  parts, rest = read_parts(answer.response), b""
  while True:
    async with asyncio.timeout_at(answer.until_s):
      part = await anext(parts, None)
    if part is None:
      raise httpx2.ReadError("the stream ended early")
    *lines, rest = (rest + part).split(b"\n")
    for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
      if data == b"[DONE]":
        return
      try:
        chunk = json.loads(data)
      except (ValueError, RecursionError):
        chunk = None
      if not is_chunk(chunk):
        raise httpx2.ReadError("no chunk")
      yield chunk


def is_chunk(chunk: object) -> bool:
  choices = chunk.get("choices") or [] if isinstance(chunk, dict) else None
  fine = isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices)
  return fine and "error" not in chunk
