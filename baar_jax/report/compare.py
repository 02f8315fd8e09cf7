"""Compare the policies that dev has chosen, by their test episodes.

Letters of axes: B resamples of tasks and training seeds (index 0 is the unchanged
data), P policies.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from baar_jax.config import ABLATIONS, Config
from baar_jax.report import frontier
from baar_jax.report.frontier import interval
from baar_jax.report.table import COMPARED, COMPARED_COLUMNS, METRICS, Evaluation
from baar_jax.rollout.jobs import (
  BOPO,
  BOUNDARY_KEYS,
  FIRST_LARGE,
  SFT,
  VANILLA,
)
from baar_jax.rollout.specs import PolicySpec

AREA_COLUMNS = [
  "family",
  "metric",
  "policies",
  "vertices",
  "area",
  "area_low",
  "area_high",
  "area_gain",
  "area_gain_low",
  "area_gain_high",
]
# Words for a policy's parameters and cap in its label, by name.
PARAMETERS = {
  "lam": "λ {:g}",
  "threshold": "LARGE from probability {:g}",
  "share": "LARGE share {:g} in training",
  "cost_weight": "cost weight {:g}",
  "blind": "cap-blind",
  "p": "LARGE with probability {:g}",
  "mu": "μ {:g}",
  "rank": "model {:g}",
  "calls": "at most {} LARGE calls",
  "usd": "at most ${:g}",
}


class Claim(NamedTuple):
  """A claim of the paper that two areas decide.

  Attributes:
    text: the claim.
    better: the family whose area is larger if the claim holds; "" is a random mix of
      the boundaries.
    worse: the family with the smaller area, likewise.
  """

  text: str
  better: str
  worse: str


CLAIMS = (
  Claim("BoPO's frontier is above BoSFT's", BOPO, SFT),
  Claim("BoPO's frontier is above vanilla RL's", BOPO, VANILLA),
  Claim("vanilla RL is no better than random mixes", "", VANILLA),
  Claim("BoSFT's frontier is above vanilla RL's", SFT, VANILLA),
  Claim("stratified samples fill the frontier", COMPARED, "no-stratified"),
  Claim("the reference raises the frontier", COMPARED, "no-reference"),
  Claim("the bonus of hard tasks raises it", COMPARED, "no-hard-bonus"),
  Claim("First-Large is strong: above random mixes", FIRST_LARGE, ""),
)


def label_policy(spec: PolicySpec, labels: Mapping[str, str]) -> str:
  """Write a policy's label for readers.

  An example is "budget-conditioned router, cost weight 0.5, cap-blind, at most 3
  LARGE calls". Parameters that are equal for all policies of a run, such as the
  number of updates, are left out.

  Args:
    spec: the policy.
    labels: the labels of all families, by name.
  """
  words = [labels[spec.family]]
  # Only the budget-conditioned router has both variants, cap-conditioned and cap-blind,
  # so only its labels tell which one it is.
  if spec.cap and spec.cap_conditioned and "cost_weight" in spec.parameters:
    words.append("cap-conditioned")
  settings = spec.parameters | vars(spec.cap)
  # The threshold 0.5 is the usual one, and is left out of the label.
  if settings.get("threshold") == 0.5:
    del settings["threshold"]
  for name, value in settings.items():
    if name in PARAMETERS and value is not None:
      words.append(PARAMETERS[name].format(value))
  return ", ".join(words).replace(" 1 LARGE calls", " 1 LARGE call")


class Choice(NamedTuple):
  """The policies chosen on dev. Only these are played on test.

  Attributes:
    dev: a row per policy, chosen or not, with its mean dollars and METRICS on dev.
    entries: the chosen policies, in the report's order.
    main: the family that the others are compared with: the budget-conditioned router if
      the run has one, else BoPO.
    best: keys of the policies with the highest sum of SR and success, one per family
      and cap.
    vertices: by (family or COMPARED, metric), the keys of the policies on the family's
      upper hull on dev. Policies with a cap on dollars are left out.
    typical: by family that also plays without a cap, the key of its policy without a
      cap, on its hull in SR if there is one, nearest to the middle of the boundaries'
      costs. Ablations are left out.
    default: the default policy of the budget-conditioned router; None if the run has
      none.
  """

  dev: pd.DataFrame
  entries: list[PolicySpec]
  main: str
  best: list[str]
  vertices: dict[tuple[str, str], list[str]]
  typical: dict[str, str]
  default: PolicySpec | None


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
  """The results of the evaluation on test, of the policies that dev has chosen.

  In the tables, columns named *_percent are in percent, and *_share in [0, 1]. Columns
  *_low and *_high are the ends of 95 % intervals. NaN stands for a value that cannot be
  computed.

  Attributes:
    config: the run's configuration.
    choice: the policies that dev has chosen.
    data: their test episodes.
    labels: the labels of all families, by name.
    robustness: rows that compare the tasks' difficulty by different numbers of trials.
    inverted: for each training task, whether always-SMALL has cost more dollars than
      always-LARGE, by the medians.
    ledger: a row per part of the run's dollars; see `read_ledger`.
  """

  config: Config
  choice: Choice
  data: Evaluation
  labels: Mapping[str, str]
  robustness: pd.DataFrame
  inverted: Sequence[bool]
  ledger: pd.DataFrame

  def label(self, name: str) -> str:
    """Return a family's or a metric's name for readers; other texts are unchanged."""
    return (self.labels | METRICS).get(name, name)

  @functools.cached_property
  def policies(self) -> pd.DataFrame:
    """Compute every policy's means per task with intervals, and its overspends.

    `saved_share` is the share of always-LARGE's dollars that a policy saves, and
    `lead_points` its SR minus always-LARGE's; both are paired by task. `use_share` is
    the share of a cap that was used. `overspends` counts the episodes whose dollars
    exceed their cap.

    Returns:
      A row per chosen policy, by its key, with its label.
    """
    data = self.data
    table = data.entries.drop(columns="trained")
    columns = ["deciding_usd", "counted_usd", "spent_usd", "steps", "large_calls"]
    table = table.join(data.mean(columns))
    for column in COMPARED_COLUMNS:
      table = table.join(intervals(column, data.resampled[column]))
    large = BOUNDARY_KEYS[1]
    usd_PxB = data.resampled["cost_usd"]
    sr_PxB = data.resampled[data.sr]
    table = table.join(intervals("saved_share", 1 - usd_PxB / usd_PxB.loc[large]))
    table = table.join(intervals("lead_points", sr_PxB - sr_PxB.loc[large]))
    used = table.large_calls.where(table.call_budget.notna(), table.counted_usd)
    cap = table.call_budget.fillna(table.usd_budget)
    table["use_share"] = (used / cap).where(cap > 0)
    episodes = data.episodes
    # A tiny difference may come from the rounding of floats, and is no overspend.
    over = episodes.counted_usd > episodes.usd_budget + 1e-12
    over |= episodes.large_calls > episodes.call_budget
    table["overspends"] = over.groupby(episodes.policy).sum()
    table["label"] = [label_policy(spec, self.labels) for spec in self.choice.entries]
    return table

  @functools.cached_property
  def metrics(self) -> list[str]:
    """Return the metrics that the report shows, the environment's SR first.

    If the mean score equals the rate of successes for every policy, only SR is shown.
    """
    sr = self.data.sr
    if (self.policies.score_percent == self.policies.success_percent).all():
      return [sr]
    return sorted(METRICS, key=lambda metric: metric != sr)

  def resample_area(self, family: str, metric: str) -> np.ndarray | None:
    """Compute a family's area_B in each resample; None if it was not evaluated.

    It is the area under the line through the family's policies that were chosen on dev.
    The choice does not see test episodes, so a family with more policies has no
    advantage.

    Args:
      family: the family, COMPARED, or "" for a random mix of the boundaries.
      metric: one of METRICS.
    """
    policies = self.choice.vertices.get((family, metric), [] if family == "" else None)
    if policies is None:
      return None
    line = [BOUNDARY_KEYS[0], *policies, BOUNDARY_KEYS[1]]
    cost_VxB = self.data.resampled["cost_usd"].loc[line]
    return frontier.area_along(cost_VxB, self.data.resampled[metric].loc[line])

  def areas(self, families: Sequence[str]) -> pd.DataFrame:
    """Compute the area of each family, and the first family's gain over each.

    Args:
      families: the families. The first one is compared with the others.

    Returns:
      A row per family and metric, with AREA_COLUMNS.
    """
    first_B = {}
    rows = []
    for family, metric in itertools.product(families, self.metrics):
      area_B = self.resample_area(family, metric)
      if area_B is None:
        continue
      policies = self.choice.vertices[family, metric]
      gain_B = first_B.get(metric, np.nan) - area_B
      if family == families[0]:
        first_B[metric] = area_B
      row = {"family": family, "metric": metric, "policies": policies}
      row["vertices"] = len(policies)
      rows.append(row | interval("area", area_B) | interval("area_gain", gain_B))
    # Naming the columns keeps them in a table without rows.
    return pd.DataFrame(rows, columns=AREA_COLUMNS)

  @functools.cached_property
  def frontiers(self) -> pd.DataFrame:
    """Return the areas of all families but the ablations, and the main one's gains."""
    families = [self.choice.main]
    for family, _ in self.choice.vertices:
      if family not in (*families, *BOUNDARY_KEYS, *ABLATIONS, COMPARED):
        families.append(family)
    return self.areas(families)

  @functools.cached_property
  def ablations(self) -> pd.DataFrame:
    """Return the areas of the ablations, and BoPO's gains at the same `lam`."""
    families = []
    if self.config.baselines.ablations:
      families = [COMPARED, SFT, *ABLATIONS]
    return self.areas(families)

  @functools.cached_property
  def claims(self) -> pd.DataFrame:
    """Judge the claims of the paper whose policies were evaluated, in SR.

    A claim holds if the interval of its gain is above 0, and does not hold if it is
    below 0. Else it is not shown. The gain is a difference of two areas, or of two
    shares. Inverted costs are those of a task's medians (our choice; the paper counts
    trajectories).

    Returns:
      A row per claim.
    """
    data = self.data
    gains = {}  # by claim, in each resample
    for claim in CLAIMS:
      better_B = self.resample_area(claim.better, data.sr)
      worse_B = self.resample_area(claim.worse, data.sr)
      if better_B is not None and worse_B is not None:
        gains[claim.text] = better_B - worse_B
    if policy := self.choice.typical.get(BOPO):
      usd = {name: table.loc[policy] for name, table in data.resampled.items()}
      hard_B = usd["hard_usd"] / usd["cost_usd"]
      gains["BoPO moves dollars to hard tasks"] = hard_B - usd["hard"]
    rows = []
    for text, gain_B in gains.items():
      gain = interval("gain", gain_B)
      verdict = "not shown"
      if gain["gain_low"] > 0:
        verdict = "holds"
      elif gain["gain_high"] < 0:
        verdict = "does not hold"
      rows.append({"claim": text, "verdict": verdict} | gain)
    if self.inverted:
      share = np.mean(self.inverted)
      verdict = "holds" if share else "does not hold"
      text = "SMALL costs more than LARGE on some training tasks"
      rows.append({"claim": text, "verdict": verdict, "gain": share})
    return pd.DataFrame(rows)

  @functools.cached_property
  def hard_budget(self) -> pd.DataFrame:
    """Return the figures of each family under each cap K.

    The boundary policies, which have no cap, are in the rows of every K, with their
    LARGE calls as a share of K, as in the paper's Table 1. A row has the figures of the
    family's best policy on dev under the cap. `gain_points` is the main family's SR
    under the cap minus the row's SR, paired by task.
    """
    shown = [*BOUNDARY_KEYS, *self.choice.best]
    table = self.policies[self.policies.index.isin(shown)].reset_index()
    groups = [pd.DataFrame()]
    for K in sorted(table.call_budget.dropna().unique()):
      group = table[table.call_budget.eq(K) | table.policy.isin(BOUNDARY_KEYS)]
      sr_PxB = self.data.resampled[self.data.sr].loc[group.policy].set_axis(group.index)
      is_main = group.family == self.choice.main
      # If the main family has no policy under this cap, the mean is NaN, so every gain
      # is NaN too.
      gain_PxB = sr_PxB[is_main].mean() - sr_PxB[~is_main]
      use_share = group.use_share.fillna(group.large_calls / K)
      group = group.assign(K=int(K), use_share=use_share)
      groups.append(group.join(intervals("gain_points", gain_PxB)))
    return pd.concat(groups, ignore_index=True)


def intervals(name: str, value_PxB: pd.DataFrame) -> pd.DataFrame:
  """Compute each policy's value with its 95 % interval.

  Args:
    name: the name of the column of values.
    value_PxB: a row per policy, and a column per resample (see `frontier.interval`).

  Returns:
    A row per policy, with the columns name, name_low and name_high.
  """
  rows = [interval(name, value_B) for value_B in value_PxB.to_numpy()]
  return pd.DataFrame(rows, value_PxB.index)
