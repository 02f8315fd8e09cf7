"""The HTTP face: OpenAI's chat completions, decisions, sessions and their scores, and a page."""

import asyncio
import functools
import hmac
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import jinja2
import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from baar_jax.llms.client import LOST, Stream
from baar_jax.llms.wire import explain
from baar_jax.serve.exchange import EXHAUSTED, NAME, Exchange
from baar_jax.serve.request import Refusal, Scored, read_body
from baar_jax.serve.sessions import Session, Turn
from baar_jax.serve.upstream import Upstream

SHOWN_SESSIONS, STREAM = 100, "text/event-stream"
LOCAL = ("127.0.0.1", "localhost", "::1")  # hosts that need no key
FILES = Path(__file__).parent, Path(__file__).parents[1] / "report"


class App(Starlette):
  """The routes of one server, as an ASGI application."""

  def __init__(self, exchange: Exchange, key: str):
    """With a `key`, clients must send it as a bearer; "" is none."""
    self.exchange, self._key = exchange, key
    self._most_mb = exchange.config.serve.max_body_mb
    self._closing: set[asyncio.Future] = set()  # streams of upstreams
    jinja = jinja2.Environment(loader=jinja2.FileSystemLoader(FILES), autoescape=True)
    self._page = jinja.get_template("sessions.html.j2")
    table = {
      "/v1/chat/completions": ("POST", self._chat),
      "/v1/decision": ("POST", self._decide),
      "/v1/models": ("GET", self._list_models),
      "/v1/sessions/{id:path}/score": ("POST", self._score),
      "/v1/sessions/{id:path}": ("GET", self._show_session),
      "/metrics": ("GET", self._show_metrics),
      "/": ("GET", self._show_page),
    }
    routes = [Route(path, self._guard(f), methods=[name]) for path, (name, f) in table.items()]
    routes.append(Route("/health", lambda request: JSONResponse({"status": "ok"})))
    names = ", ".join(f"{name} {path.replace(':path', '')}" for path, (name, _) in table.items())

    async def refuse(request: Request, error: HTTPException) -> Response:
      body = Refusal(error.status_code, f"this server answers {names} and GET /health alone").body
      return JSONResponse(body, error.status_code, error.headers)

    super().__init__(routes=routes, exception_handlers={HTTPException: refuse})

  def _guard(self, respond: Callable) -> Callable:
    """The route's function behind the key, with the body of a POST; a refusal becomes an answer."""

    async def answer(request: Request) -> Response:
      try:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self._key and not hmac.compare_digest(sent, self._key.encode()):
          problem = "send this server's key as 'Authorization: Bearer KEY'"
          raise Refusal(401, problem, code="invalid_api_key")
        if not self._key and request.url.hostname not in LOCAL:
          # A page of another site may have made its name one of this machine.
          raise Refusal(403, f"without a key this server is asked as {' or '.join(LOCAL)} alone")
        if request.method == "POST":
          return await respond(request, await read_body(request, self._most_mb))
        return await respond(request)
      except Refusal as error:
        refusal = error
      except ClientDisconnect:
        refusal = Refusal(400, "the client has left")
      except Exception as bug:  # of which nothing of the request is printed
        print(f"error: {type(bug).__name__} in {request.url.path}", file=sys.stderr)
        refusal = Refusal(500, f"a bug: {type(bug).__name__}", "server_error")
      # OpenAI's clients would try again, also where a budget is spent.
      headers = {"x-should-retry": "false"} if refusal.status < 500 else None
      return JSONResponse(refusal.body, refusal.status, headers)

    return answer

  async def _chat(self, request: Request, body: dict) -> Response:
    session, text = self.exchange.open(request.headers, body)
    try:
      turn = await self.exchange.decide(session, body, text)
      answer = await self.exchange.forward(turn)
    except Refusal as refusal:
      partial = request.headers.get("x-baar-on-exhausted") == "partial"
      if not partial or refusal.body["error"]["code"] != EXHAUSTED:
        raise
      message = {"role": "assistant", "content": ""}
      choice = {"index": 0, "message": message, "finish_reason": "length"}
      fields = {"id": "exhausted", "object": "chat.completion", "created": int(time.time())}
      fields |= {"model": NAME, "choices": [choice], "usage": {"cost": 0.0}}
      fields["usage"] |= dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
      return self._send(fields, body, self.exchange.headers(session))
    if isinstance(answer, Stream):
      return functools.partial(self._stream, turn, answer)
    self.exchange.settle(turn, answer)
    usage = answer.get("usage")
    usage = (usage if isinstance(usage, dict) else {}) | {"cost": turn.usd}
    fields = answer | {"model": self._upstream(turn).name, "usage": usage}
    return self._send(fields, body, self.exchange.headers(session, turn))

  def _send(self, fields: dict, body: dict, headers: dict) -> Response:
    """A whole answer, as the one chunk of a stream where the client wants one."""
    if not body.get("stream"):  # in ASCII, for a text may end with half a pair of surrogates
      return Response(json.dumps(fields), headers=headers, media_type="application/json")
    choices = [choice | {"delta": choice.get("message")} for choice in fields["choices"]]
    chunk = fields | {"object": "chat.completion.chunk", "choices": choices}
    content = write_event(chunk) + write_event("[DONE]")
    return Response(content, headers=headers, media_type=STREAM)

  async def _stream(self, turn: Turn, answer: Stream, *connection) -> None:
    """Sends a streamed answer; its end is always told, wherever it stops, also before it begins."""
    headers, chunks = self.exchange.headers(turn.session, turn), self._relay(turn, answer)
    try:
      await StreamingResponse(chunks, headers=headers, media_type=STREAM)(*connection)
    finally:  # its client or its endpoint may have left it
      self.exchange.settle(turn, {}, whole=False)
      closing = asyncio.ensure_future(answer.response.aclose())
      self._closing.add(closing)  # the loop itself holds no task
      closing.add_done_callback(self._closing.discard)

  async def _relay(self, turn: Turn, answer: Stream) -> AsyncIterator[bytes]:
    """The chunks of a streamed answer, each when the next one comes; the last has its dollars."""
    upstream, last, held = self._upstream(turn), {}, {}
    try:
      async for chunk in answer.chunks():
        if isinstance(chunk.get("usage"), dict):
          last = chunk  # some count while they write: only the last count is the bill
        if chunk.get("choices"):
          if held:
            yield write_event(held)
          held = {k: v for k, v in chunk.items() if k != "usage"} | {"model": upstream.name}
    except LOST as failure:
      yield write_event(upstream.refuse(explain(failure)).body)
      return
    self.exchange.settle(turn, last)
    if held and (turn.body.get("stream_options") or {}).get("include_usage"):
      yield write_event(held)
      held = {}
    end = {"model": upstream.name, "usage": last.get("usage", {}) | {"cost": turn.usd}}
    yield write_event((held or last | {"choices": []}) | end)
    yield write_event("[DONE]")

  async def _decide(self, request: Request, body: dict) -> Response:
    """Decides for a caller that calls the model itself, or books what such a call has used."""
    exchange = self.exchange
    if "decision_id" in body:
      return self._report(body)
    session, text = exchange.open(request.headers, body)
    turn = await exchange.decide(session, body, text)
    exchange.sessions.begin(turn)
    exchange.reported[turn.number] = turn
    names = [upstream.name for upstream in exchange.upstreams]
    fields = {"decision_id": turn.number, "session_id": session.id, "model": names[turn.step.model]}
    fields |= {"probabilities": dict(zip(names, turn.p_A)), "p_large": turn.large_p}
    fields |= {"expected_usd": dict(zip(names, exchange.expect_usd(session, body)))}
    fields |= {"left_usd": session.left_usd, "left_large_calls": session.left_large_calls}
    return JSONResponse(fields, headers=exchange.headers(session, turn))

  def _report(self, body: dict) -> Response:
    number = body["decision_id"]
    turn = self.exchange.reported.get(number) if type(number) is int else None
    if turn is None:
      raise Refusal(404, "decision_id is of no decision that is still to be reported")
    if self._upstream(turn).cost(body)[0] is None:
      raise Refusal(400, "usage must have the prompt_tokens and completion_tokens of the reply")
    del self.exchange.reported[number]
    self.exchange.settle(turn, body)
    headers = self.exchange.headers(turn.session, turn)
    return JSONResponse(self.exchange.describe(turn.session), headers=headers)

  async def _score(self, request: Request, body: dict) -> Response:
    session = self._find(request)
    self.exchange.finish(session, Scored.read(body))
    return JSONResponse(self.exchange.describe(session))

  async def _show_session(self, request: Request) -> Response:
    return JSONResponse(self.exchange.describe(self._find(request)))

  async def _list_models(self, request: Request) -> Response:
    model = {"object": "model", "created": 0, "owned_by": NAME}
    caps = [f"{NAME}:K={K}" for K in self.exchange.config.evaluate.call_budgets]
    names = [{"id": name} | model for name in (*self.exchange.policies, *caps)]
    return JSONResponse({"object": "list", "data": names})

  async def _show_metrics(self, request: Request) -> Response:
    registry, labels = prometheus.CollectorRegistry(), ["model", "outcome"]
    calls = prometheus.Counter("baar_calls", "Attempts at calls.", labels, registry=registry)
    usd = prometheus.Counter("baar_usd", "The most that they cost.", labels, registry=registry)
    for model, kind, count, sum_usd in self.exchange.sessions.count():
      calls.labels(self.exchange.upstreams[model].name, kind).inc(count)
      usd.labels(self.exchange.upstreams[model].name, kind).inc(sum_usd)
    text = prometheus.generate_latest(registry)
    return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

  async def _show_page(self, request: Request) -> Response:
    sessions = map(self.exchange.describe, self.exchange.sessions.newest(SHOWN_SESSIONS))
    context = {"names": [u.name for u in self.exchange.upstreams], "run": self.exchange.config}
    return HTMLResponse(self._page.render(context, sessions=list(sessions)))

  def _find(self, request: Request) -> Session:
    session = self.exchange.sessions.find(request.path_params["id"])
    if session is None:
      raise Refusal(404, "there is no such session", code="not_found")
    return session

  def _upstream(self, turn: Turn) -> Upstream:
    return self.exchange.upstreams[turn.step.model]


def write_event(data: dict | str) -> bytes:
  text = data if isinstance(data, str) else json.dumps(data)
  return f"data: {text}\n\n".encode()
