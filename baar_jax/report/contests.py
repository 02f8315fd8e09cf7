"""Who beats whom: areas of families, ablations, and the best under each budget."""

from collections.abc import Iterable, Sequence

from baar_jax.config import ABLATIONS
from baar_jax.report.frontier import pareto
from baar_jax.report.rows import metric_figures
from baar_jax.report.samples import (
  LARGE_FAMILY,
  METRICS,
  PRIVILEGED,
  SMALL_FAMILY,
  Sample,
  area,
  area_gain,
  gain,
  picked_elsewhere,
)


def frontiers(
  policies: Sequence[dict], samples: Sequence[Sample], lam: float, resamples: int
) -> dict:
  """Per family: its policies (indices), its Pareto points, and its area under either metric.

  A family's soft points make its frontier; one that has none (First-Large) uses its budgets'.
  `bopo_gain` is BoPO's area minus the family's, and `bopo_policies` are whose area that is: all of
  BoPO's points against a family with several weights of cost, else those at `lam` alone, so that
  no trained family is beaten by more points. Ablations have a table of their own.
  """
  members: dict[str, list[int]] = {}
  for family in dict.fromkeys(p["family"] for p in policies):
    if family not in (SMALL_FAMILY, LARGE_FAMILY, *ABLATIONS):
      own = [i for i, p in enumerate(policies) if p["family"] == family]
      members[family] = [i for i in own if policies[i]["call_budget"] is None] or own
  bopo = members.get("bopo", [])
  alone = [i for i in bopo if policies[i]["parameters"]["lam"] == lam]
  result = {}
  for family, indices in members.items():
    swept = len({policies[i]["parameters"].get("lam") for i in indices}) > 1
    against = bopo if swept else alone
    cost_P = [policies[i]["cost_usd"] for i in indices]
    result[family] = {"policies": indices, "pareto": {}, "area": {}, "bopo_gain": {}}
    result[family]["bopo_policies"] = against if family != "bopo" else []
    for metric in METRICS:
      kept = pareto(cost_P, [policies[i][f"{metric}_percent"] for i in indices])
      result[family]["pareto"][metric] = [indices[p] for p in kept]
      result[family]["area"][metric] = area(samples, indices, metric, resamples)
      if bopo and family != "bopo":
        more = area_gain(samples, against, indices, metric, resamples)
        result[family]["bopo_gain"][metric] = more
  return result


def bopo_alone(policies: Sequence[dict], samples: Sequence[Sample], resamples: int) -> list[dict]:
  """BoPO's area at each single lam, so with no more points than any other router has.

  Returns:
    Rows of lam, policies (indices) and area under either metric; none where there is one lam.
  """
  soft = [(i, p) for i, p in enumerate(policies) if p["call_budget"] is None]
  weights = dict.fromkeys(p["parameters"].get("lam") for _, p in soft if p["family"] == "bopo")
  rows = []
  for lam in weights if len(weights) > 1 else ():
    own = list(_points(soft, "bopo", lam).values())
    areas = {metric: area(samples, own, metric, resamples) for metric in METRICS}
    rows.append({"lam": lam, "policies": own, "area": areas})
  return rows


def ablations(policies: Sequence[dict], samples: Sequence[Sample], resamples: int) -> dict | None:
  """Each ablation against BoPO at as many points: the same lam, the same thresholds or shares.

  SFT alone, which has no lam, is one of them, beside BoPO at the first ablation's lam.

  Returns:
    None where no ablation was evaluated, else {"rows": [...]}, each row with family, lam, policies
    and bopo_policies (indices, point by point), and under either metric area, bopo_area and
    bopo_gain (BoPO's area minus the ablation's).
  """
  soft = [(i, p) for i, p in enumerate(policies) if p["call_budget"] is None]
  weights = [p["parameters"].get("lam") for _, p in soft if p["family"] in ABLATIONS]
  if not weights:
    return None
  kinds = dict.fromkeys((p["family"], p["parameters"].get("lam")) for _, p in soft)
  rows = []
  for family, lam in kinds:
    if family not in (*ABLATIONS, "sft"):
      continue
    against = weights[0] if lam is None else lam
    own, full = _points(soft, family, lam), _points(soft, "bopo", against)
    shared = [setting for setting in own if setting in full]
    row = {
      "family": family,
      "lam": against,
      "policies": [own[setting] for setting in shared],
      "bopo_policies": [full[setting] for setting in shared],
      "area": {},
      "bopo_area": {},
      "bopo_gain": {},
    }
    for metric in METRICS if shared else ():
      mine, bopo = row["policies"], row["bopo_policies"]
      row["area"][metric] = area(samples, mine, metric, resamples)
      row["bopo_area"][metric] = area(samples, bopo, metric, resamples)
      row["bopo_gain"][metric] = area_gain(samples, bopo, mine, metric, resamples)
    rows.append(row)
  return {"rows": rows}


