"""Train a router on its own rollouts (BoPO and vanilla RL)."""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np

from baar_jax.config import RECORDED, VANILLA_BATCHES, BoPOConfig, Config
from baar_jax.episode import Episode, Task
from baar_jax.learn import checkpoint
from baar_jax.learn.batches import Batch, Batcher
from baar_jax.learn.checkpoint import Checkpoints, Training, check_metrics
from baar_jax.learn.trainer import ShardedRouter, Trainer, bopo_optimizer
from baar_jax.paper import losses
from baar_jax.paper import references as dataset
from baar_jax.paper.losses import Method, RatedEpisode
from baar_jax.rollout.jobs import VANILLA, label_family, list_rollouts, rollout_spec
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.policy import RouterPolicy, Sample
from baar_jax.router.reader import Reader

# The smallest number of episodes of a group. One episode alone would be compared with
# itself, because its reward is the mean of the group.
MIN_GROUP = 2
SAVE_EVERY_ROLLOUTS = 5  # The number of updates between two checkpoints.


class Learner(NamedTuple):
  """Bundle a router with all it needs to learn from its own episodes.

  Attributes:
    config: the settings of BoPO, also for vanilla RL.
    trainer: the router, with its loss and optimizer.
    batcher: cuts episodes into micro-batches.
    anchor: the SFT router if the loss uses its logits, else None.
  """

  config: BoPOConfig
  trainer: Trainer
  batcher: Batcher
  anchor: ShardedRouter | None = None

  def count_steps(self, episodes: int) -> int:
    """Count the gradient steps on a rollout batch of this number of episodes."""
    return self.config.epochs * math.ceil(episodes / self.config.batch_episodes)

  def count_all_steps(self, tasks: int) -> int:
    """Count the gradient steps of a whole BoPO training on this number of tasks."""
    episodes = min(self.config.tasks_per_update, tasks) * self.config.group_size
    return self.config.updates * self.count_steps(episodes)

  def fill(self, batch: Batch) -> Batch:
    """Add log-probabilities and the SFT router's logits to a batch.

    This must happen before the first gradient step of an update.

    In float32 `logp_BxS` stays as it was sampled. In bfloat16 it is computed again (our
    choice). The reason: rollouts use a KV cache, and their log-probabilities differ by
    hundredths from those of a training pass. The probability ratio of a trajectory
    would add up these errors. An episode that has waited for its batch counts as one of
    the current router then.
    """
    if self.trainer.low_precision:
      logp_BxS = losses.action_logp(self.trainer.logits(batch), batch.action_BxS)
      batch = batch._replace(logp_BxS=logp_BxS)
    if self.anchor:
      ref_logits_BxSxA = self.anchor.logits(batch)
      batch = batch._replace(ref_logits_BxSxA=ref_logits_BxSxA)
    return batch


@dataclasses.dataclass
class RolloutProgress:
  """Record the progress of a training on rollouts, for its checkpoints and the log.

  Attributes:
    episodes: the number of episodes rolled out so far.
    gradient_steps: the number of gradient steps so far.
    finished: whether the training has ended.
  """

  episodes: int = 0
  gradient_steps: int = 0
  finished: bool = False


def train_rollouts(
  name: str, make_method: Callable[[BoPOConfig], Method], training: Training
) -> None:
  """Train a family on its own rollouts, with each cost weight.

  Args:
    name: the family.
    make_method: makes the family's method from the configuration of BoPO.
    training: the training.
  """
  config = training.config.bopo
  method = make_method(config)
  for lam in config.lam:
    fit_rollouts(training, name, method, lam)


def train_vanilla(training: Training) -> None:
  """Train vanilla RL with optimizer settings of its own."""
  config = training.config
  bopo = dataclasses.replace(
    config.bopo,
    learning_rate=config.bopo.vanilla_learning_rate,
    adam_eps=config.bopo.vanilla_adam_eps,
  )
  training = dataclasses.replace(
    training, config=dataclasses.replace(config, bopo=bopo)
  )
  train_rollouts(VANILLA, lambda config: losses.DAPO, training)


