"""Where dollars and seconds go, the ledger, training curves, and the paper's figures."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from baar_jax.config import ABLATIONS
from baar_jax.episode import SMALL
from baar_jax.llms.calls import Spent
from baar_jax.report.table import Evaluation
from baar_jax.rollout.entries import ALWAYS_LARGE, ALWAYS_SMALL
from baar_jax.train import rewards

DIFFICULTIES = ["easy", "hard", "intractable"]
# Generated tokens per second (paper, "Latency Analysis"): SMALL and LARGE after OpenAI's targets,
# the router after a benchmark of Qwen2.5-1.5B. Reading the prompt and the network do not count.
SMALL_RATE, LARGE_RATE, ROUTER_RATE = 90.0, 80.0, 180.0
CURVES = ["loss", "accuracy", "reward", "success", "kl", "entropy", "large_share", "clipped"]
CURVE_STAGES = ("sft", "bopo", "vanilla", "cascade", "single-turn")
PARTS = ("small_usd", "large_usd", "proposals_usd", "judge_usd", "retries_usd", "router_usd")
SHARES = {  # family: title in paper.json
  "bopo": "BoPO's share of dollars",
  "vanilla": "Vanilla RL's share of dollars",
  "task mix": "Share of the tasks",
}


def difficulties(e: Evaluation, easy_rate: float) -> pd.Series:
  """Each test task's difficulty, by the evaluation's own episodes of the boundaries."""
  trials = e.episodes.groupby(["policy", "task_id"]).success.agg(list)
  both = (trials[ALWAYS_SMALL], trials[ALWAYS_LARGE])
  return pd.Series({t: rewards.difficulty(*(s[t] for s in both), easy_rate) for t in e.tasks})


def representatives(e: Evaluation, table: pd.DataFrame, best: Mapping | None) -> pd.Series:
  """A policy per family without a budget: the one nearest in cost to the headline's."""
  lines = e.soft()
  cost_usd = table.cost_usd[lines.index]
  target_usd = (
    table.cost_usd[best["policy"]] if best else cost_usd.groupby(lines.family).transform("first")
  )
  distance = (cost_usd - target_usd).abs()
  chosen = distance.groupby(lines.family, sort=False).idxmin()
  return chosen.drop(ABLATIONS.keys(), errors="ignore")


def by_difficulty(e: Evaluation, chosen: pd.Series, difficulty: pd.Series) -> pd.DataFrame:
  """Shares of the tasks, of dollars and of LARGE calls by difficulty; NaN where the sum is 0.

  Columns: family ("task mix" for the tasks), column ("cost_usd" or "large_calls"), DIFFICULTIES.
  """
  tables = []
  for column in ("cost_usd", "large_calls"):
    value = e.per_task(column).loc[chosen].set_axis(chosen.index)
    value = pd.concat([pd.DataFrame(1.0, ["task mix"], e.tasks), value])
    sums = value.T.groupby(difficulty).sum().T.reindex(columns=DIFFICULTIES, fill_value=0.0)
    shares = sums.div(sums.sum(axis=1).replace(0.0, np.nan), axis=0)
    tables.append(shares.rename_axis("family").reset_index().assign(column=column))
  return pd.concat(tables, ignore_index=True)


def latency(e: Evaluation, chosen: pd.Series, scripted: bool) -> pd.DataFrame:
  """Mean seconds per episode, by family, by the paper's token rates and as measured.

  A router's decision is one token of its own. A judge's answers are at LARGE's rate, a cascade's
  proposals that were not taken at SMALL's. Measured are waited_s for the router or judge,
  decision_s of one decision, models_s (NaN for scripts, and where replies were replayed), and
  waited_share (of the models' measured seconds, else of those by the rates).
  """
  columns = ["small_tokens", "large_tokens", "proposal_tokens", "judge_tokens", "decisions"]
  columns += ["judgements", "router_latency_s", "latency_s", "replayed"]
  mean = pd.DataFrame({c: e.per_task(c).loc[chosen].mean(axis=1) for c in columns})
  mean = mean.set_axis(chosen.index)
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


