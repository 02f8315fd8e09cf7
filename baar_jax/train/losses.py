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
from baar_jax.train.batches import Batch
from baar_jax.train.dataset import Profile

NO_TOKEN = -1  # padding of the tokens that follow a decision
DAPO_CLIP_LOW, DAPO_CLIP_HIGH = 0.2, 0.28  # of DAPO's paper
MIN_GROUP = 2  # episodes; a smaller group has no mean to compare with
DAPO_EPS = 1e-6  # added to the spread of rewards; groups without a spread are not kept
RERUN = "see above what their environments died of, then run the same command again"
Advantages = tuple[list[Episode], np.ndarray, dict[str, float]]  # kept episodes, adv_B, metrics


def next_token_loss(logits_BxSxV, batch: Batch):
  """Cross-entropy of the tokens that follow each decision, averaged over decisions that have any.

  Logits are of the whole vocabulary; `batch.token_BxSxM` is `NO_TOKEN` where fewer than M follow.
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


def sft_batch_loss(logits_BxSxA, batch: Batch):
  """The batch's share of the SFT loss."""
  loss = batch.decision_share * sft_loss(logits_BxSxA, batch.action_BxS, batch.mask_BxS)
  return loss, {"loss": loss}


def bopo_loss(config: BoPOConfig, logits_BxSxA, batch: Batch):
  """The policy loss, plus kl_beta times the KL to the SFT router (paper: objective of BoPO)."""
  share, mask_BxS = batch.decision_share, batch.mask_BxS
  logp_BxS = action_logp(logits_BxSxA, batch.action_BxS)
  ratio = config.ratio_level, config.clip_low, config.clip_high
  policy = policy_loss(logp_BxS, batch.logp_BxS, batch.adv_B, mask_BxS, *ratio)
  kl = exact_kl(logits_BxSxA, batch.ref_logits_BxSxA, mask_BxS)
  loss = batch.episode_share * policy + config.kl_beta * share * kl
  return loss, {"loss": loss, "kl": share * kl}


def dapo_loss(config: BoPOConfig, logits_BxSxA, batch: Batch):
  """The clipped policy loss in which each decision counts the same (DAPO, Yu et al. 2025).

  It is summed over decisions and divided by the episodes, so that its gradient is as large
  as BoPO's with ratios of trajectories at the same learning rate and eps (our choice; with a tiny
  eps AdamW would not see the difference). `config` is not read: the clips are the paper's.
  """
  logp_BxS = action_logp(logits_BxSxA, batch.action_BxS)
  ratio_BxS = jnp.exp(jnp.where(batch.mask_BxS, logp_BxS - batch.logp_BxS, 0.0))
  surrogate_BxS = _clip_surrogate(ratio_BxS, batch.adv_B[:, None], DAPO_CLIP_LOW, DAPO_CLIP_HIGH)
  decisions_per_row = batch.mask_BxS.sum() / len(batch.mask_BxS)
  loss = batch.episode_share * decisions_per_row * -masked_mean(surrogate_BxS, batch.mask_BxS)
  return loss, {"loss": loss}


def sft_loss(logits_BxSxA, action_BxS, mask_BxS):
  """Cross-entropy of the decisions over the A-way softmax (paper: BoSFT, masked to decisions).

  Args:
    logits_BxSxA: float32, one logit per model at each decision.
    action_BxS: int, the model that the reference chose.
    mask_BxS: bool, False on padding.

  Returns:
    float32 scalar in nats, averaged over real decisions; 0 if the mask is empty.
  """
  return masked_mean(-action_logp(_mask(logits_BxSxA, mask_BxS), action_BxS), mask_BxS)


