"""The command line: python main.py --stage=S --config=configs/NAME.py --config.seed=1

A configuration that cannot work is refused in one line, before anything is opened.
"""

import dataclasses
import os
import re
import runpy
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

# Callbacks of JAX could swallow a Ctrl-C, so this comes before JAX is imported. In the
# background it stays ignored.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:

  def stop(*_: object) -> None:
    """End the program at once: everything that counts is on disk."""
    os.write(2, b"\nstopped; the same command goes on from here\n")
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
from baar_jax.rollout.budget import CapReached
from baar_jax.run import Run
from baar_jax.stages import bench, evaluate, import_traces, plan, serve, setup, train
from baar_jax.store import MOVED_OPTIONS
from baar_jax.train import families
from configs import quickstart

STAGES = {
  "setup": setup.main,
  "profile": train.profile,
  "references": train.references,
  "pretrain": train.pretrain,
  **{stage: train.train_families(stage) for stage in families.STAGES},
  "evaluate": evaluate.main,
  "forecast": evaluate.forecast,
  "report": evaluate.report,
}
EXTRA = {  # of one process
  "import": import_traces.main,
  "export": train.export,
  "bench": bench.main,
  "serve": serve.main,
}

# What is wrong with a flag's field: what to do.
REMEDIES = {
  f"Field ({'|'.join(MOVED_OPTIONS)}) not found": r"set --config.env.options.\1",
  "Field (together|repeats|explored) not found": (
    "set --config.references.plans, such as (('steps',20),('repeats',10,True))"
  ),
}


def main(command: tuple[Config, str]) -> int:
  """Run the stages of a command line that `parse` has read.

  Returns:
    The exit code.
  """
  logging.set_verbosity(logging.WARNING)
  config, stage = command
  stages = list(STAGES) if stage == "all" else [stage]
  try:
    validate(config)
    if stage in EXTRA and config.distributed.processes > 1:
      raise ValueError(
        f"--stage={stage} runs in one process: leave out --config.distributed"
      )
    if config.dry_run:
      plan.main(config, stages)
      return 0
    with closing(Run(config)) as run:
      for name in stages:
        (STAGES | EXTRA)[name](run)
  except CapReached as cap:
    print(
      f"stopped by --config.max_usd: {cap}; a higher one goes on from here",
      file=sys.stderr,
    )
    return 3
  except sqlite3.Error as error:  # such as a full disk
    return fail(f"{config.runs}/{config.name}: {error}")
  except (MemoryError, JaxRuntimeError) as error:
    if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return fail(
      "out of memory: lower --config.sft.micro_episodes or other sizes "
      f"({error!r:.200})"
    )
  except (ValueError, NotImplementedError, EnvDied, OSError) as error:
    return fail(error)
  return 0


