"""What dev chooses, who then beats whom on test, and where the money and the time go.

Axes: B resamples of tasks and training seeds (the first is all), P policies, N tasks, K budgets.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from baar_jax.config import ABLATIONS, Config, compared_lam
from baar_jax.report import frontier
from baar_jax.report.frontier import interval
from baar_jax.report.table import COMPARED, DIFFICULTIES, METRICS, Evaluation, load_split
from baar_jax.rollout.policies import BOUNDARIES, CONDITIONED, Entry
from baar_jax.store import BUDGETS, Store
from baar_jax.train import rewards

FORECAST = "forecast.csv"  # what stage forecast leaves in a run's directory
NO_VALUE = np.full(1, np.nan)
# Generated tokens per second (paper, "Latency Analysis"): SMALL and LARGE after OpenAI's targets,
# the router after a benchmark of Qwen2.5-1.5B. Reading the prompt and the network do not count.
SMALL_RATE, LARGE_RATE, ROUTER_RATE = 90.0, 80.0, 180.0
BINS = 10  # of a calibration


class Choice(NamedTuple):
  dev: pd.DataFrame  # of every entry, by policy: cost_usd and METRICS on dev
  entries: list[Entry]  # all that are chosen, in their order
  main: str  # the family that the report is about: the router that knows its budget, else BoPO
  best: list[str]  # of each family under each budget the policy with the highest SR
  # By family (or COMPARED) and metric: the policies on the upper hull of its points, without a cap
  # or with one on calls, and the boundaries.
  vertices: dict[tuple[str, str], list[str]]
  headline: str | None  # the main family's point that lies highest above the boundaries' line
  typical: dict[str, str]  # per family the point, perhaps capped, nearest in cost to the headline


def choose_on_dev(store: Store, entries: Sequence[Entry], config: Config) -> Choice:
  """What the entries' episodes on dev choose; ValueError where some have not been run.

  Chosen are the boundaries, per family the points on a hull (by any of METRICS) and the best by SR
  under each budget; of equal ones the first. Test has no say, so that its figures are unbiased.
  """
  data = load_split(store, entries, config, "dev")
  mean = pd.DataFrame({name: data.per_task(name).mean(axis=1) for name in ("cost_usd", *METRICS)})
  mean = mean.round(12)  # equal sums of floats may differ in the last bits
  is_capped = data.entries.call_budget.notna() | data.entries.usd_budget.notna()
  uncapped, capped = data.entries[~is_capped], data.entries[is_capped]
  points = dict(data.entries[data.entries.usd_budget.isna()].groupby("family").groups)
  if config.baselines.ablations:
    bopo = uncapped[uncapped.family == "bopo"]  # ablations are not run under a cap
    lam = bopo.parameters.map(lambda parameters: parameters["lam"])
    points[COMPARED] = bopo.index[lam == compared_lam(config)]
  vertices = {
    (family, metric): _on_hull(mean, names, metric)
    for family, names in points.items()
    for metric in METRICS
  }
  main = CONDITIONED if CONDITIONED in {*data.entries.family} else "bopo"
  headline = _highest(mean, points.get(main, []))
  typical = {}
  for family in uncapped.family[~uncapped.family.isin(ABLATIONS)].unique():
    names = vertices[family, data.sr] or points[family]
    distances = (mean.cost_usd[names] - mean.cost_usd[headline or names[0]]).abs()
    typical[family] = distances.idxmin()  # without a headline the first point
  best = capped.assign(sr=mean[data.sr]).groupby(["family", *BUDGETS], dropna=False).sr.idxmax()
  chosen = {headline, *typical.values(), *best}.union(*vertices.values())
  entries = [entry for entry in entries if entry.policy in chosen]
  return Choice(mean, entries, main, [*best], vertices, headline, typical)


def _on_hull(mean: pd.DataFrame, names: Sequence[str], metric: str) -> list[str]:
  """Those on the upper hull of these points; [] where LARGE is not both dearer and better."""
  points, ends = mean.loc[names], mean.loc[[*BOUNDARIES], ["cost_usd", metric]].to_numpy()
  if (ends[0] >= ends[1]).any():
    return []
  return list(points.index[frontier.vertices(points.cost_usd, points[metric], *ends)])


def _highest(mean: pd.DataFrame, names: Sequence[str]) -> str | None:
  """The largest share of the gap in success minus that of the gap in cost; None without a gap."""
  columns = ["success_percent", "cost_usd"]
  low, high = mean.loc[[*BOUNDARIES], columns].to_numpy()
  if not len(names) or (low >= high).any():
    return None
  shares = (mean.loc[names, columns] - low) / (high - low)
  return shares.success_percent.sub(shares.cost_usd).idxmax()


def resample_area(data: Evaluation, policies: Sequence[str], metric: str) -> np.ndarray:
  """area_B along some policies; NaN where LARGE is not both dearer and better."""
  columns = [data.resampled[column] for column in ("cost_usd", metric)]
  points = (means.loc[list(policies)].to_numpy() for means in columns)
  small, large = zip(*(means.loc[[*BOUNDARIES]].to_numpy() for means in columns))
  return frontier.area_along(*points, small, large)


def tabulate_policies(data: Evaluation) -> pd.DataFrame:
  """The results of every policy, by its name: means per task, some with intervals, its shares of
  the gaps between the boundaries and of its cap, and overruns (episodes over the cap)."""
  table = data.entries.drop(columns="trained")
  table["episodes"] = data.episodes.policy.value_counts()
  for column in ("deciding_usd", "steps", "large_calls", "spent_usd"):
    table[column] = data.per_task(column).mean(axis=1)
  resampled = dict(data.resampled)
  for gap, column in (("cost_gap_share", "cost_usd"), ("success_gap_share", "success_percent")):
    low_B, high_B = resampled[column].loc[[*BOUNDARIES]].to_numpy()
    resampled[gap] = (resampled[column] - low_B) / np.where(high_B > low_B, high_B - low_B, np.nan)
  for column, mean_PxB in resampled.items():
    rows = [interval(column, mean_B) for mean_B in mean_PxB.to_numpy()]
    table = table.join(pd.DataFrame(rows, table.index))
  used = table.large_calls.where(table.call_budget.notna(), table.spent_usd)
  cap = table.call_budget.fillna(table.usd_budget)
  table["use_share"] = (used / cap).where(cap > 0)
  # Floats may add up to slightly more than the exact sum of a budget in dollars.
  over = data.episodes.spent_usd > data.episodes.usd_budget + 1e-12
  over |= data.episodes.large_calls > data.episodes.call_budget
  table["overruns"] = over.groupby(data.episodes.policy).sum()
  return table


def areas(data: Evaluation, choice: Choice, main: str, others: Iterable[str]) -> pd.DataFrame:
  """A row per family and metric: its area along the points that dev has chosen, and the gain of
  `main` over it. All are comparable, however many candidates there were."""
  areas_B, rows = {}, []
  for family, metric in itertools.product(dict.fromkeys([main, *others]), METRICS):
    if (family, metric) in choice.vertices:
      points = choice.vertices[family, metric]
      area_B = areas_B[family, metric] = resample_area(data, points, metric)
      main_B = areas_B.get((main, metric), NO_VALUE) if family != main else NO_VALUE
      row = {"family": family, "metric": metric, "policies": points} | interval("area", area_B)
      rows.append(row | interval("area_gain", main_B - area_B))
  columns = ["family", "metric", "policies"]
  columns += [*interval("area", NO_VALUE), *interval("area_gain", NO_VALUE)]
  return pd.DataFrame(rows, columns=columns)  # also without any family


def hard_budgets(data: Evaluation, table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
  """A row per K and family, first the boundaries, which keep no cap, then the main family: that of
  `tabulate_policies` with the parameters that dev has chosen, and the gain in SR of the main
  family over it, on the same tasks."""
  rows, sr, main = [], data.resampled[data.sr], choice.main
  table = table[table.index.isin([*BOUNDARIES, *choice.best])]
  first = table.family.isin([*BOUNDARIES, main])
  table = pd.concat([table[first], table[~first]]).rename_axis("policy").reset_index()
  for K in sorted(table.call_budget.dropna().unique()):
    group = table[table.call_budget.eq(K) | table.policy.isin(BOUNDARIES)]
    main_B = sr.loc[group.policy[group.family == main]].mean()  # NaN without one
    for row in group.to_dict("records"):
      gain_B = (main_B - sr.loc[row["policy"]]).to_numpy() if row["family"] != main else NO_VALUE
      rows.append(row | {"K": int(K)} | interval("gain", gain_B))
  return pd.DataFrame(rows)


def by_difficulty(data: Evaluation, typical: Mapping, easy_rate: float) -> pd.DataFrame:
  """Each family's shares of its dollars by the test tasks' difficulty, which the boundaries' own
  episodes tell, and those of the tasks as the family "task mix"; NaN where the sum is 0."""
  trials = data.episodes.groupby(["task_id", "policy"]).success.agg(list).unstack()[[*BOUNDARIES]]
  difficulty = trials.apply(lambda row: rewards.difficulty(*row, easy_rate), axis=1)
  cost_usd = data.per_task("cost_usd").loc[[*typical.values()]].set_axis([*typical])
  value = pd.concat([pd.DataFrame(1.0, ["task mix"], data.tasks), cost_usd])
  sums = value.T.groupby(difficulty).sum().T.reindex(columns=DIFFICULTIES, fill_value=0.0)
  shares = sums.div(sums.sum(axis=1).replace(0.0, np.nan), axis=0)
  return shares.add_suffix("_share").rename_axis("family").reset_index()


def latency(data: Evaluation, typical: Mapping[str, str]) -> pd.DataFrame:
  """Mean seconds per episode, by family, by the paper's token rates; and waited_s, what an episode
  really waited for its router or judge.

  A router's decision is one token of its own, a judge's answers are at LARGE's rate, untaken
  proposals at SMALL's.
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


