"""Train routers on stored episodes: SFT, pretraining and rivals."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pandas as pd

from baar_jax.config import SFTConfig
from baar_jax.episode import Episode
from baar_jax.learn import checkpoint
from baar_jax.learn.batches import Batch, Batcher, Labels
from baar_jax.learn.checkpoint import Checkpoints, Training, check_metrics
from baar_jax.learn.trainer import Trainer, sft_optimizer
from baar_jax.mesh import exchange
from baar_jax.paper import losses
from baar_jax.paper import references as dataset
from baar_jax.paper.losses import Method
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import SFT
from baar_jax.rollout.rules import RulePolicy, take_rank
from baar_jax.router.weights import build_model


def learn_scorer(training: Training) -> tuple[Method, list[Episode]]:
  """Return the method and the episodes that train the cascade's scorer (FrugalGPT).

  In a cascade SMALL proposes an action first. The scorer takes the proposal, or asks
  the next costlier model. The costliest model's action is always taken. The scorer is a
  router that reads the proposal too. The scorer learns whether an episode fails if the
  proposal is taken. So it asks the next model with the probability of a failure.

  Returns:
    The method, and the episodes of training and dev tasks: always-SMALL's trials, and
    the stratified samples in which another model than the costliest acted.
  """
  store = training.store
  profiles = dataset.load_profiles(store, training.config, "train", "dev")
  trials = []
  for profile in profiles.values():
    trials += profile.small
  stratified = store.episodes(jobs.stratified_spec(training.config).key)
  trials += [e for e in stratified if e.task_id in profiles]
  costliest = training.models - 1
  scored = [e for e in trials if any(s.model != costliest for s in e.steps)]
  return losses.FAILURE, scored


def learn_winners(training: Training) -> tuple[Method, list[Episode]]:
  """Return the method and the episodes that train the single-turn router (RouteLLM).

  The k-th trials of all models on a task are compared. The winner is the cheapest model
  that succeeded, or SMALL if none did. The winner is the label of every step of these
  trials, as a preference is the label of a single query. Trials of intermediate models
  are played first if they are missing.

  Returns:
    The method, and the trials of training and dev tasks that have a winner.
  """
  store = training.store
  config = training.config
  tasks = store.tasks("train") + store.tasks("dev")
  build = partial(RulePolicy, rule=take_rank)
  intermediate = []
  for spec, planned in jobs.list_ranked_trials(config, tasks):
    title = f"single-turn classifier, trials of model {spec.rank}"
    intermediate.append(training.collect(title, spec, planned, build))
  small = []
  large = []
  for profile in dataset.load_profiles(store, config, "train", "dev").values():
    small += profile.small
    large += profile.large
  trials = [small, *intermediate, large]
  winners = find_winners(trials)
  labelled = []
  for episodes in trials:
    labelled += [e for e in episodes if (e.task_id, e.seed) in winners]
  labels = Labels(lambda e: [winners[e.task_id, e.seed]] * len(e.steps))
  method = losses.IMITATION._replace(labels=labels)
  return method, labelled


def find_winners(trials: Sequence[Sequence[Episode]]) -> dict[tuple[str, int], int]:
  """Find the winner of each trial: the cheapest model that succeeded, else SMALL.

  Args:
    trials: the episodes of each model, the cheapest model first.

  Returns:
    The index of the winning model by (task id, seed) of the trial. A trial that a
    model lacks is left out.
  """
  columns = {}
  for model, episodes in enumerate(trials):
    columns[model] = {(e.task_id, e.seed): e.success for e in episodes}
  success = pd.DataFrame(columns).dropna().astype(bool)
  # `idxmax` returns the first column with True, the cheapest model that succeeded. If
  # no column has True, it returns the first column, SMALL.
  return success.idxmax(axis=1).to_dict()


SAVE_EVERY = 50  # The number of updates between two checkpoints.


def fit_sft(training: Training) -> None:
  """Train the SFT router on the reference trajectories (paper: BoSFT).

  If the router is trained already, nothing happens. The dev loss is measured on one
  batch of references of dev tasks, with the same share of hard tasks as in training.

  Raises:
    ValueError: references are missing, or a metric is not finite.
  """
  if training.checkpoints(training.sft_family).exists():
    return
  config = training.config
  settings = config.sft
  train = dataset.load_reference_pools(training.store, config, "train")
  dev = dataset.load_reference_pools(training.store, config, "dev")
  options = {"hard_share": settings.hard_share, "seed": config.seed}
  draw = partial(dataset.mix_batches, *train, settings.batch_episodes, **options)
  # The dev batch has at least as many episodes as there are dev tasks.
  dev_episodes = max(settings.batch_episodes, sum(map(len, dev)))
  dev_batch = next(dataset.mix_batches(*dev, dev_episodes, **options))
  fit_stored(training, SFT, losses.IMITATION, settings, draw, dev_batch)


def fit_rival(
  name: str,
  learn: Callable[[Training], tuple[Method, list[Episode]]],
  training: Training,
) -> None:
  """Train the router of a rival on stored episodes.

  The settings are those of SFT, except that the number of updates is
  `baselines.updates`. The dev loss is measured on the episodes of dev tasks.

  Args:
    name: the family of the rival.
    learn: a function that returns the method, and the episodes of training and dev
      tasks.
    training: the training.
  """
  method, episodes = learn(training)
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
  """Train a router with each learning rate, and keep the best of these routers.

  The best router has the least dev loss. Each learning rate has its own directory. At
  the end, the best router's directory gets its final name. If a directory with the
  final name exists already, nothing happens.

  Args:
    training: the training.
    name: the family of the router.
    method: the method that trains the router.
    settings: the settings, with the learning rates to try.
    draw: returns a new iterator over batches of episodes, one batch for each update.
      Every call must return the same batches.
    dev: the episodes of the dev loss; if there are none, the loss of the last update
      counts.
  """
  family = training.sft_family if name == SFT else name
  directory = training.checkpoints(family)
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
    result = results[best]
    training.log(
      stage="stored-training",
      router=directory.name,
      dev_loss=result.dev_loss,
      best_update=result.best_update,
      updates=result.updates,
      learning_rate=best,
    )
    training.print(
      f"{jobs.label_family(family)}, training seed {training.training_seed}: "
      f"least dev loss {result.dev_loss:g} at update {result.best_update} "
      f"of {result.updates}, learning rate {best:g}"
    )
  # Wait until every process has read the directories, before one is renamed.
  exchange(None)
  if training.is_main:
    directory.with_name(f"{directory.name}-lr{best:g}").rename(directory)
  exchange(None)


@dataclasses.dataclass
class StoredProgress:
  """Record the progress of a training on stored episodes, for its checkpoints.

  Attributes:
    dev_loss: the least dev loss so far.
    best_update: the number of the update with the least dev loss.
    updates: the number of updates so far.
    finished: whether the training has ended.
  """

  dev_loss: float = math.inf
  best_update: int = 0
  updates: int = 0
  finished: bool = False


class RateSearch(NamedTuple):
  """Train a router on stored episodes with one of several learning rates.

  Attributes:
    training: the training seed, with the inputs and outputs of its run.
    name: the family of the router.
    method: the method that trains the router.
    settings: the settings of the training, except the learning rate.
    draw: returns a new iterator over batches of episodes, one batch for each update.
    batcher: cuts the episodes of an update into micro-batches.
    dev_batches: the micro-batches of the dev loss; may be empty.
  """

  training: Training
  name: str
  method: Method
  settings: SFTConfig
  draw: Callable[[], Iterator[list[Episode]]]
  batcher: Batcher
  dev_batches: Sequence[Batch]

  def fit(self, rate: float, checkpoints: Checkpoints) -> StoredProgress:
    """Train with one learning rate until the dev loss stops improving.

    The last checkpoint has the parameters with the least dev loss. Without dev
    episodes, the training loss of the last update counts.

    Args:
      rate: the highest learning rate of the schedule.
      checkpoints: the checkpoints to continue from and to write.

    Returns:
      The progress at the end.

    Raises:
      ValueError: a metric is not finite. Then no checkpoint is saved.
    """
    progress = StoredProgress(**checkpoints.progress)
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
    title = f"{jobs.label_family(self.name)}, learning rate {rate:g}"
    with self.training.progress(title, total, done, "update") as bar:
      for update, episodes in update_episodes:
        metrics = trainer.step(self.batcher.micro_batches(episodes))
        progress.updates = update
        last = update == total
        if last or (self.dev_batches and update % self.settings.check_every == 0):
          loss = metrics["loss"]
          if self.dev_batches:
            loss = trainer.loss(self.dev_batches)
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
    """Make a trainer with a copy of the router that the training starts from."""
    router = self.training.config.router
    view = self.batcher.view
    # Pretraining starts from random weights, and predicts any token.
    if self.method.labels.outcomes:
      model = build_model(router, self.training.config.seed)
      ids = None
    else:
      model = checkpoint.load_initial(self.training, view)
      ids = view.logit_ids
    optimizer = sft_optimizer(self.settings, rate)
    mesh = self.training.mesh
    return Trainer(model, self.method.loss, optimizer, ids, mesh, router.dtype)
