"""Prices of calls: the list prices of genai-prices, or the user's own."""

import dataclasses
import re
from collections.abc import Sequence
from datetime import UTC, datetime

from baar_jax.episode import Usage


@dataclasses.dataclass(frozen=True)
class Price:
  """The dollars of a million tokens of each kind."""

  input: float
  cached_input: float
  output: float
  cache_write: float | None = None  # None costs as input
  # (start, price), ascending: a prompt longer than start pays that price throughout.
  tiers: tuple[tuple[int, "Price"], ...] = ()

  def most_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
    """Compute the worst case of a call of at most these tokens, in any tier."""
    prompt_price = output_price = 0.0
    for price in (self, *dict(self.tiers).values()):
      write_price = price.cache_write or 0.0
      prompt_price = max(prompt_price, price.input, price.cached_input, write_price)
      output_price = max(output_price, price.output)
    return (prompt_tokens * prompt_price + completion_tokens * output_price) / 1e6

  def cost_usd(self, usage: Usage) -> float:
    """Compute a call's dollars. Raises ValueError if parts of the prompt exceed it."""
    for start, price in reversed(self.tiers):
      if usage.prompt_tokens > start:
        return price.cost_usd(usage)
    written = usage.cache_write_tokens
    cached = usage.cached_tokens
    fresh = usage.prompt_tokens - cached - written
    if min(fresh, cached, written, usage.completion_tokens) < 0:
      raise ValueError(f"impossible usage: {usage}")
    write_price = self.input if self.cache_write is None else self.cache_write
    prompt = fresh * self.input + cached * self.cached_input + written * write_price
    return (prompt + usage.completion_tokens * self.output) / 1e6


REQUIRED = {"input_mtok", "output_mtok"}
KINDS = REQUIRED | {"cache_read_mtok", "cache_write_mtok"}
# No call asks for these services.
UNUSED = re.compile("searches_kcount|audio|image|video|_1h_")


def list_price(name: str) -> Price:
  """Look up today's list price.

  Raises:
    ValueError: the model is unknown, or not sold by the token alone.
  """
  # The import is slow and brings an HTTP client.
  from genai_prices.data_snapshot import get_snapshot
  from genai_prices.types import TimeOfDateConstraint

  try:
    _, model = get_snapshot().find_provider_model(name, None, None, None)
  except LookupError:
    raise ValueError(
      f"no price for model {name!r}; set --config.models.prices"
    ) from None
  # A plain price is by the token alone, at any hour.
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
      f"{name!r} is not sold by the token alone; set --config.models.prices"
    )
  tiers = tuple((start, _price(by_kind, start)) for start in sorted(starts))
  return dataclasses.replace(_price(by_kind, -1), tiers=tiers)


def _price(by_kind: dict, start: int) -> Price:
  """Read the price from `start` tokens on; unpriced cached input costs as input."""
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
  names: Sequence[str], own: Sequence[Sequence[float]] = ()
) -> tuple[Price, ...]:
  """Look up the price of each model.

  Args:
    own: the rows of `ModelsConfig.prices`; without rows list prices count.

  Raises:
    ValueError: a model has no price.
  """
  return tuple(Price(*row) for row in own) or tuple(map(list_price, names))


def cost_usd(model_name: str, usage: Usage) -> float:
  """Compute the dollars of a call at list price; raise as `list_price` does."""
  return list_price(model_name).cost_usd(usage)
