"""Compare the policies that dev has chosen, by their test episodes.

Letters of axes: B resamples of tasks and training seeds (index 0 is the unchanged
data), P policies.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import pandas as pd

from baar_jax.config import ABLATIONS, Config
from baar_jax.paper import rewards
from baar_jax.report import frontier
from baar_jax.report.frontier import interval
from baar_jax.report.table import METRICS, Evaluation
from baar_jax.rivals.optimum import Exact, has_optimum
from baar_jax.rollout.jobs import (
  BOPO,
  BOUNDARY_KEYS,
  COMPARED,
  FIRST_LARGE,
  SFT,
  VANILLA,
)
from baar_jax.rollout.specs import PolicySpec

DIFFICULTIES = ["easy", "hard", "intractable"]
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
  "patience": "patience {:g}",
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
  Claim("vanilla RL's frontier is below random mixes", "", VANILLA),
  Claim("BoSFT's frontier is above vanilla RL's", SFT, VANILLA),
  Claim("stratified samples fill the frontier", COMPARED, "no-stratified"),
  Claim("the reference raises the frontier", COMPARED, "no-reference"),
  Claim("the bonus of hard tasks raises it", COMPARED, "no-hard-bonus"),
  Claim("First-Large is above random mixes", FIRST_LARGE, ""),
)


class Labelled(Protocol):
  """A row of the table of families."""

  label: str


def label_policy(spec: PolicySpec, families: Mapping[str, Labelled]) -> str:
  """Write a policy's label for readers.

  An example is "budget-conditioned router, cost weight 0.5, cap-blind, at most 3
  LARGE calls". Parameters that are equal for all policies of a run, such as the
  number of updates, are left out.

  Args:
    spec: the policy.
    families: the table of families, with their labels.
  """
  words = [families[spec.family].label]
  # Only the budget-conditioned router has both variants, cap-conditioned and cap-blind,
  # so only its labels tell which one it is.
  if spec.cap and spec.cap_conditioned and spec.cost_weight is not None:
    words.append("cap-conditioned")
  settings = spec.settings | vars(spec.cap)
  # The threshold 0.5 is the usual one, and is left out of the label.
  if spec.threshold == 0.5:
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
    typical: by family that also plays without a cap, the key of the policy on its hull
      in SR nearest to the middle of the boundaries' costs. Ablations are left out.
  """

  dev: pd.DataFrame
  entries: list[PolicySpec]
  main: str
  best: list[str]
  vertices: dict[tuple[str, str], list[str]]
  typical: dict[str, str]


class ExactFrontier(NamedTuple):
  """The best frontier that any router can reach over all tasks of the sandbox.

  Attributes:
    hull: the frontier's corners: dollars per task, and success in [0, 1].
    area: the area under the frontier.
  """

  hull: Sequence[tuple[float, float]]
  area: float


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
    families: the table of all families, with their labels.
    robustness: rows that compare the tasks' difficulty by different numbers of trials.
    ledger: a row per part of the run's dollars; see `run_ledger`.
    cut_answers: the number of a judge's answers that its limit has cut.
  """

  config: Config
  choice: Choice
  data: Evaluation
  families: Mapping[str, Labelled]
  robustness: pd.DataFrame
  ledger: pd.DataFrame
  cut_answers: int

  def label(self, name: str) -> str:
    """Return a family's or a metric's name for readers; other texts are unchanged."""
    if name in self.families:
      return self.families[name].label
    return METRICS.get(name, name)

  @functools.cached_property
  def policies(self) -> pd.DataFrame:
    """Return a row per chosen policy, by its key, with its label and its figures."""
    labels = {s.key: label_policy(s, self.families) for s in self.choice.entries}
    return tabulate_policies(self.data).assign(label=pd.Series(labels))

  @functools.cached_property
  def metrics(self) -> list[str]:
    """Return the metrics that the report shows, the environment's SR first.

    If the mean score equals the rate of successes for every policy, only SR is shown.
    """
    sr = self.data.sr
    if (self.policies.score_percent == self.policies.success_percent).all():
      return [sr]
    return sorted(METRICS, key=lambda metric: metric != sr)

  @functools.cached_property
  def frontiers(self) -> pd.DataFrame:
    """Return the areas of all families but the ablations, and the main one's gains."""
    families = [self.choice.main]
    for family, _ in self.choice.vertices:
      if family not in (*families, *BOUNDARY_KEYS, *ABLATIONS, COMPARED):
        families.append(family)
    return areas(self.data, self.choice, families, self.metrics)

  @functools.cached_property
  def ablations(self) -> pd.DataFrame:
    """Return the areas of the ablations, and BoPO's gains at the same `lam`."""
    families = []
    if self.config.baselines.ablations:
      families = [COMPARED, SFT, *ABLATIONS]
    return areas(self.data, self.choice, families, self.metrics)

  @functools.cached_property
  def claims(self) -> pd.DataFrame:
    """Return a row per claim of the paper whose families were evaluated, in SR."""
    return judge_claims(self.data, self.choice)

  @functools.cached_property
  def hard_budget(self) -> pd.DataFrame:
    """Return a row per cap K and family, with the family's best policy on dev."""
    return hard_budgets(self.data, self.policies, self.choice)

  @functools.cached_property
  def by_difficulty(self) -> pd.DataFrame:
    """Return each family's shares of dollars on easy, hard and intractable tasks."""
    return share_by_difficulty(self.data, self.choice.typical)

  @functools.cached_property
  def exact(self) -> ExactFrontier | None:
    """Return the sandbox's exact frontier; None without one."""
    return exact_frontier(self.config)


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


