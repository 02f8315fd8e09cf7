"""Bound what a router can gain on recorded tickets, by policies that know more.

Each policy is computed by dynamic programming over the functions of a ticket, the tries
at each, and the remaining LARGE calls, without prompt caches and with enough steps for
all tries. They differ in what they know of a try:

- "clairvoyant" knows the outcomes of this trial, so no router can score more.
- "knows-function" knows the outcomes of the same function in its other trials, and
  weighs the mean over all training functions as one more trial (our choice).
- "schedule" knows the mean over all training functions. It is the best schedule for one
  who reads no text: it heeds only failures and the remaining calls.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from baar_jax.config import RECORDED, Config
from baar_jax.envs.code.adapter import (
  TICKET,
  TRIES,
  deal,
  find_place,
  read_functions,
  read_recording,
)
from baar_jax.episode import SMALL, Usage
from baar_jax.families.family import Family, cap_each
from baar_jax.llms.offline import draw_trial
from baar_jax.llms.prices import prices_of
from baar_jax.rollout.policy import RulePolicy
from baar_jax.rollout.specs import Live, PolicySpec
from baar_jax.run import RouterFiles

# The policies are evaluated with these values of mu.
WEIGHTS = (0, 0.01, 0.03, 0.1, 0.3, 1)
CLAIRVOYANT = "clairvoyant"
KNOWS_FUNCTION = "knows-function"
SCHEDULE = "schedule"


@dataclasses.dataclass(frozen=True)
class ForesightSpec(PolicySpec):
  """A policy that knows more than a router.

  Attributes:
    mu: the units of score that it gives up for the mean dollars of a ticket at which
      LARGE tries each function once; None under a cap.
  """

  mu: float | None = None


class Chance(NamedTuple):
  """What is known of a try: the probability of a solution, and the expected dollars."""

  solved: float
  usd: float


# A function of place, path so far and remaining LARGE calls, which returns the value of
# the best choice and its model.
Best = Callable[[int, str, int], tuple[float, int]]


def find_best(
  chances: Callable[[int, str], Chance], functions: int, models: int, mu: float
) -> Best:
  """Solve a ticket by dynamic programming.

  Args:
    chances: what is known of a try: a function of the place of the ticket's function
      and of the path, the models of its tries so far with the one of this try.
    functions: the number of functions of the ticket.
    models: the number of models.
    mu: the score that one dollar is worth.

  Returns:
    A function; its values are the expected score minus mu x dollars, and of equally
    good models it returns the cheapest.
  """

  @functools.cache
  def best(place: int, path: str, calls: int) -> tuple[float, int]:
    """Compute the value and the model of a try."""
    if place == functions:
      return 0.0, SMALL
    if len(path) == TRIES:
      return best(place + 1, "", calls)
    values = []
    for model in range(models if calls else 1):
      after = f"{path}{model}"
      left = calls - (model != SMALL)
      chance = chances(place, after)
      value = chance.solved * (1 / functions + best(place + 1, "", left)[0])
      value += (1 - chance.solved) * best(place, after, left)[0]
      # Values that are equal but for rounding count as equal.
      values.append(round(value - mu * chance.usd, 12))
    model = int(np.argmax(values))
    return values[model], model

  return best


class Knowledge:
  """Look up in a recording what each policy knows."""

  def __init__(self, config: Config):
    """Read the functions and the recording of a run."""
    models = config.models
    recording = read_recording(models.recording)
    self._functions = read_functions(config.env.options.get("data", ""))
    self._prices = prices_of(models)
    self._nodes = recording.nodes
    self._trials = range(recording.trials)
    train = [row.id for row in self._functions if row.split == "train"]
    find = functools.partial(self._find, train, self._trials)
    self._rates = functools.cache(lambda path: average(find(path)))
    self._solve = functools.lru_cache(1 << 10)(self._solve_trial)
    # As if LARGE tried each function of a ticket once.
    self._unit_usd = TICKET * self._rates(f"{len(self._prices) - 1}").usd

  def choose(self, live: Live, spec: ForesightSpec) -> int:
    """Choose the best model of the next try, as a rule of `RulePolicy`."""
    place, is_second = find_place(live.observation)
    path = str(live.steps[-1].model) if is_second else ""
    left = live.remaining_cap.calls
    calls = live.task.max_steps if left is None else left
    return self._solve(spec, live.task.id, live.job.seed)(place, path, calls)[1]

  def _solve_trial(self, spec: ForesightSpec, task_id: str, seed: int) -> Best:
    """Solve a trial of a ticket with what a policy knows."""
    ids = [function.id for function in deal(self._functions, task_id)]
    drawn = [draw_trial(task_id, id_, seed, len(self._trials)) for id_ in ids]

    def chances(place: int, path: str) -> Chance:
      """Return what the policy knows of a try."""
      rates = self._rates(path)
      trials = []
      if spec.family == CLAIRVOYANT:
        trials = [drawn[place]]
      elif spec.family == KNOWS_FUNCTION:
        trials = [trial for trial in self._trials if trial != drawn[place]]
      outcomes = self._find([ids[place]], trials, path)
      if spec.family == KNOWS_FUNCTION:
        outcomes.append(rates)
      return average(outcomes) if outcomes else rates

    mu = (spec.mu or 0.0) / (self._unit_usd or 1.0)  # Models may be free.
    return find_best(chances, len(ids), len(self._prices), mu)

  def _find(self, ids: Iterable[str], trials: Iterable[int], path: str) -> list[Chance]:
    """Return the outcomes of functions in some trials, after a path."""
    price = self._prices[int(path[-1])]
    outcomes = []
    for key in itertools.product(ids, trials, (path,)):
      if node := self._nodes.get(key):
        usage = Usage(node.prompt_tokens, 0, node.completion_tokens)
        solved = float(not any(node.results))
        outcomes.append(Chance(solved, price.cost_usd(usage)))
    return outcomes


def average(outcomes: Sequence[Chance]) -> Chance:
  """Compute the mean of some chances; a path that no training took counts as failed."""
  return Chance(*np.mean(outcomes or [(0.0, 0.0)], axis=0).tolist())


class Foresight(Family):
  """A family of policies that know more than a router, on recordings alone."""

  def points(self, config: Config) -> Iterator[PolicySpec]:
    """Yield a policy for each mu, and one for each cap on calls."""
    if config.models.kind == RECORDED:
      capped = ForesightSpec(self.name, cap_conditioned=True)
      for mu in WEIGHTS:
        yield dataclasses.replace(capped, mu=mu)
      yield from cap_each(config, [capped], is_usd=False)

  def open(self, spec: PolicySpec, files: RouterFiles) -> RulePolicy:
    """Make a policy that looks up what it knows."""
    return RulePolicy(spec, Knowledge(files.config).choose)
