"""List prices per model, and what a call's usage costs in dollars."""

import dataclasses
import math
from collections.abc import Sequence

from baar_jax.episode import Usage


@dataclasses.dataclass(frozen=True)
class Price:
  """Dollars per one million tokens; `cache_write` None is as `input`."""

  input: float
  cached_input: float
  output: float
  cache_write: float | None = None

  @property
  def dearest_input(self) -> float:
    """What a prompt token costs at most."""
    return max(self.input, self.cached_input, self.cache_write or 0.0)

  def cost_usd(self, usage: Usage) -> float:
    """Dollars of one call. Raises ValueError where parts of the prompt exceed the whole."""
    written, cached = usage.cache_write_tokens, usage.cached_tokens
    fresh = usage.prompt_tokens - cached - written
    if min(fresh, cached, written, usage.completion_tokens) < 0:
      raise ValueError(f"impossible usage: {usage}")
    write_price = self.input if self.cache_write is None else self.cache_write
    return (
      fresh * self.input
      + cached * self.cached_input
      + written * write_price
      + usage.completion_tokens * self.output
    ) / 1e6


# The providers' published prices. Nobody sells the Llama pair at one price: Together's for its
# Turbo endpoints of the two models, which has none for cached input, is our choice.
PRICES = {
  "gpt-4.1": Price(input=2.00, cached_input=0.50, output=8.00),
  "gpt-4.1-mini": Price(input=0.40, cached_input=0.10, output=1.60),
  "gpt-5": Price(input=1.25, cached_input=0.125, output=10.00),
  "meta-llama/Llama-3.1-8B-Instruct": Price(input=0.18, cached_input=0.18, output=0.18),
  "meta-llama/Llama-3.1-70B-Instruct": Price(input=0.88, cached_input=0.88, output=0.88),
}


def prices_of(names: Sequence[str], own: Sequence[Sequence[float]] = ()) -> tuple[Price, ...]:
  """The price of each model.

  Args:
    own: per model (input, cached input, output) or the same with cache write, in dollars per
      million tokens; empty takes the prices of `PRICES`.

  Raises:
    ValueError: a model has no price.
  """
  if not own:
    for name in names:
      if name not in PRICES:
        raise ValueError(
          f"no price for model {name!r}; known: {', '.join(sorted(PRICES))}; "
          "or set --config.models.prices"
        )
    return tuple(PRICES[name] for name in names)
  if len(own) != len(names):
    raise ValueError(
      f"--config.models.prices has {len(own)} entries, --config.models.names {len(names)}: "
      "give one for each model"
    )
  for name, price in zip(names, own):
    fine = isinstance(price, Sequence) and len(price) in (3, 4)
    fine = fine and all(isinstance(p, int | float) and 0 <= p < math.inf for p in price)
    if not fine:
      raise ValueError(
        f"--config.models.prices has {price!r} for {name}; give (input, cached input, output) or "
        "the same with cache write, in dollars per million tokens"
      )
  return tuple(Price(*price) for price in own)


def cost_usd(model_name: str, usage: Usage) -> float:
  """Dollars of one call at list price (providers' published prices, as the paper uses them).

  Raises:
    ValueError: the model has no price, or the usage counts more cached than prompt tokens.
  """
  return prices_of([model_name])[0].cost_usd(usage)
