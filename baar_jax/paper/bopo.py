"""Train a router by BoPO on its own episodes (paper: BoPO, Eqs. 5 to 8).

An update rolls out a group of episodes of each task, computes their advantages, takes
one gradient step on all of them, and yields what it did.

What is left out of the paper and of GRPO, and why:

1. Ratios other than 1: a rollout batch is used for one step only, and the router before
   this step has sampled it. So the gradient of Eq. 8 is that of A * log pi. The
   log-probabilities of live decisions, which in bfloat16 differ by hundredths from
   those of training, only show in the log.
2. The ratio's clip: it would never act. Ratios per decision and clips are in
   families/vanilla.py, where episodes wait for their step.
3. Estimates of the KL: a decision is between a few models, so the sum is exact.

What is added, all of it our choice:

1. An advantage's denominator has eps 0.1, and advantages are clipped, because a group
   of equal rewards would have an advantage of -1e8. At a small lam, all episodes of a
   hard task whose group fails are at or near the clip, whatever they cost.
2. The bonus of hard tasks is for successes only, as in the paper's table of rewards
   (Eq. 5 lacks the indicator).
3. AdamW has a weight decay, its rate may decay by a cosine, and gradients are clipped.
4. On a CPU the router is a small network on inputs of a step.

From GRPO it also differs in the reward, which is relative to the task's two boundary
costs; in the baseline, which is at least the reward of the task's reference trajectory;
and in the KL, which is measured from the SFT router.

Rollouts are asked of a function `play`, which plays the missing ones with the loop of
`rollout/loop.py`. The policy is a `RouterPolicy` that samples (router/policy.py).
Checkpoints and the log are written by families/family.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

import numpy as np

from baar_jax.config import BoPOConfig
from baar_jax.episode import Episode
from baar_jax.learn.batches import Batcher
from baar_jax.learn.trainer import ShardedRouter, Trainer
from baar_jax.paper import rewards
from baar_jax.paper.references import Profile, group_by_task
from baar_jax.rollout.jobs import Play, Rollouts
from baar_jax.rollout.specs import Job, RolloutSpec
from baar_jax.router.policy import RouterPolicy, sample

# The smallest number of episodes of a group. One episode alone would be compared with
# itself, because its reward is the mean of the group.
MIN_GROUP = 2


class RatedEpisode(NamedTuple):
  """Pair an episode to learn from with its advantage."""

  episode: Episode
  advantage: float


class Update(NamedTuple):
  """Report what an update did.

  Attributes:
    number: the number of the update, from 1.
    episodes: the number of episodes that it rolled out.
    metrics: the metrics of its rollouts, and of its gradient step.
    gradient_steps: 1, or 0 if its episodes wait, in vanilla RL only.
    waiting: the number of episodes that wait for a later update, in vanilla RL only.
  """

  number: int
  episodes: int
  metrics: dict[str, float]
  gradient_steps: int = 1
  waiting: int = 0


class Learner(NamedTuple):
  """Bundle a router with all it needs to learn from its own episodes.

  Attributes:
    config: the settings of BoPO, also for vanilla RL.
    trainer: the router, with its loss and optimizer.
    batcher: cuts episodes into micro-batches.
    anchor: the SFT router if the loss uses its logits, else None.
    rows: the most episodes that are live at once.
    label: the name of the method for readers.
  """

  config: BoPOConfig
  trainer: Trainer
  batcher: Batcher
  anchor: ShardedRouter | None = None
  rows: int = 1
  label: str = "BoPO"

  def act(self, spec: RolloutSpec) -> RouterPolicy:
    """Make the policy that samples its decisions from the current router.

    The policy has a copy of the router, and a KV cache if it reads texts. Both are
    freed after the rollouts, because the gradient needs the memory.
    """
    encoder = self.batcher.encoder
    reader = encoder.open_reader(self.trainer.model, self.rows, self.trainer.mesh)
    return RouterPolicy(spec, reader, partial(sample, spec.key))

  def learn(self, rated: Sequence[RatedEpisode]) -> dict[str, float]:
    """Take one gradient step on episodes, see `Trainer.step` for what it returns."""
    episodes, advantages = zip(*rated)
    batches = []
    for batch in self.batcher.micro_batches(episodes, advantages):
      if self.anchor:
        batch = batch._replace(ref_logits_BxSxA=self.anchor.logits(batch))
      batches.append(batch)
    return self.trainer.step(batches)


def bopo(
  play: Play,
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  learner: Learner,
  rollouts: Iterable[Rollouts],
) -> Iterator[Update]:
  """Update a router on its own episodes (paper: BoPO).

  Args:
    play: gives the episodes of rollouts.
    profiles: the profiles of the tasks, by task id.
    references: the reference trajectories tau* of the tasks, by task id.
    learner: the router that learns.
    rollouts: the policy of each update, with the cost weight lam, and its jobs.

  Yields:
    Each update when it has ended.

  Raises:
    ValueError: an update has no group.
  """
  for spec, jobs in rollouts:
    groups = roll_out(play, learner, spec, jobs)
    rated, metrics = compute_advantages(
      learner.config, groups, profiles, references, spec.lam
    )
    metrics |= learner.learn(rated)
    yield Update(spec.update, len(rated), metrics)


def roll_out(
  play: Play, learner: Learner, spec: RolloutSpec, jobs: Sequence[Job]
) -> list[list[Episode]]:
  """Collect the groups of an update: the episodes of each task.

  Errors can end episodes, so a group may have fewer than `MIN_GROUP` episodes. Such a
  group is left out.

  Raises:
    ValueError: there is no group.
  """
  name = f"{learner.label}, λ {spec.lam:g}"
  title = f"{name}, update {spec.update}/{learner.config.updates}"
  episodes = play(title, {spec: jobs}, learner.act)
  by_task = group_by_task(episodes)
  groups = [group for group in by_task.values() if len(group) >= MIN_GROUP]
  if not groups:
    raise ValueError(
      f"{name}, training seed {spec.training_seed}, update {spec.update}: no task has "
      f"{MIN_GROUP} episodes: correct the errors above, and run the same command again"
    )
  return groups


def compute_advantages(
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
    All episodes with their advantages, and metrics: those of `summarize_rollouts` and
    of `summarize_advantages`.
  """
  clip = config.advantage_clip
  rated = []
  reward_B = []
  advantages = []
  for group in groups:
    id_ = group[0].task_id
    profile = profiles[id_]
    episodes = [*group, references[id_]]
    costs = [e.cost_usd for e in episodes]
    successes = [e.success for e in episodes]
    cost_norm = rewards.normalized_cost(costs, profile.cost_small, profile.cost_large)
    *reward_G, reference_reward = rewards.boundary_reward(
      successes, profile.hard, cost_norm, lam, r_hard=config.r_hard
    )
    if not config.reference_guided:
      reference_reward = np.mean(reward_G)  # Then the baseline of Eq. 7 is the mean.
    adv_G = rewards.reference_advantage(
      reward_G, reference_reward, config.advantage_eps, clip
    )
    reward_B.extend(reward_G)
    rated += map(RatedEpisode, group, adv_G)
    advantages.append(adv_G)
  metrics = summarize_rollouts(groups, reward_B)
  return rated, metrics | summarize_advantages(advantages, clip)


