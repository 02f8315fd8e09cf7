"""Read the answer of a model whole or as a stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp

from baar_serve.meter import AnswerMeter


class Whole(NamedTuple):
  """A whole answer of a provider.

  Attributes:
    fields: the JSON body, in the wire form of the call.
    meter: the usage in it.
  """

  fields: dict
  meter: AnswerMeter


class Stream(NamedTuple):
  """An answer of a provider, whose body is read while it arrives.

  Attributes:
    response: the open response.
    meter: what collects its usage.
  """

  response: aiohttp.ClientResponse
  meter: AnswerMeter

  async def events(self, until_s: float) -> AsyncIterator[tuple[bytes, bytes]]:
    """Read each server-sent event: its bytes, up to a blank line, and its data.

    The caller must stop reading at the event that marks the end of the stream.

    Args:
      until_s: the deadline, in seconds of the event loop's clock.

    Raises:
      LOST: the body breaks off, is late, or ends while the caller still reads (an
        exception of the tuple LOST).
    """
    rest = b""
    event = []
    while True:
      async with asyncio.timeout_at(until_s):
        block = await self.response.content.readany()
      if not block:
        raise aiohttp.ClientPayloadError("the stream ended before its end mark")
      # Lines of a stream end at \n only: the texts in it may contain other line ends,
      # such as U+2028.
      *lines, rest = (rest + block).split(b"\n")
      for line in lines:
        event.append(line + b"\n")
        if not line.strip():
          data = [line[5:].strip() for line in event if line.startswith(b"data:")]
          yield b"".join(event), b"\n".join(data)
          event = []
