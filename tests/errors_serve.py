"""The errors of the endpoint, of `Router`, and of the import of traces."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import tiny
from starlette.requests import Request
from starlette.testclient import TestClient
from test_serve import ASK, Client
from test_served import USAGE, atif, chat, load

from baar_jax import Router
from baar_jax.rollout.rules import Policy
from baar_jax.rollout.specs import PolicySpec
from baar_jax.run import Run
from baar_jax.serve.app import App, RouteHandler
from baar_jax.serve.exchange import Exchange
from baar_jax.serve.request import SessionScore, read_body, read_messages
from baar_jax.serve.routed import RoutedCall
from baar_jax.stages import import_traces, serve

# No model answers at this address.
MODELS = SimpleNamespace(url="http://127.0.0.1:9/v1")
ROUTERS = {"names": ("a", "b", "c"), "prices": ((1.0, 0.5, 2.0),) * 3}


def use_run(act: Callable[[Run], object], **settings: object) -> Callable:
  """Make a case that acts on a served run."""

  def case(tmp: Path) -> None:
    client = Client(tmp, MODELS, **settings)
    with contextlib.closing(client.run) as run:
      act(run)

  return case


def use_app(act: Callable[[App], object], **settings: object) -> Callable:
  """Make a case that acts on a run's application."""
  return use_run(lambda run: act(serve.build(run)), **settings)


def make_request(host: str = "127.0.0.1", body: str = "", **headers: str) -> Request:
  """Make a request with a body, for the session "s"."""
  fields = {"host": host} | {name.replace("_", "-"): headers[name] for name in headers}
  pairs = [(name.encode(), value.encode()) for name, value in fields.items()]
  scope = {"type": "http", "path": "/", "headers": pairs, "path_params": {"id": "s"}}

  async def receive() -> dict:
    return {"type": "http.request", "body": body.encode()}

  return Request(scope, receive)


def read(body: str, kind: str = "application/json") -> None:
  """Read a request's body of at most half a MiB."""
  asyncio.run(read_body(make_request(body=body, content_type=kind), 0.5))


def receive(exchange: Exchange, model: str = "baar"):
  """Send a call of the session "s" to an exchange."""
  body = {"model": model, "messages": ASK}
  return exchange.receive({"x-session-id": "s"}, body)


def decide(app: App) -> RoutedCall:
  """Decide a call of the session "s"."""
  return asyncio.run(app.exchange.decide(receive(app.exchange)))


def begin_with_another_model(app: App) -> None:
  for model in ("baar:small", "baar:large"):
    receive(app.exchange, model)


def score_while_deciding(app: App) -> None:
  call = receive(app.exchange)
  call.session.score = 1.0
  asyncio.run(app.exchange.decide(call))


def report_without_usage(app: App) -> None:
  number = app.exchange.reserve_reported(decide(app))
  app.exchange.book_report(number, {})


def score_without_a_call(app: App) -> None:
  app.exchange.finish(receive(app.exchange).session, SessionScore(score=1.0))


def call_no_model(app: App) -> None:
  routed = decide(app)
  asyncio.run(app.exchange.forward(routed))


def score_before_the_retry(app: App) -> None:
  routed = decide(app)
  routed.session.score = 1.0
  with mock.patch("baar_jax.llms.wire.BACKOFF_S", 0.01):
    asyncio.run(app.exchange.forward(routed))


def raise_answer(app: App, handle: RouteHandler, request: Request) -> None:
  """Raise the message of the error that a route's client gets."""
  response = asyncio.run(app._guard(handle)(request))
  raise ValueError(json.loads(response.body)["error"]["message"])


def send_to_no_route(app: App) -> None:
  answer = TestClient(app, "http://127.0.0.1").get("/nowhere")
  raise ValueError(answer.json()["error"]["message"])


def close_the_connection(app: App) -> None:
  async def receive() -> dict:
    return {"type": "http.disconnect"}

  scope = make_request(content_type="application/json").scope
  raise_answer(app, app._with_body(app._chat), Request(scope, receive))


def reach_a_bug(app: App) -> None:
  async def handle(request: Request) -> None:
    raise KeyError("a private text")

  raise_answer(app, handle, make_request())


def listen_on_a_used_port(run: Run) -> None:
  with socket.create_server(("127.0.0.1", 0)) as listener:
    run.config.serve.port = listener.getsockname()[1]
    serve.main(run)


def serve_a_router_of_three(tmp: Path) -> None:
  use_run(lambda run: None, name="three", models=ROUTERS)(tmp)
  use_run(lambda run: None, policy="router", router=str(tmp / "three"))(tmp)


def serve_games(tmp: Path) -> None:
  with contextlib.closing(Run(tiny.config(tmp))) as run:
    serve.build(run)


def import_lines(problem: str, *records: object) -> tuple[str, Callable]:
  """Make the row of a file that cannot be imported."""
  end = "No session was imported. Correct the file (docs/serving_reference.md), and"
  message = f"TMP/served/traces.jsonl, {problem}. {end} import it again."
  return message, use_run(lambda run: load(run, records))


