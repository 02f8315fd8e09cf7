"""The evaluation's samples -> its figures, as one dict that JSON can hold."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from baar_jax import frontier, rewards
from baar_jax.calls import Spent
from baar_jax.config import Config
from baar_jax.evaluate import Entry
from baar_jax.frontier import bootstrap_interval, pareto
from baar_jax.ledger import run_ledger
from baar_jax.llms.endpoints import endpoints
from baar_jax.llms.prices import prices_of
from baar_jax.samples import (
  LARGE_FAMILY,
  SMALL_FAMILY,
  Sample,
  area,
  area_gain,
  boundaries,
  gap_share,
  gap_share_interval,
  load_samples,
)
from baar_jax.store import Store
from baar_jax.taxonomy import Profile

METRICS = ("score", "success")
DIFFICULTIES = ("easy", "hard", "intractable")
COST_SHARE_LIMIT = 0.45  # of the boundaries' cost gap, for the headline


def summarize(
  store: Store,
  entries: Sequence[Entry],
  config: Config,
  profiles: Mapping[str, Profile],
  metrics: Iterable[Mapping],
  exact: Mapping | None = None,
  spent: Spent | None = None,
) -> dict:
  """The figures of the evaluation.

  Args:
    store: holds the test tasks and the entries' episodes.
    entries: of the evaluation, always-small and always-large among them.
    config: of the run.
    profiles: of the training tasks.
    metrics: lines of metrics.jsonl.
    exact: the sandbox's exact frontier: {"optimum": [[cost, success], ...], "small": [cost,
      success], "large": [...]}, dollars and probabilities.
    spent: on API models, by the books of their calls.

  Returns:
    Lists and dicts of plain values: run, policies, frontiers, headline, hard_budget, dollar_budget,
    spend, costs, training, ledger, and exact if given. Scores and successes are in percent, shares
    in [0, 1], intervals are [low, high] of 95 %; None is what cannot be computed.

  Raises:
    ValueError: an entry, or too much of one, has not been evaluated.
  """
  metrics = list(metrics)
  noted = [line for line in metrics if line.get("stage") == "environments"]
  samples, left_out = load_samples(store, entries, config.evaluate.seeds, config.evaluate.tasks)
  capped = [sample for sample in samples if sample.entry.usd_budget is not None]
  samples = [sample for sample in samples if sample.entry.usd_budget is None]
  resamples = config.evaluate.bootstrap
  policies = [policy_row(sample, samples, resamples) for sample in samples]
  best = headline(policies, samples, resamples)
  results = {
    "run": {
      "name": config.name,
      "environment": config.env.kind.rpartition(":")[2],  # the class of one of the user's own
      "environment_mb": max((line["mb_per_live_episode"] for line in noted), default=None),
      "own_tasks": any(line["own_tasks"] for line in noted),
      "models": {"kind": config.models.kind, "names": list(config.models.names)}
      | ({"hosts": _hosts(config)} if config.models.kind == "chat" else {}),
      "prices_usd_per_million": {
        name: dataclasses.asdict(price)
        for name, price in zip(
          config.models.names, prices_of(config.models.names, config.models.prices)
        )
      },
      "router": dataclasses.asdict(config.router),
      "train_tasks": len(profiles),
      "test_tasks": len(samples[0].trials),
      "seeds": config.evaluate.seeds,
      "profile_trials": config.profile.trials,
      "left_out_episodes": left_out,
      "sr_metric": "score" if config.env.kind == "scienceworld" else "success",
    },
    "policies": policies,
    "frontiers": frontiers(policies, samples, resamples),
    "headline": best,
    "hard_budget": hard_budget(policies),
    "dollar_budget": [dollar_budget_row(sample, resamples) for sample in capped],
    "spend": spend(policies, samples, best, config.profile.easy_rate),
    "costs": costs(profiles),
    "training": training(metrics),
    "ledger": run_ledger(store.all_episodes(), spent),
  }
  if exact is not None:
    best_area = frontier.area(*zip(*exact["optimum"]), exact["small"], exact["large"])
    results["exact"] = {**exact, "area": best_area}
  return results


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
    percent_N = 100 * sample.mean_N(metric)
    row[f"{metric}_percent"] = float(percent_N.mean())
    row[f"{metric}_interval"] = list(bootstrap_interval(percent_N, resamples))
    row[f"{metric}_gap_share"] = gap_share(sample, samples, metric)
  return row


def frontiers(policies: Sequence[dict], samples: Sequence[Sample], resamples: int) -> dict:
  """Per family: its policies (indices), its Pareto points, and its area under either metric.

  A family's soft points make its frontier; one that has none (First-Large) uses its budgets'.
  `bopo_gain` is BoPO's area minus the family's.
  """
  members: dict[str, list[int]] = {}
  for family in dict.fromkeys(p["family"] for p in policies):
    if family not in (SMALL_FAMILY, LARGE_FAMILY):
      own = [i for i, p in enumerate(policies) if p["family"] == family]
      members[family] = [i for i in own if policies[i]["call_budget"] is None] or own
  result = {}
  for family, indices in members.items():
    cost_P = [policies[i]["cost_usd"] for i in indices]
    result[family] = {"policies": indices, "pareto": {}, "area": {}, "bopo_gain": {}}
    for metric in METRICS:
      kept = pareto(cost_P, [policies[i][f"{metric}_percent"] for i in indices])
      result[family]["pareto"][metric] = [indices[p] for p in kept]
      result[family]["area"][metric] = area(samples, indices, metric, resamples)
      if "bopo" in members and family != "bopo":
        gain = area_gain(samples, members["bopo"], indices, metric, resamples)
        result[family]["bopo_gain"][metric] = gain
  return result


def headline(policies: Sequence[dict], samples: Sequence[Sample], resamples: int) -> dict | None:
  """BoPO's soft point of the largest success share within COST_SHARE_LIMIT; None if there is none.

  It is picked on the test tasks, as is any point of a frontier.
  """
  points = [
    (p["success_gap_share"], -p["cost_gap_share"], i)
    for i, p in enumerate(policies)
    if p["family"] == "bopo" and p["call_budget"] is None
    if p["success_gap_share"] is not None and p["cost_gap_share"] is not None
  ]
  within = [point for point in points if -point[1] <= COST_SHARE_LIMIT]
  if not within:
    return None
  index = max(within)[2]
  result = {
    "index": index,
    "policy": policies[index]["policy"],
    "parameters": policies[index]["parameters"],
    "cost_share_limit": COST_SHARE_LIMIT,
    "points": len(points),
  }
  for name, attribute in (("cost", "cost_usd"), *((metric, metric) for metric in METRICS)):
    interval = gap_share_interval(samples[index], samples, attribute, resamples)
    result[f"{name}_gap_share"] = policies[index][f"{name}_gap_share"]
    result[f"{name}_gap_interval"] = interval
  return result


def hard_budget(policies: Sequence[dict]) -> list[dict]:
  """Rows of the hard-budget table: per family and parameters, the figures under each K."""
  rows: dict[tuple, dict] = {}
  for index, p in enumerate(policies):
    if p["call_budget"] is not None:
      key = p["family"], *sorted(p["parameters"].items())
      row = {"family": p["family"], "parameters": p["parameters"], "budgets": {}}
      figures = ("score_percent", "success_percent", "use_share", "overruns")
      cell = {"index": index} | {name: p[name] for name in figures}
      rows.setdefault(key, row)["budgets"][str(p["call_budget"])] = cell
  return list(rows.values())


def dollar_budget_row(sample: Sample, resamples: int) -> dict:
  """One entry's figures under B_max; the overruns are episodes that were billed for more."""
  entry, usd = sample.entry, sample.entry.usd_budget
  trials = [trial for ts in sample.trials.values() for trial in ts]
  row = {
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
  }
  for metric in METRICS:
    percent_N = 100 * sample.mean_N(metric)
    row[f"{metric}_percent"] = float(percent_N.mean())
    row[f"{metric}_interval"] = list(bootstrap_interval(percent_N, resamples))
  return row


