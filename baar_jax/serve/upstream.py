"""The models' endpoints: what a call may cost, one attempt at it, and what its answer comes to."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator

import httpx2

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms import endpoints
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY
from baar_jax.llms.chat import open_http
from baar_jax.llms.prices import prices_of
from baar_jax.serve.request import DIGESTED, LIMITS, Cache, Refusal, count_tokens, read_json

BYTES_PER_TOKEN = 4  # of what is expected (our choice)


@dataclasses.dataclass
class Answer:
  """What came of one attempt."""

  kind: str  # REPLY, or without one PRESUMED or FAILED
  refusal: Refusal | None = None  # for the client, where there is no reply
  retry: bool = False
  wait_s: float = 0.0
  fields: dict = dataclasses.field(default_factory=dict)  # the reply's body, if it is no stream
  response: httpx2.Response | None = None  # of a stream
  until_s: float = 0.0  # of a stream, by the loop's clock


class Upstream:
  """One model at its endpoint."""

  def __init__(self, config: ModelsConfig, place: int):
    """Takes the configuration's model at `place`. Raises ValueError without its price or key."""
    self._endpoint, self.config = endpoints.endpoints(config)[place], config
    self.name, self._key = self._endpoint.model, self._endpoint.key()
    self.price = prices_of(config.names, config.prices)[place]
    self.client = open_http(self._endpoint, config.timeout_s)

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
    if cache and cache.begins(body):
      known = "model", "messages", *LIMITS, *DIGESTED
      others = {k: v for k, v in body.items() if k not in known}
      tokens = cache.tokens + count_tokens([others, body["messages"][cache.messages :]])
    completion = max(body.get(name) or 0 for name in LIMITS) * (body.get("n") or 1)
    usual = self._endpoint.own or self._endpoint.openai and body["service_tier"] == "default"
    return (1.0 if usual else endpoints.DEAREST_TIER) * self.price.most_usd(tokens, completion)

  def expected_usd(self, body: dict, cache: Cache | None, ttl_s: float, reply: float) -> float:
    """What a call with `reply` tokens is expected to cost, if a cache stays warm for `ttl_s`."""
    known, messages = (cache.tokens, cache.messages) if cache and cache.begins(body) else (0, 0)
    tokens = known + count_tokens(body["messages"][messages:]) // BYTES_PER_TOKEN
    warm = known and time.time() < cache.at_s + ttl_s
    return self.price.cost_usd(Usage(tokens, known if warm else 0, reply))

  async def attempt(self, body: dict) -> Answer:
    """One attempt, which ends in time. What fails is an Answer too; only a cancellation raises."""
    url = f"{self._endpoint.base_url}/chat/completions"
    content = json.dumps(self.write(body))  # ASCII, whatever a client has sent
    headers = {"content-type": "application/json"}
    request = self.client.build_request("POST", url, content=content, headers=headers)
    until_s = asyncio.get_running_loop().time() + self.config.timeout_s
    try:
      async with asyncio.timeout_at(until_s):
        response = await self.client.send(request, stream=True)
        kind = response.headers.get("content-type", "")
        if response.status_code == 200 and kind.startswith("text/event-stream"):
          return Answer(REPLY, response=response, until_s=until_s)
        async with contextlib.aclosing(response):
          await response.aread()
    except (TimeoutError, httpx2.RequestError) as failure:
      return self.explain(failure)
    if response.status_code != 200:
      return self._refuse(response)
    fields = read_json(response.text)
    choices = fields.get("choices") if isinstance(fields, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
      return self.explain(httpx2.ReadError("an answer that is none"))
    return Answer(REPLY, fields=fields)

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

  def _refuse(self, response: httpx2.Response) -> Answer:
    """An endpoint's own error with its status; it repeats no part of the key."""
    status, wait = response.status_code, response.headers.get("retry-after", "")
    fields = read_json(response.text)
    said = fields.get("error") if isinstance(fields, dict) else None
    said = said if isinstance(said, dict) else {"message": response.text}
    message, kind, code = (
      endpoints.clean(str(said.get(name) or ""), self._key) for name in ("message", "type", "code")
    )
    outcome = endpoints.read_refusal(status, code, message, wait, self._key)
    # A message about a key may quote a part of it.
    text = message if status >= 400 and status not in (401, 403) else ""
    text = text or f"{self.name} {outcome.problem}"
    status = 502 if status < 400 else status  # a redirect is not followed
    refusal = Refusal(status, text, kind or "upstream_error", code or None)
    return Answer(outcome.kind, refusal, not outcome.fatal and not outcome.hopeless, outcome.wait_s)


async def read_chunks(answer: Answer) -> AsyncIterator[dict]:
  """The chunks of a stream up to its end mark, as they come.

  Raises TimeoutError when it is late, and httpx2.ReadError where it is broken.
  """
  parts, rest = answer.response.aiter_raw(), b""
  while True:
    async with asyncio.timeout_at(answer.until_s):
      part = await anext(parts, None)
    # Texts may hold other ends of lines, such as U+2028.
    *lines, rest = (rest + (b"\n" if part is None else part)).split(b"\n")
    for data in (line[5:].decode(errors="replace") for line in lines if line[:5] == b"data:"):
      if data.strip() == "[DONE]":
        return
      chunk = read_json(data)
      if not isinstance(chunk, dict) or "error" in chunk:
        raise httpx2.ReadError("no chunk")
      yield chunk
    if part is None:
      raise httpx2.ReadError("the stream ended early")
