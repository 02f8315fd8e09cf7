"""Compare the policies that dev has chosen, by their test episodes.

Letters of axes: B resamples of tasks and training seeds (index 0 is the unchanged
data), P policies, N tasks, K caps.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from baar_jax.config import Config
from baar_jax.llms.prices import LARGE_RATE, SMALL_RATE
from baar_jax.paper import rewards
from baar_jax.report import frontier
from baar_jax.report.frontier import interval
from baar_jax.report.table import (
  DIFFICULTIES,
  METRICS,
  Evaluation,
  ExactFrontier,
)
from baar_jax.rivals.optimum import Exact, has_optimum
from baar_jax.rollout.jobs import BOUNDARY_KEYS
from baar_jax.rollout.specs import PolicySpec

AREA_COLUMNS = [
  "family",
  "metric",
  "policies",
  "area",
  "area_low",
  "area_high",
  "area_gain",
  "area_gain_low",
  "area_gain_high",
]
# Generated tokens per second of the router, in a benchmark of Qwen2.5-1.5B (paper,
# "Latency Analysis"). The time to read a prompt and the time on the network are left
# out.
ROUTER_RATE = 180.0


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
  table["episodes"] = data.episodes.policy.value_counts()
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


def areas(data: Evaluation, choice: Choice, families: Sequence[str]) -> pd.DataFrame:
  """Compute the area of each family, and the first family's gain over each.

  A family's area is the area under the line through its policies that were chosen on
  dev. The choice does not see test episodes, so a family with more policies has no
  advantage.

  Args:
    data: the evaluation on test.
    choice: the policies that dev has chosen.
    families: the families. The first one is compared with the others.

  Returns:
    A row per family and metric, with AREA_COLUMNS.
  """
  first_B = {}
  rows = []
  for family, metric in itertools.product(families, METRICS):
    if (family, metric) not in choice.vertices:
      continue
    policies = choice.vertices[family, metric]
    line = [BOUNDARY_KEYS[0], *policies, BOUNDARY_KEYS[1]]
    cost_VxB = data.resampled["cost_usd"].loc[line]
    area_B = frontier.area_along(cost_VxB, data.resampled[metric].loc[line])
    gain_B = first_B.get(metric, np.nan) - area_B
    if family == families[0]:
      first_B[metric] = area_B
    row = {"family": family, "metric": metric, "policies": policies}
    rows.append(row | interval("area", area_B) | interval("area_gain", gain_B))
  # Naming the columns keeps them in a table without rows.
  return pd.DataFrame(rows, columns=AREA_COLUMNS)


def hard_budgets(data: Evaluation, table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
  """Return the figures of each family under each cap K.

  The boundary policies, which have no cap, come first, then the main family, then the
  others. A row has the figures of the family's best policy on dev under the cap. `gain`
  is the main family's SR under the cap minus the row's SR, paired by task.

  Args:
    data: the evaluation on test.
    table: the rows of `tabulate_policies`.
    choice: the policies that dev has chosen.
  """
  first = [*BOUNDARY_KEYS, choice.main]
  table = table[table.index.isin([*BOUNDARY_KEYS, *choice.best])]
  table = table.sort_values(
    "family", key=lambda family: ~family.isin(first), kind="stable"
  )
  groups = [pd.DataFrame()]
  for K in sorted(table.call_budget.dropna().unique()):
    group = table[table.call_budget.eq(K) | table.index.isin(BOUNDARY_KEYS)]
    sr_PxB = data.resampled[data.sr].loc[group.index]
    is_main = group.family == choice.main
    # If the main family has no policy under this cap, the mean is NaN, so every gain is
    # NaN too.
    gain_PxB = sr_PxB[is_main].mean() - sr_PxB[~is_main]
    groups.append(group.assign(K=int(K)).join(intervals("gain", gain_PxB)))
  return pd.concat(groups).rename_axis("policy").reset_index()


def by_difficulty(data: Evaluation, typical: Mapping[str, str]) -> pd.DataFrame:
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
  trials = (
    data.episodes.groupby(["task_id", "policy"])
    .success.agg(list)
    .unstack()[[*BOUNDARY_KEYS]]
  )
  difficulty = trials.apply(lambda row: rewards.difficulty(*row), axis=1)
  cost_usd = data.per_task("cost_usd").loc[[*typical.values()]].set_axis([*typical])
  tasks = pd.DataFrame(1.0, ["task mix"], data.tasks)
  sums = pd.concat([tasks, cost_usd]).T.groupby(difficulty).sum().T
  sums = sums.reindex(columns=DIFFICULTIES, fill_value=0.0)
  shares = sums.div(sums.sum(axis=1).replace(0.0, np.nan), axis=0)
  return shares.add_suffix("_share").rename_axis("family").reset_index()


def latency(data: Evaluation, typical: Mapping[str, str]) -> pd.DataFrame:
  """Compute the mean seconds per episode of one policy of each family.

  `small_s`, `large_s` and `router_s` are computed from numbers of tokens at the paper's
  tokens per second. A router's decision is one token. A judge generates at LARGE's
  rate, and a rejected proposal at SMALL's rate. `waited_s` is measured: the time in
  which an episode waited for its router or judge.

  Args:
    data: the evaluation on test.
    typical: by family, the key of the policy that represents it in this table.
  """
  table = data.episodes.groupby(["policy", "task_id"]).mean(numeric_only=True)
  mean = table.groupby("policy").mean().loc[[*typical.values()]]
  mean.index = pd.Index(typical, name="family")
  seconds = pd.DataFrame(
    {"small_s": (mean.small_tokens + mean.proposal_tokens) / SMALL_RATE}
  )
  seconds["large_s"] = mean.large_tokens / LARGE_RATE
  seconds["router_s"] = mean.decisions / ROUTER_RATE + mean.judge_tokens / LARGE_RATE
  seconds["router_share"] = seconds.router_s / seconds.sum(axis=1)
  seconds["waited_s"] = mean.router_latency_s.where(mean.router_latency_s > 0)
  return seconds


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
