"""The training loops: from stored episodes, and from the router's own rollouts.

`run` is a `baar_jax.run.Run`, which lies above this folder.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import islice, repeat

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.config import ROLLOUT_RANGE, ROLLOUT_SEEDS, SERVED, VANILLA_BATCHES, SFTConfig
from baar_jax.episode import Episode, Task
from baar_jax.mesh import exchange
from baar_jax.rollout.policies import Job, rollouts_name
from baar_jax.router.policy import RouterPolicy, Sample, softmax
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View, open_view
from baar_jax.router.weights import build_model
from baar_jax.train import checkpoint, dataset, losses
from baar_jax.train.batches import Batcher, Relabel
from baar_jax.train.checkpoint import Checkpoints, checkpoint_directory, sft_family
from baar_jax.train.losses import METHODS, MIN_GROUP, group_by_task
from baar_jax.train.trainer import ShardedRouter, Trainer, bopo_optimizer, sft_optimizer

SAVE_EVERY = 50  # gradient steps on stored episodes
SAVE_EVERY_ROLLOUTS = 5  # updates, which roll out episodes first


def fit_sft(run) -> None:
  """Trains the SFT router of a run, or of an ablated run, on the references.

  Its dev loss is of one batch of dev tasks' references, with the training's share of hard tasks.
  """
  draw = partial(dataset.draw_sft_batches, run.store, run.config)
  view = open_view(run.config, run.tokenizer)
  fit_stored(run, "sft", run.config.sft, view, draw, next(draw("dev")))


def fit_stored(
  run, method_name: str, config: SFTConfig, view: View, draw: Callable, dev=(), relabel=None
) -> None:
  """Trains a router on decisions of stored episodes with each learning rate, and keeps the best.

  `method_name` is "pretrain", "sft", "cascade" or "single-turn". `draw()` gives the episodes of
  each update, always the same; `dev` are the episodes of the dev loss; `relabel` is as of
  `Batcher.micro_batches`. Each learning rate has a directory; when all are finished, that of the
  least dev loss is renamed to the router's.
  """
  method = METHODS[method_name]
  family = sft_family(run.ablation) if method_name == "sft" else method_name
  place = checkpoint_directory(run.dir, run.config, family, None, run.train_seed)
  if place.exists():
    return
  batcher = Batcher(run.config, view, run.store.tasks("train") + run.store.tasks("dev"))
  make_batches = partial(batcher.micro_batches, relabel=relabel)
  dev_batches, results = make_batches(dev), {}
  for rate in config.learning_rates:
    directory = place.with_name(f"{place.name}-lr{rate:g}")
    with closing(Checkpoints(directory, create=True)) as checkpoints:
      if method.whole_vocabulary:
        model, ids = build_model(run.config.router, run.config.seed), None
      else:
        model = checkpoint.load_initial(run.dir, run.config, view, run.mesh, run.train_seed)
        ids = view.logit_ids
      optimizer, dtype = sft_optimizer(config, rate), run.config.router.dtype
      trainer = Trainer(model, method.loss, optimizer, ids, run.mesh, dtype)
      del model  # the trainer has copied it
      updates = map(make_batches, islice(draw(), checkpoints.update, config.updates))
      learn = partial(stop_early, run, method_name, config, rate, trainer)
      results[directory] = learn(updates, dev_batches, checkpoints)
  best = min(results, key=lambda directory: results[directory]["dev_loss"])
  if dev:
    run.log(stage="stored-training", router=place.name, **results[best])
    run.print(f"{place.name}: {', '.join(f'{k} {v:g}' for k, v in results[best].items())}")
  exchange(None)  # every process has read the directories
  if run.is_main:
    best.rename(place)
  exchange(None)


def stop_early(run, method_name, config, rate, trainer, updates, dev_batches, checkpoints) -> dict:
  """Trains on the batches of each update until the dev loss stops improving; `rate` is logged.

  The last checkpoint has the parameters of the least dev loss; without dev, those of the last
  update and its loss. Returns the `dev_loss`, its `best_update`, and how many `updates` were taken.
  """
  if checkpoints.progress.get("finished"):
    return checkpoints.progress
  done, progress = checkpoints.update, {"dev_loss": math.inf, "best_update": 0}
  best = jax.tree.map(jnp.copy, trainer.state["params"])
  if done:
    state, progress = checkpoints.restore(trainer.state | {"best": best}), checkpoints.progress
    trainer.load(state)
    best = state["best"]
  with run.progress(f"{method_name} lr={rate:g}", config.updates, done, "update") as bar:
    for update, batches in enumerate(updates, done + 1):
      metrics, last = trainer.step(batches), update == config.updates
      if checked := last or (dev_batches and update % config.check_every == 0):
        metrics["dev_loss"] = trainer.loss(dev_batches) if dev_batches else metrics["loss"]
      check_metrics(method_name, update, metrics, checkpoints)
      log_fields = {"update": update, "updates": config.updates, "learning_rate": rate}
      run.log(stage=method_name, **log_fields, **metrics)
      bar.set_postfix_str(f"loss {metrics['loss']:.3f}", refresh=False)
      bar.update()
      if checked and metrics["dev_loss"] < progress["dev_loss"]:
        progress = {"dev_loss": metrics["dev_loss"], "best_update": update}
        best = jax.tree.map(jnp.copy, trainer.state["params"])
      elif checked:
        last |= update - progress["best_update"] >= config.patience * config.check_every
      if last:
        break
      if update - checkpoints.update >= SAVE_EVERY:
        checkpoints.save(update, trainer.state | {"best": best}, **progress)
  progress |= {"updates": update, "learning_rate": rate}
  checkpoints.save(update, {"params": best}, finished=True, **progress)
  return progress


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
  served = run.config.env.kind == SERVED
  with closing(Checkpoints(directory, create=True)) as checkpoints:
    if checkpoints.progress.get("finished") and not (served and checkpoints.update < last):
      return
    done, progress = checkpoints.update, {"episodes": 0, "gradient_steps": 0} | checkpoints.progress
    profiles = dataset.load_profiles(run.store, run.config)
    references = dataset.load_references(run.store, run.config, profiles)
    tasks = [task for task in run.store.tasks("train") if task.id in references]
    view = open_view(run.config, run.tokenizer)
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
    if served:  # one update, from what clients have sampled of any task
      last, task_batches = done + 1, repeat(tasks)
    count_steps = lambda episodes: bopo.epochs * math.ceil(episodes / bopo.batch_episodes)  # noqa: E731
    batch_episodes = min(bopo.tasks_per_update, len(tasks)) * bopo.group_size
    enough_steps = bopo.updates * count_steps(batch_episodes)
    for update, update_tasks in islice(enumerate(task_batches, 1), done, last):
      episodes = roll_out(run, family, lam, update, trainer.model, view, update_tasks)
      if served and not episodes:
        return
      kept, adv_B, metrics = method.compute_advantages(episodes, profiles, references, lam, bopo)
      pending += zip(kept, adv_B)
      progress["episodes"] += len(episodes)
      groups = {episode.task_id for episode, _ in pending}
      enough = len(groups) >= len(update_tasks) or not method.dynamic_sampling
      if pending and (enough or update == last):
        kept, advantages = zip(*pending)
        adv_B, seed = np.array(advantages), run.config.seed + update
        metrics |= update_policy(trainer, anchor, batcher, kept, adv_B, bopo, seed)
        pending = []
        progress["gradient_steps"] += count_steps(len(kept))
      check_metrics(method_name, update, metrics, checkpoints)
      progress["finished"] = update == last or progress["gradient_steps"] >= enough_steps
      run.log(stage=method_name, lam=lam, update=update, **progress, **metrics)
      due = update - checkpoints.update >= SAVE_EVERY_ROLLOUTS and not pending
      if due or progress["finished"]:
        checkpoints.save(update, trainer.state, **progress)
      if progress["finished"]:
        return


def check_metrics(method_name: str, update: int, metrics: dict, checkpoints: Checkpoints) -> None:
  """Raises ValueError, in every process, unless all metrics of an update are finite."""
  bad = [f"{name} {value}" for name, value in metrics.items() if not np.isfinite(value)]
  if bad:
    good = checkpoints.directory / str(checkpoints.update) if checkpoints.update else "none"
    raise ValueError(
      f"{method_name} stopped: update {update} has {', '.join(bad)}; last good checkpoint: {good}; "
      "set a lower learning rate under another --config.name"
    )


def roll_out(
  run, family: str, lam: float, update: int, model: Qwen2, view: View, tasks: Sequence[Task]
) -> list[Episode]:
  """A group of episodes of each task, by sampling from the router as it is.

  Of a served run it is the groups that clients have sampled, with the last update's router.
  """
  bopo, name = run.config.bopo, rollouts_name(family, lam, update, run.train_seed)
  if run.config.env.kind == SERVED:
    groups = group_by_task(run.store.episodes(name))
    groups = [groups[task.id] for task in tasks if len(groups.get(task.id, ())) >= MIN_GROUP]
    if not groups:
      run.print(f"{name}: no profiled training task has {MIN_GROUP} scored sessions of it")
    return [episode for group in groups for episode in group]
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
  (our choice). `anchor` is the SFT router of a method whose loss reads its logits, else None.
  """
  draw = random.Random(seed)
  gradient_steps = []
  for _ in range(config.epochs):
    order = draw.sample(range(len(episodes)), len(episodes))
    for first in range(0, len(order), config.batch_episodes):
      indices = order[first : first + config.batch_episodes]
      step_episodes = [episodes[i] for i in indices]
      batches = batcher.micro_batches(step_episodes, advantages=adv_B[indices])
      if trainer.low_precision:
        logps = [losses.action_logp(trainer.logits(b), b.action_BxS) for b in batches]
        batches = [dataclasses.replace(b, logp_BxS=logp) for b, logp in zip(batches, logps)]
      if anchor is not None:
        batches = [dataclasses.replace(b, ref_logits_BxSxA=anchor.logits(b)) for b in batches]
      gradient_steps.append(batches)
  metrics = [trainer.step(batches) for batches in gradient_steps]
  return {name: float(np.mean([values[name] for values in metrics])) for name in metrics[0]}


def predict(
  run, model: Qwen2, view: View, episodes: Sequence[Episode], relabel: Relabel | None = None
) -> np.ndarray:
  """p_DxA, a router's probabilities at decisions in stored episodes.

  `relabel` masks decisions that the router would not be asked for.
  """
  router = ShardedRouter(model, view.logit_ids, run.mesh, run.config.router.dtype)
  tasks = run.store.tasks("train") + run.store.tasks("dev")
  batches = Batcher(run.config, view, tasks).micro_batches(episodes, relabel)
  logits_DxA = np.concatenate([np.asarray(router.logits(b))[b.mask_BxS] for b in batches])
  return softmax(logits_DxA, "stored episodes")