def policy_loss(
  logp_BxS,
  old_logp_BxS,
  adv_B,
  mask_BxS,
  ratio_level: str = "trajectory",
  clip_low: float | None = None,
  clip_high: float | None = None,
):
  """Minus the mean over episodes of ratio x advantage (paper: objective of BoPO, first term).

  At "trajectory" level the ratio is that of whole episodes, as the paper prints it; at "decision"
  level it is the mean of the ratios of an episode's decisions (GRPO, Shao et al. 2024, Eq. 3).
  On-policy the gradients of the two differ by exactly the number of decisions of each episode.

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
    surrogate_B = _clip_surrogate(jnp.exp(log_ratio_BxS.sum(axis=1)), adv_B, clip_low, clip_high)
    surrogate_B = jnp.where(mask_BxS.any(axis=1), surrogate_B, 0.0)
  elif ratio_level == "decision":
    surrogate_BxS = _clip_surrogate(jnp.exp(log_ratio_BxS), adv_B[:, None], clip_low, clip_high)
    decisions_B = jnp.maximum(mask_BxS.sum(axis=1), 1)
    surrogate_B = jnp.where(mask_BxS, surrogate_BxS, 0.0).sum(axis=1) / decisions_B
  else:
    raise ValueError(f"ratio_level is {ratio_level!r}; use 'trajectory' or 'decision'")
  return -surrogate_B.mean()


def exact_kl(logits_BxSxA, ref_logits_BxSxA, mask_BxS):
  """KL(pi || pi_ref) in nats, summed over the A models, averaged over real decisions.

  The paper has the usual per-token estimate in mind; with A logits the sum is exact (our choice).
  `ref_logits_BxSxA` are the SFT router's. The result is 0 if the mask is empty.
  """
  logp_BxSxA = jax.nn.log_softmax(_mask(logits_BxSxA, mask_BxS))
  ref_logp_BxSxA = jax.nn.log_softmax(_mask(ref_logits_BxSxA, mask_BxS))
  return masked_mean((jnp.exp(logp_BxSxA) * (logp_BxSxA - ref_logp_BxSxA)).sum(axis=-1), mask_BxS)


def action_logp(logits_BxSxA, action_BxS):
  """Log-probability in nats of each decision: float32 [B, S]."""
  logp_BxSxA = jax.nn.log_softmax(logits_BxSxA)
  return jnp.take_along_axis(logp_BxSxA, action_BxS[:, :, None], axis=2)[:, :, 0]


def masked_mean(value_BxS, mask_BxS):
  """The mean over real decisions; 0 if the mask is empty."""
  return jnp.where(mask_BxS, value_BxS, 0.0).sum() / jnp.maximum(mask_BxS.sum(), 1)


def _mask(logits_BxSxA, mask_BxS):
  """The logits, 0 on padding, whose values must not make the gradient nan."""
  return jnp.where(mask_BxS[:, :, None], logits_BxSxA, 0.0)


def _clip_surrogate(ratio, adv, clip_low, clip_high):
  """ratio x advantage; with a clip the smaller of this and clipped ratio x advantage (PPO)."""
  if clip_low is None and clip_high is None:
    return ratio * adv
  low = None if clip_low is None else 1.0 - clip_low
  high = None if clip_high is None else 1.0 + clip_high
  return jnp.minimum(ratio * adv, jnp.clip(ratio, low, high) * adv)


@dataclasses.dataclass(frozen=True)
class Method:
  """A way to train a router."""

  # loss(logits_BxSxA, batch) of stored episodes, loss(config, logits_BxSxA, batch) of rollouts ->
  # the batch's share of the loss, and of metrics.
  loss: Callable
  # compute_advantages(episodes, profiles, references, lam, config): of a rollout batch, with
  # profiles and references by task id; None learns from stored episodes.
  compute_advantages: Callable[..., Advantages] | None = None
  whole_vocabulary: bool = False  # logits of all words in place of the decisions'
  anchored: bool = False  # the loss reads the SFT router's logits
  # A gradient step waits until as many groups are kept as are rolled out for one update (DAPO).
  dynamic_sampling: bool = False


def bopo_advantages(episodes, profiles, references, lam, config) -> Advantages:
  """The reference-guided advantages of a rollout batch, in groups of at least `MIN_GROUP`.

  Raises ValueError if there is no such group.
  """
  all_groups = group_by_task(episodes)
  groups = {task_id: group for task_id, group in all_groups.items() if len(group) >= MIN_GROUP}
  if not groups:
    count = len(all_groups)
    raise ValueError(f"none of the {count} tasks of this batch has {MIN_GROUP} episodes: {RERUN}")
  kept, reward_B, adv_B, clipped_groups = [], [], [], 0
  for task_id, group in groups.items():
    reward = partial(compute_reward, profile=profiles[task_id], lam=lam, config=config)
    reward_G = np.array([reward(e) for e in group])
    # The ablation's reference is no higher than the mean, so that the mean is the baseline.
    reference = reward(references[task_id]) if config.reference_guided else reward_G.min()
    eps, clip = config.advantage_eps, config.advantage_clip
    adv_G = rewards.reference_advantage(reward_G, reference, eps, clip)
    kept.extend(group)
    reward_B.extend(reward_G)
    adv_B.extend(adv_G)
    clipped_groups += int((np.abs(adv_G) >= clip).any())
  metrics = summarize_rollouts(kept, reward_B) | {"clipped": clipped_groups}
  return kept, np.array(adv_B), metrics


def compute_reward(episode: Episode, profile: Profile, lam: float, config: BoPOConfig) -> float:
  """R(tau, x) of an episode of a profiled task (paper: boundary-relative reward)."""
  cost_norm = rewards.normalized_cost(episode.cost_usd, profile.cost_small, profile.cost_large)
  hard = profile.difficulty == "hard"
  r_success, r_hard = config.r_success, config.r_hard
  return rewards.boundary_reward(episode.success, hard, cost_norm, lam, r_success, r_hard)


def dapo_advantages(episodes, profiles, references, lam, config) -> Advantages:
  """(R - mean) / std within each group with both successes and failures (DAPO).

  R is 1[success] - lam * C, and C the dollars over always-LARGE's mean of all training tasks: one
  unit for all (our choice, so that lam means the same in every environment). No difficulty, no
  reference and no task's own costs enter (paper: vanilla RL). The metrics are of all episodes.
  Raises ValueError if there are no episodes.
  """
  del references, config
  if not episodes:
    raise ValueError(f"no episode of this batch came to its end: {RERUN}")
  unit_usd = np.mean([profile.cost_large for profile in profiles.values()])
  groups = group_by_task(episodes).values()
  kept, reward_B, adv_B, kept_groups = [], [], [], 0
  for group in groups:
    reward_G = np.array([e.success - lam * e.cost_usd / unit_usd for e in group])
    reward_B.extend(reward_G)
    if len({e.success for e in group}) == 2:
      kept.extend(group)
      adv_B.extend((reward_G - reward_G.mean()) / (reward_G.std() + DAPO_EPS))
      kept_groups += 1
  metrics = summarize_rollouts([e for group in groups for e in group], reward_B)
  return kept, np.array(adv_B), metrics | {"kept_groups": kept_groups / len(groups)}


def group_by_task(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
  """The groups of a rollout batch by task id, in the order of their first episodes."""
  groups: dict[str, list[Episode]] = {}
  for episode in episodes:
    groups.setdefault(episode.task_id, []).append(episode)
  return groups


def summarize_rollouts(episodes: Sequence[Episode], reward_B: Sequence[float]) -> dict[str, float]:
  """What a rollout batch adds to the log."""
  return {
    "reward": float(np.mean(reward_B)),
    "success": sum(e.success for e in episodes) / len(episodes),
    "large_share": sum(e.large_calls for e in episodes) / sum(len(e.steps) for e in episodes),
    "cost_usd": sum(e.cost_usd for e in episodes) / len(episodes),
  }


METHODS = {
  "pretrain": Method(next_token_loss, whole_vocabulary=True),
  "sft": Method(sft_batch_loss),
  "cascade": Method(sft_batch_loss),
  "single-turn": Method(sft_batch_loss),
  "bopo": Method(bopo_loss, bopo_advantages, anchored=True),
  "vanilla": Method(dapo_loss, dapo_advantages, dynamic_sampling=True),
}
