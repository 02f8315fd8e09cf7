"""Train a router on its own rollouts."""

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice, repeat

import numpy as np

from baar_jax.config import SERVED, VANILLA_BATCHES, BoPOConfig, Config
from baar_jax.episode import Episode, Task
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.policy import RouterPolicy, Sample
from baar_jax.train import checkpoint, dataset, losses
from baar_jax.train.batches import Batch, Batcher
from baar_jax.train.checkpoint import Checkpoints, check_metrics
from baar_jax.train.jobs import list_rollouts, rollout_spec
from baar_jax.train.losses import Method, RatedEpisode
from baar_jax.train.trainer import ShardedRouter, Trainer, bopo_optimizer
from baar_jax.train.training import Training

MIN_GROUP = 2  # episodes; a smaller group has no mean to compare with
SAVE_EVERY_ROLLOUTS = 5  # updates, which roll out episodes first


@dataclasses.dataclass(frozen=True)
class Learner:
  """A router that learns from its own episodes."""

  config: BoPOConfig
  trainer: Trainer
  batcher: Batcher
  anchor: ShardedRouter | None = None  # the SFT router, if the loss reads its logits

  def count_steps(self, episodes: int) -> int:
    """Return how many gradient steps are taken on so many episodes."""
    return self.config.epochs * math.ceil(episodes / self.config.batch_episodes)

  def count_all_steps(self, tasks: int) -> int:
    """Return how many gradient steps BoPO takes in all its updates."""
    episodes = min(self.config.tasks_per_update, tasks) * self.config.group_size
    return self.config.updates * self.count_steps(episodes)

  def fill(self, batch: Batch) -> Batch:
    """Add what the loss compares with, computed before the first gradient step.

    In bfloat16 the log-probabilities of the rollouts, which were computed with a cache,
    differ by hundredths from those of a training forward. A trajectory's ratio adds up
    dozens of them, so they are computed again (our choice).
    """
    if self.trainer.low_precision:
      logp_BxS = losses.action_logp(self.trainer.logits(batch), batch.action_BxS)
      batch = dataclasses.replace(batch, logp_BxS=logp_BxS)
    if self.anchor:
      ref_logits_BxSxA = self.anchor.logits(batch)
      batch = dataclasses.replace(batch, ref_logits_BxSxA=ref_logits_BxSxA)
    return batch


@dataclasses.dataclass
class RolloutProgress:
  """How far a training on rollouts is; its checkpoints and the log hold it."""

  episodes: int = 0  # rolled out
  gradient_steps: int = 0
  finished: bool = False


def fit_rollouts(training: Training, name: str, method: Method, lam: float) -> None:
  """Train a router, from SFT's or its own checkpoint, on its own episodes.

  An update rolls out episodes, computes their advantages, takes gradient steps, logs
  and saves. A method that drops groups (DAPO) goes on until it has taken as many
  gradient steps as BoPO, for at most `VANILLA_BATCHES` times as many updates.
  """
  config = training.config
  served = config.env.kind == SERVED
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
    # Episodes that wait for a gradient step. A checkpoint is saved only when none does:
    # a restart, which reads episodes from the store again, misses none.
    pending: list[RatedEpisode] = []
    for update, update_tasks in islice(draw_updates(config, tasks), done, last):
      spec = rollout_spec(family, lam, update, training.number)
      groups = roll_out(training, learner, spec, update_tasks)
      if not groups:
        return
      rated, metrics = method.compute_advantages(groups, profiles, references, lam)
      pending += rated
      progress.episodes += sum(map(len, groups))
      pending_tasks = {episode.task_id for episode, _ in pending}
      enough = not method.dynamic_sampling or len(pending_tasks) >= len(update_tasks)
      if pending and (enough or update == last):
        metrics |= update_policy(learner, pending, config.seed + update)
        progress.gradient_steps += learner.count_steps(len(pending))
        pending = []
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
  """Yield the number and the tasks of each update, without end.

  Those of a served run are all tasks: it learns from any that clients have sampled.
  """
  size = config.bopo.tasks_per_update
  task_batches = dataset.draw_task_batches(tasks, size, config.seed)
  if config.env.kind == SERVED:
    task_batches = repeat(tasks)
  return enumerate(task_batches, 1)


def open_learner(training: Training, method: Method, tasks: Sequence[Task]) -> Learner:
  """Make the learner of a method from the SFT router."""
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
  """Collect an update's groups of at least `MIN_GROUP` episodes of a task.

  Returns:
    The groups; of a served run perhaps none.

  Raises:
    ValueError: no group is left of a run that plays its episodes itself.
  """
  served = training.config.env.kind == SERVED
  if served:
    episodes = _read_sessions(training, spec, tasks)
  else:
    episodes = _play_rollouts(training, learner, spec, tasks)
  by_task = dataset.group_by_task(episodes)
  groups = [group for group in by_task.values() if len(group) >= MIN_GROUP]
  if not groups:
    problem = f"{spec.key}: no profiled training task has {MIN_GROUP} episodes"
    if not served:
      raise ValueError(
        f"{problem}; see above what they died of, then run the command again"
      )
    training.print(problem)
  return groups


def _read_sessions(
  training: Training, spec: PolicySpec, tasks: Sequence[Task]
) -> list[Episode]:
  """Read what clients have sampled of tasks with the last update's router."""
  ids = {task.id for task in tasks}
  keys = [key for key in training.store.keys(spec.key) if key[0] in ids]
  return training.store.episodes(spec.key, keys)


def _play_rollouts(
  training: Training, learner: Learner, spec: PolicySpec, tasks: Sequence[Task]
) -> list[Episode]:
  """Sample a group of episodes of each task from the router as it is."""

  def build(spec: PolicySpec) -> RouterPolicy:
    """Build the policy that samples from the router."""
    # The policy's cache and copy of the router are freed after the rollouts: the
    # gradient needs the memory.
    model = learner.trainer.model
    view = learner.batcher.view
    rows = training.live_episodes
    return RouterPolicy(spec, model, view, Sample(spec.key), rows, training.mesh)

  updates = training.config.bopo.updates
  title = f"{spec.family} lam={spec.lam:g} {spec.update}/{updates}"
  planned = list_rollouts(training.config, spec, tasks)
  return training.collect(title, spec, planned.jobs, build)


def update_policy(
  learner: Learner, rated: Sequence[RatedEpisode], seed: int
) -> dict[str, float]:
  """Take the gradient steps on a rollout batch; return the means of their metrics."""
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
