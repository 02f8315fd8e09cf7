"""The losses: imitation, two policy gradients, and the distance to the SFT router."""

import jax
import jax.numpy as jnp


def sft_loss(logits_BxSxA, action_BxS, mask_BxS):
  """Cross-entropy of the decisions over the A-way softmax (paper: BoSFT, masked to decisions).

  Args:
    logits_BxSxA: float32, one logit per model at each decision.
    action_BxS: int, the model that the reference chose.
    mask_BxS: bool, False on padding.

  Returns:
    float32 scalar in nats, averaged over real decisions; 0 if the mask is empty.
  """
  return masked_mean(-action_logp(_real(logits_BxSxA, mask_BxS), action_BxS), mask_BxS)


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
    ratio_level: "trajectory" or "decision".
    clip_low, clip_high: the ratio is trusted within [1 - clip_low, 1 + clip_high] (PPO's
      pessimistic minimum); None leaves that side open, as the paper does.

  Returns:
    float32 scalar to minimise; an episode without real decisions counts 0.

  Raises:
    ValueError: unknown ratio_level.
  """
  # Mask before exp: padding may overflow, and 0 * inf is a nan gradient.
  log_ratio_BxS = jnp.where(mask_BxS, logp_BxS - old_logp_BxS, 0.0)
  adv_B = jax.lax.stop_gradient(adv_B)
  if ratio_level == "trajectory":
    gain_B = _gain(jnp.exp(log_ratio_BxS.sum(axis=1)), adv_B, clip_low, clip_high)
    gain_B = jnp.where(mask_BxS.any(axis=1), gain_B, 0.0)
  elif ratio_level == "decision":
    gain_BxS = _gain(jnp.exp(log_ratio_BxS), adv_B[:, None], clip_low, clip_high)
    decisions_B = jnp.maximum(mask_BxS.sum(axis=1), 1)
    gain_B = jnp.where(mask_BxS, gain_BxS, 0.0).sum(axis=1) / decisions_B
  else:
    raise ValueError(f"ratio_level is {ratio_level!r}; use 'trajectory' or 'decision'")
  return -gain_B.mean()


def dapo_loss(logp_BxS, old_logp_BxS, adv_B, mask_BxS, clip_low: float, clip_high: float):
  """Clipped policy loss averaged over all decisions of the batch (DAPO, Yu et al. 2025).

  Long episodes count by their decisions. Arguments are as of `policy_loss`; 0 if the mask is empty.
  """
  log_ratio_BxS = jnp.where(mask_BxS, logp_BxS - old_logp_BxS, 0.0)
  adv_Bx1 = jax.lax.stop_gradient(adv_B)[:, None]
  return -masked_mean(_gain(jnp.exp(log_ratio_BxS), adv_Bx1, clip_low, clip_high), mask_BxS)


def exact_kl(logits_BxSxA, ref_logits_BxSxA, mask_BxS):
  """KL(pi || pi_ref) in nats, summed over the A models, averaged over real decisions.

  The paper has the usual per-token estimate in mind; with A logits the sum is exact (our choice).
  `ref_logits_BxSxA` are the SFT router's. The result is 0 if the mask is empty.
  """
  logp_BxSxA = jax.nn.log_softmax(_real(logits_BxSxA, mask_BxS))
  ref_logp_BxSxA = jax.nn.log_softmax(_real(ref_logits_BxSxA, mask_BxS))
  return masked_mean((jnp.exp(logp_BxSxA) * (logp_BxSxA - ref_logp_BxSxA)).sum(axis=-1), mask_BxS)


def action_logp(logits_BxSxA, action_BxS):
  """Log-probability in nats of each decision: float32 [B, S]."""
  logp_BxSxA = jax.nn.log_softmax(logits_BxSxA)
  return jnp.take_along_axis(logp_BxSxA, action_BxS[:, :, None], axis=2)[:, :, 0]


def entropy(logits_BxSxA, mask_BxS):
  """Entropy of the decisions in nats, averaged over real decisions; 0 if the mask is empty."""
  logp_BxSxA = jax.nn.log_softmax(_real(logits_BxSxA, mask_BxS))
  return masked_mean(-(jnp.exp(logp_BxSxA) * logp_BxSxA).sum(axis=-1), mask_BxS)


def _gain(ratio, adv, clip_low, clip_high):
  """ratio x advantage, or the smaller one with a clipped ratio where a side has a clip."""
  if clip_low is None and clip_high is None:
    return ratio * adv
  low = None if clip_low is None else 1.0 - clip_low
  high = None if clip_high is None else 1.0 + clip_high
  return jnp.minimum(ratio * adv, jnp.clip(ratio, low, high) * adv)


def _real(logits_BxSxA, mask_BxS):
  """The logits, 0 on padding, whose values must not make the gradient nan."""
  return jnp.where(mask_BxS[:, :, None], logits_BxSxA, 0.0)


def masked_mean(value_BxS, mask_BxS):
  """The mean over real decisions; 0 if the mask is empty."""
  return jnp.where(mask_BxS, value_BxS, 0.0).sum() / jnp.maximum(mask_BxS.sum(), 1)
