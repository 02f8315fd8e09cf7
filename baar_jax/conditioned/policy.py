"""Decide by the value heads: one router for all caps (our choice)."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from baar_jax.conditioned.heads import Heads, count_calls_left, estimate_each
from baar_jax.llms.prices import Billing
from baar_jax.rollout.policy import Policy
from baar_jax.rollout.specs import Cap, Decision, Live, PolicySpec
from baar_jax.router.inputs import Trackers, describe, read_states


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


class ConditionedPolicy(Policy):
  """Decide by the value heads, given the remaining cap and the cost weight.

  This is the budget-conditioned router. By default the model with the largest Q value
  acts.

  Attributes:
    cost_weight: The cost weight of an episode that names none.
    cost_weights: The cost weights that an episode may name.
  """

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
    super().__init__(spec)
    self._trackers = trackers
    self._heads = heads
    self._billing = billing
    self.cost_weight = spec.cost_weight
    self.cost_weights = cost_weights

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decide for all episodes that wait for a decision.

    The decided model has probability 1. Each decision's latency is the time of the
    whole batch.
    """
    start_s = time.monotonic()
    states = read_states(map(self._trackers.follow, ready))
    terms_RxT = np.stack([*map(self._describe, ready, states.progress_NxP)])
    _, advantage_ExRxA = estimate_each(self._heads, states.features_NxD, terms_RxT)
    advantage_RxA = advantage_ExRxA.mean(axis=0)
    latency_s = time.monotonic() - start_s
    decisions = []
    for advantage_A in advantage_RxA:
      model = int(np.argmax(advantage_A))
      p_A = [0.0] * len(advantage_A)
      p_A[model] = 1.0
      decisions.append(Decision(model, logp=0.0, latency_s=latency_s, p_A=p_A))
    return decisions

  def finish(self, live: Live) -> None:
    """Free what is kept of an episode that ended or starts again."""
    self._trackers.forget(live)

  def _describe(self, live: Live, progress_P: np.ndarray) -> np.ndarray:
    """Compute the heads' terms of an episode's next decision; see `describe`."""
    vocabulary = self._trackers.vocabulary
    outlooks = self._billing.forecast_calls(
      live.history, vocabulary.opening_tokens, vocabulary.reply_tokens
    )
    left = live.remaining_cap if self.spec.cap_conditioned else Cap()
    weight = live.cost_weight
    if weight is None:
      weight = self.cost_weight
    calls_left = np.float64(count_calls_left(left, outlooks[-1]))
    return describe(calls_left, 1 / (1 + np.float64(weight)), progress_P)
