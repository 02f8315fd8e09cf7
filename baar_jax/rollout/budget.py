"""Budgets of calls and dollars, with reservations."""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Iterable, Iterator
from fractions import Fraction

from baar_jax.episode import SMALL, Step


class BudgetSpent(RuntimeError):
  """A call does not fit the rest of its episode's budget; a cheaper model's may."""


class CapReached(RuntimeError):
  """A call does not fit the rest of the run's budget; the stage stops."""


class CallBudget:
  """A cap on the calls of models costlier than SMALL (paper: K of the hard budget).

  A call is reserved before it is made, and given back if it was never made.
  """

  def __init__(self, limit: int | None):
    """Start a budget; None is no cap."""
    self.limit = limit
    self.remaining = math.inf if limit is None else limit

  def allows(self, model: int) -> bool:
    """Tell whether a call of the model fits.

    Calls with cost > remaining are pruned. The paper prints cost >= remaining, which
    would forbid the last call of a budget. Its own tables report that call as used.
    """
    return model == SMALL or self.remaining >= 1

  def reserve(self, model: int) -> None:
    """Reserve a call. Raises ValueError if it does not fit."""
    if not self.allows(model):
      raise ValueError(f"no large call is left of {self.limit}")
    self.remaining -= model != SMALL

  def settle(self, model: int, made: bool) -> None:
    """Close a reservation, and give the call back if it was not made."""
    self.remaining += model != SMALL and not made


class DollarBudget:
  """A cap on dollars, whichever threads spend them.

  The worst case of a call is reserved before it is made, and its cost is settled then.
  So the bill passes the cap only if a call costs more than its worst case. Sums of
  dollars are exact.
  """

  def __init__(self, limit_usd: float | None, spent_usd: float = 0.0):
    """Start a budget; None is no cap."""
    self.limit_usd = limit_usd
    self._limit = math.inf if limit_usd is None else _exact(limit_usd)
    self._settled = _exact(spent_usd)
    # The calls in flight have these reservations.
    self._held: dict[object, Fraction] = {}
    self._changed = threading.Condition()

  @property
  def remaining(self) -> float:
    """Compute the dollars that are neither settled nor reserved.

    They are 0 after an overspend.
    """
    return float(max(0, self._free()))

  @property
  def settled_usd(self) -> float:
    """Return the dollars of all calls that have ended."""
    return float(self._settled)

  def lost_usd(self, steps: Iterable[Step]) -> float:
    """Compute the settled dollars that are in none of the steps."""
    lost_usd = self.settled_usd - sum(step.spent_usd for step in steps)
    # Sums of floats differ in the last bits.
    return max(0.0, round(lost_usd, 12))

  def allows(self, usd: float) -> bool:
    """Tell whether a call with this worst case fits now."""
    return _exact(usd) <= self._free()

  def reserve(self, usd: float) -> object | None:
    """Reserve the worst case of a call.

    It waits while the end of calls in flight could make the call fit.

    Returns:
      The reservation, or None if the call does not fit even without the others.
    """
    worst = _exact(usd)
    reservation = object()
    with self._changed:
      while worst > self._free():
        if worst > self._limit - self._settled:
          return None
        self._changed.wait()
      self._held[reservation] = worst
    return reservation

  def settle(self, reservation: object, usd: float) -> None:
    """Settle the cost of a call, and close its reservation.

    Raises:
      ValueError: `usd` is no number of dollars; the worst case is settled.
    """
    with self._changed:
      cost = self._held.pop(reservation)
      try:
        cost = _exact(usd)
      finally:
        self._settled += cost
        self._changed.notify_all()

  def _free(self) -> Fraction | float:
    with self._changed:
      return self._limit - self._settled - sum(self._held.values())


@dataclasses.dataclass
class Cost:
  """The cost of a call, which is set during its reservation."""

  usd: float = 0.0


@contextlib.contextmanager
def hold(
  episode: DollarBudget | None,
  run: DollarBudget | None,
  usd: float,
  replayed: bool = False,
) -> Iterator[Cost]:
  """Reserve a call's worst case in the budgets of its episode and of the run.

  However the call ends, its cost is settled; it is 0 unless it was set. A budget of
  None is no cap.

  Args:
    usd: the worst case.
    replayed: the reply was recorded before. The episode's budget pays again, because
      policies are compared under it; the run's does not.

  Raises:
    BudgetSpent: the call does not fit the episode's budget.
    CapReached: the call does not fit the run's budget.
  """
  cost = Cost()
  with contextlib.ExitStack() as stack:
    for budget, refusal in ((episode, BudgetSpent), (run, CapReached)):
      if budget is None or (replayed and refusal is CapReached):
        continue
      reservation = budget.reserve(usd)
      if reservation is None:
        left_usd = max(0.0, budget.limit_usd - budget.settled_usd)
        left = f"${left_usd:.6f} is left of ${budget.limit_usd:g}"
        raise refusal(f"a call may cost ${usd:.6f}, and {left}")
      stack.callback(
        lambda budget=budget, held=reservation: budget.settle(held, cost.usd)
      )
    yield cost


# No budget limits these calls.
unlimited = functools.partial(hold, None, None)


def _exact(usd: float) -> Fraction:
  """Convert dollars to an exact number. Raises ValueError if they are no dollars."""
  if not 0 <= usd < math.inf:
    raise ValueError(f"dollars must be >= 0 and finite, got {usd}")
  return Fraction(str(float(usd)))
