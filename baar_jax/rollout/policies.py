"""The policies that need no training: boundaries, random, First-Large, and the oracle."""

import random
from collections.abc import Callable, Sequence

from baar_jax.episode import LARGE, SMALL
from baar_jax.rollout.live import Decision, Live, Policy


class RulePolicy(Policy):
  """A rule from a live episode to a model; it keeps nothing between its decisions."""

  def __init__(self, name: str, rule: Callable[[Live], int]):
    self.name = name
    self._rule = rule

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    return [Decision(self._rule(live)) for live in ready]


def always(model: int, name: str) -> RulePolicy:
  """The same model at every step: the paper's boundaries, and First-Large under a call budget."""
  return RulePolicy(name, lambda live: model)


def random_rule(live: Live, p: float) -> int:
  """LARGE with probability p, else SMALL; the draw depends on task, seed and step."""
  key = f"random|{live.task.id}|{live.job.seed}|{len(live.steps)}"
  return LARGE if random.Random(key).random() < p else SMALL


def random_large(p: float, name: str) -> RulePolicy:
  """LARGE with the same probability at every step."""
  return RulePolicy(name, lambda live: random_rule(live, p))


def oracle(name: str) -> RulePolicy:
  """LARGE exactly where the scripted SMALL is more likely to fail than not.

  Privileged: it reads the error model of the scripted pair, so it is an upper bound to compare
  with and never a router.
  """
  return RulePolicy(name, lambda live: LARGE if live.agents[SMALL].error_rate() > 0.5 else SMALL)
