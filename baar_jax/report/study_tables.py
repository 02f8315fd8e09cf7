"""The tables beside the comparison: ablations, seconds, labels, methods, the paper's figures."""

import html

from baar_jax.report.cells import (
  STAND_IN,
  family_name,
  interval_cell,
  models_text,
  number,
  percent,
  picked,
  row,
  stands,
  table,
)
from baar_jax.report.latency import LARGE_RATE, ROUTER_RATE, SMALL_RATE
from baar_jax.report.tables import METRIC_TITLES, ablations_beaten
from baar_jax.report.theme import parameter_text, shown_metrics


def ablations(results: dict) -> str:
  """Each ablation's area beside BoPO's at as many points of the same lam."""
  names = shown_metrics(results)
  rows = []
  for r in results["ablations"]["rows"]:
    cells = f"<td>{len(r['policies'])}</td>"
    for metric in names:
      for area in (r["area"].get(metric), r["bopo_area"].get(metric)):
        text = f"{area['value']:.2f} {interval_cell(area['interval'], 2)}" if area else "–"
        cells += f"<td>{text}</td>"
      more = r["bopo_gain"].get(metric)
      text = f"{more['value']:+z.2f} {interval_cell(more['interval'], 2, '+')}" if more else "–"
      cells += f"<td>{text}</td>"
    rows.append(
      row(results, r["family"], f"λ = {r['lam']:g}" if r["lam"] is not None else "–", cells)
    )
  heads = "".join(
    f"<th>{METRIC_TITLES[m]}: its area</th><th>BoPO's</th><th>BoPO minus it</th>" for m in names
  )
  note = (
    f"{stands(results)} BoPO has the same λ and the same thresholds or shares, so as many points; "
    "λ beside SFT alone is BoPO's. In brackets 95 % bootstrap intervals over tasks; differences "
    "are paired."
  )
  head = f"<tr><th>Ablation</th><th>Weight</th><th>Points</th>{heads}</tr>"
  return f"{table(head, rows, note)}\n{ablations_beaten(results)}"


def latency(results: dict) -> str:
  """Mean seconds per episode by model, and the router's share."""
  rows = []
  for r in results["latency"]:
    milliseconds = r["measured_decision_s"] and 1000 * r["measured_decision_s"]
    cells = "".join(f"<td>{number(r[k], 2)}</td>" for k in ("small_s", "large_s", "router_s"))
    cells += f"<td>{number(r['total_s'], 2)}</td><td>{_share(r['router_share'])}</td>"
    cells += f"<td>{number(milliseconds, 1)}</td><td>{number(r['measured_router_s'], 2)}</td>"
    cells += f"<td>{number(r['measured_models_s'], 2)}</td>"
    cells += f"<td>{_share(r['measured_router_share'])}</td>"
    rows.append(row(results, r["family"], parameter_text(r["parameters"]) or "–", cells))
  head = (
    '<tr><th rowspan="2">Family</th><th rowspan="2">Parameters</th>'
    '<th colspan="5" class="group">by the paper\'s token rates, s</th>'
    '<th colspan="4" class="group">measured</th></tr>'
    "<tr><th>SMALL</th><th>LARGE</th><th>router</th><th>all</th><th>router's share</th>"
    "<th>ms a decision</th><th>router, s</th><th>models, s</th><th>router's share</th></tr>"
  )
  if results["run"]["models"]["kind"] == "scripted":
    models = (
      "Scripted models answer at once, which is no API's latency: the router's measured seconds "
      "are held against the models' seconds by the rates."
    )
  else:
    models = (
      "Where replies were replayed from the record the models' seconds are those by the rates."
    )
  note = (
    f"Mean per episode. Rates: LARGE {LARGE_RATE:.0f} tokens a second, SMALL {SMALL_RATE:.0f}, "
    f"router {ROUTER_RATE:.0f} (published, not measured here), times the generated tokens; a "
    "router's decision is one token. A judge's answers count at LARGE's rate, a cascade's "
    "proposals that were not taken at SMALL's. Measured: the time that an episode waited for its "
    f"router or judge, on this machine, in batches of what was ready. {models} {stands(results)}"
  )
  return table(head, rows, note, "dense")


def taxonomy(results: dict) -> str:
  """How far the labels depend on the number of trials."""
  base = results["run"]["profile_trials"]
  rows = [
    f'<tr><th scope="row">K = {r["trials"]}</th><td>{r["tasks"]}</td>'
    f"<td>{percent(r['agreement'])}</td><td>{r['hard']}</td><td>{r['base_hard']}</td>"
    f"<td>{number(r['hard_jaccard'], 2)}</td></tr>"
    for r in results["taxonomy"]
  ]
  head = (
    f"<tr><th>Trials</th><th>Tasks</th><th>Same label as K = {base}</th><th>Hard</th>"
    f"<th>Hard at K = {base}</th><th>Jaccard of the hard</th></tr>"
  )
  note = (
    f"Training tasks with all these trials of both boundaries, {models_text(results)}. The first "
    "trials are shared, so labels of fewer and of more trials are not independent."
  )
  return table(head, rows, note)


def methods(results: dict) -> str:
  """How each method was trained, and how its settings were chosen."""
  rows = []
  for m in results["methods"]:
    text = ", ".join(f"{name} = {_setting(value)}" for name, value in m["settings"].items())
    cells = f"<td>{html.escape(text)}</td><td>{html.escape(m['chosen'])}</td>"
    rows.append(row(results, m["family"], f"{m['training_episodes']:,}", cells))
  head = "<tr><th>Method</th><th>Episodes run to train one router</th>"
  head += "<th>Settings</th><th>How chosen</th></tr>"
  return table(head, rows, kind="prose")


def published(results: dict) -> str:
  """The paper's figures beside this run's."""
  rows, section = [], None
  for r in results["published"]:
    title = html.escape(r["section"]) if r["section"] != section else ""
    section = r["section"]
    ours = "–" if r["ours"] is None else html.escape(r["ours"])
    rows.append(
      f'<tr><th scope="row">{title}</th><td>{html.escape(family_name(results, r["what"]))}</td>'
      f"<td>{html.escape(r['paper'])}</td><td>{ours}</td></tr>"
    )
  head = (
    "<tr><th>Figure</th><th></th><th>The paper <small>published, not measured here</small></th>"
    "<th>This run</th></tr>"
  )
  note = (
    f"This run: {stands(results)} The paper's models, router, tasks and numbers of tasks are "
    "others; its zero-shot router is GPT-5, its shares of dollars and of tasks are over three "
    "benchmarks together, those of tasks here of the test tasks. Its BoPO has the "
    "better of two rows at each K; in brackets Use%. A dash: not in this run."
  )
  if results["run"]["stand_ins"]:
    note += f" The zero-shot router of this run is a stand-in: {STAND_IN}."
  if results["hard_budget"]:
    note += f" {html.escape(picked(results))}"
  return table(head, rows, note)


def _setting(value) -> str:
  if isinstance(value, list | tuple):
    return "(" + ", ".join(map(_setting, value)) + ")"
  return (
    f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
  )


def _share(share: float | None) -> str:
  return "–" if share is None else f"{100 * share:.1f} %"
