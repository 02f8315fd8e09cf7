"""Test the dollars of calls against sums worked out by hand."""

import pytest

from baar_jax.episode import Usage
from baar_jax.llms.prices import Price, cost_usd, prices_of


# A model is a name with a list price, or a price of the user.
@pytest.mark.parametrize(
  "model, usage, dollars",
  [
    ("gpt-4.1-mini", (0, 0, 1_000_000), 1.60),
    # 600 fresh * 2 + 400 cached * 0.5 + 50 * 8 = 1800 millionths
    ("gpt-4.1", (1000, 400, 50), 0.0018),
    # 3 fresh * 3 + 12,304 written * 3.75 + 550 * 15 = 54,399 millionths
    ((3, 0.3, 15, 3.75), (12_307, 0, 550, 12_304), 0.054399),
    # A cache write without a price costs as much as input: 10 * 3
    ((3, 0.3, 15), (10, 0, 0, 10), 30e-6),
  ],
)
def test_the_cost_of_a_usage(model, usage, dollars):
  user_prices = () if isinstance(model, str) else (model,)
  (price,) = prices_of(["gpt-4.1"] if user_prices else [model], user_prices)
  assert price.cost_usd(Usage(*usage)) == pytest.approx(dollars, rel=1e-12)


@pytest.mark.parametrize("model", ["gpt-9", "sonar", "whisper-1", "deepseek-chat"])
def test_a_model_without_a_price_by_the_token_is_an_error(model):
  with pytest.raises(ValueError, match=f"'{model}'.*Set --config.models.prices"):
    cost_usd(model, Usage(1, 0, 1))


def test_a_longer_prompt_pays_its_tier_for_all_tokens():
  (price,) = prices_of(["claude-sonnet-4-5"])
  assert price == Price(3, 0.3, 15, 3.75, ((200_000, Price(6, 0.6, 22.5, 7.5)),))
  # 100,001 fresh * 6 + 100,000 cached * 0.6 + 10 * 22.5 = 660,231 millionths
  assert price.cost_usd(Usage(200_001, 100_000, 10)) == pytest.approx(0.660231)
  assert price.worst_case_usd(200, 10) == pytest.approx((200 * 7.5 + 10 * 22.5) / 1e6)


@pytest.mark.parametrize(
  "usage", [(10, 11, 0), (10, -1, 0), (10, 0, -1), (10, 6, 0, 5)]
)
def test_an_impossible_usage_is_an_error(usage):
  with pytest.raises(ValueError, match="is impossible"):
    cost_usd("gpt-4.1", Usage(*usage))
