"""Stage serve: an endpoint of OpenAI's chat completions that routes an agent's calls."""

import os
import socket

from baar_jax.config import SERVED
from baar_jax.router.policy import RouterPolicy
from baar_jax.run import Run

GRACE_S = 5  # for calls in flight after a Ctrl-C; others count at their worst case


def main(run: Run) -> None:
  """Serve until it is interrupted. Raises ValueError if it cannot be served."""
  c = run.config.serve
  app = build(run)
  for decider in app.exchange.deciders.values():
    if isinstance(decider.policy, RouterPolicy):
      decider.policy.compile()
  import uvicorn  # only a server needs it

  family = socket.AF_INET6 if ":" in c.host else socket.AF_INET
  try:
    listener = socket.create_server((c.host, c.port), family=family)
  except OSError as error:
    problem = f"cannot listen on {c.host}:{c.port} ({error.strerror})"
    raise ValueError(problem) from None
  with listener:
    address = f"http://{c.host}:{listener.getsockname()[1]}"
    run.print(f"serving {c.policy} at {address}/v1; its page is {address}/")
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S)
    uvicorn.Server(config).run(sockets=[listener])


def build(run: Run) -> "App":  # noqa: F821
  """Build a run's application. Raises ValueError if it lacks a router, price or key."""
  from baar_jax.serve.app import LOCAL, App
  from baar_jax.serve.exchange import Exchange
  from baar_jax.serve.router import open_policies
  from baar_jax.serve.sessions import Sessions

  config = run.config
  c = config.serve
  key = os.environ.get(c.key_variable, "").strip()
  if not key and (c.key_variable or c.host not in LOCAL):
    variable = "--config.serve.key_variable to an environment variable"
    problem = f"to be asked at {c.host}, set {variable}"
    raise ValueError(f"{problem} that holds the clients' key")
  if config.env.kind != SERVED:  # whose models are of kind chat
    raise ValueError("--stage=serve needs --config.env.kind=served")
  policies = open_policies(run.training())
  sessions = Sessions(run.dir / "episodes.sqlite", config, run.store, run.budget)
  return App(Exchange(config, sessions, policies), key)
