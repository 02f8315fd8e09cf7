"""Stage serve: an endpoint of OpenAI's chat completions that routes an agent's calls."""

import os
import socket

from starlette.applications import Starlette

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
