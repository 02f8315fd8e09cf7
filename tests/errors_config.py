"""The errors of the configuration, its files and the command line."""

import operator
import sqlite3
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from absl import flags
from jax.errors import JaxRuntimeError

import main
from baar_jax.config import Config
from configs import sandbox


def check(values: dict[str, object]) -> Callable[[Path], None]:
  """Return a case that checks the default configuration with some values changed."""

  def make(tmp: Path) -> None:
    config = Config()
    for name, value in values.items():
      section, _, field = name.rpartition(".")
      setattr(operator.attrgetter(section)(config) if section else config, field, value)
    main.validate(config)

  return make


def command(*arguments: str, file: str = "") -> Callable[[Path], None]:
  """Return a case that runs a command line; FILE in it is a file with this text."""

  def refuse(error: Exception | str) -> None:
    raise ValueError(" ".join(str(error).split()))

  def make(tmp: Path) -> None:
    (tmp / "file.py").write_text(file)
    argv = ["main.py", *(a.replace("FILE", str(tmp / "file.py")) for a in arguments)]
    # The command prints its error and returns an exit code; here it raises the error.
    with mock.patch.object(main, "fail", refuse):
      main.main(main.parse(argv, flags.FlagValues()))

  return make


def stop_a_stage(error: Exception) -> Callable[[Path], None]:
  """Return a case in which a stage of a command raises an error."""

  def make(tmp: Path) -> None:
    stage = mock.Mock(side_effect=error)
    with mock.patch.dict(main.STAGES, report=stage):
      command("--stage=report", f"--config.runs={tmp}")(tmp)

  return make