def forecasts(data: Evaluation, score_NxK: pd.DataFrame, best: Sequence[str]) -> dict:
  """Expected scores in [0, 1] by task and budget, beside what the router that knows its budget had.

  `rows` have each budget's mean, and what was measured where the router has been evaluated under
  this cap. Its calibration counts each task under each cap once: `bins` of equal width with their
  means and a count, and `brier`, the mean squared difference (Brier 1950).
  """
  draws = frontier.draw(len(score_NxK), 1, data.resamples)
  mean_KxB = frontier.means(score_NxK.to_numpy().T[..., None], np.zeros(score_NxK.shape[1]), draws)
  rows = pd.DataFrame([interval("forecast_share", mean_B) for mean_B in mean_KxB])
  rows.insert(0, "budget", score_NxK.columns)
  own = data.entries.loc[best].query("family == @CONDITIONED")
  measured_NxK = data.per_task("score_percent").loc[own.index].T / 100
  measured_NxK.columns = [budget_name(*budget) for budget in own[[*BUDGETS]].to_numpy()]
  rows["measured_share"] = rows.budget.map(measured_NxK.mean())
  shared = score_NxK.columns.intersection(measured_NxK.columns)
  frames = {"predicted_share": score_NxK[shared], "observed_share": measured_NxK[shared]}
  pairs = pd.DataFrame({name: frame.to_numpy().ravel() for name, frame in frames.items()})
  bins = pairs.groupby((pairs.predicted_share * BINS).clip(upper=BINS - 1).astype(int))
  bins = bins.mean().assign(count=bins.size()).reset_index(drop=True)
  brier = ((pairs.predicted_share - pairs.observed_share) ** 2).mean()
  return {"rows": rows, "bins": bins, "brier": brier}


def budget_name(calls: float | None, usd: float | None) -> str:
  if pd.notna(calls):
    return f"K = {calls:g}"
  return "no cap" if usd is None else f"${usd:g}"
