"""Command line: python main.py --stage=S --config=configs/NAME.py --config.bopo.lam=0.3"""

import sqlite3
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from baar_jax import bench, bopo, evaluate, pretrain, references, report, sft, taxonomy
from baar_jax.config import validate
from baar_jax.envs.base import EnvDied
from baar_jax.run import Run

STAGES = {
  "profile": taxonomy.main,
  "references": references.main,
  "pretrain": pretrain.main,
  "sft": sft.main,
  "bopo": bopo.main,
  "evaluate": evaluate.main,
  "report": report.main,
}

EXTRA = {"bench": bench.main}

CONFIG = config_flags.DEFINE_config_file("config", "configs/quickstart.py", "Configuration file.")
STAGE = flags.DEFINE_enum("stage", "all", ["all", *STAGES, *EXTRA], "What to do.")


def main(arguments: list[str]) -> int:
  logging.set_verbosity(logging.WARNING)
  try:
    if len(arguments) > 1:
      raise ValueError(f"unexpected argument {arguments[1]!r}; a stage is named by --stage=NAME")
    validate(CONFIG.value)
    run = Run(CONFIG.value)
    try:
      for stage in STAGES if STAGE.value == "all" else [STAGE.value]:
        (STAGES | EXTRA)[stage](run)
    finally:
      run.close()
  except (ValueError, EnvDied, OSError, sqlite3.Error) as error:
    return fail(error)
  except KeyboardInterrupt:
    print("\nstopped; the same command goes on from here", file=sys.stderr)
    return 130
  return 0


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the command line; a wrong one ends the program with one line."""
  try:
    return flags.FLAGS(argv)
  except (
    flags.Error,
    AttributeError,
    ImportError,
    KeyError,
    OSError,
    SyntaxError,
    TypeError,
  ) as error:
    sys.exit(fail(error))


def fail(error: Exception) -> int:
  """Says what is wrong in one line. Returns the exit code of a user's mistake."""
  text = error
  if isinstance(error, AttributeError | KeyError):  # of the config's dataclasses
    text = f"{error.args[0]}; the fields are in baar_jax/config.py"
  print(f"error: {' '.join(str(text).split())}", file=sys.stderr)
  return 2


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
