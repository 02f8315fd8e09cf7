"""The losses and the advantages, and every method that trains a router as a row of one table."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.config import BoPOConfig
from baar_jax.episode import Episode
from baar_jax.train import rewards
from baar_jax.train.batches import (
  ACTED,
  FAILURES,
  NO_TOKEN,
  OUTCOMES,
  SAMPLED,
  Batch,
  Labels,
  Loss,
)

DAPO_CLIP_LOW, DAPO_CLIP_HIGH = 0.2, 0.28  # of DAPO's paper
DAPO_EPS = 1e-6  # added to the spread of rewards; groups without a spread are not kept


@dataclasses.dataclass(frozen=True)
class Method:
  """A way to train a router."""

  loss: Loss
  labels: Labels = ACTED
  # Of a method that rolls out groups; profiles and references are by task id:
  # (groups, profiles, references, lam) -> episodes that are kept, their advantages, metrics.
  compute_advantages: Callable | None = None
  anchored: bool = False  # the loss reads the SFT router's logits
  # A gradient step waits for kept groups of as many tasks as one update has (DAPO).
  dynamic_sampling: bool = False


def next_token_loss(logits_BxSxV, batch: Batch) -> dict:
  """Cross-entropy of the M tokens that follow each decision, averaged over decisions with any."""
  real_BxSxM = batch.token_BxSxM != NO_TOKEN
  token_BxSxM = jnp.where(real_BxSxM, batch.token_BxSxM, 0)
  logp_BxSxM = jnp.take_along_axis(
    jax.nn.log_softmax(logits_BxSxV), token_BxSxM, axis=2
  )
  logp_BxS = jnp.where(real_BxSxM, logp_BxSxM, 0.0).sum(axis=2)
  loss_BxS = -logp_BxS / jnp.maximum(real_BxSxM.sum(axis=2), 1)
  mask_BxS = batch.mask_BxS & real_BxSxM.any(axis=2)
  total = jnp.where(mask_BxS, loss_BxS, 0.0).sum()
  return {"loss": batch.decision_share * total / jnp.maximum(mask_BxS.sum(), 1)}


def sft_batch_loss(logits_BxSxA, batch: Batch) -> dict:
  loss = sft_loss(logits_BxSxA, batch.action_BxS, batch.mask_BxS)
  return {"loss": batch.decision_share * loss}


def bopo_loss(config: BoPOConfig, logits_BxSxA, batch: Batch) -> dict:
  """The policy loss, plus kl_beta times the KL to the SFT router (paper: objective of BoPO)."""
  mask_BxS, logp_BxS = batch.mask_BxS, action_logp(logits_BxSxA, batch.action_BxS)
  ratio = config.ratio_level, config.clip_low, config.clip_high
  policy = policy_loss(logp_BxS, batch.logp_BxS, batch.adv_B, mask_BxS, *ratio)
  kl = exact_kl(logits_BxSxA, batch.ref_logits_BxSxA, mask_BxS)
  loss = batch.episode_share * policy + config.kl_beta * batch.decision_share * kl
  return {"loss": loss, "kl": batch.decision_share * kl}


def dapo_loss(logits_BxSxA, batch: Batch) -> dict:
  """The clipped policy loss in which each decision counts the same (DAPO, Yu et al. 2025).

  It is summed over decisions and divided by the episodes, so that its gradient is as large as
  BoPO's with ratios of trajectories at the same learning rate and eps (our choice).
  """
  logp_BxS = action_logp(logits_BxSxA, batch.action_BxS)
  ratio_BxS = jnp.exp(jnp.where(batch.mask_BxS, logp_BxS - batch.logp_BxS, 0.0))
  surrogate_BxS = _clip_surrogate(
    ratio_BxS, batch.adv_B[:, None], DAPO_CLIP_LOW, DAPO_CLIP_HIGH
  )
  decisions_per_row = batch.mask_BxS.sum() / len(batch.mask_BxS)
  loss = (
    batch.episode_share
    * decisions_per_row
    * -masked_mean(surrogate_BxS, batch.mask_BxS)
  )
  return {"loss": loss}


def sft_loss(logits_BxSxA, action_BxS, mask_BxS):
  """Cross-entropy in nats of the chosen models over the A-way softmax (paper: BoSFT).

  It is averaged over real decisions, where `mask_BxS` is True; 0 if there is none.
  """
  return masked_mean(-action_logp(_mask(logits_BxSxA, mask_BxS), action_BxS), mask_BxS)


def policy_loss(
  logp_BxS,
  old_logp_BxS,
  adv_B,
  mask_BxS,
  ratio_level="trajectory",
  clip_low=None,
  clip_high=None,
):
  """Minus the mean over episodes of ratio x advantage (paper: objective of BoPO, first term).

  At "trajectory" level the ratio is that of whole episodes, as the paper prints it; at "decision"
  level it is the mean of the ratios of an episode's decisions (GRPO, Shao et al. 2024, Eq. 3).

  Args:
    logp_BxS: float32, log pi(a_s) now, in nats.
    old_logp_BxS: float32, the same when the episode was sampled.
    adv_B: float32, one per episode; a constant.
    mask_BxS: bool, False on padding and on forced decisions.
    ratio_level: "trajectory" or "decision"; ValueError for any other.
    clip_low, clip_high: the ratio is trusted within [1 - clip_low, 1 + clip_high] (PPO's
      pessimistic minimum); None leaves that side open, as the paper does.

  Returns:
    float32 scalar to minimise; an episode without real decisions counts 0.
  """
  # Mask before exp: padding may overflow, and 0 * inf is a nan gradient.
  log_ratio_BxS = jnp.where(mask_BxS, logp_BxS - old_logp_BxS, 0.0)
  adv_B = jax.lax.stop_gradient(adv_B)
  if ratio_level == "trajectory":
    surrogate_B = _clip_surrogate(
      jnp.exp(log_ratio_BxS.sum(axis=1)), adv_B, clip_low, clip_high
    )
    surrogate_B = jnp.where(mask_BxS.any(axis=1), surrogate_B, 0.0)
  elif ratio_level == "decision":
    surrogate_BxS = _clip_surrogate(
      jnp.exp(log_ratio_BxS), adv_B[:, None], clip_low, clip_high
    )
    decisions_B = jnp.maximum(mask_BxS.sum(axis=1), 1)
    surrogate_B = jnp.where(mask_BxS, surrogate_BxS, 0.0).sum(axis=1) / decisions_B
  else:
    raise ValueError(f"ratio_level is {ratio_level!r}; use 'trajectory' or 'decision'")
  return -surrogate_B.mean()


def exact_kl(logits_BxSxA, ref_logits_BxSxA, mask_BxS):
  """KL(pi || pi_ref) in nats, averaged over real decisions; 0 if there is none.

  With A logits the sum over models is exact, where the paper has an estimate in mind (our choice).
  """
  logp_BxSxA = jax.nn.log_softmax(_mask(logits_BxSxA, mask_BxS))
  ref_logp_BxSxA = jax.nn.log_softmax(_mask(ref_logits_BxSxA, mask_BxS))
  return masked_mean(
    (jnp.exp(logp_BxSxA) * (logp_BxSxA - ref_logp_BxSxA)).sum(axis=-1), mask_BxS
  )


def action_logp(logits_BxSxA, action_BxS):
  """Log-probability in nats of each decision: float32 [B, S]."""
  logp_BxSxA = jax.nn.log_softmax(logits_BxSxA)
  return jnp.take_along_axis(logp_BxSxA, action_BxS[:, :, None], axis=2)[:, :, 0]


def masked_mean(value_BxS, mask_BxS):
  """The mean over real decisions; 0 if the mask is empty."""
  return jnp.where(mask_BxS, value_BxS, 0.0).sum() / jnp.maximum(mask_BxS.sum(), 1)


def _mask(logits_BxSxA, mask_BxS):
  """The logits, 0 on padding, where any number could make the gradient nan."""
  return jnp.where(mask_BxS[:, :, None], logits_BxSxA, 0.0)


def _clip_surrogate(ratio, adv, clip_low, clip_high):
  """ratio x advantage; with a clip the smaller of this and clipped ratio x advantage (PPO)."""
  if clip_low is None and clip_high is None:
    return ratio * adv
  low = None if clip_low is None else 1.0 - clip_low
  high = None if clip_high is None else 1.0 + clip_high
  return jnp.minimum(ratio * adv, jnp.clip(ratio, low, high) * adv)


def bopo_advantages(config: BoPOConfig, groups, profiles, references, lam):
  """The reference-guided advantages of groups (paper, Eq. advantage)."""
  eps, clip = config.advantage_eps, config.advantage_clip
  reward_B, adv_B, clipped_groups = [], [], 0
  for group in groups:
    profile, episodes = (
      profiles[group[0].task_id],
      [*group, references[group[0].task_id]],
    )
    costs, successes = [e.cost_usd for e in episodes], [e.success for e in episodes]
    cost_norm = rewards.normalized_cost(costs, profile.cost_small, profile.cost_large)
    weights = lam, config.r_success, config.r_hard
    hard = profile.difficulty == "hard"
    *reward_G, reference = rewards.boundary_reward(successes, hard, cost_norm, *weights)
    # The ablation's reference is no higher than the mean, so that the mean is the baseline.
    reference = reference if config.reference_guided else min(reward_G)
    adv_G = rewards.reference_advantage(reward_G, reference, eps, clip)
    reward_B.extend(reward_G)
    adv_B.extend(adv_G)
    clipped_groups += int((np.abs(adv_G) >= clip).any())
  metrics = summarize_rollouts(groups, reward_B) | {"clipped_groups": clipped_groups}
  return sum(groups, []), adv_B, metrics


def dapo_advantages(groups, profiles, references, lam):
  """(R - mean) / std within each group with both successes and failures (DAPO).

  R is 1[success] - lam * C (paper: vanilla RL), and C the dollars over always-LARGE's mean of all
  training tasks, so that lam means the same in every environment (our choice). The metrics are of
  all episodes.
  """
  unit_usd = np.mean([profile.cost_large for profile in profiles.values()])
  kept_groups, reward_B, adv_B = [], [], []
  for group in groups:
    reward_G = np.array([e.success - lam * e.cost_usd / unit_usd for e in group])
    reward_B.extend(reward_G)
    if len({e.success for e in group}) == 2:
      kept_groups.append(group)
      adv_B.extend((reward_G - reward_G.mean()) / (reward_G.std() + DAPO_EPS))
  metrics = summarize_rollouts(groups, reward_B) | {
    "kept_share": len(kept_groups) / len(groups)
  }
  return sum(kept_groups, []), adv_B, metrics


def summarize_rollouts(
  groups: Sequence[list[Episode]], reward_B: Sequence[float]
) -> dict:
  """What a rollout batch adds to the log."""
  episodes = sum(groups, [])
  return {
    "reward": float(np.mean(reward_B)),
    "success": sum(e.success for e in episodes) / len(episodes),
    "large_share": sum(e.large_calls for e in episodes)
    / sum(len(e.steps) for e in episodes),
    "cost_usd": sum(e.cost_usd for e in episodes) / len(episodes),
  }


def bopo_method(config: BoPOConfig) -> Method:
  """Return BoPO's method (paper: BoPO), perhaps without a part of it."""
  return Method(
    partial(bopo_loss, config),
    SAMPLED,
    partial(bopo_advantages, config),
    anchored=True,
  )


PRETRAINING = Method(next_token_loss, OUTCOMES)
IMITATION = Method(sft_batch_loss)
FAILURE = Method(sft_batch_loss, FAILURES)
DAPO = Method(dapo_loss, SAMPLED, dapo_advantages, dynamic_sampling=True)
