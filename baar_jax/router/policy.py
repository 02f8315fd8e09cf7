"""A trained router as a policy: its probabilities of the models, and what is taken."""

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jax.sharding import Mesh

from baar_jax.rollout.specs import Decision, Live, PolicySpec
from baar_jax.rollout.turn import Policy
from baar_jax.router.qwen2 import Qwen2, softmax
from baar_jax.router.reader import Reader
from baar_jax.router.view import View

TINY = 1e-12  # of a probability
ARGMAX = 0.5  # the threshold that takes the most probable model


class Rule(Protocol):
  """How a model is picked by its probability."""

  def pick(self, p_A: np.ndarray, live: Live) -> int:
    """Pick a model for an episode that waits."""


@dataclasses.dataclass
class Sample:
  """Samples the model, as training does.

  The draw depends on `key`, task, seed and step.
  """

  key: str

  def pick(self, p_A: np.ndarray, live: Live) -> int:
    """Draw a model with its probability."""
    place = f"{live.task.id}|{live.job.seed}|{len(live.steps)}"
    draw = random.Random(f"{self.key}|{place}").random()
    model = int(np.searchsorted(np.cumsum(p_A), draw, side="right"))
    return min(model, len(p_A) - 1)


@dataclasses.dataclass
class Threshold:
  """Takes LARGE if its probability is at least `value`; 0.5 is argmax.

  Of more models it takes that of the largest log p - log(value / (1 - value)) * u. As
  for two, u rises from 0 for the cheapest to 1 for the costliest (our choice).
  """

  value: float = ARGMAX
  usd_A: Sequence[float] = ()  # prices that u is by; if they do not rise it is by rank

  def pick(self, p_A: np.ndarray, live: Live) -> int:
    """Pick a model by the threshold."""
    if len(p_A) == 2:
      return int(p_A[1] >= self.value)
    value = np.clip(self.value, TINY, 1 - TINY)
    logit = np.log(value / (1 - value))
    return int(np.argmax(np.log(p_A + TINY) - logit * self._scale(len(p_A))))

  def switch_thresholds(self, p_NxA: np.ndarray) -> np.ndarray:
    """Compute the largest value at which each of N decisions is not the cheapest's.

    Of two models that is p(LARGE).
    """
    if p_NxA.shape[1] == 2:
      return p_NxA[:, 1]
    logp_NxA = np.log(p_NxA + TINY)
    u_A = self._scale(p_NxA.shape[1])
    gain_NxA = (logp_NxA[:, 1:] - logp_NxA[:, :1]) / u_A[None, 1:]
    return 1 / (1 + np.exp(-gain_NxA.max(axis=1)))

  def _scale(self, models: int) -> np.ndarray:
    """Compute u_A, each model's price, or its rank, on a scale from 0 to 1."""
    rises = len(self.usd_A) == models and (np.diff(self.usd_A) > 0).all()
    usd_A = np.array(self.usd_A if rises else range(models))
    return (usd_A - usd_A[0]) / (usd_A[-1] - usd_A[0])


class RouterPolicy(Policy):
  """Decides for all ready episodes in one forward pass of their new tokens."""

  reads_hidden = False  # whether it decides by the hidden state, not by logits

  def __init__(
    self,
    spec: PolicySpec,
    model: Qwen2,
    view: View,
    rule: Rule,
    rows: int,
    mesh: Mesh | None = None,
  ):
    """Copy the model to this process's first device.

    Args:
      rows: the most episodes that are live at once.
    """
    super().__init__(spec)
    self._usd_per_token = view.config.usd_per_million_tokens / 1e6
    self._rule = rule
    token_ids = None if self.reads_hidden else view.logit_ids
    self.reader = Reader(model, view, token_ids, rows, mesh)

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decide for episodes; each is charged its new tokens and the batch's time."""
    start_s = time.monotonic()
    output_RxC, new_tokens_R = self.reader.read(ready)
    p_RxA = self._predict(output_RxC, ready)
    latency_s = time.monotonic() - start_s  # each episode waited for the whole batch
    decisions = []
    for live, p_A, new_tokens in zip(ready, p_RxA, new_tokens_R):
      model = self._rule.pick(p_A, live)
      decision = Decision(
        model,
        logp=float(np.log(max(p_A[model], 1e-30))),  # a threshold of 0 may pick p = 0
        cost_usd=new_tokens * self._usd_per_token,
        latency_s=latency_s,
        p_A=tuple(map(float, p_A)),
      )
      decisions.append(decision)
    return decisions

  def finish(self, live: Live) -> None:
    """Free the episode's row of the cache."""
    self.reader.forget(live)

  def compile(self) -> None:
    """Compile all shapes of a call, so that no decision waits for it."""
    self.reader.compile()

  def _predict(self, logits_RxA: np.ndarray, ready: Sequence[Live]) -> np.ndarray:
    """Compute p_RxA, the probabilities of the models."""
    return softmax(logits_RxA, self.spec.key)
