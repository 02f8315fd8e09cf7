"""Judge a run's router by its sessions of the held-out tests."""

import math
from typing import NamedTuple

import numpy as np

from baar_jax.families.conditioned import load_default
from baar_jax.report.table import load_split
from baar_jax.rollout.jobs import ALWAYS_LARGE, BOUNDARIES
from baar_jax.rollout.specs import PolicySpec
from baar_jax.run import Run
from baar_serve.episodes import SPLIT_OF
from baar_serve.plan import list_router_specs

# Half of the width of an interval of scores that settles a verdict (our choice).
SETTLED = 0.05


class Gain(NamedTuple):
  """A mean difference of two scores, as far as few tasks can tell it.

  Attributes:
    mean: the mean difference per task.
    half: half of the width of its 95 % interval.
    tests: the number of tasks.
    missing: the number of further tasks that would tell it from 0, or, if it is small,
      make the interval as narrow as `SETTLED`.
  """

  mean: float
  half: float
  tests: int
  missing: int

  def __str__(self) -> str:
    """Write the mean with half of its interval."""
    return f"{self.mean:+.3f} ± {self.half:.3f}"


def measure_gain(gain_N: np.ndarray) -> Gain:
  """Measure a mean difference of two scores in [0, 1] over tasks.

  As in Agresti and Min (2005), for pairs of successes, two tasks are added: their
  differences are 1, -1 and twice 0, with half of a task's weight each. So a few equal
  scores do not prove equality. How many tasks are missing supposes that further tasks
  are like these.
  """
  count = len(gain_N) + 2
  mean = gain_N.sum() / count
  variance = (np.square(gain_N).sum() + 1) / count - mean**2
  half = 2 * math.sqrt(variance / count)
  enough = count * (half / max(abs(mean), SETTLED)) ** 2
  return Gain(mean, half, len(gain_N), max(0, math.ceil(enough - count)))


class Comparison(NamedTuple):
  """A policy compared with another one.

  Attributes:
    gain: the difference of their scores.
    usd: the mean dollars of a test.
    other_usd: those of the other policy.
  """

  gain: Gain
  usd: float
  other_usd: float

  def __str__(self) -> str:
    """Write the comparison."""
    return f"score {self.gain}, ${self.usd:.6f} a test and ${self.other_usd:.6f}"


def compare(run: Run, policy: PolicySpec, other: PolicySpec) -> Comparison:
  """Compare two policies of a run on the tests."""
  data = load_split(run.store, [*BOUNDARIES, policy, other], run.config, "test")
  scores = data.per_task("score").loc
  usd = data.mean(["cost_usd"]).cost_usd
  gain = measure_gain((scores[policy.key] - scores[other.key]).to_numpy())
  return Comparison(gain, usd[policy.key], usd[other.key])


def find_default(run: Run) -> PolicySpec:
  """Return the router's policy with its default cost weight."""
  weight = load_default(run.files())
  specs = list_router_specs(run.config)
  return next(spec for spec in specs if spec.cost_weight == weight)


def judge(run: Run) -> str:
  """Write which model name to serve, by the scores on the held-out tests.

  The line names one only if the scores settle it: the router's, unless it is shown to
  score less than always-LARGE.
  """
  data = compare(run, find_default(run), ALWAYS_LARGE)
  gain = data.gain
  verdict = "serve baar:large" if gain.mean < -gain.half else "serve baar"
  if gain.missing:
    verdict = (
      f"not settled by {gain.tests} tests; {len(SPLIT_OF) * gain.missing} more tasks "
      "would settle it"
    )
  return (
    f"Verdict: {verdict}. The router's score against always-LARGE's: {gain}, "
    "corrected for few tasks."
  )
