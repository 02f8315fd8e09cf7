"""Command line: python main.py --stage=S --config=configs/NAME.py --config.bopo.lam=0.3"""

import signal
import sqlite3
import sys
from contextlib import closing

from absl import app, flags, logging
from ml_collections import config_flags
from pydantic import ValidationError

from baar_jax.checks import explain, validate
from baar_jax.config import Config
from baar_jax.envs.base import EnvDied
from baar_jax.rollout.budget import CapReached
from baar_jax.run import Run
from baar_jax.stages import (
  bench,
  bopo,
  evaluate,
  export,
  plan,
  pretrain,
  profile,
  references,
  report,
  rivals,
  setup,
  sft,
)

STAGES = {
  "setup": setup.main,
  "profile": profile.main,
  "references": references.main,
  "pretrain": pretrain.main,
  "sft": sft.main,
  "bopo": bopo.main,
  "baselines": rivals.main,
  "evaluate": evaluate.main,
  "report": report.main,
}
EXTRA = {"export": export.main, "bench": bench.main}  # of one process


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
    with closing(Run(config)) as run:
      for name in stages:
        (STAGES | EXTRA)[name](run)
  except CapReached as cap:
    print(f"stopped by --config.max_usd: {cap}; a higher one goes on from here", file=sys.stderr)
    return 3
  except (ValueError, NotImplementedError, EnvDied, OSError, sqlite3.Error) as error:
    directory = f"{config.runs}/{config.name}: " if isinstance(error, sqlite3.Error) else ""
    return fail(f"{directory}{error}")
  except KeyboardInterrupt:
    print("\nstopped; the same command goes on from here", file=sys.stderr)
    return 130
  return 0


def parse(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> tuple[Config, str]:
  """The configuration and the stage of a command line; a wrong one ends the program in one line."""
  words, stages = "Configuration file.", ["all", *STAGES, *EXTRA]
  try:
    config = config_flags.DEFINE_config_file(
      "config", "configs/quickstart.py", words, values, sys_argv=argv
    )
    stage = flags.DEFINE_enum("stage", "all", stages, "What to do.", values)
    if unexpected := values(argv)[1:]:
      raise flags.Error(f"unexpected argument {unexpected[0]!r}; a stage is --stage=NAME")
    getattr(config.value, "name", None)  # raises OSError where the file could not be read
    if not isinstance(config.value, Config):
      raise flags.Error(f"get_config() returned {config.value!r:.40} and no Config")
  except (flags.Error, ImportError, OSError, SyntaxError, TypeError) as error:
    cause: BaseException | None = error
    while cause and not isinstance(cause, ValidationError):  # config_flags hides it behind its own
      cause = cause.__context__
    sys.exit(fail(explain(cause, cause.title) if cause else error))
  except (AttributeError, KeyError, ValueError) as error:  # of the config's dataclasses
    what = next(iter(error.args), type(error).__name__)
    sys.exit(fail(f"{what}; the fields are in baar_jax/config.py"))
  except SystemExit as end:
    if any(word.lstrip("-").startswith(("help", "?")) for word in argv):
      raise
    sys.exit(fail(f"the configuration file ended the program: {end.code}"))
  except Exception as error:  # of the user's file
    sys.exit(fail(f"the configuration file raised {type(error).__name__}: {error}"))
  return config.value, stage.value


def fail(error: Exception | str) -> int:
  """Says what is wrong in one line. Returns the exit code of a user's mistake."""
  text = str(error)
  if "Traceback" in text:  # of a configuration file that raised
    text = text.strip().splitlines()[-1]
  print(f"error: {' '.join(text.split())}", file=sys.stderr)
  return 2


def repeat_interrupt(unraisable: object) -> None:
  """As sys.unraisablehook: a Ctrl-C that a callback of a library has swallowed comes again."""
  if unraisable.exc_type is KeyboardInterrupt:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
  else:
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
  sys.unraisablehook = repeat_interrupt
  app.run(main, flags_parser=parse)
