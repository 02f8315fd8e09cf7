"""Values of stored decisions under every budget and price: what the decision heads learn.

A transition does not depend on the budget, so each stored step is read under many. With r LARGE
calls left, the value of a model is what the step pays and then the best that r, less the call,
allows; with a price, dollars are taken off. This is fitted Q-iteration (Ernst et al. 2005), with a
slowly moving copy of the heads as its target. `run` is a `baar_jax.run.Run`.
"""

import dataclasses
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from baar_jax.config import MAX_PRICE, Config, ValueConfig
from baar_jax.episode import SMALL, SPLITS, Episode, Task
from baar_jax.mesh import exchange
from baar_jax.router import head
from baar_jax.router.head import MAX_CALLS, Heads
from baar_jax.router.qwen2 import Qwen2, check_finite
from baar_jax.router.view import View, open_view
from baar_jax.train import checkpoint, dataset
from baar_jax.train.checkpoint import check_metrics, checkpoint_directory
from baar_jax.train.trainer import Batcher, ShardedRouter

ROUND = 100  # updates between two lines of the log
SPREAD_EPS = 1e-3
TINY_USD = 1e-9  # models may be free of charge
HEADS = "heads.npz"  # the file of a training's heads
LAYERS = [(0, 0)] * 3  # weight and bias
STRUCTURE = jax.tree.structure(Heads(LAYERS, LAYERS, 0, 0, 0))  # of the stored heads
TARGET_RATE = 0.02  # share of the way that the target goes to the heads in an update
CAPPED_SHARE = 0.6  # of the draws that have a cap (our choice)
PRICE_0_SHARES = 0.8, 0.1  # at price 0, of draws with a cap and of those without (our choice)


class Transitions(NamedTuple):
  """Stored decisions in a row, episode after episode (N)."""

  hidden_NxD: np.ndarray
  model_N: np.ndarray
  cost_N: np.ndarray  # dollars of the step, over the mean of always-LARGE's medians by task
  gain_N: np.ndarray  # of score by the step, where the environment tells it; else all by the last
  last_N: np.ndarray  # whether the episode ends with it
  progress_NxP: np.ndarray  # of `count_progress`


def load_trunk(directory: Path, config: Config, mesh: Mesh, train_seed=0) -> tuple[Qwen2, View]:
  """The router behind the heads of a run's directory, which stays as it is: pretrained, or a
  checkpoint's. Its view writes a text that does not change with the budget."""
  router = dataclasses.replace(config.router, show_budget=False)
  view = open_view(dataclasses.replace(config, router=router), directory / "tokenizer")
  return checkpoint.load_initial(directory, config, view, mesh, train_seed), view


def read_transitions(run, episodes: Sequence[Episode]) -> Transitions:
  """The decisions of episodes, in their order, with what the trunk computes."""
  model, view = load_trunk(run.dir, run.config, run.mesh, run.train_seed)
  trunk = ShardedRouter(model, (), run.mesh, run.config.router.dtype)  # no logits
  tasks = {task.id: task for split in SPLITS for task in run.store.tasks(split)}
  hidden_NxD = Batcher(run.config, view, tasks.values()).compute(trunk.hidden, episodes)
  profiles = dataset.load_profiles(run.store, run.config, "train").values()
  unit_usd = max(TINY_USD, np.mean([profile.cost_large for profile in profiles]))
  rows = [row for e in episodes for row in _list_rows(tasks[e.task_id], e, unit_usd)]
  return Transitions(hidden_NxD.astype(np.float32), *map(np.array, zip(*rows)))


def _list_rows(task: Task, episode: Episode, unit_usd: float) -> list[tuple]:
  """The fields of `Transitions` but the first, of each step of an episode."""
  rows, before = [], 0.0
  progress_S = head.count_progress(task.max_steps, episode.steps)
  for number, (step, progress) in enumerate(zip(episode.steps, progress_S)):
    last = number + 1 == len(episode.steps)
    told = before if step.score is None else step.score
    score = episode.score if last else told
    cost, gain = np.float32(step.cost_usd / unit_usd), np.float32(score - before)
    rows.append((step.model, cost, gain, last, progress))
    before = score
  return rows


def fit_values(run) -> None:
  """Fits the heads of a run's training seed to its stored episodes, if that is still to be done.

  Raises ValueError if a loss is not finite.
  """
  c = run.config.value
  path = checkpoint_directory(run.dir, run.config, "value", None, run.train_seed) / HEADS
  if all(exchange(path.exists())):  # all processes fit, or none
    return
  episodes = dataset.load_value_episodes(run.store, run.config)
  data, models = read_transitions(run, episodes), len(run.pair.names)
  large_usd = np.mean([s.cost_usd for e in episodes for s in e.steps if s.model == models - 1])
  scale = data.hidden_NxD.mean(axis=0), data.hidden_NxD.std(axis=0) + SPREAD_EPS
  scale = *scale, np.float32(max(TINY_USD, large_usd))
  widths, key = (c.value_width, c.advantage_width), jax.random.key(run.config.seed)
  heads = head.draw_heads(key, c.heads, widths, models, scale)
  with run.progress("value", c.updates, 0, "update") as bar:
    for done, newer, loss in fit_heads(heads, data, c, run.config.seed):
      run.log(stage="value", update=done, loss=loss)
      check_metrics("value", done, {"loss": loss})
      bar.update(done - bar.n)
      heads = newer
  if run.is_main:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp.npz")
    np.savez(draft, *map(np.asarray, jax.tree.leaves(heads)))
    draft.replace(path)
  exchange(None)  # waits until they are written


