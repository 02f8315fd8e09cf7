"""Train a router by BoPO on its own episodes (paper: BoPO, Eqs. 5 to 8).

An update rolls out a group of episodes of each task, computes their advantages, takes
gradient steps, and yields what it did.

From GRPO it differs in the reward, which is relative to the task's two boundary costs;
in the baseline, which is at least the reward of the task's reference trajectory; in the
probability ratio, which is of whole trajectories; and in the KL, which is measured from
the SFT router.

From the paper it differs in these points, all of them our choice. An advantage's
denominator has eps 0.1, and advantages are clipped, because a group of equal rewards
would have an advantage of -1e8. The bonus of hard tasks is for successes only, as in
the paper's table of rewards (Eq. 5 lacks the indicator). The KL is the exact sum over
models. AdamW has a weight decay, its rate may decay by a cosine, and gradients are
clipped. On a CPU the router is a small network on inputs of a step.

Rollouts are asked of a `Source`, which plays the missing ones with the loop of
`rollout/loop.py`. A policy is described by a `PolicySpec` (rollout/specs.py), and here
it is a `RouterPolicy` that samples (router/policy.py). Checkpoints and the log are
written by stages/train.py.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from baar_jax.config import BoPOConfig
from baar_jax.episode import Episode
from baar_jax.learn.batches import Batch, Batcher, sum_others
from baar_jax.learn.trainer import ShardedRouter, Trainer
from baar_jax.paper import losses, rewards
from baar_jax.paper.references import Profile, group_by_task
from baar_jax.rollout.jobs import Planned, Source, label_family
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.policy import RouterPolicy, Sample

# The smallest number of episodes of a group. One episode alone would be compared with
# itself, because its reward is the mean of the group.
MIN_GROUP = 2
BATCH_EPISODES = 64  # The number of episodes per gradient step.


class RatedEpisode(NamedTuple):
  """Pair an episode to learn from with its advantage."""

  episode: Episode
  advantage: float


class Update(NamedTuple):
  """Report what an update did.

  Attributes:
    number: the number of the update, from 1.
    episodes: the number of episodes that it rolled out.
    gradient_steps: the number of gradient steps that it took.
    metrics: the metrics of its rollouts, and of its gradient steps.
    waiting: the number of episodes that wait for a later update, in vanilla RL only.
  """

  number: int
  episodes: int
  gradient_steps: int
  metrics: dict[str, float]
  waiting: int = 0


class Learner(NamedTuple):
  """Bundle a router with all it needs to learn from its own episodes.

  Attributes:
    config: the settings of BoPO, also for vanilla RL.
    trainer: the router, with its loss and optimizer.
    batcher: cuts episodes into micro-batches.
    anchor: the SFT router if the loss uses its logits, else None.
    rows: the most episodes that are live at once.
    seed: the seed of the order of episodes.
  """

  config: BoPOConfig
  trainer: Trainer
  batcher: Batcher
  anchor: ShardedRouter | None = None
  rows: int = 1
  seed: int = 0

  def act(self, spec: PolicySpec) -> RouterPolicy:
    """Make the policy that samples its decisions from the current router.

    The policy has a copy of the router, and a KV cache if it reads texts. Both are
    freed after the rollouts, because the gradient needs the memory.
    """
    encoder = self.batcher.encoder
    reader = encoder.open_reader(self.trainer.model, self.rows, self.trainer.mesh)
    return RouterPolicy(spec, reader, Sample(spec.key))

  def fill(self, batch: Batch, log_ratio_BxS: np.ndarray) -> Batch:
    """Add log-probabilities and the SFT router's logits to a batch.

    This must happen before the first gradient step of an update, with the log ratios
    that `compare` computes then.

    In float32 `logp_BxS` stays as it was sampled. In bfloat16 it is computed again (our
    choice). The reason: rollouts use a KV cache, and their log-probabilities differ by
    hundredths from those of a training pass. The probability ratio of a trajectory
    would add up these errors. An episode that has waited for its batch counts as one of
    the current router then.
    """
    if self.trainer.low_precision:
      batch = batch._replace(logp_BxS=batch.logp_BxS + log_ratio_BxS)
    if self.anchor:
      ref_logits_BxSxA = self.anchor.logits(batch)
      batch = batch._replace(ref_logits_BxSxA=ref_logits_BxSxA)
    return batch

  def compare(self, batch: Batch) -> np.ndarray:
    """Compute the log ratio of each decision: log pi(a) - `logp_BxS`; 0 on padding."""
    logp_BxS = losses.action_logp(self.trainer.logits(batch), batch.action_BxS)
    return np.where(batch.mask_BxS, logp_BxS - batch.logp_BxS, 0.0)

  def step(self, batches: Sequence[Batch]) -> dict[str, float]:
    """Take a gradient step, see `Trainer.step`.

    The ratio of a trajectory needs the sum over all rows of its episode. If an episode
    has several rows, their sums are computed first, without a gradient.
    """
    if min(batch.part_B.min() for batch in batches) < 1:
      sums = [self.compare(batch).sum(axis=1) for batch in batches]
      others = sum_others(batches, sums)
      batches = [
        batch._replace(other_B=other_B) for batch, other_B in zip(batches, others)
      ]
    return self.trainer.step(batches)


def count_steps(config: BoPOConfig, episodes: int) -> int:
  """Count the gradient steps on a rollout batch of this number of episodes."""
  return config.epochs * math.ceil(episodes / BATCH_EPISODES)


def count_all_steps(config: BoPOConfig, tasks: int) -> int:
  """Count the gradient steps of a whole BoPO training on this number of tasks."""
  episodes = min(config.tasks_per_update, tasks) * config.group_size
  return config.updates * count_steps(config, episodes)


def bopo(
  source: Source,
  profiles: Mapping[str, Profile],
  references: Mapping[str, Episode],
  learner: Learner,
  rollouts: Iterable[Planned],
) -> Iterator[Update]:
  """Update a router on its own episodes (paper: BoPO).

  Args:
    source: gives the episodes of rollouts.
    profiles: the profiles of the tasks, by task id.
    references: the reference trajectories tau* of the tasks, by task id.
    learner: the router that learns.
    rollouts: the rollouts of each update, with the cost weight lam in their policy.

  Yields:
    Each update when it has ended.

  Raises:
    ValueError: an update has no group.
  """
  for planned in rollouts:
    groups = roll_out(source, learner, planned)
    rated, metrics = compute_advantages(
      learner.config, groups, profiles, references, planned.spec.lam
    )
    metrics |= update_policy(learner, rated, planned.spec.update)
    steps = count_steps(learner.config, len(rated))
    yield Update(planned.spec.update, len(rated), steps, metrics)


def roll_out(source: Source, learner: Learner, planned: Planned) -> list[list[Episode]]:
  """Collect the groups of an update: the episodes of each task.

  Errors can end episodes, so a group may have fewer than `MIN_GROUP` episodes. Such a
  group is left out.

  Raises:
    ValueError: there is no group.
  """
  spec = planned.spec
  name = f"{label_family(spec.family)}, λ {spec.lam:g}"
  title = f"{name}, update {spec.update}/{learner.config.updates}"
  episodes = source.episodes(title, [planned], learner.act)
  by_task = group_by_task(episodes)
  groups = [group for group in by_task.values() if len(group) >= MIN_GROUP]
  if not groups:
    raise ValueError(
      f"{name}, training seed {spec.seed or 0}, update {spec.update}: no task has "
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
    *reward_G, reference = rewards.boundary_reward(
      successes, profile.hard, cost_norm, lam, r_hard=config.r_hard
    )
    if not config.reference_guided:
      # `reference_advantage` takes the larger of the mean and this number as baseline.
      # The least reward is never above the mean, so the mean is the baseline.
      reference = min(reward_G)
    adv_G = rewards.reference_advantage(reward_G, reference, config.advantage_eps, clip)
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
  count = len(episodes)
  steps = sum(len(e.steps) for e in episodes)
  return {
    "reward": float(np.mean(reward_B)),
    "success": sum(e.success for e in episodes) / count,
    "large_share": sum(e.large_calls for e in episodes) / steps,
    "cost_usd": sum(e.cost_usd for e in episodes) / count,
    "mixed_share": float(np.mean([is_mixed(group) for group in groups])),
  }


def is_mixed(group: Iterable[Episode]) -> bool:
  """Tell whether some episodes of a group succeed and some fail."""
  return len({episode.success for episode in group}) == 2


def summarize_advantages(
  advantages: Sequence[np.ndarray], clip: float
) -> dict[str, float]:
  """Summarize the advantages of one update for the log.

  Args:
    advantages: the advantages A of each group's n episodes.
    clip: the largest absolute advantage.

  Returns:
    `clipped_groups` is the number of groups with a clipped advantage.
    `nonpositive_share` is the share of groups without an advantage above 0.
    `offset_share` is the share of sum A^2 that is common to a group's episodes: the sum
    over groups of n * mean(A)^2, divided by the sum over episodes of A^2. It is 0 if
    all advantages are 0.
  """
  clipped = sum((np.abs(adv_G) >= clip).any() for adv_G in advantages)
  nonpositive = sum((adv_G <= 0).all() for adv_G in advantages)
  offset = sum(len(adv_G) * adv_G.mean() ** 2 for adv_G in advantages)
  total = np.square(np.concatenate(advantages)).sum()
  return {
    "clipped_groups": int(clipped),
    "nonpositive_share": float(nonpositive / len(advantages)),
    "offset_share": float(offset / total) if total else 0.0,
  }


def update_policy(
  learner: Learner, rated: Sequence[RatedEpisode], update: int
) -> dict[str, float]:
  """Take the gradient steps of one update.

  In each of `epochs` passes the episodes are shuffled and cut into batches of
  `BATCH_EPISODES`.

  Args:
    learner: the router that learns.
    rated: the episodes with their advantages.
    update: the number of the update, which decides the shuffles.

  Returns:
    The means of the metrics over the gradient steps; and `max_log_ratio`, the largest
    |log ratio| of a decision at the first step, before `Learner.fill`, in nats. It
    shows how far the computation of live decisions differs from that of training; for
    episodes that have waited in vanilla RL it contains what the router has learnt.
  """
  config = learner.config
  draw = random.Random(learner.seed + update)
  step_batches = []
  for _ in range(config.epochs):
    order = draw.sample(rated, len(rated))
    for first in range(0, len(order), BATCH_EPISODES):
      episodes, advantages = zip(*order[first : first + BATCH_EPISODES])
      batches = learner.batcher.micro_batches(episodes, np.array(advantages))
      log_ratios = [learner.compare(batch) for batch in batches]
      if not step_batches:
        largest = max(np.abs(log_ratio_BxS).max() for log_ratio_BxS in log_ratios)
      step_batches.append([*map(learner.fill, batches, log_ratios)])
  steps = [learner.step(batches) for batches in step_batches]
  means = {"max_log_ratio": float(largest)}
  for name in steps[0]:
    means[name] = float(np.mean([metrics[name] for metrics in steps]))
  return means
