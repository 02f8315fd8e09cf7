"""Train a router by vanilla RL, the rival without boundaries (DAPO, Yu et al. 2025).

The paper's vanilla RL has no profile, no references and no anchor. So it starts from
the router before BoSFT, and takes at most as many gradient steps as BoPO.

Its episodes wait until they are a full batch, so the router that learns from them may
no longer be the one that sampled them. Therefore its loss has the ratios to the sampled
log-probabilities, and DAPO's clip, both of which BoPO does without. It has no KL and no
penalty of length. The paper names DAPO without its constants, so they are our choice,
as is the limit of three times BoPO's rollouts.

Axes: B episodes, S decisions of an episode, A models, G episodes of a group.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.config import VANILLA_BATCHES, BoPOConfig
from baar_jax.episode import Episode
from baar_jax.families.family import BoPO
from baar_jax.learn.batches import Batch
from baar_jax.paper.bopo import (
  Learner,
  RatedEpisode,
  Update,
  is_mixed,
  roll_out,
  summarize_rollouts,
)
from baar_jax.paper.losses import action_logp, measure_policy
from baar_jax.paper.references import Profile, mean_large_usd
from baar_jax.rollout.jobs import Play, Rollouts
from baar_jax.run import RouterFiles, Run

CLIP = (1 - 0.2, 1 + 0.28)  # DAPO's bounds of the probability ratio.
EPS = 1e-6  # Added to a group's standard deviation of rewards before a division.


def vanilla(
  play: Play,
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  learner: Learner,
  rollouts: Iterable[Rollouts],
) -> Iterator[Update]:
  """Update a router on full batches of groups that DAPO keeps.

  Groups are kept in a queue. An update takes a gradient step on the oldest kept
  episodes if they are as many as a rollout batch; the others wait for the next update.

  Args:
    play: gives the episodes of rollouts.
    profiles: the profiles of all training tasks, by task id.
    references: not used by this method.
    learner: the router that learns.
    rollouts: the rollouts of each update.

  Yields:
    Each update when it has ended.

  Raises:
    ValueError: an update has no group.
  """
  unit_usd = mean_large_usd(profiles.values())
  kept: list[RatedEpisode] = []
  for spec, jobs in rollouts:
    groups = roll_out(play, learner, spec, jobs)
    rated, metrics = rate(groups, unit_usd, spec.lam)
    kept += rated
    size = len(jobs)
    steps = 0
    if len(kept) >= size:
      metrics |= learner.learn(kept[:size])
      steps = 1
      kept = kept[size:]
    rolled_out = sum(map(len, groups))
    yield Update(spec.update, rolled_out, metrics, steps, len(kept))


def rate(
  groups: Sequence[list[Episode]], unit_usd: float, lam: float
) -> tuple[list[RatedEpisode], dict[str, float]]:
  """Compute the group-relative advantages of the groups that are kept.

      R = 1[success] - lam * C        (paper: vanilla RL)
      A = (R - mean_G R) / (std_G R + 1e-6)

  C is the episode's dollars divided by `unit_usd`, so that lam has a similar meaning in
  every environment (our choice; the paper states neither C nor lam). Groups without
  both a success and a failure are dropped (dynamic sampling).

  Args:
    groups: each has the sampled episodes of one task.
    unit_usd: US dollars of one normalised dollar, see `mean_large_usd`.
    lam: the cost weight.

  Returns:
    The episodes of the kept groups with their advantages, and metrics: those of
    `summarize_rollouts` over all groups, of which `mixed_share` is the share that is
    kept.
  """
  rated = []
  reward_B = []
  for group in groups:
    reward_G = np.array([e.success - lam * e.cost_usd / unit_usd for e in group])
    reward_B.extend(reward_G)
    if is_mixed(group):
      adv_G = (reward_G - reward_G.mean()) / (reward_G.std() + EPS)
      rated += map(RatedEpisode, group, adv_G)
  return rated, summarize_rollouts(groups, reward_B)


def dapo_loss(
  config: BoPOConfig, logits_BxSxA: jax.Array, batch: Batch
) -> dict[str, jax.Array]:
  """Compute the decision-level clipped policy loss (DAPO, Yu et al. 2025).

      loss = -sum min(ratio * A, clip(ratio, 1 - 0.2, 1 + 0.28) * A) / B

  The sum is over the real decisions of all B episodes. A ratio is the current
  probability of the chosen model, divided by its probability when it was sampled. All
  decisions have equal weight, whatever the length of their episode. DAPO divides the
  sum by the number of decisions. We divide by the number of episodes (our choice). So
  the gradient has the size of BoPO's, and both can use the same learning rate and Adam
  eps.

  Args:
    config: not used, for the clip is DAPO's own.
    logits_BxSxA: float32, of the router that learns.
    batch: a micro-batch with `logp_BxS` and `adv_B`.

  Returns:
    "loss", and the figures of `measure_policy` for the log.
  """
  mask_BxS = batch.mask_BxS
  logp_BxS = action_logp(logits_BxSxA, batch.action_BxS, mask_BxS)
  ratio_BxS = jnp.exp(jnp.where(mask_BxS, logp_BxS - batch.logp_BxS, 0.0))
  adv_Bx1 = batch.adv_B[:, None]
  gain_BxS = jnp.minimum(ratio_BxS * adv_Bx1, jnp.clip(ratio_BxS, *CLIP) * adv_Bx1)
  loss = -jnp.where(mask_BxS, gain_BxS, 0.0).sum() / batch.episodes
  return {"loss": loss} | measure_policy(logits_BxSxA, logp_BxS, batch)


class Vanilla(BoPO):
  """Vanilla RL from the router before BoSFT."""

  stage: ClassVar[str] = "baselines"
  update: ClassVar[Callable] = staticmethod(vanilla)
  loss: ClassVar[Callable] = staticmethod(dapo_loss)
  anchored: ClassVar[bool] = False
  batches: ClassVar[int] = VANILLA_BATCHES

  def configure(self, run: Run, files: RouterFiles) -> RouterFiles:
    """Set its own learning rate, which the paper does not state (our choice)."""
    rate = files.config.bopo.vanilla_learning_rate
    bopo = dataclasses.replace(files.config.bopo, learning_rate=rate)
    config = dataclasses.replace(files.config, bopo=bopo)
    return dataclasses.replace(files, config=config)
