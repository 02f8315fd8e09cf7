"""Refuses a configuration that cannot work, in one line that names the field; reads a run's."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pandas
import psutil
from pydantic import TypeAdapter, ValidationError

from baar_jax.config import MARKUP_TOKENS, ROLLOUT_RANGE, VANILLA_BATCHES, Config, ablate

RESTORE = "restore a copy, or choose another --config.name"


def validate(config: Config) -> None:
  """Refuses what cannot work by ValueError: one line with the field and what it must be.

  Values take their field's type: what a configuration file has assigned, nobody has checked yet.
  """
  try:
    vars(config).update(vars(TypeAdapter(Config).validate_python(dataclasses.asdict(config))))
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
  works = e.kind != "appworld" or e.live_per_process == 1
  yield "env.live_per_process", works, "1 for AppWorld, whose worlds need a process each"
  works = e.short_tasks or c.models.kind == "chat"
  yield "env.short_tasks", works, "True for scripted models, which follow solutions"
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
    for key in ("prices", "skills"):
      works = len(getattr(models, key)) in (0, len(models.names))
      yield f"{name}.{key}", works, "one for each of the names, or ()"
    unset = {variable for variable in models.key_variables if variable} - {*os.environ}
    yield f"{name}.key_variables", not unset, "names of environment variables that are set, or ''"
    for key in ("base_urls", "key_variables"):
      works = len(getattr(models, key)) in (0, 1, len(models.names))
      yield f"{name}.{key}", works, "for all models together, or one for each"
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


def read_config(directory: Path) -> Config | None:
  """The configuration that a run's directory was made with; None where there is none.

  Raises ValueError if it cannot be read, or if a store is gone, and what was spent with it.
  """
  path = directory / "config.json"
  if not path.exists():
    return None
  try:
    stored = TypeAdapter(Config).validate_json(path.read_bytes())
  except ValidationError:
    raise ValueError(f"{path} is no configuration of this version: {RESTORE}") from None
  for number in range(stored.distributed.processes):
    store = directory / (f"episodes-{number}.sqlite" if number else "episodes.sqlite")
    if not store.exists() or not store.stat().st_size:
      raise ValueError(f"{store} is gone or empty, and with it what was spent: {RESTORE}")
  return stored


def flatten(config: Config) -> dict[str, object]:
  """The values of all fields by their names, such as bopo.lam."""
  return pandas.json_normalize(dataclasses.asdict(config)).to_dict("records")[0]