CHAT = {"models.kind": "chat"}
CYCLE = []
CYCLE.append(CYCLE)
CASES = [
  (
    "a value of the configuration is no plain value, contains itself, or is nested too deeply: correct the file of --config",
    check({"bopo.lam": CYCLE}),
  ),
  (
    "--config.models.prices must be () or a value for each of the names; it is ((1.0, 1.0, 1.0),)",
    check({"models.prices": ((1.0, 1.0, 1.0),)}),
  ),
  (
    "--config.models.base_urls must be (), one value, or a value for each of the names",
    check({"models.base_urls": ("http://a", "http://b", "http://c")}),
  ),
  (
    "--config.router.max_tokens must be at least 472, or lower description_tokens, action_tokens or result_tokens; it is 100",
    check({"router.max_tokens": 100}),
  ),
  (
    "--config.router.num_heads must be a multiple of --config.router.num_kv_heads; it is 3",
    check({"router.num_heads": 3, "router.num_kv_heads": 2}),
  ),
  (
    "--config.references.plans must be plans of different kinds; it is (('steps', 1), ('steps', 2))",
    check({"references.plans": (("steps", 1), ("steps", 2))}),
  ),
  (
    "--config.references.plans must be plans in which samples have all_tasks: ('samples', COUNT, True); it is (('samples', 2),)",
    check({"references.plans": (("samples", 2),)}),
  ),
  (
    "--config.bopo.updates must be at most 41666 with this group_size; it is 41667",
    check({"bopo.updates": 41_667}),
  ),
  (
    "--config.distributed.process must be below --config.distributed.processes; it is 1",
    check({"distributed.process": 1}),
  ),
  (
    "--config.distributed.coordinator must be HOST:PORT at which process 0 listens; it is ''",
    check({"distributed.processes": 2}),
  ),
  (
    "--config.models.kind must be chat with env.kind=served; it is 'scripted'",
    check({"env.kind": "served"}),
  ),
  (
    "--config.models.names must be two or three models, the cheapest first; it is ('a', 'b', 'c', 'd')",
    check({"models.names": ("a", "b", "c", "d")}),
  ),
  (
    "--config.models.names must be two or more models, the cheapest first; it is ('m',)",
    check(CHAT | {"models.names": ("m",)}),
  ),
  (
    "--config.baselines.judge.names must be one model; it is ('a', 'b')",
    check({"baselines.judge.names": ("a", "b")}),
  ),
  (
    "--config.pretrain.epochs must be 0 with --config.router.weights, which are pretrained already; it is 1",
    check({"router.weights": "smollm2", "pretrain.epochs": 1}),
  ),
  (
    "--config.train_seeds must be at most --config.evaluate.seeds, so that each router is evaluated; it is 4",
    check({"train_seeds": 4}),
  ),
  (
    "--config.baselines.compared_lam must be one of --config.bopo.lam, (0.1, 0.3, 0.5, 0.7, 0.9); it is 0.2",
    check({"baselines.compared_lam": 0.2}),
  ),
  (
    "--config.bopo.lam must be values that differ in six digits; it is (0.1, 0.1000001)",
    check({"bopo.lam": (0.1, 0.1000001)}),
  ),
  (
    "the file has no setting 'other': choose trio, or none",
    lambda tmp: sandbox.get_config("other"),
  ),
  (
    "--config.env.train_tasks: Input should be greater than 0; it is 0",
    check({"env.train_tasks": 0}),
  ),
  (
    "--config.baselines.rivals must be some of cache-sticky, cascade, one-escalation, single-turn, stage-rule, vanilla, zero-shot; it is ('no-such',)",
    check({"baselines.rivals": ("no-such",)}),
  ),
  (
    "--config.value.updates must be above 0 for cache-sticky and one-escalation; it is 0",
    check({"baselines.rivals": ("one-escalation", "cache-sticky"), "value.updates": 0}),
  ),
  (
    "--config.env.live_per_process must be at most 1 for AppWorld; it is 4",
    check({"env.kind": "appworld"}),
  ),
  (
    "--config.env.options.short_tasks must be True for scripted models, which follow solutions; it is False",
    check({"env.options": {"short_tasks": False}}),
  ),
  (
    "--config.models.key_variables must be the name of an environment variable that is set, or ''",
    check({"models.key_variables": ("NOT_SET_HERE",)}),
  ),
  (
    "--config.serve.key_variable must be the name of an environment variable that is set, or ''",
    check({"serve.key_variable": "NOT_SET_HERE"}),
  ),
  (
    "--config.router.num_layers must be smaller, or hidden_size or vocab_size: they take 1,600,... GB; it is 2",
    check({"router.hidden_size": 10**6, "router.vocab_size": 10**8}),
  ),
  (
    "an argument does not begin with --: write --FIELD=VALUE, and quote spaces",
    command("report"),
  ),
  (
    "--config.bopo.lam is given twice: give all its values at once",
    command("--config.bopo.lam=(0.1,)", "--config.bopo.lam=(0.3,)"),
  ),
  (
    "--config=none.py: no such file; take one of configs/{alfworld,appworld,quickstart,reproduce,sandbox,sciworld}.py, or a file with get_config()",
    command("--config=none.py"),
  ),
  (
    "TMP/file.py: get_config() returned a NoneType; return a Config",
    command("--config=FILE", file="def get_config(): pass"),
  ),
  (
    "cannot load TMP/file.py (KeyError: 'x'): correct this file",
    command("--config=FILE", file="def get_config(): raise KeyError('x')"),
  ),
  (
    "TMP/file.py: EnvConfig.train_tasks: Input should be greater than 0",
    command(
      "--config=FILE",
      file="from baar_jax.config import *\ndef get_config(): return EnvConfig(train_tasks=0)",
    ),
  ),
  (
    "Field prices not found on dataclass ValueConfig; baar_jax/config.py lists the fields",
    command(
      "--config=FILE",
      file="from baar_jax.config import *\ndef get_config():\n  c = Config()\n  c.value.prices = (0,)\n  return c",
    ),
  ),
  (
    "...no_field...; baar_jax/config.py lists the fields",
    command("--config.bopo.no_field=3"),
  ),
  (
    "TMP/quickstart: disk image is malformed (from SQLite); check the free space and the rights, and run the same command again",
    stop_a_stage(sqlite3.DatabaseError("disk image is malformed")),
  ),
  (
    "out of memory: lower --config.sft.micro_episodes or the router's sizes (MemoryError())",
    stop_a_stage(MemoryError()),
  ),
  (
    "out of memory: ...RESOURCE_EXHAUSTED: 9 bytes...",
    stop_a_stage(JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes")),
  ),
  (
    "--stage=export runs in one process only: leave out --config.distributed",
    command(
      "--stage=export",
      "--config.distributed.processes=2",
      "--config.distributed.coordinator=localhost:1",
    ),
  ),
]
