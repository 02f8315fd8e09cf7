"""List prices: dollars of hand-worked usages."""

import pytest

from baar_jax.llms.prices import Usage, cost_usd


@pytest.mark.parametrize(
  "model, usage, dollars",
  [
    ("gpt-4.1", (1_000_000, 0, 0), 2.00),
    ("gpt-4.1", (1_000_000, 1_000_000, 0), 0.50),
    ("gpt-4.1", (0, 0, 1_000_000), 8.00),
    ("gpt-4.1-mini", (1_000_000, 0, 0), 0.40),
    ("gpt-4.1-mini", (1_000_000, 1_000_000, 0), 0.10),
    ("gpt-4.1-mini", (0, 0, 1_000_000), 1.60),
    # 600 fresh * 2 + 400 cached * 0.5 + 50 * 8 = 1800 millionths
    ("gpt-4.1", (1000, 400, 50), 0.0018),
    # 600 * 0.4 + 400 * 0.1 + 50 * 1.6 = 360 millionths
    ("gpt-4.1-mini", (1000, 400, 50), 0.00036),
    ("gpt-4.1", (0, 0, 0), 0.0),
  ],
)
def test_cost(model, usage, dollars):
  assert cost_usd(model, Usage(*usage)) == pytest.approx(dollars, rel=1e-12)


def test_a_model_without_a_price_is_an_error_that_names_those_with():
  with pytest.raises(ValueError, match="'gpt-5'.*gpt-4.1, gpt-4.1-mini"):
    cost_usd("gpt-5", Usage(1, 0, 1))


@pytest.mark.parametrize("usage", [(10, 11, 0), (10, -1, 0), (10, 0, -1)])
def test_an_impossible_usage_is_an_error(usage):
  with pytest.raises(ValueError, match="impossible usage of gpt-4.1"):
    cost_usd("gpt-4.1", Usage(*usage))
