"""Stage bopo: the router improves on its own episodes, anchored to the boundaries (paper: BoPO)."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax

from baar_jax.config import SEEDS_BEFORE_BOPO, BoPOConfig
from baar_jax.episode import Episode
from baar_jax.rollout.entries import rollouts_name
from baar_jax.rollout.live import Job
from baar_jax.router.build import abstract_model
from baar_jax.router.policy import RouterPolicy, Sample
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.stages.sft import load_sft
from baar_jax.train import losses, rewards
from baar_jax.train.batches import Batch
from baar_jax.train.checkpoint import Checkpoints
from baar_jax.train.dataset import (
  Profile,
  load_profiles,
  load_references,
  success,
  task_batches,
)
from baar_jax.train.trainer import Batcher, Scorer, Trainer, clipped_adamw, load_trained

SAVE_EVERY = 5  # updates
MIN_GROUP = 2  # episodes; a smaller group has no mean to compare with
DIED = "see above what their environments died of, then run the same command again"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Signal:
  """What the loss needs beside a micro-batch.

  Attributes:
    adv_B: float32, the episodes' advantages.
    ref_logits_BxSxA: float32, the SFT router's; None for a loss without it.
    episode_share, decision_share: of the whole batch's episodes (rows) and decisions.
  """

  adv_B: np.ndarray
  ref_logits_BxSxA: jax.Array | None
  episode_share: float
  decision_share: float


def improvement(config: BoPOConfig, logits_BxSxA, batch: Batch, signal: Signal):
  """A micro-batch's share of the BoPO loss (paper: objective of BoPO, to minimise)."""
  gain_loss = signal.episode_share * losses.policy_loss(
    losses.action_logp(logits_BxSxA, batch.action_BxS),
    batch.logp_BxS,
    signal.adv_B,
    batch.mask_BxS,
    config.ratio_level,
    config.clip_low,
    config.clip_high,
  )
  kl = losses.exact_kl(logits_BxSxA, signal.ref_logits_BxSxA, batch.mask_BxS)
  loss = gain_loss + config.kl_beta * signal.decision_share * kl
  metrics = {
    "loss": loss,
    "kl": signal.decision_share * kl,
    "entropy": signal.decision_share * losses.entropy(logits_BxSxA, batch.mask_BxS),
  }
  return loss, metrics


def episode_reward(episode: Episode, profile: Profile, lam: float, config: BoPOConfig) -> float:
  """R(tau, x) of an episode of a profiled task (paper: boundary-relative reward)."""
  return float(
    rewards.boundary_reward(
      success(episode),
      profile.difficulty == "hard",
      rewards.normalized_cost(episode.cost_usd, profile.cost_small, profile.cost_large),
      lam,
      config.r_success,
      config.r_hard,
    )
  )


