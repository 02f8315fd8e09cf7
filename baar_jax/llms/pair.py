"""The models of a configuration, and what a run has spent on them."""

import re
from collections.abc import Sequence
from pathlib import Path

from baar_jax.config import Config, ModelsConfig
from baar_jax.llms.agent import Pair
from baar_jax.llms.calls import Calls, Spent, read_spent
from baar_jax.llms.endpoints import endpoints
from baar_jax.llms.errors import ERRORS, KnowledgeErrors
from baar_jax.llms.prices import prices_of
from baar_jax.llms.scripted import ScriptedPair


def check(config: Config) -> None:
  """Raises ValueError where a model has no price or no key, or the pair is in the wrong order:
  before anything is opened or run."""
  asked = [config.models]
  if "zero-shot" in config.baselines.rivals:
    asked.append(config.baselines.judge)
  for group in asked:
    try:
      _check_group(config.models.kind, group)
    except ValueError as error:
      if group is config.models:
        raise
      raise ValueError(str(error).replace(".models.", ".baselines.judge.")) from None
  if config.models.kind == "scripted":
    _scripted(config)


def _check_group(kind: str, group: ModelsConfig) -> None:
  small, *others = prices_of(group.names, group.prices)
  if any(small.input > other.input and small.output > other.output for other in others):
    raise ValueError(
      f"--config.models.names is {group.names!r}; the first one is dearer than another, by "
      "--config.models.prices or the list: name the cheapest first"
    )
  if kind == "chat":
    for endpoint in endpoints(group):
      endpoint.key()


def open_pair(config: Config, path: Path) -> Pair:
  """The configured pair. API models record their calls in the store at `path`."""
  if config.models.kind == "scripted":
    return _scripted(config)
  from baar_jax.llms.chat import ChatPair  # a scripted run does without the client

  prices = prices_of(config.models.names, config.models.prices)
  return ChatPair(config.models, prices, Calls(path))


def _scripted(config: Config) -> ScriptedPair:
  prices = prices_of(config.models.names, config.models.prices)
  return ScriptedPair(config.models.names, ERRORS.get(config.env.kind, KnowledgeErrors)(), prices)


def stores(directory: Path) -> list[Path]:
  """The stores of all of a run's processes."""
  files = directory.glob("episodes*.sqlite")
  return sorted(path for path in files if re.fullmatch(r"episodes(-\d+)?", path.stem))


def spent(directory: Path, names: Sequence[str]) -> Spent:
  """What the calls of all processes of a run have cost so far; the judge's come last."""
  return read_spent(stores(directory), len(names) + 1)  # the judge comes after the pair
