"""The sandbox's exact frontier: the best that any router can do on what it sees.

Dynamic programming over what a router has seen: step, lock, kind of building, sign, this lock's
look and jams by each model, and under a cap the calls of dearer models that are left. That is
exact, because given kind and sign the locks are independent of each other but for the one broken
lock, and a lock that was passed was not broken.

Axes: I locks, L hardness, K kinds, Z signs, C looks, J an axis for each model with its jams of this
lock, M models, D a building without and with a broken lock, Q dollars and success, R calls left.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from baar_jax.config import Config
from baar_jax.envs.base import Oracle
from baar_jax.envs.errors import Errors
from baar_jax.envs.sandbox import adapter as sandbox
from baar_jax.envs.sandbox.adapter import BLANK, LOOKS, SIGNS, Rules, Sandbox
from baar_jax.envs.sandbox.errors import SandboxErrors
from baar_jax.envs.table import load
from baar_jax.llms.agent import extend, open_conversation
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.report import frontier
from baar_jax.rollout.budget import unlimited
from baar_jax.rollout.policies import Live

NAMES = ("gpt-4.1-mini", "gpt-4.1")
COST, SUCCESS = 0, 1
FREE = 1e-9  # success per dollar where dollars only decide between equals
TINY = 1e-300  # keeps the posterior of an impossible state from being 0 / 0
VISIBLE = re.compile(rf"Lock (\d) looks ({'|'.join(LOOKS)})\. The sign is ({'|'.join(SIGNS)})\.")


class Point(NamedTuple):
  cost_usd: float  # expected, of an episode
  success: float  # its probability


class Exact:
  """Exact values of policies under the rules, the error rates and the real messages' prices."""

  def __init__(self, rules=sandbox.RULES, max_steps=sandbox.MAX_STEPS, names=NAMES, errors=None):
    self._rules, self._models = rules, len(names)
    errors = errors or SandboxErrors(self._models)
    env = Sandbox(1, 1, 1, max_steps)
    env.rules = rules
    self.call_usd = _call_prices(env, names, errors)
    self._share_K = np.array([kind.share for kind in rules.kinds])
    self._sign_KxZ, prior_IxKxZxL = _beliefs(rules)
    self._look_IxKxZxC = prior_IxKxZxL @ np.array(rules.looks)
    self._open, self._jam = _outcomes(rules, errors, prior_IxKxZxL)

  def hull(self) -> list[Point]:
    """Vertices of the optimal frontier by ascending cost, up to 0.001 of success's range."""
    points, index = [self.solve(1e6)[0], self.solve(FREE)[0]], 1
    gap = 1e-3 * (points[1].success - points[0].success)
    while index < len(points):
      left, right = points[index - 1 : index + 1]
      mu = (right.success - left.success) / max(right.cost_usd - left.cost_usd, TINY)
      best = self.solve(mu)[0]  # the vertex furthest above the line between the two
      if best.success - left.success - mu * (best.cost_usd - left.cost_usd) > gap:
        points.insert(index, best)
      else:
        index += 1
    return points

  def optimal_rule(self, mu: float = FREE, calls: int | None = None) -> Callable[[Live], int]:
    """The policy of `solve`, which reads what a router sees."""
    table = self.solve(mu, calls=calls)[1]
    kinds = [kind.word for kind in self._rules.kinds]

    def choose(live: Live) -> int:
      kind = kinds.index(live.task.description.rstrip(".").split()[-1])
      lock, look, sign = _parse(live.observation)
      here = itertools.takewhile(lambda s: _parse(s.observation)[0] == lock, reversed(live.steps))
      models = [step.model for step in here]
      chosen = table[len(live.steps), lock]
      left = int(min(live.call_budget.remaining, len(chosen) - 1))
      return int(chosen[left, kind, sign, look, *map(models.count, range(self._models))])

    return choose

  def solve(
    self, mu: float = 0.0, p: float | None = None, calls: int | None = None
  ) -> tuple[Point, dict]:
    """The value, backward over steps, of taking LARGE with probability p at every step, else SMALL,
    or without p of the policy that maximises success - mu * dollars (of equal models it takes the
    cheapest); and which model that takes, RxKxZxCxJ by (step, lock). Models dearer than SMALL are
    called at most `calls` times in all; R is from 0 to `calls`, or without a cap 1."""
    locks, attempts, capped = self._rules.locks, self._rules.attempts, calls is not None
    left_R, A = np.arange(min(calls, len(self.call_usd)) + 1 if capped else 1), self._models
    allowed_RxKxZxCxJ = (left_R > 0)[:, *[None] * (3 + A)] | (not capped)

    def call(value_QxR: np.ndarray, model: int) -> np.ndarray:  # at R = 0 it is not allowed
      return np.roll(value_QxR, 1, axis=1) if capped and model else value_QxR

    lives_J = np.indices([attempts] * A).sum(axis=0) < attempts
    alive = (..., *[slice(-1)] * A)
    # Too many jams end the episode: their states keep the value 0.
    ended = np.zeros((2, len(left_R), *self._look_IxKxZxC.shape[1:], *[attempts + 1] * A))
    jammed = [ended] * locks
    arrived = list(np.zeros((locks + 1, *ended.shape[:4])))  # before a lock's look is seen
    arrived[locks][SUCCESS] = 1.0
    table = {}
    for step in reversed(range(len(self.call_usd))):
      for lock in range(min(step + 1, locks)):
        opened, best, chosen = arrived[lock + 1][(..., *[None] * (1 + A))], 0, 0
        for model in range(A) if p is None else (0, A - 1):
          after_jam = call(np.roll(jammed[lock], -1, axis=model - A)[alive], model)
          value = self._open[lock][..., model] * call(opened, model)
          value = value + self._jam[lock][..., model] * after_jam
          value[COST] += self.call_usd[step][model]
          best = value if model == 0 else best
          gain = value - best
          wanted = gain[SUCCESS] > mu * gain[COST] if p is None else p
          taken = allowed_RxKxZxCxJ * wanted
          best = (1 - taken) * best + taken * value
          chosen = np.where(taken, model, chosen)
        table[step, lock] = chosen
        jammed[lock] = ended.copy()
        jammed[lock][alive] = lives_J * best
        value_QxRxKxZ = (self._look_IxKxZxC[lock] * jammed[lock][(..., *[0] * A)]).sum(axis=-1)
        if lock == self._rules.sign_at:  # the sign is seen first here
          mean = (self._sign_KxZ * value_QxRxKxZ)[..., BLANK + 1 :].sum(axis=-1, keepdims=True)
          value_QxRxKxZ = np.broadcast_to(mean, value_QxRxKxZ.shape)
        arrived[lock] = value_QxRxKxZ
    cost, success = arrived[0][:, -1, :, BLANK] @ self._share_K
    return Point(float(cost), float(success)), table


