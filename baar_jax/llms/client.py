"""The client of upstream models: attempts at a call, their reservations and retries."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Coroutine
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Protocol, TypeVar

import httpx2
import openai

from baar_jax.config import ModelsConfig
from baar_jax.llms.prices import prices_of
from baar_jax.llms.wire import (
  Outcome,
  WireForm,
  backoff_s,
  endpoints,
  explain,
  load_form,
  read_refusal,
)

CONNECT_S = 10.0  # to connect to one of a host's addresses, and to agree on encryption
MOST_BYTES = 16 * 2**20  # of an answer
LOST = (
  OSError,
  httpx2.RequestError,
)  # Failures of an attempt; time-outs are an OSError.
DEAREST_TIER = 2.5  # a provider's dearest service tier over its list price (our choice)


@dataclasses.dataclass
class Stream:
  """An answer whose bytes are still to come, as they were sent: nothing is unpacked."""

  response: httpx2.Response
  until_s: float  # the deadline by the loop's clock
  form: WireForm

  async def read(self) -> AsyncIterator[bytes]:
    """Yield the bytes. Raises one of LOST if they are late, too many, or break off."""
    parts = self.response.aiter_raw()
    size = 0
    while size <= MOST_BYTES:
      async with asyncio.timeout_at(self.until_s):
        part = await anext(parts, None)
      if part is None:
        return
      size += len(part)
      yield part
    raise httpx2.ReadError("too many bytes")

  async def events(self) -> AsyncIterator[str]:
    """Yield the data of each event. Raises one of LOST, at the latest at the end."""
    parts = self.read()
    part = rest = b""
    while part is not None:
      part = await anext(parts, None)
      # Texts may hold other ends of lines, such as U+2028.
      *lines, rest = (rest + (b"\n" if part is None else part)).split(b"\n")
      for line in lines:
        if line.startswith(b"data:"):
          yield line[5:].decode(errors="replace")
    raise httpx2.ReadError("the stream ended early")

  def chunks(self) -> AsyncIterator[dict]:
    """Yield chunks of a chat completion. Raises one of LOST if the end is missing."""
    return self.form.read_chunks(self.events())


@dataclasses.dataclass(eq=False)
class Client:
  """One model at one endpoint.

  Attributes:
    place: the model's index in the configuration.
  """

  config: ModelsConfig
  place: int

  def __post_init__(self) -> None:
    """Open no connection yet. Raises ValueError if the price or the key is missing."""
    config = self.config
    self.form = load_form(config.wire)
    self.endpoint = endpoints(config)[self.place]
    self.name = self.endpoint.model
    self.price = prices_of(config.names, config.prices)[self.place]
    self.is_tier_known = self.endpoint.is_private
    self._key = self.endpoint.key()
    headers = httpx2.Headers(self.form.headers(self.endpoint, self._key))
    headers.update({"accept-encoding": "identity", "content-type": "application/json"})
    self.http = openai.DefaultAsyncHttpxClient(
      base_url=self.endpoint.base_url,
      headers=headers,
      cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # calls stay unlinked
      follow_redirects=False,
      timeout=httpx2.Timeout(None, connect=min(CONNECT_S, config.timeout_s)),
    )

  def write(self, body: dict) -> dict:
    """Write a chat-completions request for this model in its wire form."""
    return self.form.write(body, self.endpoint, self.config)

  def bound_usd(self, prompt_tokens: int, request: dict) -> float:
    """Compute the most dollars that one attempt at a written request can cost.

    Args:
      prompt_tokens: the most that the prompt can have.
    """
    limits = [request.get(name) or 0 for name in self.form.limits]
    tokens = max(limits) * (request.get("n") or 1)
    usd = self.price.most_usd(prompt_tokens, tokens)
    is_default = self.endpoint.is_openai and request.get("service_tier") == "default"
    return usd if is_default or self.is_tier_known else DEAREST_TIER * usd

  async def send(self, body: dict, limit_s: float) -> dict | Stream | Outcome:
    """Make one attempt at a call within `limit_s`; it raises cancellations alone.

    Returns:
      A chat completion, a stream if one was asked for, or why there is neither.
    """
    content = json.dumps(self.write(body))  # ASCII, whatever a client has sent
    request = self.http.build_request("POST", self.form.path, content=content)
    until_s = asyncio.get_running_loop().time() + limit_s
    try:
      async with asyncio.timeout_at(until_s):
        response = await self.http.send(request, stream=True)
      stream = Stream(response, until_s, self.form)
      kind = response.headers.get("content-type", "")
      is_stream = body.get("stream") and kind.startswith("text/event-stream")
      if is_stream and response.is_success:
        return stream
      async with contextlib.aclosing(response):
        content = b"".join([part async for part in stream.read()])
    except LOST as failure:
      return explain(failure)
    if response.is_success:
      return self.form.read_answer(content)
    text = content.decode(errors="replace")
    retry_after = response.headers.get("retry-after", "")
    error = self.form.read_error(text)
    return read_refusal(response.status_code, text, error, retry_after, self._key)


# The result of an attempt, of which the books make an answer: a run makes a reply of an
# outcome. The endpoint has a chat completion, or a stream of its chunks, or an outcome.
Attempted = TypeVar("Attempted")
Answer = TypeVar("Answer")


class Books(Protocol[Attempted, Answer]):
  """The books of one call: who pays for its attempts, and who is asked."""

  has_others: bool  # Whether another model may take over when all retries have failed.

  def reserve(self) -> contextlib.AbstractContextManager:
    """Hold the worst case of an attempt while it is made, and record the attempt."""

  async def attempt(self) -> Attempted:
    """Make the attempt."""

  def settle(self, outcome: Attempted) -> Answer | None:
    """Replace the reservation by the cost. Returns the answer, if there is one."""

  def refuse(self, outcome: Outcome, attempts: int) -> Exception:
    """Make the error that tells of the last attempt."""

  async def prepare(self, outcome: Outcome, wait_s: float, is_last: bool) -> bool:
    """Wait, and choose who is asked next. Returns whether it is another model."""


async def ask(books: Books[Attempted, Answer], retries: int) -> Answer:
  """Attempt a call until it is answered. Raises the error that the books make."""
  attempt = 0
  while True:
    with books.reserve():
      outcome = await books.attempt()
      answer = books.settle(outcome)
    if answer is not None:
      return answer
    is_last = attempt == retries
    is_final = outcome.fatal or outcome.hopeless
    if is_final or is_last and not books.has_others:
      raise books.refuse(outcome, attempt + 1)
    wait_s = outcome.wait_s + backoff_s(attempt)
    has_moved = await books.prepare(outcome, wait_s, is_last)
    attempt = 0 if has_moved else attempt + 1


def run_in_thread(call: Coroutine[None, None, Answer]) -> Answer:
  """Run a call whose books block their thread instead of awaiting an event loop."""
  try:
    call.send(None)
  except StopIteration as end:
    return end.value
  raise RuntimeError("the call waits for an event loop")
