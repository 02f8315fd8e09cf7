"""Send one request to a model, and read its answer whole or as a stream."""

import asyncio
import codecs
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

import httpx2

from baar_jax.config import ModelsConfig
from baar_jax.llms.prices import COSTLIEST_TIER, HOUR_WRITE, PricedModel
from baar_jax.llms.provider import (
  LOST,
  UNREADABLE,
  Outcome,
  endpoints,
  explain,
  open_http,
  read_refusal,
)
from baar_serve.forms.wire import WireForm, pick_headers
from baar_serve.meter import AnswerMeter

# Headers of a provider's error that go on to the client.
RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")


class Whole(NamedTuple):
  """A whole answer of a provider.

  Attributes:
    fields: the JSON body, in the wire form of the call.
    meter: the usage in it.
  """

  fields: dict
  meter: AnswerMeter


@dataclasses.dataclass
class Stream:
  """An answer of a provider, whose body is read while it arrives.

  Attributes:
    response: the open response.
    until_s: the deadline, in seconds of the event loop's clock.
    meter: what collects its usage.
  """

  response: httpx2.Response
  until_s: float
  meter: AnswerMeter = dataclasses.field(default_factory=AnswerMeter)

  async def read(self) -> AsyncIterator[bytes]:
    """Read the body in blocks of bytes.

    Raises:
      LOST: the body breaks off, is too long, or is late (an exception of the tuple
        LOST).
    """
    blocks = self.response.aiter_raw()
    while True:
      async with asyncio.timeout_at(self.until_s):
        block = await anext(blocks, None)
      if block is None:
        return
      yield block

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
class Client(PricedModel):
  """One model at its provider's endpoint.

  Attributes:
    config: the configuration of the models.
    config_index: the model's index in the configuration.
    multiples: the multiples of the list price that the last answer told. Before one,
      a public endpoint may have the costliest service tier.
    http: the HTTP client of the endpoint.
  """

  config: ModelsConfig
  config_index: int

  def __post_init__(self) -> None:
    """Prepare the HTTP client; no connection is opened yet.

    Raises:
      ValueError: the key is missing.
    """
    config = self.config
    self.endpoint = endpoints(config)[self.config_index]
    self.name = self.endpoint.model
    tier = 1.0 if self.endpoint.is_private else COSTLIEST_TIER
    self.multiples = {"service_tier": tier}
    self._key = self.endpoint.key()
    self.http = open_http(config.timeout_s)
    self.http.base_url = self.endpoint.base_url

  def bound_usd(self, request: Mapping, prompt_tokens: int, reply_tokens: int) -> float:
    """Compute the worst case of one attempt, in dollars.

    The costlier one of the service tiers that the last answer and the request name
    counts.

    Args:
      request: the request.
      prompt_tokens: an upper bound on the tokens of the prompt.
      reply_tokens: the limit on the tokens of a reply.
    """
    tokens = reply_tokens * (request.get("n") or 1)
    usd = self.worst_case_usd(prompt_tokens, tokens)
    if prompt_tokens and '"1h"' in json.dumps(request):
      usd += prompt_tokens * HOUR_WRITE * self.price.input / 1e6
    terms = AnswerMeter(multiples={**self.multiples})
    terms.note_terms(request)
    return usd * math.prod(terms.multiples.values())

  async def send(
    self, form: WireForm, request: Mapping, path: str, headers: Mapping[str, str]
  ) -> Whole | Stream | Outcome:
    """Make one attempt at a call.

    Args:
      form: the wire form of the call.
      request: the request.
      path: the path below the base URL.
      headers: headers of the client that go on to the provider.

    Returns:
      The whole answer; a stream if the request asks for a stream; or the outcome of an
      attempt that failed. No exception other than a cancellation is raised.
    """
    # The JSON text is pure ASCII: it escapes all other characters.
    content = json.dumps(request)
    own_headers = form.list_headers(self.endpoint, self._key)
    own_headers |= {"content-type": "application/json", **headers}
    sent = self.http.build_request("POST", path, content=content, headers=own_headers)
    until_s = asyncio.get_running_loop().time() + self.config.timeout_s
    try:
      async with asyncio.timeout_at(until_s):
        response = await self.http.send(sent, stream=True)
      meter = AnswerMeter(counts_beside=form.counts_beside, is_hourly='"1h"' in content)
      stream = Stream(response, until_s, meter)
      kind = response.headers.get("content-type", "")
      is_stream = request.get("stream") and kind.startswith("text/event-stream")
      if is_stream and response.is_success:
        return stream
      async with contextlib.aclosing(response):
        content = b"".join([block async for block in stream.read()])
    except LOST as failure:
      return explain(failure)
    if response.is_success:
      fields = meter.read(content.removeprefix(codecs.BOM_UTF8))
      return UNREADABLE if fields is None else Whole(fields, meter)
    passed = pick_headers(response.headers, RETRY_HEADERS)
    return read_refusal(response.status_code, content, passed, self._key)
