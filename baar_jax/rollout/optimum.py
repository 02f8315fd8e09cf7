"""The sandbox's exact optimum: the best that any router can do on what it sees.

Dynamic programming over what a router has seen: step, lock, kind of building, sign,
this lock's look and jams by each model, and under a cap the calls of dearer models that
are left. That is exact: given kind and sign the locks are independent of each other but
for the one broken lock, and a lock that was passed was not broken.

Axes: I locks, L hardness, K kinds, Z signs, C looks, J an axis for each model with its
jams of this lock, M models, D a building without and with a broken lock, Q dollars and
success, R calls left.
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
)
from baar_jax.envs.sandbox.errors import SandboxErrors
from baar_jax.envs.table import load
from baar_jax.episode import SMALL
from baar_jax.llms.agent import extend, open_conversation
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.rollout.budget import unlimited
from baar_jax.rollout.specs import Live, PolicySpec

NAMES = ("gpt-4.1-mini", "gpt-4.1")
COST = 0
SUCCESS = 1
FREE = 1e-9  # success per dollar where dollars only decide between equals
TINY = 1e-300  # keeps the posterior of an impossible state from being 0 / 0
VISIBLE = re.compile(
  rf"Lock (\d) looks ({'|'.join(LOOKS)})\. The sign is ({'|'.join(SIGNS)})\."
)


class Point(NamedTuple):
  cost_usd: float  # expected, of an episode
  success: float  # its probability


def has_optimum(config: Config) -> bool:
  """Tell whether the exact policy is known: of the scripted models as they are."""
  c = config.models
  is_plain = c.kind == "scripted" and not c.prices and not c.skills
  return is_plain and load(config.env.kind).has_optimum


class Exact:
  """Compute exact values of policies under the rules, error rates and prices."""

  def __init__(
    self,
    rules: Rules = sandbox.RULES,
    max_steps: int = sandbox.MAX_STEPS,
    names: Sequence[str] = NAMES,
    errors: Errors | None = None,
  ):
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
    self._alive_J = jams_MxJ.sum(axis=0) < rules.attempts  # more jams end the episode

  def hull(self) -> list[Point]:
    """Compute the optimal frontier's vertices, up to 0.001 of success's range."""
    points = [self.solve(1e6)[0], self.solve(FREE)[0]]
    gap = 1e-3 * (points[1].success - points[0].success)
    index = 1
    while index < len(points):
      left, right = points[index - 1 : index + 1]
      mu = (right.success - left.success) / max(right.cost_usd - left.cost_usd, TINY)
      best = self.solve(mu)[0]  # the vertex furthest above the line between the two
      if best.success - left.success - mu * (best.cost_usd - left.cost_usd) > gap:
        points.insert(index, best)
      else:
        index += 1
    return points

  def optimal_rule(
    self, mu: float = FREE, calls: int | None = None
  ) -> Callable[[Live, PolicySpec], int]:
    """Make the rule of `solve`'s best policy, which reads what a router sees."""
    table = self.solve(mu, calls=calls)[1]
    kinds = [kind.word for kind in self._rules.kinds]

    def choose(live: Live, spec: PolicySpec) -> int:
      kind = kinds.index(live.task.description.rstrip(".").split()[-1])
      lock, look, sign = _parse(live.observation)
      jams = [0] * self._models
      for step in reversed(live.steps):
        if _parse(step.observation)[0] != lock:
          break
        jams[step.model] += 1
      chosen = table[len(live.steps), lock]
      most = len(chosen) - 1
      left = live.cap.after(live.steps).calls
      left = most if left is None else min(left, most)
      return int(chosen[left, kind, sign, look, *jams])

    return choose

  def solve(
    self, mu: float = 0.0, p: float | None = None, calls: int | None = None
  ) -> tuple[Point, dict[tuple[int, int], np.ndarray]]:
    """Compute a policy's value, and the model that it takes in each state.

    The policy takes LARGE with probability `p` at every step, else SMALL. Without `p`
    it maximises success - mu * dollars, and takes the cheapest of equal models. Models
    dearer than SMALL are called at most `calls` times in all.

    Returns:
      The value at the start, and the model by (step, lock): RxKxZxCxJ.
    """
    steps = len(self.call_usd)
    locks = self._rules.locks
    left_R = np.arange(min(calls or 0, steps) + 1)
    may_call_R = (left_R > 0) | (calls is None)
    may_call_RxKxZxCxJ = may_call_R[(..., *[None] * (3 + self._models))]

    def take(model: int, gain_QxRxKxZxCxJ: np.ndarray) -> np.ndarray:
      wanted = gain_QxRxKxZxCxJ[SUCCESS] > mu * gain_QxRxKxZxCxJ[COST]
      if p is not None:
        wanted = p * (model == self._models - 1)
      return may_call_RxKxZxCxJ * wanted

    # A state that no step is left for has the value 0.
    _, *state, _ = self._open_IxKxZxCxJxM.shape
    seen_IxQxRxKxZxCxJ = np.zeros((locks, 2, len(left_R), *state))
    # Before the look is seen.
    arrived_IxQxRxKxZ = np.zeros((locks + 1, 2, len(left_R), *state[:2]))
    arrived_IxQxRxKxZ[locks, SUCCESS] = 1.0
    table = {}
    for step in reversed(range(steps)):
      for lock in range(min(step + 1, locks)):
        opened = arrived_IxQxRxKxZ[lock + 1]
        calls_M = self._values(step, lock, opened, seen_IxQxRxKxZxCxJ[lock])
        best, table[step, lock] = _choose(calls_M, take)
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
    """Compute the dollars and success from here on if a model is called, for each."""
    opened = opened_QxRxKxZ[(..., *[None] * (1 + self._models))]
    values = []
    for model in range(self._models):
      # What wraps around is masked: a call where none is left, and a jam where the lock
      # is dead.
      spent = int(model != SMALL)
      after_opening = np.roll(opened, spent, axis=1)
      after_jam = np.roll(
        jammed_QxRxKxZxCxJ, (spent, -1), axis=(1, model - self._models)
      )
      value = self._open_IxKxZxCxJxM[lock, ..., model] * after_opening
      value = value + self._jam_IxKxZxCxJxM[lock, ..., model] * after_jam
      value[COST] += self.call_usd[step][model]
      values.append(value)
    return values

  def _arrive(self, lock: int, seen_QxRxKxZxCxJ: np.ndarray) -> np.ndarray:
    """Compute the value before a lock's look is seen, and before a new sign is."""
    untried_QxRxKxZxC = seen_QxRxKxZxCxJ[(..., *[0] * self._models)]
    value_QxRxKxZ = (self._look_IxKxZxC[lock] * untried_QxRxKxZxC).sum(axis=-1)
    if lock != self._rules.sign_at:
      return value_QxRxKxZ
    shown = (self._sign_KxZ * value_QxRxKxZ)[..., BLANK + 1 :].sum(
      axis=-1, keepdims=True
    )
    return np.broadcast_to(shown, value_QxRxKxZ.shape)


