"""Teach a router with random weights to predict the texts of episodes (our choice)."""

import jax
import jax.numpy as jnp

from baar_jax.learn.batches import NO_TOKEN, Batch, Term, sum_masked


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
