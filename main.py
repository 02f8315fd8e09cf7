"""Read the command line and run the stages.

    python main.py --stage=S --config=configs/NAME.py --config.seed=1

An invalid configuration ends the program with one line of error, before any file of a
run is opened.
"""

import contextlib
import dataclasses
import operator
import os
import re
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

import psutil
from absl import app, flags, logging
from jax.errors import JaxRuntimeError
from ml_collections import config_flags
from pydantic import TypeAdapter, ValidationError

from baar_jax.config import Config, require
from baar_jax.envs import table
from baar_jax.envs.base import EnvDied
from baar_jax.rivals import families
from baar_jax.rollout.budget import CapReached
from baar_jax.run import Run
from baar_jax.stages import evaluate, plan, train
from baar_serve import __main__ as serve
from baar_serve import traces as import_traces
from configs import quickstart
from tools import bench

STAGES = {
  "setup": train.setup,
  "profile": train.profile,
  "references": train.references,
  "pretrain": train.pretrain,
  **{stage: train.train_families(stage) for stage in families.STAGES},
  "evaluate": evaluate.main,
  "report": evaluate.report,
}
# Stages that --stage=all does not run. They run in one process only.
EXTRA = {
  "import": import_traces.main,
  "export": train.export,
  "bench": bench.main,
  "serve": serve.main,
}

FIELDS = "baar_jax/config.py lists the fields"
NOT_PLAIN = (
  "a value of the configuration is no plain value, contains itself, or is nested too "
  "deeply: correct the file of --config"
)


def main(command: tuple[Config, str]) -> int:
  """Run the stages of a command line.

  Args:
    command: the configuration and the stage's name, as `parse` returns them.

  Returns:
    The exit code: 0 after success, 2 after a user's mistake, 3 at --config.max_usd.
  """
  logging.set_verbosity(logging.WARNING)
  config, stage = command
  stages = list(STAGES) if stage == "all" else [stage]
  try:
    validate(config)
    if stage in EXTRA and config.distributed.processes > 1:
      raise ValueError(
        f"--stage={stage} runs in one process only: leave out --config.distributed"
      )
    if config.dry_run:
      plan.main(config, stages)
      return 0
    with contextlib.closing(Run(config)) as run:
      for name in stages:
        (STAGES | EXTRA)[name](run)
  except CapReached as cap:
    print(
      f"stopped by --config.max_usd: {cap}; raise it and run the same command again",
      file=sys.stderr,
    )
    return 3
  except sqlite3.Error as error:
    return fail(
      f"{config.runs}/{config.name}: {error} (from SQLite); check the free space and "
      "the rights, and run the same command again"
    )
  except (MemoryError, JaxRuntimeError) as error:
    if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return fail(
      "out of memory: lower --config.sft.micro_episodes or the router's sizes "
      f"({error!r:.200})"
    )
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
  stages = ["all", *STAGES, *EXTRA]
  try:
    config = config_flags.DEFINE_config_dataclass(
      "config",
      quickstart.get_config(),
      "Configuration file.",
      values,
      sys_argv=argv,
      parse_fn=load_config,
    )
    stage = flags.DEFINE_enum("stage", "all", stages, "What to do.", values)
    if values(argv)[1:]:
      raise flags.Error(
        "an argument does not begin with --: write --FIELD=VALUE, and quote spaces"
      )
    names = [word.partition("=")[0].lstrip("-") for word in argv]
    repeated = [name for name in names if names.count(name) > 1]
    for name in repeated:
      with contextlib.suppress(AttributeError):  # Not all words are fields.
        field = operator.attrgetter(name.removeprefix("config."))
        if isinstance(field(config.value), tuple):
          raise flags.Error(f"--{name} is given twice: give all its values at once")
  except flags.Error as error:
    # A user may have written a key into the value of one of these fields, so their
    # values are not printed.
    text = re.sub(
      "(?s)(key_variables?|base_urls|models|judge|serve)=.*",
      r"\1 has a value that cannot be read",
      str(error),
    )
    text = re.sub(
      "(?s)Type .* of field config.env.options is.*",
      "set each option: --config.env.options.NAME=VALUE",
      text,
    )
    sys.exit(fail(text))
  except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
    # If a flag has a wrong field or value, the library for flags raises one of these
    # exceptions.
    is_nested = isinstance(error, RecursionError)
    sys.exit(fail(NOT_PLAIN if is_nested else f"{error.args[0]}; {FIELDS}"))
  return config.value, stage.value


def load_config(name: str) -> Config:
  """Run a configuration file, and return its configuration.

  Args:
    name: FILE.py, or FILE.py:SETTING.

  Raises:
    flags.Error: the file is missing, raises an error, or returns no configuration.
  """
  path, *setting = name.split(":", 1)
  shipped_path = Path(quickstart.__file__).parent / Path(path).name
  if not os.path.isfile(path) and shipped_path.is_file():
    path = str(shipped_path)
  if not os.path.isfile(path):
    files = shipped_path.parent.glob("*.py")
    shipped = ",".join(sorted(file.stem for file in files))
    raise flags.Error(
      f"--config={name}: no such file; take one of configs/{{{shipped}}}.py, or a file "
      "with get_config()"
    )
  try:
    config = runpy.run_path(path)["get_config"](*setting)
  except ValidationError as error:
    raise flags.Error(explain(error, f"{name}: {error.title}")) from None
  except BaseException as error:
    cause = f"{type(error).__name__}: {error}".removesuffix(": ")
    raise flags.Error(f"cannot load {name} ({cause}): correct this file") from None
  if not isinstance(config, Config):
    raise flags.Error(
      f"{name}: get_config() returned a {type(config).__name__}; return a Config"
    )
  return config


