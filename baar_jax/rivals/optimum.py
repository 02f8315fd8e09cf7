"""Compute the sandbox's exact optimum: no router that reads the same text does better.

The method is dynamic programming over the state that a router can observe: the step,
the lock, the kind of building, its sign, the look of the lock, the number of times that
each model has jammed the lock, and under a cap the remaining calls of models costlier
than SMALL. Earlier observations add no information to this state. Given kind and sign,
the locks are independent, except that one of them may be broken; and a lock that opened
was not broken. With prompt caches the state also has the step of each model's last
call, because that call's prompt is the longest one that the model can have cached.

Axes:
  I: locks.
  L: hardness of a lock: plain, tricky, broken.
  K: kinds of buildings.
  Z: signs.
  C: looks of a lock.
  J: the numbers of times that each model has jammed the current lock.
  T: one axis for each model: 0 before its first call, and i after a last call at step
    i - 1. The axis of the model that was called last has size 1, and so has every axis
    without prompt caches.
  M: models.
  D: buildings without and with a broken lock.
  Q: the two values of a state: expected dollars and probability of success.
  R: remaining calls of models costlier than SMALL.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from baar_jax.config import Config, ModelsConfig
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
from baar_jax.envs.table import load
from baar_jax.episode import SMALL
from baar_jax.llms.history import extend, open_conversation
from baar_jax.llms.prices import Read, open_billing
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
# The state of J after the jam that ends the episode.
ENDED = -1
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


class Moment(NamedTuple):
  """A moment of an episode, the part of the state that is no axis of an array.

  Attributes:
    step: the step, from 0.
    last: the model that was called at the step before. None before the first call, and
      always without prompt caches.
    lock: the lock, from 0.
  """

  step: int
  last: int | None
  lock: int


class Values(NamedTuple):
  """The values of all states at one step in which the same model was called last.

  Attributes:
    seen_IxQxRxKxZxCxJxT: values of the states in which the current lock's look is seen.
    arrived_IxQxRxKxZxT: values on arrival at a lock, before its look is seen. The last
      entry of I is the arrival behind the last lock.
  """

  seen_IxQxRxKxZxCxJxT: np.ndarray
  arrived_IxQxRxKxZxT: np.ndarray


class Exact:
  """Compute exact values of policies in the sandbox.

  Attributes:
    call_usd: dollars of a call, for each step an array MxT; see `_call_prices`.
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
      rules: the rules of the sandbox.
      errors: the models' error rates; None means the sandbox's usual ones.

    Raises:
      ValueError: a lock before the sign may be broken.
    """
    if rules.broken_from < rules.sign_at:
      raise ValueError(
        f"the exact optimum needs broken_from >= sign_at, but the rules have"
        f" {rules.broken_from} and {rules.sign_at}: raise broken_from"
      )
    self._models = len(models.names)
    errors = errors or SandboxErrors(self._models)
    self._rules = rules
    self._is_cached = models.prompt_cache
    env = Sandbox(1, 1, 1, max_steps)
    env.rules = rules
    self.call_usd = _call_prices(env, models, errors)
    self._sign_KxZ, prior_IxKxZxL = _beliefs(rules)
    self._look_IxKxZxC = prior_IxKxZxL @ np.array(rules.looks)
    self._jams_J, self._next_JxM = _list_jams(rules.attempts, self._models)
    self._open_IxKxZxCxJxM, jam_IxKxZxCxJxM = _outcomes(
      rules, errors, prior_IxKxZxL, np.array(self._jams_J)
    )
    # The episode ends when a lock has jammed `attempts` times.
    self._jam_IxKxZxCxJxM = jam_IxKxZxCxJxM * (self._next_JxM != ENDED)

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
      last_T = [0] * self._models
      last = None
      if self._is_cached and live.steps:
        for number, step in enumerate(live.steps, 1):
          last_T[step.model] = number
        last = live.steps[-1].model
        last_T[last] = 0
      model_RxKxZxCxJxT = table[Moment(len(live.steps), last, lock)]
      max_calls = len(model_RxKxZxCxJxT) - 1
      remaining = live.cap.after(live.steps).calls
      remaining = max_calls if remaining is None else min(remaining, max_calls)
      state = remaining, kind, sign, look, self._jams_J.index(tuple(jams)), *last_T
      return int(model_RxKxZxCxJxT[state])

    return choose

  def solve(
    self, mu: float = 0.0, p: float | None = None, calls: int | None = None
  ) -> tuple[Point, dict[Moment, np.ndarray]]:
    """Compute the value of a policy, and its model in each state.

    Args:
      mu: the success that one dollar is worth. The policy maximises
        success - mu * dollars; of equally good models it chooses the cheapest.
      p: if given, mu is ignored. The policy chooses LARGE with probability p at each
        step, otherwise SMALL.
      calls: the most calls of models costlier than SMALL; None is no cap.

    Returns:
      The expected cost and success of an episode, and the table of chosen models. For
      each moment the table has an array int8 of model indices, RxKxZxCxJxT.
    """
    steps = len(self.call_usd)
    locks = self._rules.locks
    remaining_R = np.arange(min(calls or 0, steps) + 1)
    may_call_R = (remaining_R > 0) | (calls is None)
    may_call_RxKxZxCxJxT = may_call_R[(..., *[None] * (4 + self._models))]

    def choose(value_M: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
      """Choose a model in each state, from the cheapest to the costliest.

      Args:
        value_M: the value of calling each model.

      Returns:
        The value of the choice, and the index of the model.
      """
      best = value_M[SMALL]
      chosen = np.int8(SMALL)
      for model in range(1, self._models):
        # The probability of choosing the model instead of the best cheaper one.
        gain_QxRxKxZxCxJxT = value_M[model] - best
        share = gain_QxRxKxZxCxJxT[SUCCESS] > mu * gain_QxRxKxZxCxJxT[COST]
        if p is not None:
          share = p * (model == self._models - 1)
        share = may_call_RxKxZxCxJxT * share
        best = (1 - share) * best + share * value_M[model]
        chosen = np.where(share, np.int8(model), chosen)
      return best, chosen

    table = {}
    values = self._start_values(steps, len(remaining_R))
    for step in reversed(range(steps)):
      later = values
      values = self._start_values(step, len(remaining_R))
      # Each earlier lock took at most `attempts` steps.
      for lock in range(step // self._rules.attempts, min(step + 1, locks)):
        for last, (seen, arrived) in values.items():
          moment = Moment(step, last, lock)
          seen[lock], table[moment] = choose(self._values(moment, later))
          arrived[lock] = self._arrive(lock, seen[lock])
    share_K = [kind.share for kind in self._rules.kinds]
    start_QxK = values[None].arrived_IxQxRxKxZxT[0, :, -1, :, BLANK].reshape(2, -1)
    return Point(*(start_QxK @ share_K).tolist()), table

  def _start_values(self, step: int, size_R: int) -> dict[int | None, Values]:
    """Allocate the values at a step, for each model that may have been called last.

    All values are 0, except behind the last lock: there the success is 1.

    Args:
      step: the step, from 0; after the last step the episode has failed.
      size_R: the size of axis R.

    Returns:
      The values by the model that was called last; see `Moment`.
    """
    values = {}
    locks, *size_KxZxCxJ, _ = self._open_IxKxZxCxJxM.shape
    for last in range(self._models) if self._is_cached and step else [None]:
      size_T = [len(range(step + 1)[steps]) for steps in self._select(step, last)]
      seen = np.zeros((locks, 2, size_R, *size_KxZxCxJ, *size_T))
      arrived = np.zeros((locks + 1, 2, size_R, *size_KxZxCxJ[:2], *size_T))
      arrived[locks, SUCCESS] = 1.0
      values[last] = Values(seen, arrived)
    return values

  def _select(self, step: int, last: int | None) -> list[slice]:
    """Select for each model the possible entries of its axis in T.

    Args:
      step: the step, from 0.
      last: the model that was called at the step before; see `Moment`.
    """
    if last is None:
      return [slice(1)] * self._models
    selection = [slice(step)] * self._models
    selection[last] = slice(step, step + 1)
    return selection

  def _values(
    self, moment: Moment, later: dict[int | None, Values]
  ) -> list[np.ndarray]:
    """Compute the value of calling each model.

    Args:
      moment: the moment of the call.
      later: values at the next step, by the model that was called last.

    Returns:
      One array per model, QxRxKxZxCxJxT.
    """
    lock = moment.lock
    selection = self._select(moment.step, moment.last)
    T = [None] * self._models
    values = []
    for model in range(self._models):
      # After the call, the model's own axis has size 1.
      index = (..., *selection[:model], slice(None), *selection[model + 1 :])
      seen, arrived = later[model if self._is_cached else None]
      opened_QxRxKxZxT = arrived[lock + 1][index]
      jammed_QxRxKxZxCxJxT = seen[lock][index]
      if model != SMALL:
        # np.roll also moves the last entry to the front, where it is never used: there
        # no call remains, so the call is masked.
        opened_QxRxKxZxT = np.roll(opened_QxRxKxZxT, 1, axis=1)
        jammed_QxRxKxZxCxJxT = np.roll(jammed_QxRxKxZxCxJxT, 1, axis=1)
      after_opening = opened_QxRxKxZxT[:, :, :, :, None, None]
      after_jam = np.take(jammed_QxRxKxZxCxJxT, self._next_JxM[:, model], axis=5)
      value = self._open_IxKxZxCxJxM[(lock, ..., model, *T)] * after_opening
      value = value + self._jam_IxKxZxCxJxM[(lock, ..., model, *T)] * after_jam
      usd_T = self.call_usd[moment.step][model, selection[model]]
      usd_QxT = np.stack([usd_T, np.zeros_like(usd_T)])
      axes = [*range(1, 6 + model), *range(7 + model, 6 + self._models)]
      values.append(value + np.expand_dims(usd_QxT, axes))
    return values

  def _arrive(self, lock: int, seen_QxRxKxZxCxJxT: np.ndarray) -> np.ndarray:
    """Compute the value on arrival at a lock, before its look is seen.

    The value is the mean over the look. At the first lock with a sign, it is also the
    mean over the sign.

    Args:
      lock: the lock, from 0.
      seen_QxRxKxZxCxJxT: values in which the look and the sign are seen.

    Returns:
      Values QxRxKxZxT. At the first lock with a sign, they are the same for all signs.
    """
    untried_QxRxKxZxCxT = seen_QxRxKxZxCxJxT[:, :, :, :, :, 0]
    value_QxRxKxZxT = np.einsum(
      "kzc,qrkzc...->qrkz...", self._look_IxKxZxC[lock], untried_QxRxKxZxCxT
    )
    if lock != self._rules.sign_at:
      return value_QxRxKxZxT
    mean = np.einsum(
      "kz,qrkz...->qrk...",
      self._sign_KxZ[:, BLANK + 1 :],
      value_QxRxKxZxT[:, :, :, BLANK + 1 :],
    )
    return np.broadcast_to(mean[:, :, :, None], value_QxRxKxZxT.shape)


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


def _list_jams(attempts: int, models: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
  """List the numbers of jams of each model at a lock while the episode goes on.

  Args:
    attempts: the number of jams that ends the episode.
    models: the number of models.

  Returns:
    jams_J: for each state of J, the number of jams of each model. The first state has
      no jams.
    next_JxM: the state of J after another jam of model M, or `ENDED`.
  """
  jams_J = [jams for jams in np.ndindex(*[attempts] * models) if sum(jams) < attempts]
  next_JxM = np.full((len(jams_J), models), ENDED)
  for state, model in np.ndindex(next_JxM.shape):
    jams = list(jams_J[state])
    jams[model] += 1
    if sum(jams) < attempts:
      next_JxM[state, model] = jams_J.index(tuple(jams))
  return jams_J, next_JxM


def _outcomes(
  rules: Rules, errors: Errors, prior_IxKxZxL: np.ndarray, jams_JxM: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Compute the probabilities that a call opens the lock, and that it jams the lock.

  In all other cases the alarm rings, and the episode fails.

  Args:
    rules: the rules of the sandbox.
    errors: the models' error rates.
    prior_IxKxZxL: the probability of a lock's hardness on arrival.
    jams_JxM: the number of jams of each model in each state of J.

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
  for jam_L, jams_J in zip(jam_MxL, jams_JxM.T):
    jammed_JxL = jammed_JxL * jam_L ** jams_J[:, None]
  look_LxC = np.array(rules.looks)
  joint = np.einsum("ikzl,lc,jl->ikzcjl", prior_IxKxZxL, look_LxC, jammed_JxL)
  belief_L = joint / (joint.sum(axis=-1, keepdims=True) + TINY)
  return belief_L @ open_MxL.T, belief_L @ jam_MxL.T


def _parse(observation: str) -> tuple[int, int, int]:
  """Read the indices of the lock, its look and the sign from an observation."""
  lock, look, sign = VISIBLE.search(observation).groups()
  return int(lock) - 1, LOOKS.index(look), SIGNS.index(sign)


def _call_prices(
  env: Sandbox, models: ModelsConfig, errors: Errors
) -> list[np.ndarray]:
  """Compute the dollars of a call, by step, model and the model's last call.

  One episode is enough, because all tasks, actions and observations have texts of the
  same length. So a call's cost depends on the step, the model and the step of the
  model's last call only.

  Returns:
    For each step an array MxT, with the axis T of model M. It has an entry for each
    earlier step, also without prompt caches.
  """
  billing = open_billing(models, Sandbox.cache_rule, Sandbox.step_s)
  task = env.tasks("train")[0]
  observation = env.reset(task.id)
  agent = ScriptedPair(models, Sandbox, errors).start(env, task, 0, unlimited)[SMALL]
  messages = open_conversation(env.system_prompt, task, observation)
  # A prompt continues the prompts of all earlier steps. No cache expires.
  reads_T = [()]
  call_usd = []
  for step in range(task.max_steps):
    reply = agent.reply(messages, step)
    usage = reply.call.usage
    tokens = usage.prompt_tokens, usage.completion_tokens
    usd_MxT = np.zeros((len(models.names), len(reads_T)))
    for model, last in np.ndindex(usd_MxT.shape):
      usd_MxT[model, last] = billing.bill(model, reads_T[last], *tokens, 0.0).cost_usd
    call_usd.append(usd_MxT)
    reads_T.append([Read(usage.prompt_tokens, 0.0)])
    extend(messages, reply.text, observation)
  return call_usd
