"""The tables of the report as HTML, and how its numbers are written."""

import html
import math
from collections.abc import Sequence

from baar_jax.theme import COLORS, FAMILIES, parameter_text, shown_metrics, sr_name

METRIC_TITLES = {"score": "Mean score", "success": "Success rate"}
PRIVILEGED = ("oracle", "optimum")  # they see what no router may


def areas(results: dict) -> str:
  """Each family's area under either metric, and how much more BoPO's is."""
  names = shown_metrics(results)
  header = "".join(f"<th>{METRIC_TITLES[m]}</th><th>BoPO minus it</th>" for m in names)
  rows = []
  for family, front in results["frontiers"].items():
    cells = ""
    for metric in names:
      area, gain = front["area"][metric], front["bopo_gain"].get(metric)
      value = f"{area['value']:.2f} {_interval(area['interval'], 2)}" if area else "–"
      more = f"{gain['value']:+.2f} {_interval(gain['interval'], 2, '+')}" if gain else "–"
      cells += f"<td>{value}</td><td>{more}</td>"
    cells += f"<td>{_strip(front['area'][names[0]], family)}</td>"
    rows.append(_row(family, f"{len(front['policies'])}", cells))
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
paired. The strip shows the first of the areas, its ticks are at 0.5 and 1.</p>"""


def hard_budget(results: dict) -> str:
  """SR, success and Use% under each K."""
  rows = results["hard_budget"]
  metric = results["run"]["sr_metric"]
  budgets = sorted({int(K) for row in rows for K in row["budgets"]})
  name, both = f"{metric}_percent", metric != "success"
  width = 3 if both else 2
  fair = [row for row in rows if row["family"] not in PRIVILEGED]
  best = {
    K: max((row["budgets"][str(K)][name] for row in fair if str(K) in row["budgets"]), default=None)
    for K in budgets
  }
  lines = []
  for row in rows:
    cells = ""
    for K in budgets:
      cell = row["budgets"].get(str(K))
      if cell is None:
        cells += "<td>–</td>" * width
        continue
      value, use = f"{cell[name]:.1f}", cell["use_share"]
      if row in fair and cell[name] == best[K]:
        value = f"<b>{value}</b>"
      over = f' <span class="alarm">{cell["overruns"]} over K</span>' if cell["overruns"] else ""
      cells += f"<td>{value}{over}</td>"
      cells += f"<td>{cell['success_percent']:.1f}</td>" if both else ""
      cells += f"<td>{'–' if use is None else f'{100 * use:.0f}'}</td>"
    lines.append(_row(row["family"], parameter_text(row["parameters"]) or "–", cells))
  columns = f"<th>SR</th>{'<th>Success</th>' if both else ''}<th>Use%</th>"
  over = sum(p["overruns"] for p in results["policies"])
  total = sum(p["episodes"] for p in results["policies"] if p["call_budget"] is not None)
  heads = "".join(f'<th colspan="{width}" class="group">K = {K}</th>' for K in budgets)
  return f"""<div class="scroll"><table>
<thead><tr><th rowspan="2">Family</th><th rowspan="2">Parameters</th>{heads}</tr>
<tr>{columns * len(budgets)}</tr></thead>
<tbody>{"".join(lines)}</tbody>
</table></div>
<p class="note">SR is the {sr_name(metric).split(",")[0]} × 100. Use% is the mean number of LARGE
calls over K. Bold is the best of the policies that see no more than a router may. {over} of {total}
episodes made more than K LARGE calls. {stands(results)}</p>"""


def every_policy(results: dict) -> str:
  """All figures of all policies, apart from the budgets' own."""
  rows, digits = [], cost_digits(results)
  for p in results["policies"]:
    budget = [] if p["call_budget"] is None else [f"K = {p['call_budget']}"]
    parameters = ", ".join([parameter_text(p["parameters"]), *budget]).removeprefix(", ")
    cells = (
      f"<td>{p['score_percent']:.1f} {_interval(p['score_interval'], 1)}</td>"
      f"<td>{p['success_percent']:.1f} {_interval(p['success_interval'], 1)}</td>"
      f"<td>{p['cost_usd']:.{digits}f} {_interval(p['cost_interval_usd'], digits)}</td>"
      f"<td>{p['router_cost_usd']:.{digits + 1}f}</td>"
      f"<td>{_percent(p['cost_gap_share'])}</td><td>{_percent(p['success_gap_share'])}</td>"
      f"<td>{p['large_calls']:.1f}</td><td>{p['steps']:.1f}</td>"
    )
    rows.append(_row(p["family"], parameters or "–", cells))
  return f"""<div class="scroll"><table class="dense">
<thead><tr><th>Family</th><th>Parameters</th><th>Mean score, %</th><th>Success, %</th>
<th>Model cost, $</th><th>Router cost, $</th><th>Cost gap</th><th>Success gap</th>
<th>LARGE calls</th><th>Steps</th></tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>
<p class="note">Dollars, calls and steps are per task. Gaps are shares of the way from always-SMALL
to always-LARGE. Router cost is apart from model cost. {stands(results)}</p>"""


