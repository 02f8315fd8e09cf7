"""The models of a configuration: whether they can be asked, and the pair that asks them."""

from pathlib import Path

from baar_jax.config import Config
from baar_jax.llms.agent import Pair
from baar_jax.llms.calls import Calls
from baar_jax.llms.endpoints import endpoints
from baar_jax.llms.prices import prices_of
from baar_jax.llms.scripted import ERRORS, KnowledgeErrors, ScriptedPair


def check(config: Config) -> None:
  """Raises ValueError where a model has no price or no key, or the pair is in the wrong order:
  before anything is opened or run."""
  kind, names = config.models.kind, config.models.names
  if kind == "scripted" and len(names) != 2:
    raise ValueError(f"the scripted pair needs 2 model names, got {len(names)}: {names}")
  groups = {"models": config.models}
  if "zero-shot" in config.baselines.rivals:
    groups["baselines.judge"] = config.baselines.judge
  for group_name, group in groups.items():
    try:
      small, *others = prices_of(group.names, group.prices)
      for endpoint in endpoints(group) if kind == "chat" else ():
        endpoint.key()
    except ValueError as error:
      raise ValueError(str(error).replace(".models.", f".{group_name}.")) from None
    if any(small.input > other.input and small.output > other.output for other in others):
      raise ValueError(
        f"--config.{group_name}.names is {group.names!r}; the first one is dearer than another: "
        "name the cheapest first, by the list's prices or your own"
      )


def open_pair(config: Config, path: Path) -> Pair:
  """The configured pair. API models record their calls in the store at `path`."""
  if config.models.kind == "scripted":
    errors = ERRORS.get(config.env.kind, KnowledgeErrors)()
    return ScriptedPair(config.models.names, errors, config.models.prices)
  from baar_jax.llms.chat import ChatPair  # a scripted run does without the client

  return ChatPair(config.models, Calls(path))
