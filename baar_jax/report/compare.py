"""What dev chooses, who then beats whom on test, and where the money and the time go.

Axes: B resamples of the tasks and training seeds (the first is all), P policies.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from baar_jax.config import ABLATIONS, Config, compared_lam
from baar_jax.report import frontier
from baar_jax.report.frontier import interval
from baar_jax.report.table import DIFFICULTIES, METRICS, PRIVILEGED, Evaluation, load
from baar_jax.rollout.policies import ALWAYS_SMALL, BOUNDARIES, CONDITIONED, FIRST_LARGE, Entry
from baar_jax.store import Store
from baar_jax.train import rewards

COMPARED = "compared"  # BoPO's points at the weight of cost that the ablations are trained with
NO_VALUE = np.full(1, np.nan)
# Generated tokens per second (paper, "Latency Analysis"): SMALL and LARGE after OpenAI's targets,
# the router after a benchmark of Qwen2.5-1.5B. Reading the prompt and the network do not count.
SMALL_RATE, LARGE_RATE, ROUTER_RATE = 90.0, 80.0, 180.0


class Choice(NamedTuple):
  dev: pd.DataFrame  # of every entry, by policy: cost_usd and METRICS on dev
  policies: list[str]  # all that is chosen, in the entries' order
  # By family (or COMPARED) and metric: the policies on the upper hull of its points and the
  # boundaries, by ascending cost. First-Large has the points under its budgets, others those
  # without one.
  vertices: dict[tuple[str, str], list[str]]
  headline: str | None  # the main family's point that lies highest above the boundaries' line
  typical: dict[str, str]  # per family without a budget the policy nearest in cost to the headline


def main_family(families: Iterable[str]) -> str:
  """Which family the report is about: the router that knows its budget, without one BoPO."""
  return CONDITIONED if CONDITIONED in set(families) else "bopo"


def choose(store: Store, entries: Sequence[Entry], config: Config) -> Choice:
  """Chooses by the entries' episodes on dev; ValueError where some have not been run.

  Chosen are the boundaries, per family the points on a hull (by any of METRICS) and the best by SR
  under each budget; of equal ones the first. Test has no say, so that its figures are unbiased.
  """
  data = load(store, entries, config, "dev")
  mean = pd.DataFrame({name: data.per_task(name).mean(axis=1) for name in ("cost_usd", *METRICS)})
  mean = mean.round(12)  # equal sums of floats may differ in the last bits
  is_capped = data.entries.call_budget.notna() | data.entries.usd_budget.notna()
  uncapped, capped = data.entries[~is_capped], data.entries[is_capped]
  first_large = capped[capped.call_budget.notna() & capped.family.eq(FIRST_LARGE)]
  groups = pd.concat([first_large, uncapped]).groupby("family", sort=False)
  points = {family: group.index for family, group in groups}
  if config.baselines.ablations:
    points[COMPARED] = points["bopo"][uncapped.lam[points["bopo"]] == compared_lam(config)]
  vertices = {
    (family, metric): _on_hull(mean, names, metric)
    for family, names in points.items()
    for metric in METRICS
  }
  headline = _highest(mean, points.get(main_family(points), []))
  typical = {}
  for family in uncapped.family[~uncapped.family.isin(ABLATIONS)].unique():
    names = vertices[family, data.sr] or points[family]
    distances = (mean.cost_usd[names] - mean.cost_usd[headline or names[0]]).abs()
    typical[family] = distances.idxmin()  # without a headline the first
  budget = ["family", "call_budget", "usd_budget"]
  best = capped.assign(sr=mean[data.sr]).groupby(budget, dropna=False).sr.idxmax()
  chosen = {headline, *typical.values(), *best}.union(*vertices.values())
  policies = [name for name in data.entries.index if name in chosen]
  return Choice(mean, policies, vertices, headline, typical)


def _on_hull(mean: pd.DataFrame, names: Sequence[str], metric: str) -> list[str]:
  """None where LARGE is not both dearer and better."""
  points, ends = mean.loc[names], mean.loc[[*BOUNDARIES], ["cost_usd", metric]].to_numpy()
  if (ends[0] >= ends[1]).any():
    return []
  return list(points.index[frontier.vertices(points.cost_usd, points[metric], *ends)])


def _highest(mean: pd.DataFrame, names: Sequence[str]) -> str | None:
  """The point with the largest share of the gap in success minus that of the gap in cost."""
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


def policies(data: Evaluation) -> pd.DataFrame:
  """The results of every policy, by its name: means per task, some with intervals, its shares of
  the gaps between the boundaries and of its cap, and overruns (episodes over the cap)."""
  table = data.entries.drop(columns=["threshold", "share", "trained"])
  table["episodes"] = data.episodes.policy.value_counts()
  for column in ("deciding_usd", "steps", "large_calls", "spent_usd"):
    table[column] = data.per_task(column).mean(axis=1)
  for column, mean_PxB in data.resampled.items():
    rows = [interval(column, mean_B) for mean_B in mean_PxB.to_numpy()]
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


def headline(data: Evaluation, choice: Choice, table: pd.DataFrame) -> dict | None:
  """The point that dev has chosen, with intervals of its shares of the gaps on these tasks; None
  without one or without a gap."""
  policy = choice.headline
  if policy is None or table.loc[policy, ["cost_gap_share", "success_gap_share"]].isna().any():
    return None
  result = {"policy": policy, "parameters": table.parameters[policy]}
  for name, column in (("cost", "cost_usd"), ("success", "success_percent")):
    low_B, high_B, value_B = data.resampled[column].loc[[*BOUNDARIES, policy]].to_numpy()
    gap_B = np.where(high_B > low_B, high_B - low_B, np.nan)
    result |= interval(f"{name}_gap_share", (value_B - low_B) / gap_B)
  return result


def frontiers(data: Evaluation, choice: Choice) -> pd.DataFrame:
  """A row per family and metric: its area along the points that dev has chosen, and the area of the
  main family minus its own. All are comparable, however many candidates there were."""
  families = dict.fromkeys(family for family, _ in choice.vertices)
  shown = [f for f in families if f not in (*BOUNDARIES, *ABLATIONS, COMPARED)]
  main = main_family(families)
  return _areas(data, choice, sorted(shown, key=lambda family: family != main), main)


def ablations(data: Evaluation, choice: Choice) -> pd.DataFrame:
  """Rows as of `frontiers`: BoPO at the ablations' weight of cost (as "bopo"), SFT alone and each
  ablation; gains are of that BoPO. Empty without ablations."""
  families = dict.fromkeys(f for f, _ in choice.vertices if f in (COMPARED, "sft", *ABLATIONS))
  rows = _areas(data, choice, families if COMPARED in families else [], COMPARED)
  return rows.replace({"family": {COMPARED: "bopo"}})


def _areas(data: Evaluation, choice: Choice, families: Iterable[str], main: str) -> pd.DataFrame:
  rows = []
  for family in families:
    for metric in METRICS:
      points = choice.vertices[family, metric]
      area_B, gain_B = resample_area(data, points, metric), NO_VALUE
      if family != main and (main, metric) in choice.vertices:
        gain_B = resample_area(data, choice.vertices[main, metric], metric) - area_B
      row = {"family": family, "metric": metric, "policies": points}
      rows.append(row | interval("area", area_B) | interval("area_gain", gain_B))
  return pd.DataFrame(rows)


def hard_budgets(data: Evaluation, table: pd.DataFrame) -> pd.DataFrame:
  """A row per K and family: that of `policies` with the parameters that dev has chosen, and by SR
  its `lead` over the best other on these tasks (so it is rather too low), what it is over
  First-Large, and the `gain` of the main family over it. Privileged policies do not compete;
  always-SMALL does, as it keeps every budget."""
  rows, main = [], main_family(table.family)
  for K in sorted(table.call_budget.dropna().unique()):
    group = table[table.call_budget.eq(K) | (table.index == ALWAYS_SMALL)]
    group = group.sort_values("family", key=lambda names: names != main, kind="stable")
    sr_B = dict(zip(group.family, data.resampled[data.sr].loc[group.index].to_numpy()))
    competing = [family for family in sr_B if family not in PRIVILEGED]
    competing.sort(key=lambda family: -sr_B[family][0])
    for policy, row in group.iterrows():
      best = next((other for other in competing if other != row.family), None)
      pairs = {"lead": (row.family, best if row.family in competing else None)}
      pairs |= {"over_first": (row.family, FIRST_LARGE), "gain": (main, row.family)}
      used = row.large_calls / K if K else np.nan
      row = row.to_dict() | {"K": int(K), "policy": policy, "use_share": used}
      for name, (above, below) in pairs.items():
        known = above != below and above in sr_B and below in sr_B
        row |= interval(name, sr_B[above] - sr_B[below] if known else NO_VALUE)
      rows.append(row)
  return pd.DataFrame(rows)


def difficulties(data: Evaluation, easy_rate: float) -> pd.Series:
  """Each test task's difficulty, by the evaluation's own episodes of the boundaries."""
  trials = data.episodes.groupby(["task_id", "policy"]).success.agg(list).unstack()[[*BOUNDARIES]]
  return trials.loc[data.tasks].apply(lambda row: rewards.difficulty(*row, easy_rate), axis=1)


def by_difficulty(data: Evaluation, typical: Mapping, difficulty: pd.Series) -> pd.DataFrame:
  """Each family's shares of dollars and of LARGE calls by difficulty, and those of the tasks as
  the family "task mix"; NaN where the sum is 0."""
  tables, task_mix = [], pd.DataFrame(1.0, ["task mix"], data.tasks)
  for column in ("cost_usd", "large_calls"):
    value = data.per_task(column).loc[[*typical.values()]].set_axis([*typical])
    value = pd.concat([task_mix, value])
    sums = value.T.groupby(difficulty).sum().T.reindex(columns=DIFFICULTIES, fill_value=0.0)
    shares = sums.div(sums.sum(axis=1).replace(0.0, np.nan), axis=0)
    tables.append(shares.rename_axis("family").reset_index().assign(column=column))
  return pd.concat(tables, ignore_index=True)


def latency(data: Evaluation, typical: Mapping[str, str]) -> pd.DataFrame:
  """Mean seconds per episode, by family, by the paper's token rates and as measured.

  A router's decision is one token of its own, a judge's answers are at LARGE's rate, untaken
  proposals at SMALL's. Measured are waited_s, for the router or judge, and decision_s of each time.
  """
  table = data.episodes.groupby(["policy", "task_id"]).mean(numeric_only=True)
  mean = table.groupby("policy").mean().loc[[*typical.values()]]
  mean.index = pd.Index(typical, name="family")
  s = pd.DataFrame({"small_s": (mean.small_tokens + mean.proposal_tokens) / SMALL_RATE})
  s["large_s"] = mean.large_tokens / LARGE_RATE
  s["router_s"] = mean.decisions / ROUTER_RATE + mean.judge_tokens / LARGE_RATE
  s["total_s"] = s.sum(axis=1)
  s["router_share"] = s.router_s / s.total_s
  decisions = mean.decisions + mean.judgements
  s["waited_s"] = mean.router_latency_s.where((mean.router_latency_s > 0) & (decisions > 0))
  s["decision_s"] = s.waited_s / decisions
  return s