def _points(soft: Sequence[tuple[int, dict]], family: str, lam: float | None) -> dict[tuple, int]:
  """A router's points by their settings."""
  kind = family, lam
  return {_setting(p): i for i, p in soft if (p["family"], p["parameters"].get("lam")) == kind}


def _setting(policy: dict) -> tuple:
  """What tells the points of one router apart: the share of LARGE that its threshold was set for,
  else the threshold itself."""
  parameters = policy["parameters"]
  if "share" in parameters:
    return "share", parameters["share"]
  return "threshold", parameters.get("threshold")


def hard_budget(policies: Sequence[dict]) -> list[dict]:
  """Rows of the hard-budget table: per family and parameters, the figures under each K."""
  rows: dict[tuple, dict] = {}
  for p in policies:
    if p["call_budget"] is not None and p["family"] not in ABLATIONS:
      key = p["family"], *sorted(p["parameters"].items())
      row = {"family": p["family"], "parameters": p["parameters"], "budgets": {}}
      figures = [f"{metric}_{of}" for metric in METRICS for of in ("percent", "interval")]
      cell = {name: p[name] for name in (*figures, "use_share", "overruns")}
      rows.setdefault(key, row)["budgets"][str(p["call_budget"])] = cell
  return list(rows.values())


def best_under_budgets(
  policies: Sequence[dict], samples: Sequence[Sample], metric: str, resamples: int
) -> dict[str, dict]:
  """Per K: each family by `picked_elsewhere`, the best of them, and its gain over the next.

  Our choice: the paper shows each family's best rows. Privileged policies and ablations do not
  compete; always-SMALL does, as it keeps every budget. The gain is clear where its paired 95 %
  interval lies above 0. Intervals hold fixed what was picked, and which is best and which next.

  Returns:
    By K as text: families, {family: {candidates (indices), score_percent, score_interval,
    success_percent, success_interval, use_share, overruns (of all candidates), and gain (BoPO's
    over it, None if there is none)}}; the names of the best family and of the runner_up (None if
    there is none); the gain of one over the other, and whether it is clear.
  """
  result = {}
  for K in sorted({p["call_budget"] for p in policies if p["call_budget"] is not None}):
    candidates: dict[str, list[int]] = {}
    for i, p in enumerate(policies):
      small = p["family"] == SMALL_FAMILY and p["call_budget"] is None
      if (p["call_budget"] == K or small) and p["family"] not in ABLATIONS:
        candidates.setdefault(p["family"], []).append(i)
    picked = {
      family: picked_elsewhere([samples[i] for i in own], metric)
      for family, own in candidates.items()
    }
    families = {}
    for family, sample in picked.items():
      rival = "bopo" in picked and family != "bopo"
      families[family] = {
        "candidates": candidates[family],
        **metric_figures(sample, resamples),
        "use_share": sample.mean("large_calls") / K if K else None,
        "overruns": sum(policies[i]["overruns"] for i in candidates[family]),
        "gain": gain(picked["bopo"], sample, metric, resamples) if rival else None,
      }
    competing = [family for family in families if family not in PRIVILEGED]
    order = sorted(competing, key=lambda family: -families[family][f"{metric}_percent"])
    more = None
    if len(order) > 1:
      more = gain(picked[order[0]], picked[order[1]], metric, resamples)
    result[str(K)] = {
      "families": families,
      "best": order[0],
      "runner_up": order[1] if more else None,
      "gain": more,
      "clear": bool(more and more["interval"][0] > 0),
    }
  return result


def beaten(fronts: dict, budgets: dict[str, dict], without: dict | None) -> dict:
  """Where another family's point estimate is above BoPO's, privileged ones apart.

  Args:
    fronts: of `frontiers`.
    budgets: of `best_under_budgets`.
    without: of `ablations`.

  Returns:
    areas and ablations: [{family, metric, gain, clear}, ...] and budgets: [{K, family, gain,
    clear}, ...]; a gain is BoPO minus the other, so below 0, and clear where its interval excludes
    0.
  """
  areas = _losses((f, front) for f, front in fronts.items() if f not in PRIVILEGED)
  parts = _losses((r["family"], r) for r in (without["rows"] if without else ()))
  losses = [
    {"K": int(K), "family": family, "gain": row["gain"], "clear": _excludes_zero(row["gain"])}
    for K, best in budgets.items()
    for family, row in best["families"].items()
    if family not in PRIVILEGED and row["gain"] and row["gain"]["value"] < 0
  ]
  return {"areas": areas, "ablations": parts, "budgets": losses}


def _losses(rows: Iterable[tuple[str, dict]]) -> list[dict]:
  """The areas that are larger than BoPO's, of (family, row with `bopo_gain`)."""
  return [
    {"family": family, "metric": metric, "gain": more, "clear": _excludes_zero(more)}
    for family, row in rows
    for metric, more in row["bopo_gain"].items()
    if more is not None and more["value"] < 0
  ]


def _excludes_zero(more: dict) -> bool:
  return more["interval"] is not None and more["interval"][1] < 0
