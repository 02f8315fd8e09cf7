"""95 % intervals of means over tasks and training seeds; pure NumPy.

Axes: B resamples (the first is no resample), P policies, N tasks, R training seeds.
"""

from typing import NamedTuple

import numpy as np

MIN_USABLE_SHARE = 0.5  # of resamples that have a value; below it there is no interval (our choice)
# What is taken off for the luck of episodes, in parts of what it explains on average: more than 1,
# because only what is left above 0 counts (our choice, by simulation).
NOISE_SHARE = 1.5


class Draws(NamedTuple):
  """What is drawn once for all results, so that their differences are paired."""

  weight_BxN: np.ndarray  # the share of each task
  push_BxR: np.ndarray  # how far each training seed's own deviation counts


def draw(tasks: int, training_seeds: int, resamples: int, seed: int = 0) -> Draws:
  """Draws tasks with replacement, and the luck of training.

  A mean over R normal deviations has the interval of Student's t with R - 1 degrees of freedom. Out
  of three, resampling with replacement knows nothing of it, so normal weights are drawn for the
  deviations, and as in t divided by the root of a chi-square over its degrees.
  """
  rng, R = np.random.default_rng(seed), training_seeds
  weight_BxN = np.vstack(
    [np.ones(tasks), rng.multinomial(tasks, np.ones(tasks) / tasks, resamples)]
  )
  push_BxR = np.zeros((resamples + 1, R))
  if R > 1:
    scale_Bx1 = np.sqrt(R * rng.chisquare(R - 1, size=(resamples, 1)))
    push_BxR[1:] = rng.normal(size=(resamples, R)) / scale_Bx1
  return Draws(weight_BxN / tasks, push_BxR)


def means(value_PxNxR: np.ndarray, trained_P: np.ndarray, draws: Draws) -> np.ndarray:
  """mean_PxB: over all tasks and training seeds, then in each resample.

  The mean over tasks is resampled as it is: that carries the tasks' luck and that of episodes. To
  it comes, for trained policies, the deviation of each training seed's mean, shrunk by what the
  luck of episodes explains of its variance (analysis of variance: their mean squares' ratio).
  Resampling both axes at once would count that luck thrice. NOISE_SHARE of it is taken off: with
  all of it, deviations of training are missed where three seeds happen to be alike (our choice, by
  simulation; docs/evaluation.md). A task may lack some seeds (nan), the same for all policies.
  """
  N, R = value_PxNxR.shape[1:]
  value_PxN = np.nanmean(value_PxNxR, axis=2)
  mean_PxB = value_PxN @ draws.weight_BxN.T
  if R == 1:
    return mean_PxB
  rest_PxNxR = value_PxNxR - value_PxN[..., None]
  deviation_PxR = np.nanmean(rest_PxNxR, axis=1)
  rest_PxNxR = rest_PxNxR - deviation_PxR[:, None]
  between_P = N * (deviation_PxR**2).sum(axis=1)
  noise_P = np.nansum(rest_PxNxR**2, axis=(1, 2)) / (N - 1) if N > 1 else between_P
  kept_P = np.clip(1 - NOISE_SHARE * noise_P / np.maximum(between_P, 1e-300), 0, None) ** 0.5
  return mean_PxB + (trained_P * kept_P)[:, None] * deviation_PxR @ draws.push_BxR.T


def interval(name: str, value_B: np.ndarray) -> dict[str, float]:
  """name, name_low and name_high: a value and its 95 % percentile bootstrap interval (Efron 1979).

  value_B[0] is the value itself, the others are of resamples, NaN where there is none.
  """
  drawn = value_B[1:][np.isfinite(value_B[1:])]
  low = high = np.nan
  if np.isfinite(value_B[0]) and len(drawn) >= MIN_USABLE_SHARE * (len(value_B) - 1):
    low, high = np.percentile(drawn, [2.5, 97.5])
  return {name: float(value_B[0]), f"{name}_low": float(low), f"{name}_high": float(high)}
