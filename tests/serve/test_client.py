"""Test how the endpoint calls models, against answers byte by byte."""

import asyncio
import re

import pytest

from baar_jax.episode import FAILED, PRESUMED
from baar_jax.llms.provider import Endpoint
from baar_serve.client import Whole, find_proxy
from baar_serve.upstream import Upstream

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n8\r\n"
SIZED = HEAD + b"content-length: 8\r\n\r\n"
BODY = b'{"n": 1}'
OTHER = SIZED + b'{"n": 2}'


@pytest.fixture
def ask(client):
  """ask(*answers, base_url=..., closes=True): call a model once for each answer.

  The server sends an answer on each connection. Returns what the endpoint makes of the
  answers, and the head of each request.
  """

  async def call(answers, base_url, closes):
    rest = list(answers)
    heads = []

    async def handle(reader, writer):
      heads.append(await reader.readuntil(b"\r\n\r\n"))
      if b"content-length" in heads[-1].lower():
        await reader.readuntil(b"}")
      writer.write(rest.pop(0))
      if closes or not await reader.read(1):
        writer.close()
      else:  # What a connection has left over comes at its next request.
        writer.write(OTHER)

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
      port = server.sockets[0].getsockname()[1]
      with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALL_PROXY", f"http://me:p%40@127.0.0.1:{port}")
        patch.setenv("NO_PROXY", "127.0.0.1")
        endpoint = Endpoint("small", base_url.format(port=port), "")
        upstream = Upstream(client.config.models, 0, endpoint)
      found = []
      for _ in answers:
        found.append(await upstream.send(client.receive(), {"a": 1}))
      await upstream.http.close()
      return found, heads

  def run(*answers, base_url="http://127.0.0.1:{port}/v1", closes=True):
    return asyncio.run(call(answers, base_url, closes))

  return run


@pytest.mark.parametrize(
  "answer, closes",
  [
    (SIZED + BODY, False),
    (SIZED + BODY + OTHER, False),
    (CHUNKED + BODY + b"\r\n0\r\n\r\n", False),
    # The bytes of an answer are not unpacked.
    (HEAD + b"content-encoding: gzip\r\n" + SIZED[len(HEAD) :] + BODY, False),
    (b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + SIZED + BODY, False),
    # Without a length, the body ends with the connection.
    (HEAD + b"\r\n" + BODY, True),
  ],
)
def test_an_answer_is_read_to_its_end_and_no_further(ask, answer, closes):
  (found,), (head,) = ask(answer, closes=closes)
  assert isinstance(found, Whole) and found.fields == {"n": 1}
  names = {*re.findall(rb"(?m)^([\w-]+):", head.lower())}
  assert names == {
    *(b"accept", b"accept-encoding", b"authorization", b"connection", b"host"),
    *(b"content-length", b"content-type", b"user-agent"),
  }
  assert b"\r\naccept-encoding: identity\r\n" in head


def test_a_late_second_answer_reaches_nobody(ask):
  """The second call has a connection of its own."""
  found, heads = ask(SIZED + BODY, SIZED + BODY, closes=False)
  assert [whole.fields for whole in found] == [{"n": 1}] * 2 and len(heads) == 2


@pytest.mark.parametrize(
  "answer",
  [
    b"",
    b"junk\r\n\r\n",
    HEAD,
    HEAD + b"x: " + b"x" * 200_000 + b"\r\n\r\n",
    SIZED + BODY[:-1],
    CHUNKED + BODY,
    CHUNKED + BODY + b"\r\njunk\r\n\r\n",
  ],
)
def test_an_answer_that_breaks_off_may_be_billed(ask, answer):
  (outcome,), _ = ask(answer)
  assert (outcome.kind, outcome.status) == (PRESUMED, 502)
  assert outcome.problem.startswith("gave no whole answer")


@pytest.mark.parametrize(
  "base_url",
  [
    "http://a..127.0.0.1",
    "http://127.0.0.1:9/v1",
    "http://127.0.0.1:99999",
    "https://models.test",
  ],
)
def test_a_call_without_a_connection_is_not_billed(ask, base_url):
  """The proxy refuses the tunnel to the last address."""
  (outcome,), _ = ask(
    b"HTTP/1.1 403 No\r\ncontent-length: 0\r\n\r\n", base_url=base_url
  )
  assert outcome.kind == FAILED and outcome.problem.startswith("gave no whole answer")


def test_a_redirect_is_not_followed_and_a_cookie_not_kept(ask):
  moved = (
    b"HTTP/1.1 307 Go\r\nlocation: /v2\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n"
  )
  (outcome, _), heads = ask(moved, SIZED + BODY)
  assert outcome.status == 307 and len(heads) == 2
  assert not any(b"cookie" in head.lower() for head in heads)


def test_a_proxy_gets_its_password_and_the_tunnel(ask):
  _, (head,) = ask(SIZED + BODY, base_url="http://models.test/v1")
  assert head.startswith(b"POST http://models.test/v1/chat/completions HTTP/1.1\r\n")
  assert b"\r\nProxy-Authorization: Basic bWU6cEA=\r\n" in head
  _, (head,) = ask(SIZED + BODY, base_url="https://models.test/v1")
  assert head.startswith(b"CONNECT models.test:443 HTTP/1.1\r\n")
  assert b"\r\nProxy-Authorization: Basic bWU6cEA=\r\n" in head
  assert b"Bearer" not in head


def test_the_environment_names_proxies(monkeypatch):
  environ = {"ALL_PROXY": "http://all:1", "HTTPS_PROXY": "tls:2"}
  environ["NO_PROXY"] = "near.test"
  monkeypatch.setattr("os.environ", environ)
  assert find_proxy("http://models.test/v1") == "http://all:1"
  assert find_proxy("https://models.test/v1") == "http://tls:2"
  assert find_proxy("https://a.near.test/v1") is None
  environ["ALL_PROXY"] = "socks5://all:1"
  with pytest.raises(ValueError, match="set http:// addresses"):
    find_proxy("http://models.test/v1")
