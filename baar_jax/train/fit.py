"""Train a router on stored episodes, with each learning rate."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp

from baar_jax.config import SFTConfig
from baar_jax.episode import Episode
from baar_jax.mesh import exchange
from baar_jax.router.weights import build_model
from baar_jax.train import checkpoint, dataset, losses
from baar_jax.train.batches import Batch, Batcher
from baar_jax.train.checkpoint import Checkpoints, check_metrics
from baar_jax.train.jobs import SFT
from baar_jax.train.losses import Method
from baar_jax.train.trainer import Trainer, sft_optimizer
from baar_jax.train.training import Training

SAVE_EVERY = 50  # gradient steps on stored episodes


def fit_sft(training: Training) -> None:
  """Train the SFT router on the references.

  The dev loss is of one batch of dev tasks' references, with the same share of hard
  tasks.
  """
  if training.checkpoints(training.sft_family).exists():  # nothing need be read
    return
  config = training.config
  settings = config.sft
  train = dataset.load_reference_pools(training.store, config, "train")
  dev = dataset.load_reference_pools(training.store, config, "dev")
  mixed = {"hard_share": settings.hard_share, "seed": config.seed}
  draw = partial(dataset.mix_batches, *train, settings.batch_episodes, **mixed)
  # The batch has room for all tasks of dev.
  room = max(settings.batch_episodes, len(dev.hard) + len(dev.rest))
  dev_batch = next(dataset.mix_batches(*dev, room, **mixed))
  fit_stored(training, SFT, losses.IMITATION, settings, draw, dev_batch)


def fit_rival(
  training: Training, name: str, method: Method, episodes: Sequence[Episode]
) -> None:
  """Train a rival's router with SFT's settings but for the updates.

  The dev loss is of the episodes of dev tasks.
  """
  config = training.config
  settings = dataclasses.replace(config.sft, updates=config.baselines.updates)
  dev_ids = {task.id for task in training.store.tasks("dev")}
  train = [e for e in episodes if e.task_id not in dev_ids]
  dev = [e for e in episodes if e.task_id in dev_ids]
  seed = f"{config.seed}|{name}"
  draw = partial(dataset.draw_batches, train, settings.batch_episodes, seed)
  fit_stored(training, name, method, settings, draw, dev)


def fit_stored(
  training: Training,
  name: str,
  method: Method,
  settings: SFTConfig,
  draw: Callable[[], Iterator[list[Episode]]],
  dev: Sequence[Episode] = (),
) -> None:
  """Train a router on stored episodes with each learning rate, and keep the best.

  Each learning rate has a directory. In the end that of the least dev loss is renamed
  to the router's.

  Args:
    name: the router's family.
    draw: starts the batches of episodes, one for each update, always the same.
    dev: the episodes of the dev loss.
  """
  directory = training.checkpoints(training.sft_family if name == SFT else name)
  if directory.exists():
    return
  view = training.open_view(method.labels.proposals)
  tasks = training.store.tasks("train") + training.store.tasks("dev")
  batcher = Batcher(training.config, view, tasks, method.labels)
  dev_batches = batcher.micro_batches(dev)
  search = RateSearch(training, name, method, settings, draw, batcher, dev_batches)
  results = {}
  for rate in settings.learning_rates:
    candidate = directory.with_name(f"{directory.name}-lr{rate:g}")
    with closing(Checkpoints(candidate, create=True)) as checkpoints:
      results[rate] = search.fit(rate, checkpoints)
  best = min(results, key=lambda rate: results[rate].dev_loss)
  if dev:
    result = {
      "dev_loss": results[best].dev_loss,
      "best_update": results[best].best_update,
      "updates": results[best].updates,
      "learning_rate": best,
    }
    training.log(stage="stored-training", router=directory.name, **result)
    figures = [f"{key} {value:g}" for key, value in result.items()]
    training.print(f"{directory.name}: {', '.join(figures)}")
  exchange(None)  # every process has read the directories
  if training.is_main:
    directory.with_name(f"{directory.name}-lr{best:g}").rename(directory)
  exchange(None)


@dataclasses.dataclass
class StoredProgress:
  """How far a training on stored episodes is; its checkpoints hold it."""

  dev_loss: float = math.inf  # the least so far
  best_update: int = 0  # which had it
  updates: int = 0
  finished: bool = False


@dataclasses.dataclass(frozen=True)
class RateSearch:
  """A training on stored episodes that is done with several learning rates."""

  training: Training
  name: str
  method: Method
  settings: SFTConfig
  draw: Callable[[], Iterator[list[Episode]]]
  batcher: Batcher
  dev_batches: Sequence[Batch]

  def fit(self, rate: float, checkpoints: Checkpoints) -> StoredProgress:
    """Train with a learning rate until the dev loss stops improving.

    The last checkpoint has the parameters of the least dev loss, or without dev of the
    last update. A checkpoint is saved only if an update's metrics are finite.
    """
    saved = checkpoints.progress
    saved.pop("learning_rate", None)  # older versions wrote it
    progress = StoredProgress(**saved)
    if progress.finished:
      return progress
    total = self.settings.updates
    patience = self.settings.patience * self.settings.check_every
    trainer = self._open_trainer(rate)
    best = jax.tree.map(jnp.copy, trainer.state["params"])
    done = checkpoints.last_update
    if done:
      state = checkpoints.restore(trainer.state | {"best": best})
      trainer.load(state)
      best = state["best"]
    update_episodes = islice(enumerate(self.draw(), 1), done, total)
    title = f"{self.name} lr={rate:g}"
    with self.training.progress(title, total, done, "update") as bar:
      for update, episodes in update_episodes:
        metrics = trainer.step(self.batcher.micro_batches(episodes))
        progress.updates = update
        last = update == total
        if last or (self.dev_batches and update % self.settings.check_every == 0):
          loss = self._compute_dev_loss(trainer, metrics)
          metrics["dev_loss"] = loss
          if loss < progress.dev_loss:
            progress.dev_loss = loss
            progress.best_update = update
            best = jax.tree.map(jnp.copy, trainer.state["params"])
          last |= update - progress.best_update >= patience
        check_metrics(self.name, update, metrics, checkpoints.newest)
        marks = {"stage": self.name, "update": update, "updates": total}
        self.training.log(**marks, learning_rate=rate, **metrics)
        bar.update()
        if last:
          break
        if update - checkpoints.last_update >= SAVE_EVERY:
          state = trainer.state | {"best": best}
          checkpoints.save(update, state, **vars(progress))
    progress.finished = True
    checkpoints.save(progress.updates, {"params": best}, **vars(progress))
    return progress

  def _open_trainer(self, rate: float) -> Trainer:
    """Make the trainer of an untrained router; it copies the router."""
    router = self.training.config.router
    view = self.batcher.view
    if self.method.labels.outcomes:  # pretraining: random weights, all tokens
      model = build_model(router, self.training.config.seed)
      ids = None
    else:
      model = checkpoint.load_initial(self.training, view)
      ids = view.logit_ids
    optimizer = sft_optimizer(self.settings, rate)
    mesh = self.training.mesh
    return Trainer(model, self.method.loss, optimizer, ids, mesh, router.dtype)

  def _compute_dev_loss(self, trainer: Trainer, metrics: Mapping[str, float]) -> float:
    """Compute the dev loss; without dev it is the step's."""
    return trainer.loss(self.dev_batches) if self.dev_batches else metrics["loss"]
