"""The errors of the endpoint, of `Router`, and of the import of traces."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from absl import flags
from endpoint import ASK, Client
from recorded import atif, chat, load
from starlette.requests import Request

from baar_jax import Router
from baar_jax.episode import Step
from baar_jax.rollout.budget import DollarBudget
from baar_jax.rollout.policy import Policy
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_serve import __main__ as serve
from baar_serve import config as serve_config
from baar_serve import traces
from baar_serve.app import App
from baar_serve.forms import FORMS
from baar_serve.request import (
  ClientKey,
  read_history,
)
from baar_serve.routed import RoutedCall

# No model answers at this address.
MODELS = SimpleNamespace(url="http://127.0.0.1:9/v1")
ROUTERS = {"names": ("a", "b", "c"), "prices": ((1.0, 0.5, 2.0),) * 3}


def command(tmp: Path, *arguments: str) -> None:
  """Read a command line, and serve what it configures."""

  def refuse(error: Exception) -> None:
    raise error

  argv = ["baar-serve", *arguments, f"--config.runs={tmp}", "--config.port=0"]
  argv.append("--config.models.base_urls=('http://127.0.0.1:9/v1',)")
  # A command prints its error and returns an exit code; here it raises the error.
  with mock.patch.object(serve_config, "fail", refuse):
    serve_config.do(serve.serve, serve_config.parse(argv, flags.FlagValues()))


def use(act: Callable[[Client], object], **settings: object) -> Callable:
  """Make a case that acts on an endpoint and its run."""

  def case(tmp: Path) -> None:
    client = Client(tmp, MODELS, **settings)
    with contextlib.closing(client.run):
      act(client)

  return case


def make_request() -> Request:
  """Make a request of JSON."""
  headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
  message = {"type": "http.request", "body": b"{}"}
  scope = dict(type="http", path="/", headers=headers)
  return Request(scope, mock.AsyncMock(return_value=message))


def read_messages(tmp: Path, value: object, path: str) -> None:
  """Read the messages of a call."""
  form = FORMS[path]
  read_history({form.history: value}, form)


def decide(client: Client) -> RoutedCall:
  """Decide a call of the session "s"."""
  return asyncio.run(client.exchange.decide(client.receive()))


def decide_beside_another_session(client: Client) -> None:
  sessions = client.exchange.sessions
  sessions._run_budgets = [DollarBudget(1.0)]
  other = sessions.open_purse("", "other", Cap())
  sessions.begin(other, None, Step("", 0, ""), 1.0)
  decide(client)


def score_while_deciding(client: Client) -> None:
  call = client.receive()
  call.conversation.score = 1.0
  asyncio.run(client.exchange.decide(call))


def score_before_the_retry(client: Client) -> None:
  routed = decide(client)
  routed.call.conversation.score = 1.0
  with mock.patch("baar_jax.llms.provider.BACKOFF_S", 0.01):
    asyncio.run(routed.ask(1))


def handle_request(handle: Callable) -> Callable:
  """Make a case in which the application handles a request."""

  def act(client: Client) -> None:
    asyncio.run(handle(client.http.app, make_request(), ClientKey()))

  return use(act)


def serve_a_router_of_three(tmp: Path) -> None:
  use(bool, name="three", models=ROUTERS)(tmp)
  use(bool, policy="router", router=str(tmp / "three"))(tmp)


def decide_alone(**arguments: float) -> None:
  router = Router(Policy(PolicySpec("p")), ("small", "large"), 9, sessions=1)
  router.decide(ASK, **arguments)


CASES = [
  (
    "Only an operator's key may do this. Ask the operator.",
    handle_request(App._change_session),
  ),
  (
    "This server refuses speed, ... Leave it out, and send all messages.",
    lambda tmp: read_history({"speed": "fast"}, FORMS["messages"]),
  ),
  (
    "This server has no WebSockets. Send POST /v1/responses.",
    handle_request(App._refuse_socket),
  ),
  (
    "The task was scored during this call. Send the call of the next task.",
    use(score_while_deciding),
  ),
  (
    "Calls in flight reserve what is left of a cap. Send the call again.",
    use(decide_beside_another_session, models={"timeout_s": 0.01}),
  ),
  (
    "--config.router=TMP/three ... Set --config.models.names to 3 models.",
    serve_a_router_of_three,
  ),
  (
    "TMP/endpoint has no trained router. Set --config.router ... --config.policy=small.",
    command,
  ),
  (
    "Serving at 0.0.0.0 needs a key, ... Set --config.keys ...",
    command,
    "--config.policy=small",
    "--config.host=0.0.0.0",
  ),
  (
    "Cannot read the keys: ... Correct TMP/none.",
    lambda tmp: serve.read_keys(tmp / "none"),
  ),
  (
    "Set --config.traces to the file that is to be read.",
    lambda tmp: traces.load_file(serve_config.ServeConfig(runs=str(tmp))),
  ),
  (
    "--config.models.context_tokens must be () or a value for each of the names",
    command,
    "--config.models.context_tokens=(1,)",
  ),
  (
    "--config.models.forms must be one value, or a value for each of the names",
    command,
    "--config.models.forms=('messages','messages','messages')",
  ),
  (
    "TMP/served/traces.jsonl, line 1: ... (call 1 must end with assistant message 1). No "
    "session was imported. Correct ...",
    use(lambda client: load(client.run, [*chat()][1:])),
  ),
  (
    "Session 'a' has the model 'other'. Set --config.models.names to the models of ...",
    use(lambda client: load(client.run, chat(model="other"))),
  ),
  (
    "Session 'b' has the score None, not one from 0 to 1. Set --config.scores.",
    use(lambda client: load(client.run, [atif(extra={})])),
  ),
  (
    "left_usd or left_large_calls is negative. Pass 0 or more.",
    lambda tmp: decide_alone(left_usd=-1.0),
  ),
  (
    "The model small ... Send the call again. ... check --config.models of this server.",
    use(score_before_the_retry),
  ),
  ("The score is 2. Pass a number in [0, 1].", lambda tmp: decide_alone(score=2)),
]
# Rows: the path of a wire form, its messages, and the problem.
WRONG = [
  ("chat/completions", [], "messages must have at least one message"),
  ("chat/completions", [{"content": 7}], "content must be a list of JSON objects"),
  ("chat/completions", [{"content": "x"}], "a text is missing, or is not a text"),
  ("chat/completions", [{"content": "\ud83d"}], "'utf-8' codec can't encode ..."),
  (
    "chat/completions",
    [{"tool_calls": [{"function": 1}]}],
    "tool_calls must have the function as a JSON object",
  ),
]
for path, value, problem in WRONG:
  message = f"Correct the field {FORMS[path].history}: {problem}."
  CASES.append((message, read_messages, value, path))