def _choose(
  value_M: Sequence[np.ndarray], take: Callable
) -> tuple[np.ndarray, np.ndarray]:
  """Choose a model in each state; `take` gives a costlier model's share."""
  best = value_M[SMALL]
  chosen = SMALL
  for model in range(1, len(value_M)):
    taken = take(model, value_M[model] - best)
    best = (1 - taken) * best + taken * value_M[model]
    chosen = np.where(taken, model, chosen)
  return best, chosen


def _beliefs(rules: Rules) -> tuple[np.ndarray, np.ndarray]:
  """Compute P(sign | kind), and the prior hardness of a lock that is reached.

  Returns:
    sign_KxZ and prior_IxKxZxL.
  """
  doomed_Kx1 = np.array([[kind.doomed] for kind in rules.kinds])
  tricky_Kx1 = np.array([[kind.tricky] for kind in rules.kinds])
  amber_D = np.array(rules.amber)
  # A blank sign says nothing.
  sign_DxZ = np.stack([np.ones(2), 1 - amber_D, amber_D], axis=1)
  sign_KxZ = (1 - doomed_Kx1) * sign_DxZ[0] + doomed_Kx1 * sign_DxZ[1]
  doomed_KxZ = doomed_Kx1 * sign_DxZ[1] / (sign_KxZ + TINY)
  after_I = np.arange(rules.locks)[:, None, None] - rules.broken_from
  places = rules.locks - rules.broken_from
  passed_I = np.maximum(after_I, 0) / places
  broken_IxKxZ = doomed_KxZ / places * (after_I >= 0) / (1 - doomed_KxZ * passed_I)
  sound_IxKxZ = 1 - broken_IxKxZ
  prior = [sound_IxKxZ * (1 - tricky_Kx1), sound_IxKxZ * tricky_Kx1, broken_IxKxZ]
  return sign_KxZ, np.stack(prior, axis=-1)


def _outcomes(
  rules: Rules, errors: Errors, prior_IxKxZxL: np.ndarray, jams_MxJ: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Compute the probabilities that a lock opens and that it jams; else the alarm rings.

  Returns:
    open_IxKxZxCxJxM and jam_IxKxZxCxJxM.
  """
  models = errors.models
  open_MxL = np.zeros((models, 3))
  jam_MxL = np.zeros((models, 3))
  for model, hardness in np.ndindex(models, 3):
    lapse = errors.lapse(model, "", Oracle("", 0, hardness != PLAIN, False), False)
    opens = (1 - lapse.rate) * (hardness != BROKEN)
    open_MxL[model, hardness] = opens
    jam_MxL[model, hardness] = 1 - opens - lapse.rate * lapse.wrong
  # The likelihood of the jams that each model has had.
  jammed_JxL = np.ones(3)
  for jam_L, jams_J in zip(jam_MxL, jams_MxJ):
    jammed_JxL = jammed_JxL * jam_L ** jams_J[..., None]
  look_LxC = np.array(rules.looks)
  joint = np.einsum("ikzl,lc,...l->ikzc...l", prior_IxKxZxL, look_LxC, jammed_JxL)
  belief_L = joint / (joint.sum(axis=-1, keepdims=True) + TINY)
  return belief_L @ open_MxL.T, belief_L @ jam_MxL.T


def _parse(observation: str) -> tuple[int, int, int]:
  """Read the lock, look and sign that an observation shows, as indices."""
  lock, look, sign = VISIBLE.search(observation).groups()
  return int(lock) - 1, LOOKS.index(look), SIGNS.index(sign)


def _call_prices(
  env: Sandbox, names: Sequence[str], errors: Errors
) -> list[list[float]]:
  """Compute a call's dollars by step and model; texts of a kind are equally long."""
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
