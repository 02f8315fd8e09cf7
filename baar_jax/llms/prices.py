"""Compute the dollars of calls at the list prices of genai-prices, or at the user's."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.episode import Task, Usage
from baar_jax.llms.agent import Agent, Reserve


@dataclasses.dataclass(frozen=True)
class Price:
  """The prices of a model in dollars per million tokens, for each kind of token.

  Attributes:
    input: price of prompt tokens that are not in the prompt cache.
    cached_input: price of prompt tokens that are read from the prompt cache.
    output: price of the reply's tokens.
    cache_write: price of prompt tokens that are written to the prompt cache; None means
      the price of input.
    tiers: pairs of a number of prompt tokens and a price, in ascending order. The price
      holds for all tokens of a call whose prompt has more tokens than that number.
  """

  input: float
  cached_input: float
  output: float
  cache_write: float | None = None
  tiers: tuple[tuple[int, "Price"], ...] = ()

  def worst_case_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
    """Compute the worst case of a call in dollars, over all tiers and cache states.

    Args:
      prompt_tokens: an upper bound on the tokens of the prompt.
      completion_tokens: an upper bound on the tokens of the reply.
    """
    prompt_price = output_price = 0.0
    for price in (self, *dict(self.tiers).values()):
      write_price = price.cache_write or 0.0
      prompt_price = max(prompt_price, price.input, price.cached_input, write_price)
      output_price = max(output_price, price.output)
    return (prompt_tokens * prompt_price + completion_tokens * output_price) / 1e6

  def cost_usd(self, usage: Usage) -> float:
    """Compute the dollars of a call.

    Raises:
      ValueError: a count is negative, or cached and written tokens exceed the prompt.
    """
    for start, price in reversed(self.tiers):
      if usage.prompt_tokens > start:
        return price.cost_usd(usage)
    written = usage.cache_write_tokens
    cached = usage.cached_tokens
    fresh = usage.prompt_tokens - cached - written
    if min(fresh, cached, written, usage.completion_tokens) < 0:
      raise ValueError(
        f"{usage} is impossible: a count is negative, or cached and written tokens "
        "exceed the prompt. Correct the counts."
      )
    write_price = self.input if self.cache_write is None else self.cache_write
    prompt = fresh * self.input + cached * self.cached_input + written * write_price
    return (prompt + usage.completion_tokens * self.output) / 1e6


# The names of prices per token in genai-prices. Every model needs REQUIRED; KINDS also
# has those of the prompt cache, which a model may lack.
REQUIRED = {"input_mtok", "output_mtok"}
KINDS = REQUIRED | {"cache_read_mtok", "cache_write_mtok"}
# genai-prices' names of prices for services that no call here uses.
UNUSED = re.compile("searches_kcount|audio|image|video|_1h_")


def list_price(name: str) -> Price:
  """Look up today's list price of a model.

  Raises:
    ValueError: the model is unknown, or it is not priced by its tokens alone.
  """
  # The import is slow, and it also imports an HTTP client.
  from genai_prices.data_snapshot import get_snapshot
  from genai_prices.types import TimeOfDateConstraint

  try:
    _, model = get_snapshot().find_provider_model(name, None, None, None)
  except LookupError:
    raise ValueError(
      f"The model {name!r} has no list price. Set --config.models.prices."
    ) from None
  # A price is plain if it is the same at every time of day.
  is_plain = True
  if isinstance(model.prices, list):
    for dated in model.prices:
      is_plain &= not isinstance(dated.constraint, TimeOfDateConstraint)
  by_kind = {}
  starts = set()
  for kind, price in vars(model.get_prices(datetime.now(UTC))).items():
    if price is None or UNUSED.search(kind):
      continue
    by_kind[kind] = price
    starts.update(tier.start for tier in getattr(price, "tiers", ()))
  if not is_plain or not REQUIRED <= by_kind.keys() <= KINDS:
    raise ValueError(
      f"The model {name!r} is not priced by tokens alone. Set --config.models.prices."
    )
  tiers = tuple((start, _price(by_kind, start)) for start in sorted(starts))
  return dataclasses.replace(_price(by_kind, -1), tiers=tiers)


def _price(by_kind: dict, start: int) -> Price:
  """Collect the prices of all kinds of tokens for the prompts of one tier.

  Without a price for cached input, cached input has the price of input.

  Args:
    by_kind: genai-prices' price of each kind, a number or a price with tiers.
    start: number of prompt tokens above which the tier holds; -1 is the lowest tier.
  """
  usd = {}
  for kind, price in by_kind.items():
    usd[kind] = float(getattr(price, "base", price))
    for tier in getattr(price, "tiers", ()):
      if tier.start <= start:
        usd[kind] = float(tier.price)
  input_usd = usd["input_mtok"]
  cached_usd = usd.get("cache_read_mtok", input_usd)
  return Price(input_usd, cached_usd, usd["output_mtok"], usd.get("cache_write_mtok"))


def prices_of(
  names: Sequence[str], user_prices: Sequence[Sequence[float]] = ()
) -> tuple[Price, ...]:
  """Look up the price of each model.

  Args:
    names: the models.
    user_prices: the user's prices, one row per model as in `ModelsConfig.prices`.
      Without rows, list prices are used.

  Raises:
    ValueError: a model has no list price.
  """
  return tuple(Price(*row) for row in user_prices) or tuple(map(list_price, names))


def cost_usd(model_name: str, usage: Usage) -> float:
  """Compute the dollars of a call at today's list price.

  Raises:
    ValueError: the model has no list price, or the usage is impossible.
  """
  return list_price(model_name).cost_usd(usage)


class Pair(Protocol):
  """Two or more models to route between, the cheapest first."""

  names: tuple[str, ...]
  prices: tuple[Price, ...]

  def start(self, env: Env, task: Task, seed: int, reserve: Reserve) -> Sequence[Agent]:
    """Start one agent for each model in an episode.

    Args:
      env: the environment of the episode.
      task: the task of the episode.
      seed: the seed of the episode.
      reserve: reserves the agents' calls in the budgets.
    """

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Reserve], Agent]:
    """Prepare the judge, the model that a zero-shot router asks.

    Args:
      config: the configuration of this model.

    Returns:
      A function that starts an agent for a task, a seed and the episode's `reserve`.

    Raises:
      ValueError: the model has no price.
    """

  def stop(self) -> None:
    """Stop all calls: cancel the calls in flight, and make no further attempts."""

  def close(self) -> None:
    """Close connections and files."""
