"""The table of environments, and the options of each."""

import ast
import contextlib
import functools
import importlib
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baar_jax.envs.base import Env

# The class of each environment, whose attributes are the facts about it. Only the
# module of the one that is used is imported.
ENVIRONMENTS = {
  "sandbox": "sandbox.adapter.Sandbox",
  "scienceworld": "scienceworld.adapter.ScienceWorld",
  "alfworld": "alfworld.adapter.ALFWorld",
  "appworld": "appworld.adapter.AppWorld",
  "served": "base.Env",  # clients of the endpoint play it, or have played it
}


@functools.cache
def load(kind: str) -> type[Env]:
  """Load the class of an environment.

  Args:
    kind: one of ENVIRONMENTS, or "FILE.py:CLASS" of the user's own.

  Raises:
    ValueError: there is no such file or class, the file fails, or an option has no
      default.
  """
  if kind in ENVIRONMENTS:
    module, _, name = ENVIRONMENTS[kind].rpartition(".")
    return vars(importlib.import_module(f"baar_jax.envs.{module}"))[name]
  path, _, name = kind.rpartition(":")
  problem = f"--config.env.kind is {kind!r}, but"
  if not Path(path).is_file():
    known = ", ".join(ENVIRONMENTS)
    raise ValueError(
      f"{problem} there is no file {path or name!r}; take FILE.py:CLASS or {known}"
    )
  try:
    environment = runpy.run_path(path).get(name)
  except (Exception, SystemExit) as error:  # the user's code may raise anything
    raise ValueError(f"{problem} {path} fails: {error!r:.200}") from error
  if not isinstance(environment, type) or not issubclass(environment, Env):
    raise ValueError(f"{problem} {path} has no class {name} of Env")
  try:
    environment.Options()
  except TypeError as error:
    must = "each of its options needs a default"
    raise ValueError(f"{problem} {must}: {error}") from None
  return environment


def read_options(kind: str, options: Mapping[str, Any]) -> Any:
  """Check an environment's options, and return them as its dataclass.

  An option has the type of its default: bool, int, float or str. A text, as the command
  line has it, is read as a value of another type.

  Raises:
    ValueError: a name, a type or a value is wrong; in one line with the known options.
  """
  Options = load(kind).Options
  defaults = vars(Options())
  known = f"the options of {kind} are {', '.join(defaults) or 'none'}"
  values = {}
  for name, value in options.items():
    seen = f"--config.env.options.{name} is {value!r:.80}"
    if name not in defaults:
      raise ValueError(f"{seen}, but there is no such option; {known}")
    expected = type(defaults[name])
    if isinstance(value, str) and expected is not str:
      with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    if type(value) is int and expected is float:
      value = float(value)
    if type(value) is not expected:
      raise ValueError(f"{seen}, expected {expected.__name__}; {known}")
    values[name] = value
  try:
    return Options(**values)
  except ValueError as error:  # out of bounds
    raise ValueError(f"--config.env.options: {error}; {known}") from None


def changed_options(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
  """Check options as `read_options` does; return those that are not the defaults."""
  checked = vars(read_options(kind, options))
  defaults = vars(load(kind).Options())
  return dict(sorted(checked.items() - defaults.items()))


def make(kind: str, options: Mapping[str, Any] = {}, **sizes: int) -> Env:
  """Make an environment in this process.

  Args:
    kind: as for `load`.
    options: as for `read_options`, which raises ValueError.
    **sizes: train_tasks, dev_tasks, test_tasks and max_steps.
  """
  checked = read_options(kind, options)
  given = {"options": checked} if vars(checked) else {}
  return load(kind)(**sizes, **given)
