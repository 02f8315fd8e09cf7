"""Who beats whom, and where it spends: policies, areas, ablations, budgets, difficulties.

Axes: B resamples of the tasks (the first is all), N tasks, P policies, C candidates, H halves.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from baar_jax.config import ABLATIONS
from baar_jax.report import frontier
from baar_jax.report.table import METRICS, Evaluation
from baar_jax.rollout.entries import ALWAYS_SMALL, BOUNDARIES
from baar_jax.train import rewards

PRIVILEGED = ("privileged", "optimum")  # they know what no router may
MIN_USABLE_SHARE = 0.5  # of resamples that have a value; below it there is no interval (our choice)
NO_VALUE = np.full(1, np.nan)
DIFFICULTIES = ["easy", "hard", "intractable"]
# Generated tokens per second (paper, "Latency Analysis"): SMALL and LARGE after OpenAI's targets,
# the router after a benchmark of Qwen2.5-1.5B. Reading the prompt and the network do not count.
SMALL_RATE, LARGE_RATE, ROUTER_RATE = 90.0, 80.0, 180.0


def interval(name: str, value_B: np.ndarray) -> dict[str, float]:
  """name, name_low and name_high: a value and its 95 % percentile bootstrap interval (Efron 1979).

  value_B[0] is the value over all tasks, the others are over resamples of them, NaN where there is
  none. Seeds are averaged within a task first: runs of one task are not independent of each other.
  """
  drawn = value_B[1:][np.isfinite(value_B[1:])]
  low = high = np.nan
  if np.isfinite(value_B[0]) and len(drawn) >= MIN_USABLE_SHARE * (len(value_B) - 1):
    low, high = np.percentile(drawn, [2.5, 97.5])
  return {name: float(value_B[0]), f"{name}_low": float(low), f"{name}_high": float(high)}


def resample(data: Evaluation, value_N) -> np.ndarray:
  """value_B: the mean over all tasks, and over the tasks of each resample."""
  return np.asarray(value_N)[..., data.picks_BxN].mean(axis=-1)


def resample_area(data: Evaluation, policies: Sequence[str], metric: str) -> np.ndarray:
  """area_B of some policies; NaN without any, or where LARGE is not both dearer and better."""
  if not len(policies):
    return NO_VALUE
  names, areas = [*policies, *BOUNDARIES], []
  cost_PxB = resample(data, data.per_task("cost_usd").loc[names])
  score_PxB = resample(data, data.per_task(metric).loc[names])
  for cost_P, score_P in zip(cost_PxB.T, score_PxB.T):
    small, large = zip(cost_P[-2:], score_P[-2:])
    usable = large[0] > small[0] and large[1] > small[1]
    areas.append(frontier.area(cost_P[:-2], score_P[:-2], small, large) if usable else np.nan)
  return np.array(areas)


def policies(data: Evaluation) -> pd.DataFrame:
  """The results of every policy, by its name: means per task, some with intervals, its shares of
  the gaps between the boundaries and of its cap, and overruns (episodes over the cap)."""
  table = data.entries.drop(columns=["threshold", "share"])
  table["episodes"] = data.episodes.policy.value_counts()
  for column in ("deciding_usd", "steps", "large_calls", "spent_usd"):
    table[column] = data.per_task(column).mean(axis=1)
  for column in ("cost_usd", *METRICS):
    rows = [interval(column, resample(data, row)) for row in data.per_task(column).to_numpy()]
    table = table.join(pd.DataFrame(rows, table.index))
  for name, column in (("cost", "cost_usd"), ("success", "success_percent")):
    low, high = table[column][[*BOUNDARIES]]
    table[f"{name}_gap_share"] = (table[column] - low) / (high - low if high > low else np.nan)
  used = table.large_calls.where(table.call_budget.notna(), table.spent_usd)
  cap = table.call_budget.fillna(table.usd_budget)
  table["use_share"] = (used / cap).where(cap > 0)
  # Floats may add up to slightly more than the exact sum of a budget in dollars.
  over = data.episodes.spent_usd > data.episodes.usd_budget + 1e-12
  over |= data.episodes.large_calls > data.episodes.call_budget
  table["overruns"] = over.groupby(data.episodes.policy).sum()
  return table


def headline(data: Evaluation, table: pd.DataFrame) -> dict | None:
  """BoPO's point without a budget that lies highest above the line between the boundaries.

  It is picked on the test tasks, as is any point of a frontier. None without BoPO or without a gap.
  """
  points = table.loc[data.uncapped("bopo").index]
  height = (points.success_gap_share - points.cost_gap_share).dropna()
  if height.empty:
    return None
  policy = height[::-1].idxmax()
  result = {"policy": policy, "parameters": table.parameters[policy], "points": len(height)}
  for name, column in (("cost", "cost_usd"), ("success", "success_percent")):
    low_B, high_B, value_B = resample(data, data.per_task(column).loc[[*BOUNDARIES, policy]])
    gap_B = np.where(high_B > low_B, high_B - low_B, np.nan)
    result |= interval(f"{name}_gap_share", (value_B - low_B) / gap_B)
  return result


def _compare(data: Evaluation, names: Sequence[str], bopo: Sequence[str], **labels) -> list[dict]:
  """A row per metric: the area of some policies, that of BoPO's points, and the difference."""
  rows = []
  for metric in METRICS:
    area_B, bopo_B = resample_area(data, names, metric), resample_area(data, bopo, metric)
    row = labels | {"metric": metric, "policies": list(names), "compared_with": list(bopo)}
    row |= interval("area", area_B) | interval("bopo_area", bopo_B)
    rows.append(row | interval("bopo_gain", bopo_B - area_B))
  return rows


