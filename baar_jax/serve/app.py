"""The HTTP face: chat completions, decisions, sessions, their scores, and a page."""

import asyncio
import functools
import hmac
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import jinja2
import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from baar_jax.llms.client import LOST, Stream
from baar_jax.llms.wire import explain
from baar_jax.serve.exchange import NAME, Exchange
from baar_jax.serve.request import Refusal, Scored, read_body
from baar_jax.serve.routed import EXHAUSTED, RoutedCall
from baar_jax.serve.sessions import Session

SHOWN_SESSIONS = 100
STREAM = "text/event-stream"
Respond = Callable[[Request], Awaitable[ASGIApp]]  # answers a request of one route
LOCAL = ("127.0.0.1", "localhost", "::1")  # hosts that need no key
FILES = (Path(__file__).parent, Path(__file__).parents[1] / "report")


class App(Starlette):
  """The routes of one server, as an ASGI application."""

  def __init__(self, exchange: Exchange, key: str):
    """With a `key`, clients must send it as a bearer; "" is none."""
    self.exchange = exchange
    self._key = key
    self._closing: set[asyncio.Future] = set()  # streams of upstreams
    jinja = jinja2.Environment(loader=jinja2.FileSystemLoader(FILES), autoescape=True)
    self._page = jinja.get_template("sessions.html.j2")
    table = {
      "POST /v1/chat/completions": self._with_body(self._chat),
      "POST /v1/decision": self._with_body(self._decide),
      "GET /v1/models": self._list_models,
      "POST /v1/sessions/{id:path}/score": self._with_body(self._score),
      "GET /v1/sessions/{id:path}": self._show_session,
      "GET /metrics": self._show_metrics,
      "GET /": self._show_page,
    }
    routes = [Route("/health", lambda request: JSONResponse({"status": "ok"}))]
    for place, respond in table.items():
      method, path = place.split()
      routes.append(Route(path, self._guard(respond), methods=[method]))
    names = ", ".join(table).replace(":path", "")

    async def refuse(request: Request, error: HTTPException) -> Response:
      problem = f"this server answers {names} and GET /health alone"
      body = Refusal(error.status_code, problem).body
      return JSONResponse(body, error.status_code, error.headers)

    super().__init__(routes=routes, exception_handlers={HTTPException: refuse})

  def _with_body(
    self, respond: Callable[[Request, dict], Awaitable[ASGIApp]]
  ) -> Respond:
    """Read the body of a request for a function that wants it."""

    async def answer(request: Request) -> ASGIApp:
      body = await read_body(request, self.exchange.config.serve.max_body_mb)
      return await respond(request, body)

    return answer

  def _guard(self, respond: Respond) -> Respond:
    """Put a route's function behind the key; a refusal becomes an answer."""

    async def answer(request: Request) -> ASGIApp:
      try:
        self._check(request)
        return await respond(request)
      except Refusal as error:
        refusal = error
      except ClientDisconnect:
        refusal = Refusal(400, "the client has left")
      except Exception as bug:  # nothing of the request is printed
        kind = type(bug).__name__
        print(f"error: {kind} in {request.url.path}", file=sys.stderr)
        refusal = Refusal(500, f"a bug: {kind}", "server_error")
      # OpenAI's clients would try again, also if a budget is spent.
      headers = {"x-should-retry": "false"} if refusal.status < 500 else None
      return JSONResponse(refusal.body, refusal.status, headers)

    return answer

  def _check(self, request: Request) -> None:
    """Raise Refusal unless the client may ask."""
    if not self._key and request.url.hostname not in LOCAL:
      # A page of another site may have made its name one of this machine.
      names = " or ".join(LOCAL)
      raise Refusal(403, f"without a key this server is asked as {names} alone")
    sent = request.headers.get("authorization", "").removeprefix("Bearer ")
    if self._key and not hmac.compare_digest(sent.encode(), self._key.encode()):
      problem = "send this server's key as 'Authorization: Bearer KEY'"
      raise Refusal(401, problem, code="invalid_api_key")

  async def _chat(self, request: Request, body: dict) -> ASGIApp:
    exchange = self.exchange
    call = exchange.receive(request.headers, body)
    try:
      routed = await exchange.decide(call)
      answer = await exchange.forward(routed)
    except Refusal as refusal:
      is_partial = request.headers.get("x-baar-on-exhausted") == "partial"
      if refusal.code != EXHAUSTED or not is_partial:
        raise
      return send(write_exhausted(), body, call.headers)  # no model has answered
    if isinstance(answer, Stream):
      return functools.partial(self._stream, routed, answer)
    routed.book_reply(answer)
    usage = answer.get("usage")
    answer["usage"] = dict(usage if isinstance(usage, dict) else {}, cost=routed.usd)
    answer["model"] = routed.upstream.name
    return send(answer, body, routed.headers)

  async def _stream(
    self, routed: RoutedCall, answer: Stream, *connection: object
  ) -> None:
    """Send a streamed answer; its end is booked wherever it stops."""
    chunks = self._relay(routed, answer)
    response = StreamingResponse(chunks, headers=routed.headers, media_type=STREAM)
    try:
      await response(*connection)
    finally:  # its client or its endpoint may have left it
      routed.book_reply({}, whole=False)
      closing = asyncio.ensure_future(answer.response.aclose())
      self._closing.add(closing)  # the loop itself holds no task
      closing.add_done_callback(self._closing.discard)

  async def _relay(self, routed: RoutedCall, answer: Stream) -> AsyncIterator[bytes]:
    """Yield the chunks of an answer, each when the next comes; the last has dollars."""
    name = {"model": routed.upstream.name}
    last = {}
    held = {}
    try:
      async for chunk in answer.chunks():
        if isinstance(chunk.get("usage"), dict):
          last = chunk  # some count while they write: only the last count is the bill
        if chunk.get("choices"):
          if held:
            yield write_event(held)
          held = chunk | name
          held.pop("usage", None)
    except LOST as failure:
      refusal = routed.refuse(explain(failure))
      yield write_event(refusal.body)
      return
    routed.book_reply(last)
    options = routed.call.body.get("stream_options") or {}
    if held and options.get("include_usage"):
      yield write_event(held)
      held = {}
    end = held or last | name | {"choices": []}
    yield write_event(end | {"usage": dict(last.get("usage", {}), cost=routed.usd)})
    yield write_event("[DONE]")

  async def _decide(self, request: Request, body: dict) -> Response:
    """Decide for a caller that calls the model itself, or book what it has used."""
    exchange = self.exchange
    if "decision_id" in body:
      routed = exchange.report(body["decision_id"], body)
      fields = exchange.describe(routed.session)
      return JSONResponse(fields, headers=routed.headers)
    routed = await exchange.decide(exchange.receive(request.headers, body))
    number = exchange.promise(routed)
    left = routed.session.left
    expected_usd = exchange.budgets.expect_usd(routed.call)
    fields = dict(
      decision_id=number,
      session_id=routed.session.id,
      model=routed.upstream.name,
      probabilities=dict(zip(exchange.names, routed.p_A)),
      p_large=routed.large_p,
      expected_usd=dict(zip(exchange.names, expected_usd)),
      left_usd=left.usd,
      left_large_calls=left.calls,
    )
    return JSONResponse(fields, headers=routed.headers)

  async def _score(self, request: Request, body: dict) -> Response:
    session = self._find(request)
    self.exchange.finish(session, Scored.read(body))
    return JSONResponse(self.exchange.describe(session))

  async def _show_session(self, request: Request) -> Response:
    return JSONResponse(self.exchange.describe(self._find(request)))

  async def _list_models(self, request: Request) -> Response:
    caps = self.exchange.config.evaluate.call_budgets
    models = []
    for name in (*self.exchange.served, *(f"{NAME}:K={K}" for K in caps)):
      models.append(dict(id=name, object="model", created=0, owned_by=NAME))
    return JSONResponse(dict(object="list", data=models))

  async def _show_metrics(self, request: Request) -> Response:
    registry = prometheus.CollectorRegistry()
    make = functools.partial(
      prometheus.Counter, labelnames=["model", "outcome"], registry=registry
    )
    calls = make("baar_calls", "Attempts at calls.")
    usd = make("baar_usd", "The most that they cost.")
    for tally in self.exchange.sessions.count_attempts():
      labels = (self.exchange.names[tally.model], tally.outcome)
      calls.labels(*labels).inc(tally.count)
      usd.labels(*labels).inc(tally.usd)
    text = prometheus.generate_latest(registry)
    return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

  async def _show_page(self, request: Request) -> Response:
    exchange = self.exchange
    sessions = map(exchange.describe, exchange.sessions.list_newest(SHOWN_SESSIONS))
    page = self._page.render(
      names=exchange.names, run=exchange.config, sessions=list(sessions)
    )
    return HTMLResponse(page)

  def _find(self, request: Request) -> Session:
    session = self.exchange.sessions.find(request.path_params["id"])
    if session is None:
      raise Refusal(404, "there is no such session", code="not_found")
    return session


def write_exhausted() -> dict:
  """Write the empty answer of a session whose caps have no room for a call."""
  message = dict(role="assistant", content="")
  return dict(
    id="exhausted",
    object="chat.completion",
    created=int(time.time()),
    model=NAME,
    choices=[dict(index=0, message=message, finish_reason="length")],
    usage=dict(cost=0.0, prompt_tokens=0, completion_tokens=0, total_tokens=0),
  )


def send(fields: dict, body: dict, headers: dict[str, str]) -> Response:
  """Send a whole answer, as the one chunk of a stream if the client wants one.

  Args:
    body: of the client's call.
  """
  content = json.dumps(fields)  # in ASCII: a text may end with half a surrogate pair
  if not body.get("stream"):
    return Response(content, headers=headers, media_type="application/json")
  choices = [dict(choice, delta=choice.get("message")) for choice in fields["choices"]]
  chunk = dict(fields, object="chat.completion.chunk", choices=choices)
  content = write_event(chunk) + write_event("[DONE]")
  return Response(content, headers=headers, media_type=STREAM)


def write_event(data: dict | str) -> bytes:
  """Write an event of a stream."""
  text = data if isinstance(data, str) else json.dumps(data)
  return f"data: {text}\n\n".encode()
