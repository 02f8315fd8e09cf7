"""The models' endpoints: what a call may cost, one attempt at it, and what its answer comes to."""

import time
from collections.abc import AsyncIterator

import httpx2

from baar_jax.episode import Usage
from baar_jax.llms import endpoints
from baar_jax.llms.calls import PRESUMED
from baar_jax.llms.chat import Model, Stream
from baar_jax.llms.endpoints import Outcome, read_json
from baar_jax.serve.request import DIGESTED, LIMITS, Cache, Refusal, count_tokens

BYTES_PER_TOKEN = 4  # of what is expected (our choice)


class Upstream(Model):
  """A model that answers the calls of clients."""

  def write(self, body: dict) -> dict:
    """The request for this model: with a limit of tokens, and streams with their usage."""
    body = body | {"model": self.name}
    body.pop("session_id", None)
    if not any(body.get(name) for name in LIMITS):
      body[self.config.token_limit_field] = self.config.max_completion_tokens
    if body.get("stream"):
      body["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
    return ({"service_tier": "default"} if self.endpoint.openai else {}) | body

  def bound_usd(self, body: dict, cache: Cache | None) -> float:
    """The most that one attempt can cost; what was billed for a prompt's beginning is known."""
    body, tokens = self.write(body), count_tokens(body)
    if cache and cache.begins(body):
      known = "model", "messages", *LIMITS, *DIGESTED
      others = {k: v for k, v in body.items() if k not in known}
      tokens = cache.tokens + count_tokens([others, body["messages"][cache.messages :]])
    completion = max(body.get(name) or 0 for name in LIMITS) * (body.get("n") or 1)
    usual = self.endpoint.own or self.endpoint.openai and body["service_tier"] == "default"
    return (1.0 if usual else endpoints.DEAREST_TIER) * self.price.most_usd(tokens, completion)

  def expected_usd(self, body: dict, cache: Cache | None, ttl_s: float, reply: float) -> float:
    """What a call with `reply` tokens is expected to cost, if a cache stays warm for `ttl_s`."""
    known, messages = (cache.tokens, cache.messages) if cache and cache.begins(body) else (0, 0)
    tokens = known + count_tokens(body["messages"][messages:]) // BYTES_PER_TOKEN
    warm = known and time.time() < cache.at_s + ttl_s
    return self.price.cost_usd(Usage(tokens, known if warm else 0, reply))

  async def attempt(self, body: dict) -> dict | Stream | Outcome:
    """The reply of one attempt, or what it comes to without one; only a cancellation raises."""
    answer = await self.send(self.write(body), self.config.timeout_s)
    if not isinstance(answer, bytes):
      return answer
    fields = read_json(answer.decode(errors="replace"))
    choices = fields.get("choices") if isinstance(fields, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
      return Outcome(PRESUMED, "sent an answer that cannot be read")
    return fields

  def refuse(self, outcome: Outcome) -> Refusal:
    """What a client is told of an attempt without a reply; it repeats no part of the key."""
    status = outcome.status if outcome.status >= 400 else 502  # a redirect is not followed
    text = outcome.message or f"{self.name} {outcome.problem}"
    return Refusal(status, text, outcome.type or "upstream_error", outcome.code or None)

  def cost(self, fields: dict) -> tuple[float | None, Usage]:
    """Dollars (None where they cannot be told) and tokens that an answer or a chunk reports."""
    try:
      usage = endpoints.read_usage(fields["usage"])
      known = fields.get("service_tier") in endpoints.TIERS
      return self.price.cost_usd(usage) if known else None, usage
    except (ValueError, KeyError, TypeError, AttributeError):
      return None, Usage(0, 0, 0)


async def read_chunks(stream: Stream) -> AsyncIterator[dict]:
  """The chunks of a stream up to its end mark, as they come. Raises what `Stream.read` does."""
  parts, rest = stream.read(), b""
  while True:
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