def frontiers(data: Evaluation) -> pd.DataFrame:
  """A row per family and metric: its area, that of BoPO, and BoPO's minus its own.

  First-Large has the points under its budgets, all others those without one. So that no trained
  family is beaten by more points, a family with several weights of cost is held against all of
  BoPO's, any other against those at `compared_lam`. BoPO has rows at each of several `lam` too.
  """
  bopo, rows = data.uncapped("bopo"), []
  entries = data.entries[data.entries.usd_budget.isna()]
  for family, group in entries.groupby("family", sort=False):
    if family not in (*BOUNDARIES, *ABLATIONS):
      points = data.uncapped(family) if len(data.uncapped(family)) else group
      rivals = bopo if points.lam.nunique() > 1 else bopo[bopo.lam == data.compared_lam]
      rivals = rivals[rivals.family != family]
      rows += _compare(data, points.index, rivals.index, family=family, lam=np.nan)
  for lam, points in bopo.groupby("lam", sort=False) if bopo.lam.nunique() > 1 else ():
    rows += _compare(data, points.index, [], family="bopo", lam=lam)
  return pd.DataFrame(rows)


def ablations(data: Evaluation) -> pd.DataFrame:
  """Rows as of `frontiers`: each ablation, and SFT alone, against BoPO at the same weight of cost
  and the same thresholds or shares. SFT alone, which has no weight, takes the first ablation's."""
  entries, rows = data.uncapped("sft", *ABLATIONS), []
  entries = entries.assign(lam=entries.lam.bfill())
  setting = ["lam", "threshold", "share"]
  pairs = entries.reset_index().merge(data.uncapped("bopo").reset_index(), "left", setting)
  for (family, lam), group in pairs.groupby(["family_x", "lam"], sort=False):
    group = group.dropna(subset="policy_y")
    rows += _compare(data, group.policy_x, group.policy_y, family=family, lam=lam)
  return pd.DataFrame(rows)


def pick_by_halves(value_CxN: np.ndarray) -> np.ndarray:
  """pick_N: for each half of the tasks the candidate that does best on the other (the first if
  equal), so that no task has a say in what is measured on it (two-fold cross-validation)."""
  # The halves are drawn, because the tasks' order may go through their types in turn.
  half_N = np.random.default_rng(0).permutation(value_CxN.shape[1]) % 2
  sum_CxH = np.stack([value_CxN[:, half_N == half].sum(axis=1) for half in (0, 1)], axis=1)
  best_H = sum_CxH.round(9).argmax(axis=0)  # equal sums of floats may differ in the last bits
  return best_H[1 - half_N]


