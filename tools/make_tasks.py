"""Make the missing synthetic tasks of ALFWorld or AppWorld, in the engine's Python.

    python -m tools.make_tasks alfworld [TRAIN DEV TEST]

The numbers of tasks are those of the configuration of this name, unless they are given.
"""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from baar_jax.config import fail
from baar_jax.envs.base import load
from baar_jax.envs.engines import Engine, command_of, environ_of, output_of

MODULES = {"alfworld": "tools.alfworld_games", "appworld": "tools.appworld_tasks"}


def make_tasks(engine: Engine, directory: Path, sizes: Iterable[int]) -> None:
  """Make the missing tasks of a directory.

  Args:
    engine: the engine, which must be installed.
    directory: the directory of the tasks.
    sizes: number of tasks in the splits train, dev and test.

  Raises:
    ValueError: the engine is not installed, or the generation fails.
  """
  module = MODULES[engine.name]
  command = [*command_of(engine), module, str(directory), *map(str, sizes)]
  output_of(module, command, environ_of(engine))


def main(name: str, *sizes: str) -> None:
  """Make the tasks that a run uses which names no data."""
  env = importlib.import_module(f"configs.{name}").get_config().env
  engine = load(name).engine
  usual = (env.train_tasks, env.dev_tasks, env.test_tasks)
  try:
    make_tasks(engine, engine.generated_data, sizes or usual)
  except ValueError as error:
    sys.exit(fail(error))
  print(f"the tasks are in {engine.generated_data}")


if __name__ == "__main__":
  main(*sys.argv[1:])
