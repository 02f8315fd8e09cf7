"""Compute the losses of BoSFT and BoPO from arrays (paper Eq. 8).

`sft_loss`, `policy_loss` and `exact_kl` are means over episodes or decisions. A
gradient step adds up micro-batches, each divided by the number that the whole step has.
`sft_batch_loss` and `bopo_loss` take these numbers from the batch.

Axes: B episodes or rows, S decisions, A models.
"""

import jax
import jax.numpy as jnp

from baar_jax.config import BoPOConfig
from baar_jax.learn.batches import Batch


def sft_loss(
  logits_BxSxA: jax.Array,
  action_BxS: jax.Array,
  mask_BxS: jax.Array,
  decisions: jax.Array | int | None = None,
) -> jax.Array:
  """Compute the cross-entropy of the chosen models (paper: BoSFT).

      loss = mean over real decisions of -log softmax(logits)[action]

  Args:
    logits_BxSxA: float32, one logit per model.
    action_BxS: int32, the chosen models.
    mask_BxS: bool, True on real decisions.
    decisions: the number to divide by; None is the number of real decisions.

  Returns:
    float32 scalar in nats; 0 if there is no real decision.
  """
  logp_BxS = action_logp(logits_BxSxA, action_BxS, mask_BxS)
  return _average(-logp_BxS, mask_BxS, decisions)


def policy_loss(
  logp_BxS: jax.Array,
  old_logp_BxS: jax.Array,
  adv_B: jax.Array,
  mask_BxS: jax.Array,
  episodes: jax.Array | int | None = None,
) -> jax.Array:
  """Compute the policy-gradient loss of episodes (paper Eq. 8, first term).

      loss = -mean_B(ratio * A)        ratio = exp(sum_s (logp_s - old_logp_s))

  If logp = old_logp, the ratio is 1, and the gradient is that of -mean_B(A * sum_s
  logp_s). This sum is linear. So an episode may then be cut into rows: the gradients of
  its rows add up. The value counts A once for each row.

  Args:
    logp_BxS: float32, log pi(a_s) of the current router, in nats.
    old_logp_BxS: float32, log pi(a_s) of the router that sampled the episode.
    adv_B: float32, the advantages A; no gradient flows through them.
    mask_BxS: bool, False on padding and where a budget forced the decision.
    episodes: the number to divide by; None is B.

  Returns:
    float32 scalar; episodes without real decisions count as 0 in the mean.
  """
  if episodes is None:
    episodes = len(adv_B)
  # Padding is masked before exp, because exp may overflow on padding. Then the gradient
  # 0 * inf would be nan.
  log_ratio_BxS = jnp.where(mask_BxS, logp_BxS - old_logp_BxS, 0.0)
  gain_B = jnp.exp(log_ratio_BxS.sum(axis=1)) * jax.lax.stop_gradient(adv_B)
  return _average(-gain_B, mask_BxS.any(axis=1), episodes)


def exact_kl(
  logits_BxSxA: jax.Array,
  ref_logits_BxSxA: jax.Array,
  mask_BxS: jax.Array,
  decisions: jax.Array | int | None = None,
) -> jax.Array:
  """Compute the exact KL divergence from the SFT router (paper Eq. 8, second term).

      KL = mean over real decisions of sum_a pi(a) * (log pi(a) - log pi_ref(a))

  A decision has only A logits, so the sum over models is exact. The paper has a
  token-level penalty, usually an estimate from samples; the exact sum is our choice. So
  is the mean over all decisions of a gradient step, in which long episodes weigh more;
  the paper's penalty is inside the mean over a group.

  Args:
    logits_BxSxA: float32, of the router that learns (pi).
    ref_logits_BxSxA: float32, of the SFT router, which never changes (pi_ref).
    mask_BxS: bool, True on real decisions.
    decisions: the number to divide by; None is the number of real decisions.

  Returns:
    float32 scalar in nats; 0 if there is no real decision.
  """
  logp_BxSxA = _log_softmax(logits_BxSxA, mask_BxS)
  ref_logp_BxSxA = _log_softmax(ref_logits_BxSxA, mask_BxS)
  kl_BxSxA = jnp.exp(logp_BxSxA) * (logp_BxSxA - ref_logp_BxSxA)
  return _average(kl_BxSxA.sum(axis=2), mask_BxS, decisions)


