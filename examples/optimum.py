"""Compute the sandbox's exact optimum: no router that reads the same text does better.

    python -m examples.optimum

The method is dynamic programming over the state that a router can observe: the step,
the lock, the kind of building, its sign, the look of the lock, the number of times that
each of the two models has jammed the lock, and under a cap the remaining LARGE calls.
Earlier observations add no information to this state. Given kind and sign, the locks
are independent, except that one of them may be broken; and a lock that opened was not
broken.

Axes:
  I: locks.
  L: hardness of a lock: plain, tricky, broken.
  K: kinds of buildings.
  Z: signs.
  C: looks of a lock.
  X, Y: the numbers of times that SMALL and LARGE have jammed the current lock.
  M: models, SMALL and LARGE.
  D: buildings without and with a broken lock.
  Q: the two values of a state: expected dollars and probability of success.
  R: remaining LARGE calls.
  S: steps.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Errors, Oracle
from baar_jax.envs.sandbox import adapter as sandbox
from baar_jax.envs.sandbox.adapter import (
  BLANK,
  BROKEN,
  LOOKS,
  PLAIN,
  SIGNS,
  Rules,
  Sandbox,
  SandboxErrors,
)
from baar_jax.episode import LARGE, SMALL
from baar_jax.llms.history import extend, open_conversation
from baar_jax.llms.prices import prices_of
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.rollout.budget import unlimited
from baar_jax.rollout.specs import Live, PolicySpec

COST = 0
SUCCESS = 1
# The success that a dollar is worth if only success matters: so small that dollars only
# decide between equal successes.
FREE = 1e-9
# This number is added to denominators, so that the posterior of an impossible state is
# not 0 / 0.
TINY = 1e-300
VISIBLE = re.compile(
  rf"Lock (\d) looks ({'|'.join(LOOKS)})\. The sign is ({'|'.join(SIGNS)})\."
)


class Point(NamedTuple):
  """A policy's expected dollars per episode and its probability of success."""

  cost_usd: float
  success: float


