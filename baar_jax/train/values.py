"""Fit the decision heads to values of stored decisions under caps and cost weights.

A transition does not depend on the budget, so each stored step is read under many. With
r LARGE calls left, the value of a model is the step's pay and then the best that r,
less the call, allows; with a cost weight, dollars are taken off. This is fitted
Q-iteration (Ernst et al. 2005) with target networks.
"""

import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from baar_jax.config import MAX_PRICE, ValueConfig
from baar_jax.episode import SMALL, SPLITS, Episode
from baar_jax.mesh import exchange
from baar_jax.router import head
from baar_jax.router.head import MAX_CALLS, Heads, Layers, Scale
from baar_jax.router.qwen2 import check_finite
from baar_jax.train import checkpoint, dataset, rewards
from baar_jax.train.batches import Batcher
from baar_jax.train.trainer import ShardedRouter
from baar_jax.train.training import RouterFiles, Training

ROUND = 100  # updates between two lines of the log
SPREAD_EPS = 1e-3
TINY_USD = 1e-9  # models may be free of charge
HEADS = "heads.npz"  # the file of a training's heads
LAYERS = [(0, 0)] * 3  # weight and bias
# Of the stored heads.
STRUCTURE = jax.tree.structure(Heads(LAYERS, LAYERS, Scale(0, 0, 0)))
TARGET_RATE = 0.02  # share of the way that the target goes to the heads in an update
CAPPED_SHARE = 0.6  # of the draws that have a cap (our choice)
# At cost weight 0, of draws with a cap and without (our choice).
PRICE_0_SHARES = 0.8, 0.1


class States(NamedTuple):
  """What heads read of stored decisions, whatever is left of a budget (N)."""

  hidden_NxD: np.ndarray  # of the trunk
  progress_NxP: np.ndarray  # of `count_progress`


class Transitions(NamedTuple):
  """Stored decisions in a row, episode after episode (N)."""

  states: States
  model_N: np.ndarray
  # Dollars of the step, over the mean of always-LARGE's medians by task.
  cost_N: np.ndarray
  # Score that the step gains, if the environment tells it; else all by the last step.
  gain_N: np.ndarray
  last_N: np.ndarray  # whether the episode ends with it


def read_states(training: Training, episodes: Sequence[Episode]) -> States:
  """Read the states of episodes' decisions, in their order, with the trunk."""
  config = training.config
  view = training.open_trunk_view()
  model = checkpoint.load_initial(training, view)
  trunk = ShardedRouter(model, (), training.mesh, config.router.dtype)  # no logits
  tasks = {task.id: task for split in SPLITS for task in training.store.tasks(split)}
  hidden_NxD = Batcher(config, view, tasks.values()).compute(trunk.hidden, episodes)
  progress = []
  for episode in episodes:
    max_steps = tasks[episode.task_id].max_steps
    progress += head.count_progress(max_steps, episode.steps)
  return States(hidden_NxD.astype(np.float32), np.array(progress))


def make_transitions(
  states: States, episodes: Sequence[Episode], unit_usd: float
) -> Transitions:
  """Make the transitions of episodes, whose states were read.

  Args:
    unit_usd: costs are counted in it.
  """
  models = []
  costs = []
  gains = []
  lasts = []
  for episode in episodes:
    before = 0.0
    for number, step in enumerate(episode.steps, 1):
      last = number == len(episode.steps)
      score = before if step.score is None else step.score
      if last:
        score = episode.score
      models.append(step.model)
      costs.append(np.float32(step.cost_usd / unit_usd))
      gains.append(np.float32(score - before))
      lasts.append(last)
      before = score
  cost_N = np.array(costs)
  gain_N = np.array(gains)
  return Transitions(states, np.array(models), cost_N, gain_N, np.array(lasts))


def fit_values(training: Training) -> None:
  """Fit the heads of a training to its stored episodes, if that is still to be done.

  Raises:
    ValueError: a loss is not finite.
  """
  c = training.config.value
  path = training.checkpoints("value") / HEADS
  if all(exchange(path.exists())):  # all processes fit, or none
    return
  heads, data = _open_heads(training)
  with training.progress("value", c.updates, 0, "update") as bar:
    for done, newer, loss in fit_heads(heads, data, c, training.config.seed):
      training.log(stage="value", update=done, loss=loss)
      checkpoint.check_metrics("value", done, {"loss": loss})
      bar.update(done - bar.n)
      heads = newer
  if training.is_main:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp.npz")
    np.savez(draft, *map(np.asarray, jax.tree.leaves(heads)))
    draft.replace(path)
  exchange(None)  # waits until they are written


