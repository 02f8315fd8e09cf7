"""The sandbox's exact frontier: the best that any router can do on what it sees.

Dynamic programming over the information state. Given the kind of building and the sign, locks are
independent of each other but for the one broken lock, and a lock that was passed was not broken. So
what a router has seen counts only through (step, lock, kind, sign, look of this lock, jams of this
lock by each model), and nothing is approximated. Values are over the distribution of tasks.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from baar_jax.config import Config
from baar_jax.envs import sandbox
from baar_jax.envs.base import Oracle
from baar_jax.envs.sandbox import AMBER, BLANK, BROKEN, GREEN, PLAIN, TRICKY, Rules, Sandbox
from baar_jax.llms.agent import extend, opening
from baar_jax.llms.errors import Errors, SandboxErrors
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.report import frontier
from baar_jax.rollout.budget import unlimited

NAMES = ("gpt-4.1-mini", "gpt-4.1")
COST, SUCCESS = 0, 1
TINY = 1e-300  # keeps the posterior of an impossible state from being 0 / 0


class Point(NamedTuple):
  """Expected dollars of an episode, and probability that it succeeds."""

  cost_usd: float
  success: float


class Exact:
  """Exact values of policies under the rules, the error rates and the real messages' prices.

  Axes: I locks, L hardness, K kinds, Z signs, C looks, F jams of this lock by each model,
  M models, Q cost and success.
  """

  def __init__(
    self,
    rules: Rules = sandbox.RULES,
    max_steps: int = sandbox.MAX_STEPS,
    names: Sequence[str] = NAMES,
    errors: Errors | None = None,
  ):
    errors = errors or SandboxErrors()
    self._rules, self._max_steps = rules, max_steps
    self.call_usd = _call_prices(rules, max_steps, names, errors)  # by step and model
    self._share_K = np.array([kind.share for kind in rules.kinds])
    self._jams = [(s, g) for s in range(rules.attempts) for g in range(rules.attempts - s)]
    # Too many jams end the episode: they lead to a last column, of zeros.
    places = {jams: f for f, jams in enumerate(self._jams)}
    after = [[(s + 1, g) for s, g in self._jams], [(s, g + 1) for s, g in self._jams]]
    self._next_MxF = [[places.get(jams, len(places)) for jams in row] for row in after]
    self._amber_K, prior_IxKxZxL = _beliefs(rules)
    self._look_IxKxZxC = prior_IxKxZxL @ np.array(rules.looks)
    self._open, self._jam = _outcomes(rules, errors, prior_IxKxZxL, self._jams)

  def random(self, p: float) -> Point:
    """LARGE with probability p at every step; 0 is always-SMALL, 1 always-LARGE."""
    return self._solve(p=p)[0]

  def optimum(self, mu: float) -> Point:
    """The policy that maximises success - mu * dollars; SMALL where both are equal."""
    return self._solve(mu=mu)[0]

  def hull(self, tolerance: float = 1e-3) -> list[Point]:
    """Vertices of the optimal frontier, by ascending cost.

    No policy that sees what a router sees lies above their hull by more than `tolerance` times
    the range of success.
    """
    cheap, dear = self.optimum(1e6), self.optimum(1e-9)
    gap = tolerance * (dear.success - cheap.success)
    return [cheap, *self._between(cheap, dear, gap), dear]

  def _between(self, left: Point, right: Point, gap: float) -> list[Point]:
    """Vertices strictly between two: the one furthest above their line, and so on."""
    mu = (right.success - left.success) / max(right.cost_usd - left.cost_usd, TINY)
    best = self.optimum(mu)
    if best.success - left.success - mu * (best.cost_usd - left.cost_usd) <= gap:
      return []
    return [*self._between(left, best, gap), best, *self._between(best, right, gap)]

  def optimal_choice(self, mu: float) -> Callable[[str, Sequence[tuple[int, str, str]], str], int]:
    """The optimal policy: choose(description, history, observation) -> model index.

    The history holds (model, action, observation that was seen before it) per step. `choose` raises
    ValueError on texts that are not the sandbox's.
    """
    table = self._solve(mu=mu)[1]
    kinds = [kind.word for kind in self._rules.kinds]

    def choose(description: str, history: Sequence[tuple[int, str, str]], observation: str) -> int:
      kind = kinds.index(description.rstrip(".").split()[-1])
      lock, look, sign = _parse(observation)
      jams = [0, 0]
      for model, _, seen in reversed(history):
        if _parse(seen)[0] != lock:
          break
        jams[model] += 1
      return int(table[len(history), lock][kind, sign, look, self._jams.index(tuple(jams))])

    return choose

  def _solve(self, mu: float = 0.0, p: float | None = None) -> tuple[Point, dict]:
    """A policy's value, and its probability of LARGE by (step, lock), backward over steps.

    The policy is that of `random` where p is given, else that of `optimum`.
    """
    locks, shape = self._rules.locks, self._open.shape[1:4]
    later = [np.zeros((2, *shape, len(self._jams) + 1))] * locks
    arrive_later = [np.zeros((2, *shape[:2]))] * locks
    opened = np.zeros((2, *shape[:2]))
    opened[SUCCESS] = 1.0
    table = {}
    for step in reversed(range(self._max_steps)):
      now, arrive = [], []
      for lock in range(min(step + 1, locks)):
        after_open = (arrive_later[lock + 1] if lock + 1 < locks else opened)[..., None, None]
        value_M = []
        for model, usd in enumerate(self.call_usd[step]):
          value = self._open[lock, ..., model] * after_open
          value += self._jam[lock, ..., model] * later[lock][..., self._next_MxF[model]]
          value[COST] += usd
          value_M.append(value)
        gain = value_M[1] - value_M[0]
        chosen = gain[SUCCESS] > mu * gain[COST] if p is None else p
        table[step, lock] = chosen
        value = np.zeros_like(later[lock])
        value[..., :-1] = (1 - chosen) * value_M[0] + chosen * value_M[1]
        now.append(value)
        arrive.append(self._arrive(lock, value))
      later, arrive_later = now, arrive
    cost, success = arrive_later[0][..., BLANK] @ self._share_K
    return Point(float(cost), float(success)), table

  def _arrive(self, lock: int, value: np.ndarray) -> np.ndarray:
    """Value QxKxZ before the lock's look, and a sign that is first seen here, are known."""
    value_QxKxZ = (self._look_IxKxZxC[lock] * value[..., 0]).sum(axis=-1)
    if lock == self._rules.sign_at:
      amber = self._amber_K * value_QxKxZ[..., AMBER]
      green = (1 - self._amber_K) * value_QxKxZ[..., GREEN]
      value_QxKxZ = np.repeat((amber + green)[..., None], value_QxKxZ.shape[-1], axis=-1)
    return value_QxKxZ