def summarize_rollouts(
  groups: Sequence[list[Episode]], reward_B: Sequence[float]
) -> dict[str, float]:
  """Summarize the rollouts of one update for the log.

  Args:
    groups: each has the sampled episodes of one task.
    reward_B: the reward of each episode, over all groups.

  Returns:
    Means over episodes: `reward`, `success` (share in [0, 1]) and `cost_usd` (dollars).
    `large_share` is the share of LARGE calls among all steps. `mixed_share` is the
    share of groups in which some episodes succeed and some fail.
  """
  episodes = sum(groups, [])
  steps = sum(len(e.steps) for e in episodes)
  return {
    "reward": fmean(reward_B),
    "success": fmean(e.success for e in episodes),
    "large_share": sum(e.large_calls for e in episodes) / steps,
    "cost_usd": fmean(e.cost_usd for e in episodes),
    "mixed_share": fmean(map(is_mixed, groups)),
  }


def is_mixed(group: Iterable[Episode]) -> bool:
  """Tell whether some episodes of a group succeed and some fail."""
  return len({episode.success for episode in group}) == 2


def summarize_advantages(
  advantages: Sequence[np.ndarray], clip: float
) -> dict[str, float]:
  """Summarize the advantages of one update for the log.

  Args:
    advantages: the advantages of each group's episodes.
    clip: the largest absolute advantage.

  Returns:
    `clipped_groups` is the number of groups with a clipped advantage.
    `nonpositive_share` is the share of groups without an advantage above 0.
  """
  clipped = sum((np.abs(adv_G) >= clip).any() for adv_G in advantages)
  return {
    "clipped_groups": int(clipped),
    "nonpositive_share": fmean(adv_G.max() <= 0 for adv_G in advantages),
  }
