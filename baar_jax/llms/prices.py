"""List prices per model, and what a call's usage costs in dollars."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Price:
  """Dollars per one million tokens."""

  input: float
  cached_input: float
  output: float


@dataclasses.dataclass(frozen=True)
class Usage:
  """Tokens of one call; `cached_tokens` are part of `prompt_tokens`."""

  prompt_tokens: int
  cached_tokens: int
  completion_tokens: int


PRICES = {
  "gpt-4.1": Price(input=2.00, cached_input=0.50, output=8.00),
  "gpt-4.1-mini": Price(input=0.40, cached_input=0.10, output=1.60),
}


def cost_usd(model_name: str, usage: Usage) -> float:
  """Dollars of one call at list price (OpenAI's published prices, as the paper uses them).

  Raises:
    ValueError: the model has no price, or the usage counts more cached than prompt tokens.
  """
  if model_name not in PRICES:
    raise ValueError(f"no price for model {model_name!r}; known: {', '.join(sorted(PRICES))}")
  if not 0 <= usage.cached_tokens <= usage.prompt_tokens or usage.completion_tokens < 0:
    raise ValueError(f"impossible usage of {model_name}: {usage}")
  price = PRICES[model_name]
  fresh_tokens = usage.prompt_tokens - usage.cached_tokens
  return (
    fresh_tokens * price.input
    + usage.cached_tokens * price.cached_input
    + usage.completion_tokens * price.output
  ) / 1e6
