"""Check the batches that BoSFT learns from; test_train has the router that it keeps."""

import itertools

import pytest

from baar_jax.paper.sft import mix_batches


@pytest.mark.parametrize("size, hards", [(64, 45), (10, 7)])
def test_batches_have_the_share_of_hard_tasks(size, hards):
  """One in eleven stored references is of a hard task."""
  batches = mix_batches([*range(10)], [*range(100, 200)], size, 0)
  for batch in itertools.islice(batches, 5):
    assert len(batch) == size and sum(number < 100 for number in batch) == hards
  # If one pool is empty, the other fills the batch.
  for pools in ([], [1, 2]), ([1, 2], []):
    assert sorted(next(mix_batches(*pools, 4, 0))) == [1, 1, 2, 2]
