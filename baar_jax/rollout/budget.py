"""Budgets of calls and dollars: what is left, what it allows, and what has been taken from it."""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Iterable, Iterator
from fractions import Fraction

from baar_jax.episode import SMALL, Step


class BudgetSpent(RuntimeError):
  """A call does not fit what is left to an episode; a cheaper model's may."""


class CapReached(RuntimeError):
  """A call does not fit what the whole run may cost; the stage stops."""


class CallBudget:
  """At most `limit` calls of models dearer than SMALL (paper: K of the hard-budget setting).

  None is no limit. A call is reserved before it is made, and given back if it never was.
  """

  def __init__(self, limit: int | None):
    self.limit, self.remaining = limit, math.inf if limit is None else limit

  def allows(self, model: int) -> bool:
    """Whether a call of the model fits: cost > remaining is pruned.

    The paper prints cost >= remaining, which would forbid the last call of the budget that its
    own tables report as used.
    """
    return model == SMALL or self.remaining >= 1

  def reserve(self, model: int) -> None:
    """Takes a call. Raises ValueError if it does not fit."""
    if not self.allows(model):
      raise ValueError(f"no large call is left of {self.limit}")
    self.remaining -= model != SMALL

  def settle(self, model: int, made: bool) -> None:
    """Closes a reservation, and gives the call back if it was not made."""
    self.remaining += model != SMALL and not made


class DollarBudget:
  """At most `limit_usd` dollars, whichever threads spend them; None is no limit.

  The most that a call can cost is reserved before it is made, and then its cost is settled; so what
  is billed passes the limit only where a call costs more than its most. Sums of dollars are exact.
  """

  def __init__(self, limit_usd: float | None, spent_usd: float = 0.0):
    self.limit_usd, self._settled = limit_usd, _exact(spent_usd)
    self._limit = math.inf if limit_usd is None else _exact(limit_usd)
    self._held: dict[object, Fraction] = {}  # by reservation, of the calls in flight
    self._changed = threading.Condition()

  @property
  def remaining(self) -> float:
    """Dollars that are neither settled nor reserved; 0 where a call has cost more than it held."""
    return float(max(0, self._free()))

  @property
  def settled_usd(self) -> float:
    return float(self._settled)

  def lost_usd(self, steps: Iterable[Step]) -> float:
    """Dollars that are settled and in no step; floats add up to the last bits alone."""
    return max(0.0, round(self.settled_usd - sum(step.spent_usd for step in steps), 12))

  def allows(self, usd: float) -> bool:
    """Whether a call of at most `usd` fits into what is left now."""
    return _exact(usd) <= self._free()

  def reserve(self, usd: float) -> object | None:
    """Holds `usd` for a call; waits while the end of calls in flight could make it fit.

    Returns the reservation, or None if it does not fit even when all others are given back.
    """
    most, reservation = _exact(usd), object()
    with self._changed:
      while most > self._free():
        if most > self._limit - self._settled:
          return None
        self._changed.wait()
      self._held[reservation] = most
    return reservation

  def settle(self, reservation: object, usd: float) -> None:
    """Closes a reservation with the cost of its call; with all of it, and ValueError, if `usd` is
    none."""
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
  usd: float = 0.0  # of a call, to be set while its worst case is held


@contextlib.contextmanager
def hold(
  episode: DollarBudget | None,
  run: DollarBudget | None,
  usd: float,
  replayed: bool = False,
) -> Iterator[Cost]:
  """Holds the worst case of a call in the budgets of its episode and of the run, if they have one.

  However the call ends, its cost is settled: 0 where none was set. For a `replayed` reply, which
  was recorded before, the episode's budget pays again, because policies are compared under it, but
  the run does not. Raises BudgetSpent or CapReached if `usd` does not fit.
  """
  cost = Cost()
  with contextlib.ExitStack() as stack:
    for budget, refusal in (
      (episode, BudgetSpent),
      (None if replayed else run, CapReached),
    ):
      if budget is None:
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


unlimited = functools.partial(hold, None, None)  # pays for calls that no budget limits


def _exact(usd: float) -> Fraction:
  if not 0 <= usd < math.inf:
    raise ValueError(f"dollars must be >= 0 and finite, got {usd}")
  return Fraction(str(float(usd)))
