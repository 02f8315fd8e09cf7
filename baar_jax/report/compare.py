"""Compare on test the policies that dev has chosen; count their dollars and seconds.

Axes: B resamples of tasks and training seeds (the first is all), P policies, N tasks,
K budgets.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from baar_jax.config import Config
from baar_jax.report import frontier
from baar_jax.report.frontier import interval
from baar_jax.report.results import METRICS, ExactFrontier, Facts, Forecast
from baar_jax.report.table import DIFFICULTIES, Evaluation
from baar_jax.rollout.optimum import Exact, has_optimum
from baar_jax.rollout.specs import PolicySpec
from baar_jax.store import BUDGETS
from baar_jax.train import rewards
from baar_jax.train.jobs import BOUNDARY_KEYS

FORECAST = "forecast.csv"  # what stage forecast leaves in a run's directory
PAPER = Path(__file__).with_name("paper.json")
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
# Generated tokens per second (paper, "Latency Analysis"): SMALL and LARGE after
# OpenAI's targets, the router after a benchmark of Qwen2.5-1.5B. Reading the prompt and
# the network do not count.
SMALL_RATE = 90.0
LARGE_RATE = 80.0
ROUTER_RATE = 180.0
BINS = 10  # of a calibration


class Choice(NamedTuple):
  """The policies that dev chooses, which alone are played on test."""

  dev: pd.DataFrame  # of every entry, by policy: cost_usd and METRICS on dev
  entries: list[PolicySpec]  # all that are chosen, in their order
  # The family that the report is about: the router that knows its budget, else BoPO
  main: str
  best: list[str]  # of each family under each budget the policy with the highest SR
  # By family (or COMPARED) and metric: the policies on the upper hull of its points,
  # without a cap or with one on calls, and the boundaries.
  vertices: dict[tuple[str, str], list[str]]
  # The main family's point that lies highest above the boundaries' line.
  headline: str | None
  # Per family the point, perhaps capped, nearest in cost to the headline.
  typical: dict[str, str]


def intervals(name: str, value_PxB: pd.DataFrame) -> pd.DataFrame:
  """Compute each row's value and interval (`frontier.interval`)."""
  rows = [interval(name, value_B) for value_B in value_PxB.to_numpy()]
  return pd.DataFrame(rows, value_PxB.index)


def tabulate_policies(data: Evaluation) -> pd.DataFrame:
  """Compute every policy's means per task, some with intervals, and its overruns.

  The shares are of the gaps between the boundaries and of a policy's cap. An overrun is
  an episode over its cap.
  """
  table = data.entries.drop(columns="trained")
  table["episodes"] = data.episodes.policy.value_counts()
  table = table.join(data.mean(["deciding_usd", "steps", "large_calls", "spent_usd"]))
  means = dict(data.resampled)
  gaps = {"cost_gap_share": "cost_usd", "success_gap_share": "success_percent"}
  for share, column in gaps.items():
    low_B, high_B = means[column].loc[[*BOUNDARY_KEYS]].to_numpy()
    gap_B = high_B - low_B
    means[share] = (means[column] - low_B) / np.where(gap_B > 0, gap_B, np.nan)
  for column, mean_PxB in means.items():
    table = table.join(intervals(column, mean_PxB))
  used = table.large_calls.where(table.call_budget.notna(), table.spent_usd)
  cap = table.call_budget.fillna(table.usd_budget)
  table["use_share"] = (used / cap).where(cap > 0)
  episodes = data.episodes
  # Floats may add up to slightly more than the exact sum of a budget in dollars.
  over = episodes.spent_usd > episodes.usd_budget + 1e-12
  over |= episodes.large_calls > episodes.call_budget
  table["overruns"] = over.groupby(episodes.policy).sum()
  return table