def tabulate_policies(data: Evaluation) -> pd.DataFrame:
  """Compute every policy's means per task with intervals, and its overspends.

  `use_share` is the share of a cap that was used. `overspends` counts the episodes
  whose dollars exceed their cap.

  Returns:
    A row per policy, by its key.
  """
  table = data.entries.drop(columns="trained")
  table = table.join(data.mean(["deciding_usd", "steps", "large_calls", "spent_usd"]))
  for column, mean_PxB in data.resampled.items():
    table = table.join(intervals(column, mean_PxB))
  used = table.large_calls.where(table.call_budget.notna(), table.spent_usd)
  cap = table.call_budget.fillna(table.usd_budget)
  table["use_share"] = (used / cap).where(cap > 0)
  episodes = data.episodes
  # A tiny difference may come from the rounding of floats, and is no overspend.
  over = episodes.spent_usd > episodes.usd_budget + 1e-12
  over |= episodes.large_calls > episodes.call_budget
  table["overspends"] = over.groupby(episodes.policy).sum()
  return table


def areas(
  data: Evaluation, choice: Choice, families: Sequence[str], metrics: Sequence[str]
) -> pd.DataFrame:
  """Compute the area of each family, and the first family's gain over each.

  Args:
    data: the evaluation on test.
    choice: the policies that dev has chosen.
    families: the families. The first one is compared with the others.
    metrics: some of METRICS.

  Returns:
    A row per family and metric, with AREA_COLUMNS.
  """
  first_B = {}
  rows = []
  for family, metric in itertools.product(families, metrics):
    area_B = resample_area(data, choice, family, metric)
    if area_B is None:
      continue
    policies = choice.vertices[family, metric]
    gain_B = first_B.get(metric, np.nan) - area_B
    if family == families[0]:
      first_B[metric] = area_B
    row = {"family": family, "metric": metric, "policies": policies}
    row["vertices"] = len(policies)
    rows.append(row | interval("area", area_B) | interval("area_gain", gain_B))
  # Naming the columns keeps them in a table without rows.
  return pd.DataFrame(rows, columns=AREA_COLUMNS)


def resample_area(
  data: Evaluation, choice: Choice, family: str, metric: str
) -> np.ndarray | None:
  """Compute a family's area_B in each resample; None if it was not evaluated.

  It is the area under the line through the family's policies that were chosen on dev.
  The choice does not see test episodes, so a family with more policies has no
  advantage.

  Args:
    data: the evaluation on test.
    choice: the policies that dev has chosen.
    family: the family, COMPARED, or "" for a random mix of the boundaries.
    metric: one of METRICS.
  """
  policies = choice.vertices.get((family, metric), [] if family == "" else None)
  if policies is None:
    return None
  line = [BOUNDARY_KEYS[0], *policies, BOUNDARY_KEYS[1]]
  cost_VxB = data.resampled["cost_usd"].loc[line]
  return frontier.area_along(cost_VxB, data.resampled[metric].loc[line])


