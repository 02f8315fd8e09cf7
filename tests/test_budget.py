"""Test the budgets of calls and dollars, also with many threads."""

import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from baar_jax.rollout.budget import CallBudget, CapReached, DollarBudget, reserve


def test_calls_are_reserved_then_settled():
  budget = CallBudget(2)
  small, large, larger = range(3)
  first = budget.reserve(large)
  second = budget.reserve(larger)
  assert budget.remaining == 0 and budget.allows(small) and not budget.allows(large)
  budget.settle(budget.reserve(small), small)
  budget.settle(first, large)
  assert budget.remaining == 0
  # A call that brought no reply is given back.
  budget.settle(second, small)
  assert budget.remaining == 1
  budget.reserve(larger)
  with pytest.raises(ValueError, match="No LARGE call remains of 2"):
    budget.reserve(large)
  assert CallBudget(None).remaining == math.inf


def test_dollars_are_reserved_then_settled():
  budget = DollarBudget(1.25, spent_usd=0.25)
  first = budget.reserve(0.75)
  assert (budget.remaining, budget.settled_usd) == (0.25, 0.25)
  assert budget.allows(0.25) and not budget.allows(0.26)
  budget.settle(first, 0.5)
  assert (budget.remaining, budget.settled_usd) == (0.5, 0.75)
  # A reservation can be closed only once.
  with pytest.raises(KeyError):
    budget.settle(first, 0.1)
  # All remaining dollars may be reserved. A refused reservation leaves no trace.
  budget.settle(budget.reserve(0.5), 0.0)
  assert budget.reserve(0.51) is None and budget.remaining == 0.5
  # A cost above its worst case counts in full.
  budget.settle(budget.reserve(0.5), 2.0)
  assert budget.settled_usd == 2.75
  assert budget.reserve(0.0) is None
  assert budget.remaining == 0.0
  # A cap may be below the dollars spent before.
  assert DollarBudget(1.0, spent_usd=1.75).reserve(0.001) is None
  without_cap = DollarBudget(None)
  without_cap.settle(without_cap.reserve(1e9), 0.5)
  assert (without_cap.remaining, without_cap.settled_usd) == (math.inf, 0.5)
  assert without_cap.allows(1e9)


@pytest.mark.parametrize("usd", [-0.1, math.nan, math.inf])
def test_an_impossible_cost_is_settled_at_the_worst_case(usd):
  for refused in (lambda: DollarBudget(usd), lambda: DollarBudget(1.0).reserve(usd)):
    with pytest.raises(ValueError, match=f"sum of dollars must .* is {usd}"):
      refused()
  episode, run = DollarBudget(2.0), DollarBudget(1.0)
  with (
    pytest.raises(ValueError, match=f"it is {usd}"),
    reserve(episode, run, 0.625) as cost,
  ):
    cost.usd = usd
  assert (episode.settled_usd, run.settled_usd) == (0.625, 0.625)
  with (
    pytest.raises(CapReached, match=r"\$0.375000 remains of the cap of \$1"),
    reserve(episode, run, 0.5),
  ):
    pass
  assert episode.remaining == 1.375


@pytest.mark.parametrize("count, limit", [(9, 0), (9, 250), (40, 4000)])
def test_threads_together_never_exceed_the_cap(limit, count):
  """Amounts are in cents. The test adds up worst cases, and then replaces them by costs.
  As floats, their sums would not be exact."""
  run, lock, booked = DollarBudget(limit / 100), threading.Lock(), [0]

  def book(cents):
    with lock:
      booked.append(booked[-1] + cents)

  def play(number):
    draw = random.Random(f"{limit}|{count}|{number}")
    for worst in (draw.randint(0, 300) for _ in range(8)):
      cost = draw.choice((0, worst, draw.randint(0, worst)))
      error = draw.choice((None, OSError()))
      try:
        with reserve(DollarBudget(5.0), run, worst / 100) as charge:
          book(worst)
          time.sleep(1e-4)  # other threads run meanwhile
          charge.usd = cost / 100
          book(cost - worst)
          if error:
            raise error
      except CapReached:
        assert worst > limit - round(run.settled_usd * 100), (
          "a call that fits was refused"
        )
      except OSError:
        pass  # a failed call has its cost, too

  with ThreadPoolExecutor(count) as threads:
    list(threads.map(play, range(count), timeout=60))
  assert max(booked) <= limit and run.settled_usd == booked[-1] / 100
  assert run.remaining == (limit - booked[-1]) / 100
