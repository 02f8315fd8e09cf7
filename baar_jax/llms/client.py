"""The HTTP client of an endpoint: whatever is sent, an attempt ends in time and reads no more."""

import contextlib
import threading
import time

import httpcore2
import httpx2
import openai

from baar_jax.llms.endpoints import Endpoint

MOST_BYTES = 16 * 2**20  # of an answer
POLL_S = 0.2  # how soon an attempt ends when its run is stopped
CONNECT_S = 10.0  # to connect to one of a host's addresses, and to agree on encryption
# The headers that endpoints other than OpenAI's are sent; the client itself needs the last one.
HEADERS = {"host", "connection", "accept", "accept-encoding", "user-agent", "content-type"}
HEADERS |= {"content-length", "authorization", "x-stainless-raw-response"}


class Network(threading.local, httpcore2.SyncBackend):
  """Connections, and what the attempt of this thread may still take: seconds and bytes."""

  def __init__(self, stopping: threading.Event):
    self._stopping, self._until, self._bytes = stopping, 0.0, 0

  def begin(self, timeout_s: float) -> None:
    self._until, self._bytes = time.monotonic() + timeout_s, MOST_BYTES

  def left_s(self) -> float:
    """Raises ReadTimeout where no time is left, or the run is being stopped."""
    left_s = self._until - time.monotonic()
    if left_s <= 0 or self._stopping.is_set():
      raise httpcore2.ReadTimeout
    return left_s

  def count(self, data: bytes) -> bytes:
    self._bytes -= len(data)
    if self._bytes < 0:
      raise httpcore2.ReadError("too many bytes")
    return data

  def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
    wait_s = min(CONNECT_S, self.left_s())
    return Stream(super().connect_tcp(host, port, wait_s, local_address, socket_options), self)


class Stream(httpcore2.NetworkStream):
  """A connection that keeps the limits of each attempt that uses it."""

  def __init__(self, stream: httpcore2.NetworkStream, network: Network):
    self._stream, self._network = stream, network
    self.close, self.get_extra_info = stream.close, stream.get_extra_info

  def read(self, max_bytes, timeout=None):
    while True:
      wait_s = min(POLL_S, self._network.left_s())
      with contextlib.suppress(httpcore2.ReadTimeout):
        return self._network.count(self._stream.read(max_bytes, wait_s))

  def write(self, buffer, timeout=None):
    self._stream.write(buffer, self._network.left_s())

  def start_tls(self, ssl_context, server_hostname=None, timeout=None):
    wait_s = min(CONNECT_S, self._network.left_s())
    return Stream(self._stream.start_tls(ssl_context, server_hostname, wait_s), self._network)


def open_client(endpoint: Endpoint, network: Network) -> openai.OpenAI:
  """A client that follows no redirect, unpacks nothing, and reads all as UTF-8.

  What it reads from OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS and the like is for OpenAI alone.
  """
  key = endpoint.key()

  def send(request: httpx2.Request) -> None:
    request.headers["accept-encoding"] = "identity"
    if not endpoint.openai:
      request.headers["authorization"] = f"Bearer {key}"
      for name in request.headers.keys() - HEADERS:
        del request.headers[name]

  def receive(response: httpx2.Response) -> None:
    response.headers.pop("content-encoding", None)
    response.encoding = "utf-8"

  hooks = {"request": [send], "response": [receive]}
  http = openai.DefaultHttpxClient(follow_redirects=False, event_hooks=hooks)
  for transport in filter(None, (http._transport, *http._mounts.values())):
    transport._pool._network_backend = network  # the library has no other way
  return openai.OpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0, http_client=http)
