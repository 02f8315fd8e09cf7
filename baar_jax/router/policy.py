"""Turn a router's probabilities or values into decisions."""

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from baar_jax.conditioned.heads import (
  Heads,
  States,
  count_calls_left,
  describe,
  estimate,
)
from baar_jax.llms.prices import Billing
from baar_jax.rollout.rules import Policy
from baar_jax.rollout.specs import Cap, Decision, Live, PolicySpec
from baar_jax.router.inputs import compare_words
from baar_jax.router.qwen2 import softmax
from baar_jax.router.reader import Reader, StateReader

TINY = 1e-12  # added to probabilities to keep their logarithms finite
ARGMAX = 0.5  # the threshold of p(LARGE) that picks the most probable model


@dataclasses.dataclass
class Sample:
  """Pick a model at random with the router's probabilities, as training does.

  The draw depends only on the key, the task, the episode's seed and the step, so an
  interrupted run repeats it.

  Attributes:
    key: A part of the random seed; different keys give independent draws.
  """

  key: str

  def pick(self, p_A: np.ndarray, live: Live) -> int:
    """Draw the model of an episode's next step.

    Args:
      p_A: the router's probability of each model.
      live: the episode.
    """
    decision = f"{live.task.id}|{live.job.seed}|{len(live.steps)}"
    draw = random.Random(f"{self.key}|{decision}").random()
    model = int(np.searchsorted(np.cumsum(p_A), draw, side="right"))
    return min(model, len(p_A) - 1)


@dataclasses.dataclass
class Threshold:
  """Pick LARGE if its probability reaches a threshold, else SMALL.

  With more than two models, the model with the largest
  log p - log(value / (1 - value)) * u is picked (our choice). Here p is the router's
  probability of the model. u is 0 for the cheapest model and 1 for the costliest. For
  intermediate models, u is linear in their prices. With two models both rules agree.

  Attributes:
    value: The threshold; 0.5 picks the most probable model.
    usd_A: A price in dollars of each model, cheapest first. If the prices are
      missing or do not rise, u is linear in the models' ranks.
  """

  value: float = ARGMAX
  usd_A: Sequence[float] = ()

  def pick(self, p_A: np.ndarray, live: Live) -> int:
    """Pick a model by the threshold; the arguments are those of `Sample.pick`."""
    if len(p_A) == 2:
      return int(p_A[1] >= self.value)
    value = np.clip(self.value, TINY, 1 - TINY)
    logit = np.log(value / (1 - value))
    return int(np.argmax(np.log(p_A + TINY) - logit * self._scale(len(p_A))))

  def switch_thresholds(self, p_NxA: np.ndarray) -> np.ndarray:
    """Compute the largest threshold at which a model costlier than SMALL is picked.

    Above this threshold SMALL is picked. With two models the threshold is the
    probability of LARGE.

    Args:
      p_NxA: the router's probability of each model at N decisions.

    Returns:
      A threshold for each of the N decisions.
    """
    if p_NxA.shape[1] == 2:
      return p_NxA[:, 1]
    logp_NxA = np.log(p_NxA + TINY)
    u_A = self._scale(p_NxA.shape[1])
    gain_NxA = (logp_NxA[:, 1:] - logp_NxA[:, :1]) / u_A[None, 1:]
    return 1 / (1 + np.exp(-gain_NxA.max(axis=1)))

  def _scale(self, models: int) -> np.ndarray:
    """Compute u_A, each model's price or rank, mapped linearly to [0, 1]."""
    rises = len(self.usd_A) == models and (np.diff(self.usd_A) > 0).all()
    usd_A = np.array(self.usd_A if rises else range(models))
    return (usd_A - usd_A[0]) / (usd_A[-1] - usd_A[0])