def validate(config: Config) -> None:
  """Check a configuration, and convert its values to the types of their fields.

  Values that a configuration file assigns are checked nowhere else.

  Raises:
    ValueError: a value is invalid; one line names the field and its rule.
  """
  try:
    check_fields(config)
    checked = TypeAdapter(Config).validate_python(dataclasses.asdict(config))
  except ValidationError as error:
    raise ValueError(append_value(config, explain(error, "--config"))) from None
  except (RecursionError, TypeError):
    raise ValueError(NOT_PLAIN) from None
  vars(config).update(vars(checked))
  if config.env.kind == "recorded":
    # A served run has no environment, but the default file has options of its own one.
    config.env.options.clear()
  config.env.options = table.changed_options(config.env.kind, config.env.options)
  try:
    families.check_baselines(config)
    check_environment(config)
    check_machine(config)
  except ValueError as error:
    raise ValueError(append_value(config, f"--config.{error}")) from None


def check_fields(section: Config) -> None:
  """Raise an error if a configuration file assigned a field that does not exist.

  Args:
    section: the configuration, or one of its sections.

  Raises:
    ValueError: a section has an attribute that is no field of its class.
  """
  fields = {field.name for field in dataclasses.fields(section)}
  for name, value in vars(section).items():
    if name in fields and dataclasses.is_dataclass(value):
      check_fields(value)
    elif name not in fields:
      raise ValueError(
        f"Field {name} not found on dataclass {type(section).__name__}; {FIELDS}"
      )


def append_value(config: Config, text: str) -> str:
  """Append the value of the field that an error names.

  A value that may be a key, or a whole section, is not appended.

  Args:
    text: an error that begins with "--config." and the field.
  """
  path = re.match(r"--config\.([\w.]*\w)", text)[1].split(".")
  value = config
  usual = Config()
  for name in path:
    if dataclasses.is_dataclass(usual):
      value = getattr(value, name)
      usual = getattr(usual, name)
    elif isinstance(value, dict):
      value = value[name]
    if name.startswith(("key_variable", "base_urls")):
      return text
  if dataclasses.is_dataclass(usual):
    return text
  with contextlib.suppress(BaseException):  # A value of a user's file may have no repr.
    return f"{text}; it is {value!r:.80}"
  return text


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


def check_environment(config: Config) -> None:
  """Raise an error unless the environment supports the configuration.

  Raises:
    ValueError: a process has too many live episodes, or an option has a value that
      scripted models cannot play.
  """
  environment = table.load(config.env.kind)
  live = config.env.live_per_process
  most = environment.episodes_per_process or live
  require(
    live <= most, "env.live_per_process", f"at most {most} for {environment.__name__}"
  )
  if config.models.kind == "scripted":
    for name, value in environment.scripted_options.items():
      require(
        config.env.options.get(name, value) == value,
        f"env.options.{name}",
        f"{value} for scripted models, which follow solutions",
      )


def check_machine(config: Config) -> None:
  """Raise an error if a key's environment variable is unset, or memory is too small.

  Raises:
    ValueError: a variable that holds a key is unset, or training the router needs more
      memory than this machine has.
  """
  variables = {
    "models.key_variables": config.models.key_variables,
    "baselines.judge.key_variables": config.baselines.judge.key_variables,
    "serve.key_variable": (config.serve.key_variable,),
  }
  for field, names in variables.items():
    require(
      {"", *os.environ}.issuperset(names),
      field,
      "the name of an environment variable that is set, or ''",
    )
  router = config.router
  layer = (
    2 * (router.num_heads + router.num_kv_heads) * router.head_dim
    + 3 * router.intermediate_size
  )
  parameters = router.hidden_size * (router.num_layers * layer + router.vocab_size)
  rows = (config.env.processes or os.cpu_count()) * config.env.live_per_process
  cache = (
    rows * router.max_tokens * router.num_layers * router.num_kv_heads * router.head_dim
  )
  # An estimate in bytes. In training, each parameter needs four float32 numbers:
  # itself, its gradient, and AdamW's two moments. In the KV cache, a key and a value
  # need at least two bytes each.
  needed = 16 * parameters + 4 * cache
  require(
    needed <= psutil.virtual_memory().total,
    "router.num_layers",
    f"smaller, or hidden_size or vocab_size: they take {needed // 10**9:,} GB",
  )


def fail(error: Exception | str) -> int:
  """Print an error in one line. Return 2, the exit code after a user's mistake."""
  line = "".join(filter(str.isprintable, " ".join(str(error).split())))
  print(f"error: {line}", file=sys.stderr)
  return 2


def command() -> None:
  """Run the command line; this is the command `baar` of the installed package."""
  app.run(main, flags_parser=parse)


if __name__ == "__main__":
  command()