def parse(
  argv: list[str], values: flags.FlagValues = flags.FLAGS
) -> tuple[Config, str]:
  """Read the configuration and the stage of a command line.

  A wrong one ends the program in one line.
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
        "an argument without --, or a value with a blank; a stage is --stage=NAME"
      )
  except flags.Error as error:
    # An address or a variable's name may hold a key, and stays hidden.
    hidden = "(?s)(key_variables?|base_urls|models|judge|serve)=.*"
    text = re.sub(hidden, r"\1 has a value that cannot be read", str(error))
    remedy = "set each option: --config.env.options.NAME=VALUE"
    text = re.sub("(?s)Type .* of field config.env.options is.*", remedy, text)
    sys.exit(fail(text))
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    # These are the errors of the configuration's dataclasses.
    remedy = "the fields are in baar_jax/config.py"
    for pattern, advice in REMEDIES.items():
      if match := re.search(pattern, str(error)):
        remedy = match.expand(advice)
    sys.exit(fail(f"{error.args[0]}; {remedy}"))
  return config.value, stage.value


def load_config(name: str) -> Config:
  """Load the configuration of FILE.py or FILE.py:SETTING.

  Raises:
    flags.Error: the file has any error.
  """
  path, *setting = name.split(":", 1)
  if not os.path.isfile(path):
    files = Path(quickstart.__file__).parent.glob("*.py")
    shipped = ",".join(sorted(file.stem for file in files))
    remedy = f"take one of configs/{{{shipped}}}.py, or a file with get_config()"
    raise flags.Error(f"--config={name}: there is no such file; {remedy}")
  try:
    config = runpy.run_path(path)["get_config"](*setting)
  except ValidationError as error:
    raise flags.Error(explain(error, error.title)) from None
  except BaseException as error:
    raise flags.Error(f"{name}: {type(error).__name__}: {error}") from None
  if not isinstance(config, Config):
    raise flags.Error(
      f"{name}: get_config() returned a {type(config).__name__} and no Config"
    )
  return config


def validate(config: Config) -> None:
  """Check a configuration, and convert its values to the types of their fields.

  Nobody has checked the values that a configuration file has assigned.

  Raises:
    ValueError: a value cannot work; one line names the field and its rule.
  """
  try:
    checked = TypeAdapter(Config).validate_python(dataclasses.asdict(config))
  except ValidationError as error:
    raise ValueError(explain(error, "--config")) from None
  vars(config).update(vars(checked))
  config.env.options = table.changed_options(config.env.kind, config.env.options)
  try:
    families.check_baselines(config)
    check_environment(config)
    check_machine(config)
  except ValueError as error:
    raise ValueError(f"--config.{error}") from None


def explain(error: ValidationError, prefix: str) -> str:
  """Tell the first error in one line, without the value: it may hold a key."""
  first = error.errors(include_input=False)[0]
  field = ".".join(map(str, (prefix, *first["loc"])))
  if first["type"] == "value_error":  # our own validators raise it
    return f"{field}.{first['ctx']['error']}"
  return f"{field}: {first['msg']}"


def check_environment(config: Config) -> None:
  """Refuse a configuration that the environment cannot run."""
  environment = table.load(config.env.kind)
  live = config.env.live_per_process
  most = environment.episodes_per_process or live
  must = f"at most {most} for {environment.__name__}"
  require(live <= most, "env.live_per_process", must)
  if config.models.kind == "scripted":
    for name, value in environment.scripted_options.items():
      works = config.env.options.get(name, value) == value
      must = f"{value} for scripted models, which follow solutions"
      require(works, f"env.options.{name}", must)


def check_machine(config: Config) -> None:
  """Check for the variables with keys, and the memory for the router."""
  variables = {"", *os.environ}
  judge = config.baselines.judge
  for name, models in (("models", config.models), ("baselines.judge", judge)):
    works = variables.issuperset(models.key_variables)
    must = "names of environment variables that are set, or ''"
    require(works, f"{name}.key_variables", must)
  require(
    config.serve.key_variable in variables,
    "serve.key_variable",
    "the name of an environment variable that is set, or ''",
  )
  r = config.router
  layer = 2 * (r.num_heads + r.num_kv_heads) * r.head_dim + 3 * r.intermediate_size
  parameters = r.hidden_size * (r.num_layers * layer + r.vocab_size)
  rows = (config.env.processes or os.cpu_count()) * config.env.live_per_process
  cache = rows * r.max_tokens * r.num_layers * r.num_kv_heads * r.head_dim
  # Parameters have a gradient and two moments. The cache has keys and values.
  needed = 16 * parameters + 4 * cache
  require(
    needed <= psutil.virtual_memory().total,
    "router.num_layers",
    f"less, or other sizes: these take {needed // 10**9:,} GB",
  )


def fail(error: Exception | str) -> int:
  """Print an error in one line; return the exit code of a user's mistake."""
  line = "".join(filter(str.isprintable, " ".join(str(error).split())))
  print(f"error: {line}", file=sys.stderr)
  return 2


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
