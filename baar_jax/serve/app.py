"""Answer clients' HTTP requests: chat completions, decisions, scores, and pages."""

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
from baar_jax.serve.request import Refusal, SessionScore, read_body
from baar_jax.serve.routed import EXHAUSTED, RoutedCall
from baar_jax.serve.sessions import Session

SHOWN_SESSIONS = 100
EVENT_STREAM = "text/event-stream"
# A function that answers the HTTP requests of one route (a method and a path).
RouteHandler = Callable[[Request], Awaitable[ASGIApp]]
# Names of this machine itself. A server that listens on one of these hosts needs no
# key.
LOCAL = ("127.0.0.1", "localhost", "::1")
TEMPLATE_DIRS = (Path(__file__).parent, Path(__file__).parents[1] / "report")


class App(Starlette):
  """The ASGI application of the endpoint: it answers clients by an `Exchange`."""

  def __init__(self, exchange: Exchange, key: str):
    """Set up the routes of an exchange.

    Args:
      key: clients must send this key as a bearer token; "" means that clients need no
        key.
    """
    self.exchange = exchange
    self._key = key
    # Tasks that close the connection to a model after its streamed answer.
    self._closing: set[asyncio.Future] = set()
    jinja = jinja2.Environment(
      loader=jinja2.FileSystemLoader(TEMPLATE_DIRS), autoescape=True
    )
    self._page = jinja.get_template("sessions.html.j2")
    table = {
      "POST /v1/chat/completions": self._with_body(self._chat),
      "POST /v1/decision": self._with_body(self._answer_decision),
      "GET /v1/models": self._list_models,
      "POST /v1/sessions/{id:path}/score": self._with_body(self._score_session),
      "GET /v1/sessions/{id:path}": self._show_session,
      "GET /metrics": self._show_metrics,
      "GET /": self._show_page,
    }
    routes = [Route("/health", lambda request: JSONResponse({"status": "ok"}))]
    for method_and_path, handle in table.items():
      method, path = method_and_path.split()
      routes.append(Route(path, self._guard(handle), methods=[method]))
    names = ", ".join(table).replace(":path", "")

    async def refuse(request: Request, error: HTTPException) -> Response:
      """Answer a request whose path or method is unknown, with the list of routes."""
      problem = f"Unknown path or method. This server answers {names}, GET /health."
      body = Refusal(error.status_code, problem).body
      return JSONResponse(body, error.status_code, error.headers)

    super().__init__(routes=routes, exception_handlers={HTTPException: refuse})

  def _with_body(
    self, handle: Callable[[Request, dict], Awaitable[ASGIApp]]
  ) -> RouteHandler:
    """Return a route handler that reads a request's JSON body and passes it on."""

    async def answer(request: Request) -> ASGIApp:
      """Read the request's body, and answer the request by `handle`."""
      body = await read_body(request, self.exchange.config.serve.max_body_mb)
      return await handle(request, body)

    return answer

  def _guard(self, handle: RouteHandler) -> RouteHandler:
    """Return a route handler that checks the client's key before it calls `handle`.

    If `handle` raises an exception, the client gets an error answer in OpenAI's form.
    """

    async def answer(request: Request) -> ASGIApp:
      """Check the client's key, and answer the request or its error."""
      try:
        self._check_client(request)
        return await handle(request)
      except Refusal as error:
        refusal = error
      except ClientDisconnect:
        refusal = Refusal(400, "The client closed the connection. Send the call again.")
      except Exception as bug:  # The request is private, so it is not printed.
        kind = type(bug).__name__
        print(f"error: {kind} in {request.url.path}", file=sys.stderr)
        refusal = Refusal(
          500,
          f"This server has a bug ({kind}). Report it to its operator.",
          "server_error",
        )
      # OpenAI's clients repeat some refused calls by themselves, such as those with
      # status 409 or 429. This header stops them, because the same call would be
      # refused again.
      headers = {"x-should-retry": "false"} if refusal.status < 500 else None
      return JSONResponse(refusal.body, refusal.status, headers)

    return answer

  def _check_client(self, request: Request) -> None:
    """Refuse a client that may not call this server.

    Raises:
      Refusal: the client's key is wrong, or the server has no key and the client's URL
        has another host than those in LOCAL.
    """
    if not self._key and request.url.hostname not in LOCAL:
      # A web page of another site may point its host name at this machine, and so call
      # this server from the user's browser (DNS rebinding).
      names = " or ".join(LOCAL)
      raise Refusal(403, f"This server has no key, so call it as {names}.")
    sent = request.headers.get("authorization", "").removeprefix("Bearer ")
    if self._key and not hmac.compare_digest(sent.encode(), self._key.encode()):
      problem = (
        "Wrong or missing key. Send 'Authorization: Bearer KEY' with this server's key."
      )
      raise Refusal(401, problem, code="invalid_api_key")

  async def _chat(self, request: Request, body: dict) -> ASGIApp:
    """Answer a chat completion: choose a model, call it, and book the reply's cost."""
    exchange = self.exchange
    call = exchange.receive(request.headers, body)
    try:
      routed = await exchange.decide(call)
      answer = await exchange.forward(routed)
    except Refusal as refusal:
      is_partial = request.headers.get("x-baar-on-exhausted") == "partial"
      if refusal.code != EXHAUSTED or not is_partial:
        raise
      return make_response(write_empty_answer(), body, call.headers)
    if isinstance(answer, Stream):
      return functools.partial(self._stream, routed, answer)
    routed.book_reply(answer)
    usage = answer.get("usage")
    answer["usage"] = dict(usage if isinstance(usage, dict) else {}, cost=routed.usd)
    answer["model"] = routed.upstream.name
    return make_response(answer, body, routed.headers)

  async def _stream(
    self, routed: RoutedCall, answer: Stream, *connection: object
  ) -> None:
    """Send a streamed answer, and book its cost even if the stream breaks.

    Args:
      connection: an ASGI connection: its scope, and its functions receive and send.
    """
    chunks = self._relay(routed, answer)
    response = StreamingResponse(
      chunks, headers=routed.headers, media_type=EVENT_STREAM
    )
    try:
      await response(*connection)
    finally:  # Book a broken stream too.
      routed.book_reply({}, is_whole=False)
      closing = asyncio.ensure_future(answer.response.aclose())
      # The event loop keeps only a weak reference to a task. This set keeps the task
      # until its end.
      self._closing.add(closing)
      closing.add_done_callback(self._closing.discard)

  async def _relay(self, routed: RoutedCall, answer: Stream) -> AsyncIterator[bytes]:
    """Yield the events of a streamed answer, and book the reply's cost.

    A chunk is sent when the next one has arrived, because the dollars are added to the
    last chunk with content.
    """
    model_field = {"model": routed.upstream.name}
    usage_chunk = {}
    pending = {}
    try:
      async for chunk in answer.chunks():
        if isinstance(chunk.get("usage"), dict):
          # Some models report their usage in several chunks. The last report counts.
          usage_chunk = chunk
        if chunk.get("choices"):
          if pending:
            yield write_event(pending)
          pending = chunk | model_field
          pending.pop("usage", None)
    except LOST as failure:
      refusal = routed.refuse(explain(failure))
      yield write_event(refusal.body)
      return
    routed.book_reply(usage_chunk)
    options = routed.call.body.get("stream_options") or {}
    if pending and options.get("include_usage"):
      yield write_event(pending)
      pending = {}
    last_chunk = pending or usage_chunk | model_field | {"choices": []}
    usage = dict(usage_chunk.get("usage", {}), cost=routed.usd)
    yield write_event(last_chunk | {"usage": usage})
    yield write_event("[DONE]")

  async def _answer_decision(self, request: Request, body: dict) -> Response:
    """Answer a decision alone, for a client that calls the chosen model itself.

    If the body has the `decision_id` of an earlier decision, book the usage that the
    client reports for that decision's call.
    """
    exchange = self.exchange
    if "decision_id" in body:
      routed = exchange.book_report(body["decision_id"], body)
      fields = exchange.describe(routed.session)
      return JSONResponse(fields, headers=routed.headers)
    routed = await exchange.decide(exchange.receive(request.headers, body))
    number = exchange.reserve_reported(routed)
    left = routed.session.remaining_caps
    expected_usd = {}
    warm_tokens = {}
    for name, outlook in zip(exchange.names, exchange.forecast(routed.call)):
      expected_usd[name] = outlook.usd
      warm_tokens[name] = outlook.warm_tokens
    fields = dict(
      decision_id=number,
      session_id=routed.session.id,
      model=routed.upstream.name,
      probabilities=dict(zip(exchange.names, routed.p_A)),
      p_large=routed.large_p,
      expected_usd=expected_usd,
      warm_tokens=warm_tokens,
      switch_usd=routed.session.switch_usd,
      left_usd=left.usd,
      left_large_calls=left.calls,
    )
    return JSONResponse(fields, headers=routed.headers)

  async def _score_session(self, request: Request, body: dict) -> Response:
    """End a session with its score, and respond with its caps, dollars and steps."""
    session = self._find_session(request)
    self.exchange.finish(session, SessionScore.read(body))
    return JSONResponse(self.exchange.describe(session))

  async def _show_session(self, request: Request) -> Response:
    """Respond with a session's caps, dollars and steps."""
    return JSONResponse(self.exchange.describe(self._find_session(request)))

  async def _list_models(self, request: Request) -> Response:
    """Respond with the model names that clients may send."""
    caps = self.exchange.config.evaluate.call_budgets
    models = []
    for name in (*self.exchange.served, *(f"{NAME}:K={K}" for K in caps)):
      models.append(dict(id=name, object="model", created=0, owned_by=NAME))
    return JSONResponse(dict(object="list", data=models))

  async def _show_metrics(self, request: Request) -> Response:
    """Respond with the attempts at model calls and their dollars, for Prometheus."""
    registry = prometheus.CollectorRegistry()
    make_counter = functools.partial(
      prometheus.Counter, labelnames=["model", "outcome"], registry=registry
    )
    calls = make_counter("baar_calls", "Attempts at model calls.")
    usd = make_counter("baar_usd", "US dollars; unknown costs at their worst case.")
    for total in self.exchange.sessions.count_attempts():
      labels = (self.exchange.names[total.model], total.outcome)
      calls.labels(*labels).inc(total.count)
      usd.labels(*labels).inc(total.usd)
    text = prometheus.generate_latest(registry)
    return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

  async def _show_page(self, request: Request) -> Response:
    """Respond with the HTML page of the newest sessions."""
    exchange = self.exchange
    sessions = [
      exchange.describe(session) | {"label": exchange.label(session)}
      for session in exchange.sessions.list_newest(SHOWN_SESSIONS)
    ]
    page = self._page.render(
      names=exchange.names, run=exchange.config, sessions=sessions
    )
    return HTMLResponse(page)

  def _find_session(self, request: Request) -> Session:
    """Find the session whose id is in the path. Raises Refusal if there is none."""
    session = self.exchange.sessions.find(request.path_params["id"])
    if session is None:
      raise Refusal(404, "No session has this id. Check the URL.", code="not_found")
    return session


