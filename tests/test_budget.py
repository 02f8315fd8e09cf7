"""Call budgets, call by call; dollar budgets, also of many threads."""

import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from baar_jax.rollout.budget import CallBudget, CapReached, DollarBudget, hold


def test_calls_are_taken_before_they_are_made():
  budget, (small, large, larger) = (
    CallBudget(2),
    range(3),
  )  # every model but SMALL counts
  for model in (large, larger):
    budget.reserve(model)
  assert budget.remaining == 0 and budget.allows(small) and not budget.allows(large)
  with pytest.raises(ValueError, match="no large call is left of 2"):
    budget.reserve(large)
  for model, made, left in ((small, False, 0), (large, True, 0), (larger, False, 1)):
    budget.settle(model, made)  # a call that was not made is given back
    assert budget.remaining == left


def test_dollars_are_reserved_then_settled():
  budget = DollarBudget(1.25, spent_usd=0.25)
  first = budget.reserve(0.75)
  assert (budget.remaining, budget.settled_usd) == (0.25, 0.25)
  assert budget.allows(0.25) and not budget.allows(0.26)
  budget.settle(first, 0.5)
  assert (budget.remaining, budget.settled_usd) == (0.5, 0.75)
  with pytest.raises(KeyError):  # a reservation is closed once
    budget.settle(first, 0.1)
  budget.settle(budget.reserve(0.5), 0.0)  # the last dollar may be spent
  assert (
    budget.reserve(0.51) is None and budget.remaining == 0.5
  )  # nothing is held for it
  budget.settle(budget.reserve(0.5), 2.0)  # more than was held is counted in full
  assert (
    budget.settled_usd == 2.75
    and budget.reserve(0.0) is None
    and budget.remaining == 0.0
  )
  assert (
    DollarBudget(1.0, spent_usd=1.75).reserve(0.001) is None
  )  # the limit was lowered
  free = DollarBudget(None)
  free.settle(free.reserve(1e9), 0.5)
  assert (free.remaining, free.settled_usd) == (math.inf, 0.5) and free.allows(1e9)
  cents = DollarBudget(
    1.0
  )  # added one by one, a hundred floats of 0.01 are 1.0000000000000007
  for _ in range(100):
    cents.settle(cents.reserve(0.01), 0.01)
  assert cents.remaining == 0


@pytest.mark.parametrize("usd", [-0.1, math.nan, math.inf])
def test_impossible_dollars_are_refused_and_a_reservation_is_closed_at_its_worst(usd):
  for refused in (lambda: DollarBudget(usd), lambda: DollarBudget(1.0).reserve(usd)):
    with pytest.raises(ValueError, match=f"dollars must be .* got {usd}"):
      refused()
  episode, run = DollarBudget(2.0), DollarBudget(1.0)
  with pytest.raises(ValueError, match=f"got {usd}"), hold(episode, run, 0.625) as cost:
    cost.usd = usd
  assert (episode.settled_usd, run.settled_usd) == (0.625, 0.625)
  with (
    pytest.raises(CapReached, match=r"\$0.375000 is left of \$1"),
    hold(episode, run, 0.5),
  ):
    pass  # and nobody waits for the call that is lost
  assert episode.remaining == 1.375  # nothing stays held


@pytest.mark.parametrize("count", [2, 9, 40, 200])
@pytest.mark.parametrize("limit", [0, 250, 900, 4000])
def test_threads_are_never_allowed_more_than_the_cap(limit, count):
  """In cents; the test's own books count what a thread is allowed, and then what it has cost."""
  run, lock, booked = DollarBudget(limit / 100), threading.Lock(), [0]

  def book(cents):
    with lock:
      booked.append(booked[-1] + cents)

  def play(number):
    draw = random.Random(f"{limit}|{count}|{number}")
    for worst in (draw.randint(0, 300) for _ in range(8)):
      cost, error = (
        draw.choice((0, worst, draw.randint(0, worst))),
        draw.choice((None, OSError())),
      )
      try:
        with hold(DollarBudget(5.0), run, worst / 100) as charge:
          book(worst)
          time.sleep(1e-4)  # the others go on
          charge.usd = cost / 100
          book(cost - worst)
          if error:
            raise error
      except CapReached:
        assert worst > limit - round(run.settled_usd * 100), "refused, although it fits"
      except OSError:
        pass  # a call that fails is paid for

  with ThreadPoolExecutor(count) as threads:
    list(threads.map(play, range(count), timeout=60))
  assert max(booked) <= limit and run.settled_usd == booked[-1] / 100
  assert run.remaining == (limit - booked[-1]) / 100
