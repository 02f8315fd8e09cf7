"""The training loops: from stored episodes, and from the router's own rollouts."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from jax.sharding import Mesh

from baar_jax.config import SEEDS_BEFORE_BOPO, BoPOConfig, Config, SFTConfig
from baar_jax.episode import Episode, Task
from baar_jax.rollout.entries import rollouts_name
from baar_jax.rollout.live import Job
from baar_jax.router.build import build_model
from baar_jax.router.policy import RouterPolicy, Sample
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.store import Store
from baar_jax.train import losses
from baar_jax.train.batches import Batcher, Label
from baar_jax.train.checkpoint import (
  Checkpoints,
  checkpoint_directory,
  load_initial,
  load_router,
  sft_family,
)
from baar_jax.train.dataset import load_profiles, load_references, sft_batches, task_batches
from baar_jax.train.methods import METHODS
from baar_jax.train.trainer import Scorer, Trainer, bopo_optimizer, sft_optimizer

SAVE_EVERY = 50  # gradient steps on stored episodes
SAVE_EVERY_ROLLOUTS = 5  # updates, which roll out episodes first


class Run(Protocol):
  """What training uses of a run (`baar_jax.run.Run`, which lies above this folder)."""

  dir: Path
  tokenizer: Path
  config: Config
  store: Store
  mesh: Mesh
  ablation: str
  live_episodes: int
  labels: dict[str, str]
  log: Callable[..., None]
  progress: Callable
  collect: Callable[..., list[Episode]]


class Updates:
  """The updates of one training: which are still to be made, and the checkpoints after them."""

  def __init__(self, directory: Path, config: Config, last: int, save_every: int):
    self._checkpoints = Checkpoints(directory, config)
    self._last, self._save_every = last, save_every
    self.done = self._saved = self._checkpoints.update or 0
    self.finished = self.done == last
    if self.finished:
      self._checkpoints.close()

  def remaining(self, trainer: Trainer, batches: Iterable) -> Iterator[tuple[int, list]]:
    """(update, its batch) from the newest checkpoint on: the same batches as without a stop."""
    if self.done:
      trainer.load(self._checkpoints.restore(trainer.state))
    for update, batch in zip(range(1, self._last + 1), batches):
      if update > self.done:
        yield update, batch
    self._checkpoints.close()

  def save(self, update: int, trainer: Trainer) -> None:
    """Writes a checkpoint after the last update, and where the newest one is old enough."""
    if update == self._last or update - self._saved >= self._save_every:
      self._checkpoints.save(update, trainer.state)
      self._saved = update


def fit_stored(
  run: Run,
  stage: str,
  config: SFTConfig,
  view: View,
  batches: Iterable[list[Episode]],
  label: Label | None = None,
) -> None:
  """Trains a router on decisions of stored episodes, or goes on from its newest checkpoint.

  Args:
    stage: "pretrain", "sft", "cascade" or "single-turn".
    batches: episodes of each update; the same whenever it is called.
    label: as of `Batcher.micro_batches`.
  """
  family = sft_family(run.ablation) if stage == "sft" else stage
  directory = checkpoint_directory(run.dir, run.config, family)
  updates = Updates(directory, run.config, config.updates, SAVE_EVERY)
  if updates.finished:
    return
  batcher = Batcher(run.config, view, run.store.tasks("train"))
  method, ids = METHODS[stage], view.decision_ids
  if method.whole_vocabulary:
    model, ids = build_model(run.config.router, run.config.seed), None
  else:
    model = load_initial(run.dir, run.store, run.config, view, run.mesh)
  placed = ids, run.mesh, run.config.router.dtype
  trainer = Trainer(model, method.loss, sft_optimizer(config), *placed)
  del model  # the trainer has copied it
  with run.progress(total=config.updates, initial=updates.done, desc=stage, unit="update") as bar:
    for update, episodes in updates.remaining(trainer, batches):
      metrics = trainer.step(batcher.micro_batches(episodes, label))
      labels = {"update": update, "updates": config.updates, "compiled": trainer.compiled}
      run.log(stage=stage, **labels, **run.labels, **metrics)
      updates.save(update, trainer)
      bar.set_postfix_str(f"loss {metrics['loss']:.3f}", refresh=False)
      bar.update()


def fit_references(run: Run) -> None:
  """Trains the SFT router of a run or of an ablation."""
  view = View(run.config.router, run.tokenizer)
  fit_stored(run, "sft", run.config.sft, view, sft_batches(run.store, run.config))


def fit_rollouts(run: Run, stage: str, lam: float) -> None:
  """Trains a router from the SFT router on its own episodes, or goes on from its checkpoint.

  Args:
    stage: "bopo", which stands for an ablated run's ablation too, or "vanilla".
    lam: the weight of cost.
  """
  config, method, family = run.config.bopo, METHODS[stage], run.ablation or stage
  directory = checkpoint_directory(run.dir, run.config, family, lam)
  updates = Updates(directory, run.config, config.updates, SAVE_EVERY_ROLLOUTS)
  if updates.finished:
    return
  profiles = load_profiles(run.store, run.config)
  references = load_references(run.store, run.config)
  tasks = [task for task in run.store.tasks("train") if task.id in references]
  view = View(run.config.router, run.tokenizer)
  batcher = Batcher(run.config, view, tasks)
  sft = load_router(run.dir, run.config, run.mesh, sft_family(run.ablation))
  placed = view.decision_ids, run.mesh, run.config.router.dtype
  trainer = Trainer(sft, partial(method.loss, config), bopo_optimizer(config), *placed)
  anchor = Scorer(sft, *placed) if method.anchored else None
  waiting: list[tuple[Episode, float]] = []  # episodes and advantages of the next gradient step
  batches = task_batches(tasks, config.tasks_per_update, run.config.seed)
  for update, chosen in updates.remaining(trainer, batches):
    episodes = _roll_out(run, family, lam, update, trainer.model, view, chosen)
    kept, adv_B, metrics = method.compute_advantages(episodes, profiles, references, lam, config)
    waiting += zip(kept, adv_B)
    enough = len({e.task_id for e, _ in waiting}) >= len(chosen) or update == config.updates
    if waiting and (enough or not method.dynamic_sampling):
      kept, adv_B = zip(*waiting)
      seed = run.config.seed + update
      metrics |= policy_steps(trainer, anchor, batcher, kept, np.array(adv_B), config, seed)
      waiting = []
    labels = {"lam": lam, "update": update, "compiled": trainer.compiled}
    run.log(stage=stage, **labels, **run.labels, **metrics)
    if not waiting:  # a checkpoint does not hold them: they are computed from stored episodes
      updates.save(update, trainer)


def _roll_out(
  run: Run, family: str, lam: float, update: int, model: Qwen2, view: View, tasks: Sequence[Task]
) -> list[Episode]:
  """A group of episodes of each task, by sampling from the router as it is."""
  config, name = run.config.bopo, rollouts_name(family, lam, update)
  # The policy's cache and copy of the router are freed on return: the gradient needs the memory.
  policy = RouterPolicy(
    name, model, view, run.config.router, Sample(name), run.live_episodes, run.mesh
  )
  first_seed = SEEDS_BEFORE_BOPO + config.group_size * update  # each update has other seeds
  seeds = range(first_seed, first_seed + config.group_size)
  jobs = [Job(task, seed) for task in tasks for seed in seeds]
  return run.collect(f"{family} lam={lam:g} {update}/{config.updates}", policy, jobs)


def policy_steps(
  trainer: Trainer,
  anchor: Scorer | None,
  batcher: Batcher,
  episodes: Sequence[Episode],
  adv_B: np.ndarray,
  config: BoPOConfig,
  seed: int,
) -> dict[str, float]:
  """The gradient steps on one rollout batch. Returns their mean metrics.

  In bfloat16 the log-probabilities of the rollouts, which were computed with a cache, differ by
  hundredths from those of a training forward, and a trajectory's ratio adds up dozens of them.
  There they are recomputed before the first step, by the arithmetic that they are compared with
  (our choice).
  """
  draw = random.Random(seed)
  steps = []
  for _ in range(config.epochs):
    order = draw.sample(range(len(episodes)), len(episodes))
    for first in range(0, len(order), config.batch_episodes):
      chosen = order[first : first + config.batch_episodes]
      steps.append(batcher.micro_batches([episodes[i] for i in chosen], advantages=adv_B[chosen]))
  if trainer.low_precision:
    for batches in steps:
      for i, batch in enumerate(batches):
        logp_BxS = losses.action_logp(trainer.logits(batch), batch.action_BxS)
        batches[i] = dataclasses.replace(batch, logp_BxS=logp_BxS)
  metrics = []
  for batches in steps:
    if anchor is not None:
      batches = [dataclasses.replace(b, ref_logits_BxSxA=anchor.logits(b)) for b in batches]
    metrics.append(trainer.step(batches))
  return {name: float(np.mean([step[name] for step in metrics])) for name in metrics[0]}
