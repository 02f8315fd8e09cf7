"""Read the command line and run the stages.

    python main.py --stage=S --config=configs/NAME.py --config.seed=1

An invalid configuration ends the program with one line of error, before any file of a
run is opened.
"""

import argparse
import contextlib
import functools
import os
import runpy
import signal
import sqlite3
import sys
from pathlib import Path

# Python's usual exception for Ctrl-C could be lost in a callback of JAX, so this
# handler ends the program itself. A process that was started to ignore Ctrl-C gets no
# handler.
if (
  __name__ == "__main__" or os.path.basename(sys.argv[0]) == "baar"
) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:

  def stop(*_: object) -> None:
    """End the program at once after Ctrl-C.

    Finished episodes and checkpoints are on disk, so nothing else has to be saved.
    """
    os.write(2, b"\nstopped; run the same command again to continue\n")
    os._exit(130)

  signal.signal(signal.SIGINT, stop)

from absl import app, flags
from jax.errors import JaxRuntimeError
from pydantic import ValidationError

from baar_jax.config import (
  STORED,
  Config,
  check_values,
  check_variables,
  explain,
  fail,
  read_flags,
  require,
)
from baar_jax.envs import base
from baar_jax.envs.base import EnvDied
from baar_jax.families import table
from baar_jax.learn.checkpoint import hide_repeated_errors
from baar_jax.rollout.budget import CapReached
from baar_jax.rollout.source import read_options
from baar_jax.run import Run
from baar_jax.stages import collect, evaluate, plan
from baar_jax.store import read_config
from configs import code

STAGES = {
  "setup": collect.setup,
  "profile": collect.profile,
  "references": collect.references,
  "value": functools.partial(table.train, stage="value"),
  "sft": functools.partial(table.train, stage="sft"),
  "bopo": functools.partial(table.train, stage="bopo"),
  "baselines": functools.partial(table.train, stage="baselines"),
  "evaluate": evaluate.main,
  "report": evaluate.report,
  "export": collect.export,  # --stage=all leaves it out.
}


def main(command: tuple[Config, str]) -> int:
  """Run the stages of a command line.

  Args:
    command: the configuration and the stage's name, as `parse` returns them.

  Returns:
    The exit code: 0 after success, 2 after a user's mistake, 3 at --config.max_usd.
  """
  hide_repeated_errors()
  config, stage = command
  stages = [stage]
  if stage == "all":
    left_out = ["export"]
    if config.env.kind == STORED:
      # These two play episodes, and a recorded run has no environment for them.
      left_out += ["bopo", "baselines"]
    stages = [name for name in STAGES if name not in left_out]
  try:
    validate(config)
    if stage == "export" and config.distributed.processes > 1:
      raise ValueError(
        "--stage=export runs in one process only: leave out --config.distributed"
      )
    if config.dry_run:
      plan.main(config, stages)
      return 0
    plan.require_cap(config, stages)
    with contextlib.closing(Run(config)) as run:
      for name in stages:
        STAGES[name](run)
  except CapReached as cap:
    print(
      f"stopped by --config.max_usd: {cap}; raise it and run the same command again",
      file=sys.stderr,
    )
    return 3
  except (MemoryError, JaxRuntimeError) as error:
    if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return fail(
      "out of memory: lower --config.sft.micro_episodes or --config.router.max_tokens "
      f"({error!r:.200})"
    )
  except sqlite3.Error as error:
    return fail(f"{config.runs}/{config.name}: {error} (from SQLite)")
  except (ValueError, NotImplementedError, EnvDied, OSError) as error:
    return fail(error)
  return 0


def parse(
  argv: list[str], values: flags.FlagValues = flags.FLAGS
) -> tuple[Config, str]:
  """Read the configuration and the stage from a command line.

  An invalid command line ends the program with one line and exit code 2.

  Args:
    argv: the command line, the program's name first.
    values: absl's flags. Only tests pass other flags than those of the process.
  """
  stages = ["all", *STAGES]
  stage = flags.DEFINE_enum("stage", "all", stages, "What to do.", values)
  try:
    config = read_flags(argv, find_usual(argv), values, load_config)
  except ValueError as error:
    sys.exit(fail(error))
  return config, stage.value


def find_usual(argv: list[str]) -> Config:
  """Return the configuration that the flags of a command line change.

  It is the stored one of the run that --config.name names, if there is such a run, else
  that of the default run. A file that --config names takes its place.

  Args:
    argv: the command line, the program's name first.

  Raises:
    ValueError: the run's configuration cannot be read.
  """
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  for name in ("config.name", "config.runs"):
    parser.add_argument(f"--{name}", f"-{name}", nargs="?")
  given = vars(parser.parse_known_args(argv[1:])[0])
  usual = code.get_config()
  if given["config.name"]:
    directory = Path(given["config.runs"] or usual.runs, given["config.name"])
    if stored := read_config(directory):
      # A run may have been moved, and each command says how many processes it has.
      stored.runs, stored.distributed = str(directory.parent), usual.distributed
      return stored
  return usual


def load_config(name: str) -> Config:
  """Run a configuration file, and return its configuration.

  Args:
    name: FILE.py, or FILE.py:SETTING.

  Raises:
    flags.Error: the file is missing, raises an error, or returns no configuration.
  """
  path, *setting = name.split(":", 1)
  shipped_path = Path(code.__file__).parent / Path(path).name
  if not os.path.isfile(path) and shipped_path.is_file():
    path = str(shipped_path)
  try:
    config = runpy.run_path(path)["get_config"](*setting)
    if not isinstance(config, Config):
      raise TypeError("get_config() must return a Config")
  except ValidationError as error:
    raise flags.Error(explain(error, f"{name}: {error.title}")) from None
  except BaseException as error:
    cause = f"{type(error).__name__}: {error}".removesuffix(": ")
    raise flags.Error(f"cannot load {name} ({cause}): correct it") from None
  return config


def validate(config: Config) -> None:
  """Check a configuration, and convert its values to the types of their fields.

  Values that a configuration file assigns are checked nowhere else.

  Raises:
    ValueError: a value is invalid; one line names the field and its rule.
  """
  check_values(config)
  if config.env.kind == STORED:
    # Such a run has no environment, but the default file has options of its own one.
    config.env.options.clear()
  else:
    check_variables("models.key_variables", config.models.key_variables)
    judge = config.baselines.judge
    check_variables("baselines.judge.key_variables", judge.key_variables)
  config.env.options = {**vars(read_options(config.env.kind, config.env.options))}
  environment = base.load(config.env.kind)
  live = config.env.live_per_process
  most = environment.episodes_per_process or live
  try:
    table.check_baselines(config)
    require(
      live <= most, "env.live_per_process", f"at most {most} for this environment"
    )
  except ValueError as error:
    raise ValueError(f"--config.{error}") from None


def command() -> None:
  """Run the command line; this is the command `baar` of the installed package."""
  app.run(main, flags_parser=parse)


if __name__ == "__main__":
  command()
