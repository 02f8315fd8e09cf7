"""The training loops: from stored episodes, and from the router's own rollouts.

`run` is a `baar_jax.run.Run`, which lies above this folder.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import islice

import numpy as np

from baar_jax.config import ROLLOUT_RANGE, ROLLOUT_SEEDS, VANILLA_BATCHES, BoPOConfig, SFTConfig
from baar_jax.episode import Episode, Task
from baar_jax.rollout.entries import rollouts_name
from baar_jax.rollout.live import Job
from baar_jax.router.policy import RouterPolicy, Sample
from baar_jax.router.qwen2 import Qwen2, check_finite
from baar_jax.router.view import View
from baar_jax.router.weights import build_model
from baar_jax.train import checkpoint, dataset, losses
from baar_jax.train.batches import Batcher, Relabel
from baar_jax.train.checkpoint import Checkpoints, checkpoint_directory, sft_family
from baar_jax.train.methods import METHODS
from baar_jax.train.trainer import ShardedRouter, Trainer, bopo_optimizer, sft_optimizer

SAVE_EVERY = 50  # gradient steps on stored episodes
SAVE_EVERY_ROLLOUTS = 5  # updates, which roll out episodes first


def fit_sft(run) -> None:
  """Trains the SFT router of a run, or of an ablated run, on the references."""
  view = View(run.config.router, run.tokenizer)
  fit_stored(run, "sft", run.config.sft, view, dataset.draw_sft_batches(run.store, run.config))


def fit_stored(run, method_name: str, config: SFTConfig, view: View, batches, relabel=None) -> None:
  """Trains a router on decisions of stored episodes, or goes on from its newest checkpoint.

  `method_name` is "pretrain", "sft", "cascade" or "single-turn". `batches` are the episodes of each
  update, the same whenever it is called; `relabel` is as of `Batcher.micro_batches`.
  """
  method, last = METHODS[method_name], config.updates
  family = sft_family(run.ablation) if method_name == "sft" else method_name
  directory = checkpoint_directory(run.dir, run.config, family, None, run.train_seed)
  with closing(Checkpoints(directory, run.config)) as checkpoints:
    if checkpoints.finished:
      return
    done = checkpoints.update
    batcher = Batcher(run.config, view, run.store.tasks("train"))
    if method.whole_vocabulary:
      model, ids = build_model(run.config.router, run.config.seed), None
    else:
      place = run.dir, run.config, view, run.mesh
      model = checkpoint.load_initial(*place, run.train_seed)
      ids = view.decision_ids
    dtype = run.config.router.dtype
    trainer = Trainer(model, method.loss, sft_optimizer(config), ids, run.mesh, dtype)
    del model  # the trainer has copied it
    if done:
      trainer.load(checkpoints.restore(trainer.state))
    with run.progress(method_name, last, done, "update") as bar:
      for update, episodes in islice(enumerate(batches, 1), done, last):
        metrics = trainer.step(batcher.micro_batches(episodes, relabel))
        check_metrics(method_name, update, metrics, checkpoints)
        log_fields = {"update": update, "updates": last, "compiled": trainer.compiled}
        run.log(stage=method_name, **log_fields, **metrics)
        if update == last or update - checkpoints.update >= SAVE_EVERY:
          checkpoints.save(update, trainer.state, finished=update == last)
        bar.set_postfix_str(f"loss {metrics['loss']:.3f}", refresh=False)
        bar.update()


def fit_rollouts(run, method_name: str, lam: float) -> None:
  """Trains a router from the SFT router on its own episodes, or goes on from its checkpoint.

  An update rolls out episodes, computes their advantages, takes gradient steps, logs and saves.
  `method_name` is "bopo", also for an ablated run, or "vanilla"; `lam` is the weight of cost.
  A method that drops groups (DAPO) goes on until it has taken as many gradient steps as BoPO, for
  at most `VANILLA_BATCHES` times as many updates; so it may see more episodes, never fewer.
  """
  bopo, method, family = run.config.bopo, METHODS[method_name], run.ablation or method_name
  last = bopo.updates * (VANILLA_BATCHES if method.dynamic_sampling else 1)
  directory = checkpoint_directory(run.dir, run.config, family, lam, run.train_seed)
  with closing(Checkpoints(directory, run.config)) as checkpoints:
    if checkpoints.finished:
      return
    done, progress = checkpoints.update, checkpoints.progress
    counts = {name: progress.get(name, 0) for name in ("episodes", "gradient_steps")}
    profiles = dataset.load_profiles(run.store, run.config)
    references = dataset.load_references(run.store, run.config, profiles)
    tasks = [task for task in run.store.tasks("train") if task.id in references]
    view = View(run.config.router, run.tokenizer)
    batcher = Batcher(run.config, view, tasks)
    place = run.dir, run.config, run.mesh, sft_family(run.ablation)
    sft = checkpoint.load_router(*place, train_seed=run.train_seed)
    ids, dtype, loss = view.decision_ids, run.config.router.dtype, partial(method.loss, bopo)
    trainer = Trainer(sft, loss, bopo_optimizer(bopo), ids, run.mesh, dtype)
    anchor = ShardedRouter(sft, ids, run.mesh, dtype) if method.anchored else None
    if done:
      trainer.load(checkpoints.restore(trainer.state))
    # DAPO gathers episodes over updates. A checkpoint is saved only when none is pending, so that a
    # restart, which reads episodes from the store again, misses none.
    pending: list[tuple[Episode, float]] = []  # with their advantages
    task_batches = dataset.draw_task_batches(tasks, bopo.tasks_per_update, run.config.seed)
    batch_episodes = min(bopo.tasks_per_update, len(tasks)) * bopo.group_size
    enough_steps = bopo.updates * count_steps(bopo, batch_episodes)
    for update, update_tasks in islice(enumerate(task_batches, 1), done, last):
      episodes = roll_out(run, family, lam, update, trainer.model, view, update_tasks)
      kept, adv_B, metrics = method.compute_advantages(episodes, profiles, references, lam, bopo)
      pending += zip(kept, adv_B)
      counts["episodes"] += len(episodes)
      groups = {episode.task_id for episode, _ in pending}
      enough = len(groups) >= len(update_tasks) or not method.dynamic_sampling
      if pending and (enough or update == last):
        kept, advantages = zip(*pending)
        adv_B, seed = np.array(advantages), run.config.seed + update
        metrics |= update_policy(trainer, anchor, batcher, kept, adv_B, bopo, seed)
        pending = []
        counts["gradient_steps"] += count_steps(bopo, len(kept))
      check_metrics(method_name, update, metrics, checkpoints)
      log_fields = {"lam": lam, "update": update, "compiled": trainer.compiled}
      run.log(stage=method_name, **log_fields, **counts, **metrics)
      finished = update == last or counts["gradient_steps"] >= enough_steps
      if finished or (update - checkpoints.update >= SAVE_EVERY_ROLLOUTS and not pending):
        checkpoints.save(update, trainer.state, finished=finished, **counts)
      if finished:
        return


def count_steps(config: BoPOConfig, episodes: int) -> int:
  """The number of gradient steps that are taken on so many episodes."""
  return config.epochs * math.ceil(episodes / config.batch_episodes)


def check_metrics(method_name: str, update: int, metrics: dict, checkpoints: Checkpoints) -> None:
  """Raises ValueError, in every process, unless all metrics of an update are finite."""
  bad = [f"{name} {value}" for name, value in metrics.items() if not np.isfinite(value)]
  if bad:
    raise ValueError(
      f"{method_name} stopped: update {update} has {', '.join(bad)}; last good checkpoint: "
      f"{checkpoints.newest or 'none'}; set a lower learning rate under another --config.name"
    )


def roll_out(
  run, family: str, lam: float, update: int, model: Qwen2, view: View, tasks: Sequence[Task]
) -> list[Episode]:
  """A group of episodes of each task, by sampling from the router as it is."""
  bopo, name = run.config.bopo, rollouts_name(family, lam, update, run.train_seed)
  # The policy's cache and copy of the router are freed on return: the gradient needs the memory.
  policy = RouterPolicy(name, model, view, Sample(name), run.live_episodes, run.mesh)
  # Each update of each training seed has other seeds.
  first_seed = ROLLOUT_SEEDS + ROLLOUT_RANGE * run.train_seed + bopo.group_size * (update - 1)
  seeds = range(first_seed, first_seed + bopo.group_size)
  jobs = [Job(task, seed) for task in tasks for seed in seeds]
  return run.collect(f"{family} lam={lam:g} {update}/{bopo.updates}", policy, jobs)


def update_policy(trainer, anchor, batcher, episodes, adv_B, config, seed) -> dict[str, float]:
  """Takes the gradient steps on a rollout batch. Returns their mean metrics.

  In bfloat16 the log-probabilities of the rollouts, which were computed with a cache, differ by
  hundredths from those of a training forward, and a trajectory's ratio adds up dozens of them.
  There they are recomputed before the first step, by the arithmetic that they are compared with
  (our choice).
  """
  draw = random.Random(seed)
  gradient_steps = []
  for _ in range(config.epochs):
    order = draw.sample(range(len(episodes)), len(episodes))
    for first in range(0, len(order), config.batch_episodes):
      indices = order[first : first + config.batch_episodes]
      step_episodes = [episodes[i] for i in indices]
      gradient_steps.append(batcher.micro_batches(step_episodes, advantages=adv_B[indices]))
  if trainer.low_precision:
    for batches in gradient_steps:  # the micro-batches of each
      for i, batch in enumerate(batches):
        logp_BxS = losses.action_logp(trainer.logits(batch), batch.action_BxS)
        batches[i] = dataclasses.replace(batch, logp_BxS=logp_BxS)
  metrics = []
  for batches in gradient_steps:
    if anchor is not None:
      batches = [dataclasses.replace(b, ref_logits_BxSxA=anchor.logits(b)) for b in batches]
    metrics.append(trainer.step(batches))
  return {name: float(np.mean([values[name] for values in metrics])) for name in metrics[0]}


def predict_large(
  run, model: Qwen2, view: View, episodes: Sequence[Episode], relabel: Relabel | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """p_D, a router's p(LARGE) of decisions in stored training episodes, and action_D, as decided.

  `relabel` masks decisions that the router would not be asked for, or changes what was decided.
  """
  router = ShardedRouter(model, view.decision_ids, run.mesh, run.config.router.dtype)
  batches = Batcher(run.config, view, run.store.tasks("train")).micro_batches(episodes, relabel)
  p_D = [router.p_large(batch)[batch.mask_BxS] for batch in batches]
  action_D = [batch.action_BxS[batch.mask_BxS] for batch in batches]
  check_finite(np.concatenate(p_D), "p(LARGE) of stored episodes")
  return np.concatenate(p_D), np.concatenate(action_D)
