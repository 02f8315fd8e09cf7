"""Compute difficulty, normalised cost, reward and advantage (paper Eqs. 5 to 7).

Each function takes numbers. `paper/bopo.py` calls them with the episodes of a group.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def difficulty(
  small_successes: Sequence[bool],
  large_successes: Sequence[bool],
  easy_rate: float = 0.8,
) -> str:
  """Classify a task by the successes of its trials (paper: Task Difficulty Taxonomy).

      easy         always-SMALL succeeds in at least `easy_rate` of its trials
      hard         not easy, and always-LARGE succeeds at least once
      intractable  not easy, and always-LARGE never succeeds

  A task is intractable even if always-SMALL succeeded in a few trials (our choice; two
  of the paper's classes apply to it).

  Args:
    small_successes: one bool per trial of always-SMALL.
    large_successes: one bool per trial of always-LARGE.
    easy_rate: the least success rate of always-SMALL on an easy task. Trials that an
      error ended do not count (our choice).

  Returns:
    "easy", "hard" or "intractable".

  Raises:
    ValueError: one of the boundaries has no trial.
  """
  if len(small_successes) == 0 or len(large_successes) == 0:
    raise ValueError(
      "got no trials: pass at least one of always-SMALL and one of always-LARGE"
    )
  rate = sum(map(bool, small_successes)) / len(small_successes)
  if rate >= easy_rate:
    return "easy"
  return "hard" if any(large_successes) else "intractable"


def normalized_cost(
  cost: ArrayLike, cost_small: ArrayLike, cost_large: ArrayLike, eps: float = 1e-9
) -> np.ndarray:
  """Compute the normalised cost of an episode, in [0, 1] (paper Eq. 6).

      C_norm = clip((C - C_min) / (C_max - C_min + eps), 0, 1)

  C_min and C_max are the smaller and the larger of the two boundary costs. On some
  tasks always-SMALL costs more than always-LARGE.

  Args:
    cost: C, finite US dollars of one or more episodes.
    cost_small: median US dollars of always-SMALL.
    cost_large: median US dollars of always-LARGE.
    eps: US dollars added to the difference of the boundary costs (our choice; the paper
      states no number). The result is finite even if both are equal.

  Returns:
    float64, of the shape that the arguments broadcast to.
  """
  low = np.minimum(cost_small, cost_large)
  high = np.maximum(cost_small, cost_large)
  share = (np.asarray(cost, np.float64) - low) / (high - low + eps)
  return np.clip(share, 0.0, 1.0)


def boundary_reward(
  success: ArrayLike,
  hard: ArrayLike,
  cost_norm: ArrayLike,
  lam: float,
  r_success: float = 1.0,
  r_hard: float = 0.5,
) -> np.ndarray:
  """Compute the boundary-relative reward of episodes (paper Eq. 5).

      R = 1[success] * (r_success + r_hard * 1[hard]) - lam * C_norm

  Eq. 5 lacks the factor 1[success]; the paper's table of rewards has it.

  Args:
    success: bool, one value or one per episode.
    hard: bool, whether the task is hard.
    cost_norm: C_norm, see `normalized_cost`.
    lam: the cost weight.
    r_success: the reward of a success.
    r_hard: the additional reward of a success on a hard task.

  Returns:
    float64, of the shape that the first three arguments broadcast to.
  """
  gain = np.asarray(success, bool) * (r_success + r_hard * np.asarray(hard, bool))
  return gain - lam * np.asarray(cost_norm, np.float64)


def reference_advantage(
  reward_G: ArrayLike, reference_reward: float, eps: float = 0.1, clip: float = 5.0
) -> np.ndarray:
  """Compute the reference-guided advantages of one group (paper Eq. 7).

      A_g = clip((R_g - max(mean_G R, R(tau*))) / (std_G R + eps), -clip, clip)

  If all episodes of a group fail and the reference succeeds, all advantages are
  negative (for lam < 1). The standard deviation is the population's, and 0 if all
  rewards are equal. A tiny eps would then give huge advantages, so eps = 0.1 and the
  clip are our choices.

  Args:
    reward_G: the rewards of the group's episodes.
    reference_reward: R(tau*), the reward of the task's reference trajectory.
    eps: added to the standard deviation.
    clip: the largest absolute advantage.

  Returns:
    float64 advantage_G.

  Raises:
    ValueError: `reward_G` is empty or not one-dimensional, or a reward is not finite.
  """
  reward_G = np.asarray(reward_G, np.float64)
  is_group = reward_G.ndim == 1 and reward_G.size > 0
  if not is_group or not np.isfinite([*reward_G, reference_reward]).all():
    raise ValueError(
      f"got rewards {reward_G} and reference reward {reference_reward}:"
      " pass one non-empty group of finite numbers"
    )
  baseline = max(reward_G.mean(), reference_reward)
  return np.clip((reward_G - baseline) / (reward_G.std() + eps), -clip, clip)
