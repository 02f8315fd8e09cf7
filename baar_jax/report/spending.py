"""Where the money goes: by difficulty, along the episode, and per training task."""

from collections.abc import Mapping, Sequence

import numpy as np

from baar_jax.config import ABLATIONS
from baar_jax.report.samples import Sample, boundaries
from baar_jax.train import rewards
from baar_jax.train.dataset import Profile

DIFFICULTIES = ("easy", "hard", "intractable")


def spend(
  policies: Sequence[dict], samples: Sequence[Sample], best: dict | None, easy_rate: float
) -> dict:
  """Where the money goes: shares of dollars and of LARGE calls by the test tasks' difficulty.

  Difficulty is that of the evaluation's own boundary episodes. A family with several soft points
  is shown at the one whose cost is nearest to the headline's. Ablations are left out.
  """
  small, large = boundaries(samples)
  difficulty_N = [
    rewards.difficulty(*([t.success for t in s.trials[task]] for s in (small, large)), easy_rate)
    for task in small.trials
  ]
  rows = []
  for family in dict.fromkeys(p["family"] for p in policies if p["family"] not in ABLATIONS):
    own = [i for i, p in enumerate(policies) if p["family"] == family and p["call_budget"] is None]
    if not own:
      continue
    target_usd = policies[best["index"] if best else own[0]]["cost_usd"]
    index = min(own, key=lambda i: abs(policies[i]["cost_usd"] - target_usd))
    rows.append(
      {
        "family": family,
        "parameters": policies[index]["parameters"],
        "index": index,
        "cost_share": _shares(samples[index].mean_N("cost_usd"), difficulty_N),
        "large_share": _shares(samples[index].mean_N("large_calls"), difficulty_N),
        "large_share_by_progress": samples[index].large_share_by_progress(),
      }
    )
  return {
    "difficulty": dict(zip(small.trials, difficulty_N)),
    "task_mix": _shares(np.ones(len(difficulty_N)), difficulty_N),
    "policies": rows,
  }


def costs(profiles: Mapping[str, Profile]) -> list[dict]:
  """Per training task: median dollars of either boundary; inverted is SMALL dearer than LARGE."""
  return [
    {
      "task_id": task_id,
      "difficulty": profile.difficulty,
      "small_usd": profile.cost_small,
      "large_usd": profile.cost_large,
      "inverted": profile.cost_small > profile.cost_large,
    }
    for task_id, profile in profiles.items()
  ]


def _shares(value_N: np.ndarray, difficulty_N: Sequence[str]) -> dict[str, float] | None:
  """Each difficulty's part of a sum over tasks; None if the sum is 0."""
  total = float(np.sum(value_N))
  if total == 0.0:
    return None
  is_D_N = {d: np.array([difficulty == d for difficulty in difficulty_N]) for d in DIFFICULTIES}
  return {d: float(value_N[is_N].sum()) / total for d, is_N in is_D_N.items()}