def exact_frontier(config: Config) -> dict | None:
  """Points of the sandbox's optimal frontier, its area, and the boundaries' points.

  None in another environment, for other models or prices than those that it is computed for, and
  where there are too few steps for LARGE to gain anything.
  """
  c = config.models
  if config.env.kind != "sandbox" or c.kind != "scripted" or c.prices:
    return None
  exact = Exact(max_steps=config.env.max_steps, names=c.names)
  small, large = exact.random(0.0), exact.random(1.0)
  if large.success <= small.success:
    return None
  hull = exact.hull()
  area = frontier.area(*zip(*hull), small, large)
  return {"optimum": hull, "small": small, "large": large, "area": area}


def _beliefs(rules: Rules) -> tuple[np.ndarray, np.ndarray]:
  """P(amber | kind), and each lock's prior hardness given kind, sign and having come to it."""
  doomed_K, tricky_K = np.array([(kind.doomed, kind.tricky) for kind in rules.kinds]).T
  amber_K = (1 - doomed_K) * rules.amber[0] + doomed_K * rules.amber[1]
  by_sign = {BLANK: doomed_K, AMBER: doomed_K * rules.amber[1] / (amber_K + TINY)}
  by_sign[GREEN] = doomed_K * (1 - rules.amber[1]) / (1 - amber_K + TINY)
  doomed_KxZ = np.stack([by_sign[sign] for sign in range(len(by_sign))], axis=1)
  places = rules.locks - rules.broken_from
  lock_Ix1x1 = np.arange(rules.locks)[:, None, None]
  passed_Ix1x1 = np.maximum(lock_Ix1x1 - rules.broken_from, 0) / places
  here_IxKxZ = doomed_KxZ / places * (lock_Ix1x1 >= rules.broken_from)
  broken_IxKxZ = here_IxKxZ / (1 - doomed_KxZ * passed_Ix1x1)
  prior_IxKxZxL = np.empty((*broken_IxKxZ.shape, 3))
  prior_IxKxZxL[..., PLAIN] = (1 - broken_IxKxZ) * (1 - tricky_K)[:, None]
  prior_IxKxZxL[..., TRICKY] = (1 - broken_IxKxZ) * tricky_K[:, None]
  prior_IxKxZxL[..., BROKEN] = broken_IxKxZ
  return amber_K, prior_IxKxZxL


