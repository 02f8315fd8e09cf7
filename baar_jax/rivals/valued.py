"""Pick models from the value heads' advantages by the rules of other routers."""

import numpy as np

from baar_jax.conditioned.policy import Situation, pick_best


def escalate_once(advantage_A: np.ndarray, situation: Situation) -> int:
  """Pick the best model, but none cheaper than a model that has acted (SWE-Router).

  With two models SMALL acts until the value heads choose LARGE once, and then LARGE
  acts to the end (arXiv 2607.00053).
  """
  return max([pick_best(advantage_A, situation), *situation.models])


def stay_warm(advantage_A: np.ndarray, situation: Situation) -> int:
  """Stay with the last model unless a switch is worth its dollars (Weave, Plano).

  The last model acts unless another model's Q value is larger even without the value
  of the dollars of the switch. At the first step the model with the largest Q value
  acts.
  """
  if not situation.models:
    return pick_best(advantage_A, situation)
  last_model = situation.models[-1]
  value_A = advantage_A - situation.switch_A
  value_A[last_model] = advantage_A[last_model]
  best = pick_best(value_A, situation)
  return best if value_A[best] > value_A[last_model] else last_model
