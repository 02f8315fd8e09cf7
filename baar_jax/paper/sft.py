"""Imitate stored episodes until the loss on dev stops falling (paper: BoSFT).

BoSFT imitates the reference trajectories. The cascade's scorer and the single-turn
classifier learn by the same loop. The paper does not state the number of updates; the
end by the loss on dev tasks is our choice.

A `Batcher` pads episodes to arrays with the labels of their decisions, and a `Trainer`
takes optimizer steps on these arrays (learn/).
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from baar_jax.config import SFTConfig
from baar_jax.episode import Episode
from baar_jax.learn.batches import Batch, Batcher, draw_batches
from baar_jax.learn.trainer import Trainer

# After this number of measurements in a row without a lower loss on dev, the training
# ends.
PATIENCE = 4
HARD_SHARE = 0.7  # The share of episodes of hard tasks in a batch (paper: about 0.7).


@dataclasses.dataclass
class Progress:
  """Record the progress of a training on stored episodes.

  Attributes:
    dev_loss: the least loss on dev so far; without dev episodes, the training loss at
      the end.
    best_update: the number of updates after which it was measured.
    updates: the number of updates so far.
    finished: whether the training has ended.
  """

  dev_loss: float = math.inf
  best_update: int = 0
  updates: int = 0
  finished: bool = False


def sft(
  trainer: Trainer,
  batcher: Batcher,
  batches: Iterable[tuple[int, list[Episode]]],
  dev_batches: Sequence[Batch],
  settings: SFTConfig,
  progress: Progress,
) -> Iterator[dict[str, float]]:
  """Take gradient steps on stored episodes.

  The caller keeps the router of the update `progress.best_update`.

  The loss on dev is measured every `check_every` updates. The training ends after
  `PATIENCE` measurements without a lower loss, or after `settings.updates` updates.

  Args:
    trainer: the router that learns.
    batcher: cuts episodes into micro-batches, with the labels to learn.
    batches: the number of each update, from 1, and its episodes.
    dev_batches: the micro-batches of the loss on dev; may be empty.
    settings: the numbers of updates and of measurements.
    progress: the progress so far; it is updated.

  Yields:
    The metrics of each gradient step, and the loss on dev if it was measured.
  """
  patience = PATIENCE * settings.check_every
  for update, episodes in batches:
    metrics = trainer.step(batcher.micro_batches(episodes))
    progress.updates = update
    is_last = update == settings.updates
    if is_last or (dev_batches and update % settings.check_every == 0):
      loss = trainer.loss(dev_batches) if dev_batches else metrics["loss"]
      metrics["dev_loss"] = loss
      if loss < progress.dev_loss:
        progress.dev_loss = loss
        progress.best_update = update
      is_last |= update - progress.best_update >= patience
    progress.finished = is_last
    yield metrics
    if is_last:
      return


def mix_batches(
  hard: Sequence[Episode],
  rest: Sequence[Episode],
  size: int,
  seed: int,
) -> Iterator[list[Episode]]:
  """Draw batches of references of which `HARD_SHARE` are of hard tasks, without end.

  The paper's batch of 64 is about 70 % hard, and it does not say of what. Here both
  count episodes, and the loss is a mean over all decisions of the batch (our choice).

  No reference repeats before all references in `hard`, or in `rest`, were drawn. If
  `hard` or `rest` is empty, the batches come from the other sequence alone.

  Args:
    hard: the references of hard tasks.
    rest: the references of the other tasks.
    size: the number of episodes in a batch.
    seed: the seed of the draws.
  """
  hard_count = size * bool(hard)
  if hard and rest:
    hard_count = round(size * HARD_SHARE)
  hard_batches = draw_batches(hard, hard_count, f"{seed}|hard")
  rest_batches = draw_batches(rest, size - hard_count, f"{seed}|rest")
  while True:
    yield next(hard_batches) + next(rest_batches)