def judge_claims(data: Evaluation, choice: Choice) -> pd.DataFrame:
  """Compare the areas of each claim's families.

  A claim holds if the interval of the difference is above 0, and does not hold if it is
  below 0. Else it is not shown.

  Returns:
    A row per claim whose families were evaluated.
  """
  rows = []
  for claim in CLAIMS:
    better_B = resample_area(data, choice, claim.better, data.sr)
    worse_B = resample_area(data, choice, claim.worse, data.sr)
    if better_B is None or worse_B is None:
      continue
    gain = interval("area_gain", better_B - worse_B)
    verdict = "not shown"
    if gain["area_gain_low"] > 0:
      verdict = "holds"
    elif gain["area_gain_high"] < 0:
      verdict = "does not hold"
    rows.append({"claim": claim.text, "verdict": verdict} | gain)
  return pd.DataFrame(rows)


def hard_budgets(data: Evaluation, table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
  """Return the figures of each family under each cap K.

  The boundary policies, which have no cap, are in the rows of every K. A row has the
  figures of the family's best policy on dev under the cap. `gain_points` is the main
  family's SR under the cap minus the row's SR, paired by task.

  Args:
    data: the evaluation on test.
    table: the rows of `tabulate_policies`.
    choice: the policies that dev has chosen.
  """
  table = table[table.index.isin([*BOUNDARY_KEYS, *choice.best])]
  groups = [pd.DataFrame()]
  for K in sorted(table.call_budget.dropna().unique()):
    group = table[table.call_budget.eq(K) | table.index.isin(BOUNDARY_KEYS)]
    sr_PxB = data.resampled[data.sr].loc[group.index]
    is_main = group.family == choice.main
    # If the main family has no policy under this cap, the mean is NaN, so every gain is
    # NaN too.
    gain_PxB = sr_PxB[is_main].mean() - sr_PxB[~is_main]
    groups.append(group.assign(K=int(K)).join(intervals("gain_points", gain_PxB)))
  return pd.concat(groups).rename_axis("policy").reset_index()


def share_by_difficulty(data: Evaluation, typical: Mapping[str, str]) -> pd.DataFrame:
  """Compute how each family's dollars are divided among the difficulties of tasks.

  The difficulty of a test task follows from the test episodes of the boundary policies.
  The row "task mix" has the shares of the numbers of tasks, for comparison.

  Args:
    data: the evaluation on test.
    typical: by family, the key of the policy that represents it in this table.

  Returns:
    A row per family with shares in [0, 1]; NaN if the family's episodes have cost
      nothing.
  """
  successes = data.episodes.groupby(["task_id", "policy"]).success.agg(list)
  trials = successes.unstack()[[*BOUNDARY_KEYS]]
  difficulty = trials.apply(lambda row: rewards.difficulty(*row), axis=1)
  cost_usd = data.per_task("cost_usd").loc[[*typical.values()]].set_axis([*typical])
  tasks = pd.DataFrame(1.0, ["task mix"], data.tasks)
  sums = pd.concat([tasks, cost_usd]).T.groupby(difficulty).sum().T
  sums = sums.reindex(columns=DIFFICULTIES, fill_value=0.0)
  shares = sums.div(sums.sum(axis=1).replace(0.0, np.nan), axis=0)
  return shares.add_suffix("_share").rename_axis("family").reset_index()


def exact_frontier(config: Config) -> ExactFrontier | None:
  """Compute the best frontier that any router can reach in the sandbox.

  Returns:
    The exact frontier over all tasks. None if the environment is another one, if the
      computation does not cover the models, or if always-LARGE has no
      more successes than always-SMALL.
  """
  if not has_optimum(config):
    return None
  exact = Exact(config.models, config.env.max_steps)
  hull = exact.hull()
  small = exact.solve(p=0.0)[0]
  large = exact.solve(p=1.0)[0]
  if large.success <= small.success:
    return None
  return ExactFrontier(hull, frontier.area(*zip(*hull), small, large))
