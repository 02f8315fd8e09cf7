"""Read a configuration of dataclasses from the flags of a command line."""

import contextlib
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from absl import flags
from ml_collections import config_flags
from pydantic import TypeAdapter, ValidationError

# The type of a configuration.
Settings = TypeVar("Settings")


def read_flags(
  argv: Sequence[str],
  usual: Settings,
  values: flags.FlagValues,
  load: Callable[[str], Settings] | None = None,
) -> Settings:
  """Read a configuration from a command line, and all other flags that are defined.

  Args:
    argv: the command line, the program's name first.
    usual: the configuration that the flags change.
    values: absl's flags.
    load: reads a configuration file (--config=FILE); None forbids such a file.

  Raises:
    ValueError: the command line is invalid; one line says what to correct.
  """
  try:
    config = config_flags.DEFINE_config_dataclass(
      "config", usual, "Configuration.", values, sys_argv=argv, parse_fn=load
    )
    if values(argv)[1:]:
      raise flags.Error(
        "an argument does not begin with --: write --FIELD=VALUE, and quote spaces"
      )
    names = [word.partition("=")[0].lstrip("-") for word in argv]
    for name in names:
      with contextlib.suppress(AttributeError):  # Not all words are fields.
        field = operator.attrgetter(name.removeprefix("config."))
        if names.count(name) > 1 and isinstance(field(config.value), tuple):
          raise flags.Error(f"--{name} is given twice: give all its values at once")
  except flags.Error as error:
    # A user may have written a key into the value of one of these fields, so their
    # values are not printed.
    text = re.sub(
      "(?s)(keys|key_variables?|base_urls|models|judge)=.*",
      r"\1 has a value that cannot be read",
      str(error),
    )
    raise ValueError(text) from None
  except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
    # If a flag has a wrong field or value, the library for flags raises one of these
    # exceptions.
    listing = f"{type(usual).__module__.replace('.', '/')}.py lists the fields"
    raise ValueError(f"{error.args[0]}; {listing}") from None
  return config.value


def check_values(config: Settings) -> None:
  """Check a configuration, and convert its values to the types of their fields.

  Values that a configuration file assigns are checked nowhere else.

  Raises:
    ValueError: a value is invalid; one line names the field and its rule.
  """
  try:
    text = json.dumps(config, default=vars)
    checked = TypeAdapter(type(config)).validate_json(text)
  except ValidationError as error:
    raise ValueError(explain(error, "--config")) from None
  except (TypeError, ValueError):
    raise ValueError(
      "a value of the configuration is no plain value: correct the file of --config"
    ) from None
  vars(config).update(vars(checked))


def check_variables(field: str, names: Sequence[str]) -> None:
  """Raise an error unless the environment variables that hold keys are set.

  So a key that is given in place of a variable's name is not stored.

  Args:
    field: the field of the configuration that has their names.
    names: the names; "" stands for no key.

  Raises:
    ValueError: a variable is not set.
  """
  if not {"", *os.environ}.issuperset(names):
    raise ValueError(
      f"--config.{field} must be the name of an environment variable that is set, or ''"
    )


def explain(error: ValidationError, prefix: str) -> str:
  """Describe the first error of a validation in one line.

  The value itself stays out of the text, because it may hold a key.

  Args:
    prefix: the name of the object that was checked, such as "--config".
  """
  first = error.errors(include_input=False)[0]
  field = ".".join(map(str, (prefix, *first["loc"])))
  # The validators of baar_jax/config.py raise ValueError.
  if first["type"] == "value_error":
    return f"{field}.{first['ctx']['error']}"
  return f"{field}: {first['msg']}"


def fail(error: Exception | str) -> int:
  """Print an error in one line. Return 2, the exit code after a user's mistake."""
  line = "".join(filter(str.isprintable, " ".join(str(error).split())))
  print(f"error: {line}", file=sys.stderr)
  return 2
