"""Open the HTTP client by which the endpoint calls models, and read their answers."""

import asyncio
import ssl
import urllib.request
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from baar_jax.llms.provider import CONNECT_S, WRONG_PROXY
from baar_serve.meter import AnswerMeter

# After these exceptions no part of a request was sent, so nothing was billed.
NOT_SENT = (
  aiohttp.ClientConnectorError,
  aiohttp.ConnectionTimeoutError,
  aiohttp.ClientHttpProxyError,
  aiohttp.InvalidURL,
  UnicodeError,  # The name of the host cannot be looked up.
)
# All exceptions of an attempt whose connection failed or timed out. A time-out is an
# OSError.
LOST = (OSError, aiohttp.ClientError)


def find_proxy(base_url: str) -> str | None:
  """Return the proxy that the environment names for an address; None without one.

  The client itself would also send the passwords of the user's file .netrc.

  Raises:
    ValueError: the proxy cannot be used.
  """
  url = urlsplit(base_url)
  proxies = urllib.request.getproxies()
  proxy = proxies.get(url.scheme) or proxies.get("all")
  if not proxy or urllib.request.proxy_bypass(url.netloc):
    return None
  if "://" not in proxy:
    proxy = f"http://{proxy}"
  if not proxy.startswith("http"):
    raise ValueError(WRONG_PROXY)
  return proxy


def open_http(
  timeout_s: float, proxy: str | None, tls: ssl.SSLContext
) -> aiohttp.ClientSession:
  """Open an HTTP client that keeps no cookies; it does not connect yet.

  Its only time-out is the one for connecting. The caller sets a deadline for the whole
  answer. An event loop must be running.

  Args:
    timeout_s: the seconds of a whole call.
    proxy: see `find_proxy`.
    tls: the certificates to trust.
  """
  # A connection is not used twice: bytes that are left over from one answer would be
  # taken for the next one.
  connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls)
  return aiohttp.ClientSession(
    connector=connector,
    headers={"accept-encoding": "identity", "user-agent": "baar"},
    # Cookies are not kept, so that the provider cannot link calls by cookies.
    cookie_jar=aiohttp.DummyCookieJar(),
    auto_decompress=False,
    max_field_size=1 << 16,  # characters of a header
    timeout=aiohttp.ClientTimeout(None, connect=min(CONNECT_S, timeout_s)),
    proxy=proxy,
  )


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