def decide_alone(tmp: Path, **arguments: float) -> None:
  router = Router(Policy(PolicySpec("p")), ("small", "large"), 9, sessions=1)
  router.decide(ASK, **arguments)


CASES = [
  (
    "Wrong or missing key. Send 'Authorization: Bearer KEY' with this server's key.",
    # Any variable that is set can hold the key.
    use_app(lambda app: app._check_client(make_request()), key_variable="PATH"),
  ),
  (
    "This server has no key, so call it as 127.0.0.1 or localhost or ::1.",
    use_app(lambda app: app._check_client(make_request("other.example"))),
  ),
  (
    "No session has this id. Check the URL.",
    use_app(lambda app: app._find_session(make_request())),
  ),
  (
    "Unknown path or method. This server answers POST /v1/chat/completions, ..., "
    "GET /health.",
    use_app(send_to_no_route),
  ),
  (
    "The client closed the connection. Send the call again.",
    use_app(close_the_connection),
  ),
  (
    "This server has a bug (KeyError). Report it to its operator.",
    use_app(reach_a_bug),
  ),
  (
    "Send the body as JSON, with content-type: application/json.",
    lambda tmp: read("{}", "text/plain"),
  ),
  (
    "The body exceeds --config.serve.max_body_mb=0.5. Send a smaller body, or raise "
    "this limit.",
    lambda tmp: read("a" * 2**20),
  ),
  ("The body cannot be read. Send a JSON object.", lambda tmp: read("[]")),
  (
    "Correct the field score: Input should be less than or equal to 1",
    lambda tmp: SessionScore.read({"score": 2.0}),
  ),
  (
    "Correct the field messages.0.role: Field required",
    lambda tmp: read_messages([{"content": "Hello"}]),
  ),
  (
    "Unknown model. Send one of these: baar, baar:small, ...",
    use_app(lambda app: receive(app.exchange, "gpt-4.1")),
  ),
  (
    "Session s is scored already, or began with another model or cap. Send a new "
    "x-session-id to begin another one.",
    use_app(begin_with_another_model),
  ),
  (
    "Session s is scored already. Send a new x-session-id to begin another one.",
    use_app(score_while_deciding),
  ),
  (
    "No decision with this decision_id waits for a report. Send the decision_id that "
    "/v1/decision answered, and report each decision once.",
    use_app(lambda app: app.exchange.book_report(1, {})),
  ),
  (
    "The report's usage is incomplete. Send the field usage with prompt_tokens and "
    "completion_tokens.",
    use_app(report_without_usage),
  ),
  (
    "This session is scored already, has had no call, or has a call in flight. Score "
    "it once, after the answer to its last call.",
    use_app(score_without_a_call),
  ),
  (
    "This session has cost $0.000000; a call may cost $.... That exceeds the "
    "session's cap, or the rest of --config.max_usd for all sessions. End the task "
    "without a further call.",
    use_app(decide, max_usd=0.0),
  ),
  (
    "The model small ... Send the call again. If this error repeats, check "
    "--config.models of this server.",
    use_app(call_no_model, models={"retries": 0}),
  ),
  (
    "The model small ... Send the call again. If this error repeats, check "
    "--config.models of this server.",
    use_app(score_before_the_retry),
  ),
  (
    "Cannot listen on 127.0.0.1:... (Address already in use...). Set another "
    "--config.serve.port or --config.serve.host.",
    use_run(listen_on_a_used_port),
  ),
  (
    "--config.serve.router=TMP/three routes between 3 models. Set "
    "--config.models.names to 3 models.",
    serve_a_router_of_three,
  ),
  (
    "TMP/served has no trained router. Set --config.serve.router to the directory of a "
    "run that has one, or set --config.serve.policy=small.",
    use_run(lambda run: None, policy="router"),
  ),
  (
    "Serving at 0.0.0.0 needs a key, which clients must send. Set "
    "--config.serve.key_variable to the name of a variable that holds the key.",
    use_run(lambda run: None, host="0.0.0.0"),
  ),
  (
    "--stage=serve needs a served run. Set --config.env.kind=served.",
    serve_games,
  ),
  (
    "--stage=import needs a served run and a file. Set --config.env.kind=served and "
    "--config.traces=FILE.",
    use_run(import_traces.main),
  ),
  import_lines(
    "line 1: the record lacks a field, or its format is unknown ('session')", {}
  ),
  import_lines(
    "line 1: total_prompt_tokens is 201, but the steps add up to 200",
    atif(final_metrics={"total_prompt_tokens": 201}),
  ),
  import_lines(
    "session 'a': call 1 must end with assistant message 1",
    *[*chat()][1:],
  ),
  import_lines(
    "session 'a': --config.models.names lacks the model 'other'",
    *chat(model="other"),
  ),
  import_lines(
    "session 'a': ...disagree...", *chat(usage=USAGE | {"cached_tokens": 101})
  ),
  import_lines("session 'b': Correct the field score: Field required", atif(extra={})),
  (
    "left_usd or left_large_calls is negative. Pass 0 or more.",
    partial(decide_alone, left_usd=-1.0),
  ),
  ("The score is 2. Pass a number in [0, 1].", partial(decide_alone, score=2)),
]
