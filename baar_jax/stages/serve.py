"""Stage serve: an endpoint of OpenAI's chat completions that routes each call of an agent."""

import os
import socket

from baar_jax.config import SERVED
from baar_jax.rollout.served import add_sessions
from baar_jax.router.policy import RouterPolicy
from baar_jax.run import Run

GRACE_S = 5  # of calls in flight after a Ctrl-C; the rest counts at its most


def main(run: Run) -> None:
  """Serves until it is interrupted. Raises ValueError where it cannot be served."""
  c = run.config.serve
  app = build(run)
  for decider in app.state.exchange.deciders.values():
    if isinstance(decider.policy, RouterPolicy):
      decider.policy.compile()
  import uvicorn  # only a server needs it

  with socket.socket(socket.AF_INET6 if ":" in c.host else socket.AF_INET) as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      listener.bind((c.host, c.port))
    except OSError as error:
      raise ValueError(f"cannot listen on {c.host}:{c.port} ({error.strerror})") from None
    port = listener.getsockname()[1]
    run.print(
      f"serving {c.policy} at http://{c.host}:{port}/v1; its page is http://{c.host}:{port}/"
    )
    uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S)).run(
      sockets=[listener]
    )


def build(run: Run):
  """The ASGI application of a run. Raises ValueError where it lacks a router, a price or a key."""
  from baar_jax.serve.app import LOCAL, App
  from baar_jax.serve.batching import Decider
  from baar_jax.serve.decide import open_policies
  from baar_jax.serve.exchange import Exchange
  from baar_jax.serve.sessions import Sessions
  from baar_jax.serve.upstream import Upstream

  config, c = run.config, run.config.serve
  key = os.environ.get(c.key_variable, "").strip() if c.key_variable else ""
  if c.key_variable and not key:
    raise ValueError("--config.serve.key_variable names an environment variable without a key")
  if c.host not in LOCAL and not key:
    problem = f"--config.serve.host={c.host} is open to others: set --config.serve.key_variable to"
    raise ValueError(f"{problem} an environment variable that holds the clients' key")
  if config.models.kind != "chat":
    raise ValueError("--stage=serve needs endpoints: set --config.models.kind=chat")
  upstreams = [Upstream(config.models, place) for place in range(len(config.models.names))]
  served = config.env.kind == SERVED  # the tasks of other runs are fixed

  def keep(mark: str, *scored) -> None:
    if served and not run.store.finished(mark):
      add_sessions(run.store, config, [scored], [mark])

  sessions = Sessions(run.dir / "episodes.sqlite", config, run.budget, keep)
  policies = open_policies(run.dir, config, run.mesh)
  deciders = {rule: Decider(policy, c.max_sessions) for rule, policy in policies.items()}
  return App(Exchange(config, sessions, upstreams, deciders), key).build()