def resample_area(data: Evaluation, policies: Sequence[str], metric: str) -> np.ndarray:
  """Compute area_B along policies; NaN unless LARGE costs more and scores more."""
  small, large = BOUNDARY_KEYS
  names = [small, *policies, large]
  cost_VxB = data.resampled["cost_usd"].loc[names]
  return frontier.area_along(cost_VxB, data.resampled[metric].loc[names])


def areas(data: Evaluation, choice: Choice, families: Sequence[str]) -> pd.DataFrame:
  """Compute each family's area by metric, and the gain of the first family over it.

  An area is along the points that dev has chosen, so that all are comparable, however
  many candidates there were.
  """
  first_B = {}
  rows = []
  for family, metric in itertools.product(families, METRICS):
    if (family, metric) not in choice.vertices:
      continue
    policies = choice.vertices[family, metric]
    area_B = resample_area(data, policies, metric)
    gain_B = first_B.get(metric, np.nan) - area_B
    if family == families[0]:
      first_B[metric] = area_B
    row = {"family": family, "metric": metric, "policies": policies}
    rows.append(row | interval("area", area_B) | interval("area_gain", gain_B))
  return pd.DataFrame(rows, columns=AREA_COLUMNS)  # also without any family


def hard_budgets(data: Evaluation, table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
  """List a row per K and family: the boundaries, the main family, then the others.

  The boundaries keep no cap. A row is that of `tabulate_policies` with the parameters
  that dev has chosen, and the gain in SR of the main family over it, on the same tasks.
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
    gain_PxB = sr_PxB[is_main].mean() - sr_PxB[~is_main]  # NaN without the main family
    groups.append(group.assign(K=int(K)).join(intervals("gain", gain_PxB)))
  return pd.concat(groups).rename_axis("policy").reset_index()


def by_difficulty(
  data: Evaluation, typical: Mapping[str, str], easy_rate: float
) -> pd.DataFrame:
  """Compute each family's shares of its dollars by the test tasks' difficulty.

  The boundaries' own episodes tell the difficulty. The family "task mix" has the shares
  of the tasks. Shares are NaN if the sum is 0.
  """
  trials = (
    data.episodes.groupby(["task_id", "policy"])
    .success.agg(list)
    .unstack()[[*BOUNDARY_KEYS]]
  )
  difficulty = trials.apply(lambda row: rewards.difficulty(*row, easy_rate), axis=1)
  cost_usd = data.per_task("cost_usd").loc[[*typical.values()]].set_axis([*typical])
  tasks = pd.DataFrame(1.0, ["task mix"], data.tasks)
  sums = pd.concat([tasks, cost_usd]).T.groupby(difficulty).sum().T
  sums = sums.reindex(columns=DIFFICULTIES, fill_value=0.0)
  shares = sums.div(sums.sum(axis=1).replace(0.0, np.nan), axis=0)
  return shares.add_suffix("_share").rename_axis("family").reset_index()


def latency(data: Evaluation, typical: Mapping[str, str]) -> pd.DataFrame:
  """Compute mean seconds per episode by family, by the paper's token rates.

  A router's decision is one token of its own, a judge's answers are at LARGE's rate,
  untaken proposals at SMALL's. `waited_s` is how long an episode really waited for its
  router or judge.
  """
  table = data.episodes.groupby(["policy", "task_id"]).mean(numeric_only=True)
  mean = table.groupby("policy").mean().loc[[*typical.values()]]
  mean.index = pd.Index(typical, name="family")
  s = pd.DataFrame({"small_s": (mean.small_tokens + mean.proposal_tokens) / SMALL_RATE})
  s["large_s"] = mean.large_tokens / LARGE_RATE
  s["router_s"] = mean.decisions / ROUTER_RATE + mean.judge_tokens / LARGE_RATE
  s["router_share"] = s.router_s / s.sum(axis=1)
  s["waited_s"] = mean.router_latency_s.where(mean.router_latency_s > 0)
  return s


def read_forecast(directory: Path, data: Evaluation, choice: Choice) -> Forecast | None:
  """Read what stage forecast has left in a run's directory, if anything.

  Raises:
    ValueError: it cannot be read.
  """
  path = directory / FORECAST
  if not path.exists():
    return None
  try:
    score_NxK = pd.read_csv(path, index_col=0, dtype=str).astype(float).loc[data.tasks]
  except (ValueError, KeyError):
    raise ValueError(f"{path} cannot be read: run --stage=forecast again") from None
  return compare_forecast(data, score_NxK, choice)


def compare_forecast(
  data: Evaluation, score_NxK: pd.DataFrame, choice: Choice
) -> Forecast:
  """Compare the scores that the main family expects with those that it had.

  The rows have each budget's mean, and the measured mean if the router has been
  evaluated under this cap. The calibration counts each task under each cap once, in
  bins of equal width.
  """
  budgets = score_NxK.columns
  draws = frontier.draw(len(score_NxK), 1, data.resamples)
  mean_KxB = frontier.means(
    score_NxK.to_numpy().T[..., None], np.zeros(len(budgets)), draws
  )
  rows = intervals("forecast_share", pd.DataFrame(mean_KxB)).assign(budget=budgets)
  own = data.entries.loc[choice.best]
  own = own[own.family == choice.main]
  measured_NxK = data.per_task("score_percent").loc[own.index].T / 100
  measured_NxK.columns = [budget_name(*budget) for budget in own[[*BUDGETS]].to_numpy()]
  rows["measured_share"] = rows.budget.map(measured_NxK.mean())
  shared = budgets.intersection(measured_NxK.columns)
  pairs = pd.DataFrame({"predicted_share": score_NxK[shared].to_numpy().ravel()})
  pairs["observed_share"] = measured_NxK[shared].to_numpy().ravel()
  bins = pairs.groupby((pairs.predicted_share * BINS).clip(upper=BINS - 1).astype(int))
  bins = bins.mean().assign(count=bins.size()).reset_index(drop=True)
  brier = ((pairs.predicted_share - pairs.observed_share) ** 2).mean()
  return Forecast(rows, bins, brier)


def budget_name(calls: float | None, usd: float | None) -> str:
  """Name a cap on calls or on dollars."""
  if pd.notna(calls):
    return f"K = {calls:g}"
  return "no cap" if usd is None else f"${usd:g}"


def beside_paper(
  run: Facts, table: pd.DataFrame, hard_budget: pd.DataFrame
) -> pd.DataFrame:
  """List the paper's SR, and Use% under a K, beside ours, as texts.

  The rows are of the policies that this run has too, in the paper's environments.
  """
  ours = {}
  for family in BOUNDARY_KEYS:
    ours["", family] = f"{table[run.sr][family]:.1f}"
  for row in hard_budget.to_dict("records"):
    ours[str(row["K"]), row["family"]] = (
      f"{row[run.sr]:.1f} ({100 * row['use_share']:.0f} %)"
    )
  rows = []
  published = json.loads(PAPER.read_text(encoding="utf-8"))
  for K, group in published.get(run.environment, {}).items():
    for family, paper in group.items():
      if (K, family) in ours:
        rows.append((family, K, paper, ours[K, family]))
  return pd.DataFrame(rows, columns=["family", "K", "paper", "ours"])


def exact_frontier(config: Config) -> ExactFrontier | None:
  """Compute the sandbox's optimal frontier over all tasks.

  Returns:
    None in another environment, for other models, prices or skills, and if LARGE gains
    nothing.
  """
  if not has_optimum(config):
    return None
  exact = Exact(max_steps=config.env.max_steps, names=config.models.names)
  hull = exact.hull()
  small = exact.solve(p=0.0)[0]
  large = exact.solve(p=1.0)[0]
  if large.success <= small.success:
    return None
  return ExactFrontier(hull, frontier.area(*zip(*hull), small, large))