def _outcomes(
  rules: Rules, errors: Errors, prior_IxKxZxL: np.ndarray, jams: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
  """Probabilities that the lock opens and that it jams, IxKxZxCxFxM; otherwise the alarm rings."""
  open_MxL, jam_MxL = np.zeros((2, 2, 3))
  for model in (0, 1):
    for level in (PLAIN, TRICKY, BROKEN):
      lapse = errors.lapse(model, "", Oracle("", 0, level != PLAIN, False), spoiled=False)
      open_MxL[model, level] = 0.0 if level == BROKEN else 1 - lapse.rate
      jam_MxL[model, level] = 1 - open_MxL[model, level] - lapse.rate * lapse.wrong
  jammed_FxL = np.array([jam_MxL[0] ** s * jam_MxL[1] ** g for s, g in jams])
  joint = prior_IxKxZxL[..., None, None, :] * np.array(rules.looks).T[:, None, :] * jammed_FxL
  belief_IxKxZxCxFxL = joint / (joint.sum(axis=-1, keepdims=True) + TINY)
  return belief_IxKxZxCxFxL @ open_MxL.T, belief_IxKxZxCxFxL @ jam_MxL.T


def _parse(observation: str) -> tuple[int, int, int]:
  """Lock, look and sign that an observation shows, as indices."""
  match = re.search(r"Lock (\d) looks (\w+)\. The sign is (\w+)\.", observation)
  if match is None or match[2] not in sandbox.LOOKS or match[3] not in sandbox.SIGNS:
    raise ValueError(f"not an observation of the sandbox: {observation!r}")
  return int(match[1]) - 1, sandbox.LOOKS.index(match[2]), sandbox.SIGNS.index(match[3])


def _call_prices(
  rules: Rules, max_steps: int, names: Sequence[str], errors: Errors
) -> list[list[float]]:
  """Dollars of a call by step and model, from real messages: all texts of a kind are as long."""
  env = Sandbox(train_tasks=1, test_tasks=1, max_steps=max_steps, rules=rules)
  task = env.tasks("train")[0]
  observation = env.reset(task.id)
  agents = ScriptedPair(names, errors).start(env, task, 0, unlimited)
  messages = opening(env.system_prompt, task, observation)
  usd = []
  for step in range(max_steps):
    replies = [agent.reply(messages, step) for agent in agents]
    usd.append([reply.call.cost_usd for reply in replies])
    extend(messages, replies[0].text, observation)
  return usd