def fit_rollouts(training: Training, name: str, method: Method, lam: float) -> None:
  """Train a router on its own episodes, from the SFT router or the last checkpoint.

  An update rolls out episodes, computes their advantages, takes gradient steps and
  logs metrics. Every `SAVE_EVERY_ROLLOUTS` updates it saves a checkpoint.

  A method with dynamic sampling drops groups. It takes gradient steps on full rollout
  batches only: the first kept groups make the batch, and the others wait for the next
  one. Its training ends when it has taken as many gradient steps as BoPO, at the latest
  after `VANILLA_BATCHES` times BoPO's updates.

  In a served run, a call of this function takes one update. This update learns from the
  sessions that clients have played with the router since the last update.

  Args:
    training: the training seed, with the inputs and outputs of its run.
    name: the family in the log; for an ablation of BoPO this is BoPO.
    method: the method that trains the router.
    lam: the cost weight.

  Raises:
    ValueError: a metric is not finite, or no task has at least `MIN_GROUP` episodes.
  """
  config = training.config
  served = config.env.kind == RECORDED
  family = training.ablation or name
  last = config.bopo.updates
  if method.dynamic_sampling:
    last *= VANILLA_BATCHES
  directory = training.checkpoints(family, lam)
  with closing(Checkpoints(directory, create=True)) as checkpoints:
    done = checkpoints.last_update
    progress = RolloutProgress(**checkpoints.progress)
    if progress.finished and not (served and done < last):
      return
    profiles = dataset.load_profiles(training.store, config, "train")
    references = dataset.load_references(training.store, config, profiles)
    tasks = [task for task in training.store.tasks("train") if task.id in references]
    learner = open_learner(training, method, tasks)
    trainer = learner.trainer
    if done:
      trainer.load(checkpoints.restore(trainer.state))
    if served:
      last = done + 1
    enough_steps = learner.count_all_steps(len(tasks))
    # These episodes wait for a full batch. While episodes wait, no checkpoint is saved.
    # So a restarted training reads these episodes from the store again.
    pending: list[RatedEpisode] = []
    for update, update_tasks in islice(draw_updates(config, tasks), done, last):
      spec = rollout_spec(family, lam, update, training.training_seed)
      groups = roll_out(training, learner, spec, update_tasks)
      if not groups:
        return
      rated, metrics = method.compute_advantages(groups, profiles, references, lam)
      pending += rated
      progress.episodes += sum(map(len, groups))
      size = len(pending)
      # Clients choose the tasks of a served run, so its updates have any size.
      if method.dynamic_sampling and config.env.kind != RECORDED:
        size = len(update_tasks) * config.bopo.group_size
      if pending and len(pending) >= size:
        metrics |= update_policy(learner, pending[:size], config.seed + update)
        progress.gradient_steps += learner.count_steps(size)
        pending = pending[size:]
      check_metrics(name, update, metrics, checkpoints.newest)
      progress.finished = update == last or progress.gradient_steps >= enough_steps
      training.log(stage=name, lam=lam, update=update, **vars(progress), **metrics)
      due = update - checkpoints.last_update >= SAVE_EVERY_ROLLOUTS
      if progress.finished or (due and not pending):
        checkpoints.save(update, trainer.state, **vars(progress))
      if progress.finished:
        return


def draw_updates(
  config: Config, tasks: Sequence[Task]
) -> Iterator[tuple[int, Sequence[Task]]]:
  """Yield the number of each update, from 1, and its tasks, without end.

  An update of a served run has all tasks, because clients choose their tasks.
  """
  size = config.bopo.tasks_per_update
  task_batches = dataset.draw_task_batches(tasks, size, config.seed)
  if config.env.kind == RECORDED:
    task_batches = repeat(tasks)
  return enumerate(task_batches, 1)


def open_learner(training: Training, method: Method, tasks: Sequence[Task]) -> Learner:
  """Make the learner of a method. Its router starts as the SFT router."""
  config = training.config
  sft = checkpoint.load_router(training, training.sft_family)
  view = training.open_view()
  ids = view.decision_ids
  mesh = training.mesh
  dtype = config.router.dtype
  optimizer = bopo_optimizer(config.bopo)
  trainer = Trainer(sft, method.loss, optimizer, ids, mesh, dtype)
  batcher = Batcher(config, view, tasks, method.labels)
  anchor = None
  if method.anchored:
    anchor = ShardedRouter(sft, ids, mesh, dtype)
  return Learner(config.bopo, trainer, batcher, anchor)