def _hosts(config: Config) -> list[dict]:
  """Where each model was asked: the host, and whether it is this machine or a private network."""
  return [{"name": e.host, "own": e.own} for e in endpoints(config.models)]


def spend(
  policies: Sequence[dict], samples: Sequence[Sample], best: dict | None, easy_rate: float
) -> dict:
  """Where the money goes: shares of dollars and of LARGE calls by the test tasks' difficulty.

  Difficulty is that of the evaluation's own boundary episodes. A family with several soft points
  is shown at the one whose cost is nearest to the headline's.
  """
  small, large = boundaries(samples)
  difficulty_N = [
    rewards.difficulty(*([t.success for t in s.trials[task]] for s in (small, large)), easy_rate)
    for task in small.trials
  ]
  rows = []
  for family in dict.fromkeys(p["family"] for p in policies):
    own = [i for i, p in enumerate(policies) if p["family"] == family and p["call_budget"] is None]
    if not own:
      continue
    target_usd = policies[best["index"] if best else own[0]]["cost_usd"]
    index = min(own, key=lambda i: abs(policies[i]["cost_usd"] - target_usd))
    rows.append(
      {
        "family": family,
        "parameters": policies[index]["parameters"],
        "index": index,
        "cost_share": _shares(samples[index].mean_N("cost_usd"), difficulty_N),
        "large_share": _shares(samples[index].mean_N("large_calls"), difficulty_N),
        "large_share_by_progress": samples[index].large_share_by_progress(),
      }
    )
  return {
    "difficulty": dict(zip(small.trials, difficulty_N)),
    "task_mix": _shares(np.ones(len(difficulty_N)), difficulty_N),
    "policies": rows,
  }


