"""Call models at their providers' endpoints, with reservations and retries."""

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

# Seconds to connect to one of a host's addresses and to agree on encryption.
CONNECT_S = 10.0
# The reading of an answer stops with an error after this number of bytes.
MAX_BYTES = 16 * 2**20
# The exceptions of an attempt whose connection failed or timed out. A time-out is an
# OSError.
LOST = (OSError, httpx2.RequestError)
# An upper bound on a provider's costliest service tier, as a multiple of its list price
# (our choice).
COSTLIEST_TIER = 2.5


@dataclasses.dataclass
class Stream:
  """An answer of a provider, whose body is read while it arrives.

  A compressed body is not unpacked.

  Attributes:
    response: the open response.
    until_s: the deadline, in seconds of the event loop's clock.
    form: the wire form (protocol) of the body.
  """

  response: httpx2.Response
  until_s: float
  form: WireForm

  async def read(self) -> AsyncIterator[bytes]:
    """Read the body in blocks of bytes.

    Raises:
      LOST: the body breaks off, has more than `MAX_BYTES`, or is late (an exception of
        the tuple LOST).
    """
    blocks = self.response.aiter_raw()
    size = 0
    while size <= MAX_BYTES:
      async with asyncio.timeout_at(self.until_s):
        block = await anext(blocks, None)
      if block is None:
        return
      size += len(block)
      yield block
    raise httpx2.ReadError(f"the answer has more than {MAX_BYTES} bytes")

  async def events(self) -> AsyncIterator[str]:
    """Read the data of each server-sent event.

    The caller must stop reading at the event that marks the end of the stream.

    Raises:
      LOST: the body breaks off, or ends while the caller still reads.
    """
    blocks = self.read()
    block = rest = b""
    while block is not None:
      block = await anext(blocks, None)
      # Lines of a stream end at \n only: the texts in it may contain other line ends,
      # such as U+2028.
      *lines, rest = (rest + (b"\n" if block is None else block)).split(b"\n")
      for line in lines:
        if line.startswith(b"data:"):
          yield line[5:].decode(errors="replace")
    raise httpx2.ReadError("the stream ended before its end mark")

  def chunks(self) -> AsyncIterator[dict]:
    """Read the chunks of a streamed chat completion.

    Raises:
      LOST: the body breaks off, or the stream's end mark is missing.
    """
    return self.form.read_chunks(self.events())


@dataclasses.dataclass(eq=False)
class Client:
  """One model at its provider's endpoint.

  Attributes:
    config: the configuration of the models.
    config_index: the model's index in the configuration.
    form: the wire form (protocol) of the endpoint.
    price: the model's price.
    is_tier_known: whether the endpoint has answered from a service tier of known price,
      or is on a private network.
    http: the HTTP client of the endpoint.
  """

  config: ModelsConfig
  config_index: int

  def __post_init__(self) -> None:
    """Prepare the HTTP client; no connection is opened yet.

    Raises:
      ValueError: the price or the key is missing, or there is no such wire form.
    """
    config = self.config
    self.form = load_form(config.wire)
    self.endpoint = endpoints(config)[self.config_index]
    self.name = self.endpoint.model
    self.price = prices_of(config.names, config.prices)[self.config_index]
    self.is_tier_known = self.endpoint.is_private
    self._key = self.endpoint.key()
    headers = httpx2.Headers(self.form.headers(self.endpoint, self._key))
    headers.update({"accept-encoding": "identity", "content-type": "application/json"})
    self.http = openai.DefaultAsyncHttpxClient(
      base_url=self.endpoint.base_url,
      headers=headers,
      # Cookies are not kept, so that the provider cannot link calls by cookies.
      cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
      follow_redirects=False,
      timeout=httpx2.Timeout(None, connect=min(CONNECT_S, config.timeout_s)),
    )

  def write(self, body: dict) -> dict:
    """Write a chat-completions request for this model in its wire form."""
    return self.form.write(body, self.endpoint, self.config)

  def bound_usd(self, prompt_tokens: int, request: dict) -> float:
    """Compute the worst case of one attempt, in dollars.

    Until the provider's service tier is known, the costliest tier is assumed.

    Args:
      prompt_tokens: an upper bound on the tokens of the prompt.
      request: the request in the endpoint's wire form, with its limit on the reply.
    """
    limits = [request.get(name) or 0 for name in self.form.limits]
    tokens = max(limits) * (request.get("n") or 1)
    usd = self.price.worst_case_usd(prompt_tokens, tokens)
    is_default = self.endpoint.is_openai and request.get("service_tier") == "default"
    return usd if is_default or self.is_tier_known else COSTLIEST_TIER * usd

  async def send(self, body: dict, limit_s: float) -> dict | Stream | Outcome:
    """Make one attempt at a call.

    Args:
      body: the request, as a chat completion.
      limit_s: seconds until the attempt times out.

    Returns:
      A chat completion; a stream if the request asks for a stream; or the outcome of an
      attempt that failed. No exception other than a cancellation is raised.
    """
    # The JSON text is pure ASCII: it escapes all other characters.
    content = json.dumps(self.write(body))
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
        content = b"".join([block async for block in stream.read()])
    except LOST as failure:
      return explain(failure)
    if response.is_success:
      return self.form.read_answer(content)
    text = content.decode(errors="replace")
    retry_after = response.headers.get("retry-after", "")
    error = self.form.read_error(text)
    return read_refusal(response.status_code, text, error, retry_after, self._key)


# The type of the result of one attempt: an Outcome in a run that plays tasks. In
# --stage=serve it is a chat completion, a stream, or an Outcome.
Attempted = TypeVar("Attempted")
# The type of the result of a whole call: a Reply in a run that plays tasks.
Answer = TypeVar("Answer")


class Books(Protocol[Attempted, Answer]):
  """The account of one call, which pays for the attempts and chooses the model.

  Attributes:
    has_others: whether another model may take over after the last retry.
  """

  has_others: bool

  def reserve(self) -> contextlib.AbstractContextManager:
    """Reserve the worst case of an attempt while it is made, and record the attempt."""

  async def attempt(self) -> Attempted:
    """Make one attempt, and return its result."""

  def settle(self, outcome: Attempted) -> Answer | None:
    """Settle the cost of the attempt; return the answer, or None if it failed."""

  def refuse(self, outcome: Outcome, attempts: int) -> Exception:
    """Make the error to raise after the last failed attempt.

    Args:
      outcome: the outcome of that attempt.
      attempts: number of attempts at the model that was asked last.
    """

  async def prepare(self, outcome: Outcome, wait_s: float, is_last: bool) -> bool:
    """Choose the model of the next attempt, after a wait.

    Args:
      outcome: the outcome of the attempt that failed.
      wait_s: seconds to wait before the same model is asked again.
      is_last: whether the model has no retries left.

    Returns:
      Whether the next attempt goes to another model.
    """


async def ask(books: Books[Attempted, Answer], retries: int) -> Answer:
  """Repeat the attempts at a call until one succeeds.

  Args:
    books: the account of the call.
    retries: number of attempts after the first one, for each model.

  Raises:
    Exception: all attempts failed, or no attempt can succeed. `books.refuse` makes this
      error.
  """
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
  """Run a coroutine to its end in this thread, without an event loop.

  The coroutine may block the thread, but must not wait for an event loop.

  Raises:
    RuntimeError: the coroutine waits for an event loop.
  """
  try:
    call.send(None)
  except StopIteration as end:
    return end.value
  raise RuntimeError("the call waits for an event loop")