class Exact:
  """Compute exact values of policies in the sandbox.

  Attributes:
    call_usd_SxM: dollars of a call. They depend only on the step and the model.
  """

  def __init__(
    self,
    models: ModelsConfig,
    max_steps: int = sandbox.MAX_STEPS,
    rules: Rules = sandbox.RULES,
    errors: Errors | None = None,
  ):
    """Compute the probabilities of all events at a lock, and the cost of each call.

    Args:
      models: the configuration of the models.
      max_steps: the most steps of an episode.
      rules: the rules of the sandbox, with broken_from >= sign_at.
      errors: the models' error rates; None means the sandbox's usual ones.
    """
    errors = errors or SandboxErrors()
    self._rules = rules
    env = Sandbox(1, 1, 1, max_steps)
    env.rules = rules
    self.call_usd_SxM = _call_prices(env, models, errors)
    self._sign_KxZ, prior_IxKxZxL = _beliefs(rules)
    self._look_IxKxZxC = prior_IxKxZxL @ np.array(rules.looks)
    self._open_IxKxZxCxXxYxM, self._jam_IxKxZxCxXxYxM = _outcomes(
      rules, errors, prior_IxKxZxL
    )

  def optimal_rule(
    self, mu: float = FREE, calls: int | None = None
  ) -> Callable[[Live, PolicySpec], int]:
    """Make a rule for `RulePolicy` that plays the optimal policy.

    Args:
      mu: the success that one dollar is worth.
      calls: the most LARGE calls; None is no cap.
    """
    table = self.solve(mu, calls)[1]
    kinds = [kind.word for kind in self._rules.kinds]

    def choose(live: Live, spec: PolicySpec) -> int:
      """Look up the optimal model in the observed state."""
      kind = kinds.index(live.task.description.rstrip(".").split()[-1])
      lock, look, sign = _parse(live.observation)
      jams_M = [0, 0]
      for step in reversed(live.steps):
        if _parse(step.observation)[0] != lock:
          break
        jams_M[step.model] += 1
      model_RxKxZxCxXxY = table[len(live.steps), lock]
      max_calls = len(model_RxKxZxCxXxY) - 1
      remaining = live.cap.after(live.steps).calls
      remaining = max_calls if remaining is None else min(remaining, max_calls)
      return int(model_RxKxZxCxXxY[remaining, kind, sign, look, *jams_M])

    return choose

  def solve(
    self, mu: float, calls: int | None = None
  ) -> tuple[Point, dict[tuple[int, int], np.ndarray]]:
    """Compute the value of the optimal policy, and its model in each state.

    Args:
      mu: the success that one dollar is worth. The policy maximises
        success - mu * dollars; of equally good models it chooses SMALL.
      calls: the most LARGE calls; None is no cap.

    Returns:
      The expected cost and success of an episode, and the table of chosen models. For
      each step and lock the table has an array RxKxZxCxXxY: 1 is LARGE.
    """
    steps = len(self.call_usd_SxM)
    locks = self._rules.locks
    remaining_R = np.arange(min(calls or 0, steps) + 1)
    may_call_R = (remaining_R > 0) | (calls is None)
    may_call_RxKxZxCxXxY = may_call_R[:, None, None, None, None, None]
    # Values of the states in which the current lock's look is seen, and on arrival at a
    # lock, before its look is seen. The last arrival is behind the last lock: success.
    _, *size_KxZxCxXxY, _ = self._open_IxKxZxCxXxYxM.shape
    seen = np.zeros((locks, 2, len(remaining_R), *size_KxZxCxXxY))
    arrived = np.zeros((locks + 1, 2, len(remaining_R), *size_KxZxCxXxY[:2]))
    arrived[locks, SUCCESS] = 1.0
    table = {}
    for step in reversed(range(steps)):
      # Each earlier lock took at most `attempts` steps. The locks ascend, so the values
      # of this lock and the next one are still those of the next step.
      for lock in range(step // self._rules.attempts, min(step + 1, locks)):
        small, large = self._values(step, lock, seen[lock], arrived[lock + 1])
        gain_QxRxKxZxCxXxY = large - small
        is_better = gain_QxRxKxZxCxXxY[SUCCESS] > mu * gain_QxRxKxZxCxXxY[COST]
        table[step, lock] = may_call_RxKxZxCxXxY & is_better
        seen[lock] = np.where(table[step, lock], large, small)
        arrived[lock] = self._arrive(lock, seen[lock])
    share_K = [kind.share for kind in self._rules.kinds]
    start_QxK = arrived[0, :, -1, :, BLANK]
    return Point(*(start_QxK @ share_K).tolist()), table

  def _values(
    self,
    step: int,
    lock: int,
    jammed_QxRxKxZxCxXxY: np.ndarray,
    opened_QxRxKxZ: np.ndarray,
  ) -> list[np.ndarray]:
    """Compute the value of calling each model.

    Args:
      step: the step, from 0.
      lock: the lock, from 0.
      jammed_QxRxKxZxCxXxY: values at the next step, if the lock is not open yet.
      opened_QxRxKxZ: values on arrival at the next lock.

    Returns:
      One array for each model, QxRxKxZxCxXxY.
    """
    values = []
    for model in (SMALL, LARGE):
      # np.roll also moves an entry from one end to the other, where it is never used:
      # after the last jam the episode ends, and without calls LARGE is masked.
      after_jam = np.roll(jammed_QxRxKxZxCxXxY, -1, axis=5 + model)
      after_opening = opened_QxRxKxZ[..., None, None, None]
      if model == LARGE:
        after_jam = np.roll(after_jam, 1, axis=1)
        after_opening = np.roll(after_opening, 1, axis=1)
      value = self._open_IxKxZxCxXxYxM[lock, ..., model] * after_opening
      value = value + self._jam_IxKxZxCxXxYxM[lock, ..., model] * after_jam
      value[COST] += self.call_usd_SxM[step, model]
      values.append(value)
    return values

  def _arrive(self, lock: int, seen_QxRxKxZxCxXxY: np.ndarray) -> np.ndarray:
    """Compute the value on arrival at a lock, before its look is seen.

    The value is the mean over the look. At the first lock with a sign, it is also the
    mean over the sign.

    Args:
      lock: the lock, from 0.
      seen_QxRxKxZxCxXxY: values in which the look and the sign are seen.

    Returns:
      Values QxRxKxZ. At the first lock with a sign, they are the same for all signs.
    """
    untried_QxRxKxZxC = seen_QxRxKxZxCxXxY[..., 0, 0]
    value_QxRxKxZ = np.einsum(
      "kzc,qrkzc->qrkz", self._look_IxKxZxC[lock], untried_QxRxKxZxC
    )
    if lock != self._rules.sign_at:
      return value_QxRxKxZ
    shown = slice(BLANK + 1, None)
    mean_QxRxK = np.einsum(
      "kz,qrkz->qrk", self._sign_KxZ[:, shown], value_QxRxKxZ[..., shown]
    )
    return np.broadcast_to(mean_QxRxK[..., None], value_QxRxKxZ.shape)


def _beliefs(rules: Rules) -> tuple[np.ndarray, np.ndarray]:
  """Compute the probabilities of the signs and of the locks' hardness.

  Returns:
    sign_KxZ: the probability of a sign, given the kind of building.
    prior_IxKxZxL: the probability of a lock's hardness on arrival, given kind and sign.
  """
  # A doomed building has a broken lock.
  doomed_Kx1 = np.array([[kind.doomed] for kind in rules.kinds])
  tricky_Kx1 = np.array([[kind.tricky] for kind in rules.kinds])
  amber_D = np.array(rules.amber)
  # Before the sign is shown it is blank, which is equally probable in all buildings.
  sign_DxZ = np.stack([np.ones(2), 1 - amber_D, amber_D], axis=1)
  sign_KxZ = (1 - doomed_Kx1) * sign_DxZ[0] + doomed_Kx1 * sign_DxZ[1]
  doomed_KxZ = doomed_Kx1 * sign_DxZ[1] / (sign_KxZ + TINY)
  # Any lock from `broken_from` on may be the broken one, with equal probability.
  offset_I = np.arange(rules.locks)[:, None, None] - rules.broken_from
  candidates = rules.locks - rules.broken_from
  passed_I = np.maximum(offset_I, 0) / candidates
  broken_IxKxZ = doomed_KxZ / candidates * (offset_I >= 0) / (1 - doomed_KxZ * passed_I)
  sound_IxKxZ = 1 - broken_IxKxZ
  prior = [sound_IxKxZ * (1 - tricky_Kx1), sound_IxKxZ * tricky_Kx1, broken_IxKxZ]
  return sign_KxZ, np.stack(prior, axis=-1)


def _outcomes(
  rules: Rules, errors: Errors, prior_IxKxZxL: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Compute the probabilities that a call opens the lock, and that it jams the lock.

  In all other cases the alarm rings, and the episode fails. It also fails when a lock
  has jammed `attempts` times: such a jam has probability 0 here.

  Args:
    rules: the rules of the sandbox.
    errors: the models' error rates.
    prior_IxKxZxL: the probability of a lock's hardness on arrival.

  Returns:
    open_IxKxZxCxXxYxM: the probability that model M opens the lock.
    jam_IxKxZxCxXxYxM: the probability that model M jams the lock.
  """
  open_MxL = np.zeros((2, 3))
  jam_MxL = np.zeros((2, 3))
  for model, hardness in np.ndindex(2, 3):
    lapse = errors.lapse(model, "", Oracle("", 0, hardness != PLAIN, False))
    opens = (1 - lapse.rate) * (hardness != BROKEN)
    open_MxL[model, hardness] = opens
    jam_MxL[model, hardness] = 1 - opens - lapse.rate * lapse.wrong
  # The likelihood of the jams of both models, given the hardness of the lock.
  jams_X = np.arange(rules.attempts)
  small_XxL = jam_MxL[SMALL] ** jams_X[:, None]
  large_YxL = jam_MxL[LARGE] ** jams_X[:, None]
  jammed_XxYxL = small_XxL[:, None] * large_YxL[None]
  look_LxC = np.array(rules.looks)
  joint = np.einsum("ikzl,lc,xyl->ikzcxyl", prior_IxKxZxL, look_LxC, jammed_XxYxL)
  belief_L = joint / (joint.sum(axis=-1, keepdims=True) + TINY)
  goes_on_XxY = jams_X[:, None] + jams_X[None] + 1 < rules.attempts
  return belief_L @ open_MxL.T, belief_L @ jam_MxL.T * goes_on_XxY[..., None]


def _parse(observation: str) -> tuple[int, int, int]:
  """Read the indices of the lock, its look and the sign from an observation."""
  lock, look, sign = VISIBLE.search(observation).groups()
  return int(lock) - 1, LOOKS.index(look), SIGNS.index(sign)


def _call_prices(env: Sandbox, models: ModelsConfig, errors: Errors) -> np.ndarray:
  """Compute the dollars of a call, by step and model, without prompt caches.

  One episode is enough, because all tasks, actions and observations have texts of the
  same length.
  """
  task = env.tasks("train")[0]
  observation = env.reset(task.id)
  agent = ScriptedPair(models, Sandbox, errors).start(env, task, 0, unlimited)[SMALL]
  messages = open_conversation(env.system_prompt, task, observation)
  call_usd = []
  for step in range(task.max_steps):
    reply = agent.reply(messages, step)
    usage = reply.call.usage
    call_usd.append([price.cost_usd(usage) for price in prices_of(models)])
    extend(messages, reply.text, observation)
  return np.array(call_usd)


def main() -> None:
  """Print expected success and dollars of the optimum, with caps and without."""
  exact = Exact(ModelsConfig(prompt_cache=False))
  for calls in (1, 2, 4, 8, None):
    point, _ = exact.solve(FREE, calls)
    cap = "no cap" if calls is None else f"at most {calls} LARGE calls"
    print(f"success {point.success:.3f}, ${point.cost_usd:.5f} per task: {cap}")


if __name__ == "__main__":
  main()
