"""Call models at their providers' endpoints, with reservations and retries."""

import asyncio
import codecs
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import NamedTuple, Protocol, TypeVar

import httpx2
import openai

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms import chat_completions, messages, responses
from baar_jax.llms.prices import HOUR_WRITE, prices_of
from baar_jax.llms.usage import ImpossibleUsage, Meter
from baar_jax.llms.wire import (
  UNREADABLE,
  Outcome,
  WireForm,
  backoff_s,
  endpoints,
  explain,
  read_error,
  read_refusal,
)

# The wire forms, by the path of their requests.
FORMS: dict[str, WireForm] = {}
for module in (chat_completions, responses, messages):
  FORMS[module.FORM.path] = module.FORM
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
# A cost above its bound by no more than this share is a rounding error of floats.
ROUNDING = 1e-9


class Whole(NamedTuple):
  """A whole answer of a provider.

  Attributes:
    fields: the JSON body, in the wire form of the call.
    meter: the usage in it.
  """

  fields: dict
  meter: Meter


@dataclasses.dataclass
class Stream:
  """An answer of a provider, whose body is read while it arrives.

  A compressed body is not unpacked.

  Attributes:
    response: the open response.
    until_s: the deadline, in seconds of the event loop's clock.
  """

  response: httpx2.Response
  until_s: float

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

  async def events(self) -> AsyncIterator[tuple[bytes, bytes]]:
    """Read each server-sent event: its bytes, up to a blank line, and its data.

    The caller must stop reading at the event that marks the end of the stream.

    Raises:
      LOST: the body breaks off, or ends while the caller still reads.
    """
    rest = b""
    event = []
    async for block in self.read():
      # Lines of a stream end at \n only: the texts in it may contain other line ends,
      # such as U+2028.
      *lines, rest = (rest + block).split(b"\n")
      for line in lines:
        event.append(line + b"\n")
        if not line.strip():
          data = [line[5:].strip() for line in event if line.startswith(b"data:")]
          yield b"".join(event), b"\n".join(data)
          event = []
    raise httpx2.ReadError("the stream ended before its end mark")


@dataclasses.dataclass(eq=False)
class Client:
  """One model at its provider's endpoint.

  Attributes:
    config: the configuration of the models.
    config_index: the model's index in the configuration.
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
      ValueError: the price or the key is missing.
    """
    config = self.config
    self.endpoint = endpoints(config)[self.config_index]
    self.name = self.endpoint.model
    self.price = prices_of(config.names, config.prices)[self.config_index]
    self.is_tier_known = self.endpoint.is_private
    self._key = self.endpoint.key()
    self.http = openai.DefaultAsyncHttpxClient(
      base_url=self.endpoint.base_url,
      headers={"accept-encoding": "identity", "content-type": "application/json"},
      # A connection is not used twice: bytes that are left over from one answer would
      # be taken for the next one.
      limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
      # Cookies are not kept, so that the provider cannot link calls by cookies.
      cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
      follow_redirects=False,
      timeout=httpx2.Timeout(None, connect=min(CONNECT_S, config.timeout_s)),
    )

  def write(self, form: WireForm, body: Mapping) -> dict:
    """Write a request for this model."""
    return form.write_request(body, self.endpoint, self.config)

  def bound_usd(self, form: WireForm, prompt_tokens: int, request: Mapping) -> float:
    """Compute the worst case of one attempt, in dollars.

    Until the provider's service tier is known, the costliest tier is assumed.

    Args:
      form: the wire form of the request.
      prompt_tokens: an upper bound on the tokens of the prompt.
      request: the request, with its limit on the reply.
    """
    limits = [request.get(name) or 0 for name in form.limits]
    tokens = max(limits) * (request.get("n") or 1)
    usd = self.price.worst_case_usd(prompt_tokens, tokens)
    if '"1h"' in json.dumps(request):
      usd += prompt_tokens * HOUR_WRITE * self.price.input / 1e6
    is_default = self.endpoint.is_openai and request.get("service_tier") == "default"
    return usd if is_default or self.is_tier_known else COSTLIEST_TIER * usd

  def price_usage(self, meter: Meter) -> tuple[Usage, float]:
    """Compute the tokens and the dollars of an answer.

    Raises:
      ImpossibleUsage: the usage is missing or impossible, or the provider states more
        dollars than the configured prices give.
    """
    usage = meter.usage()
    usd = self.price.cost_usd(usage)
    if meter.cost_usd > usd * (1 + ROUNDING):
      raise ImpossibleUsage(
        f"The provider states ${meter.cost_usd:g}, but the prices give ${usd:g}. "
        "Correct --config.models.prices."
      )
    return usage, usd

  async def send(
    self,
    form: WireForm,
    request: Mapping,
    limit_s: float,
    path: str = "",
    headers: Mapping[str, str] | None = None,
  ) -> Whole | Stream | Outcome:
    """Make one attempt at a call.

    Args:
      form: the wire form of the call.
      request: the request.
      limit_s: seconds until the attempt times out.
      path: the path below the base URL; "" is the form's.
      headers: headers of the client that go on to the provider.

    Returns:
      The whole answer; a stream if the request asks for a stream; or the outcome of an
      attempt that failed. No exception other than a cancellation is raised.
    """
    # The JSON text is pure ASCII: it escapes all other characters.
    content = json.dumps(request)
    own_headers = form.list_headers(self.endpoint, self._key)
    sent = self.http.build_request(
      "POST", path or form.path, content=content, headers=own_headers | (headers or {})
    )
    until_s = asyncio.get_running_loop().time() + limit_s
    try:
      async with asyncio.timeout_at(until_s):
        response = await self.http.send(sent, stream=True)
      stream = Stream(response, until_s)
      kind = response.headers.get("content-type", "")
      is_stream = request.get("stream") and kind.startswith("text/event-stream")
      if is_stream and response.is_success:
        return stream
      async with contextlib.aclosing(response):
        content = b"".join([block async for block in stream.read()])
    except LOST as failure:
      return explain(failure)
    if response.is_success:
      meter = Meter(form.counts_beside)
      fields = meter.read(content.removeprefix(codecs.BOM_UTF8))
      return UNREADABLE if fields is None else Whole(fields, meter)
    text = content.decode(errors="replace")
    retry_after = response.headers.get("retry-after", "")
    error = read_error(text)
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
    is_last = attempt == retries or outcome.is_paused
    is_final = outcome.fatal or outcome.hopeless
    if is_final or is_last and not books.has_others:
      raise books.refuse(outcome, attempt + 1)
    wait_s = 0.0 if outcome.is_paused else outcome.wait_s + backoff_s(attempt)
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
