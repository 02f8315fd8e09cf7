"""Call budgets, call by call."""

import pytest

from baar_jax.budget import CallBudget

LARGE, LARGER = 1, 2


def test_the_last_call_of_the_budget_is_allowed_and_the_next_is_not():
  budget = CallBudget(2)
  seen = []
  for _ in range(3):
    seen.append((budget.remaining, budget.allows(LARGE)))
    if budget.allows(LARGE):
      budget.reserve(LARGE)
  assert seen == [(2, True), (1, True), (0, False)]
  with pytest.raises(ValueError, match="no large call is left of 2"):
    budget.reserve(LARGE)
  assert budget.remaining == 0


def test_small_is_free_and_always_allowed():
  budget = CallBudget(0)
  assert budget.allows(0) and not budget.allows(LARGE)
  budget.reserve(0)
  budget.settle(0, made=False)
  assert budget.remaining == 0


def test_every_model_dearer_than_small_counts():
  budget = CallBudget(1)
  budget.reserve(LARGER)
  assert budget.remaining == 0 and not budget.allows(LARGE)


def test_a_call_that_was_not_made_is_given_back():
  budget = CallBudget(1)
  budget.reserve(LARGE)
  budget.settle(LARGE, made=False)
  assert budget.remaining == 1
  budget.reserve(LARGE)
  budget.settle(LARGE, made=True)
  assert budget.remaining == 0


def test_a_negative_budget_is_refused():
  with pytest.raises(ValueError, match="-1"):
    CallBudget(-1)
