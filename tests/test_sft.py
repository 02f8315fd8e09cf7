"""Check which router BoSFT keeps, and the batches that it learns from."""

import itertools
from unittest.mock import Mock

import pytest

from baar_jax.config import SFTConfig
from baar_jax.paper import sft
from baar_jax.paper.sft import Best, mix_batches


@pytest.mark.parametrize(
  "losses, best", [([0.9, 0.7, 0.8, 0.7], 2), ([0.9, 0.6, 0.7, 0.5, 0.6], 4)]
)
def test_a_training_ends_without_a_new_best(monkeypatch, losses, best):
  """The loss is measured at every second update. An equal loss is no new best."""
  monkeypatch.setattr(sft, "PATIENCE", 2)
  trainer = Mock()
  trainer.step.side_effect = lambda batches: {}
  trainer.loss.side_effect = losses
  trainer.copy_params.side_effect = lambda: trainer.loss.call_count
  settings = SFTConfig(updates=10, check_every=2)
  kept = Best({})
  updates = zip(itertools.count(1), itertools.repeat([]))
  done = [*sft.sft(trainer, Mock(), updates, [[]], settings, kept)]
  assert kept == Best(best, losses[best - 1], 2 * best)
  assert [update.is_last for update in done].index(True) == 2 * len(losses) - 1
  assert [u.metrics.get("dev_loss") for u in done[1::2]] == losses


@pytest.mark.parametrize("size, hards", [(64, 45), (10, 7)])
def test_batches_have_the_share_of_hard_tasks(size, hards):
  """One in eleven stored references is of a hard task."""
  batches = mix_batches([*range(10)], [*range(100, 200)], size, 0)
  for batch in itertools.islice(batches, 5):
    assert len(batch) == size and sum(number < 100 for number in batch) == hards
  # If one pool is empty, the other fills the batch.
  for pools in ([], [1, 2]), ([1, 2], []):
    assert sorted(next(mix_batches(*pools, 4, 0))) == [1, 1, 2, 2]
