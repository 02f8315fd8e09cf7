"""Decide by rules: functions of an episode and of the policy's parameters."""

import dataclasses
import random
from collections.abc import Callable, Iterable

from baar_jax.config import Config
from baar_jax.envs.base import ERROR_WORDS
from baar_jax.episode import SMALL
from baar_jax.families.family import Family, cap_each, play_each
from baar_jax.rollout.jobs import (
  ALWAYS,
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  FIRST_LARGE,
  RANDOM,
  RankSpec,
  list_ranks,
)
from baar_jax.rollout.policy import RulePolicy
from baar_jax.rollout.specs import (
  Live,
  PolicySpec,
  SampledSpec,
)
from baar_jax.run import RouterFiles


@dataclasses.dataclass(frozen=True)
class RandomSpec(PolicySpec):
  """A policy that calls LARGE at random.

  Attributes:
    p: the probability of a model costlier than SMALL.
  """

  p: float


def take_small(live: Live, spec: PolicySpec) -> int:
  """Choose SMALL (paper: always-small)."""
  return SMALL


def take_large(live: Live, spec: PolicySpec) -> int:
  """Choose LARGE (paper: always-large).

  Under a cap on calls, SMALL acts once the cap is spent, so this rule is First-Large.
  """
  return live.models - 1


def take_large_after_failure(live: Live, spec: PolicySpec) -> int:
  """Choose LARGE right after a failure, otherwise SMALL (our choice).

  A failure is a word of `ERROR_WORDS` in the first line of the last observation.
  """
  if live.steps and ERROR_WORDS.search(live.observation.partition("\n")[0]):
    return live.models - 1
  return SMALL


def take_rank(live: Live, spec: RankSpec) -> int:
  """Choose the model of a fixed rank, counted from 1 (our choice)."""
  return spec.rank - 1


def take_randomly(live: Live, spec: RandomSpec) -> int:
  """Choose a random model costlier than SMALL with probability p, otherwise SMALL."""
  return draw_model(live, spec.p)


def draw_model(live: Live, p: float) -> int:
  """Draw a model costlier than SMALL with probability p, otherwise SMALL.

  All models costlier than SMALL are equally probable. The draw depends only on task,
  seed and step (our choice).
  """
  draw = random.Random(f"random|{live.task.id}|{live.job.seed}|{len(live.steps)}")
  return draw.choice(range(1, live.models)) if draw.random() < p else SMALL


def take_sampled(live: Live, spec: SampledSpec) -> int:
  """Choose the model by the sampling plan to which the trial belongs.

  The trials of a task are numbered through all plans, one plan after the other. Trial k
  of a plan's N trials chooses as follows:

  - Plan "samples": LARGE with probability k / N at each step (paper: stratified
    sampling).
  - Plan "steps": a counter counts the steps so far. If k is odd, LARGE acts until the
    counter reaches k / (2 N) of the task's `max_steps`, and SMALL acts afterwards. If k
    is even, SMALL acts first and LARGE afterwards.
  - Plan "repeats": the same, but the counter counts repeated observations.

  The last two plans are our choice. From these plans the value heads learn the effect
  of spending early, of spending late or giving up, and of spending once observations
  repeat. With more than two models, a random model costlier than SMALL takes LARGE's
  place.
  """
  k = live.job.trial
  for plan in spec.plans:
    if k <= plan.count:
      break
    k -= plan.count
  if plan.kind == "samples":
    return draw_model(live, k / plan.count)
  clock = len(live.steps)
  if plan.kind == "repeats":
    observations = [*(step.observation for step in live.steps), live.observation]
    clock = len(observations) - len(set(observations))
  is_early = clock < k / (2 * plan.count) * live.task.max_steps
  return draw_model(live, float(is_early == k % 2))


@dataclasses.dataclass(frozen=True)
class Rule(Family):
  """A family that decides by a rule.

  Attributes:
    rule: returns the index of the model to act.
    list_points: lists the policies to evaluate; None lists one policy, without a cap
      and under each cap.
  """

  rule: Callable[[Live, PolicySpec], int] = take_small
  list_points: Callable[[Config], Iterable[PolicySpec]] | None = None

  def points(self, config: Config) -> Iterable[PolicySpec]:
    """List the policies to evaluate."""
    if self.list_points:
      return self.list_points(config)
    return play_each(config, [PolicySpec(self.name)])

  def open(self, spec: PolicySpec, files: RouterFiles) -> RulePolicy:
    """Make a policy that decides by the rule."""
    return RulePolicy(spec, self.rule)


def list_small(config: Config) -> list[PolicySpec]:
  """List always-SMALL, whose episodes a cap on calls would not change."""
  return [ALWAYS_SMALL, *cap_each(config, [ALWAYS_SMALL], is_calls=False)]


def list_first_large(config: Config) -> Iterable[PolicySpec]:
  """List First-Large under each cap; without a cap it is always-LARGE."""
  return cap_each(config, [PolicySpec(FIRST_LARGE)])


def list_random(config: Config) -> Iterable[PolicySpec]:
  """List the random policies."""
  return play_each(config, [RandomSpec(RANDOM, p) for p in config.evaluate.random_p])


class Samples(Family):
  """A family that only plays the episodes that routers learn from."""

  def open(self, spec: SampledSpec, files: RouterFiles) -> RulePolicy:
    """Make a policy that decides by the sampling plans."""
    return RulePolicy(spec, take_sampled)


RULES = [
  Rule(ALWAYS_SMALL.family, "always-SMALL", rule=take_small, list_points=list_small),
  Rule(
    ALWAYS_LARGE.family,
    "always-LARGE",
    rule=take_large,
    list_points=lambda config: [ALWAYS_LARGE],
  ),
  Rule(FIRST_LARGE, "First-Large", rule=take_large, list_points=list_first_large),
  Rule(ALWAYS, "always the intermediate model", rule=take_rank, list_points=list_ranks),
  Rule(RANDOM, "random", rule=take_randomly, list_points=list_random),
  Rule(
    "escalate",
    "escalate after a failure",
    is_rival=True,
    rule=take_large_after_failure,
  ),
  Samples("stratified", "stratified samples"),
  Samples("exploration", "samples of hard tasks"),
  Samples("exploration-all", "samples of other tasks"),
]
