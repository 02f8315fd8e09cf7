"""Command line: python main.py --stage=S --config=configs/NAME.py --config.bopo.lam=0.3"""

import sqlite3
import sys
from collections.abc import Callable

from absl import app, flags, logging
from ml_collections import config_flags

from baar_jax.config import validate
from baar_jax.envs.base import EnvDied
from baar_jax.rollout.budget import CapReached
from baar_jax.run import Run
from baar_jax.stages import (
  baselines,
  bench,
  bopo,
  evaluate,
  export,
  plan,
  pretrain,
  references,
  report,
  setup,
  sft,
)
from baar_jax.stages import profile as taxonomy

STAGES = {
  "setup": setup.main,
  "profile": taxonomy.main,
  "references": references.main,
  "pretrain": pretrain.main,
  "sft": sft.main,
  "bopo": bopo.main,
  "baselines": baselines.main,
  "evaluate": evaluate.main,
  "report": report.main,
}

EXTRA = {"export": export.main, "bench": bench.main}


def main(arguments: list[str]) -> int:
  logging.set_verbosity(logging.WARNING)
  try:
    if len(arguments) > 1:
      raise ValueError(f"unexpected argument {arguments[1]!r}; a stage is named by --stage=NAME")
    validate(CONFIG.value)
    stages = list(STAGES) if STAGE.value == "all" else [STAGE.value]
    if CONFIG.value.dry_run:
      plan.main(CONFIG.value, stages)
      return 0
    run = Run(CONFIG.value)
    try:
      for stage in stages:
        (STAGES | EXTRA)[stage](run)
    finally:
      run.close()
  except CapReached as reached:
    print(
      f"stopped by --config.max_usd: {reached}; a higher one goes on from here", file=sys.stderr
    )
    return 3
  except (ValueError, NotImplementedError, EnvDied, OSError, sqlite3.Error) as error:
    return fail(error)
  except KeyboardInterrupt:
    print("\nstopped; the same command goes on from here", file=sys.stderr)
    return 130
  return 0


def define_flags() -> tuple[flags.FlagHolder, flags.FlagHolder]:
  """--config and --stage. Fields of the default config are parsed here already."""
  return (
    config_flags.DEFINE_config_file("config", "configs/quickstart.py", "Configuration file."),
    flags.DEFINE_enum("stage", "all", ["all", *STAGES, *EXTRA], "What to do."),
  )


def or_fail(parse: Callable, *args):
  """What `parse` returns; a wrong command line ends the program with one line."""
  try:
    return parse(*args)
  except (flags.Error, ImportError, OSError, SyntaxError, TypeError) as error:
    sys.exit(fail(error))
  except (AttributeError, KeyError, ValueError) as error:  # of the config's dataclasses
    sys.exit(fail(f"{error.args[0]}; the fields are in baar_jax/config.py"))


def fail(error: Exception | str) -> int:
  """Says what is wrong in one line. Returns the exit code of a user's mistake."""
  text = str(error)
  if "Traceback" in text:  # of a configuration file that raised
    text = text.strip().splitlines()[-1]
  print(f"error: {' '.join(text.split())}", file=sys.stderr)
  return 2


CONFIG, STAGE = or_fail(define_flags)

if __name__ == "__main__":
  app.run(main, flags_parser=lambda argv: or_fail(flags.FLAGS, argv))
