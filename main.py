"""Command line: python main.py --stage=S --config=configs/NAME.py --config.bopo.lam=0.3

What cannot work is refused in one line before anything is opened."""

import dataclasses
import os
import re
import runpy
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

# Before JAX is imported, whose callbacks could swallow it. In the background it stays ignored.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:

  def stop(*_) -> None:
    """Ends the program at a Ctrl-C, whatever it is at: all that counts is on disk."""
    os.write(2, b"\nstopped; the same command goes on from here\n")
    os._exit(130)

  signal.signal(signal.SIGINT, stop)

import psutil
from absl import app, flags, logging
from jax.errors import JaxRuntimeError
from ml_collections import config_flags
from pydantic import TypeAdapter, ValidationError

from baar_jax.config import (
  MARKUP_TOKENS,
  ROLLOUT_RANGE,
  SERVED,
  VANILLA_BATCHES,
  Config,
  ablate,
)
from baar_jax.envs import table
from baar_jax.envs.base import EnvDied
from baar_jax.rollout.budget import CapReached
from baar_jax.run import Run
from baar_jax.stages import bench, evaluate, import_traces, plan, serve, setup, train
from baar_jax.store import MOVED_OPTIONS
from configs import quickstart

STAGES = {"setup": setup.main, "profile": train.profile, "references": train.references}
STAGES |= {"pretrain": train.pretrain, "value": train.value, "sft": train.sft, "bopo": train.bopo}
STAGES |= {"baselines": train.baselines, "evaluate": evaluate.main, "forecast": evaluate.forecast}
STAGES |= {"report": evaluate.report}
EXTRA = {"import": import_traces.main, "export": train.export}  # of one process
EXTRA |= {"bench": bench.main, "serve": serve.main}


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
  except sqlite3.Error as error:  # such as a full disk
    return fail(f"{config.runs}/{config.name}: {error}")
  except (MemoryError, JaxRuntimeError) as error:
    if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return fail(f"out of memory: lower --config.sft.micro_episodes or other sizes ({error!r:.200})")
  except (ValueError, NotImplementedError, EnvDied, OSError) as error:
    return fail(error)
  return 0


