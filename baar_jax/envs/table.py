"""List the environments and check their options."""

import ast
import contextlib
import functools
import importlib
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baar_jax.envs.base import Env

# The class of each environment, relative to baar_jax.envs. Only the module of the
# environment in use is imported.
ENVIRONMENTS = {
  "sandbox": "sandbox.adapter.Sandbox",
  "scienceworld": "scienceworld.adapter.ScienceWorld",
  "alfworld": "alfworld.adapter.ALFWorld",
  "appworld": "appworld.adapter.AppWorld",
  "recorded": "base.Env",  # Other programs record these episodes.
}


@functools.cache
def load(kind: str) -> type[Env]:
  """Load the class of an environment.

  Args:
    kind: a key of ENVIRONMENTS, or "FILE.py:CLASS" for a user's environment.

  Raises:
    ValueError: the file is missing or fails, it lacks the class, or one of the class's
      options has no default.
  """
  if kind in ENVIRONMENTS:
    module, _, name = ENVIRONMENTS[kind].rpartition(".")
    return vars(importlib.import_module(f"baar_jax.envs.{module}"))[name]
  path, _, name = kind.rpartition(":")
  problem = f"--config.env.kind is {kind!r}, but"
  if not Path(path).is_file():
    raise ValueError(
      f"{problem} the file {path or name!r} does not exist; "
      f"set it to FILE.py:CLASS or to one of: {', '.join(ENVIRONMENTS)}"
    )
  try:
    environment = runpy.run_path(path).get(name)
  except (Exception, SystemExit) as error:  # The user's file may raise any error.
    raise ValueError(
      f"{problem} {path} fails with {error!r:.200}; correct the file"
    ) from error
  if not isinstance(environment, type) or not issubclass(environment, Env):
    raise ValueError(
      f"{problem} {path} has no class {name} that is a subclass of Env; add it"
    )
  try:
    environment.Options()
  except TypeError as error:
    raise ValueError(
      f"{problem} its Options need a default for each field: {error}"
    ) from None
  return environment


def read_options(kind: str, options: Mapping[str, Any]) -> Any:
  """Check an environment's options and return them as its `Options`.

  An option must have the type of its default: bool, int, float or str. A text, as the
  command line passes it, is converted to this type. An integer becomes a float.

  Args:
    kind: the kind of environment; see `load`.
    options: values of options by name. Missing options keep their defaults.

  Raises:
    ValueError: an option has a wrong name, type or value.
  """
  Options = load(kind).Options
  defaults = vars(Options())
  listing = f"the options of {kind} are {', '.join(defaults) or 'none'}"
  values = {}
  for name, value in options.items():
    setting = f"--config.env.options.{name} is {value!r:.80}"
    if name not in defaults:
      raise ValueError(f"{setting}, but this option does not exist; {listing}")
    expected = type(defaults[name])
    if isinstance(value, str) and expected is not str:
      with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    if type(value) is int and expected is float:
      value = float(value)
    if type(value) is not expected:
      raise ValueError(f"{setting}, but must be of type {expected.__name__}; {listing}")
    values[name] = value
  try:
    return Options(**values)
  except ValueError as error:  # The class of the options refuses a value.
    raise ValueError(f"--config.env.options: {error}; {listing}") from None


def changed_options(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
  """Check an environment's options and return those that differ from the defaults.

  Args:
    kind: the kind of environment; see `load`.
    options: values of options by name; see `read_options`.

  Raises:
    ValueError: an option has a wrong name, type or value.
  """
  checked = vars(read_options(kind, options))
  defaults = vars(load(kind).Options())
  return dict(sorted(checked.items() - defaults.items()))


def make(kind: str, options: Mapping[str, Any] = {}, **sizes: int) -> Env:
  """Create an environment in this process.

  Args:
    kind: the kind of environment; see `load`.
    options: values of options by name; see `read_options`.
    **sizes: train_tasks, dev_tasks, test_tasks and max_steps; see `Env.__init__`.

  Raises:
    ValueError: the kind or an option is wrong.
  """
  checked = read_options(kind, options)
  arguments = {"options": checked} if vars(checked) else {}
  return load(kind)(**sizes, **arguments)
