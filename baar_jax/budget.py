"""Budgets of one task: what is left, what it allows, and what has been taken from it."""

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
