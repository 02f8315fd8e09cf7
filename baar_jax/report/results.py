"""Records of the report: everything that it shows."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import pandas as pd

from baar_jax.config import Config
from baar_jax.episode import Episode
from baar_jax.llms.prices import Price

METRICS = ("score_percent", "success_percent")


@dataclasses.dataclass(frozen=True)
class Facts:
  """What was run, in words and numbers that are not in the config."""

  environment: str  # the class of one of the user's own
  own_tasks: bool  # generated here, not the benchmark's
  models: str
  prices_usd_per_million: dict[str, Price]
  test_tasks: int
  left_out_episodes: list[str]
  sr: str  # which of METRICS is the environment's SR
  main: str  # the family that the report is about
  train_tasks: int


class Style(Protocol):
  """How a family of policies is shown; the families of the table have it."""

  label: str
  color: str
  marker: str


@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
  """Expected scores in [0, 1] beside measured ones."""

  rows: pd.DataFrame  # by budget
  bins: pd.DataFrame  # of a calibration: means and a count
  brier: float  # the mean squared difference (Brier 1950)


@dataclasses.dataclass(frozen=True)
class ExactFrontier:
  """The frontier of optimal policies over all tasks."""

  hull: Sequence[tuple[float, float]]  # dollars and success of its vertices
  area: float


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
  """The results of the evaluation.

  All but `dev` are of test and of the policies that dev has chosen. *_percent is in
  percent, *_share in [0, 1]; *_low and *_high are ends of 95 % intervals; NaN or None
  cannot be computed.
  """

  config: Config
  run: Facts
  dev: pd.DataFrame
  policies: pd.DataFrame
  headline: str | None
  frontiers: pd.DataFrame
  ablations: pd.DataFrame
  hard_budget: pd.DataFrame
  by_difficulty: pd.DataFrame
  latency: pd.DataFrame
  robustness: list[dict]
  forecast: Forecast | None
  training: pd.DataFrame
  ledger: dict[str, float]
  exact: ExactFrontier | None
  episodes: list[Episode]
  paper: pd.DataFrame
  styles: Mapping[str, Style]  # by family

  def label(self, family: str) -> str:
    """Name a family as a reader knows it; another one goes by its own name."""
    return self.styles[family].label if family in self.styles else family

  @functools.cached_property
  def metrics(self) -> list[str]:
    """List the environment's own metric first; alone if every score is 0 or 1."""
    table = self.policies
    if (table.score_percent == table.success_percent).all():
      return [self.run.sr]
    return sorted(METRICS, key=lambda metric: metric != self.run.sr)

  @functools.cached_property
  def cost_digits(self) -> int:
    """Count the decimals that show three digits of the cheapest policy's dollars."""
    cheapest = self.policies.cost_usd[self.policies.usd_budget.isna()].min()
    if not cheapest > 0:
      return 4
    return 2 - math.floor(math.log10(cheapest))
