"""Call budgets, call by call; dollar budgets under many schedules of many threads."""

import random
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baar_jax.budget import CallBudget, DollarBudget

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


def test_dollars_are_reserved_then_settled():
  budget = DollarBudget(1.0)
  first = budget.reserve(0.75)
  assert (budget.remaining, budget.reserved_usd, budget.settled_usd) == (0.25, 0.75, 0.0)
  assert budget.allows(0.25) and not budget.allows(0.26)
  budget.settle(first, 0.5)
  assert (budget.remaining, budget.reserved_usd, budget.settled_usd) == (0.5, 0.0, 0.5)
  second = budget.reserve(0.5)  # the last dollar may be spent
  budget.release(second)
  assert budget.remaining == 0.5
  assert budget.reserve(0.51) is None
  assert budget.reserved_usd == 0.0


def test_cents_add_up_exactly():
  """A hundred floats of 0.01 are 1.0000000000000007 when they are added one by one."""
  budget = DollarBudget(1.0)
  for _ in range(99):
    budget.settle(budget.reserve(0.01), 0.01)
  assert budget.reserve(0.01) is not None


def test_a_reservation_is_closed_once():
  budget = DollarBudget(1.0)
  held = budget.reserve(0.5)
  budget.settle(held, 0.25)
  for close in (budget.release, lambda reservation: budget.settle(reservation, 0.1)):
    with pytest.raises(ValueError, match="settled or released already"):
      close(held)
  assert budget.settled_usd == 0.25


def test_what_was_spent_before_counts():
  budget = DollarBudget(1.0)
  budget.spend(0.75)
  assert budget.remaining == 0.25 and budget.reserve(0.5) is None
  budget.spend(1.0)  # a lower limit than was spent already
  assert budget.reserve(0.001) is None


@pytest.mark.parametrize("limit", [-0.01, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(limit):
  with pytest.raises(ValueError, match="dollar budget"):
    DollarBudget(limit)


def test_negative_dollars_are_refused():
  budget = DollarBudget(1.0)
  with pytest.raises(ValueError, match="reserve"):
    budget.reserve(-0.1)
  held = budget.reserve(0.1)
  with pytest.raises(ValueError, match="settle"):
    budget.settle(held, -0.1)
  budget.release(held)
  assert budget.reserved_usd == 0.0


def test_a_call_that_costs_more_than_was_held_is_counted_in_full():
  budget = DollarBudget(1.0)
  budget.settle(budget.reserve(0.5), 2.0)
  assert budget.settled_usd == 2.0 and budget.reserve(0.0) is None


@pytest.fixture(scope="module")
def callers():
  with ThreadPoolExecutor(32) as pool:
    yield pool


# What is held for a call, what it costs, how it ends, and which open call ends before it, in 64ths
# of a dollar: whole numbers, so that the test's own sums are exact.
CALL = st.tuples(
  st.integers(0, 40),
  st.integers(0, 40),
  st.sampled_from(("answered", "failed", "cancelled")),
  st.lists(st.integers(0, 9), max_size=2),
)


@settings(max_examples=1000)
@given(limit=st.integers(0, 80), calls=st.lists(CALL, min_size=1, max_size=12))
def test_schedules_of_calls(callers, limit, calls):
  """Threads take turns; after each, the budget did what its rules say about that moment."""
  budget = DollarBudget(limit / 64)
  settled = 0
  held = {}  # reservation -> (worst, cost, end)
  waiting = {}  # future of a reserve() -> (worst, cost, end)

  def free():
    return limit - settled - sum(worst for worst, _, _ in held.values())

  def let_go():
    """Takes in every waiting call that the rules let go now, in whatever order they do."""
    while any(worst <= free() or worst > limit - settled for worst, _, _ in waiting.values()):
      done, _ = wait(waiting, timeout=30, return_when=FIRST_COMPLETED)
      assert done, "a call waits although it fits, or never will"
      for future in done:
        call = waiting.pop(future)
        if future.result() is None:
          assert call[0] > limit - settled, "refused although the settled remainder allows it"
        else:
          held[future.result()] = call
          assert free() >= 0, "more is held than there is"

  def end(reservation):
    nonlocal settled
    worst, cost, how = held.pop(reservation)
    if how == "answered":
      settled += min(cost, worst)
      budget.settle(reservation, min(cost, worst) / 64)
    else:
      budget.release(reservation)
    let_go()

  for worst, cost, how, ended in calls:
    for place in ended:
      if held:
        end(list(held)[place % len(held)])
    waiting[callers.submit(budget.reserve, worst / 64)] = (worst, cost, how)
    let_go()
    assert budget.settled_usd == settled / 64 <= limit / 64
  while held:
    end(next(iter(held)))
  assert not waiting and budget.reserved_usd == 0.0
  assert budget.settled_usd == settled / 64 <= limit / 64


def test_two_hundred_threads_on_one_budget():
  """With failures and cancellations; each thread draws for itself what becomes of its calls."""
  limit, worst = 64.0, 1.0
  budget, billed, refused, start = DollarBudget(limit), [], [], threading.Event()

  def call(number):
    draw = random.Random(number)
    start.wait()
    for _ in range(10):
      reservation = budget.reserve(worst)
      if reservation is None:
        refused.append(budget.settled_usd)
        return
      try:
        if draw.random() < 0.3:
          raise TimeoutError
        cost = draw.randrange(65) / 64
        billed.append(cost)
      except TimeoutError:
        budget.release(reservation)
      else:
        budget.settle(reservation, cost)

  threads = [threading.Thread(target=call, args=(number,)) for number in range(200)]
  for thread in threads:
    thread.start()
  start.set()
  for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
  assert sum(billed) == budget.settled_usd <= limit
  assert budget.reserved_usd == 0.0
  # 200 * 10 calls of half a dollar do not fit; whoever was refused was so by what was settled.
  assert refused and all(settled > limit - worst for settled in refused)