def by_task(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
  """The groups of a rollout batch, in the order of their first episodes."""
  groups: dict[str, list[Episode]] = {}
  for episode in episodes:
    groups.setdefault(episode.task_id, []).append(episode)
  return groups


def advantages(
  episodes: Sequence[Episode],
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  lam: float,
  config: BoPOConfig,
) -> tuple[list[Episode], np.ndarray, dict[str, float]]:
  """The reference-guided advantages of a rollout batch, group by group.

  Args:
    episodes: of several tasks; those of one task are a group.

  Returns:
    The episodes of groups that are large enough, adv_B, and metrics of the batch.

  Raises:
    ValueError: no task has `MIN_GROUP` episodes.
  """
  groups = by_task(episodes)
  kept, advantage_parts, reward_parts, clipped = [], [], [], 0
  for task_id, group in groups.items():
    if len(group) < MIN_GROUP:
      continue
    profile = profiles[task_id]
    reward_G = np.array([episode_reward(e, profile, lam, config) for e in group])
    # No higher than the mean, so that the group's mean is the baseline: the ablation.
    reference = reward_G.min()
    if config.reference_guided:
      reference = episode_reward(references[task_id], profile, lam, config)
    adv_G = rewards.reference_advantage(
      reward_G, reference, config.advantage_eps, config.advantage_clip
    )
    clipped += bool(np.any(np.abs(adv_G) >= config.advantage_clip))
    kept.extend(group)
    reward_parts.append(reward_G)
    advantage_parts.append(adv_G)
  if not kept:
    raise ValueError(
      f"none of the {len(groups)} tasks of this batch has {MIN_GROUP} episodes: {DIED}"
    )
  metrics = rollout_metrics(kept, np.concatenate(reward_parts)) | {"clipped": clipped}
  return kept, np.concatenate(advantage_parts), metrics


def rollout_metrics(episodes: Sequence[Episode], reward_B: np.ndarray) -> dict[str, float]:
  """Means over rolled-out episodes and their rewards; `large_share` is of their decisions."""
  decisions = sum(len(e.steps) for e in episodes)
  return {
    "reward": float(reward_B.mean()),
    "success": sum(map(success, episodes)) / len(episodes),
    "large_share": sum(e.large_calls for e in episodes) / decisions,
    "cost_usd": sum(e.cost_usd for e in episodes) / len(episodes),
  }


@dataclasses.dataclass(frozen=True)
class Method:
  """A way to learn from one's own episodes.

  Attributes:
    family: names its checkpoints and policies.
    loss: as `improvement`.
    weigh: as `advantages`.
    anchored: whether the loss needs the SFT router's logits.
    pools: whether a gradient step waits until as many groups are kept as are sampled at a time.
  """

  family: str
  loss: Callable
  weigh: Callable
  anchored: bool = True
  pools: bool = False


BOPO = Method("bopo", improvement, advantages)


def directory(run: Run, lam: float, family: str) -> Path:
  return run.checkpoints(f"{run.ablation or family}-lam{lam:g}")


def load_bopo(run: Run, lam: float, family: str = BOPO.family) -> Qwen2:
  """The router trained at this lam. Raises ValueError if it has not been trained to its end."""
  model = abstract_model(run.config.router, View(run.config.router, run.tokenizer).decision_ids)
  stage = "bopo" if family == BOPO.family and not run.ablation else "baselines"
  place = directory(run, lam, family)
  return load_trained(place, run.config.bopo.updates, model, run.mesh, stage)


def make_optimizer(config: BoPOConfig) -> optax.GradientTransformation:
  """AdamW with clipping at a constant learning rate (paper: appendix; clipping is our choice)."""
  return clipped_adamw(config.learning_rate, config.clip_norm, config.adam_eps)


def main(run: Run) -> None:
  run.require("references")
  for lam in run.config.bopo.lam:
    train(run, lam)


def train(run: Run, lam: float, method: Method = BOPO) -> None:
  """Trains one router from the SFT router, or goes on from its newest checkpoint."""
  config = run.config.bopo
  checkpoints = Checkpoints(directory(run, lam, method.family), run.config)
  done = checkpoints.update or 0
  if done == config.updates:
    checkpoints.close()
    return
  profiles, references = (
    load_profiles(run.store, run.config),
    load_references(run.store, run.config),
  )
  tasks = [task for task in run.store.tasks("train") if task.id in references]
  view = View(run.config.router, run.tokenizer)
  batcher = Batcher(run.config, view, {task.id: task for task in tasks})
  anchor = load_sft(run)
  loss, optimizer = partial(method.loss, config), make_optimizer(config)
  placed = view.decision_ids, run.mesh, run.config.router.dtype
  trainer = Trainer(anchor, loss, optimizer, *placed)
  reference = Scorer(anchor, *placed) if method.anchored else None
  saved = done
  pool: list[tuple[Episode, float]] = []  # kept episodes and advantages that wait for a step
  if done:
    trainer.load(checkpoints.restore(trainer.state))
  batches = task_batches(tasks, config.tasks_per_update, run.config.seed)
  for update in range(1, config.updates + 1):
    chosen = next(batches)
    if update <= done:
      continue
    name = rollouts_name(run.ablation or method.family, lam, update)
    policy = RouterPolicy(
      name, trainer.model, view, run.config.router, Sample(name), run.live_episodes, run.mesh
    )
    first = SEEDS_BEFORE_BOPO + config.group_size * update  # other luck in every update
    jobs = [Job(task, first + g) for task in chosen for g in range(config.group_size)]
    label = f"{run.ablation or method.family} lam={lam:g} {update}/{config.updates}"
    episodes = run.collect(label, policy, jobs)
    del policy  # its cache and its copy of the router, before the gradient needs the memory
    kept, adv_B, metrics = method.weigh(episodes, profiles, references, lam, config)
    pool += zip(kept, adv_B)
    last = update == config.updates
    if pool and (last or not method.pools or len({e.task_id for e, _ in pool}) >= len(chosen)):
      kept, adv_B = zip(*pool)
      seed = run.config.seed + update
      metrics |= improve(trainer, reference, batcher, kept, np.array(adv_B), config, seed)
      pool = []
    labels = {"lam": lam, "update": update, "compiled": trainer.compiled} | run.labels
    run.log(stage=method.family, **labels, **metrics)
    # What waits is not in a checkpoint: it is weighed again from the stored episodes.
    if last or (not pool and update - saved >= SAVE_EVERY):
      checkpoints.save(update, trainer.state)
      saved = update
  checkpoints.close()


def improve(
  trainer: Trainer,
  reference: Scorer | None,
  batcher: Batcher,
  episodes: Sequence[Episode],
  adv_B: np.ndarray,
  config: BoPOConfig,
  seed: int,
) -> dict[str, float]:
  """The gradient steps on one rollout batch. Returns their mean metrics.

  In bfloat16 the log-probabilities of the rollouts, which a cache has made, are off by hundredths
  from those of a training forward, and a trajectory's ratio adds up dozens of them. There they are
  made again before the first step, by the arithmetic that they are compared with (our choice).
  """
  draw = random.Random(seed)
  batches: list[list[tuple[list[int], Batch]]] = []  # of each gradient step
  for _ in range(config.epochs):
    order = draw.sample(range(len(episodes)), len(episodes))
    for first in range(0, len(order), config.batch_episodes):
      chosen = order[first : first + config.batch_episodes]
      micro = batcher.micro_batches([episodes[i] for i in chosen], sampled_only=True)
      batches.append([([chosen[i] for i in indices], batch) for indices, batch in micro])
  if trainer.rounds:
    batches = [[(indices, _again(trainer, batch)) for indices, batch in step] for step in batches]

  steps: list[dict[str, float]] = []
  for micro in batches:
    count = sum(len(indices) for indices, _ in micro)
    decisions = max(1, sum(batch.mask_BxS.sum() for _, batch in micro))
    parts = []
    for indices, batch in micro:
      B = len(batch.mask_BxS)
      adv = np.zeros(B, np.float32)
      adv[: len(indices)] = adv_B[indices]
      shares = B / count, batch.mask_BxS.sum() / decisions
      ref_logits = None if reference is None else reference.logits(batch)
      parts.append((batch, Signal(adv, ref_logits, *map(np.float32, shares))))
    steps.append(trainer.step(parts))
  return {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}


def _again(trainer: Trainer, batch: Batch) -> Batch:
  """The batch with its decisions' log-probabilities under the trainer's parameters."""
  logp_BxS = losses.action_logp(trainer.logits(batch), batch.action_BxS)
  return dataclasses.replace(batch, logp_BxS=logp_BxS)
