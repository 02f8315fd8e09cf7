"""Answer clients' HTTP requests: calls of models, scores, and pages."""

import asyncio
import contextlib
import functools
import hashlib
import json
import re
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import jinja2
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from baar_jax.llms.history import bound_tokens
from baar_jax.llms.prices import CHARS_PER_TOKEN
from baar_jax.rollout.specs import Cap
from baar_serve.call import ClientCall
from baar_serve.desk import NAME, Desk
from baar_serve.exchange import Exchange
from baar_serve.forms import FORMS, chat_completions, messages, responses
from baar_serve.forms.wire import WireForm
from baar_serve.records import Purse
from baar_serve.request import (
  Caps,
  ClientKey,
  Refusal,
  SessionScore,
  read_body,
)

# Most sessions in a list.
MOST_SESSIONS = 100
# Names of this machine itself. A server that listens on one of these hosts needs no
# key.
LOCAL_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.IGNORECASE)
REPORT = Path(__file__).parents[1] / "baar_jax" / "report"
JINJA = jinja2.Environment(
  loader=jinja2.FileSystemLoader((Path(__file__).parent, REPORT)), autoescape=True
)
PAGE = JINJA.get_template("sessions.html.j2")


class App(Router):
  """The ASGI application of the endpoint: it answers clients by an `Exchange`."""

  def __init__(
    self,
    exchange: Exchange,
    keys: Sequence[ClientKey],
  ):
    """Set up the routes of an exchange.

    Args:
      keys: the keys that clients may send; without any, clients need no key.
    """
    self.exchange = exchange
    self._keys = {key.sha256: key for key in keys}
    self.desk = Desk(exchange.config, exchange.sessions, exchange.deciders)
    # The page's totals read the whole ledger, so this happens once a minute.
    self._list_totals = functools.lru_cache(self.desk.list_totals)
    table = {}
    # The routes are tried in this order.
    for path, form in FORMS.items():
      table[f"POST /v1/{path}"] = functools.partial(self._answer_call, form)
    table |= {
      "GET /v1/models": self._list_models,
      "GET /v1/responses": self._refuse_socket,
      "POST /v1/messages/count_tokens": self._count_tokens,
      "GET /v1/sessions": self._list_sessions,
      "POST /v1/sessions/{id:path}/score": self._score_session,
      "GET /v1/sessions/{id:path}": self._show_session,
      "PATCH /v1/sessions/{id:path}": self._change_session,
      "GET /": self._show_page,
      "GET /sessions/{id:path}": self._show_page,
    }
    routes = []
    for method_and_path, handle in table.items():
      method, path = method_and_path.split()
      # For clients that can only set a URL: NAME is the session's name.
      for prefix in ("", "/s/{session}"):
        routes.append(Route(prefix + path, self._guard(handle), methods=[method]))
    routes.append(Route("/health", lambda request: JSONResponse({"status": "ok"})))
    super().__init__(routes=routes, lifespan=self._live)

  @contextlib.asynccontextmanager
  async def _live(self, app: ASGIApp) -> AsyncIterator[None]:
    """End what is being made when the server ends."""
    yield
    await self.exchange.close()

  def _guard(
    self, handle: Callable[[Request, ClientKey], Awaitable[ASGIApp]]
  ) -> Callable[[Request], Awaitable[ASGIApp]]:
    """Return a function that checks the client's key before it calls `handle`.

    The function `handle` answers the requests of one route (a method and a path).
    If `handle` raises an exception, the client gets an error in the form that it
    speaks.
    """

    async def answer(request: Request) -> ASGIApp:
      """Check the client's key, and answer the request or its error."""
      try:
        return await handle(request, self._check_client(request))
      except Refusal as error:
        refusal = error
      except sqlite3.OperationalError as error:
        refusal = Refusal(
          503,
          f"The server cannot write its ledger ({error}). Free disk space there, and "
          "send the call again.",
          "server_error",
        )
      except (responses.UnknownItem, RecursionError, ClientDisconnect) as error:
        refusal = Refusal(400, str(error))
      except Exception as bug:  # The request is private, so it is not printed.
        kind = type(bug).__name__
        print(f"error: {kind} in {request.url.path}", file=sys.stderr)
        refusal = Refusal(
          500,
          f"This server has a bug ({kind}). Report it to its operator.",
          "server_error",
        )
      return respond_error(refusal, request)

    return answer

  def _check_client(self, request: Request) -> ClientKey:
    """Find the key that a client has sent.

    Raises:
      Refusal: the client's key is wrong, or the server has no key and the client's URL
        has another host than those of LOCAL_HOST.
    """
    if not self._keys:
      if not LOCAL_HOST.fullmatch(",".join(request.headers.getlist("host"))):
        # A web page of another site may point its host name at this machine, and so
        # call this server from the user's browser (DNS rebinding).
        raise Refusal(403, "This server has no key, so call it as localhost.")
      return ClientKey(operator=True)
    for name in ("authorization", "x-api-key"):
      sent = re.sub("^bearer ", "", request.headers.get(name, ""), flags=re.IGNORECASE)
      digest = hashlib.sha256(sent.encode()).hexdigest()
      # The time of this comparison tells nothing of the key, only of its hash.
      if digest in self._keys:
        return self._keys[digest]
    raise Refusal(
      401,
      "Wrong or missing key. Send 'Authorization: Bearer KEY' with your key.",
      code="invalid_api_key",
    )

  async def _answer_call(
    self, form: WireForm, request: Request, key: ClientKey
  ) -> Response:
    """Answer a call in its wire form: choose a model, call it, and book the cost."""
    call = ClientCall(
      key,
      form,
      request.headers,
      await read_body(request),
      request.path_params.get("session"),
      request.url.query,
    )
    if form is responses.FORM:
      self.exchange.items.resolve(key.name, call.body)
    delivery = self.exchange.deliver(call, self.desk.receive)
    # After the body, the next message is that the client has left.
    leaving = asyncio.ensure_future(request.receive())
    leaving.add_done_callback(delivery.drop)
    try:
      # If a client leaves, this task is cancelled, and the answer must go on.
      fields, headers = await asyncio.shield(delivery.begun)
    finally:
      leaving.cancel()
    if not fields:
      return StreamingResponse(
        delivery.follow(), headers=headers, media_type="text/event-stream"
      )
    # JSON escapes all characters beyond ASCII here, because a model's text may end with
    # half a surrogate pair, which UTF-8 cannot encode.
    content = json.dumps(fields)
    return Response(content, headers=headers, media_type="application/json")

  async def _count_tokens(self, request: Request, key: ClientKey) -> Response:
    """Estimate the tokens of a call of Messages. It costs nothing."""
    tokens = bound_tokens(await read_body(request)) // CHARS_PER_TOKEN
    return JSONResponse({"input_tokens": tokens})

  async def _score_session(self, request: Request, key: ClientKey) -> Response:
    """End a session's task with its score, and respond with its caps and dollars."""
    purse = self._find_purse(request, key)
    self.exchange.score(purse, SessionScore.read(await read_body(request)))
    return JSONResponse(self.desk.describe(purse))

  async def _show_session(self, request: Request, key: ClientKey) -> Response:
    """Respond with a session's caps, dollars and conversations."""
    return JSONResponse(self.desk.describe(self._find_purse(request, key)))

  async def _change_session(self, request: Request, key: ClientKey) -> Response:
    """Replace the caps of a session that an operator names.

    Raises:
      Refusal: the client is no operator.
    """
    if not key.operator:
      raise Refusal(403, "Only an operator's key may do this. Ask the operator.")
    purse = self._find_purse(request, key)
    old = dict(max_usd=purse.cap.usd, max_large_calls=purse.cap.calls)
    new = Caps.read(old | await read_body(request))
    self.exchange.sessions.change_caps(purse, Cap(new.max_large_calls, new.max_usd))
    await self.exchange.sessions.reach_disk()
    return JSONResponse(self.desk.describe(purse))

  async def _list_sessions(self, request: Request, key: ClientKey) -> Response:
    """Respond with the client's sessions, the newest first."""
    purses = self._list_newest(request, key)
    return JSONResponse(dict(object="list", data=[*map(self.desk.describe, purses)]))

  def _list_newest(self, request: Request, key: ClientKey) -> list[Purse]:
    """List the client's newest sessions, perhaps those with a part of a name."""
    condition = (
      "client = ifnull(?, client) AND instr(name, ?) > 0 "
      "ORDER BY changed_s DESC LIMIT ?"
    )
    values = (find_client(request, key), request.query_params.get("name", ""))
    return self.exchange.sessions.list_purses(condition, *values, MOST_SESSIONS)

  async def _list_models(self, request: Request, key: ClientKey) -> Response:
    """Respond with the model names that clients may send, in all forms at once."""
    # Claude Code lists only names that begin like the first one, which is an alias.
    names = [f"claude-{NAME}", *self.desk.policies]
    models = []
    for name in names:
      models.append(
        dict(
          id=name,
          object="model",
          created=0,
          owned_by=NAME,
          type="model",
          display_name=name,
        )
      )
    return JSONResponse(dict(object="list", data=models, has_more=False))

  async def _refuse_socket(self, request: Request, key: ClientKey) -> Response:
    """Refuse a WebSocket, so that Codex sends its calls as requests at once."""
    raise Refusal(426, "This server has no WebSockets. Send POST /v1/responses.")

  async def _show_page(self, request: Request, key: ClientKey) -> Response:
    """Respond with the HTML page of the newest sessions, or of the one in the path."""
    exchange = self.exchange
    if "id" in request.path_params:
      purse = self._find_purse(request, key)
      fields = dict(session=self.desk.describe(purse, has_texts=True))
    else:
      minute = time.time() // 60
      fields = dict(
        totals=self._list_totals(find_client(request, key), minute),
        changes=sum((found.list_changes() for found in exchange.upstreams), []),
        rows=[*map(self.desk.summarize, self._list_newest(request, key))],
      )
    page = PAGE.render(
      fields,
      config=exchange.config,
      query=request.query_params,
      format_time=lambda s: time.strftime("%F %T", time.localtime(s)),
    )
    return HTMLResponse(page)

  def _find_purse(self, request: Request, key: ClientKey) -> Purse:
    """Find the client's session in the path; an operator may name the client.

    Raises:
      Refusal: there is none.
    """
    client = find_client(request, key)
    purse = self.exchange.sessions.find_purse(client, request.path_params["id"])
    if purse is None:
      raise Refusal(404, "No session has this id. Check the URL.", code="not_found")
    return purse


def find_client(request: Request, key: ClientKey) -> str | None:
  """Return the name of the client whose sessions are asked for; None is all."""
  return request.query_params.get("client") if key.operator else key.name


def respond_error(refusal: Refusal, request: Request) -> Response:
  """Make the response to a refused request, in the form that the client speaks."""
  form = chat_completions.FORM
  if "/v1/messages" in request.url.path or "anthropic-version" in request.headers:
    form = messages.FORM
  # OpenAI's clients repeat some refused calls by themselves, such as those with status
  # 409 or 429. This header stops them, because the same call would be refused again.
  headers = dict(refusal.headers)
  if refusal.status < 500:
    headers.setdefault("x-should-retry", "false")
  return JSONResponse(form.write_error(refusal.error), refusal.status, headers)
