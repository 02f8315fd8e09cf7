"""Open HTTP clients that limit an answer, and tell what their failures cost."""

from collections.abc import AsyncIterator, Callable, Coroutine
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx2

from baar_jax.llms.provider import FAILED, PRESUMED, Outcome

# Seconds to connect to one of a host's addresses and to agree on encryption.
CONNECT_S = 10.0
# The reading of an answer stops with an error after this number of bytes.
MAX_BYTES = 16 * 2**20

# After these exceptions no part of a request was sent, so nothing was billed. If the
# port of a proxy is impossible, connecting raises an ExceptionGroup.
NOT_SENT = (
  httpx2.ConnectError,
  httpx2.ConnectTimeout,
  httpx2.PoolTimeout,
  httpx2.ProxyError,
  httpx2.LocalProtocolError,
  httpx2.UnsupportedProtocol,
  ExceptionGroup,
)
# All exceptions of an attempt whose connection failed or timed out. A time-out is an
# OSError.
LOST = (OSError, ExceptionGroup, httpx2.RequestError)

# A function that changes a request before it is sent.
RequestHook = Callable[[httpx2.Request], Coroutine[None, None, None]]


class LimitedStream(httpx2.AsyncByteStream):
  """The body of an answer, which breaks off after `MAX_BYTES`."""

  def __init__(self, stream: httpx2.AsyncByteStream):
    """Wrap the body as the provider sends it."""
    self._stream = stream

  async def __aiter__(self) -> AsyncIterator[bytes]:
    """Read the body in blocks of bytes.

    Raises:
      ReadError: the body has more than `MAX_BYTES`.
    """
    size = 0
    async for block in self._stream:
      size += len(block)
      if size > MAX_BYTES:
        raise httpx2.ReadError(f"the answer has more than {MAX_BYTES} bytes")
      yield block

  async def aclose(self) -> None:
    """Close the connection."""
    await self._stream.aclose()


async def limit_answer(response: httpx2.Response) -> None:
  """Limit the bytes of an answer's body, and do not unpack a compressed body."""
  response.headers.pop("content-encoding", None)
  response.stream = LimitedStream(response.stream)


def explain(failure: Exception) -> Outcome:
  """Make the outcome of a time-out or a lost connection."""
  kind = FAILED if isinstance(failure, NOT_SENT) else PRESUMED
  status = 504 if isinstance(failure, TimeoutError) else 502
  problem = f"gave no whole answer ({type(failure).__name__})"
  return Outcome(kind, problem, status=status)


def open_http(timeout_s: float, *hooks: RequestHook) -> httpx2.AsyncClient:
  """Open an HTTP client without redirects and cookies; it does not connect yet.

  Its only time-out is the one for connecting. The caller sets a deadline for the whole
  answer.

  Args:
    timeout_s: the seconds of a whole call.
    hooks: functions that change each request.

  Raises:
    ValueError: the environment names a proxy that cannot be used.
  """
  try:
    return httpx2.AsyncClient(
      headers={"accept-encoding": "identity"},
      # A connection is not used twice: bytes that are left over from one answer would
      # be taken for the next one.
      limits=httpx2.Limits(max_keepalive_connections=0),
      # Cookies are not kept, so that the provider cannot link calls by cookies.
      cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
      follow_redirects=False,
      timeout=httpx2.Timeout(None, connect=min(CONNECT_S, timeout_s)),
      event_hooks={"request": hooks, "response": [limit_answer]},
    )
  except (ImportError, ValueError, httpx2.InvalidURL):
    # The error may contain the proxy's password.
    variables = "ALL_PROXY, HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
    raise ValueError(
      f"{variables} name no proxy that can be used: set http:// addresses, or unset "
      "the variables"
    ) from None
