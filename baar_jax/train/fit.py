"""The training loops: from stored episodes, and from the router's own rollouts.

`run` is a `baar_jax.run.Run`, which lies above this folder.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import groupby, islice, repeat

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.config import ROLLOUT_RANGE, ROLLOUT_SEEDS, SERVED, VANILLA_BATCHES, SFTConfig
from baar_jax.episode import Episode
from baar_jax.mesh import exchange
from baar_jax.rollout.policies import Job, rollouts_name
from baar_jax.router.policy import RouterPolicy, Sample
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import open_view
from baar_jax.router.weights import build_model
from baar_jax.train import checkpoint, dataset, losses
from baar_jax.train.checkpoint import Checkpoints, check_metrics, checkpoint_directory, sft_family
from baar_jax.train.losses import list_methods
from baar_jax.train.trainer import Batcher, ShardedRouter, Trainer, bopo_optimizer, sft_optimizer

MIN_GROUP = 2  # episodes; a smaller group has no mean to compare with
SAVE_EVERY = 50  # gradient steps on stored episodes
SAVE_EVERY_ROLLOUTS = 5  # updates, which roll out episodes first


def fit_sft(run) -> None:
  """Trains the SFT router of a run, perhaps an ablated one, on the references; the dev loss is of
  one batch of dev tasks' references, with the same share of hard tasks."""
  draw = partial(dataset.draw_sft_batches, run.store, run.config)
  fit_stored(run, "sft", run.config.sft, draw, next(draw("dev")))


def fit_stored(run, name: str, config: SFTConfig, draw: Callable, dev=(), label=None) -> None:
  """Trains a router on decisions of stored episodes with each learning rate, and keeps the best.

  `draw()` gives the episodes of each update, always the same; `dev` are those of the dev loss;
  `label` is a `trainer.Label`. Each learning rate has a directory; in the end that of the least dev
  loss is renamed to the router's.
  """
  method = list_methods(run.config.bopo)[name]
  family = sft_family(run.ablation) if name == "sft" else name
  place = checkpoint_directory(run.dir, run.config, family, None, run.train_seed)
  if place.exists():
    return
  view = open_view(run.config, run.tokenizer, name)
  tasks = run.store.tasks("train") + run.store.tasks("dev")
  batcher = Batcher(run.config, view, tasks, method.whole_vocabulary, label)
  dev_batches, results = batcher.micro_batches(dev), {}
  for rate in config.learning_rates:
    directory = place.with_name(f"{place.name}-lr{rate:g}")
    with closing(Checkpoints(directory, create=True)) as checkpoints:
      done, results[rate] = checkpoints.last_update, checkpoints.progress
      if results[rate].get("finished"):
        continue
      if method.whole_vocabulary:
        model, ids = build_model(run.config.router, run.config.seed), None
      else:
        model = checkpoint.load_initial(run.dir, run.config, view, run.mesh, run.train_seed)
        ids = view.logit_ids
      optimizer, dtype = sft_optimizer(config, rate), run.config.router.dtype
      trainer = Trainer(model, method.loss, optimizer, ids, run.mesh, dtype)
      del model  # the trainer has copied it
      batches = map(batcher.micro_batches, islice(draw(), done, config.updates))
      training = train_early_stopping(trainer, batches, dev_batches, config, checkpoints)
      with run.progress(f"{name} lr={rate:g}", config.updates, done, "update") as bar:
        for progress, metrics in training:
          update = progress["updates"]
          check_metrics(name, update, metrics, checkpoints.newest)
          run.log(stage=name, update=update, updates=config.updates, learning_rate=rate, **metrics)
          bar.update()
      results[rate] = progress
  best = min(results, key=lambda rate: results[rate]["dev_loss"])
  if dev:
    result = results[best] | {"learning_rate": best}
    run.log(stage="stored-training", router=place.name, **result)
    run.print(f"{place.name}: {', '.join(f'{k} {v:g}' for k, v in result.items())}")
  exchange(None)  # every process has read the directories
  if run.is_main:
    place.with_name(f"{place.name}-lr{best:g}").rename(place)
  exchange(None)


def train_early_stopping(trainer, update_batches, dev_batches, config, checkpoints) -> Iterator:
  """Trains on the batches of each update until the dev loss stops improving.

  Yields (progress, metrics) of each update before it saves any of it. The last checkpoint has the
  parameters of the least dev loss, or without dev of the last update.
  """
  progress = checkpoints.progress or {"dev_loss": math.inf, "best_update": 0}
  best = jax.tree.map(jnp.copy, trainer.state["params"])
  if checkpoints.last_update:
    state = checkpoints.restore(trainer.state | {"best": best})
    trainer.load(state)
    best = state["best"]
  for update, batches in enumerate(update_batches, checkpoints.last_update + 1):
    metrics, last = trainer.step(batches), update == config.updates
    progress["updates"] = update
    if checked := last or (dev_batches and update % config.check_every == 0):
      metrics["dev_loss"] = trainer.loss(dev_batches) if dev_batches else metrics["loss"]
    if checked and metrics["dev_loss"] < progress["dev_loss"]:
      progress |= {"dev_loss": metrics["dev_loss"], "best_update": update}
      best = jax.tree.map(jnp.copy, trainer.state["params"])
    elif checked:
      last |= update - progress["best_update"] >= config.patience * config.check_every
    yield progress, metrics
    if last:
      break
    if update - checkpoints.last_update >= SAVE_EVERY:
      checkpoints.save(update, trainer.state | {"best": best}, **progress)
  checkpoints.save(update, {"params": best}, finished=True, **progress)


