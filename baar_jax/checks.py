"""Refuses a configuration that cannot work, in one line that names the field; reads a run's."""

import contextlib
import dataclasses
import json
import operator
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pandas
import psutil
from pydantic import TypeAdapter, ValidationError

from baar_jax.config import (
  ENVS,
  MARKUP_TOKENS,
  ROLLOUT_RANGE,
  SERVED,
  VANILLA_BATCHES,
  Config,
  ablate,
)

RESTORE = "restore a copy, or choose another --config.name"
# Fields that may hold a key by mistake, and the sections around them: never shown.
SECRETS = ("key_variables", "base_urls", "models", "judge")


def validate(config: Config) -> None:
  """Refuses what cannot work by ValueError: one line with the field, its value and what it must be.

  Values take their field's type: what a configuration file has assigned, nobody has checked yet.
  """
  try:
    vars(config).update(vars(TypeAdapter(Config).validate_python(dataclasses.asdict(config))))
  except ValidationError as error:
    raise ValueError(explain(error, "--config", config)) from None
  for name, works, must in _cross_checks(config):
    if not works:
      value = show(name, operator.attrgetter(name)(config))
      raise ValueError(f"--config.{name} is {value}; it must be {must}")
  total = psutil.virtual_memory().total
  for name, needed in _estimate_bytes(config).items():
    if needed > total:
      sizes = f"{needed // 10**9:,} GB, this machine has {total // 10**9:,} GB"
      raise ValueError(f"--config.{name} has sizes that take at least {sizes}: make some smaller")


def show(name: str, value: object) -> str:
  """A field's value, unless a user may have put a key there."""
  secret = name.endswith(SECRETS)
  return "not shown, for it may be or hold a key" if secret else f"{value!r:.200}"


def explain(error: ValidationError, prefix: str, config: object = None) -> str:
  """The first error in one line; its value is that of the whole field where `config` has it."""
  first = error.errors()[0]
  names = [part for part in first["loc"] if isinstance(part, str)]
  name = ".".join(names or map(str, first["loc"]))
  cause, _, must = first["msg"].partition(" should ")  # of pydantic: "Input should be ..."
  must = must or f"be valid: {cause.removeprefix('Value error, ')}"
  must = re.sub(r"^match pattern '\^\((.*)\)\$'", r"be one of \1", must)
  value = first["input"]
  with contextlib.suppress(AttributeError):  # the whole field, where the error is of an entry
    value = operator.attrgetter(name)(config)
  # A value without a field's name, or with that of none, may be meant for any field.
  shown = show(name if names and "Unexpected" not in cause else SECRETS[0], value)
  which = "each entry" if isinstance(first["loc"][-1], int) else "it"
  return f"{prefix}.{name} is {shown}; {which} must {must}"


