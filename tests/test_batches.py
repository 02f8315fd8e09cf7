"""Check micro-batches against literal arrays, and the order in which episodes are drawn."""

import itertools

import numpy as np
from tiny import episode
from tiny_router import EPISODES, make_batcher, make_view

from baar_jax.learn.batches import ACTED, SAMPLED, draw_batches, make_batch
from baar_jax.router.view import Window


def test_a_batch_of_windows_by_hand():
  windows = [Window([11, 12, 13], [0, 2]), Window([31], [0])]
  text = make_view(max_tokens=500).pad(windows, 3, 2)
  # Rows of 250 or 500 tokens are compiled.
  rows = [[11, 12, 13], [31, 0, 0], [0, 0, 0]]
  np.testing.assert_array_equal(text.tokens_BxT[:, :3], rows)
  assert text.tokens_BxT.shape == (3, 250) and not text.tokens_BxT[:, 3:].any()
  assert text.position_BxS.tolist() == [[0, 2], [0, 0], [0, 0]]


def test_labels_of_a_batch_by_hand():
  episodes = [episode(models="SL"), episode(models="LSL", logps=[-0.5, None, 0.0])]
  expected = dict(
    action_BxS=[[0, 1, 0], [1, 0, 1]],
    logp_BxS=[[0] * 3, [-0.5, 0, 0]],
    mask_BxS=[[True, True, False], [True] * 3],
  )
  batch = make_batch(episodes, None, ACTED, (2, 3))
  # A decision without log-probability was forced; one with 0.0 was sampled.
  sampled = make_batch(episodes, None, SAMPLED, (2, 3))
  changed = dict(mask_BxS=[[False] * 3, [True, False, True]])
  for got, arrays in ((batch, expected), (sampled, changed)):
    for name, values in arrays.items():
      np.testing.assert_array_equal(getattr(got, name), np.array(values), name)


def test_micro_batches_hold_every_episode_once():
  batches = make_batcher(2).micro_batches(EPISODES)
  # Episodes of similar length are together.
  decisions = [batch.mask_BxS.sum(axis=1).tolist() for batch in batches]
  assert decisions == [[1, 2], [4, 5], [6, 0]]
  # Each has the totals of the step.
  assert [(batch.episodes, batch.decisions) for batch in batches] == [(5, 18)] * 3
  adv_B = np.array([1.0, -2.0, 0.5, 3.0, -1.0])
  batches = make_batcher(2, labels=SAMPLED).micro_batches(EPISODES, adv_B)
  assert [batch.adv_B.tolist() for batch in batches] == [[-2, 3], [-1, 1], [0.5, 0]]
  assert batches[2].mask_BxS.sum() == 5  # one was forced
  assert batches[2].decisions == 17
  # Values computed per batch are returned in the order of the episodes.
  models = make_batcher(2).compute(lambda batch: batch.action_BxS, EPISODES)
  assert "".join("SL"[model] for model in models) == "SLSLLLSLLSSLLLLSSL"


def test_a_pool_is_used_up_in_a_new_order_before_it_repeats():
  def draw(seed):
    batches = draw_batches([*range(6)], 2, seed)
    return sum(itertools.islice(batches, 9), [])

  drawn = draw(0)
  assert drawn == draw(0) != draw(7)
  passes = [drawn[start : start + 6] for start in (0, 6, 12)]
  assert all(sorted(one_pass) == [*range(6)] for one_pass in passes)
  assert passes[0] != passes[1]
