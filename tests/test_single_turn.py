"""Check the labels of the single-turn classifier by hand."""

from tiny import episode

from baar_jax.families.single_turn import find_winners


def trials(marks):
  """One episode per mark: "1" succeeds, "0" fails, "-" is missing."""
  kept = [(seed, mark) for seed, mark in enumerate(marks) if mark != "-"]
  return [episode(seed=seed, score=0.9 + 0.1 * int(mark)) for seed, mark in kept]


def test_the_cheapest_model_that_succeeds_wins():
  small = trials("10010")
  large = trials("1101-1")
  won = [0, 1, 0, 0]
  assert find_winners([small, large]) == {("t", n): won[n] for n in range(4)}
  winners = find_winners([small, trials("101"), large])
  assert winners == {("t", 0): 0, ("t", 1): 2, ("t", 2): 1}