def fit_heads(heads: Heads, data: Transitions, config: ValueConfig, seed: int):
  """Yields (updates done, the target's heads, mean loss) after each `ROUND` updates."""
  schedule = optax.cosine_decay_schedule(config.learning_rate, config.updates)
  optimizer = optax.adamw(schedule, weight_decay=config.weight_decay)
  nets, scale = heads[:2], heads[2:]
  data = jax.tree.map(jnp.asarray, data)
  returns = jax.tree.map(jnp.asarray, compute_returns(data))
  state, slow_nets = jax.vmap(optimizer.init)(nets), nets
  axes = None, None, None, 0, 0, 0, 0, None
  step = jax.jit(jax.vmap(partial(_update, optimizer, config), axes))
  keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), config.heads)
  losses = []
  for done in range(1, config.updates + 1):
    nets, slow_nets, state, loss_E = step(data, returns, scale, nets, slow_nets, state, keys, done)
    losses.append(loss_E)
    if done % ROUND == 0 or done == config.updates:
      yield done, Heads(*slow_nets, *scale), float(np.mean(losses))
      losses = []


def compute_returns(data: Transitions) -> tuple[np.ndarray, np.ndarray]:
  """gain_N and cost_N from each decision to the end of its episode."""
  gain_N, cost_N = np.array(data.gain_N, np.float64), np.array(data.cost_N, np.float64)
  for n in reversed(range(len(gain_N) - 1)):
    if not data.last_N[n]:
      gain_N[n] += gain_N[n + 1]
      cost_N[n] += cost_N[n + 1]
  return gain_N.astype(np.float32), cost_N.astype(np.float32)


def compute_target(gain, cost, last, weight, value, advantage, calls_after):
  """Q of the model that acted: what its step pays, and the best that the rest of the cap allows.

  `weight` is 1 / (1 + price) and multiplies scores; 1 - weight multiplies costs. `value` and
  `advantage` [..., A] are the next decision's, where dearer models need a call of `calls_after`.
  """
  best = jnp.where(calls_after >= 1, advantage.max(axis=-1), advantage[..., SMALL])
  return weight * gain - (1 - weight) * cost + jnp.where(last, 0.0, value + best)


def _update(optimizer, config, data, returns, scale, nets, slow_nets, state, key, done):
  """One step of one head on drawn decisions, each under a drawn cap and price.

  `done` is the number of the update, from 1. Returns the head's nets, the slow nets of its target,
  the optimizer's state and the loss.
  """
  key_n, key_c, key_f, key_w, key_r, key_h = jax.random.split(jax.random.fold_in(key, done), 6)
  shape = (config.batch_decisions,)
  n = jax.random.randint(key_n, shape, 0, len(data.model_N))
  here = jax.tree.map(lambda x: x[n], data)
  after = jax.tree.map(lambda x: x[jnp.minimum(n + 1, len(data.model_N) - 1)], data)
  capped = jax.random.uniform(key_c, shape) < CAPPED_SHARE
  free = jax.random.uniform(key_f, shape) < jnp.where(capped, *PRICE_0_SHARES)
  lightest = 1 / (1 + MAX_PRICE)
  weight = jnp.where(free, 1.0, jax.random.uniform(key_w, shape, minval=lightest))
  used = (here.model_N != SMALL).astype(jnp.float32)
  left = jnp.floor(MAX_CALLS * jax.random.uniform(key_r, shape) ** 2)  # few calls more often
  left = jnp.where(capped, jnp.maximum(left, used), jnp.inf)
  price = 1 / weight - 1

  def estimate(nets, part, left, hidden):
    facts = head.describe(left, price, part.progress_NxP)
    return head.estimate_one(Heads(*nets, *scale), hidden, facts)

  value, advantage = estimate(slow_nets, after, left - used, after.hidden_NxD)
  target_N = compute_target(
    here.gain_N, here.cost_N, here.last_N, weight, value, advantage, left - used
  )
  gain_N, cost_N = (x[n] for x in returns)
  use_returns = done <= int(config.return_share * config.updates)
  target_N = jnp.where(use_returns, weight * gain_N - (1 - weight) * cost_N, target_N)
  _, spread_D, _ = scale
  noise = config.noise * spread_D[None] * jax.random.normal(key_h, here.hidden_NxD.shape)

  def loss(nets):
    value, advantage = estimate(nets, here, left, here.hidden_NxD + noise)
    chosen = jnp.take_along_axis(advantage, here.model_N[:, None], axis=1)[:, 0]
    return jnp.mean((value + chosen - target_N) ** 2)

  error, gradient = jax.value_and_grad(loss)(nets)
  updates, state = optimizer.update(gradient, state, nets)
  nets = optax.apply_updates(nets, updates)
  slow_nets = jax.tree.map(lambda old, new: old + TARGET_RATE * (new - old), slow_nets, nets)
  return nets, slow_nets, state, error


def load_heads(directory: Path, config: Config, train_seed: int = 0) -> Heads:
  """The heads in a run's directory. Raises ValueError if they are missing or damaged."""
  path = checkpoint_directory(directory, config, "value", None, train_seed) / HEADS
  try:
    with np.load(path) as stored:
      leaves = list(stored.values())
    for x in leaves:
      check_finite(x, "heads")
    heads = jax.tree.unflatten(STRUCTURE, leaves)
    if heads.value[0][0].shape[1:2] != (heads.mean_D.size + head.FACTS,):
      raise ValueError("they read other facts than this version")
    return heads
  except (ValueError, OSError, zipfile.BadZipFile) as error:
    raise ValueError(f"{path} is missing or damaged: remove it and run --stage=value") from error
