"""Profile, difficulty, normalised cost, reward, advantage (paper, section 4): NumPy."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from baar_jax.episode import Episode


@dataclasses.dataclass(frozen=True)
class Profile:
  """What the boundary policies showed of a task."""

  difficulty: str  # "easy", "hard" or "intractable"
  cost_small: float  # median dollars of an episode of always-SMALL
  cost_large: float
  small: Sequence[Episode]  # the trials of always-SMALL
  large: Sequence[Episode]

  @property
  def hard(self) -> bool:
    """Tell whether the task is hard."""
    return self.difficulty == "hard"


def mean_large_usd(profiles: Iterable[Profile]) -> float:
  """Average always-LARGE's median dollars over tasks: a unit of cost (our choice)."""
  return np.mean([profile.cost_large for profile in profiles])


def difficulty(
  small_successes: Sequence[bool],
  large_successes: Sequence[bool],
  easy_rate: float = 0.8,
) -> str:
  """Classify a task (the paper's Task Difficulty Taxonomy).

  Easy: SMALL succeeds in at least `easy_rate` of its trials. Hard: not easy, and LARGE
  succeeds at least once. Intractable: neither, also if SMALL got lucky below the rate.
  The rate is over the trials that exist (our choice).

  Returns:
    "easy", "hard" or "intractable".

  Raises:
    ValueError: a model has no trial.
  """
  if len(small_successes) == 0 or len(large_successes) == 0:
    raise ValueError("difficulty needs a trial of each model")
  rate = sum(map(bool, small_successes)) / len(small_successes)
  if rate >= easy_rate:
    return "easy"
  return "hard" if any(large_successes) else "intractable"


def normalized_cost(
  cost: ArrayLike, cost_small: ArrayLike, cost_large: ArrayLike, eps: float = 1e-9
) -> np.ndarray:
  """Place a cost between the boundaries' (paper, C_norm), clipped to [0, 1].

  The boundaries may be inverted: the lower of the two is 0, whichever model's it is.
  Costs are finite dollars, floats or arrays that broadcast.
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
  """Compute the reward of episodes (paper, Eq. reward).

  It is 1[success] * (r_success + r_hard * 1[hard]) - lam * C_norm. The indicator of
  success on both terms is in the paper's reward table, not in its equation. The first
  three arguments are scalars or arrays that broadcast.
  """
  gain = np.asarray(success, bool) * (r_success + r_hard * np.asarray(hard, bool))
  return gain - lam * np.asarray(cost_norm, np.float64)


def reference_advantage(
  reward_G: ArrayLike, reference_reward: float, eps: float = 0.1, clip: float = 5.0
) -> np.ndarray:
  """Compute the advantages of a group, clipped (paper, Eq. advantage).

  They are (R_g - max(mean_G R, R(reference))) / (std_G R + eps), with the population's
  std. eps and the clip are our choices: a group of equal rewards below the reference
  has std 0, and with a tiny eps its advantages are unbounded.

  Raises:
    ValueError: `reward_G` is not one non-empty group, or a reward is not finite.
  """
  reward_G = np.asarray(reward_G, np.float64)
  finite = np.isfinite(reward_G).all() and np.isfinite(reference_reward)
  if reward_G.ndim != 1 or reward_G.size == 0 or not finite:
    got = f"got {reward_G} and reference {reference_reward}"
    raise ValueError(f"rewards must be one non-empty group of finite numbers, {got}")
  baseline = max(reward_G.mean(), reference_reward)
  return np.clip((reward_G - baseline) / (reward_G.std() + eps), -clip, clip)
