"""Turn a router's probabilities into decisions.

Training draws a model by them (`sample`); the evaluation compares LARGE's probability
with a threshold (`apply_threshold`). A reader computes the logits: of texts in
router/reader.py, of inputs in router/network.py.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from baar_jax.rollout.policy import Policy
from baar_jax.rollout.specs import Decision, Live, PolicySpec
from baar_jax.router.qwen2 import softmax

TINY = 1e-12  # added to probabilities to keep their logarithms finite
ARGMAX = 0.5  # the threshold of p(LARGE) that picks the most probable model


class Reader(Protocol):
  """Compute a router's logits for live episodes, in batches."""

  def read(self, ready: Sequence[Live]) -> tuple[np.ndarray, list[float]]:
    """Return logits_RxA of R waiting episodes, and the dollars of each decision."""

  def forget(self, live: Live) -> None:
    """Free what is kept of an episode that ended or starts again."""

  def compile(self) -> None:
    """Compile the router for all batch shapes before the first decision."""


def sample(key: str, p_A: np.ndarray, live: Live) -> int:
  """Pick a model at random with the router's probabilities, as training does.

  The draw depends only on the key, the task, the episode's seed and the step, so an
  interrupted run repeats it.

  Args:
    key: a part of the random seed; different keys give independent draws.
    p_A: the router's probability of each model.
    live: the episode, before its next step.
  """
  decision = f"{live.task.id}|{live.job.seed}|{len(live.steps)}"
  draw = random.Random(f"{key}|{decision}").random()
  model = int(np.searchsorted(np.cumsum(p_A), draw, side="right"))
  return min(model, len(p_A) - 1)


def apply_threshold(p_A: np.ndarray, live: Live, threshold: float = ARGMAX) -> int:
  """Pick LARGE if its probability reaches a threshold, else SMALL.

  With more than two models, the model with the largest
  log p - log(threshold / (1 - threshold)) * u is picked (our choice). Here p is the
  router's probability of the model, and u its rank by price, from 0 for the cheapest
  model to 1 for the costliest. With two models both rules agree.

  Args:
    p_A: the router's probability of each model.
    live: not used.
    threshold: 0.5 picks the most probable model.
  """
  if len(p_A) == 2:
    return int(p_A[1] >= threshold)
  value = np.clip(threshold, TINY, 1 - TINY)
  logit = np.log(value / (1 - value))
  return int(np.argmax(np.log(p_A + TINY) - logit * np.linspace(0, 1, len(p_A))))


def switch_thresholds(p_NxA: np.ndarray) -> np.ndarray:
  """Compute the largest threshold at which a model costlier than SMALL is picked.

  Above this threshold SMALL is picked. With two models the threshold is the probability
  of LARGE.

  Args:
    p_NxA: the router's probability of each model at N decisions.

  Returns:
    A threshold for each of the N decisions.
  """
  models = p_NxA.shape[1]
  if models == 2:
    return p_NxA[:, 1]
  logp_NxA = np.log(p_NxA + TINY)
  u_A = np.linspace(0, 1, models)
  gain_NxA = (logp_NxA[:, 1:] - logp_NxA[:, :1]) / u_A[None, 1:]
  return 1 / (1 + np.exp(-gain_NxA.max(axis=1)))


class RouterPolicy(Policy):
  """Decide by a router's logits, for all waiting episodes in one batch.

  Attributes:
    reader: Reads what is new in each episode.
  """

  def __init__(
    self,
    spec: PolicySpec,
    reader: Reader,
    pick: Callable[[np.ndarray, Live], int] = apply_threshold,
  ):
    """Make a policy that decides by what a reader computes.

    Args:
      spec: the policy's parameters.
      reader: computes the logits of the router's decision tokens.
      pick: picks an episode's next model, given the models' probabilities;
        by default the most probable one.
    """
    super().__init__(spec)
    self._pick = pick
    self.reader = reader

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decide for all episodes that wait for a decision.

    Each decision's latency is the time of the whole batch, because every episode waits
    for the batch.
    """
    start_s = time.monotonic()
    p_RxA, usd_R = self.weigh(ready)
    latency_s = time.monotonic() - start_s
    decisions = []
    for live, p_A, usd in zip(ready, p_RxA, usd_R):
      model = self._pick(p_A, live)
      decision = Decision(
        model,
        # A threshold of 0 may pick a model of probability 0, and log(0) is infinite.
        logp=float(np.log(max(p_A[model], 1e-30))),
        cost_usd=usd,
        latency_s=latency_s,
        p_A=tuple(map(float, p_A)),
      )
      decisions.append(decision)
    return decisions

  def weigh(self, ready: Sequence[Live]) -> tuple[np.ndarray, list[float]]:
    """Compute p_RxA of R waiting episodes, and the dollars of each decision."""
    logits_RxA, usd_R = self.reader.read(ready)
    return softmax(logits_RxA, self.spec.key), usd_R

  def finish(self, live: Live) -> None:
    """Free what the reader keeps of an episode that ended or starts again."""
    self.reader.forget(live)

  def compile(self) -> None:
    """Compile the router for all batch shapes before the first decision."""
    self.reader.compile()