def fit_rollouts(run, name: str, lam: float) -> None:
  """Trains a router from the SFT router on its own episodes, or goes on from its checkpoint.

  An update rolls out episodes, computes their advantages, takes gradient steps, logs and saves.
  A method that drops groups (DAPO) goes on until it has taken as many gradient steps as BoPO, for
  at most `VANILLA_BATCHES` times as many updates.
  """
  bopo, served = run.config.bopo, run.config.env.kind == SERVED
  method, family = list_methods(bopo)[name], run.ablation or name
  last = bopo.updates * (VANILLA_BATCHES if method.dynamic_sampling else 1)
  directory = checkpoint_directory(run.dir, run.config, family, lam, run.train_seed)
  with closing(Checkpoints(directory, create=True)) as checkpoints:
    done = checkpoints.last_update
    progress = {"episodes": 0, "gradient_steps": 0} | checkpoints.progress
    if progress.get("finished") and not (served and done < last):
      return
    profiles = dataset.load_profiles(run.store, run.config, "train")
    references = dataset.load_references(run.store, run.config, profiles)
    tasks = [task for task in run.store.tasks("train") if task.id in references]
    view = open_view(run.config, run.tokenizer)
    batcher = Batcher(run.config, view, tasks)
    source = run.dir, run.config, run.mesh, sft_family(run.ablation)
    sft = checkpoint.load_router(*source, train_seed=run.train_seed)
    settings = view.decision_ids, run.mesh, run.config.router.dtype
    trainer = Trainer(sft, method.loss, bopo_optimizer(bopo), *settings)
    anchor = ShardedRouter(sft, *settings) if method.anchored else None
    if done:
      trainer.load(checkpoints.restore(trainer.state))
    # DAPO gathers episodes over updates. A checkpoint is saved only when none is pending, so that a
    # restart, which reads episodes from the store again, misses none.
    pending: list[tuple[Episode, float]] = []  # with their advantages
    task_batches = dataset.draw_task_batches(tasks, bopo.tasks_per_update, run.config.seed)
    if served:  # one update, from what clients have sampled of any task
      last, task_batches = done + 1, repeat(tasks)
    count_steps = lambda count: bopo.epochs * math.ceil(count / bopo.batch_episodes)  # noqa: E731
    rollout_episodes = min(bopo.tasks_per_update, len(tasks)) * bopo.group_size
    enough_steps = bopo.updates * count_steps(rollout_episodes)
    for update, update_tasks in islice(enumerate(task_batches, 1), done, last):
      groups = roll_out(run, family, lam, update, trainer.model, view, update_tasks)
      if not groups:
        return
      kept, kept_adv, metrics = method.compute_advantages(groups, profiles, references, lam)
      pending += zip(kept, kept_adv)
      progress["episodes"] += sum(map(len, groups))
      pending_tasks = {episode.task_id for episode, _ in pending}
      enough = len(pending_tasks) >= len(update_tasks) or not method.dynamic_sampling
      if pending and (enough or update == last):
        episodes, advantages = zip(*pending)
        adv_B, seed = np.array(advantages), run.config.seed + update
        metrics |= update_policy(trainer, anchor, batcher, episodes, adv_B, bopo, seed)
        pending = []
        progress["gradient_steps"] += count_steps(len(episodes))
      check_metrics(name, update, metrics, checkpoints.newest)
      progress["finished"] = update == last or progress["gradient_steps"] >= enough_steps
      run.log(stage=name, lam=lam, update=update, **progress, **metrics)
      due = update - checkpoints.last_update >= SAVE_EVERY_ROLLOUTS and not pending
      if due or progress["finished"]:
        checkpoints.save(update, trainer.state, **progress)
      if progress["finished"]:
        return


def roll_out(run, family, lam, update, model: Qwen2, view, tasks) -> list[list[Episode]]:
  """Groups of at least `MIN_GROUP` episodes of a task, sampled from the router as it is.

  Of a served run they are what clients have sampled with the last update's router, or none; else
  there is one at least, or a ValueError.
  """
  bopo, name = run.config.bopo, rollouts_name(family, lam, update, run.train_seed)
  if run.config.env.kind == SERVED:
    ids = {task.id for task in tasks}
    episodes = [e for e in run.store.episodes(name) if e.task_id in ids]
  else:
    # The policy's cache and copy of the router are freed on return: the gradient needs the memory.
    policy = RouterPolicy(name, model, view, Sample(name), run.live_episodes, run.mesh)
    # Each update of each training seed has other seeds.
    first_seed = ROLLOUT_SEEDS + ROLLOUT_RANGE * run.train_seed + bopo.group_size * (update - 1)
    jobs = [Job(task, first_seed + g) for task in tasks for g in range(bopo.group_size)]
    episodes = run.collect(f"{family} lam={lam:g} {update}/{bopo.updates}", policy, jobs)
  by_task = (list(group) for _, group in groupby(episodes, lambda e: e.task_id))
  groups = [group for group in by_task if len(group) >= MIN_GROUP]
  if not groups:
    problem = f"{name}: no profiled training task has {MIN_GROUP} episodes"
    if run.config.env.kind != SERVED:
      raise ValueError(f"{problem}; see above what they died of, then run the command again")
    run.print(problem)
  return groups


def update_policy(trainer, anchor, batcher, episodes, adv_B, config, seed) -> dict[str, float]:
  """Takes the gradient steps on a rollout batch. Returns their mean metrics.

  In bfloat16 the log-probabilities of the rollouts, which were computed with a cache, differ by
  hundredths from those of a training forward, and a trajectory's ratio adds up dozens of them: they
  are recomputed before the first step (our choice). `anchor` is the SFT router of a method whose
  loss reads its logits, else None.
  """
  draw = random.Random(seed)
  step_batches = []
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
      step_batches.append(batches)
  metrics = [trainer.step(batches) for batches in step_batches]
  return {name: float(np.mean([values[name] for values in metrics])) for name in metrics[0]}
