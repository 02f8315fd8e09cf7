"""Open the HTTP client by which the endpoint calls models."""

import urllib.request
from urllib.parse import urlsplit

import aiohttp
import httpx2

from baar_jax.llms.provider import CONNECT_S, WRONG_PROXY

# After these exceptions no part of a request was sent, so nothing was billed.
NOT_SENT = (
  aiohttp.ClientConnectorError,
  aiohttp.ConnectionTimeoutError,
  aiohttp.ClientHttpProxyError,
  aiohttp.InvalidURL,
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


def open_http(timeout_s: float, proxy: str | None) -> aiohttp.ClientSession:
  """Open an HTTP client that keeps no cookies; it does not connect yet.

  Its only time-out is the one for connecting. The caller sets a deadline for the whole
  answer. An event loop must be running.

  Args:
    timeout_s: the seconds of a whole call.
    proxy: see `find_proxy`.
  """
  # A connection is not used twice: bytes that are left over from one answer would be
  # taken for the next one.
  connector = aiohttp.TCPConnector(
    limit=0, force_close=True, ssl=httpx2.create_ssl_context()
  )
  return aiohttp.ClientSession(
    connector=connector,
    headers={"accept-encoding": "identity", "user-agent": "baar"},
    # Cookies are not kept, so that the provider cannot link calls by cookies.
    cookie_jar=aiohttp.DummyCookieJar(),
    auto_decompress=False,
    timeout=aiohttp.ClientTimeout(None, connect=min(CONNECT_S, timeout_s)),
    proxy=proxy,
  )
