"""Compute the losses of BoSFT and BoPO from arrays (paper Eq. 8).

`sft_loss`, `policy_loss` and `exact_kl` are the formulas on whole arrays. A gradient
step adds up micro-batches, so `sft_batch_loss` and `bopo_loss` return the same losses
as terms: a sum with its count, and the micro-batch's share of the step
(learn/batches.py).

The rows of a micro-batch may be parts of episodes, so the ratio of a trajectory is a
product over several rows. `policy_loss` has whole episodes.

Axes: B episodes or rows, S decisions, A models.
"""

import jax
import jax.numpy as jnp

from baar_jax.config import BoPOConfig
from baar_jax.learn.batches import Batch, Sum, Term, sum_masked


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
  part_B: jax.Array | float = 1.0,
  other_B: jax.Array | float = 0.0,
) -> jax.Array:
  """Compute the gain of each episode: its probability ratio times its advantage.

      "trajectory": ratio = exp(sum_s (logp_s - old_logp_s))        (paper Eq. 8)
                    gain  = min(ratio * A, clip(ratio) * A)
      "decision":   ratio_s = exp(logp_s - old_logp_s)  (GRPO, Shao et al. 2024, Eq. 3)
                    gain  = mean_s min(ratio_s * A, clip(ratio_s) * A)

  If logp = old_logp, the gradient of "trajectory" is S times that of "decision".

  If a row is a part of an episode, the episode's gain is the sum over its rows. For a
  trajectory each row has its part of the gain, and the gradient by its own decisions:
  d exp(sum of all) = ratio * d sum of all, so the gradients of the rows add up.

  Args:
    logp_BxS: float32, log pi(a_s) of the current router, in nats.
    old_logp_BxS: float32, log pi(a_s) of the router that sampled the episode.
    adv_B: float32, the advantages; no gradient flows through them.
    mask_BxS: bool, False on padding and on forced decisions.
    ratio_level: "trajectory" or "decision".
    clip: (clip_low, clip_high), see `policy_loss`.
    part_B: float32, the row's share of its episode's real decisions.
    other_B: float32, the sum of logp_s - old_logp_s over the episode's other rows.

  Returns:
    float32 gain_B; 0 for a row without real decisions.

  Raises:
    ValueError: `ratio_level` has another value.
  """
  # Padding is masked before exp, because exp may overflow on padding. Then the gradient
  # 0 * inf would be nan.
  log_ratio_BxS = jnp.where(mask_BxS, logp_BxS - old_logp_BxS, 0.0)
  adv_B = jax.lax.stop_gradient(adv_B)
  if ratio_level == "trajectory":
    gain_B = clip_gain(jnp.exp(log_ratio_BxS.sum(axis=1) + other_B), adv_B, clip)
    gain_B -= (1 - part_B) * jax.lax.stop_gradient(gain_B)
    return jnp.where(mask_BxS.any(axis=1), gain_B, 0.0)
  if ratio_level == "decision":
    gain_BxS = clip_gain(jnp.exp(log_ratio_BxS), adv_B[:, None], clip)
    decisions_B = jnp.maximum(mask_BxS.sum(axis=1), 1)
    return jnp.where(mask_BxS, gain_BxS, 0.0).sum(axis=1) / decisions_B * part_B
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
    config: supplies `ratio_level`, `clip` and `kl_beta`.
    logits_BxSxA: float32, of the router that learns.
    batch: a batch with `ref_logits_BxSxA`, the SFT router's logits.

  Returns:
    The terms "loss" and "kl", and "entropy" for the log.
  """
  gain_B = compute_gains(
    action_logp(logits_BxSxA, batch.action_BxS),
    batch.logp_BxS,
    batch.adv_B,
    batch.mask_BxS,
    config.ratio_level,
    config.clip or (None, None),
    batch.part_B,
    batch.other_B,
  )
  kl = _sum_kl(logits_BxSxA, batch.ref_logits_BxSxA, batch.mask_BxS)
  return {
    "loss": Term(Sum(-gain_B.sum(), len(gain_B)), batch.episode_share),
    "kl": Term(kl, batch.decision_share, config.kl_beta),
    "entropy": measure_entropy(logits_BxSxA, batch),
  }


def measure_entropy(logits_BxSxA: jax.Array, batch: Batch) -> Term:
  """Compute the policy's entropy, for the log: a term with weight 0.

  entropy = mean over real decisions of -sum_a pi(a) * log pi(a)        in nats
  """
  logp_BxSxA = jax.nn.log_softmax(_zero_padding(logits_BxSxA, batch.mask_BxS))
  entropy_BxS = -(jnp.exp(logp_BxSxA) * logp_BxSxA).sum(axis=-1)
  values = sum_masked(entropy_BxS, batch.mask_BxS)
  return Term(values, batch.decision_share, weight=0.0)


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


def clip_gain(
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
  if clip == (None, None):
    return ratio * adv
  if low is not None:
    low = 1.0 - low
  if high is not None:
    high = 1.0 + high
  return jnp.minimum(ratio * adv, jnp.clip(ratio, low, high) * adv)