def _open_heads(training: Training) -> tuple[Heads, Transitions]:
  """Draw heads, with the scale of the stored decisions that they learn from."""
  config = training.config
  c = config.value
  episodes = dataset.load_value_episodes(training.store, config)
  states = read_states(training, episodes)
  train_ids = [task.id for task in training.store.tasks("train")]
  profiles = dataset.profile_tasks(config, train_ids, episodes)
  unit_usd = max(TINY_USD, rewards.mean_large_usd(profiles.values()))
  data = make_transitions(states, episodes, unit_usd)
  largest = training.models - 1
  usd = [s.cost_usd for e in episodes for s in e.steps if s.model == largest]
  spread_D = states.hidden_NxD.std(axis=0) + SPREAD_EPS
  large_usd = np.float32(max(TINY_USD, np.mean(usd)))
  scale = Scale(states.hidden_NxD.mean(axis=0), spread_D, large_usd)
  key = jax.random.key(config.seed)
  widths = c.value_width, c.advantage_width
  return head.draw_heads(key, c.heads, widths, training.models, scale), data


class Returns(NamedTuple):
  """The Monte-Carlo returns of stored decisions: sums to the end of the episode."""

  gain_N: jax.Array
  cost_N: jax.Array


class Nets(NamedTuple):
  """The parameters that learn, of a head or with a leading axis E of all heads."""

  value: Layers
  advantage: Layers


class Fit(NamedTuple):
  """A head that learns, or with a leading axis E all heads."""

  nets: Nets
  target_nets: Nets  # they follow slowly
  optimizer_state: optax.OptState


class Study(NamedTuple):
  """What all heads read at each update."""

  data: Transitions
  returns: Returns
  scale: Scale


def fit_heads(
  heads: Heads, data: Transitions, config: ValueConfig, seed: int
) -> Iterator[tuple[int, Heads, float]]:
  """Yield (updates done, the target's heads, mean loss) after each `ROUND` updates."""
  schedule = optax.cosine_decay_schedule(config.learning_rate, config.updates)
  optimizer = optax.adamw(schedule, weight_decay=config.weight_decay)
  nets = Nets(heads.value, heads.advantage)
  scale = heads.scale
  fitted = Fit(nets, nets, jax.vmap(optimizer.init)(nets))
  study = jax.tree.map(jnp.asarray, Study(data, compute_returns(data), scale))
  update = partial(_update, optimizer, config)
  step = jax.jit(jax.vmap(update, (None, 0, 0, None)))
  keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), config.heads)
  losses = []
  for done in range(1, config.updates + 1):
    fitted, loss_E = step(study, fitted, keys, done)
    losses.append(loss_E)
    if done % ROUND == 0 or done == config.updates:
      yield done, Heads(*fitted.target_nets, scale), float(np.mean(losses))
      losses = []


def compute_returns(data: Transitions) -> Returns:
  """Sum gains and costs from each decision to the end of its episode."""
  gain_N = data.gain_N.astype(np.float64)
  cost_N = data.cost_N.astype(np.float64)
  for n in reversed(range(len(gain_N) - 1)):
    if not data.last_N[n]:
      gain_N[n] += gain_N[n + 1]
      cost_N[n] += cost_N[n + 1]
  return Returns(gain_N.astype(np.float32), cost_N.astype(np.float32))


class Regime(NamedTuple):
  """The cap and the cost weight under which each decision of a batch is read."""

  left_N: jax.Array  # LARGE calls before the decision; inf without a cap
  weight_N: jax.Array  # of scores: 1 / (1 + cost weight)

  def weigh(self, gain_N: jax.Array, cost_N: jax.Array) -> jax.Array:
    """Weigh scores by `weight_N` and costs by the rest of 1."""
    return self.weight_N * gain_N - (1 - self.weight_N) * cost_N


def draw_regime(keys: Sequence[jax.Array], used_N: jax.Array) -> Regime:
  """Draw a cap and a cost weight for each decision.

  Args:
    keys: one for each of four draws.
    used_N: the LARGE calls of each decision's step; its cap allows them.
  """
  shape = used_N.shape
  key_cap, key_free, key_weight, key_left = keys
  capped_N = jax.random.uniform(key_cap, shape) < CAPPED_SHARE
  free_N = jax.random.uniform(key_free, shape) < jnp.where(capped_N, *PRICE_0_SHARES)
  lightest = 1 / (1 + MAX_PRICE)
  weight_N = jax.random.uniform(key_weight, shape, minval=lightest)
  weight_N = jnp.where(free_N, 1.0, weight_N)
  # Few calls more often.
  left_N = jnp.floor(MAX_CALLS * jax.random.uniform(key_left, shape) ** 2)
  left_N = jnp.where(capped_N, jnp.maximum(left_N, used_N), jnp.inf)
  return Regime(left_N, weight_N)


