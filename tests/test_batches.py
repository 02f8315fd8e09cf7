"""Hand-made episodes to literal arrays, and the few shapes that they are padded to."""

import jax
import numpy as np
import pytest

from baar_jax.router.view import Window
from baar_jax.train.batches import bucket_of, length_buckets, make_batch

SIZES = {"rows": 3, "decisions": 4, "buckets": (6, 10)}


def assert_arrays(batch, **wanted):
  for name, want in wanted.items():
    np.testing.assert_array_equal(getattr(batch, name), np.array(want), err_msg=name)


class TestArrays:
  def test_transcript(self, make_episode):
    """One row per episode; the second episode's history was cut before its last step."""
    episodes = [make_episode("SL"), make_episode("LSL", logps=[-0.5, None, -0.25])]
    windows = [
      [Window([11, 12, 13, 14], [1, 3], 0)],
      [Window([21, 22, 23], [0, 2], 0), Window([31, 32], [1], 2)],
    ]
    batch = make_batch(episodes, windows, **SIZES)
    tokens = np.zeros((3, 6))
    tokens[:3] = [[11, 12, 13, 14, 0, 0], [21, 22, 23, 0, 0, 0], [31, 32, 0, 0, 0, 0]]
    T, F = True, False
    assert_arrays(
      batch,
      tokens_RxT=tokens,
      row_BxS=[[0, 0, 0, 0], [1, 1, 2, 0], [0, 0, 0, 0]],
      position_BxS=[[1, 3, 0, 0], [0, 2, 1, 0], [0, 0, 0, 0]],
      action_BxS=[[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]],
      logp_BxS=[[0, 0, 0, 0], [-0.5, 0, -0.25, 0], [0, 0, 0, 0]],
      mask_BxS=[[T, T, F, F], [T, T, T, F], [F, F, F, F]],
    )
    assert [leaf.dtype for leaf in jax.tree.leaves(batch)[:6]] == [
      *(np.int32, np.int32, np.int32, np.int32),
      *(np.float32, bool),
    ]

  def test_paper_view(self, make_episode):
    """One row per step."""
    episodes = [make_episode("SL"), make_episode("L")]
    windows = [[Window([1, 2, 3], [2], 0), Window([4, 5, 6, 7], [3], 1)], [Window([8], [0], 0)]]
    batch = make_batch(episodes, windows, **SIZES)
    tokens = np.zeros((3, 6))
    tokens[:3] = [[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 0, 0], [8, 0, 0, 0, 0, 0]]
    assert_arrays(
      batch,
      tokens_RxT=tokens,
      row_BxS=[[0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]],
      position_BxS=[[2, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
      action_BxS=[[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]],
    )

  def test_forced_decisions_are_left_out_of_what_was_sampled(self, make_episode):
    """A log-probability of 0 was sampled; None was forced."""
    episode = make_episode("LSL", logps=[-0.5, None, 0.0])
    batch = make_batch([episode], [[Window([1, 2, 3], [0, 1, 2], 0)]], sampled_only=True, **SIZES)
    assert_arrays(
      batch,
      mask_BxS=[[True, False, True, False], [False] * 4, [False] * 4],
      logp_BxS=[[-0.5, 0, 0, 0], [0] * 4, [0] * 4],
    )

  def test_points_to_the_token_before_the_decision(self, view, make_task, make_episode):
    """With a real view: behind each position stands the decision's own token."""
    episode = make_episode("SLLS")
    windows = view.episode_windows(make_task(), episode)
    batch = make_batch([episode], [windows], rows=1, decisions=4, buckets=(320,))
    after = batch.tokens_RxT[batch.row_BxS[0, :3], batch.position_BxS[0, :3] + 1]
    np.testing.assert_array_equal(after, np.array(view.decision_ids)[[0, 1, 1]])


class TestShapes:
  @pytest.mark.parametrize("windows, rows", [(1, 3), (3, 3), (4, 4), (9, 16), (16, 16), (17, 32)])
  def test_rows_are_those_asked_for_or_a_power_of_two_above(self, make_episode, windows, rows):
    parts = [Window([1], [0], s) for s in range(windows)]
    batch = make_batch(
      [make_episode("S" * windows)], [parts], rows=3, decisions=windows, buckets=(4,)
    )
    assert batch.tokens_RxT.shape == (rows, 4)

  @pytest.mark.parametrize("tokens, length", [(1, 6), (6, 6), (7, 10), (10, 10)])
  def test_the_longest_row_sets_the_length(self, make_episode, tokens, length):
    windows = [[Window([1], [0], 0)], [Window([1] * tokens, [0], 0)]]
    batch = make_batch([make_episode("S"), make_episode("S")], windows, **SIZES)
    assert batch.tokens_RxT.shape == (3, length)

  def test_too_long(self):
    with pytest.raises(ValueError, match=r"a sequence of 11 tokens fits no bucket of \[6, 10\]"):
      bucket_of(11, (6, 10))

  def test_length_buckets(self):
    assert length_buckets(512, 2) == [256, 512]
    assert length_buckets(1000, 3) == [333, 666, 1000]