def write_empty_answer() -> dict:
  """Write the answer without text for a client whose caps allow no further call.

  Clients that send x-baar-on-exhausted: partial get this answer in place of an error.
  """
  message = dict(role="assistant", content="")
  return dict(
    id="exhausted",
    object="chat.completion",
    created=int(time.time()),
    model=NAME,
    choices=[dict(index=0, message=message, finish_reason="length")],
    usage=dict(cost=0.0, prompt_tokens=0, completion_tokens=0, total_tokens=0),
  )


def make_response(fields: dict, body: dict, headers: dict[str, str]) -> Response:
  """Make the response that carries a whole answer.

  If the client asked for a stream, the answer is sent as a stream of one chunk.

  Args:
    fields: the chat completion.
    body: the body of the client's call.
    headers: the headers of the response.
  """
  # JSON escapes all characters beyond ASCII here, because a model's text may end with
  # half a surrogate pair, which UTF-8 cannot encode.
  content = json.dumps(fields)
  if not body.get("stream"):
    return Response(content, headers=headers, media_type="application/json")
  choices = [dict(choice, delta=choice.get("message")) for choice in fields["choices"]]
  chunk = dict(fields, object="chat.completion.chunk", choices=choices)
  content = write_event(chunk) + write_event("[DONE]")
  return Response(content, headers=headers, media_type=EVENT_STREAM)


def write_event(data: dict | str) -> bytes:
  """Write one server-sent event. Its data is the text, or the JSON of the dict."""
  text = data if isinstance(data, str) else json.dumps(data)
  return f"data: {text}\n\n".encode()
