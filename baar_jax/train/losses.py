"""The losses, the advantages, and a table of the methods that train a router."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.config import BoPOConfig
from baar_jax.episode import Episode
from baar_jax.train import batches, rewards
from baar_jax.train.batches import NO_TOKEN, SAMPLED, Batch, Labels, Loss, Sum, Term
from baar_jax.train.rewards import Profile

DAPO_CLIP_LOW = 0.2  # of DAPO's paper
DAPO_CLIP_HIGH = 0.28
DAPO_EPS = 1e-6  # added to the spread of rewards; groups without a spread are not kept


class RatedEpisode(NamedTuple):
  """An episode to learn from."""

  episode: Episode
  advantage: float


# (groups, profiles, references, lam) -> episodes to learn from, metrics of all.
# Profiles and references are by task id.
Advantages = Callable[
  [Sequence[list[Episode]], Mapping[str, Profile], Mapping[str, Episode], float],
  tuple[list[RatedEpisode], dict[str, float]],
]


@dataclasses.dataclass(frozen=True)
class Method:
  """A way to train a router."""

  loss: Loss
  labels: Labels = batches.ACTED
  compute_advantages: Advantages | None = None  # of a method that rolls out groups
  anchored: bool = False  # the loss reads the SFT router's logits
  # A gradient step waits for kept groups of as many tasks as one update has (DAPO).
  dynamic_sampling: bool = False


def next_token_loss(logits_BxSxV: jax.Array, batch: Batch) -> dict[str, Term]:
  """Sum the cross-entropy of the M tokens after each decision, a mean over the tokens.

  Only decisions with any token count.
  """
  real_BxSxM = batch.token_BxSxM != NO_TOKEN
  token_BxSxM = jnp.where(real_BxSxM, batch.token_BxSxM, 0)
  logp_BxSxM = jnp.take_along_axis(
    jax.nn.log_softmax(logits_BxSxV), token_BxSxM, axis=2
  )
  logp_BxS = jnp.where(real_BxSxM, logp_BxSxM, 0.0).sum(axis=2)
  loss_BxS = -logp_BxS / jnp.maximum(real_BxSxM.sum(axis=2), 1)
  values = sum_masked(loss_BxS, batch.mask_BxS & real_BxSxM.any(axis=2))
  # The share is of all decisions, also of those that no token follows.
  values = values._replace(total=batch.decision_share * values.total)
  return {"loss": Term(values, share=1.0)}


def sft_batch_loss(logits_BxSxA: jax.Array, batch: Batch) -> dict[str, Term]:
  """Sum the terms of `sft_loss`."""
  values = _sum_surprise(logits_BxSxA, batch.action_BxS, batch.mask_BxS)
  return {"loss": Term(values, batch.decision_share)}


def bopo_loss(
  config: BoPOConfig, logits_BxSxA: jax.Array, batch: Batch
) -> dict[str, Term]:
  """Sum the terms of `policy_loss`, and of kl_beta times `exact_kl` to the SFT router.

  They are the paper's objective of BoPO.
  """
  gain_B = compute_gains(
    action_logp(logits_BxSxA, batch.action_BxS),
    batch.logp_BxS,
    batch.adv_B,
    batch.mask_BxS,
    config.ratio_level,
    (config.clip_low, config.clip_high),
  )
  kl = _sum_kl(logits_BxSxA, batch.ref_logits_BxSxA, batch.mask_BxS)
  return {
    "loss": Term(Sum(-gain_B.sum(), len(gain_B)), batch.episode_share),
    "kl": Term(kl, batch.decision_share, config.kl_beta),
  }


def dapo_loss(logits_BxSxA: jax.Array, batch: Batch) -> dict[str, Term]:
  """Sum the clipped policy loss, in which each decision counts the same.

  See DAPO (Yu et al. 2025). The sum over decisions is divided by the episodes, so that
  its gradient is as large as BoPO's with ratios of trajectories at the same learning
  rate and eps (our choice).
  """
  logp_BxS = action_logp(logits_BxSxA, batch.action_BxS)
  ratio_BxS = jnp.exp(jnp.where(batch.mask_BxS, logp_BxS - batch.logp_BxS, 0.0))
  clip = DAPO_CLIP_LOW, DAPO_CLIP_HIGH
  gain_BxS = _clip_gain(ratio_BxS, batch.adv_B[:, None], clip)
  values = sum_masked(-gain_BxS, batch.mask_BxS)
  weight = values.count / len(gain_BxS)  # decisions of an episode
  return {"loss": Term(values, batch.episode_share, weight)}


def sft_loss(
  logits_BxSxA: jax.Array, action_BxS: jax.Array, mask_BxS: jax.Array
) -> jax.Array:
  """Compute the cross-entropy in nats of the chosen models (paper: BoSFT).

  Args:
    logits_BxSxA: float32, of the A-way softmax.
    action_BxS: int32, the chosen models.
    mask_BxS: bool, True on real decisions.

  Returns:
    float32 scalar, the mean over real decisions; 0 if there is none.
  """
  return _sum_surprise(logits_BxSxA, action_BxS, mask_BxS).mean


def policy_loss(
  logp_BxS: jax.Array,
  old_logp_BxS: jax.Array,
  adv_B: jax.Array,
  mask_BxS: jax.Array,
  ratio_level: str = "trajectory",
  clip_low: float | None = None,
  clip_high: float | None = None,
) -> jax.Array:
  """Compute minus the mean of `compute_gains` (paper: objective of BoPO, first term).

  Args:
    clip_low, clip_high: the ratio is trusted within [1 - clip_low, 1 + clip_high]
      (PPO's pessimistic minimum); None leaves that side open, as the paper does.

  Returns:
    float32 scalar to minimise.
  """
  clip = clip_low, clip_high
  return -compute_gains(
    logp_BxS, old_logp_BxS, adv_B, mask_BxS, ratio_level, clip
  ).mean()


def compute_gains(
  logp_BxS: jax.Array,
  old_logp_BxS: jax.Array,
  adv_B: jax.Array,
  mask_BxS: jax.Array,
  ratio_level: str,
  clip: tuple[float | None, float | None],
) -> jax.Array:
  """Compute ratio x advantage of each episode.

  At "trajectory" level the ratio is that of whole episodes, as the paper prints it. At
  "decision" level it is the mean of the ratios of an episode's decisions (GRPO, Shao et
  al. 2024, Eq. 3).

  Args:
    logp_BxS: float32, log pi(a_s) now, in nats.
    old_logp_BxS: float32, the same when the episode was sampled.
    adv_B: float32, one per episode; a constant.
    mask_BxS: bool, False on padding and on forced decisions.
    ratio_level: "trajectory" or "decision"; ValueError for any other.
    clip: low and high, as of `policy_loss`.

  Returns:
    float32 [B]; 0 for an episode without real decisions.
  """
  # Mask before exp: padding may overflow, and 0 * inf is a nan gradient.
  log_ratio_BxS = jnp.where(mask_BxS, logp_BxS - old_logp_BxS, 0.0)
  adv_B = jax.lax.stop_gradient(adv_B)
  if ratio_level == "trajectory":
    gain_B = _clip_gain(jnp.exp(log_ratio_BxS.sum(axis=1)), adv_B, clip)
    return jnp.where(mask_BxS.any(axis=1), gain_B, 0.0)
  if ratio_level == "decision":
    gain_BxS = _clip_gain(jnp.exp(log_ratio_BxS), adv_B[:, None], clip)
    decisions_B = jnp.maximum(mask_BxS.sum(axis=1), 1)
    return jnp.where(mask_BxS, gain_BxS, 0.0).sum(axis=1) / decisions_B
  raise ValueError(f"ratio_level is {ratio_level!r}; use 'trajectory' or 'decision'")


def exact_kl(
  logits_BxSxA: jax.Array, ref_logits_BxSxA: jax.Array, mask_BxS: jax.Array
) -> jax.Array:
  """Compute KL(pi || pi_ref) in nats, averaged over real decisions; 0 if there is none.

  With A logits the sum over models is exact; the paper has an estimate in mind (our
  choice).
  """
  return _sum_kl(logits_BxSxA, ref_logits_BxSxA, mask_BxS).mean


def action_logp(logits_BxSxA: jax.Array, action_BxS: jax.Array) -> jax.Array:
  """Compute the log-probability in nats of each decision: float32 [B, S]."""
  logp_BxSxA = jax.nn.log_softmax(logits_BxSxA)
  return jnp.take_along_axis(logp_BxSxA, action_BxS[:, :, None], axis=2)[:, :, 0]


def sum_masked(value_BxS: jax.Array, mask_BxS: jax.Array) -> Sum:
  """Sum values over real decisions."""
  return Sum(jnp.where(mask_BxS, value_BxS, 0.0).sum(), mask_BxS.sum())


def _sum_surprise(
  logits_BxSxA: jax.Array, action_BxS: jax.Array, mask_BxS: jax.Array
) -> Sum:
  """Sum the cross-entropy of the chosen models."""
  return sum_masked(-action_logp(_mask(logits_BxSxA, mask_BxS), action_BxS), mask_BxS)


def _sum_kl(
  logits_BxSxA: jax.Array, ref_logits_BxSxA: jax.Array, mask_BxS: jax.Array
) -> Sum:
  """Sum KL(pi || pi_ref)."""
  logp_BxSxA = jax.nn.log_softmax(_mask(logits_BxSxA, mask_BxS))
  ref_logp_BxSxA = jax.nn.log_softmax(_mask(ref_logits_BxSxA, mask_BxS))
  kl_BxSxA = jnp.exp(logp_BxSxA) * (logp_BxSxA - ref_logp_BxSxA)
  return sum_masked(kl_BxSxA.sum(axis=-1), mask_BxS)


def _mask(logits_BxSxA: jax.Array, mask_BxS: jax.Array) -> jax.Array:
  """Set the logits on padding to 0: any other number could make the gradient nan."""
  return jnp.where(mask_BxS[:, :, None], logits_BxSxA, 0.0)


def _clip_gain(
  ratio: jax.Array, adv: jax.Array, clip: tuple[float | None, float | None]
) -> jax.Array:
  """Compute ratio x advantage; with a clip at most clipped ratio x advantage (PPO)."""
  low, high = clip
  if low is not None:
    low = 1.0 - low
  if high is not None:
    high = 1.0 + high
  if low is high:  # no clip
    return ratio * adv
  return jnp.minimum(ratio * adv, jnp.clip(ratio, low, high) * adv)


def bopo_advantages(
  config: BoPOConfig,
  groups: Sequence[list[Episode]],
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  lam: float,
) -> tuple[list[RatedEpisode], dict[str, float]]:
  """Compute the reference-guided advantages of groups (paper, Eq. advantage)."""
  clip = config.advantage_clip
  rated = []
  reward_B = []
  clipped_groups = 0
  for group in groups:
    id_ = group[0].task_id
    profile = profiles[id_]
    episodes = [*group, references[id_]]
    costs = [e.cost_usd for e in episodes]
    successes = [e.success for e in episodes]
    cost_norm = rewards.normalized_cost(costs, profile.cost_small, profile.cost_large)
    *reward_G, reference = rewards.boundary_reward(
      successes, profile.hard, cost_norm, lam, config.r_success, config.r_hard
    )
    if not config.reference_guided:
      # The ablation's is no higher than the mean, so that the mean is the baseline.
      reference = min(reward_G)
    adv_G = rewards.reference_advantage(reward_G, reference, config.advantage_eps, clip)
    reward_B.extend(reward_G)
    rated += map(RatedEpisode, group, adv_G)
    clipped_groups += int((np.abs(adv_G) >= clip).any())
  metrics = summarize_rollouts(groups, reward_B)
  return rated, metrics | {"clipped_groups": clipped_groups}


def dapo_advantages(
  groups: Sequence[list[Episode]],
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  lam: float,
) -> tuple[list[RatedEpisode], dict[str, float]]:
  """Compute (R - mean) / std within each group with both successes and failures (DAPO).

  R is 1[success] - lam * C (paper: vanilla RL). C is the dollars over always-LARGE's
  mean of all training tasks, so that lam means the same in every environment (our
  choice). The metrics are of all episodes.
  """
  unit_usd = rewards.mean_large_usd(profiles.values())
  rated = []
  reward_B = []
  kept_groups = 0
  for group in groups:
    reward_G = np.array([e.success - lam * e.cost_usd / unit_usd for e in group])
    reward_B.extend(reward_G)
    if len({e.success for e in group}) == 2:
      adv_G = (reward_G - reward_G.mean()) / (reward_G.std() + DAPO_EPS)
      rated += map(RatedEpisode, group, adv_G)
      kept_groups += 1
  metrics = summarize_rollouts(groups, reward_B)
  return rated, metrics | {"kept_share": kept_groups / len(groups)}


def summarize_rollouts(
  groups: Sequence[list[Episode]], reward_B: Sequence[float]
) -> dict[str, float]:
  """Summarize a rollout batch for the log."""
  episodes = sum(groups, [])
  count = len(episodes)
  steps = sum(len(e.steps) for e in episodes)
  return {
    "reward": float(np.mean(reward_B)),
    "success": sum(e.success for e in episodes) / count,
    "large_share": sum(e.large_calls for e in episodes) / steps,
    "cost_usd": sum(e.cost_usd for e in episodes) / count,
  }


def bopo_method(config: BoPOConfig) -> Method:
  """Return BoPO's method (paper: BoPO), perhaps without a part of it."""
  compare = partial(bopo_advantages, config)
  return Method(partial(bopo_loss, config), SAMPLED, compare, anchored=True)


PRETRAINING = Method(next_token_loss, batches.OUTCOMES)
IMITATION = Method(sft_batch_loss)
FAILURE = Method(sft_batch_loss, batches.FAILURES)
DAPO = Method(dapo_loss, SAMPLED, dapo_advantages, dynamic_sampling=True)