class RouterPolicy(Policy):
  """Decide by a router's logits, for all waiting episodes in one batch.

  Attributes:
    reader: Reads what is new in each episode.
  """

  def __init__(
    self,
    spec: PolicySpec,
    reader: Reader | StateReader,
    rule: Sample | Threshold,
  ):
    """Make a policy that decides by what a reader computes.

    Args:
      spec: the policy's parameters.
      reader: computes the logits of the router's decision tokens.
      rule: picks a model, given the probabilities.
    """
    super().__init__(spec)
    self._rule = rule
    self.reader = reader

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decide for all episodes that wait for a decision.

    Each decision's latency is the time of the whole batch, because every episode waits
    for the batch.
    """
    start_s = time.monotonic()
    output, usd_R = self.reader.read(ready)
    p_RxA = self._predict(output, ready)
    known_R = self._compare(output).tolist() or [None] * len(ready)
    latency_s = time.monotonic() - start_s
    decisions = []
    for live, p_A, usd, known in zip(ready, p_RxA, usd_R, known_R):
      model = self._rule.pick(p_A, live)
      decision = Decision(
        model,
        # A threshold of 0 may pick a model of probability 0, and log(0) is infinite.
        logp=float(np.log(max(p_A[model], 1e-30))),
        cost_usd=usd,
        latency_s=latency_s,
        p_A=tuple(map(float, p_A)),
        known=known,
      )
      decisions.append(decision)
    return decisions

  def finish(self, live: Live) -> None:
    """Free what the reader keeps of an episode that ended or starts again."""
    self.reader.forget(live)

  def compile(self) -> None:
    """Compile the router for all batch shapes before the first decision."""
    self.reader.compile()

  def _predict(self, logits_RxA: np.ndarray, ready: Sequence[Live]) -> np.ndarray:
    """Compute p_RxA, the probability of each model, from the router's logits."""
    return softmax(logits_RxA, self.spec.key)

  def _compare(self, output: np.ndarray) -> np.ndarray:
    """Compute known_R, how usual the texts are; empty if that is not known."""
    return np.zeros(0)


class Situation(NamedTuple):
  """A decision to make, as the value heads and the rule that picks a model read it.

  Attributes:
    terms_T: the result of `describe`.
    switch_A: the value of the dollars by which each model's next call exceeds a call
      with a warm prompt. With the cost weight w, a normalised dollar is worth
      w / (1 + w), so the unit is that of the advantages.
    models: the models that have acted, in order.
  """

  terms_T: np.ndarray
  switch_A: np.ndarray
  models: list[int]


def pick_best(advantage_A: np.ndarray, situation: Situation) -> int:
  """Pick the model with the largest Q value."""
  return int(advantage_A.argmax())


class ValueFunction(NamedTuple):
  """Bundle the value heads with all that a decision by them needs.

  Attributes:
    heads: the trained value heads.
    cost_weights: the cost weights that an episode may name.
    billing: the prices and prompt caches of the models.
    pick: a function of the models' advantages and the situation; returns the index of
      the model to act.
  """

  heads: Heads
  cost_weights: Sequence[float]
  billing: Billing
  pick: Callable[[np.ndarray, Situation], int] = pick_best


class ConditionedPolicy(RouterPolicy):
  """Decide by the value heads, given the remaining cap and the cost weight.

  This is the budget-conditioned router. By default the model with the largest Q value
  acts.

  Attributes:
    cost_weights: The cost weights that an episode may name. If an episode names none,
      the policy's cost weight counts. If the policy has none, the least of these
      counts.
  """

  def __init__(
    self,
    spec: PolicySpec,
    reader: StateReader,
    values: ValueFunction,
  ):
    """Make a policy that decides by value heads.

    Args:
      spec: the policy's parameters. A cap-blind policy decides as if there were no cap,
        until the cap is spent.
      reader: computes the states that the heads read.
      values: the value heads, and how they decide.
    """
    super().__init__(spec, reader, Threshold())
    self._values = values
    self.cost_weights = values.cost_weights

  def _predict(self, states: States, ready: Sequence[Live]) -> np.ndarray:
    """Compute p_RxA: 1 for the model that `ValueFunction.pick` names, else 0."""
    situations_R = list(map(self._describe, ready, states.progress_NxP))
    terms_RxT = np.stack([situation.terms_T for situation in situations_R])
    heads = self._values.heads
    _, advantage_RxA = estimate(heads, states.features_NxD, terms_RxT)
    model_R = list(map(self._values.pick, advantage_RxA, situations_R))
    return np.eye(advantage_RxA.shape[1])[model_R]

  def _compare(self, states: States) -> np.ndarray:
    """Compute known_R, how usual the words of the states are."""
    return compare_words(self._values.heads.scale.length_Q, states.features_NxD)

  def _describe(self, live: Live, progress_P: np.ndarray) -> Situation:
    """Compute the heads' terms and the rule's inputs of an episode's next decision."""
    values = self._values
    scale = values.heads.scale
    steps = live.history
    outlooks = values.billing.forecast_calls(
      steps, scale.opening_tokens, scale.reply_tokens
    )
    left = live.remaining_cap if self.spec.cap_conditioned else Cap()
    weights = (live.cost_weight, self.spec.cost_weight, min(self.cost_weights))
    weight = next(weight for weight in weights if weight is not None)
    calls_left = np.float64(count_calls_left(left, outlooks[-1]))
    score_weight = 1 / (1 + np.float64(weight))
    terms_T = describe(calls_left, score_weight, progress_P)
    usd_A = np.array([outlook.usd - outlook.repeat_usd for outlook in outlooks])
    switch_A = (1 - score_weight) * usd_A / float(scale.unit_usd)
    return Situation(terms_T, switch_A, [step.model for step in live.steps])