def roll_out(
  training: Training, learner: Learner, spec: PolicySpec, tasks: Sequence[Task]
) -> list[list[Episode]]:
  """Collect the groups of an update: the episodes of each task.

  Errors can end episodes, so a group may have fewer than `MIN_GROUP` episodes. Such a
  group is left out. A served run plays no episodes: it reads its clients' sessions.

  Args:
    training: the training.
    learner: the router that samples.
    spec: the policy of the rollouts.
    tasks: the tasks of the update.

  Returns:
    The groups. A served run may have none, and prints that.

  Raises:
    ValueError: a run that is not served has no group.
  """
  served = training.config.env.kind == RECORDED
  if served:
    episodes = _read_sessions(training, spec, tasks)
  else:
    episodes = _play_rollouts(training, learner, spec, tasks)
  by_task = dataset.group_by_task(episodes)
  groups = [group for group in by_task.values() if len(group) >= MIN_GROUP]
  if not groups:
    problem = (
      f"{label_family(spec.family)} with λ {spec.lam:g}, training seed "
      f"{spec.seed or 0}, update {spec.update}: no profiled training task has "
      f"{MIN_GROUP} episodes yet"
    )
    if not served:
      raise ValueError(
        f"{problem}: correct the errors above, and run the same command again"
      )
    training.print(f"{problem}: let clients play more, then run the command again")
  return groups


def _read_sessions(
  training: Training, spec: PolicySpec, tasks: Sequence[Task]
) -> list[Episode]:
  """Read the sessions that clients have played on these tasks for this update.

  Args:
    training: the training; `training.store` has the sessions.
    spec: the policy of the rollouts of this update.
    tasks: the tasks of the update.
  """
  ids = {task.id for task in tasks}
  keys = [key for key in training.store.keys(spec.key) if key[0] in ids]
  return training.store.episodes(spec.key, keys)


def _play_rollouts(
  training: Training, learner: Learner, spec: PolicySpec, tasks: Sequence[Task]
) -> list[Episode]:
  """Play a group of episodes of each task; the current router samples decisions."""

  def build(spec: PolicySpec) -> RouterPolicy:
    """Build the policy that samples from the current router."""
    # The policy has a KV cache and a copy of the router. Both are freed after the
    # rollouts, because the gradient needs the memory.
    model = learner.trainer.model
    view = learner.batcher.view
    rows = training.live_episodes
    reader = Reader(model, view, view.logit_ids, rows, training.mesh)
    return RouterPolicy(spec, reader, Sample(spec.key))

  updates = training.config.bopo.updates
  name = label_family(spec.family)
  title = f"{name}, λ {spec.lam:g}, update {spec.update}/{updates}"
  planned = list_rollouts(training.config, spec, tasks)
  return training.collect(title, spec, planned.jobs, build)


def update_policy(
  learner: Learner, rated: Sequence[RatedEpisode], seed: int
) -> dict[str, float]:
  """Take the gradient steps of one update.

  In each of `epochs` passes the episodes are shuffled and cut into batches of
  `batch_episodes`.

  Args:
    learner: the router that learns.
    rated: the episodes with their advantages.
    seed: the seed of the shuffles.

  Returns:
    The means of the metrics over the gradient steps.
  """
  config = learner.config
  draw = random.Random(seed)
  step_batches = []
  for _ in range(config.epochs):
    order = draw.sample(rated, len(rated))
    for first in range(0, len(order), config.batch_episodes):
      episodes, advantages = zip(*order[first : first + config.batch_episodes])
      batches = learner.batcher.micro_batches(episodes, np.array(advantages))
      step_batches.append([learner.fill(batch) for batch in batches])
  steps = [learner.trainer.step(batches) for batches in step_batches]
  means = {}
  for name in steps[0]:
    means[name] = float(np.mean([metrics[name] for metrics in steps]))
  return means