def costs(profiles: Mapping[str, Profile]) -> list[dict]:
  """Per training task: median dollars of either boundary; inverted is SMALL dearer than LARGE."""
  return [
    {
      "task_id": task_id,
      "difficulty": profile.difficulty,
      "small_usd": profile.cost_small,
      "large_usd": profile.cost_large,
      "inverted": profile.cost_small > profile.cost_large,
    }
    for task_id, profile in profiles.items()
  ]


def training(metrics: Iterable[Mapping]) -> list[dict]:
  """Curves by stage and lam. A resumed run repeats updates: the later line of one wins."""
  curves: dict[tuple, dict[int, Mapping]] = {}
  for line in metrics:
    if line.get("stage") in ("sft", "bopo"):
      curves.setdefault((line["stage"], line.get("lam")), {})[line["update"]] = line
  series = []
  for (stage, lam), by_update in curves.items():
    lines = [by_update[update] for update in sorted(by_update)]
    names = dict.fromkeys(name for line in lines for name in line)
    values = {
      name: [_number(line.get(name)) for line in lines]
      for name in names
      if name not in ("stage", "lam", "update")
    }
    updates = [line["update"] for line in lines]
    series.append({"stage": stage, "lam": lam, "update": updates, "values": values})
  return series


def _shares(value_N: np.ndarray, difficulty_N: Sequence[str]) -> dict[str, float] | None:
  """Each difficulty's part of a sum over tasks; None if the sum is 0."""
  total = float(np.sum(value_N))
  if total == 0.0:
    return None
  is_D_N = {d: np.array([difficulty == d for difficulty in difficulty_N]) for d in DIFFICULTIES}
  return {d: float(value_N[is_N].sum()) / total for d, is_N in is_D_N.items()}


def _number(value) -> float | None:
  """A curve's value; None where a line has none that JSON can hold."""
  return float(value) if isinstance(value, int | float) and np.isfinite(value) else None
