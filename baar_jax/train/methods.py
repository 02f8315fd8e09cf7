"""The methods that train a router, as rows of one table: a loss, and advantages of rollouts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.config import BoPOConfig
from baar_jax.episode import Episode
from baar_jax.train import losses, rewards
from baar_jax.train.batches import Batch
from baar_jax.train.dataset import Profile

MIN_GROUP = 2  # episodes; a smaller group has no mean to compare with
NO_TOKEN = -1  # padding of the tokens that follow a decision
DAPO_CLIP_LOW, DAPO_CLIP_HIGH = 0.2, 0.28  # of DAPO's paper
DAPO_EPS = 1e-6  # added to the spread of rewards; groups without a spread are not kept
DIED = "see above what their environments died of, then run the same command again"
Advantages = tuple[list[Episode], np.ndarray, dict[str, float]]  # kept episodes, adv_B, metrics


@dataclasses.dataclass(frozen=True)
class Method:
  """A way to train a router.

  Attributes:
    loss: loss(logits_BxSxA, batch) for stored episodes, loss(config, logits_BxSxA, batch) with a
      BoPOConfig for rollouts -> (the batch's share of the loss, its share of metrics).
    compute_advantages: of the episodes of a rollout batch; None learns from stored episodes.
    whole_vocabulary: whether the logits are those of all words in place of the decisions'.
    anchored: whether the loss reads the SFT router's logits.
    dynamic_sampling: whether a gradient step waits until as many groups are kept as are rolled out
      for one update (DAPO).
  """

  loss: Callable
  compute_advantages: Callable[..., Advantages] | None = None
  whole_vocabulary: bool = False
  anchored: bool = False
  dynamic_sampling: bool = False


def next_token_loss(logits_BxSxV, batch: Batch):
  """Cross-entropy of the tokens that follow each decision, averaged over decisions that have any.

  Args:
    logits_BxSxV: float32, one logit per word of the vocabulary at each decision.
    batch: with `token_BxSxM`, `NO_TOKEN` where fewer than M follow.
  """
  real_BxSxM = batch.token_BxSxM != NO_TOKEN
  token_BxSxM = jnp.where(real_BxSxM, batch.token_BxSxM, 0)
  logp_BxSxM = jnp.take_along_axis(jax.nn.log_softmax(logits_BxSxV), token_BxSxM, axis=2)
  logp_BxS = jnp.where(real_BxSxM, logp_BxSxM, 0.0).sum(axis=2)
  loss_BxS = -logp_BxS / jnp.maximum(real_BxSxM.sum(axis=2), 1)
  mask_BxS = batch.mask_BxS & real_BxSxM.any(axis=2)
  total = jnp.where(mask_BxS, loss_BxS, 0.0).sum()
  loss = batch.decision_share * total / jnp.maximum(mask_BxS.sum(), 1)
  return loss, {"loss": loss}


def sft_step_loss(logits_BxSxA, batch: Batch):
  """The SFT loss, and how often the more probable model is right and is LARGE."""
  share = batch.decision_share
  loss = share * losses.sft_loss(logits_BxSxA, batch.action_BxS, batch.mask_BxS)
  choice_BxS = logits_BxSxA.argmax(-1)
  accuracy = losses.masked_mean(choice_BxS == batch.action_BxS, batch.mask_BxS)
  large_share = losses.masked_mean(choice_BxS > 0, batch.mask_BxS)
  return loss, {"loss": loss, "accuracy": share * accuracy, "large_share": share * large_share}


def bopo_loss(config: BoPOConfig, logits_BxSxA, batch: Batch):
  """Minus the gain, plus the distance to the SFT router (paper: objective of BoPO)."""
  logp_BxS = losses.action_logp(logits_BxSxA, batch.action_BxS)
  arrays = logp_BxS, batch.logp_BxS, batch.adv_B, batch.mask_BxS
  options = config.ratio_level, config.clip_low, config.clip_high
  gain_loss = batch.episode_share * losses.policy_loss(*arrays, *options)
  kl = losses.exact_kl(logits_BxSxA, batch.ref_logits_BxSxA, batch.mask_BxS)
  loss = gain_loss + config.kl_beta * batch.decision_share * kl
  entropy = batch.decision_share * losses.entropy(logits_BxSxA, batch.mask_BxS)
  return loss, {"loss": loss, "kl": batch.decision_share * kl, "entropy": entropy}


def dapo_step_loss(config: BoPOConfig, logits_BxSxA, batch: Batch):
  """DAPO's loss, in which each decision of the gradient step counts the same.

  It is summed over decisions and divided by the step's episodes, so that its gradient is as large
  as BoPO's with ratios of trajectories at the same learning rate and eps (our choice; with a tiny
  eps AdamW would not see the difference).
  """
  del config
  decisions_per_row = batch.mask_BxS.sum() / len(batch.mask_BxS)
  logp_BxS = losses.action_logp(logits_BxSxA, batch.action_BxS)
  arrays = logp_BxS, batch.logp_BxS, batch.adv_B, batch.mask_BxS
  mean = losses.dapo_loss(*arrays, DAPO_CLIP_LOW, DAPO_CLIP_HIGH)
  loss = batch.episode_share * decisions_per_row * mean
  entropy = batch.decision_share * losses.entropy(logits_BxSxA, batch.mask_BxS)
  return loss, {"loss": loss, "entropy": entropy}


def episode_reward(episode: Episode, profile: Profile, lam: float, config: BoPOConfig) -> float:
  """R(tau, x) of an episode of a profiled task (paper: boundary-relative reward)."""
  cost_norm = rewards.normalized_cost(episode.cost_usd, profile.cost_small, profile.cost_large)
  hard = profile.difficulty == "hard"
  r_success, r_hard = config.r_success, config.r_hard
  return rewards.boundary_reward(episode.success, hard, cost_norm, lam, r_success, r_hard)


def bopo_advantages(
  episodes: Sequence[Episode],
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  lam: float,
  config: BoPOConfig,
) -> Advantages:
  """The reference-guided advantages of a rollout batch, in groups of at least `MIN_GROUP`.

  Raises:
    ValueError: there is no such group.
  """
  all_groups = by_task(episodes)
  groups = [group for group in all_groups if len(group) >= MIN_GROUP]
  if not groups:
    count = len(all_groups)
    raise ValueError(f"none of the {count} tasks of this batch has {MIN_GROUP} episodes: {DIED}")

  def reward(episode: Episode) -> float:
    return episode_reward(episode, profiles[episode.task_id], lam, config)

  def advantage(group: list[Episode], reward_G: np.ndarray) -> np.ndarray:
    # The ablation's reference is no higher than the mean, so that the mean is the baseline.
    guided = config.reference_guided
    reference = reward(references[group[0].task_id]) if guided else reward_G.min()
    eps, clip = config.advantage_eps, config.advantage_clip
    return rewards.reference_advantage(reward_G, reference, eps, clip)

  kept, adv_B, metrics = _group_advantages(groups, reward, advantage)
  clipped_B = np.abs(adv_B) >= config.advantage_clip
  metrics["clipped"] = len({e.task_id for e, clipped in zip(kept, clipped_B) if clipped})
  return kept, adv_B, metrics


def dapo_advantages(
  episodes: Sequence[Episode],
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  lam: float,
  config: BoPOConfig,
) -> Advantages:
  """(R - mean) / std within each group that is neither all good nor all bad (DAPO).

  R is 1[success] - lam * C, and C the dollars over always-LARGE's mean of all training tasks: one
  unit for all (our choice, so that lam means the same in every environment). No difficulty, no
  reference and no task's own costs enter (paper: vanilla RL). The metrics are of all episodes.

  Raises:
    ValueError: there are no episodes.
  """
  del references, config
  if not episodes:
    raise ValueError(f"no episode of this batch came to its end: {DIED}")
  unit_usd = np.mean([profile.cost_large for profile in profiles.values()])
  groups = by_task(episodes)

  def reward(episode: Episode) -> float:
    return episode.success - lam * episode.cost_usd / unit_usd

  def advantage(group: list[Episode], reward_G: np.ndarray) -> np.ndarray | None:
    if len({e.success for e in group}) == 1:
      return None
    return (reward_G - reward_G.mean()) / (reward_G.std() + DAPO_EPS)

  kept, adv_B, metrics = _group_advantages(groups, reward, advantage)
  metrics["kept_groups"] = len({e.task_id for e in kept}) / len(groups)
  return kept, adv_B, metrics


def by_task(episodes: Sequence[Episode]) -> list[list[Episode]]:
  """The groups of a rollout batch, in the order of their first episodes."""
  groups: dict[str, list[Episode]] = {}
  for episode in episodes:
    groups.setdefault(episode.task_id, []).append(episode)
  return list(groups.values())


def _group_advantages(
  groups: Sequence[list[Episode]],
  reward: Callable[[Episode], float],
  advantage: Callable[[list[Episode], np.ndarray], np.ndarray | None],
) -> Advantages:
  """The groups whose advantage is not None; `large_share` is of the decisions of all groups."""
  kept, adv_parts, reward_parts = [], [np.zeros(0)], []
  for group in groups:
    reward_G = np.array([reward(e) for e in group])
    reward_parts.append(reward_G)
    if (adv_G := advantage(group, reward_G)) is not None:
      kept += group
      adv_parts.append(adv_G)
  episodes = [e for group in groups for e in group]
  metrics = {
    "reward": float(np.concatenate(reward_parts).mean()),
    "success": sum(e.success for e in episodes) / len(episodes),
    "large_share": sum(e.large_calls for e in episodes) / sum(len(e.steps) for e in episodes),
    "cost_usd": sum(e.cost_usd for e in episodes) / len(episodes),
  }
  return kept, np.concatenate(adv_parts), metrics


METHODS = {
  "pretrain": Method(next_token_loss, whole_vocabulary=True),
  "sft": Method(sft_step_loss),
  "cascade": Method(sft_step_loss),
  "single-turn": Method(sft_step_loss),
  "bopo": Method(bopo_loss, bopo_advantages, anchored=True),
  "vanilla": Method(dapo_step_loss, dapo_advantages, dynamic_sampling=True),
}