def _cross_checks(c: Config) -> Iterator[tuple[str, bool, str]]:
  """Checks beside those of single fields: a field, whether it works, and what it must be."""
  b, d, r = c.baselines, c.distributed, c.router
  works = bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", c.name))
  yield "name", works, 'made of letters, digits, "_", "." and "-"; the last two may not be first'
  works = c.env.kind in ENVS or bool(re.fullmatch(r".+\.py:\w+", c.env.kind))
  yield "env.kind", works, f"one of {', '.join(ENVS)}, or FILE.py:CLASS"
  alone = len(c.bopo.lam) == c.train_seeds == d.processes == 1 and c.models.kind == "chat"
  works = c.env.kind != SERVED or alone  # clients play with one router at a time
  must = "another one, or have chat models, one bopo.lam, one training seed and one process"
  yield "env.kind", works, must
  works = c.env.kind != "appworld" or c.env.live_per_process == 1
  yield "env.live_per_process", works, "1 for AppWorld, whose worlds need a process each"
  works = c.env.short_tasks or c.models.kind == "chat"
  yield "env.short_tasks", works, "True for scripted models, which follow solutions"
  works = 0 <= d.process < d.processes
  yield "distributed.process", works, "at least 0 and below --config.distributed.processes"
  works = d.processes == 1 or bool(re.fullmatch(r".+:\d+", d.coordinator))
  yield "distributed.coordinator", works, "host:port of process 0"
  yield "router.layers", bool(r.weights) or not r.layers, "0 without --config.router.weights"
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
  yield "models.names", len(c.models.names) > 1, "two models or more, the cheapest first"
  works = len(c.models.skills) in (0, len(c.models.names))
  yield "models.skills", works, "one for each of --config.models.names, or ()"
  yield "baselines.judge.names", len(b.judge.names) == 1, "one model"
  for name, models in (("models", c.models), ("baselines.judge", b.judge)):
    unset = {variable for variable in models.key_variables if variable} - {*os.environ}
    yield f"{name}.key_variables", not unset, "names of environment variables that are set, or ''"
    count, urls = len(models.names), [url.rstrip("/") for url in models.base_urls or ("",)]
    for key, values in (("base_urls", urls), ("key_variables", models.key_variables)):
      works = len(values) in (0, 1, count)
      yield f"{name}.{key}", works, f"for all models together or for each of the {count}"
    served = set(zip(models.names, urls * count if len(urls) == 1 else urls))
    yield f"{name}.names", len(served) == count, "different at one address"
  step = r.description_tokens + r.action_tokens + 2 * r.result_tokens + MARKUP_TOKENS[r.view]
  yield "router.max_tokens", r.max_tokens >= 2 * step, f"at least {2 * step} for these previews"
  works = r.num_heads % r.num_kv_heads == 0
  yield "router.num_heads", works, "a multiple of --config.router.num_kv_heads"


def _estimate_bytes(c: Config) -> dict[str, int]:
  """The least memory that the sizes of a section take; an object is at least 100 bytes."""
  r, e = c.router, c.env
  live = (e.processes or os.cpu_count()) * e.live_per_process
  layer = 2 * r.hidden_size * (r.num_heads + r.num_kv_heads) * r.head_dim
  layer += 3 * r.hidden_size * r.intermediate_size
  parameters = r.num_layers * layer + r.vocab_size * r.hidden_size
  token = 4 * r.num_layers * r.num_kv_heads * r.head_dim * live  # its keys and values, in 2 bytes
  token += 4 * c.sft.micro_episodes * r.hidden_size
  jobs = (e.train_tasks + e.dev_tasks) * (c.profile.trials + c.references.samples)
  jobs += (e.dev_tasks + e.test_tasks) * c.evaluate.seeds
  return {
    "router": 16 * parameters + r.max_tokens * token,  # a gradient and two moments are as large
    "env": 10**7 * e.processes + 10**4 * live + 100 * jobs,
  }


def read_config(directory: Path) -> dict:
  """The configuration that a run's directory was made with; empty where there is none.

  Raises ValueError if it cannot be read, or if a store is gone, and what was spent with it.
  """
  path = directory / "config.json"
  if not path.exists():
    return {}
  try:
    stored = json.loads(path.read_text())
    processes = range(stored["distributed"]["processes"])
  except (ValueError, TypeError, KeyError, RecursionError):
    raise ValueError(f"{path} cannot be read as a configuration: {RESTORE}") from None
  for number in processes:
    store = directory / (f"episodes-{number}.sqlite" if number else "episodes.sqlite")
    if not store.exists() or not store.stat().st_size:
      raise ValueError(f"{store} is gone or empty, and with it what was spent: {RESTORE}")
  return stored


def differences(stored: dict, new: dict) -> list[tuple]:
  """(field, was, now) of every value that differs; another version of the program lacks some."""
  was, now = (pandas.json_normalize(config).to_dict("records")[0] for config in (stored, new))
  rows = [
    (name, was.get(name, "no such field"), now.get(name, "no such field"))
    for name in sorted(was | now)
  ]
  return [row for row in rows if row[1] != row[2]]
