"""Difficulty, normalised cost, reward and advantage (paper, section 4): pure NumPy."""

from collections.abc import Sequence

import numpy as np


def difficulty(
  small_successes: Sequence[bool], large_successes: Sequence[bool], easy_rate: float = 0.8
) -> str:
  """A task's class, "easy", "hard" or "intractable" (the paper's Task Difficulty Taxonomy).

  Easy: SMALL succeeds in at least `easy_rate` of its trials. Hard: not easy, and LARGE succeeds at
  least once. Intractable: neither, also where SMALL got lucky below the rate. The rate is over the
  trials that exist, also where there are fewer than planned (our choice). Raises ValueError if a
  model has no trial.
  """
  if len(small_successes) == 0 or len(large_successes) == 0:
    counts = f"{len(small_successes)} of SMALL and {len(large_successes)} of LARGE"
    raise ValueError(f"difficulty needs a trial of each model, got {counts}")
  if sum(map(bool, small_successes)) / len(small_successes) >= easy_rate:
    return "easy"
  return "hard" if any(large_successes) else "intractable"


def normalized_cost(cost, cost_small, cost_large, eps: float = 1e-9):
  """Where a cost lies between the boundaries' (paper, C_norm), clipped to [0, 1].

  The boundaries may be inverted: the lower of the two is 0 whichever model it belongs to. Equal
  boundaries give 0 up to them and rise to 1 within `eps` dollars above. Costs are dollars, floats
  or arrays that broadcast. Raises ValueError if one is not finite.
  """
  costs = cost, cost_small, cost_large
  if not all(np.all(np.isfinite(value)) for value in costs):
    raise ValueError(f"costs must be finite, got {costs}")
  low, high = np.minimum(cost_small, cost_large), np.maximum(cost_small, cost_large)
  share = np.clip((np.asarray(cost, np.float64) - low) / (high - low + eps), 0.0, 1.0)
  return float(share) if share.ndim == 0 else share


def boundary_reward(
  success, hard, cost_norm, lam: float, r_success: float = 1.0, r_hard: float = 0.5
):
  """1[success] * (r_success + r_hard * 1[hard]) - lam * C_norm (paper, Eq. reward).

  The indicator of success on both terms is in the paper's reward table, not in its equation. The
  first three arguments are scalars or arrays that broadcast.
  """
  gain = np.asarray(success, bool) * (r_success + r_hard * np.asarray(hard, bool))
  reward = gain - lam * np.asarray(cost_norm, np.float64)
  return float(reward) if np.ndim(reward) == 0 else reward


def reference_advantage(reward_G, reference_reward: float, eps: float = 0.1, clip: float = 5.0):
  """(R_g - max(mean_G R, R(reference))) / (std_G R + eps), clipped (paper, Eq. advantage).

  The std is the population's. A group of equal rewards below the reference has std 0 and is
  pushed down by its distance from the reference over `eps`; eps = 0.1 and the clip are our
  choices, since a tiny eps makes that push unbounded. Raises ValueError if reward_G is not one
  non-empty group, or a reward is not finite.
  """
  reward_G = np.asarray(reward_G, np.float64)
  if reward_G.ndim != 1 or reward_G.size == 0:
    raise ValueError(f"reward_G must be one non-empty group, got shape {reward_G.shape}")
  if not (np.all(np.isfinite(reward_G)) and np.isfinite(reference_reward)):
    raise ValueError(f"rewards must be finite, got {reward_G} and reference {reference_reward}")
  # The ratio is the same in any unit; in this one neither a sum nor a square overflows.
  unit = max(1.0, np.abs(reward_G).max(), abs(reference_reward))
  reward_G = reward_G / unit
  baseline = max(reward_G.mean(), reference_reward / unit)
  scale = reward_G.std() + max(eps / unit, np.finfo(np.float64).tiny)
  with np.errstate(over="ignore"):  # an infinite ratio is what the clip is for
    return np.clip((reward_G - baseline) / scale, -clip, clip)
