"""The main tables of the report as HTML: areas, and every policy."""

import html
from collections.abc import Sequence

from baar_jax.report.cells import (
  cost_digits,
  family_name,
  interval_cell,
  interval_text,
  percent,
  row,
  stands,
  strip,
)
from baar_jax.report.theme import parameter_text, shown_metrics

METRIC_TITLES = {"score": "Mean score", "success": "Success rate"}


def areas(results: dict) -> str:
  """Each family's area under either metric, and how much more BoPO's is."""
  names = shown_metrics(results)
  header = "".join(f"<th>{METRIC_TITLES[m]}</th><th>BoPO minus it</th>" for m in names)
  rows = []
  for family, front in results["frontiers"].items():
    cells = ""
    for metric in names:
      area, gain = front["area"][metric], front["bopo_gain"].get(metric)
      value = f"{area['value']:.2f} {interval_cell(area['interval'], 2)}" if area else "–"
      more = f"{gain['value']:+z.2f} {interval_cell(gain['interval'], 2, '+')}" if gain else "–"
      cells += f"<td>{value}</td><td>{more}</td>"
    cells += f"<td>{strip(front['area'][names[0]], family)}</td>"
    rows.append(row(results, family, f"{len(front['policies'])}", cells))
  alone_note = ""
  for lone in results["bopo_alone"]:
    cells = ""
    for metric in names:
      area = lone["area"][metric]
      value = f"{area['value']:.2f} {interval_cell(area['interval'], 2)}" if area else "–"
      cells += f"<td>{value}</td><td>–</td>"
    cells += f"<td>{strip(lone['area'][names[0]], 'bopo')}</td>"
    name = f"BoPO, λ = {lone['lam']:g} alone"
    points = len(lone["policies"])
    rows.append(f'<tr><th scope="row">{name}</th><td>{points}</td>{cells}</tr>')
    alone_note = (
      f"BoPO minus a family with one λ or none is at λ = {results['run']['compared_lam']:g}."
    )
  if "exact" in results:
    cells = f"<td>{results['exact']['area']:.2f} <small>computed</small></td><td>–</td>"
    blanks = "<td></td><td></td>" * (len(names) - 1)
    order = cells + blanks if names[0] == "success" else blanks + cells
    rows.append(f'<tr><th scope="row">exact optimum, all tasks</th><td></td>{order}<td></td></tr>')
  return f"""<div class="scroll"><table>
<thead><tr><th>Family</th><th>Points</th>{header}<th></th></tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>
<p class="note">{stands(results)} In brackets 95 % bootstrap intervals over tasks; differences are
paired. The strip shows the first of the areas, its ticks are at 0.5 and 1. {alone_note}</p>
{areas_beaten(results)}"""


def areas_beaten(results: dict) -> str:
  """Where a baseline's area is above BoPO's, in plain words; nothing where there is no BoPO."""
  if "bopo" not in results["frontiers"]:
    return ""
  return _larger(results, "baseline", results["beaten"]["areas"], results["frontiers"]["bopo"])


def ablations_beaten(results: dict) -> str:
  """The same for BoPO without one of its parts, at as many points of the same lam."""
  known = [r for r in results["ablations"]["rows"] if r["policies"]]
  if not known:
    return "<p>No ablation has the settings of a BoPO point, so no area can be compared.</p>"
  areas = {"area": known[0]["bopo_area"]}
  return _larger(results, "ablation", results["beaten"]["ablations"], areas)


def _larger(results: dict, kind: str, losses: Sequence[dict], own: dict) -> str:
  """Who of a kind has a larger area than BoPO, whose own areas say which can be computed."""
  names = shown_metrics(results)
  missing = [metric for metric in names if own["area"][metric] is None]
  lacking = ""
  if missing:
    of = "" if len(missing) == len(names) else f" in {METRIC_TITLES[missing[0]].lower()}"
    lacking = (
      f"<p>No area can be computed{of}: always-LARGE is not both dearer and better than "
      "always-SMALL on these tasks.</p>"
    )
  found = [loss for loss in losses if loss["metric"] in names]
  if found:
    plural = f"{kind}s".capitalize()
    return f"{lacking}<p>{plural} with a larger area than BoPO:</p>\n{_listed(results, found, 2)}"
  if len(missing) == len(names):
    return lacking
  where = f" in {', '.join(METRIC_TITLES[m].lower() for m in names if m not in missing)}"
  return f"{lacking}<p>No {kind} has a larger area than BoPO{where if missing else ''}.</p>"


def budgets_beaten(results: dict) -> str:
  """Where a baseline's SR under a K is above BoPO's, in plain words."""
  if not any("bopo" in best["families"] for best in results["hard_budget_best"].values()):
    return ""
  found = results["beaten"]["budgets"]
  if not found:
    return "<p>At no K does a baseline have a higher SR than BoPO.</p>"
  return f"<p>Baselines with a higher SR than BoPO:</p>\n{_listed(results, found, 1)}"


def _listed(results: dict, losses: Sequence[dict], digits: int) -> str:
  """Each loss with its difference and whether its interval excludes 0."""
  texts = []
  for loss in losses:
    where = f"K = {loss['K']}" if "K" in loss else METRIC_TITLES[loss["metric"]].lower()
    more = loss["gain"]
    flipped = None if more["interval"] is None else [-end for end in more["interval"][::-1]]
    ends = interval_text(flipped, 1, digits, " to ", "+")
    doubt = "excludes 0" if loss["clear"] else "does not exclude 0"
    texts.append(
      f"{family_name(results, loss['family'])}, {where}: by {-more['value']:z.{digits}f}; "
      f"the 95 % interval {ends} {doubt}"
    )
  return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>"


def every_policy(results: dict) -> str:
  """All figures of all policies, apart from the budgets' own."""
  rows, digits = [], cost_digits(results)
  for p in results["policies"]:
    budget = [] if p["call_budget"] is None else [f"K = {p['call_budget']}"]
    parameters = ", ".join([parameter_text(p["parameters"]), *budget]).removeprefix(", ")
    cells = (
      f"<td>{p['score_percent']:.1f} {interval_cell(p['score_interval'], 1)}</td>"
      f"<td>{p['success_percent']:.1f} {interval_cell(p['success_interval'], 1)}</td>"
      f"<td>{p['cost_usd']:.{digits}f} {interval_cell(p['cost_interval_usd'], digits)}</td>"
      f"<td>{p['router_cost_usd']:.{digits + 1}f}</td>"
      f"<td>{percent(p['cost_gap_share'])}</td><td>{percent(p['success_gap_share'])}</td>"
      f"<td>{p['large_calls']:.1f}</td><td>{p['steps']:.1f}</td>"
    )
    rows.append(row(results, p["family"], parameters or "–", cells))
  return f"""<div class="scroll"><table class="dense">
<thead><tr><th>Family</th><th>Parameters</th><th>Mean score, %</th><th>Success, %</th>
<th>Model cost, $</th><th>Router cost, $</th><th>Cost gap</th><th>Success gap</th>
<th>LARGE calls</th><th>Steps</th></tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>
<p class="note">Dollars, calls and steps are per task. Gaps are shares of the way from always-SMALL
to always-LARGE. Router cost is apart from model cost. {stands(results)}</p>"""
