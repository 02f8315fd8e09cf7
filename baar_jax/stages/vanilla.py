"""The rival without boundaries: 1[success] - lam * C, optimised by DAPO (paper: vanilla RL).

From the same SFT router, tasks, seeds and number of episodes as BoPO. No difficulty, no reference,
no task's own costs, no distance to the SFT router.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from baar_jax.config import BoPOConfig
from baar_jax.episode import Episode
from baar_jax.run import Run
from baar_jax.stages.bopo import DIED, Method, Signal, by_task, rollout_metrics, train
from baar_jax.train import losses
from baar_jax.train.batches import Batch
from baar_jax.train.dataset import Profile, success

CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # DAPO's own
EPS = 1e-6  # beside the spread of rewards; groups without one are not kept


def improvement(config: BoPOConfig, logits_BxSxA, batch: Batch, signal: Signal):
  """A micro-batch's share of DAPO's loss, each decision of the batch counting the same.

  It is summed over decisions and divided by the batch's episodes: DAPO's mean times the decisions
  of an episode, so that its gradient is as large as BoPO's with ratios of trajectories at the same
  learning rate and eps (our choice; without an eps of weight AdamW would not see the difference).

  Args:
    logits_BxSxA: float32, the router's.
    batch, signal: as of `bopo.improvement`.
  """
  del config
  B = batch.mask_BxS.shape[0]
  decisions_per_row = batch.mask_BxS.sum() / B
  loss = (
    signal.episode_share
    * decisions_per_row
    * losses.dapo_loss(
      losses.action_logp(logits_BxSxA, batch.action_BxS),
      batch.logp_BxS,
      signal.adv_B,
      batch.mask_BxS,
      CLIP_LOW,
      CLIP_HIGH,
    )
  )
  entropy = signal.decision_share * losses.entropy(logits_BxSxA, batch.mask_BxS)
  return loss, {"loss": loss, "entropy": entropy}


def advantages(
  episodes: Sequence[Episode],
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  lam: float,
  config: BoPOConfig,
) -> tuple[list[Episode], np.ndarray, dict[str, float]]:
  """(R - mean) / std within each group that is neither all good nor all bad (DAPO).

  R is 1[success] - lam * C, and C the dollars over always-LARGE's mean of all training tasks: one
  unit for all (our choice, so that lam means the same in every environment).

  Returns:
    The episodes of such groups, adv_B, and metrics of all episodes.

  Raises:
    ValueError: there are no episodes.
  """
  del references, config
  if not episodes:
    raise ValueError(f"no episode of this batch came to its end: {DIED}")
  unit_usd = np.mean([profile.cost_large for profile in profiles.values()])
  kept, parts, rewards = [], [], []
  groups = by_task(episodes)
  for group in groups.values():
    good_G = np.array([success(e) for e in group], np.float64)
    reward_G = good_G - lam * np.array([e.cost_usd for e in group]) / unit_usd
    rewards.extend(reward_G)
    if 0 < good_G.sum() < len(group):
      kept.extend(group)
      parts.append((reward_G - reward_G.mean()) / (reward_G.std() + EPS))
  metrics = rollout_metrics(episodes, np.array(rewards))
  metrics["kept_groups"] = len(parts) / len(groups)
  return kept, np.concatenate(parts) if parts else np.zeros(0), metrics


VANILLA = Method("vanilla", improvement, advantages, anchored=False, pools=True)


def main(run: Run) -> None:
  for lam in run.config.bopo.lam:
    train(run, lam, VANILLA)
