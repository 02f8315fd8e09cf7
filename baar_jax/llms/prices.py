"""Dollars of a call: list prices of genai-prices, cached and tiered, under the user's own."""

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime

from baar_jax.episode import Usage


@dataclasses.dataclass(frozen=True)
class Price:
  """Dollars per million tokens; `cache_write` None is as `input`.

  `tiers` holds (start, price), ascending: a longer prompt pays that price for all its tokens.
  """

  input: float
  cached_input: float
  output: float
  cache_write: float | None = None
  tiers: tuple[tuple[int, "Price"], ...] = ()

  def most_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
    """The most that a call of at most these tokens can cost, in any tier."""
    tiers = [self, *(price for _, price in self.tiers)]
    prompt_price = max(max(p.input, p.cached_input, p.cache_write or 0.0) for p in tiers)
    return (prompt_tokens * prompt_price + completion_tokens * max(p.output for p in tiers)) / 1e6

  def cost_usd(self, usage: Usage) -> float:
    """Dollars of one call. Raises ValueError where parts of the prompt exceed the whole."""
    for start, price in reversed(self.tiers):
      if usage.prompt_tokens > start:
        return price.cost_usd(usage)
    written, cached = usage.cache_write_tokens, usage.cached_tokens
    fresh = usage.prompt_tokens - cached - written
    if min(fresh, cached, written, usage.completion_tokens) < 0:
      raise ValueError(f"impossible usage: {usage}")
    write_price = self.input if self.cache_write is None else self.cache_write
    prompt = fresh * self.input + cached * self.cached_input + written * write_price
    return (prompt + usage.completion_tokens * self.output) / 1e6


KINDS = ("input_mtok", "cache_read_mtok", "output_mtok", "cache_write_mtok")
UNUSED = ("searches_kcount", "audio", "image", "video", "_1h_")  # prices of what no call asks for


def list_price(name: str) -> Price:
  """Today's list price. Raises ValueError for a model that has none by the token alone."""
  from genai_prices.data_snapshot import get_snapshot  # takes 0.4 s, and brings an HTTP client
  from genai_prices.types import TimeOfDateConstraint

  try:
    _, model = get_snapshot().find_provider_model(name, None, None, None)
  except LookupError:
    raise ValueError(f"no price for model {name!r}; set --config.models.prices") from None
  dated = model.prices if isinstance(model.prices, list) else ()
  by_kind = {k: v for k, v in vars(model.get_prices(datetime.now(UTC))).items() if v is not None}
  others = {kind for kind in by_kind if not any(word in kind for word in UNUSED)} - {*KINDS}
  hourly = any(isinstance(price.constraint, TimeOfDateConstraint) for price in dated)
  if others or hourly or not {"input_mtok", "output_mtok"} <= {*by_kind}:
    raise ValueError(f"{name!r} is not sold by the token alone; set --config.models.prices")
  starts = {tier.start for price in by_kind.values() for tier in getattr(price, "tiers", ())}
  tiers = tuple((start, _price(by_kind, start)) for start in sorted(starts))
  return dataclasses.replace(_price(by_kind, -1), tiers=tiers)


def _price(by_kind: dict, start: int) -> Price:
  """The price of the tier that begins at `start`; cached input without a price costs as input."""
  usd = {}
  for kind, price in by_kind.items():
    reached = [tier.price for tier in getattr(price, "tiers", ()) if tier.start <= start]
    usd[kind] = float([getattr(price, "base", price), *reached][-1])
  cached = usd.get("cache_read_mtok", usd["input_mtok"])
  return Price(usd["input_mtok"], cached, usd["output_mtok"], usd.get("cache_write_mtok"))


def prices_of(names: Sequence[str], own: Sequence[Sequence[float]] = ()) -> tuple[Price, ...]:
  """The price of each model: `own`, the rows of `ModelsConfig.prices`, or where empty the list's.

  Raises ValueError for a model that has none.
  """
  return tuple(Price(*row) for row in own) or tuple(map(list_price, names))


def cost_usd(model_name: str, usage: Usage) -> float:
  """Dollars of one call at list price. Raises ValueError as `prices_of` and `Price.cost_usd` do."""
  return list_price(model_name).cost_usd(usage)