def exact_frontier(config: Config) -> dict | None:
  """The optimal frontier's Points over all tasks, and its area. None in another environment, for
  other models, prices or skills, and if LARGE gains nothing."""
  c = config.models
  if not load(config.env.kind).has_optimum:
    return None
  if c.kind != "scripted" or c.prices or c.skills:
    return None
  exact = Exact(max_steps=config.env.max_steps, names=c.names)
  hull, small, large = exact.hull(), exact.solve(p=0.0)[0], exact.solve(p=1.0)[0]
  if large.success <= small.success:
    return None
  return {"optimum": hull, "area": frontier.area(*zip(*hull), small, large)}


def _beliefs(rules: Rules) -> tuple[np.ndarray, np.ndarray]:
  """P(sign | kind), and each lock's prior hardness given kind, sign and having come to it."""
  doomed_Kx1, tricky_Kx1 = np.array([(k.doomed, k.tricky) for k in rules.kinds]).T[..., None]
  # A blank sign says nothing.
  sign_DxZ = np.array([(1.0, 1 - amber, amber) for amber in rules.amber])
  sign_KxZ = (1 - doomed_Kx1) * sign_DxZ[0] + doomed_Kx1 * sign_DxZ[1]
  doomed_KxZ = doomed_Kx1 * sign_DxZ[1] / (sign_KxZ + TINY)
  after_I = np.arange(rules.locks)[:, None, None] - rules.broken_from
  places = rules.locks - rules.broken_from
  passed_I = np.maximum(after_I, 0) / places
  broken_IxKxZ = doomed_KxZ / places * (after_I >= 0) / (1 - doomed_KxZ * passed_I)
  sound_IxKxZ = 1 - broken_IxKxZ
  prior = [sound_IxKxZ * (1 - tricky_Kx1), sound_IxKxZ * tricky_Kx1, broken_IxKxZ]
  return sign_KxZ, np.stack(prior, axis=-1)


def _outcomes(rules: Rules, errors: Errors, prior_IxKxZxL: np.ndarray) -> tuple[np.ndarray, ...]:
  """Probabilities that the lock opens and that it jams, IxKxZxCxJxM; else the alarm rings."""
  oracles = [Oracle("", 0, critical, False) for critical in (False, True, True)]  # by hardness
  lapses = [[errors.lapse(m, "", o, False) for o in oracles] for m in range(errors.models)]
  open_MxL = np.array([[1 - lapse.rate for lapse in row] for row in lapses]) * (1, 1, 0)
  alarm_MxL = np.array([[lapse.rate * lapse.wrong for lapse in row] for row in lapses])
  jam_MxL = 1 - open_MxL - alarm_MxL
  # How likely the jams are that each model has had.
  jams_MxJ = np.indices([rules.attempts] * errors.models)[..., None]
  jammed_JxL = np.prod([jam_L**jams for jam_L, jams in zip(jam_MxL, jams_MxJ)], axis=0)
  look_CxJxL = np.expand_dims(np.array(rules.looks).T, [*range(1, errors.models + 1)])
  joint = np.expand_dims(prior_IxKxZxL, [*range(3, errors.models + 4)]) * look_CxJxL * jammed_JxL
  belief_L = joint / (joint.sum(axis=-1, keepdims=True) + TINY)
  return belief_L @ open_MxL.T, belief_L @ jam_MxL.T


def _parse(observation: str) -> tuple[int, int, int]:
  """Lock, look and sign that an observation shows, as indices."""
  lock, look, sign = VISIBLE.search(observation).groups()
  return int(lock) - 1, LOOKS.index(look), SIGNS.index(sign)


def _call_prices(env: Sandbox, names: Sequence[str], errors: Errors) -> list[list[float]]:
  """Dollars of a call by step and model, from real messages: all texts of a kind are as long."""
  task = env.tasks("train")[0]
  observation = env.reset(task.id)
  agents = ScriptedPair(names, errors).start(env, task, 0, unlimited)
  messages, usd = open_conversation(env.system_prompt, task, observation), []
  for step in range(task.max_steps):
    replies = [agent.reply(messages, step) for agent in agents]
    usd.append([reply.call.cost_usd for reply in replies])
    extend(messages, replies[0].text, observation)
  return usd