def parse(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> tuple[Config, str]:
  """The configuration and the stage of a command line; a wrong one ends the program in one line."""
  words, stages = "Configuration file.", ["all", *STAGES, *EXTRA]
  try:
    config = config_flags.DEFINE_config_dataclass(
      "config", quickstart.get_config(), words, values, sys_argv=argv, parse_fn=load_config
    )
    stage = flags.DEFINE_enum("stage", "all", stages, "What to do.", values)
    if values(argv)[1:]:
      raise flags.Error("an argument without --, or a value with a blank; a stage is --stage=NAME")
  except flags.Error as error:  # without an address or a variable's name, which may hold a key
    hidden = "(?s)(key_variables?|base_urls|models|judge|serve)=.*"
    sys.exit(fail(re.sub(hidden, r"\1 has a value that cannot be read", str(error))))
  except (AttributeError, KeyError, TypeError, ValueError) as error:  # of the config's dataclasses
    moved = re.search(rf"Field ({'|'.join(MOVED_OPTIONS)}) not found .*EnvConfig", str(error))
    remedy = "the fields are in baar_jax/config.py"
    if moved:
      remedy = f"set --config.env.options.{moved[1]}"
    sys.exit(fail(f"{error.args[0]}; {remedy}"))
  return config.value, stage.value


def load_config(name: str) -> Config:
  """The configuration of FILE.py or FILE.py:SETTING; flags.Error, whatever the file does wrong."""
  path, *setting = name.split(":", 1)
  if not os.path.isfile(path):
    shipped = sorted(file.stem for file in Path(quickstart.__file__).parent.glob("*.py"))
    remedy = f"take one of configs/{{{','.join(shipped)}}}.py, or a file with get_config()"
    raise flags.Error(f"--config={name}: there is no such file; {remedy}")
  try:
    config = runpy.run_path(path)["get_config"](*setting)
  except ValidationError as error:
    raise flags.Error(explain(error, error.title)) from None
  except BaseException as error:
    raise flags.Error(f"{name}: {type(error).__name__}: {error}") from None
  if not isinstance(config, Config):
    raise flags.Error(f"{name}: get_config() returned a {type(config).__name__} and no Config")
  return config


def validate(config: Config) -> None:
  """Refuses what cannot work by ValueError: one line with the field and what it must be.

  Values take their field's type: what a configuration file has assigned, nobody has checked yet.
  """
  try:
    vars(config).update(vars(TypeAdapter(Config).validate_python(dataclasses.asdict(config))))
    config.env.options = table.changed_options(config.env.kind, config.env.options)
  except ValidationError as error:
    raise ValueError(explain(error, "--config")) from None
  for name, works, must in _cross_checks(config):
    if not works:
      raise ValueError(f"--config.{name} must be {must}")


def explain(error: ValidationError, prefix: str) -> str:
  """The first error in one line, without the value, for it may be or hold a key."""
  first = error.errors(include_input=False)[0]
  return f"{'.'.join(map(str, (prefix, *first['loc'])))}: {first['msg']}"


def _cross_checks(c: Config) -> Iterator[tuple[str, bool, str]]:
  """Checks beside those of single fields: a field, whether it works, and what it must be."""
  b, d, e, r = c.baselines, c.distributed, c.env, c.router
  environment = table.load(e.kind)
  chat = c.models.kind == "chat"
  most = environment.episodes_per_process or e.live_per_process
  works = e.live_per_process <= most
  yield "env.live_per_process", works, f"at most {most} for {environment.__name__}"
  for name, value in environment.scripted_options.items():
    works = chat or e.options.get(name, value) == value
    yield f"env.options.{name}", works, f"{value} for scripted models, which follow solutions"
  yield "models.kind", e.kind != SERVED or chat, "chat with --config.env.kind=served"
  yield "distributed.process", d.process < d.processes, "below --config.distributed.processes"
  works = d.processes == 1 or bool(d.coordinator)
  yield "distributed.coordinator", works, "host:port of process 0"
  works = not r.weights or c.pretrain.epochs == 0
  yield "pretrain.epochs", works, "0 with --config.router.weights, which are pretrained"
  for section in ("profile", "value", "sft", "bopo", "baselines", "evaluate"):
    for name, values in vars(getattr(c, section)).items():
      if isinstance(values, tuple):  # policies are told apart by these, written with six digits
        texts = {value if isinstance(value, str) else f"{value:g}" for value in values}
        yield f"{section}.{name}", len(texts) == len(values), "of different values"
  yield "evaluate.thresholds", 0.5 not in c.evaluate.thresholds, "without 0.5, which is argmax"
  most = ROLLOUT_RANGE // (VANILLA_BATCHES * c.bopo.group_size)
  yield "bopo.updates", c.bopo.updates <= most, f"at most {most}, for each episode's own seed"
  works = c.train_seeds <= c.evaluate.seeds
  yield "train_seeds", works, "at most --config.evaluate.seeds, so that each router is evaluated"
  works = b.compared_lam in (None, *c.bopo.lam)
  yield "baselines.compared_lam", works, f"one of --config.bopo.lam, {c.bopo.lam}"
  same = [name for name in b.ablations if ablate(c, name) == c]
  yield "baselines.ablations", not same, f"without {', '.join(same)}: that is left out anyway"
  count, scripted = len(c.models.names), c.models.kind == "scripted"
  must = f"{'two or three' if scripted else 'two or more'} models, the cheapest first"
  yield "models.names", count > 1 and not (scripted and count > 3), must
  yield "baselines.judge.names", len(b.judge.names) == 1, "one model"
  for name, models in (("models", c.models), ("baselines.judge", b.judge)):
    unset = {*models.key_variables} - {"", *os.environ}
    yield f"{name}.key_variables", not unset, "names of environment variables that are set, or ''"
    for key in ("prices", "skills", "base_urls", "key_variables"):
      count, for_all = len(getattr(models, key)), key in ("base_urls", "key_variables")
      works = count in (0, len(models.names)) or for_all and count == 1
      yield f"{name}.{key}", works, f"one for {'all or ' * for_all}each of the names, or ()"
  works = c.serve.key_variable in ("", *os.environ)
  yield "serve.key_variable", works, "the name of an environment variable that is set, or ''"
  step = r.description_tokens + r.action_tokens + 2 * r.result_tokens + MARKUP_TOKENS[r.view]
  yield "router.max_tokens", r.max_tokens >= 2 * step, f"at least {2 * step} for these previews"
  works = r.num_heads % r.num_kv_heads == 0
  yield "router.num_heads", works, "a multiple of --config.router.num_kv_heads"
  layer = 2 * (r.num_heads + r.num_kv_heads) * r.head_dim + 3 * r.intermediate_size
  needed = 16 * r.hidden_size * (r.num_layers * layer + r.vocab_size)  # with gradient and moments
  rows = (e.processes or os.cpu_count()) * e.live_per_process  # of keys and values, in 2 bytes
  needed += 4 * rows * r.max_tokens * r.num_layers * r.num_kv_heads * r.head_dim
  works = needed <= psutil.virtual_memory().total
  yield "router.num_layers", works, f"less, or other sizes: these take {needed // 10**9:,} GB"


def fail(error: Exception | str) -> int:
  """Says what is wrong in one line. Returns the exit code of a user's mistake."""
  line = "".join(filter(str.isprintable, " ".join(str(error).split())))
  print(f"error: {line}", file=sys.stderr)
  return 2


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
