"""The table of environments, and the options of each."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import runpy
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baar_jax.envs.base import Env, NoOptions

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
    ValueError: there is no such file or class, or the file fails.
  """
  if kind in ENVIRONMENTS:
    module, _, name = ENVIRONMENTS[kind].rpartition(".")
    return vars(importlib.import_module(f"baar_jax.envs.{module}"))[name]
  path, _, name = kind.rpartition(":")
  problem = f"--config.env.kind is {kind!r}, but"
  if not Path(path).is_file():
    known = ", ".join(ENVIRONMENTS)
    raise ValueError(f"{problem} there is no file {path!r}; take FILE.py:CLASS or {known}")
  try:
    environment = runpy.run_path(path).get(name)
  except (Exception, SystemExit) as error:  # the user's code may raise anything
    raise ValueError(f"{problem} {path} fails: {error!r:.200}") from error
  if not isinstance(environment, type) or not issubclass(environment, Env):
    raise ValueError(f"{problem} {path} has no class {name} of Env")
  return environment


def read_options(kind: str, options: Mapping[str, Any]) -> Any:
  """Check an environment's options, and return them as its dataclass.

  A text, as the command line has it, is read as a value of its field's type.

  Raises:
    ValueError: a name, a type or a value is wrong; in one line with the known options.
  """
  environment = load(kind)
  types = typing.get_type_hints(environment.Options)
  known = f"the options of {kind} are {', '.join(types) or 'none'}"
  values = {}
  for name, value in options.items():
    seen = f"--config.env.options.{name} is {value!r:.80}"
    if name not in types:
      raise ValueError(f"{seen}, but there is no such option; {known}")
    values[name] = _read_value(value, types[name])
    if type(values[name]) is not types[name]:
      expected = inspect.formatannotation(types[name])
      raise ValueError(f"{seen}, expected {expected}; {known}")
  try:
    return environment.Options(**values)
  except (TypeError, ValueError) as error:  # an option is missing, or out of bounds
    raise ValueError(f"--config.env.options: {error}; {known}") from None


def _read_value(value: Any, expected: type) -> Any:
  """Read a text as a literal, and a whole number as a float, if such a value is due."""
  if isinstance(value, str) and expected is not str:
    with contextlib.suppress(ValueError, SyntaxError):
      value = ast.literal_eval(value)
  if expected is float and type(value) is int:
    value = float(value)
  return value


def changed_options(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
  """Return the options that differ from their defaults, checked as by `read_options`."""
  checked = read_options(kind, options)
  changed = {}
  for field in dataclasses.fields(checked):
    value = vars(checked)[field.name]
    if value != field.default:
      changed[field.name] = value
  return changed


def make(kind: str, options: Mapping[str, Any] = {}, **sizes: int) -> Env:  # noqa: B006
  """Make an environment in this process.

  Args:
    kind: as for `load`.
    options: as for `read_options`, which raises ValueError.
    **sizes: train_tasks, dev_tasks, test_tasks and max_steps.
  """
  environment = load(kind)
  checked = read_options(kind, options)
  if isinstance(checked, NoOptions):
    return environment(**sizes)
  return environment(options=checked, **sizes)
