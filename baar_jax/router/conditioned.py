"""The budget-conditioned router as a policy: the model of the largest value."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from baar_jax.episode import SMALL, Step
from baar_jax.rollout.specs import Cap, Live, PolicySpec
from baar_jax.router.head import (
  FACTS,
  Heads,
  count_calls_left,
  count_progress,
  describe,
  estimate,
)
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.qwen2 import Qwen2, check_finite
from baar_jax.router.view import View


class ConditionedPolicy(RouterPolicy):
  """Takes the model of the largest value, by what is left and by the cost weight."""

  reads_hidden = True

  def __init__(
    self,
    spec: PolicySpec,
    model: Qwen2,
    view: View,
    heads: Heads,
    cost_weights: Sequence[float],
    rows: int,
    mesh: Mesh | None = None,
  ):
    """Take the heads on top of the router's hidden state.

    A cap-blind spec decides as if there were no cap until the cap is spent.
    """
    super().__init__(spec, model, view, Threshold(), rows, mesh)
    self._heads = heads
    self.cost_weights = cost_weights

  def compile(self) -> None:
    """Compile all shapes of a call, and the comparison of models."""
    super().compile()
    self._compare(np.zeros((1, len(self._heads.scale.mean_D))), np.zeros((1, FACTS)))

  def _predict(self, hidden_RxD: np.ndarray, ready: Sequence[Live]) -> np.ndarray:
    """Compute p_RxA, one-hot: 1 for the model of the largest value."""
    check_finite(hidden_RxD, f"hidden states of {self.spec.key}")
    left_R = []
    weight_R = []
    progress_RxP = []
    for live in ready:
      left = live.left if self.spec.cap_conditioned else Cap()
      left_R.append(count_calls_left(self._heads, left))
      weights = (live.cost_weight, self.spec.cost_weight, min(self.cost_weights))
      weight_R.append(next(weight for weight in weights if weight is not None))
      steps = [*live.steps, Step(live.observation, SMALL, "")]
      *_, progress = count_progress(live.task.max_steps, steps)
      progress_RxP.append(progress)
    rows_R = np.array(left_R, np.float64)
    facts_RxF = describe(
      rows_R, np.array(weight_R, np.float64), np.array(progress_RxP, np.float64)
    )
    advantage_RxA = self._compare(hidden_RxD, facts_RxF)
    return np.eye(advantage_RxA.shape[1])[advantage_RxA.argmax(axis=1)]

  def _compare(self, hidden_RxD: np.ndarray, facts_RxF: np.ndarray) -> np.ndarray:
    """Compute advantage_RxA in one compiled shape: a row for each possible episode."""
    missing = ((0, self.reader.rows - len(hidden_RxD)), (0, 0))
    hidden = np.pad(hidden_RxD, missing)
    facts = np.pad(facts_RxF, missing)
    optimism = self.spec.optimism or 0.0
    _, advantage = estimate(self._heads, hidden, facts, optimism)
    return np.asarray(advantage)[: len(hidden_RxD)]
