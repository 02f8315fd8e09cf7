"""Compute the losses and advantages of the training methods, and list the methods.

Axes: B episodes, S decisions of an episode, A models, M tokens after a decision, V
tokens of the vocabulary, G episodes of a group.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.config import BoPOConfig
from baar_jax.episode import Episode
from baar_jax.learn import batches
from baar_jax.learn.batches import NO_TOKEN, SAMPLED, Batch, Labels, Loss, Sum, Term
from baar_jax.paper import rewards
from baar_jax.paper.rewards import Profile

# DAPO clips the probability ratio to [1 - 0.2, 1 + 0.28] (Yu et al. 2025).
DAPO_CLIP_LOW = 0.2
DAPO_CLIP_HIGH = 0.28
DAPO_EPS = 1e-6  # Added to a group's standard deviation of rewards before a division.


class RatedEpisode(NamedTuple):
  """Pair an episode to learn from with its advantage."""

  episode: Episode
  advantage: float


# A function of (groups, profiles by task id, references by task id, lam) that computes
# advantages. A group has the sampled episodes of one task. The function returns the
# episodes to learn from with their advantages, and the metrics of all episodes.
Advantages = Callable[
  [Sequence[list[Episode]], Mapping[str, Profile], Mapping[str, Episode], float],
  tuple[list[RatedEpisode], dict[str, float]],
]


class Method(NamedTuple):
  """Define a method that trains a router.

  Attributes:
    loss: the loss of a batch.
    labels: the rule that labels the decisions to learn.
    compute_advantages: computes the advantages of rollouts; None if the method learns
      from stored episodes.
    anchored: whether the loss uses the SFT router's logits.
    dynamic_sampling: whether groups may be dropped (DAPO). If so, the gradient steps
      wait until the kept groups have as many episodes as a rollout batch of BoPO.
  """

  loss: Loss
  labels: Labels = batches.ACTED
  compute_advantages: Advantages | None = None
  anchored: bool = False
  dynamic_sampling: bool = False


def next_token_loss(logits_BxSxV: jax.Array, batch: Batch) -> dict[str, Term]:
  """Compute the pretraining loss: cross-entropy of the tokens after each decision.

  The loss of a decision is the mean over its tokens, in nats. The loss of the batch is
  the mean over decisions that are followed by tokens.

  Args:
    logits_BxSxV: float32, one distribution per decision, shared by its M tokens.
    batch: a batch with `token_BxSxM`.

  Returns:
    The term "loss".
  """
  real_BxSxM = batch.token_BxSxM != NO_TOKEN
  token_BxSxM = jnp.where(real_BxSxM, batch.token_BxSxM, 0)
  logp_BxSxM = jnp.take_along_axis(
    jax.nn.log_softmax(logits_BxSxV), token_BxSxM, axis=2
  )
  logp_BxS = jnp.where(real_BxSxM, logp_BxSxM, 0.0).sum(axis=2)
  loss_BxS = -logp_BxS / jnp.maximum(real_BxSxM.sum(axis=2), 1)
  values = sum_masked(loss_BxS, batch.mask_BxS & real_BxSxM.any(axis=2))
  # `decision_share` counts all decisions, even those without tokens after them.
  values = values._replace(total=batch.decision_share * values.total)
  return {"loss": Term(values, share=1.0)}


def sft_batch_loss(logits_BxSxA: jax.Array, batch: Batch) -> dict[str, Term]:
  """Compute `sft_loss` of a micro-batch, as the term "loss"."""
  values = _sum_cross_entropy(logits_BxSxA, batch.action_BxS, batch.mask_BxS)
  return {"loss": Term(values, batch.decision_share)}


def bopo_loss(
  config: BoPOConfig, logits_BxSxA: jax.Array, batch: Batch
) -> dict[str, Term]:
  """Compute BoPO's loss: minus the paper's objective (Eq. 8).

      loss = -mean_B(ratio * advantage) + kl_beta * KL(pi || pi_sft)

  The first term is `policy_loss`, a mean over episodes. The second is `exact_kl`, a
  mean over decisions.

  Args:
    config: supplies `ratio_level`, `clip_low`, `clip_high` and `kl_beta`.
    logits_BxSxA: float32, of the router that learns.
    batch: a batch with `ref_logits_BxSxA`, the SFT router's logits.

  Returns:
    The terms "loss" and "kl".
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
  """Compute the decision-level clipped policy loss (DAPO, Yu et al. 2025).

      loss = -sum min(ratio * A, clip(ratio, 1 - 0.2, 1 + 0.28) * A) / B

  The sum is over the real decisions of all B episodes. A ratio is the current
  probability of the chosen model, divided by its probability when it was sampled. All
  decisions have equal weight, whatever the length of their episode. DAPO divides the
  sum by the number of decisions. We divide by the number of episodes (our choice). So
  the gradient has the size of BoPO's at trajectory level, and both can use the same
  learning rate and Adam eps.

  Args:
    logits_BxSxA: float32, of the router that learns.
    batch: a batch with `logp_BxS` and `adv_B`.

  Returns:
    The term "loss".
  """
  logp_BxS = action_logp(logits_BxSxA, batch.action_BxS)
  ratio_BxS = jnp.exp(jnp.where(batch.mask_BxS, logp_BxS - batch.logp_BxS, 0.0))
  clip = DAPO_CLIP_LOW, DAPO_CLIP_HIGH
  gain_BxS = _clip_gain(ratio_BxS, batch.adv_B[:, None], clip)
  values = sum_masked(-gain_BxS, batch.mask_BxS)
  weight = values.count / len(gain_BxS)  # mean number of decisions per episode
  return {"loss": Term(values, batch.episode_share, weight)}


