"""Decide by the value heads: one router for all caps (our choice)."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from baar_jax.conditioned.heads import Heads, count_calls_left, estimate_each
from baar_jax.llms.prices import Billing
from baar_jax.rollout.specs import Cap, Live, PolicySpec
from baar_jax.router.inputs import Trackers, describe, read_states
from baar_jax.router.policy import RouterPolicy


@dataclasses.dataclass(frozen=True)
class ConditionedSpec(PolicySpec):
  """A policy of the budget-conditioned router.

  Attributes:
    update: the number of updates of the value heads.
    seeds: the number of training seeds that all play as this policy; None for 1.
    cost_weight: units of score that one normalised dollar costs.
  """

  update: int
  seeds: int | None
  cost_weight: float

  @property
  def parameters(self) -> dict[str, object]:
    """Return the parameters, and whether the policy does not read the cap it has."""
    is_blind = self.cap and not self.cap_conditioned
    return super().parameters | ({"blind": 1} if is_blind else {})


class ConditionedPolicy(RouterPolicy):
  """Decide by the value heads, given the remaining cap and the cost weight.

  This is the budget-conditioned router: the model with the largest Q value acts.

  Attributes:
    cost_weight: The cost weight of an episode that names none.
    cost_weights: The cost weights that an episode may name.
  """

  is_quick = True

  def __init__(
    self,
    spec: ConditionedSpec,
    trackers: Trackers,
    heads: Heads,
    billing: Billing,
    cost_weights: Sequence[float],
  ):
    """Make a policy that decides by value heads.

    Args:
      spec: the policy's parameters. A cap-blind policy decides as if there were no cap,
        until the cap is spent.
      trackers: follow the live episodes, whose states the heads read.
      heads: the trained value heads.
      billing: the prices and prompt caches of the models.
      cost_weights: the cost weights that an episode may name.
    """
    super().__init__(spec, trackers)
    self._heads = heads
    self._billing = billing
    self.cost_weight = spec.cost_weight
    self.cost_weights = cost_weights

  def weigh(self, ready: Sequence[Live]) -> tuple[np.ndarray, list[float]]:
    """Give the model with the largest Q value probability 1, at no dollars."""
    states = read_states(map(self.reader.follow, ready))
    terms_RxT = np.stack([*map(self._describe, ready, states.progress_NxP)])
    _, advantage_ExRxA = estimate_each(self._heads, states.features_NxD, terms_RxT)
    advantage_RxA = advantage_ExRxA.mean(axis=0)
    p_RxA = np.eye(advantage_RxA.shape[1])[advantage_RxA.argmax(axis=1)]
    return p_RxA, [0.0] * len(ready)

  def _describe(self, live: Live, progress_P: np.ndarray) -> np.ndarray:
    """Compute the heads' terms of an episode's next decision; see `describe`."""
    vocabulary = self.reader.vocabulary
    outlooks = self._billing.forecast_calls(
      live.history, vocabulary.opening_tokens, vocabulary.reply_tokens
    )
    left = live.remaining_cap if self.spec.cap_conditioned else Cap()
    weight = live.cost_weight
    if weight is None:
      weight = self.cost_weight
    calls_left = np.float64(count_calls_left(left, outlooks[-1]))
    return describe(calls_left, 1 / (1 + np.float64(weight)), progress_P)