def sft_batch_loss(logits_BxSxA: jax.Array, batch: Batch) -> dict[str, jax.Array]:
  """Compute `sft_loss` of a micro-batch, as "loss"."""
  loss = sft_loss(logits_BxSxA, batch.action_BxS, batch.mask_BxS, batch.decisions)
  return {"loss": loss}


def bopo_loss(
  config: BoPOConfig, logits_BxSxA: jax.Array, batch: Batch
) -> dict[str, jax.Array]:
  """Compute BoPO's loss of a micro-batch: minus the paper's objective (Eq. 8).

      loss = policy_loss + kl_beta * exact_kl

  The router that sampled the episodes is the current one, so the ratio is 1, and
  `batch.logp_BxS` is only logged; paper/bopo.py has the reason.

  Args:
    config: supplies `kl_beta`.
    logits_BxSxA: float32, of the router that learns.
    batch: a micro-batch with `ref_logits_BxSxA`, the SFT router's logits.

  Returns:
    "loss"; for the log also "kl" and those of `measure_policy`.
  """
  mask_BxS = batch.mask_BxS
  logp_BxS = action_logp(logits_BxSxA, batch.action_BxS, mask_BxS)
  old_logp_BxS = jax.lax.stop_gradient(logp_BxS)
  loss = policy_loss(logp_BxS, old_logp_BxS, batch.adv_B, mask_BxS, batch.episodes)
  kl = exact_kl(logits_BxSxA, batch.ref_logits_BxSxA, mask_BxS, batch.decisions)
  figures = measure_policy(logits_BxSxA, logp_BxS, batch)
  return {"loss": loss + config.kl_beta * kl, "kl": kl} | figures


def measure_policy(
  logits_BxSxA: jax.Array, logp_BxS: jax.Array, batch: Batch
) -> dict[str, jax.Array]:
  """Compute means over real decisions for the log, in nats.

  Args:
    logits_BxSxA: float32, of the router that learns.
    logp_BxS: float32, the result of `action_logp`.
    batch: a micro-batch.

  Returns:
    "entropy" is the entropy of the policy. "log_ratio" is |log pi(a) - log pi_old(a)|:
    how far it is from the router that sampled the decision.
  """
  logp_BxSxA = _log_softmax(logits_BxSxA, batch.mask_BxS)
  entropy_BxS = -(jnp.exp(logp_BxSxA) * logp_BxSxA).sum(axis=2)
  log_ratio_BxS = jnp.abs(logp_BxS - batch.logp_BxS)
  return {
    "entropy": _average(entropy_BxS, batch.mask_BxS, batch.decisions),
    "log_ratio": _average(log_ratio_BxS, batch.mask_BxS, batch.decisions),
  }


def action_logp(
  logits_BxSxA: jax.Array, action_BxS: jax.Array, mask_BxS: jax.Array
) -> jax.Array:
  """Compute the log-probability of each chosen model.

  Args:
    logits_BxSxA: float32, one logit per model.
    action_BxS: int32, the chosen models.
    mask_BxS: bool, True on real decisions.

  Returns:
    float32 logp_BxS in nats; a finite constant on padding.
  """
  logp_BxSxA = _log_softmax(logits_BxSxA, mask_BxS)
  return jnp.take_along_axis(logp_BxSxA, action_BxS[:, :, None], axis=2)[:, :, 0]


def _log_softmax(logits_BxSxA: jax.Array, mask_BxS: jax.Array) -> jax.Array:
  """Compute log-probabilities, of equal logits on padding.

  Without the mask, inf or nan on padding would give nan gradients.
  """
  return jax.nn.log_softmax(jnp.where(mask_BxS[:, :, None], logits_BxSxA, 0.0))


def _average(
  value: jax.Array, mask: jax.Array, count: jax.Array | int | None
) -> jax.Array:
  """Divide the sum of the values at which the mask is True by a count.

  Args:
    value: float32; where the mask is False it may have any value.
    mask: bool, of the same shape.
    count: the divisor; None is the number of True in the mask, at least 1.
  """
  if count is None:
    count = jnp.maximum(mask.sum(), 1)
  return jnp.where(mask, value, 0.0).sum() / count
