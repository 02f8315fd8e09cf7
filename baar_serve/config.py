"""Declare the settings of the endpoint, and open the run that it records."""

import dataclasses
import functools
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self

from absl import app, flags
from pydantic import Field

from baar_jax.config import (
  STORED,
  Config,
  EnvConfig,
  ModelsConfig,
  check_values,
  check_variables,
  fail,
  not_negative,
  positive,
  read_flags,
  require,
  section,
  validator,
)
from baar_jax.learn.checkpoint import hide_repeated_errors
from baar_jax.run import Run
from baar_jax.store import read_config
from baar_serve.forms import FORMS
from baar_serve.routers import finish_exchange
from configs import quickstart

# Names of models that agents send by default, and what they stand for.
ALIASES = (
  ("claude-*haiku*", "baar:small"),
  ("*-mini", "baar:small"),
  ("*-nano", "baar:small"),
  ("claude-*", "baar"),
  ("gpt-*", "baar"),
)
SOME_FORMS = rf"^\s*(({'|'.join(FORMS)})\s*)+$"


@section
class UpstreamsConfig(ModelsConfig):
  """Configure the models that the endpoint calls, at their upstream endpoints.

  Attributes:
    forms: Wire forms that the upstream endpoints offer: one text for all models, or one
      per model, such as "chat/completions responses".
    context_tokens: Tokens of each model's window; 0 is the known one.
  """

  kind: str = Field("chat", pattern="^chat$")
  forms: tuple[Annotated[str, Field(pattern=SOME_FORMS)], ...] = (" ".join(FORMS),)
  context_tokens: tuple[Annotated[int, Field(ge=0, le=10**9)], ...] = ()

  @validator
  def _check_upstreams(self) -> Self:
    """Raise an error unless each tuple has as many values as there are models."""
    count = len(self.names)
    require(count > 1, "names", "two or more models, the cheapest first")
    is_valid = len(self.context_tokens) in (0, count)
    require(is_valid, "context_tokens", "() or a value for each of the names")
    is_valid = len(self.forms) in (1, count)
    require(is_valid, "forms", "one value, or a value for each of the names")
    return self


@section
class ServeConfig:
  """Configure the endpoint.

  Attributes:
    name: Name of the run that it records. The run's directory is <runs>/<name>.
    runs: Directory that holds the directories of all runs.
    host: Address to listen on. Addresses that other machines can reach need a key.
    port: Port to listen on; 0 takes any free port.
    policy: Policy that decides for the model name "baar". "router" is the trained
      router, "collect" for each session the policy that the run still needs.
    router: Directory of the run whose trained router decides; "" is this run.
    max_usd: Default cap on a session's US dollars, which a client can only lower; None
      is no cap.
    max_large_calls: Default cap on a session's LARGE calls, which a client can only
      lower; None is no cap.
    warn_share: Share of a session's cap from which on each call tells the model what is
      left; None is never.
    last_turn: Whether dollars are set aside for a last call without tools at the end of
      a session's cap.
    max_total_usd: Cap on the US dollars of all sessions together; 0 is no cap.
    call_timeout_s: Seconds that a client's call may take with all of its attempts.
    max_reply_tokens: Limit on the tokens of a reply if the client sets none; None is
      no limit, and under a cap the model's longest reply.
    record_text: Whether the texts of tasks, results and actions are stored. Training
      needs them.
    aliases: Pairs of a pattern of model names that clients send, and the name that
      takes its place.
    keys: TOML file of clients' keys; baar_serve/README.md has its form.
    max_sessions: Number of sessions for which the router's KV cache has room.
    traces: File or directory that `python -m baar_serve.traces` reads.
    scores: JSON file with the scores of these sessions, by the name of a session or a
      task; "" has none.
    rivals: Endpoints of other routers that `python -m baar_serve.learn` compares, such
      as "auto=http://127.0.0.1:9000/v1": the model name and the base URL.
    models: The models that answer.
  """

  name: str = Field("endpoint", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")
  runs: str = "runs"
  host: str = Field("127.0.0.1", min_length=1, max_length=253)
  port: int = not_negative(8000, 65535)
  policy: str = Field(
    "router", pattern="^(router|small|large|random|stratified|collect)$"
  )
  router: str = ""
  max_usd: float | None = not_negative(None)
  max_large_calls: int | None = not_negative(None, 10**9)
  warn_share: float | None = Field(None, gt=0, lt=1)
  last_turn: bool = False
  max_total_usd: float = not_negative(0.0)
  call_timeout_s: float = positive(600.0)
  max_reply_tokens: int | None = Field(None, gt=0, le=10_000_000)
  record_text: bool = False
  aliases: tuple[tuple[str, str], ...] = ALIASES
  keys: str = ""
  max_sessions: int = positive(256, 100_000)
  traces: str = ""
  scores: str = ""
  rivals: tuple[Annotated[str, Field(pattern=r"^[^=]+=https?://\S+$")], ...] = ()
  models: UpstreamsConfig = Field(default_factory=UpstreamsConfig)


def parse(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> ServeConfig:
  """Read the configuration from a command line.

  An invalid command line ends the program with one line and exit code 2.

  Args:
    argv: the command line, the program's name first.
    values: absl's flags. Only tests pass other flags than those of the process.
  """
  try:
    config = read_flags(argv, ServeConfig(), values)
    check_values(config)
    check_variables("models.key_variables", config.models.key_variables)
  except ValueError as error:
    sys.exit(fail(error))
  return config


def run_command(work: Callable[[ServeConfig], None]) -> None:
  """Do the work of this program's command line.

  Ctrl-C ends it at once, but for a server that has a handler of its own while it runs.
  Finished work is on disk.
  """
  signal.signal(signal.SIGINT, lambda *_: os._exit(130))
  app.run(functools.partial(do, work), flags_parser=parse)


def do(work: Callable[[ServeConfig], None], config: ServeConfig) -> int:
  """Do the work of a command.

  Returns:
    The exit code: 0 after success, 2 after a user's mistake, which is one line.
  """
  hide_repeated_errors()
  try:
    work(config)
  except (ValueError, OSError, sqlite3.Error) as error:
    return fail(error)
  return 0


def open_run(config: ServeConfig) -> Run:
  """Open the run that the endpoint records; its episodes are its clients' sessions.

  A new run has the settings of configs/quickstart.py. A run that exists keeps its own,
  such as `profile.trials`. The models are those of the endpoint.

  Raises:
    ValueError: the run's directory cannot be used, or a price is missing.
  """
  directory = Path(config.runs) / config.name
  finish_exchange(directory)
  stored = read_config(directory) or quickstart.get_config()
  fields = {}
  for field in dataclasses.fields(ModelsConfig):
    fields[field.name] = getattr(config.models, field.name)
  run_config: Config = dataclasses.replace(
    stored,
    name=config.name,
    runs=config.runs,
    max_usd=config.max_total_usd,
    env=EnvConfig(STORED, max_steps=stored.env.max_steps),
    models=ModelsConfig(**fields),
  )
  return Run(run_config)