def compute_target(
  paid: jax.Array,
  last: jax.Array,
  value: jax.Array,
  advantage: jax.Array,
  calls_after: jax.Array,
) -> jax.Array:
  """Compute the Q target of the model that acted.

  Args:
    paid: gain and cost of its step, weighed by a regime.
    last: whether the episode ends with the step.
    value: of the next decision.
    advantage: [..., A], of the next decision; any model but SMALL needs a call.
    calls_after: LARGE calls left for the next decision.
  """
  best = jnp.where(calls_after >= 1, advantage.max(axis=-1), advantage[..., SMALL])
  return paid + jnp.where(last, 0.0, value + best)


def _estimate(
  nets: Nets, scale: Scale, regime: Regime, states: States
) -> tuple[jax.Array, jax.Array]:
  """Estimate value_N and advantage_NxA of decisions with one head."""
  facts_NxF = head.describe(regime.left_N, 1 / regime.weight_N - 1, states.progress_NxP)
  one_head = Heads(*nets, scale)
  return head.estimate_one(one_head, states.hidden_NxD, facts_NxF)


def _update(
  optimizer: optax.GradientTransformation,
  config: ValueConfig,
  study: Study,
  fitted: Fit,
  key: jax.Array,
  done: jax.Array,
) -> tuple[Fit, jax.Array]:
  """Take one gradient step of one head on drawn decisions, each under a drawn regime.

  Args:
    done: the number of the update, from 1.

  Returns:
    The head after it, and the loss.
  """
  data = study.data
  scale = study.scale
  keys = jax.random.split(jax.random.fold_in(key, done), 6)
  count = len(data.model_N)
  n = jax.random.randint(keys[0], (config.batch_decisions,), 0, count)
  here = jax.tree.map(lambda x: x[n], data)
  returns = jax.tree.map(lambda x: x[n], study.returns)
  after = jax.tree.map(lambda x: x[jnp.minimum(n + 1, count - 1)], data)
  used_N = (here.model_N != SMALL).astype(jnp.float32)
  regime = draw_regime(keys[1:5], used_N)
  next_regime = regime._replace(left_N=regime.left_N - used_N)
  estimates = _estimate(fitted.target_nets, scale, next_regime, after.states)
  paid_N = regime.weigh(here.gain_N, here.cost_N)
  target_N = compute_target(paid_N, here.last_N, *estimates, next_regime.left_N)
  use_returns = done <= int(config.return_share * config.updates)
  target_N = jnp.where(use_returns, regime.weigh(*returns), target_N)
  noise_NxD = jax.random.normal(keys[5], here.states.hidden_NxD.shape)
  noise_NxD = config.noise * scale.spread_D[None] * noise_NxD
  noisy = here.states._replace(hidden_NxD=here.states.hidden_NxD + noise_NxD)

  def compute_loss(nets: Nets) -> jax.Array:
    """Compute the mean squared distance to the targets."""
    value_N, advantage_NxA = _estimate(nets, scale, regime, noisy)
    chosen = jnp.take_along_axis(advantage_NxA, here.model_N[:, None], axis=1)[:, 0]
    return jnp.mean((value_N + chosen - target_N) ** 2)

  loss, gradient = jax.value_and_grad(compute_loss)(fitted.nets)
  return _apply_gradient(optimizer, fitted, gradient), loss


def _apply_gradient(
  optimizer: optax.GradientTransformation, fitted: Fit, gradient: Nets
) -> Fit:
  """Step the nets; their target networks follow slowly."""
  updates, state = optimizer.update(gradient, fitted.optimizer_state, fitted.nets)
  nets = optax.apply_updates(fitted.nets, updates)

  def follow(old: jax.Array, new: jax.Array) -> jax.Array:
    """Move a target towards its net."""
    return old + TARGET_RATE * (new - old)

  return Fit(nets, jax.tree.map(follow, fitted.target_nets, nets), state)


def load_heads(files: RouterFiles) -> Heads:
  """Load the heads in a run's directory.

  Raises:
    ValueError: they are missing or damaged.
  """
  path = files.checkpoints("value") / HEADS
  try:
    with np.load(path) as stored:
      leaves = list(stored.values())
    for x in leaves:
      check_finite(x, "heads")
    heads = jax.tree.unflatten(STRUCTURE, leaves)
    if heads.value[0][0].shape[1:2] != (heads.scale.mean_D.size + head.FACTS,):
      raise ValueError("they read other facts than this version")
    return heads
  except (ValueError, OSError, zipfile.BadZipFile) as error:
    raise ValueError(
      f"{path} is missing or damaged: remove it and run --stage=value"
    ) from error
