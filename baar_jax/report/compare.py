"""Who beats whom: every policy's figures, areas, ablations, and the best under each budget."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from baar_jax.config import ABLATIONS
from baar_jax.report import frontier
from baar_jax.report.table import METRICS, Evaluation
from baar_jax.rollout.entries import ALWAYS_LARGE, ALWAYS_SMALL

PRIVILEGED = ("oracle", "optimum")  # they see what no router may
MIN_USABLE_SHARE = 0.5  # of resamples that have a value; below it there is no interval (our choice)
NO_VALUE = np.full(1, np.nan)


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


def resample(e: Evaluation, value_N) -> np.ndarray:
  """value_B: the mean over all tasks, and over the tasks of each resample."""
  return np.asarray(value_N)[e.picks_BxN].mean(axis=1)


def area(e: Evaluation, policies: Sequence[str], metric: str) -> np.ndarray:
  """area_B of some policies; NaN without any, or where LARGE is not both dearer and better."""
  if not len(policies):
    return NO_VALUE
  names, areas = [*policies, ALWAYS_SMALL, ALWAYS_LARGE], []
  cost_QxB, score_QxB = (
    e.per_task(column).loc[names].to_numpy()[:, e.picks_BxN].mean(axis=2)
    for column in ("cost_usd", metric)
  )
  for cost_Q, score_Q in zip(cost_QxB.T, score_QxB.T):
    small, large = zip(cost_Q[-2:], score_Q[-2:])
    usable = large[0] > small[0] and large[1] > small[1]
    areas.append(frontier.area(cost_Q[:-2], score_Q[:-2], small, large) if usable else np.nan)
  return np.array(areas)


def policies(e: Evaluation) -> pd.DataFrame:
  """The figures of every policy, by its name.

  Columns: those of the entries; episodes; means per task of cost_usd, deciding_usd, steps,
  large_calls and METRICS, some with intervals; cost_gap_share and success_gap_share; use_share (of
  the cap); overruns (episodes over their cap).
  """
  table = e.entries.copy()
  table["episodes"] = e.episodes.policy.value_counts()
  for column in ("deciding_usd", "steps", "large_calls", "spent_usd"):
    table[column] = e.per_task(column).mean(axis=1)
  for column in ("cost_usd", *METRICS):
    rows = [interval(column, resample(e, value_N)) for value_N in e.per_task(column).to_numpy()]
    table = table.join(pd.DataFrame(rows, table.index))
  for name, column in (("cost", "cost_usd"), ("success", "success_percent")):
    low, high = table[column][[ALWAYS_SMALL, ALWAYS_LARGE]]
    table[f"{name}_gap_share"] = (table[column] - low) / (high - low if high > low else np.nan)
  used = table.large_calls.where(table.call_budget.notna(), table.spent_usd)
  cap = table.call_budget.fillna(table.usd_budget)
  table["use_share"] = (used / cap).where(cap > 0)
  # Floats may add up to slightly more than the exact sum of a budget in dollars.
  caps = table.assign(usd_budget=table.usd_budget + 1e-12).loc[e.episodes.policy].reset_index()
  over = (e.episodes.large_calls > caps.call_budget) | (e.episodes.spent_usd > caps.usd_budget)
  table["overruns"] = over.groupby(e.episodes.policy).sum()
  return table


def headline(e: Evaluation, table: pd.DataFrame) -> dict | None:
  """BoPO's point without a budget that lies highest above the line between the boundaries.

  It is picked on the test tasks, as is any point of a frontier. None without BoPO or without a gap.
  """
  points = table.loc[e.soft("bopo").index]
  height = (points.success_gap_share - points.cost_gap_share).dropna()
  if height.empty:
    return None
  policy = height[::-1].idxmax()
  result = {"policy": policy, "parameters": table.parameters[policy], "points": len(height)}
  for name, column in (("cost", "cost_usd"), ("success", "success_percent")):
    per_task = e.per_task(column).loc[[ALWAYS_SMALL, ALWAYS_LARGE, policy]].to_numpy()
    low_B, high_B, value_B = (resample(e, value_N) for value_N in per_task)
    gap_B = np.where(high_B > low_B, high_B - low_B, np.nan)
    result |= interval(f"{name}_gap_share", (value_B - low_B) / gap_B)
  return result


def _against(e: Evaluation, names: Sequence[str], bopo: Sequence[str], **labels) -> list[dict]:
  """Rows of labels, metric, policies, compared_with (names of BoPO's points), area, bopo_area and
  bopo_gain, these with intervals."""
  rows = []
  for metric in METRICS:
    area_B, bopo_B = area(e, names, metric), area(e, bopo, metric)
    row = labels | {"metric": metric, "policies": list(names), "compared_with": list(bopo)}
    row |= interval("area", area_B) | interval("bopo_area", bopo_B)
    rows.append(row | interval("bopo_gain", bopo_B - area_B))
  return rows


def frontiers(e: Evaluation) -> pd.DataFrame:
  """A row per family and metric: its area, that of BoPO, and BoPO's minus its own.

  A family's points without a budget make its frontier; First-Large has those under its budgets.
  All of BoPO's points are held against a family with several weights of cost, those at
  `compared_lam` alone against any other, so that no trained family is beaten by more points. BoPO
  at each of several weights has rows too, with that `lam`.
  """
  bopo, rows = e.soft("bopo"), []
  lines = e.entries[e.entries.usd_budget.isna()]
  for family, group in lines.groupby("family", sort=False):
    if family not in (ALWAYS_SMALL, ALWAYS_LARGE, *ABLATIONS):
      points = e.soft(family) if len(e.soft(family)) else group
      rivals = bopo if points.lam.nunique() > 1 else bopo[bopo.lam == e.compared_lam]
      rivals = rivals[rivals.family != family]
      rows += _against(e, points.index, rivals.index, family=family, lam=np.nan)
  for lam, points in bopo.groupby("lam", sort=False) if bopo.lam.nunique() > 1 else ():
    rows += _against(e, points.index, [], family="bopo", lam=lam)
  return pd.DataFrame(rows)


def ablations(e: Evaluation) -> pd.DataFrame:
  """Each ablation, and SFT alone, against BoPO at the same weight and thresholds or shares.

  SFT alone, which has no weight of cost, is held against BoPO at the first ablation's. There are no
  rows where no ablation was evaluated.
  """
  lines, bopo, rows = e.soft("sft", *ABLATIONS), e.soft("bopo"), []
  if lines.lam.isna().all():
    return pd.DataFrame()
  lines = lines.fillna({"lam": lines.lam.dropna().iloc[0]})
  points = dict(zip(map(_setting, bopo.lam, bopo.parameters), bopo.index))
  for (family, lam), group in lines.groupby(["family", "lam"], sort=False):
    pairs = {name: points.get(_setting(lam, p)) for name, p in group.parameters.items()}
    pairs = {name: match for name, match in pairs.items() if match}
    rows += _against(e, list(pairs), list(pairs.values()), family=family, lam=lam)
  return pd.DataFrame(rows)


def _setting(lam: float, parameters: dict) -> tuple:
  """The weight of cost, and the share of LARGE calls or else the threshold."""
  return lam, parameters.get("share"), "share" in parameters or parameters.get("threshold")


def halves(tasks: int) -> np.ndarray:
  """half_N: 0 or 1 for each task, drawn: the tasks' order may go through their types in turn."""
  return np.random.default_rng(0).permutation(tasks) % 2


def pick_by_halves(value_CxN: np.ndarray) -> np.ndarray:
  """pick_N: for each half of the tasks the candidate that does best on the other (the first if
  equal), so that no task has a say in what is measured on it (two-fold cross-validation)."""
  half_N = halves(value_CxN.shape[1])
  sum_CxH = np.stack([value_CxN[:, half_N == half].sum(axis=1) for half in (0, 1)], axis=1)
  best_H = sum_CxH.round(9).argmax(axis=0)  # equal sums of floats may differ in the last bits
  return best_H[1 - half_N]


def hard_budgets(e: Evaluation, table: pd.DataFrame) -> pd.DataFrame:
  """A row per K and family: its figures, with parameters picked by `pick_by_halves`.

  Our choice: the paper shows each family's best rows. Privileged policies and ablations do not
  compete; always-SMALL does, as it keeps every budget. Intervals hold fixed what was picked.

  Columns: K, family, candidates (names), METRICS and gain (BoPO's SR minus this one's) with
  intervals, use_share, overruns (of all candidates), best, lead of the best over the next with its
  interval, and clear (whether that lies above 0).
  """
  lines, rows = e.entries[~e.entries.family.isin(ABLATIONS)], []
  per_task = {column: e.per_task(column) for column in (*METRICS, "large_calls")}
  for K in sorted(lines.call_budget.dropna().unique()):
    candidates = lines[(lines.call_budget == K) | (lines.index == ALWAYS_SMALL)]
    sr_B, budget_rows = {"bopo": NO_VALUE}, []
    for family, group in candidates.groupby("family", sort=False):
      values = {column: frame.loc[group.index].to_numpy() for column, frame in per_task.items()}
      pick_N = pick_by_halves(values[e.sr])
      picked = {column: v[pick_N, np.arange(len(pick_N))] for column, v in values.items()}
      sr_B[family] = resample(e, picked[e.sr])
      row = {"K": int(K), "family": family, "candidates": list(group.index)}
      for metric in METRICS:
        row |= interval(metric, resample(e, picked[metric]))
      row["use_share"] = picked["large_calls"].mean() / K if K else np.nan
      budget_rows.append(row | {"overruns": int(table.overruns[group.index].sum())})
    competing = [row["family"] for row in budget_rows if row["family"] not in PRIVILEGED]
    best, *others = sorted(competing, key=lambda family: -sr_B[family][0])
    for row in budget_rows:
      family = row["family"]
      row |= interval("gain", NO_VALUE if family == "bopo" else sr_B["bopo"] - sr_B[family])
      leads = family == best and others
      row |= interval("lead", sr_B[best] - sr_B[others[0]] if leads else NO_VALUE)
      rows.append(row | {"best": family == best, "clear": bool(row["lead_low"] > 0)})
  return pd.DataFrame(rows)
