"""Difficulty, normalised cost, reward and advantage (paper, section 4): pure NumPy."""

from collections.abc import Sequence

import numpy as np


def difficulty(
  small_successes: Sequence[bool],
  large_successes: Sequence[bool],
  easy_rate: float = 0.8,
) -> str:
  """A task's class, "easy", "hard" or "intractable" (the paper's Task Difficulty Taxonomy).

  Easy: SMALL succeeds in at least `easy_rate` of its trials. Hard: not easy, and LARGE succeeds at
  least once. Intractable: neither, also where SMALL got lucky below the rate. The rate is over the
  trials that exist (our choice). Raises ValueError if a model has no trial.
  """
  if len(small_successes) == 0 or len(large_successes) == 0:
    raise ValueError("difficulty needs a trial of each model")
  if sum(map(bool, small_successes)) / len(small_successes) >= easy_rate:
    return "easy"
  return "hard" if any(large_successes) else "intractable"


def normalized_cost(cost, cost_small, cost_large, eps: float = 1e-9):
  """Where a cost lies between the boundaries' (paper, C_norm), clipped to [0, 1].

  The boundaries may be inverted: the lower of the two is 0 whichever model it belongs to. Costs are
  finite dollars, floats or arrays that broadcast.
  """
  low, high = np.minimum(cost_small, cost_large), np.maximum(cost_small, cost_large)
  return np.clip((np.asarray(cost, np.float64) - low) / (high - low + eps), 0.0, 1.0)


def boundary_reward(success, hard, cost_norm, lam: float, r_success=1.0, r_hard=0.5):
  """1[success] * (r_success + r_hard * 1[hard]) - lam * C_norm (paper, Eq. reward).

  The indicator of success on both terms is in the paper's reward table, not in its equation. The
  first three arguments are scalars or arrays that broadcast.
  """
  gain = np.asarray(success, bool) * (r_success + r_hard * np.asarray(hard, bool))
  return gain - lam * np.asarray(cost_norm, np.float64)


def reference_advantage(
  reward_G, reference_reward: float, eps: float = 0.1, clip: float = 5.0
):
  """(R_g - max(mean_G R, R(reference))) / (std_G R + eps), clipped (paper, Eq. advantage).

  The std is the population's. eps and the clip are our choices: a group of equal rewards below the
  reference has std 0, and with a tiny eps its advantages are unbounded. Raises ValueError unless
  `reward_G` is one non-empty group and all rewards are finite.
  """
  reward_G = np.asarray(reward_G, np.float64)
  finite = np.isfinite(reward_G).all() and np.isfinite(reference_reward)
  if reward_G.ndim != 1 or reward_G.size == 0 or not finite:
    got = f"got {reward_G} and reference {reference_reward}"
    raise ValueError(f"rewards must be one non-empty group of finite numbers, {got}")
  baseline = max(reward_G.mean(), reference_reward)
  return np.clip((reward_G - baseline) / (reward_G.std() + eps), -clip, clip)
