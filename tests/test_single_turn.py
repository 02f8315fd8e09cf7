"""The single-turn router's preference data, by hand."""

import tiny

from baar_jax.stages.single_turn import Winners, large_wins
from baar_jax.train.batches import make_batch


def trial(seed, score, models="S"):
  return tiny.episode("t", seed=seed, score=score, models=models)


def test_large_wins_where_it_alone_succeeds():
  small = [trial(0, 1), trial(1, 0), trial(2, 0), trial(3, 1), trial(4, 0)]
  large = [trial(0, 1), trial(1, 1), trial(2, 0.9), trial(3, 0), trial(9, 1)]
  wins = large_wins(small, large)
  assert wins == {("t", 0): False, ("t", 1): True, ("t", 2): False, ("t", 3): False}


def test_every_state_of_a_trial_has_its_winner(view, make_task):
  episodes = [trial(0, 1, "SS"), trial(1, 0, "SSS"), trial(1, 1, "LL")]
  windows = [view.episode_windows(make_task(), e) for e in episodes]
  batch = make_batch(episodes, windows, rows=4, decisions=3, buckets=[320])
  labelled = Winners({("t", 0): False, ("t", 1): True})(episodes, batch)
  assert labelled.action_BxS.tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]
  assert (labelled.mask_BxS == batch.mask_BxS).all()
