"""Serve an endpoint that routes the calls of agents.

python -m baar_serve --config.name=try --config.router=runs/code
"""

import contextlib
import dataclasses
import functools
import gc
import resource
import socket
import tomllib
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from baar_jax.decide import open_router
from baar_jax.families.table import FAMILIES
from baar_jax.rollout.policy import Policy
from baar_jax.run import VOCABULARY, RouterFiles, Run
from baar_jax.store import read_run, require_file
from baar_serve.again import find_candidate
from baar_serve.app import LOCAL_HOST, App
from baar_serve.config import ServeConfig, open_run, run_command
from baar_serve.desk import COLLECT
from baar_serve.episodes import client_specs
from baar_serve.exchange import Exchange
from baar_serve.plan import assign, has_router
from baar_serve.request import ROUTER, ClientKey

# Number of seconds after Ctrl-C in which calls in flight may end. A call that takes
# longer is cancelled, and counts at its worst case.
GRACE_S = 1
# Most open connections of clients; further ones get HTTP 503.
MOST_CONNECTIONS = 2000


def serve(config: ServeConfig) -> None:
  """Serve until Ctrl-C. The server answers once the policies are compiled.

  Raises:
    ValueError: a router, a price or a key is missing, or the server cannot listen at
      the address.
  """
  host = config.host
  with (
    socket.create_server((host, config.port)) as listener,
    contextlib.closing(open_run(config)) as run,
  ):
    address = f"http://{host}:{listener.getsockname()[1]}"
    run.print(f"Starting at {address}: opening and compiling the policies.")
    app = build(config, run)
    server = make_server(app)
    # What is open now stays open. All calls would wait while Python looks for garbage
    # among it.
    gc.collect()
    gc.freeze()
    run.print(
      f"Serving {config.policy} at {address}/v1. {address}/ shows the sessions."
    )
    # A call in flight needs two open files, its client's and its model's connection.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    server.run(sockets=[listener])


def make_server(app: ASGIApp) -> uvicorn.Server:
  """Make the server of an application."""
  config = uvicorn.Config(
    app,
    http="httptools",
    proxy_headers=False,
    access_log=False,
    log_level="warning",
    limit_concurrency=MOST_CONNECTIONS,
    timeout_graceful_shutdown=GRACE_S,
    timeout_keep_alive=120,  # longer than clients keep an idle connection (s)
    ws="none",
  )
  return uvicorn.Server(config)


def open_policies(config: ServeConfig, run: Run) -> dict[str, Policy]:
  """Open and compile the policies that clients can select by the model name.

  They are the boundary policies, the random policies, and the router if
  `--config.policy` is "router", or "collect" and the run has a router. The keys are the
  rules, such as "small" or "router".

  Raises:
    ValueError: `--config.policy` needs a trained router, and there is none.
  """
  files = dataclasses.replace(run.files(), rows=config.max_sessions)
  policies = {}
  for name, spec in client_specs(run.config).items():
    policies[name] = FAMILIES[spec.family].open(spec, files)
  is_collecting = config.policy == COLLECT
  if is_collecting:
    # A session gets another policy in its place; see plan.py.
    policies[COLLECT] = policies["random"]
  if config.policy == ROUTER or (is_collecting and has_router(run)):
    source = find_router_files(config.router, files)
    policies[ROUTER] = open_router(source)
  for policy in policies.values():
    policy.compile()
  return policies


def find_router_files(router: str, files: RouterFiles) -> RouterFiles:
  """Return the files of the run whose router decides.

  The models and the environment are those of the run that the endpoint records.

  Args:
    router: the directory of the run whose router decides; "" is the recorded run.
    files: the files of the recorded run.

  Raises:
    ValueError: the run has no trained router, or its router has another number of
      models than the endpoint.
  """
  if router:
    source = Path(router)
    trained = read_run(source)
    models = files.config.models
    count = len(trained.models.names)
    if count != len(models.names):
      raise ValueError(
        f"--config.router={router} routes between {count} models. "
        f"Set --config.models.names to {count} models."
      )
    changed = dataclasses.replace(trained, models=models, env=files.config.env)
    files = RouterFiles(source, changed, files.mesh, rows=files.rows)
  if not (files.directory / VOCABULARY).exists():
    raise ValueError(
      f"{files.directory} has no trained router. Set --config.router to the directory "
      "of a run that has one, or set --config.policy=small."
    )
  return files


def build(config: ServeConfig, run: Run) -> App:
  """Build the web application.

  Args:
    run: the run that it records.

  Raises:
    ValueError: a router, a model's key, or the clients' key is missing.
  """
  keys = read_keys(Path(config.keys)) if config.keys else []
  if not keys and not LOCAL_HOST.fullmatch(config.host):
    raise ValueError(
      f"Serving at {config.host} needs a key, which clients must send. Set "
      "--config.keys to a file of keys."
    )
  is_collecting = config.policy == COLLECT
  deciding = find_candidate(run) if is_collecting else run
  exchange = Exchange(config, run, open_policies(config, deciding))
  app = App(exchange, keys)
  if is_collecting:
    app.desk.assign = functools.partial(assign, deciding)
  return app


def read_keys(path: Path) -> list[ClientKey]:
  """Read the clients' keys in a TOML file.

  Raises:
    ValueError: the file cannot be read, or has a wrong or unknown field.
  """
  try:
    tables = tomllib.loads(require_file(path).read_text())
    return [ClientKey.read(table | {"name": name}) for name, table in tables.items()]
  except (OSError, TypeError, ValueError) as error:
    raise ValueError(f"Cannot read the keys: {error}. Correct {path}.") from None


def command() -> None:
  """Run the command line; this is the command `baar-serve` of the package."""
  run_command(serve)


if __name__ == "__main__":
  command()
