"""The errors of the configuration, its files and the command line."""

import contextlib
import io
import sqlite3
from pathlib import Path
from unittest import mock

from absl import flags
from jax.errors import JaxRuntimeError

import main
from baar_jax.config import fail


def command(tmp: Path, *arguments: str) -> None:
  """Run a command line, whose runs are in a directory, and raise the line it prints."""

  def refuse(error: Exception | str) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as printed:
      assert fail(error) == 2
    start, line = printed.getvalue().split("error: ", 1)
    assert start == ""
    raise ValueError(line.removesuffix("\n"))

  argv = ["main.py", *arguments, f"--config.runs={tmp}"]
  if not any(argument.startswith("--config=") for argument in arguments):
    argv.insert(1, "--config=quickstart.py")
  with mock.patch.object(main, "fail", refuse):
    main.main(main.parse(argv, flags.FlagValues()))


def read_file(tmp: Path, body: str) -> None:
  """Run a command line whose configuration file has a function with this body."""
  text = "from baar_jax.config import *\ndef get_config(setting):\n  c = Config()\n  "
  (tmp / "file.py").write_text(text + body)
  command(tmp, f"--config={tmp}/file.py:other")


def stop_a_stage(tmp: Path, error: Exception) -> None:
  """Run a command in which a stage raises an error."""
  stage = mock.Mock(side_effect=error)
  with mock.patch.dict(main.STAGES, report=stage):
    command(tmp, "--stage=report")


CASES = [
  (
    "...--stage=nonsense...all|setup|profile|references|...",
    command,
    "--stage=nonsense",
  ),
  (
    "...config.models has a value that cannot be read...",
    command,
    "--config.models=sk-secret",
  ),
  (
    "...Port out of range...",
    command,
    "--config.models.kind=chat",
    "--config.models.base_urls=('http://localhost:65536/v1',)",
    "--config.max_usd=1",
  ),
  (
    "...Not a directory: 'README.md/quickstart'",
    lambda tmp: command("README.md"),
  ),
  (
    "--config.max_usd is 0...cost money: about $87,993.75 and 214.0 hours by the dry...",
    command,
    "--config=configs/sciworld.py:paper",
  ),
  (
    "Cannot read Qwen/Qwen2.5-1.5B/config.json (...). Set --config.router.weights to...",
    command,
    "--config.router.weights=Qwen/Qwen2.5-1.5B",
    "--config.dry_run=True",
  ),
  ("...no plain value...", read_file, "c.bopo.lam = {1}; return c"),
  (
    "...key_variables: Input should be...",
    read_file,
    "return Config(models=ModelsConfig(key_variables='sk-secret'))",
  ),
  (
    "cannot load TMP/file.py:other (SystemExit: a [2Jb): correct it",
    read_file,
    "raise SystemExit('a\\n\\x1b[2J\\u202eb')",
  ),
  (
    "--config.models.prices must be () or a value for each of the names",
    command,
    "--config.models.prices=((1.0, 1.0, 1.0),)",
  ),
  (
    "--config.models.base_urls must be (), one value, or a value for each of the names",
    command,
    "--config.models.base_urls=('http://a', 'http://b', 'http://c')",
  ),
  (
    "--config.router.max_tokens must be at least 472, or lower description_tokens...",
    command,
    "--config.router.max_tokens=471",
  ),
  (
    "--config.distributed.process must be below --config.distributed.processes",
    command,
    "--config.distributed.process=1",
  ),
  (
    "--config.models.kind must be chat with env.kind=stored",
    command,
    "--config.env.kind=stored",
  ),
  (
    "--config.env.kind must be code with recorded models",
    command,
    "--config.models.kind=recorded",
  ),
  (
    "--config.baselines.rivals must be without zero-shot with recorded models",
    command,
    "--config=configs/code.py",
    "--config.baselines.rivals=('zero-shot',)",
  ),
  (
    "--config.models.names must be two or more models, the cheapest first",
    command,
    "--config.models.kind=chat",
    "--config.models.names=('m',)",
  ),
  (
    "--config.baselines.judge.names must be one model",
    command,
    "--config.baselines.judge.names=('a', 'b')",
  ),
  (
    "--config.train_seeds must be at most --config.evaluate.seeds...",
    command,
    "--config.train_seeds=4",
  ),
  (
    "--config.baselines.rivals must be some of cascade, escalate...",
    command,
    "--config.baselines.rivals=('no-such',)",
  ),
  (
    "--config.env.live_per_process must be at most 1 for this environment",
    command,
    "--config=appworld.py",
    "--config.env.live_per_process=4",
  ),
  (
    "an argument does not begin with --: write --FIELD=VALUE...",
    command,
    "report",
  ),
  (
    "--config.bopo.lam is given twice: give all its values at once",
    command,
    "-config.bopo.lam=(0.1,)",
    "--config.bopo.lam=(0.3,)",
  ),
  (
    "cannot load none.py (FileNotFoundError: ...",
    command,
    "--config=none.py",
  ),
  (
    "cannot load TMP/file.py:other (...must return a Config): correct it",
    read_file,
    "pass",
  ),
  (
    "--config.value.prices: Unexpected keyword argument",
    read_file,
    "c.value.prices = (0,); return c",
  ),
  (
    "...no_field...; baar_jax/config.py lists the fields",
    command,
    "--config.bopo.no_field=3",
  ),
  (
    "TMP/quickstart: disk image is malformed (from SQLite)",
    stop_a_stage,
    sqlite3.DatabaseError("disk image is malformed"),
  ),
  (
    "out of memory: ...RESOURCE_EXHAUSTED: 9 bytes...",
    stop_a_stage,
    JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes"),
  ),
  (
    "--stage=export runs in one process only: leave out --config.distributed",
    command,
    "--stage=export",
    "--config.distributed.processes=2",
    "--config.distributed.coordinator=localhost:1",
  ),
]
