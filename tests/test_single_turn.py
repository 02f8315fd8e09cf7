"""Check the labels of the single-turn classifier by hand."""

from tiny import episode

from baar_jax.families.single_turn import find_winners

KEYS = [("t", "profile", trial) for trial in range(4)]


def trials(marks):
  """One episode per mark: "1" succeeds, "0" fails, "-" is missing."""
  kept = [(trial, mark) for trial, mark in enumerate(marks) if mark != "-"]
  return [episode(trial=trial, score=0.9 + 0.1 * int(mark)) for trial, mark in kept]


def test_the_cheapest_model_that_succeeds_wins():
  small = trials("10010")
  large = trials("1101-1")
  won = [0, 1, 0, 0]
  assert find_winners([small, large]) == {KEYS[n]: won[n] for n in range(4)}
  winners = find_winners([small, trials("101"), large])
  assert winners == {KEYS[0]: 0, KEYS[1]: 2, KEYS[2]: 1}
