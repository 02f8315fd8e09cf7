"""Upstream models of the endpoint: the cost of a client's call, and its answers."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from baar_jax.episode import Usage
from baar_jax.llms.chat_completions import TIERS, read_usage
from baar_jax.llms.client import Client, Stream
from baar_jax.llms.wire import UNREADABLE, Outcome, is_json
from baar_jax.serve.request import DIGESTED, Cache, Refusal, count_tokens

BYTES_PER_TOKEN = 4  # of expected costs (our choice)


class Bill(NamedTuple):
  """The cost of a reply, as its answer tells it."""

  usd: float | None  # None if it cannot be told
  usage: Usage  # of no tokens if it is not told


class Upstream(Client):
  """A model that answers the calls of clients."""

  def most_usd(self, body: dict, caches: Mapping[int, Cache]) -> float:
    """Compute the worst case of an attempt; a cache knows the tokens it has counted."""
    request = self.write(body)
    tokens = count_tokens(body)
    cache = caches.get(self.place)
    if cache and cache.begins(body):
      others = dict(request)
      for name in ("model", "messages", *self.form.limits, *DIGESTED):
        others.pop(name, None)
      new_messages = body["messages"][cache.messages :]
      tokens = cache.tokens + count_tokens([others, new_messages])
    return self.bound_usd(tokens, request)

  def expected_usd(
    self, body: dict, caches: Mapping[int, Cache], ttl_s: float, reply: float
  ) -> float:
    """Compute the expected cost of a call.

    Args:
      ttl_s: seconds that a prompt cache stays warm.
      reply: tokens of the reply.
    """
    cache = caches.get(self.place)
    counted = cached = messages = 0
    if cache and cache.begins(body):
      counted = cache.tokens
      messages = cache.messages
      if time.time() < cache.at_s + ttl_s:
        cached = counted
    tokens = counted + count_tokens(body["messages"][messages:]) // BYTES_PER_TOKEN
    return self.price.cost_usd(Usage(tokens, cached, reply))

  async def attempt(self, body: dict) -> dict | Stream | Outcome:
    """Make one attempt. Returns an answer, a stream, or why there is neither."""
    answer = await self.send(body, self.config.timeout_s)
    if isinstance(answer, dict) and not is_completion(answer):
      return UNREADABLE
    return answer

  def refuse(self, outcome: Outcome) -> Refusal:
    """Tell a client of an attempt without a reply; no part of the key is repeated."""
    status = (
      outcome.status if outcome.status >= 400 else 502
    )  # a redirect is not followed
    text = outcome.message or f"{self.name} {outcome.problem}"
    return Refusal(status, text, outcome.type or "upstream_error", outcome.code or None)

  def read_bill(self, fields: dict) -> Bill:
    """Read the bill in an answer or a chunk."""
    usage = read_usage(fields)
    if usage is None:
      return Bill(None, Usage(0, 0, 0))
    if fields.get("service_tier") not in TIERS:
      return Bill(None, usage)
    return Bill(self.price.cost_usd(usage), usage)


def is_completion(answer: dict) -> bool:
  """Tell whether an answer can be sent on: JSON with a list of choices."""
  choices = answer.get("choices")
  if not isinstance(choices, list) or not is_json(answer):
    return False
  return all(isinstance(choice, dict) for choice in choices)