def hard_budgets(data: Evaluation, table: pd.DataFrame) -> pd.DataFrame:
  """A row per K and family: its results, with parameters picked by `pick_by_halves`.

  Our choice: the paper shows each family's best rows. Privileged policies and ablations do not
  compete; always-SMALL does, as it keeps every budget. Intervals hold fixed what was picked. `gain`
  is BoPO's SR minus this family's, `lead` the best SR minus the next one's, `clear` whether the
  interval of the lead lies above 0; `overruns` are those of all candidates.
  """
  entries, rows = data.entries[~data.entries.family.isin(ABLATIONS)], []
  per_task = {column: data.per_task(column) for column in (*METRICS, "large_calls")}
  for K in sorted(entries.call_budget.dropna().unique()):
    candidates = entries[(entries.call_budget == K) | (entries.index == ALWAYS_SMALL)]
    sr_B, budget_rows = {"bopo": NO_VALUE}, []
    for family, group in candidates.groupby("family", sort=False):
      values = {column: frame.loc[group.index].to_numpy() for column, frame in per_task.items()}
      pick_N = pick_by_halves(values[data.sr])
      picked = {column: v[pick_N, np.arange(len(pick_N))] for column, v in values.items()}
      sr_B[family] = resample(data, picked[data.sr])
      row = {"K": int(K), "family": family, "candidates": list(group.index)}
      for metric in METRICS:
        row |= interval(metric, resample(data, picked[metric]))
      row["use_share"] = picked["large_calls"].mean() / K if K else np.nan
      budget_rows.append(row | {"overruns": int(table.overruns[group.index].sum())})
    competing = [row["family"] for row in budget_rows if row["family"] not in PRIVILEGED]
    best, *others = sorted(competing, key=lambda family: -sr_B[family][0])
    for row in budget_rows:
      family, leads = row["family"], row["family"] == best
      gain_B = NO_VALUE if family == "bopo" else sr_B["bopo"] - sr_B[family]
      lead_B = sr_B[best] - sr_B[others[0]] if leads and others else NO_VALUE
      row |= interval("gain", gain_B) | interval("lead", lead_B)
      rows.append(row | {"best": leads, "clear": bool(row["lead_low"] > 0)})
  return pd.DataFrame(rows)


def difficulties(data: Evaluation, easy_rate: float) -> pd.Series:
  """Each test task's difficulty, by the evaluation's own episodes of the boundaries."""
  trials = data.episodes.groupby(["task_id", "policy"]).success.agg(list).unstack()[[*BOUNDARIES]]
  return trials.loc[data.tasks].apply(lambda row: rewards.difficulty(*row, easy_rate), axis=1)


def representatives(data: Evaluation, table: pd.DataFrame, best: Mapping | None) -> pd.Series:
  """A policy per family without a budget: the one nearest in cost to the headline's, else its
  first."""
  families = data.uncapped()[~data.uncapped().family.isin(ABLATIONS)].family
  cost_usd = table.cost_usd[families.index]
  first_usd = cost_usd.groupby(families).transform("first")
  distance = (cost_usd - (table.cost_usd[best["policy"]] if best else first_usd)).abs()
  return distance.groupby(families, sort=False).idxmin()


def by_difficulty(data: Evaluation, chosen: pd.Series, difficulty: pd.Series) -> pd.DataFrame:
  """Each family's shares of dollars and of LARGE calls by difficulty, and those of the tasks as
  the family "task mix"; NaN where the sum is 0."""
  tables, task_mix = [], pd.DataFrame(1.0, ["task mix"], data.tasks)
  for column in ("cost_usd", "large_calls"):
    value = pd.concat([task_mix, data.per_task(column).loc[chosen].set_axis(chosen.index)])
    sums = value.T.groupby(difficulty).sum().T.reindex(columns=DIFFICULTIES, fill_value=0.0)
    shares = sums.div(sums.sum(axis=1).replace(0.0, np.nan), axis=0)
    tables.append(shares.rename_axis("family").reset_index().assign(column=column))
  return pd.concat(tables, ignore_index=True)


def latency(data: Evaluation, chosen: pd.Series, scripted: bool) -> pd.DataFrame:
  """Mean seconds per episode, by family, by the paper's token rates and as measured.

  A router's decision is one token of its own, a judge's answers are at LARGE's rate, untaken
  proposals at SMALL's. Measured are waited_s for the router or judge, decision_s of one decision,
  models_s (NaN for scripts, and where replies were replayed), and waited_share (of the models'
  measured seconds, else of those by the rates).
  """
  table = data.episodes.groupby(["policy", "task_id"]).mean(numeric_only=True)
  mean = table.groupby("policy").mean().loc[chosen].set_axis(chosen.index)
  s = pd.DataFrame({"small_s": (mean.small_tokens + mean.proposal_tokens) / SMALL_RATE})
  s["large_s"] = mean.large_tokens / LARGE_RATE
  s["router_s"] = mean.decisions / ROUTER_RATE + mean.judge_tokens / LARGE_RATE
  s["total_s"] = s.sum(axis=1)
  s["router_share"] = s.router_s / s.total_s
  decisions = mean.decisions + mean.judgements
  s["waited_s"] = mean.router_latency_s.where((mean.router_latency_s > 0) & (decisions > 0))
  s["decision_s"] = s.waited_s / decisions
  s["models_s"] = mean.latency_s.where((mean.replayed == 0) & (not scripted))
  s["waited_share"] = s.waited_s / (s.waited_s + s.models_s.fillna(s.small_s + s.large_s))
  return s
