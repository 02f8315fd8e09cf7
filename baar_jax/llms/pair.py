"""The models of a configuration: whether they can be asked, and the pair that asks them."""

from pathlib import Path

from baar_jax.config import Config, ModelsConfig
from baar_jax.llms.agent import Pair
from baar_jax.llms.calls import Calls
from baar_jax.llms.endpoints import endpoints
from baar_jax.llms.prices import prices_of
from baar_jax.llms.scripted import ERRORS, KnowledgeErrors, ScriptedPair


def check(config: Config) -> None:
  """Raises ValueError where a model has no price or no key, or the pair is in the wrong order:
  before anything is opened or run."""
  _check_group(config.models.kind, config.models)
  if "zero-shot" in config.baselines.rivals:
    try:
      _check_group(config.models.kind, config.baselines.judge)
    except ValueError as error:
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
  for endpoint in endpoints(group) if kind == "chat" else ():
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
