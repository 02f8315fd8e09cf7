"""Hand-made episodes to literal arrays, and the few shapes that they are padded to."""

import numpy as np
import pytest
from tiny import episode

from baar_jax.router.view import Window
from baar_jax.train.batches import make_batch

SIZES = {"size": 3, "decisions": 4, "buckets": (6, 10)}


def assert_arrays(batch, **expected):
  for name, values in expected.items():
    np.testing.assert_array_equal(getattr(batch, name), np.array(values), err_msg=name)


def test_transcripts():
  """One row per episode; the second episode's history was cut before its last step."""
  episodes = [episode(models="SL"), episode(models="LSL", logps=[-0.5, None, 0.0])]
  windows = [
    [Window([11, 12, 13, 14], [1, 3], 0)],
    [Window([21, 22, 23], [0, 2], 0), Window([31, 32], [1], 2)],
  ]
  batch = make_batch(episodes, windows, **SIZES)
  assert_arrays(
    batch,
    tokens_RxT=[[11, 12, 13, 14, 0, 0], [21, 22, 23, 0, 0, 0], [31, 32, 0, 0, 0, 0]],
    row_BxS=[[0, 0, 0, 0], [1, 1, 2, 0], [0, 0, 0, 0]],
    position_BxS=[[1, 3, 0, 0], [0, 2, 1, 0], [0, 0, 0, 0]],
    action_BxS=[[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]],
    logp_BxS=[[0, 0, 0, 0], [-0.5, 0, 0, 0], [0, 0, 0, 0]],
    mask_BxS=np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], bool),
  )
  # With advantages the forced decisions are left out; a log-probability of 0 was sampled.
  batch = make_batch(episodes, windows, advantages=[2.0, -1.0], **SIZES)
  mask_BxS = np.array([[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
  assert_arrays(batch, mask_BxS=mask_BxS, adv_B=[2.0, -1.0, 0.0])


def test_the_papers_view_has_one_row_per_step():
  windows = [[Window([1, 2, 3], [2], 0), Window([4, 5, 6, 7], [3], 1)], [Window([8], [0], 0)]]
  assert_arrays(
    make_batch([episode(models="SL"), episode(models="L")], windows, **SIZES),
    tokens_RxT=[[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 0, 0], [8, 0, 0, 0, 0, 0]],
    row_BxS=[[0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]],
    position_BxS=[[2, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
  )


def test_few_shapes():
  """Rows are those asked for or a power of two above; the longest row sets the length."""
  for count, rows in ((3, 3), (4, 4), (16, 16), (17, 32)):
    windows = [[Window([1], [0], s) for s in range(count)]]
    batch = make_batch([episode(models="S" * count)], windows, **SIZES | {"decisions": count})
    assert batch.tokens_RxT.shape == (rows, 6)

  def pad(tokens):
    windows = [[Window([1], [0], 0)], [Window([1] * tokens, [0], 0)]]
    return make_batch([episode(models="S")] * 2, windows, **SIZES).tokens_RxT.shape[1]

  assert [pad(tokens) for tokens in (1, 6, 7, 10)] == [6, 6, 10, 10]
  with pytest.raises(ValueError, match=r"a sequence of 11 tokens fits no bucket of \[6, 10\]"):
    pad(11)
