"""Test the dollars of calls against sums worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baar_jax.config import ModelsConfig
from baar_jax.episode import LARGE, SMALL, Call, Step, Usage
from baar_jax.llms.prices import (
  CACHE_RULES,
  Billing,
  CacheRule,
  Outlook,
  Price,
  Read,
  cached_tokens,
  find_model,
  find_row,
  format_usd,
  list_price,
  open_billing,
  prices_of,
)

GPT = CacheRule(min_tokens=1024, block_tokens=128, lifetime_s=300.0)
COUNTS = st.integers(0, 5000)
SECONDS = st.floats(0, 1000)
READS = st.lists(st.builds(Read, COUNTS, SECONDS), max_size=5)
RULES = st.builds(CacheRule, st.integers(1, 2048), st.integers(1, 256), SECONDS)


@pytest.mark.parametrize(
  "name, user_prices, usage, dollars",
  [
    ("gpt-4.1-mini", (), (0, 0, 1_000_000), 1.60),
    # 600 fresh * 2 + 400 cached * 0.5 + 50 * 8 = 1800 millionths
    ("gpt-4.1", (), (1000, 400, 50), 0.0018),
    # 3 fresh * 3 + 12,304 written * 3.75 + 550 * 15 = 54,399 millionths
    ("x", ((3, 0.3, 15, 3.75),), (12_307, 0, 550, 12_304), 0.054399),
    # 2,500 fresh * 3 + 1,500 cached * 0.3 + 700 * 15 + 6,000 written: 3,700 for five
    # minutes * 3.75 and 2,300 for an hour * 2 * 3 = 46,125 millionths
    ("x", ((3, 0.3, 15, 3.75),), (10_000, 1500, 700, 6000, 2300), 0.046125),
    # A cache write without a price costs as much as input: 10 * 3
    ("x", ((3, 0.3, 15),), (10, 0, 0, 10), 30e-6),
  ],
)
def test_the_cost_of_a_usage(name, user_prices, usage, dollars):
  (price,) = prices_of(ModelsConfig(names=(name,), prices=user_prices))
  assert price.cost_usd(Usage(*usage)) == pytest.approx(dollars, rel=1e-12)


def test_a_listed_name_may_add_a_date_only():
  for date in ("", "-2025-08-07", "-20250807"):
    assert list_price("gpt-5-nano" + date) == list_price("gpt-5-nano")
  # The list has the whole third name, and a price of its own for the last one.
  names = "claude-haiku-4-5@20251001", "gemini-4-argon-001", "gpt-4o-realtime-preview"
  assert all(map(find_model, (*names, "gpt-4o-2024-05-13")))
  assert list_price("gpt-4o-2024-05-13") != list_price("gpt-4o")
  for name in ("gpt-5-nano-xyz", "gpt-5-nano-1", "claude-haiku-4-5x"):
    with pytest.raises(ValueError, match=f"{name}' has no list price"):
      list_price(name)


def test_cents_are_written_with_two_significant_digits():
  dollars = (0.0, 0.0000123, 0.00307, 0.5, 1.006, 1234.5)
  texts = ["$0.00", "$0.000012", "$0.0031", "$0.50", "$1.01", "$1,234.50"]
  assert [*map(format_usd, dollars)] == texts


def test_a_longer_prompt_pays_its_tier_for_all_tokens():
  price = Price(3, 0.3, 15, 3.75, ((200_000, Price(6, 0.6, 22.5, 7.5)),))
  # 100,001 fresh * 6 + 100,000 cached * 0.6 + 10 * 22.5 = 660,231 millionths
  assert price.cost_usd(Usage(200_001, 100_000, 10)) == pytest.approx(0.660231)
  # A prompt of 200,000 tokens is in the tier below: 120,000 fresh * 3 + 80,000 cached
  # * 0.3 + 10 * 15 = 384,150 millionths
  assert price.cost_usd(Usage(200_000, 80_000, 10)) == pytest.approx(0.38415)
  assert price.worst_case_usd(200, 10) == pytest.approx((200 * 7.5 + 10 * 22.5) / 1e6)


def test_a_tier_above_the_window_is_left_out():
  # Longer prompts cost more from 272,000 tokens on, in a window of 1,050,000.
  tiers = ((272_000, Price(5, 0.5, 22.5)),)
  assert list_price("gpt-5.4") == Price(2.5, 0.25, 15, None, tiers)
  # The tier begins at 200,000 tokens, which is all of the window.
  assert list_price("claude-sonnet-4-5") == Price(3, 0.3, 15, 3.75)


def test_a_prompt_is_cached_until_its_lifetime_ends():
  assert cached_tokens(GPT, [Read(1024, 0.0)], 1151, 1.0) == 1024
  assert cached_tokens(GPT, [Read(2000, 10.0)], 2100, 310.0) == 1920
  assert cached_tokens(GPT, [Read(2000, 10.0)], 2100, 310.1) == 0
  # The newer prompt, which shares less, is still there.
  reads = [Read(2000, 10.0), Read(1300, 100.0)]
  assert cached_tokens(GPT, reads, 2100, 310.1) == 1280


@given(RULES, READS, READS, COUNTS, SECONDS)
def test_properties_of_cached_tokens(rule, reads, more, tokens, now_s):
  """Never more than the prompt, in whole steps, none below the minimum; more history never
  makes less warm."""
  cached = cached_tokens(rule, reads, tokens, now_s)
  assert 0 <= cached <= tokens
  assert cached % rule.block_tokens == 0 and (cached == 0 or cached >= rule.min_tokens)
  assert cached_tokens(rule, reads + more, tokens, now_s) >= cached


@pytest.mark.parametrize(
  "name, minimum, step",
  [
    ("gpt-5.6-sol", 1024, 1),
    ("anthropic/claude-opus-4.5", 4096, 1),
    ("claude-3-5-haiku-20241022", 2048, 1),
    ("mistral-large", 64, 64),
    ("a-model-of-nobody", 1024, 128),
  ],
)
def test_the_rule_of_a_model_family(name, minimum, step):
  rule = find_row(CACHE_RULES, name)
  assert (rule.min_tokens, rule.block_tokens) == (minimum, step)


def act(model, prompt_tokens, latency_s=0.0):
  call = Call(model, Usage(prompt_tokens, 0, 90), 0.0, latency_s)
  return Step("x" * 40, model, "act", [call])


def warm_tokens(outlook):
  """Count the cached tokens of a call, which cost half a millionth less each."""
  return round(2e6 * (outlook.cold_usd - outlook.usd))


def test_two_models_in_turn_are_warm_apart():
  """Observations have 10 tokens, replies 90; a step takes 90 / 90 + 1 s."""
  price = Price(1.0, 0.5, 2.0)
  billing = Billing((price, price), (GPT, GPT))
  steps = [act(SMALL, 2000), act(LARGE, 2100), act(SMALL, 2200), act(SMALL, 2300)]
  outlooks = [billing.forecast_calls(steps[:n], 1500, 50) for n in range(1, 5)]
  # The first prompt has 1,500 tokens, the second 2,000 + 90 + 10. SMALL has read 2,000.
  warm = [[*map(warm_tokens, pair)] for pair in outlooks]
  assert warm == [[0, 0], [1920, 0], [1920, 2048], [2176, 2048]]
  assert outlooks[0][LARGE].usd == pytest.approx((1500 + 100) / 1e6)
  # A repeated call finds 2,048 of 2,100 tokens warm: 52 + 1,024 + 100 millionths.
  usd = (180 + 960 + 100) / 1e6
  assert outlooks[1][SMALL] == pytest.approx(Outlook(usd, 1176 / 1e6, 2200 / 1e6))


def test_a_run_without_prompt_caches_has_no_rules():
  assert open_billing(ModelsConfig()).rules == (GPT, GPT)
  assert open_billing(ModelsConfig(prompt_cache=False)).rules == (None, None)
