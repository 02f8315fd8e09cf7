"""The models of a configuration: whether they can be asked, and the pair that asks them."""

import itertools
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
  if kind == "scripted" and not 2 <= len(names) <= 3:
    raise ValueError(f"the scripted models are 2 or 3, got {len(names)} names: {names}")
  groups = {"models": config.models}
  if "zero-shot" in config.baselines.rivals:
    groups["baselines.judge"] = config.baselines.judge
  for group_name, group in groups.items():
    try:
      prices = prices_of(group.names, group.prices)
      for endpoint in endpoints(group) if kind == "chat" else ():
        endpoint.key()
    except ValueError as error:
      raise ValueError(str(error).replace(".models.", f".{group_name}.")) from None
    if any(a.input > b.input and a.output > b.output for a, b in itertools.pairwise(prices)):
      raise ValueError(
        f"--config.{group_name}.names is {group.names!r}; one of them is dearer than the next: "
        "name the cheapest first, by the list's prices or your own"
      )


def open_pair(config: Config, path: Path) -> Pair:
  """The configured pair. API models record their calls in the store at `path`."""
  if config.models.kind == "scripted":
    c = config.models
    errors = ERRORS.get(config.env.kind, KnowledgeErrors)(len(c.names), c.skills)
    return ScriptedPair(c.names, errors, c.prices)
  from baar_jax.llms.chat import ChatPair  # a scripted run does without the client

  return ChatPair(config.models, Calls(path))
