"""The methods that train a router, as rows of one table: a loss, and advantages of rollouts."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from baar_jax.config import BoPOConfig
from baar_jax.episode import Episode
from baar_jax.train import losses, rewards
from baar_jax.train.dataset import Profile

MIN_GROUP = 2  # episodes; a smaller group has no mean to compare with
DAPO_EPS = 1e-6  # added to the spread of rewards; groups without a spread are not kept
RERUN = "see above what their environments died of, then run the same command again"
Advantages = tuple[list[Episode], np.ndarray, dict[str, float]]  # kept episodes, adv_B, metrics


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

  With `config.recentre` their mean over the batch is taken off again, after the clip (our choice).
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
  return kept, np.array(adv_B) - config.recentre * np.mean(adv_B), metrics


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
  "pretrain": Method(losses.next_token_loss, whole_vocabulary=True),
  "sft": Method(losses.sft_batch_loss),
  "cascade": Method(losses.sft_batch_loss),
  "single-turn": Method(losses.sft_batch_loss),
  "bopo": Method(losses.bopo_loss, bopo_advantages, anchored=True),
  "vanilla": Method(losses.dapo_loss, dapo_advantages, dynamic_sampling=True),
}