def cost_digits(results: dict) -> int:
  """Decimals at which the cheapest policy's dollars have three significant digits."""
  cheapest = min(p["cost_usd"] for p in results["policies"])
  return 2 - math.floor(math.log10(cheapest)) if cheapest > 0 else 4


def models_text(results: dict) -> str:
  """What was asked, and where: what a host within one's own network serves is not ours to say."""
  models = results["run"]["models"]
  if models["kind"] == "scripted":
    return "scripted models"
  names = " and ".join(dict.fromkeys(host["name"] for host in models["hosts"]))
  real = not any(host["own"] for host in models["hosts"])
  return f"{'real models' if real else 'models'} at {names}"


def dollar_budget(results: dict) -> str:
  """SR, success, Use% and overruns under each B_max."""
  rows = []
  digits = cost_digits(results)
  for p in results["dollar_budget"]:
    use = "–" if p["use_share"] is None else f"{100 * p['use_share']:.0f}"
    sr = f"{results['run']['sr_metric']}_percent"
    cells = (
      f"<td>{p['usd_budget']:g}</td><td>{p[sr]:.1f}</td><td>{p['success_percent']:.1f}</td>"
      f"<td>{p['cost_usd']:.{digits}f}</td><td>{use}</td><td>{p['overruns']}</td>"
    )
    rows.append(_row(p["family"], parameter_text(p["parameters"]) or "–", cells))
  return f"""<div class="scroll"><table>
<thead><tr><th>Family</th><th>Parameters</th><th>B<sub>max</sub>, $</th><th>SR</th><th>Success</th>
<th>Model cost, $</th><th>Use%</th><th>Overruns</th></tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>
<p class="note">A call is made only if the most that it can cost fits what is left of the task's
dollars. Use% is the mean share of B<sub>max</sub> that was spent, failed attempts included. An
overrun is an episode that was billed for more than B<sub>max</sub>. {stands(results)}</p>"""


LEDGER_ROWS = (
  ("small_usd", "SMALL"),
  ("large_usd", "LARGE"),
  ("retries_usd", "attempts without an answer"),
  ("router_usd", "router"),
  ("total_usd", "all of it"),
)


def ledger(results: dict) -> str:
  """What the whole run has cost, part by part."""
  book = results["ledger"]
  rows = "".join(
    f'<tr><th scope="row">{title}</th><td>{book[part]:.6f}</td></tr>' for part, title in LEDGER_ROWS
  )
  return f"""<div class="scroll"><table>
<thead><tr><th>All stages of this run</th><th>$</th></tr></thead>
<tbody>{rows}</tbody>
</table></div>
<p class="note">Up to ${book["presumed_usd"]:.6f} more may have been billed for calls whose outcome
is unknown: time-outs, lost connections, a killed process. Replies that had been recorded before
saved ${book["replayed_usd"]:.6f}, which is not in these sums.</p>"""


def ledger_text(results: dict) -> str:
  """The same in a line for the terminal."""
  book = results["ledger"]
  parts = ", ".join(f"{title} ${book[part]:.4f}" for part, title in LEDGER_ROWS[:-1])
  line = f"spent by this run: ${book['total_usd']:.4f} ({parts})"
  if book["presumed_usd"]:
    line += f", and at most ${book['presumed_usd']:.4f} for calls whose outcome is unknown"
  return f"{line}; {models_text(results)}"


def stands(results: dict) -> str:
  run = results["run"]
  return f"{run['test_tasks']} held-out tasks, {run['seeds']} seeds, {models_text(results)}."


def interval_text(
  interval: Sequence[float] | None, factor: float, digits: int, between: str, sign: str = ""
) -> str:
  """Both ends times the factor; a dash where there is no interval."""
  if interval is None:
    return "–"
  return between.join(f"{factor * end:{sign}.{digits}f}" for end in interval)


def _interval(interval: Sequence[float] | None, digits: int, sign: str = "") -> str:
  return f"<small>[{interval_text(interval, 1, digits, ', ', sign)}]</small>"


def _percent(share: float | None) -> str:
  return "–" if share is None else f"{100 * share:.0f} %"


def _row(family: str, second: str, cells: str) -> str:
  name = html.escape(FAMILIES.get(family, family))
  kind = ' class="own"' if family == "bopo" else ""
  return f'<tr{kind}><th scope="row">{name}</th><td>{html.escape(second)}</td>{cells}</tr>'


def _strip(area: dict | None, family: str) -> str:
  """The area and its interval on a line from 0 to 1.2."""
  if area is None:
    return ""
  place = lambda value: 100 * min(max(value, 0.0), 1.2) / 1.2  # noqa: E731
  low, high = area["interval"] or (area["value"], area["value"])
  color = f"var(--{family if family in COLORS else 'muted'})"
  return (
    '<svg class="strip" viewBox="0 0 100 12" aria-hidden="true">'
    f'<path d="M0 6H100M{place(0.5):.1f} 2V10M{place(1.0):.1f} 2V10" stroke="var(--rule)"/>'
    f'<path d="M{place(low):.1f} 6H{place(high):.1f}" stroke="{color}" stroke-width="2"/>'
    f'<circle cx="{place(area["value"]):.1f}" cy="6" r="3.2" fill="{color}"/></svg>'
  )