def sft_loss(
  logits_BxSxA: jax.Array, action_BxS: jax.Array, mask_BxS: jax.Array
) -> jax.Array:
  """Compute the cross-entropy of the chosen models (paper: BoSFT).

      loss = mean over real decisions of -log softmax(logits)[action]

  Args:
    logits_BxSxA: float32, one logit per model.
    action_BxS: int32, the chosen models.
    mask_BxS: bool, True on real decisions.

  Returns:
    float32 scalar in nats; 0 if there is no real decision.
  """
  return _sum_cross_entropy(logits_BxSxA, action_BxS, mask_BxS).mean


def policy_loss(
  logp_BxS: jax.Array,
  old_logp_BxS: jax.Array,
  adv_B: jax.Array,
  mask_BxS: jax.Array,
  ratio_level: str = "trajectory",
  clip_low: float | None = None,
  clip_high: float | None = None,
) -> jax.Array:
  """Compute the policy-gradient loss of episodes (paper Eq. 8, first term).

      loss = -mean_B(gain)        with the gains of `compute_gains`

  Args:
    logp_BxS: float32, log pi(a_s) of the current router, in nats.
    old_logp_BxS: float32, log pi(a_s) of the router that sampled the episode.
    adv_B: float32, the advantages; no gradient flows through them.
    mask_BxS: bool, False on padding and on forced decisions.
    ratio_level: "trajectory" (the paper) or "decision" (GRPO).
    clip_low: the ratio is clipped at 1 - clip_low; None for no lower clip (the paper).
    clip_high: the ratio is clipped at 1 + clip_high; None for no upper clip (the
      paper).

  Returns:
    float32 scalar; episodes without real decisions count as 0 in the mean.

  Raises:
    ValueError: `ratio_level` has another value.
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
  """Compute the gain of each episode: its probability ratio times its advantage.

      "trajectory": ratio = exp(sum_s (logp_s - old_logp_s))        (paper Eq. 8)
                    gain  = min(ratio * A, clip(ratio) * A)
      "decision":   ratio_s = exp(logp_s - old_logp_s)  (GRPO, Shao et al. 2024, Eq. 3)
                    gain  = mean_s min(ratio_s * A, clip(ratio_s) * A)

  If logp = old_logp, the gradient of "trajectory" is S times that of "decision".

  Args:
    logp_BxS: float32, log pi(a_s) of the current router, in nats.
    old_logp_BxS: float32, log pi(a_s) of the router that sampled the episode.
    adv_B: float32, the advantages; no gradient flows through them.
    mask_BxS: bool, False on padding and on forced decisions.
    ratio_level: "trajectory" or "decision".
    clip: (clip_low, clip_high), see `policy_loss`.

  Returns:
    float32 gain_B; 0 for an episode without real decisions.

  Raises:
    ValueError: `ratio_level` has another value.
  """
  # Padding is masked before exp, because exp may overflow on padding. Then the gradient
  # 0 * inf would be nan.
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
  """Compute the exact KL divergence from a reference router (paper Eq. 8, second term).

      KL = mean over real decisions of sum_a pi(a) * (log pi(a) - log pi_ref(a))

  A decision has only A logits, so the sum over models is exact. The paper has a
  token-level penalty, usually an estimate from samples; the exact sum is our choice.

  Args:
    logits_BxSxA: float32, of the router that learns (pi).
    ref_logits_BxSxA: float32, of the reference router (pi_ref).
    mask_BxS: bool, True on real decisions.

  Returns:
    float32 scalar in nats; 0 if there is no real decision.
  """
  return _sum_kl(logits_BxSxA, ref_logits_BxSxA, mask_BxS).mean


def action_logp(logits_BxSxA: jax.Array, action_BxS: jax.Array) -> jax.Array:
  """Compute the log-probability of each chosen model.

  Args:
    logits_BxSxA: float32, one logit per model.
    action_BxS: int32, the chosen models.

  Returns:
    float32 logp_BxS, in nats.
  """
  logp_BxSxA = jax.nn.log_softmax(logits_BxSxA)
  return jnp.take_along_axis(logp_BxSxA, action_BxS[:, :, None], axis=2)[:, :, 0]


def sum_masked(value_BxS: jax.Array, mask_BxS: jax.Array) -> Sum:
  """Add up values over real decisions, and count these decisions.

  Args:
    value_BxS: float32; padding may have any value.
    mask_BxS: bool, True on real decisions.
  """
  return Sum(jnp.where(mask_BxS, value_BxS, 0.0).sum(), mask_BxS.sum())


def _sum_cross_entropy(
  logits_BxSxA: jax.Array, action_BxS: jax.Array, mask_BxS: jax.Array
) -> Sum:
  """Add up the cross-entropy of the chosen models over real decisions, in nats."""
  return sum_masked(
    -action_logp(_zero_padding(logits_BxSxA, mask_BxS), action_BxS), mask_BxS
  )


def _sum_kl(
  logits_BxSxA: jax.Array, ref_logits_BxSxA: jax.Array, mask_BxS: jax.Array
) -> Sum:
  """Add up KL(pi || pi_ref) over real decisions, in nats."""
  logp_BxSxA = jax.nn.log_softmax(_zero_padding(logits_BxSxA, mask_BxS))
  ref_logp_BxSxA = jax.nn.log_softmax(_zero_padding(ref_logits_BxSxA, mask_BxS))
  kl_BxSxA = jnp.exp(logp_BxSxA) * (logp_BxSxA - ref_logp_BxSxA)
  return sum_masked(kl_BxSxA.sum(axis=-1), mask_BxS)


def _zero_padding(logits_BxSxA: jax.Array, mask_BxS: jax.Array) -> jax.Array:
  """Set logits on padding to 0, because inf or nan on padding gives nan gradients."""
  return jnp.where(mask_BxS[:, :, None], logits_BxSxA, 0.0)


def _clip_gain(
  ratio: jax.Array, adv: jax.Array, clip: tuple[float | None, float | None]
) -> jax.Array:
  """Compute min(ratio * A, clip(ratio) * A) (PPO, Schulman et al. 2017, Eq. 7).

  Args:
    ratio: float32, probability ratios of trajectories or decisions.
    adv: float32, the advantages A.
    clip: (clip_low, clip_high): the ratio is clipped to [1 - clip_low, 1 + clip_high].
      None leaves a side open; both None is ratio * A.
  """
  low, high = clip
  if low is not None:
    low = 1.0 - low
  if high is not None:
    high = 1.0 + high
  if low is high:  # Both are None, so nothing is clipped.
    return ratio * adv
  return jnp.minimum(ratio * adv, jnp.clip(ratio, low, high) * adv)


def bopo_advantages(
  config: BoPOConfig,
  groups: Sequence[list[Episode]],
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  lam: float,
) -> tuple[list[RatedEpisode], dict[str, float]]:
  """Compute the reference-guided advantages of groups (paper Eq. 7).

  Rewards are `rewards.boundary_reward`, advantages `rewards.reference_advantage`.

  Args:
    config: supplies the constants of both functions. With `reference_guided=False` the
      baseline is the mean of the group (ablation).
    groups: each has the sampled episodes of one task.
    profiles: the profiles of these tasks, by task id.
    references: the reference trajectories tau* of these tasks, by task id.
    lam: the cost weight.

  Returns:
    All episodes with their advantages, and metrics: those of `summarize_rollouts`, and
    `clipped_groups`, the number of groups with a clipped advantage.
  """
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
      # `reference_advantage` takes the larger of the mean and this number as baseline.
      # The least reward is never above the mean, so the mean is the baseline.
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
  """Compute the group-relative advantages of vanilla RL (DAPO, Yu et al. 2025).

      R = 1[success] - lam * C        (paper: vanilla RL)
      A = (R - mean_G R) / (std_G R + 1e-6)

  C is the episode's dollars divided by `rewards.mean_large_usd`, so that lam has a
  similar meaning in every environment (our choice). Groups without both a success and a
  failure are dropped (dynamic sampling).

  Args:
    groups: each has the sampled episodes of one task.
    profiles: the profiles of all training tasks, by task id.
    references: not used by this method.
    lam: the cost weight.

  Returns:
    The episodes of the kept groups with their advantages, and metrics: those of
    `summarize_rollouts` over all groups, and `kept_share`, the share of kept groups.
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
  """Summarize the rollouts of one update for the log.

  Args:
    groups: each has the sampled episodes of one task.
    reward_B: the reward of each episode, over all groups.

  Returns:
    Means over episodes: `reward`, `success` (share in [0, 1]) and `cost_usd` (dollars).
    `large_share` is the share of LARGE calls among all steps.
  """
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
  """Make the method BoPO with the constants of a configuration (paper: BoPO)."""
  compute_advantages = partial(bopo_advantages, config)
  return Method(partial(bopo_loss, config), SAMPLED, compute_advantages, anchored=True)


PRETRAINING = Method(next_token_loss, batches.OUTCOMES)
IMITATION = Method(sft_batch_loss)
FAILURE = Method(sft_batch_loss, batches.FAILURES)
DAPO = Method(dapo_loss, SAMPLED, dapo_advantages, dynamic_sampling=True)
