"""A policy's figures, and the one that the report opens with."""

from collections.abc import Sequence

from baar_jax.report.frontier import bootstrap_interval
from baar_jax.report.samples import METRICS, Sample, gap_share, gap_share_interval


def policy_row(sample: Sample, samples: Sequence[Sample], resamples: int) -> dict:
  """One entry's figures. Gap shares are relative to the boundaries on the same episodes."""
  entry, K = sample.entry, sample.entry.call_budget
  trials = [trial for ts in sample.trials.values() for trial in ts]
  row = {
    "family": entry.family,
    "parameters": dict(entry.parameters),
    "policy": entry.policy,
    "call_budget": K,
    "episodes": len(trials),
    "cost_usd": sample.mean("cost_usd"),
    "cost_interval_usd": list(bootstrap_interval(sample.mean_N("cost_usd"), resamples)),
    "cost_gap_share": gap_share(sample, samples, "cost_usd"),
    "router_cost_usd": sample.mean("router_cost_usd"),
    "steps": sample.mean("steps"),
    "large_calls": sample.mean("large_calls"),
    "use_share": sample.mean("large_calls") / K if K else None,
    "overruns": 0 if K is None else sum(trial.large_calls > K for trial in trials),
  }
  for metric in METRICS:
    row[f"{metric}_gap_share"] = gap_share(sample, samples, metric)
  return row | metric_figures(sample, resamples)


def dollar_budget_row(sample: Sample, resamples: int) -> dict:
  """One entry's figures under B_max; the overruns are episodes that were billed for more."""
  entry, usd = sample.entry, sample.entry.usd_budget
  trials = [trial for ts in sample.trials.values() for trial in ts]
  return {
    "family": entry.family,
    "parameters": dict(entry.parameters),
    "policy": entry.policy,
    "usd_budget": usd,
    "episodes": len(trials),
    "cost_usd": sample.mean("cost_usd"),
    "large_calls": sample.mean("large_calls"),
    "use_share": sample.mean("spent_usd") / usd if usd else None,
    # Floats may add up to a hair more than the budget's exact sum.
    "overruns": sum(trial.spent_usd > usd + 1e-12 for trial in trials),
    **metric_figures(sample, resamples),
  }


def metric_figures(sample: Sample, resamples: int) -> dict:
  """Either metric in percent, and its 95 % bootstrap interval over tasks."""
  row: dict = {}
  for metric in METRICS:
    percent_N = 100 * sample.mean_N(metric)
    row[f"{metric}_percent"] = float(percent_N.mean())
    row[f"{metric}_interval"] = list(bootstrap_interval(percent_N, resamples))
  return row


def headline(policies: Sequence[dict], samples: Sequence[Sample], resamples: int) -> dict | None:
  """BoPO's soft point that lies highest above the line between the boundaries; None without a gap.

  It is picked on the test tasks, as is any point of a frontier.
  """
  points = [
    (p["success_gap_share"] - p["cost_gap_share"], i)
    for i, p in enumerate(policies)
    if p["family"] == "bopo" and p["call_budget"] is None
    if p["success_gap_share"] is not None and p["cost_gap_share"] is not None
  ]
  if not points:
    return None
  index = max(points)[1]
  result = {
    "index": index,
    "policy": policies[index]["policy"],
    "parameters": policies[index]["parameters"],
    "points": len(points),
  }
  for name, attribute in (("cost", "cost_usd"), *((metric, metric) for metric in METRICS)):
    interval = gap_share_interval(samples[index], samples, attribute, resamples)
    result[f"{name}_gap_share"] = policies[index][f"{name}_gap_share"]
    result[f"{name}_gap_interval"] = interval
  return result
