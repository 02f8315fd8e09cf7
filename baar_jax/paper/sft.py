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
from typing import NamedTuple

from baar_jax.config import SFTConfig
from baar_jax.episode import Episode
from baar_jax.learn.batches import Batch, Batcher, draw_batches
from baar_jax.learn.trainer import Trainer

# After this number of measurements in a row without a lower loss on dev, the training
# ends.
PATIENCE = 4
HARD_SHARE = 0.7  # The share of episodes of hard tasks in a batch (paper: about 0.7).


@dataclasses.dataclass
class Best:
  """Keep the router with the least loss on dev so far.

  Attributes:
    params: the parameters, as in `Trainer.state`.
    dev_loss: the loss on dev; without dev episodes, the training loss at the end.
    update: the number of updates after which it was measured.
  """

  params: dict
  dev_loss: float = math.inf
  update: int = 0


class SFTUpdate(NamedTuple):
  """Report what an update did.

  Attributes:
    number: the number of the update, from 1.
    metrics: the metrics of its gradient step, and the loss on dev if it was measured.
    is_last: whether the training has ended.
  """

  number: int
  metrics: dict[str, float]
  is_last: bool


def sft(
  trainer: Trainer,
  batcher: Batcher,
  batches: Iterable[tuple[int, list[Episode]]],
  dev_batches: Sequence[Batch],
  settings: SFTConfig,
  best: Best,
) -> Iterator[SFTUpdate]:
  """Take gradient steps on stored episodes, and keep the best router in `best`.

  The loss on dev is measured every `check_every` updates. The training ends after
  `PATIENCE` measurements without a lower loss, or after `settings.updates` updates.

  Args:
    trainer: the router that learns.
    batcher: cuts episodes into micro-batches, with the labels to learn.
    batches: the number of each update, from 1, and its episodes.
    dev_batches: the micro-batches of the loss on dev; may be empty.
    settings: the numbers of updates and of measurements.
    best: the best router so far; it is updated.

  Yields:
    Each update when it has ended.
  """
  patience = PATIENCE * settings.check_every
  for update, episodes in batches:
    metrics = trainer.step(batcher.micro_batches(episodes))
    is_last = update == settings.updates
    if is_last or (dev_batches and update % settings.check_every == 0):
      loss = trainer.loss(dev_batches) if dev_batches else metrics["loss"]
      metrics["dev_loss"] = loss
      if loss < best.dev_loss:
        best.dev_loss = loss
        best.update = update
        best.params = trainer.copy_params()
      is_last |= update - best.update >= patience
    yield SFTUpdate(update, metrics, is_last)
    if is_last:
      return


def mix_batches(
  hard: Sequence[Episode],
  rest: Sequence[Episode],
  size: int,
  seed: int,
) -> Iterator[list[Episode]]:
  """Draw batches of references of which `HARD_SHARE` are of hard tasks, without end.

  The paper has 64 and 70 % hard, and does not say of what; here it is of episodes, and
  the loss is a mean over all decisions of the batch (our choice).

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