def run_ledger(table: pd.DataFrame, spent: Spent | None, models: int) -> dict[str, float]:
  """Dollars of a run by part, and their sum.

  Of two models or more, all but SMALL are "large". Proposals are those of a cascade's SMALL that
  were not taken; the judge is the model that a zero-shot router asks.

  Args:
    table: `Store.table` of all episodes. Those that equal another policy's do not count, as nothing
      was run for them.
    spent: on API models, the recorded calls, which also know of calls whose episode was lost and
      count a replayed reply once. None is for scripted models, whose calls are the episodes'.
    models: how many there are to route between; among the recorded calls the judge follows them.

  Returns:
    PARTS, total_usd, presumed_usd (what may have been billed beyond it, at most) and replayed_usd
    (what replayed acts and proposals would have cost again; a judge's replies are not in it).
  """
  columns = [*PARTS, "presumed_usd", "proposed_usd", "replayed_usd"]
  usd = table.loc[~table.reused, columns].sum()
  ledger, presumed_usd = usd[list(PARTS)].to_dict(), usd.presumed_usd
  if spent is not None:
    ledger["proposals_usd"] = usd.proposed_usd
    ledger["judge_usd"] = sum(spent.replies_usd[models:])
    ledger["small_usd"] = spent.replies_usd[SMALL] - usd.proposed_usd
    ledger["large_usd"] = sum(spent.replies_usd[1:models])
    ledger["retries_usd"], presumed_usd = spent.retries_usd, spent.presumed_usd
  totals = {"total_usd": sum(ledger.values()), "presumed_usd": presumed_usd}
  return ledger | totals | {"replayed_usd": usd.replayed_usd}


def training(metrics: Sequence[Mapping], families: Collection[str]) -> pd.DataFrame:
  """The curves of what is evaluated: lines of metrics.jsonl, the newest of each update.

  A resumed run repeats updates. Lines that state another number of updates than the newest line of
  the same router are of an earlier training.
  """
  router, numbers = ["stage", "ablation", "lam"], ["lam", "update", "updates", *CURVES]
  lines = pd.DataFrame(metrics, dtype=object).reindex(columns=[*router[:2], *numbers])
  lines = lines.astype({"ablation": object, **dict.fromkeys(numbers, float)})
  evaluated = lines.ablation.fillna(lines.stage).isin({"sft", "bopo", *families})
  lines = lines[lines.stage.isin(CURVE_STAGES) & lines["update"].notna() & evaluated]
  lines = lines.fillna({"ablation": "", "updates": 0})
  newest = lines.groupby(router, dropna=False).updates.transform("last")
  return lines[lines.updates == newest].drop_duplicates([*router, "update"], keep="last")


def beside_paper(results: Mapping) -> pd.DataFrame:
  """The paper's figures beside ours, where this run has any; empty for other environments.

  Columns: figure, what, paper and ours (texts; None where this run has no such figure).
  """
  published = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
  run, table = results["run"], results["policies"]
  rows = published.get(run["environment"], [])
  rows += published["three benchmarks together"] if rows else []
  families = (ALWAYS_SMALL, ALWAYS_LARGE)
  ours = {("Boundaries, SR", family): f"{table[run['sr']][family]:.1f}" for family in families}
  for row in results["hard_budget"].to_dict("records"):
    text = f"{row[run['sr']]:.1f} ({100 * row['use_share']:.0f} %)"
    ours[f"SR (Use%) at K = {row['K']}", row["family"]] = text
  shares = results["by_difficulty"]
  for row in shares[shares.column == "cost_usd"].to_dict("records"):
    for difficulty in DIFFICULTIES:
      ours[SHARES.get(row["family"]), difficulty] = f"{100 * row[difficulty]:.1f} %"
  for family, share in results["latency"].router_share.items():
    ours["Router's share of seconds, by the rates", family] = f"{100 * share:.1f} %"
  for row in results["robustness"]:
    figure = f"Labels of {row['trials']} trials against {run['profile_trials']}"
    if row["tasks"]:
      ours[figure, "agreement"] = f"{100 * row['agreement']:.1f} %"
    if row["hard_jaccard"] is not None:
      ours[figure, "Jaccard, hard"] = f"{row['hard_jaccard']:.2f}"
  frame = pd.DataFrame(rows, columns=["figure", "what", "paper"])
  frame["ours"] = [ours.get((figure, what)) for figure, what, _ in rows]
  return frame[frame.ours.notna().groupby(frame.figure).transform("any")]
