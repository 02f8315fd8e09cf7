"""Command line: python main.py --stage=S --config=configs/NAME.py --config.bopo.lam=0.3"""

import os
import runpy
import signal
import sqlite3
import sys
from contextlib import closing

# Before JAX is imported, whose callbacks could swallow it. In the background it stays ignored.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:

  def stop(*_) -> None:
    """Ends the program at a Ctrl-C, whatever it is at: all that counts is on disk."""
    os.write(2, b"\nstopped; the same command goes on from here\n")
    os._exit(130)

  signal.signal(signal.SIGINT, stop)

from absl import app, flags, logging
from ml_collections import config_flags
from pydantic import ValidationError

from baar_jax.checks import explain, validate
from baar_jax.config import Config
from baar_jax.envs.base import EnvDied
from baar_jax.rollout.budget import CapReached
from baar_jax.router.gguf import set_up
from baar_jax.run import Run
from baar_jax.stages import bench, evaluate, import_traces, plan, profile, report, serve, train
from configs import quickstart

STAGES = {"setup": profile.setup, "profile": profile.main, "references": profile.references}
STAGES |= {"pretrain": train.pretrain, "value": train.value, "sft": train.sft, "bopo": train.bopo}
STAGES |= {"baselines": train.baselines, "evaluate": evaluate.main, "forecast": evaluate.forecast}
STAGES |= {"report": report.main}
EXTRA = {"import": import_traces.main, "export": train.export}  # of one process
EXTRA |= {"bench": bench.main, "serve": serve.main}


def main(command: tuple[Config, str]) -> int:
  """Runs the stages of a command line that `parse` has read. Returns the exit code."""
  logging.set_verbosity(logging.WARNING)
  config, stage = command
  stages = list(STAGES) if stage == "all" else [stage]
  try:
    validate(config)
    if stage in EXTRA and config.distributed.processes > 1:
      raise ValueError(f"--stage={stage} runs in one process: leave out --config.distributed")
    if config.dry_run:
      plan.main(config, stages)
      return 0
    if "setup" in stages:
      set_up(config.router.weights)  # before a run reads them
    with closing(Run(config)) as run:
      for name in stages:
        (STAGES | EXTRA)[name](run)
  except CapReached as cap:
    print(f"stopped by --config.max_usd: {cap}; a higher one goes on from here", file=sys.stderr)
    return 3
  except (ValueError, NotImplementedError, EnvDied, OSError, sqlite3.Error) as error:
    return fail(f"{config.runs}/{config.name}: {error}")
  return 0


def parse(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> tuple[Config, str]:
  """The configuration and the stage of a command line; a wrong one ends the program in one line."""
  words, stages = "Configuration file.", ["all", *STAGES, *EXTRA]
  try:
    config = config_flags.DEFINE_config_dataclass(
      "config", quickstart.get_config(), words, values, sys_argv=argv, parse_fn=load_config
    )
    stage = flags.DEFINE_enum("stage", "all", stages, "What to do.", values)
    if unexpected := values(argv)[1:]:
      raise flags.Error(f"unexpected argument {unexpected[0]!r}; a stage is --stage=NAME")
  except flags.Error as error:
    sys.exit(fail(error))
  except (AttributeError, KeyError, TypeError, ValueError) as error:  # of the config's dataclasses
    sys.exit(fail(f"{error.args[0]}; the fields are in baar_jax/config.py"))
  return config.value, stage.value


def load_config(name: str) -> Config:
  """The configuration of FILE.py or FILE.py:SETTING; flags.Error, whatever the file does wrong."""
  path, *setting = name.split(":", 1)
  try:
    config = runpy.run_path(path)["get_config"](*setting)
  except ValidationError as error:
    raise flags.Error(explain(error, error.title)) from None
  except BaseException as error:
    raise flags.Error(f"{name}: {type(error).__name__}: {error}") from None
  if not isinstance(config, Config):
    raise flags.Error(f"{name}: get_config() returned a {type(config).__name__} and no Config")
  return config


def fail(error: Exception | str) -> int:
  """Says what is wrong in one line. Returns the exit code of a user's mistake."""
  line = "".join(filter(str.isprintable, " ".join(str(error).split())))
  print(f"error: {line}", file=sys.stderr)
  return 2


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
