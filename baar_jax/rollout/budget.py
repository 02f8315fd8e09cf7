"""Count calls and dollars against caps, with reservations and settlements.

A cap is the paper's hard budget (Eq. 2), and what remains of it is b_t (Eq. 9). The
dollars of a call are known only after the call. So its worst case is reserved before
the call, and replaced by its cost afterwards.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Iterable, Iterator
from fractions import Fraction

from baar_jax.episode import SMALL, Cost, Step


class BudgetSpent(RuntimeError):
  """Report that a call does not fit its episode's budget.

  A cheaper model may act instead.
  """


class CapReached(RuntimeError):
  """Report that a call does not fit the run's budget; the stage stops."""


class DollarBudget:
  """A budget in dollars that any number of threads may share.

  The worst case of a call is reserved before the call, and its cost is settled after
  the call. So the bill exceeds the cap only if a call costs more than its worst case.
  Dollars are added as exact fractions.
  """

  def __init__(self, limit_usd: float | None, spent_usd: float = 0.0):
    """Start a budget.

    Args:
      limit_usd: the cap; None is no cap.
      spent_usd: the dollars that were already settled before this object was made.
    """
    self._settled = _to_fraction(spent_usd)
    # The worst case of each call in flight, by its reservation.
    self._reserved: dict[object, Fraction] = {}
    self._changed = threading.Condition()
    self.change_limit(limit_usd)

  @property
  def remaining(self) -> float:
    """Return the dollars that are neither settled nor reserved, at least 0."""
    return float(max(0, self._unreserved()))

  @property
  def settled_usd(self) -> float:
    """Return the settled dollars, including those from before this budget's start."""
    return float(self._settled)

  def change_limit(self, limit_usd: float | None) -> None:
    """Replace the cap; None is no cap. What is reserved and settled stays.

    A thread that waits in `reserve` is not woken by this.
    """
    self.limit_usd = limit_usd
    self._limit = math.inf if limit_usd is None else _to_fraction(limit_usd)

  def lost_usd(self, steps: Iterable[Step]) -> float:
    """Compute the settled dollars of calls that no step contains.

    Such calls are failed attempts after which another model acted, or the episode
    ended.
    """
    # The two sums of floats may differ in the last bits, so the difference is rounded.
    steps_usd = sum(step.counted_usd for step in steps)
    return max(0.0, round(self.settled_usd - steps_usd, 12))

  def allows(self, usd: float) -> bool:
    """Tell whether a call with this worst case, in dollars, fits the budget now."""
    return _to_fraction(usd) <= self._unreserved()

  def reserve(self, usd: float) -> object | None:
    """Reserve the worst case of a call.

    Calls in flight have their own reservations. If the call does not fit beside them,
    this method waits until enough of them are settled.

    Args:
      usd: the worst case in dollars.

    Returns:
      The reservation. None if the call does not fit beside the settled dollars alone,
      so that waiting would not help.
    """
    worst_case = _to_fraction(usd)
    reservation = object()
    with self._changed:
      while worst_case > self._unreserved():
        if worst_case > self._limit - self._settled:
          return None
        self._changed.wait()
      self._reserved[reservation] = worst_case
    return reservation

  def settle(self, reservation: object, usd: float) -> None:
    """Settle the cost of a call, and close the call's reservation.

    Args:
      reservation: the result of `reserve`.
      usd: the cost in dollars.

    Raises:
      ValueError: the cost is negative or not finite. The worst case is settled then.
    """
    with self._changed:
      cost = self._reserved.pop(reservation)
      try:
        cost = _to_fraction(usd)
      finally:
        self._settled += cost
        self._changed.notify_all()

  def _unreserved(self) -> Fraction | float:
    """Compute the dollars neither settled nor reserved, negative if overspent."""
    with self._changed:
      return self._limit - self._settled - sum(self._reserved.values())


class CallBudget:
  """A budget of calls of models costlier than SMALL (paper: K of the hard budget).

  As in the budget in dollars, a call is reserved before it is made, and settled after
  it. An episode makes one call after another, so nothing waits here.

  Attributes:
    limit: the most calls of models costlier than SMALL; None is no cap.
    remaining: the number of calls that are still free to reserve; infinite without a
      cap.
  """

  def __init__(self, limit: int | None):
    """Start a budget of which nothing is used.

    Args:
      limit: the most calls of models costlier than SMALL; None is no cap.
    """
    self.limit = limit
    self.remaining = math.inf if limit is None else limit

  def allows(self, model: int) -> bool:
    """Tell whether a call of the model fits the budget.

    A call is forbidden if its cost, 1, is above the remaining calls (our choice). The
    paper prints "cost >= remaining" instead. That formula would forbid the last call of
    a budget, but the paper's own tables report the last call as used.
    """
    return model == SMALL or self.remaining >= 1

  def reserve(self, model: int) -> int:
    """Reserve a call of a model.

    Returns:
      The reservation: the calls that it takes, 0 for SMALL and 1 for any other model.

    Raises:
      ValueError: the call does not fit.
    """
    if not self.allows(model):
      raise ValueError(f"No LARGE call remains of {self.limit}. Call SMALL instead.")
    calls = int(model != SMALL)
    self.remaining -= calls
    return calls

  def settle(self, reservation: int, model: int) -> None:
    """Close a call's reservation.

    Args:
      reservation: the result of `reserve`.
      model: index of the model that replied; SMALL if the call brought no reply.
    """
    self.remaining += reservation - int(model != SMALL)


@contextlib.contextmanager
def reserve(
  episode: DollarBudget | None,
  run: DollarBudget | None,
  usd: float,
  replayed: bool = False,
) -> Iterator[Cost]:
  """Reserve a call's worst case in the budgets of its episode and of the run.

  The call is made inside the `with` statement. When it has ended, also by an error, its
  cost is settled in both budgets: the method's dollars in the episode's, the billed
  ones in the run's. The yielded Cost has both, $0 unless the call sets them.

  Args:
    episode: the episode's budget; None is no cap.
    run: the run's budget; None is no cap.
    usd: the worst case in dollars.
    replayed: whether the reply was recorded before. The episode's budget pays for a
      recorded reply again, because policies are compared under this budget. The run's
      budget does not pay again.

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
        remaining_usd = max(0.0, budget.limit_usd - budget.settled_usd)
        raise refusal(
          f"a call may cost ${usd:.6f}, but only ${remaining_usd:.6f} remains of the "
          f"cap of ${budget.limit_usd:g}"
        )
      is_billed = refusal is CapReached
      stack.callback(_settle, budget, reservation, cost, is_billed)
    yield cost


def _settle(
  budget: DollarBudget, reservation: object, cost: Cost, is_billed: bool
) -> None:
  """Settle the billed dollars of a call in a budget, or those of the method."""
  usd = cost.usd
  if is_billed and cost.billed_usd is not None:
    usd = cost.billed_usd
  budget.settle(reservation, usd)


# The function `reserve` without budgets: it never refuses a call.
unlimited = functools.partial(reserve, None, None)


def _to_fraction(usd: float) -> Fraction:
  """Convert dollars to an exact fraction.

  Raises:
    ValueError: the number is negative or not finite.
  """
  if not 0 <= usd < math.inf:
    raise ValueError(
      f"A sum of dollars must be finite and >= 0, but it is {usd}. Correct this number."
    )
  return Fraction(str(float(usd)))
