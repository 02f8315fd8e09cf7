"""Compute the sandbox's exact optimum: no router that reads the same text does better.

The method is dynamic programming over the state that a router can observe: the step,
the lock, the kind of building, its sign, the look of the lock, the number of times that
each model has jammed the lock, and under a cap the remaining calls of models costlier
than SMALL. Earlier observations add no information to this state. Given kind and sign,
the locks are independent, except that one of them may be broken; and a lock that opened
was not broken.

Axes:
  I: locks.
  L: hardness of a lock: plain, tricky, broken.
  K: kinds of buildings.
  Z: signs.
  C: looks of a lock.
  J: one axis for each model, the number of times that it has jammed the current lock.
  M: models.
  D: buildings without and with a broken lock.
  Q: the two values of a state: expected dollars and probability of success.
  R: remaining calls of models costlier than SMALL.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from baar_jax.config import Config
from baar_jax.envs.errors import Errors, Oracle
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
from baar_jax.envs.table import load
from baar_jax.episode import SMALL
from baar_jax.llms.agent import extend, open_conversation
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.rollout.budget import unlimited
from baar_jax.rollout.specs import Live, PolicySpec

NAMES = ("gpt-4.1-mini", "gpt-4.1")
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


def has_optimum(config: Config) -> bool:
  """Tell whether the exact optimum can be computed for a configuration.

  The models must be scripted, at list prices and with their usual error rates.
  """
  models = config.models
  is_plain = models.kind == "scripted" and not models.prices and not models.skills
  return is_plain and load(config.env.kind).has_optimum


class Exact:
  """Compute exact values of policies in the sandbox.

  Attributes:
    call_usd: dollars of a call, a list by step of lists by model.
  """

  def __init__(
    self,
    rules: Rules = sandbox.RULES,
    max_steps: int = sandbox.MAX_STEPS,
    names: Sequence[str] = NAMES,
    errors: Errors | None = None,
  ):
    """Compute the probabilities of all events at a lock, and the cost of each call.

    Args:
      rules: the rules of the sandbox.
      max_steps: the most steps of an episode.
      names: the models, cheapest first.
      errors: the models' error rates; None means the sandbox's usual ones.
    """
    errors = errors or SandboxErrors(len(names))
    self._rules = rules
    self._models = len(names)
    env = Sandbox(1, 1, 1, max_steps)
    env.rules = rules
    self.call_usd = _call_prices(env, names, errors)
    self._sign_KxZ, prior_IxKxZxL = _beliefs(rules)
    self._look_IxKxZxC = prior_IxKxZxL @ np.array(rules.looks)
    jams_MxJ = np.indices([rules.attempts + 1] * self._models)
    self._open_IxKxZxCxJxM, self._jam_IxKxZxCxJxM = _outcomes(
      rules, errors, prior_IxKxZxL, jams_MxJ
    )
    # The episode ends when a lock has jammed `attempts` times.
    self._alive_J = jams_MxJ.sum(axis=0) < rules.attempts

  def hull(self) -> list[Point]:
    """Compute the vertices of the optimal frontier, in ascending cost.

    A vertex is left out if it is above the line between its neighbours by less than
    0.001 of the range of success.
    """
    points = [self.solve(1e6)[0], self.solve(FREE)[0]]
    gap = 1e-3 * (points[1].success - points[0].success)
    index = 1
    while index < len(points):
      left, right = points[index - 1 : index + 1]
      mu = (right.success - left.success) / max(right.cost_usd - left.cost_usd, TINY)
      # The policy that is optimal at the slope of the line from left to right is
      # furthest above this line.
      best = self.solve(mu)[0]
      if best.success - left.success - mu * (best.cost_usd - left.cost_usd) > gap:
        points.insert(index, best)
      else:
        index += 1
    return points

  def optimal_rule(
    self, mu: float = FREE, calls: int | None = None
  ) -> Callable[[Live, PolicySpec], int]:
    """Make a rule for `RulePolicy` that plays the optimal policy.

    Args:
      mu: the success that one dollar is worth.
      calls: the most calls of models costlier than SMALL; None is no cap.
    """
    table = self.solve(mu, calls=calls)[1]
    kinds = [kind.word for kind in self._rules.kinds]

    def choose(live: Live, spec: PolicySpec) -> int:
      """Look up the optimal model in the observed state."""
      kind = kinds.index(live.task.description.rstrip(".").split()[-1])
      lock, look, sign = _parse(live.observation)
      jams = [0] * self._models
      for step in reversed(live.steps):
        if _parse(step.observation)[0] != lock:
          break
        jams[step.model] += 1
      model_RxKxZxCxJ = table[len(live.steps), lock]
      max_calls = len(model_RxKxZxCxJ) - 1
      remaining = live.cap.after(live.steps).calls
      remaining = max_calls if remaining is None else min(remaining, max_calls)
      return int(model_RxKxZxCxJ[remaining, kind, sign, look, *jams])

    return choose

  def solve(
    self, mu: float = 0.0, p: float | None = None, calls: int | None = None
  ) -> tuple[Point, dict[tuple[int, int], np.ndarray]]:
    """Compute the value of a policy, and its model in each state.

    Args:
      mu: the success that one dollar is worth. The policy maximises
        success - mu * dollars; of equally good models it chooses the cheapest.
      p: if given, mu is ignored. The policy chooses LARGE with probability p at each
        step, otherwise SMALL.
      calls: the most calls of models costlier than SMALL; None is no cap.

    Returns:
      The expected cost and success of an episode, and the table of chosen models. For
      each (step, lock) the table has an array of model indices, RxKxZxCxJ.
    """
    steps = len(self.call_usd)
    locks = self._rules.locks
    remaining_R = np.arange(min(calls or 0, steps) + 1)
    may_call_R = (remaining_R > 0) | (calls is None)
    may_call_RxKxZxCxJ = may_call_R[(..., *[None] * (3 + self._models))]

    def take(model: int, gain_QxRxKxZxCxJ: np.ndarray) -> np.ndarray:
      """Compute the probability of choosing a model instead of the best cheaper one.

      Args:
        model: the index of the model.
        gain_QxRxKxZxCxJ: the model's value minus that of the best cheaper model.
      """
      share = gain_QxRxKxZxCxJ[SUCCESS] > mu * gain_QxRxKxZxCxJ[COST]
      if p is not None:
        share = p * (model == self._models - 1)
      return may_call_RxKxZxCxJ * share

    # After the last step all values are 0.
    _, *state, _ = self._open_IxKxZxCxJxM.shape
    # Values of the states in which the look of the current lock is seen.
    seen_IxQxRxKxZxCxJ = np.zeros((locks, 2, len(remaining_R), *state))
    # Values on arrival at a lock, before its look is seen.
    arrived_IxQxRxKxZ = np.zeros((locks + 1, 2, len(remaining_R), *state[:2]))
    arrived_IxQxRxKxZ[locks, SUCCESS] = 1.0
    table = {}
    for step in reversed(range(steps)):
      for lock in range(min(step + 1, locks)):
        opened = arrived_IxQxRxKxZ[lock + 1]
        values_M = self._values(step, lock, opened, seen_IxQxRxKxZxCxJ[lock])
        best, table[step, lock] = _choose(values_M, take)
        seen_IxQxRxKxZxCxJ[lock] = self._alive_J * best
        arrived_IxQxRxKxZ[lock] = self._arrive(lock, seen_IxQxRxKxZxCxJ[lock])
    share_K = [kind.share for kind in self._rules.kinds]
    cost, success = arrived_IxQxRxKxZ[0, :, -1, :, BLANK] @ share_K
    return Point(float(cost), float(success)), table

  def _values(
    self,
    step: int,
    lock: int,
    opened_QxRxKxZ: np.ndarray,
    jammed_QxRxKxZxCxJ: np.ndarray,
  ) -> list[np.ndarray]:
    """Compute the value of calling each model at a step and a lock.

    Args:
      step: the step, from 0.
      lock: the lock, from 0.
      opened_QxRxKxZ: values at the next step on arrival at the next lock.
      jammed_QxRxKxZxCxJ: values at the next step at the same lock.

    Returns:
      One array per model, QxRxKxZxCxJ.
    """
    opened = opened_QxRxKxZ[(..., *[None] * (1 + self._models))]
    values = []
    for model in range(self._models):
      # np.roll also moves the last entries to the front. These are never used: calls
      # without a remaining call are masked, and so are states after the last allowed
      # jam.
      spent_calls = int(model != SMALL)
      after_opening = np.roll(opened, spent_calls, axis=1)
      after_jam = np.roll(
        jammed_QxRxKxZxCxJ, (spent_calls, -1), axis=(1, model - self._models)
      )
      value = self._open_IxKxZxCxJxM[lock, ..., model] * after_opening
      value = value + self._jam_IxKxZxCxJxM[lock, ..., model] * after_jam
      value[COST] += self.call_usd[step][model]
      values.append(value)
    return values

  def _arrive(self, lock: int, seen_QxRxKxZxCxJ: np.ndarray) -> np.ndarray:
    """Compute the value on arrival at a lock, before its look is seen.

    The value is the mean over the look. At the first lock with a sign, it is also the
    mean over the sign.

    Args:
      lock: the lock, from 0.
      seen_QxRxKxZxCxJ: values in which the look and the sign are seen.

    Returns:
      Values QxRxKxZ. At the first lock with a sign, they are the same for all signs.
    """
    untried_QxRxKxZxC = seen_QxRxKxZxCxJ[(..., *[0] * self._models)]
    value_QxRxKxZ = (self._look_IxKxZxC[lock] * untried_QxRxKxZxC).sum(axis=-1)
    if lock != self._rules.sign_at:
      return value_QxRxKxZ
    mean = (self._sign_KxZ * value_QxRxKxZ)[..., BLANK + 1 :].sum(
      axis=-1, keepdims=True
    )
    return np.broadcast_to(mean, value_QxRxKxZ.shape)


def _choose(
  value_M: Sequence[np.ndarray], take: Callable
) -> tuple[np.ndarray, np.ndarray]:
  """Choose a model in each state, from the cheapest to the costliest.

  Args:
    value_M: the value of calling each model.
    take: function of a model's index and of the model's gain over the best cheaper
      model. It returns the probability of choosing the model.

  Returns:
    The value of the choice, and the index of the model.
  """
  best = value_M[SMALL]
  chosen = SMALL
  for model in range(1, len(value_M)):
    share = take(model, value_M[model] - best)
    best = (1 - share) * best + share * value_M[model]
    chosen = np.where(share, model, chosen)
  return best, chosen


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
  rules: Rules, errors: Errors, prior_IxKxZxL: np.ndarray, jams_MxJ: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Compute the probabilities that a call opens the lock, and that it jams the lock.

  In all other cases the alarm rings, and the episode fails.

  Args:
    rules: the rules of the sandbox.
    errors: the models' error rates.
    prior_IxKxZxL: the probability of a lock's hardness on arrival.
    jams_MxJ: the number of jams of each model in each state of J.

  Returns:
    open_IxKxZxCxJxM: the probability that model M opens the lock.
    jam_IxKxZxCxJxM: the probability that model M jams the lock.
  """
  models = errors.models
  open_MxL = np.zeros((models, 3))
  jam_MxL = np.zeros((models, 3))
  for model, hardness in np.ndindex(models, 3):
    lapse = errors.lapse(model, "", Oracle("", 0, hardness != PLAIN, False), False)
    opens = (1 - lapse.rate) * (hardness != BROKEN)
    open_MxL[model, hardness] = opens
    jam_MxL[model, hardness] = 1 - opens - lapse.rate * lapse.wrong
  # The likelihood of the jams of all models, given the hardness of the lock.
  jammed_JxL = np.ones(3)
  for jam_L, jams_J in zip(jam_MxL, jams_MxJ):
    jammed_JxL = jammed_JxL * jam_L ** jams_J[..., None]
  look_LxC = np.array(rules.looks)
  joint = np.einsum("ikzl,lc,...l->ikzc...l", prior_IxKxZxL, look_LxC, jammed_JxL)
  belief_L = joint / (joint.sum(axis=-1, keepdims=True) + TINY)
  return belief_L @ open_MxL.T, belief_L @ jam_MxL.T


def _parse(observation: str) -> tuple[int, int, int]:
  """Read the indices of the lock, its look and the sign from an observation."""
  lock, look, sign = VISIBLE.search(observation).groups()
  return int(lock) - 1, LOOKS.index(look), SIGNS.index(sign)


def _call_prices(
  env: Sandbox, names: Sequence[str], errors: Errors
) -> list[list[float]]:
  """Compute the dollars of a call, by step and model.

  One episode is enough, because all tasks, actions and observations have texts of the
  same length. So a call's cost depends on the step and the model only.
  """
  task = env.tasks("train")[0]
  observation = env.reset(task.id)
  agents = ScriptedPair(names, errors).start(env, task, 0, unlimited)
  messages = open_conversation(env.system_prompt, task, observation)
  usd = []
  for step in range(task.max_steps):
    replies = [agent.reply(messages, step) for agent in agents]
    usd.append([reply.call.cost_usd for reply in replies])
    extend(messages, replies[0].text, observation)
  return usd
