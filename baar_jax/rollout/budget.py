"""Budgets of calls and dollars: what is left, what it allows, and what has been taken from it."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from fractions import Fraction

from baar_jax.episode import SMALL


class CallBudget:
  """At most `limit` calls of models dearer than SMALL (paper: K of the hard-budget setting).

  A call costs 1, or 0 for SMALL, and is known before it is made, so `reserve` takes it and
  `settle` only gives it back if the call was never made.
  """

  def __init__(self, limit: int):
    if limit < 0:
      raise ValueError(f"a call budget must be >= 0, got {limit}")
    self.limit = limit
    self.remaining = limit

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
    """Closes a reservation; one whose call was not made is given back."""
    self.remaining += model != SMALL and not made


class BudgetSpent(RuntimeError):
  """A call does not fit what a task may cost; the episode ends with what it has."""


class CapReached(RuntimeError):
  """A call does not fit what the whole run may cost; the stage stops."""


@dataclasses.dataclass(eq=False)
class Reservation:
  """Dollars that are held for a call in flight."""

  usd: Fraction


class DollarBudget:
  """At most `limit_usd` dollars, whichever threads spend them.

  What a call costs is known after it, what it costs at most before it. The most is reserved, the
  call is made, what it did cost is settled; so what is billed never passes the limit, unless a
  call costs more than the most that was reserved for it. Dollars are added up exactly, as the
  decimals that they are written as, so that a hundred calls of a cent are a dollar.
  """

  def __init__(self, limit_usd: float):
    if not 0 <= limit_usd < math.inf:
      raise ValueError(f"a dollar budget must be >= 0 and finite, got {limit_usd}")
    self.limit_usd = limit_usd
    self._settled = Fraction(0)
    self._open: set[Reservation] = set()
    self._changed = threading.Condition()

  @property
  def remaining(self) -> float:
    """Dollars that are neither settled nor reserved."""
    with self._changed:
      return float(self._free())

  @property
  def settled_usd(self) -> float:
    with self._changed:
      return float(self._settled)

  @property
  def reserved_usd(self) -> float:
    with self._changed:
      return float(sum(held.usd for held in self._open))

  def allows(self, usd: float) -> bool:
    """Whether a call of at most `usd` fits into what is left now."""
    with self._changed:
      return _exact(usd) <= self._free()

  def reserve(self, usd: float) -> Reservation | None:
    """Holds `usd` for a call.

    Waits while calls in flight hold what would make it fit: most of them cost less than they hold.

    Returns:
      None if it does not fit even when all that is held is given back.
    """
    wanted = _exact(usd)
    if wanted < 0:
      raise ValueError(f"cannot reserve {usd} dollars")
    with self._changed:
      while wanted > self._free():
        if wanted > _exact(self.limit_usd) - self._settled:
          return None
        self._changed.wait()
      held = Reservation(wanted)
      self._open.add(held)
      return held

  def settle(self, reservation: Reservation, usd: float) -> None:
    """Closes a reservation with what the call did cost. Raises ValueError if it is closed."""
    self._close(reservation, _exact(usd))

  def release(self, reservation: Reservation) -> None:
    """Gives back all of a reservation: the call was not made, or cost nothing."""
    self._close(reservation, Fraction(0))

  def spend(self, usd: float) -> None:
    """Counts what was spent before this budget was made."""
    with self._changed:
      self._settled += _exact(usd)

  def _free(self) -> Fraction:
    return _exact(self.limit_usd) - self._settled - sum(held.usd for held in self._open)

  def _close(self, reservation: Reservation, usd: Fraction) -> None:
    if usd < 0:
      raise ValueError(f"cannot settle {float(usd)} dollars")
    with self._changed:
      if reservation not in self._open:
        raise ValueError("this reservation is settled or released already")
      self._open.remove(reservation)
      self._settled += usd
      self._changed.notify_all()


@dataclasses.dataclass
class Charge:
  """What a call did cost, to be noted while its worst case is held."""

  usd: float = 0.0


@dataclasses.dataclass(frozen=True)
class Purse:
  """What an episode's calls are paid from: its task's budget and the run's cap, where it has any.

  Attributes:
    task: dollars of the episode.
    run: dollars of all episodes together.
  """

  task: DollarBudget | None = None
  run: DollarBudget | None = None

  @contextlib.contextmanager
  def hold(self, usd: float) -> Iterator[Charge]:
    """Holds the worst case of a call, and settles what is noted on the charge when the call ends.

    However it ends: of a call that raised before its cost was noted, all is given back.

    Raises:
      BudgetSpent: it does not fit the task's budget.
      CapReached: it does not fit the run's.
    """
    charge = Charge()
    with contextlib.ExitStack() as stack:
      for budget, refusal in ((self.task, BudgetSpent), (self.run, CapReached)):
        if budget is None:
          continue
        reservation = budget.reserve(usd)
        if reservation is None:
          raise refusal(
            f"a call may cost ${usd:.6f}, and ${budget.limit_usd - budget.settled_usd:.6f} is left "
            f"of ${budget.limit_usd:g}"
          )
        stack.callback(_settle, budget, reservation, charge)
      yield charge


def _settle(budget: DollarBudget, reservation: Reservation, charge: Charge) -> None:
  budget.settle(reservation, charge.usd)


def _exact(usd: float) -> Fraction:
  return Fraction(str(float(usd)))
