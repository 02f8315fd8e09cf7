"""Stage serve: an endpoint of chat completions that routes an agent's calls."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from baar_jax.config import SERVED
from baar_jax.rollout.turn import Policy
from baar_jax.run import Run
from baar_jax.serve.request import ROUTER, SAMPLE
from baar_jax.store import read_run
from baar_jax.train import families
from baar_jax.train.families import Loader, open_router
from baar_jax.train.training import RouterFiles

if TYPE_CHECKING:  # only a server imports what it needs
  from baar_jax.serve.app import App

GRACE_S = 5  # for calls in flight after a Ctrl-C; others count at their worst case


def main(run: Run) -> None:
  """Serve until it is interrupted. Raises ValueError if it cannot be served."""
  c = run.config.serve
  app = build(run)
  app.exchange.compile()
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


def open_policies(files: RouterFiles) -> dict[str, Policy]:
  """Open the policies that clients can name, with the configured one.

  Raises:
    ValueError: it is a router, and there is none.
  """
  config = files.config
  c = config.serve
  loader = Loader(files, c.max_sessions)
  named = {}
  for name, spec in families.served_specs(config).items():
    named[name] = loader.build(spec)
  if c.policy in (ROUTER, SAMPLE):
    source = find_router_files(files)
    named[c.policy] = open_router(source, c.max_sessions, c.policy == SAMPLE)
  return named


def find_router_files(files: RouterFiles) -> RouterFiles:
  """Return the files of the configured router: this run's, or those of another run.

  Raises:
    ValueError: there is none, or it routes between another number of models.
  """
  config = files.config
  router = config.serve.router
  if router:
    source = Path(router)
    files = RouterFiles(source, read_run(source), files.mesh)
  count = len(files.config.models.names)
  if count != len(config.models.names):
    problem = f"--config.serve.router={router} routes between {count} models"
    raise ValueError(f"{problem}; name as many to be served")
  if not files.tokenizer.exists():
    problem = f"{files.directory} has no trained router"
    remedy = "set --config.serve.router to a run that has one"
    raise ValueError(f"{problem}: {remedy}, or --config.serve.policy=small")
  return files


def build(run: Run) -> "App":
  """Build a run's application. Raises ValueError if it lacks a router, price or key."""
  from baar_jax.serve.app import LOCAL, App
  from baar_jax.serve.exchange import Exchange
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
  sessions = Sessions(run.dir / "episodes.sqlite", run.budget)
  return App(Exchange(config, run.store, sessions, policies), key)
