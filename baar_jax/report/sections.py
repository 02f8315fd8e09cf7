"""The sections of the page: words, figures and tables together."""

import html

from baar_jax.report import budget_tables, episode_html, plots, study_tables, tables
from baar_jax.report.cells import (
  STAND_IN,
  cost_digits,
  interval_text,
  models_text,
  picked,
  short_name,
  stands,
)
from baar_jax.report.theme import parameter_text, shown_metrics, sr_name

CURVE_TITLES = {
  "sft": "BoSFT",
  "bopo": "BoPO",
  "vanilla": "Vanilla RL",
  "cascade": "Cascade",
  "single-turn": "Single-turn",
}
_AREA_WORDS = """<p>The share of the rectangle between the two boundaries that lies under a family's
upper hull. The straight line between the boundaries has 0.50, and a policy that beats always-LARGE
can pass 1. More points can only raise an area. So "BoPO minus it" takes all of BoPO's points
against a family with several λ too, and those at one λ against the others, as many as any other
trained one has.</p>
"""


def headline_text(results: dict) -> str:
  """The result in one or two plain sentences."""
  best = results["headline"]
  if best is None:
    if not any(p["family"] == "bopo" for p in results["policies"]):
      return "No BoPO router has been evaluated in this run."
    return (
      "Always-LARGE is not both dearer and more successful than always-SMALL on these tasks, so "
      "there is no gap that a router could recover."
    )
  cost, success = best["cost_gap_share"], best["success_gap_share"]
  return (
    f"BoPO recovers {100 * success:.0f} % of the success gap between always-SMALL and always-LARGE "
    f"for {100 * cost:.0f} % of their cost gap."
  )


def opening(results: dict) -> str:
  run, best = results["run"], results["headline"]
  policies = results["policies"]
  ends = {p["family"]: p for p in policies if p["family"].startswith("always-")}
  small, large = ends["always-small"], ends["always-large"]
  detail, digits = "", cost_digits(results)
  if best:
    routed = policies[best["index"]]
    detail = (
      f"It succeeds on {routed['success_percent']:.1f} % of the tasks for "
      f"${routed['cost_usd']:.{digits}f} a task: of BoPO's {best['points']} points the "
      "highest above the line between the boundaries, picked on the test tasks, "
      f"{html.escape(parameter_text(best['parameters']))}. The 95 % intervals are "
      f"{interval_text(best['success_gap_interval'], 100, 0, ' to ')} % of the success gap and "
      f"{interval_text(best['cost_gap_interval'], 100, 0, ' to ')} % of the cost gap. "
    )
  detail += (
    f"Always-SMALL succeeds on {small['success_percent']:.1f} % of the tasks for "
    f"${small['cost_usd']:.{digits}f} a task, always-LARGE on {large['success_percent']:.1f} % for "
    f"${large['cost_usd']:.{digits}f}."
  )
  left_out = len(run["left_out_episodes"])
  facts = (
    (run["environment"], "environment"),
    (f"{run['test_tasks']} × {run['seeds']}", "test tasks × seeds"),
    (str(run["train_tasks"]), "training tasks"),
    (str(len(policies)), "policies compared"),
    (str(sum(p["overruns"] for p in [*policies, *results["dollar_budget"]])), "budget overruns"),
  )
  if left_out:
    facts += ((str(left_out), "episodes left out after errors"),)
  tiles = "".join(f"<div><dt>{t}</dt><dd>{html.escape(v)}</dd></div>" for v, t in facts)
  names = html.escape(" and ".join(run["models"]["names"]))
  priced = f"priced as {names}" if models_text(results) == "scripted models" else names
  return f"""<header>
<p class="kicker">Budget-aware routing · {html.escape(run["name"])}</p>
<h1>{html.escape(headline_text(results)).replace("-", "&#8209;")}</h1>
<p><span class="badge">{models_text(results)}</span> {priced}</p>
<p class="lead">{detail}</p>
<dl class="tiles">{tiles}</dl>
</header>"""


def soft(results: dict, svg: dict[str, str]) -> str:
  metric = results["run"]["sr_metric"]
  caption = (
    "Every method without a budget, First-Large at each K. Solid lines are upper hulls: what "
    "mixing a family's policies over tasks can reach. The dashed line mixes the two boundaries. λ "
    "is the weight of cost in training. LARGE is called from a probability of t on, 0.5 unless "
    "stated; share is the part of the decisions in stored training episodes that a threshold was "
    f"set for. {stands(results)} The crosses of the undominated points are 95 % bootstrap "
    "intervals over tasks."
  )
  judged = next((p for p in results["policies"] if p["family"] == "zero-shot"), None)
  if judged:
    caption += (
      f" The {short_name(results, 'zero-shot')} router's own dollars, "
      f"{judged['router_cost_usd']:.{cost_digits(results)}f} a task, are no part of its cost here."
    )
  return f"""<section>
<h2>Cost against success</h2>
{_figure(svg[f"frontier_{metric}"], caption, "wide")}
</section>"""


def areas(results: dict) -> str:
  return section("Area under each frontier", _AREA_WORDS + tables.areas(results))


def ablations(results: dict, svg: dict[str, str]) -> str:
  if not results["ablations"]:
    return ""
  caption = (
    "BoPO without one of its parts, trained and thresholded like the BoPO points shown here, and "
    f"the SFT router that it starts from. {stands(results)}"
  )
  body = f"{study_tables.ablations(results)}\n{_figure(svg['ablations'], caption, 'narrow')}"
  return section("What each part of BoPO is worth", body)


def budgets(results: dict, svg: dict[str, str]) -> str:
  if not results["hard_budget"]:
    return ""
  caption = f"{picked(results)} {stands(results)}"
  pair, count = _figure(svg["hard_budget"], caption), len(results["hard_budget"])
  for metric in shown_metrics(results)[1:]:
    caption = f"The frontier without a budget again, in {sr_name(metric)}. {stands(results)}"
    pair += _figure(svg[f"frontier_{metric}"], caption)
  return section(
    "Under a hard budget of K LARGE calls",
    f"{budget_tables.hard_budget(results)}\n{tables.budgets_beaten(results)}\n"
    f'<div class="pair">{pair}</div>\n<details class="fold">\n<summary>{count} policies, each at '
    f"parameters of its own</summary>\n{budget_tables.every_budget(results)}\n</details>",
  )


def dollars(results: dict) -> str:
  if not results["dollar_budget"]:
    return ""
  return section("Under a hard budget in dollars", budget_tables.dollar_budget(results))


def spend(results: dict, svg: dict[str, str]) -> str:
  basis = (
    f"Difficulty from {results['run']['seeds']} runs of each boundary on the test tasks. "
    f"{stands(results)}"
  )
  key = "".join(_key(f"var(--{d})", d) for d in results["spend"]["task_mix"])
  return f"""<section>
<h2>Where the money goes</h2>
<p>A good router spends on hard tasks, the ones that LARGE solves and SMALL does not, and little on
the easy and the intractable. The first bar is the mix of the tasks themselves.</p>
<p class="key">{key}</p>
<div class="pair">
{_figure(svg["spend_dollars"], f"Share of dollars by difficulty. {basis}")}
{_figure(svg["spend_large"], f"Share of LARGE calls by difficulty. {basis}")}
</div>
</section>"""


def progress(results: dict, svg: dict[str, str]) -> str:
  """Where along the episode LARGE is called, and what either model costs on a task."""
  costs, run = results["costs"], results["run"]
  inverted = sum(c["inverted"] for c in costs)
  pair = _figure(
    svg["progress"],
    "Share of LARGE among the decisions of each tenth of an episode, by the policies of the bars "
    f"above; BoPO's line is faint in every panel. {stands(results)}",
  )
  if costs:
    pair += _figure(
      svg["costs"],
      f"Median dollars of an episode, one point per training task; SMALL is the dearer one on "
      f"{inverted} of {len(costs)}. {len(costs)} training tasks, {run['profile_trials']} seeds of "
      f"each boundary, {models_text(results)}.",
    )
  labels = ""
  if results["taxonomy"]:
    labels = "<h3>Do the labels depend on the number of trials?</h3>\n"
    labels += study_tables.taxonomy(results)
  return section(
    "When LARGE is called, and what it costs", f'<div class="pair">{pair}</div>\n{labels}'
  )


def seconds(results: dict) -> str:
  return section("Seconds of an episode", study_tables.latency(results))


def episodes(results: dict) -> str:
  if not results["episodes"] or not results["episodes"]["episodes"]:
    return ""
  return section("Some episodes, step by step", episode_html.episodes(results))


def beside_the_paper(results: dict) -> str:
  if not results["published"]:
    return ""
  return section("The paper's figures beside these", study_tables.published(results))


def training(results: dict, svg: dict[str, str]) -> str:
  parts = ""
  basis = f"{results['run']['train_tasks']} training tasks, 1 seed, {models_text(results)}."
  for stage, title in CURVE_TITLES.items():
    series = [s for s in results["training"] if s["stage"] == stage]
    figures = "".join(s for name, s in svg.items() if name.startswith(f"{stage}_"))
    key = "".join(
      _key(plots.curve_style(s, i, len(series))["color"], plots.curve_name(s))
      for i, s in enumerate(series)
      if plots.curve_name(s)
    )
    if figures:
      caption = f"<figcaption>Faint: every update; strong: moving mean. {basis}</figcaption>"
      parts += f'<h3>{title}</h3><p class="key">{key}</p><figure>'
      parts += f'<div class="small">{figures}</div>{caption}</figure>'
  if "calibration" in svg:
    c = results["calibration"]
    constant = c["base_rate"] * (1 - c["base_rate"])
    caption = (
      "How often SMALL's proposals failed against what the cascade's scorer said, on training "
      f"tasks that it was not trained on. Brier score {c['brier']:.3f}; always saying the rate of "
      f"{100 * c['base_rate']:.0f} % has {constant:.3f}. On {models_text(results)}."
    )
    parts += f"<h3>Calibration of the cascade</h3>{_figure(svg['calibration'], caption, 'narrow')}"
  return section("Training", parts) if parts else ""


def _key(color: str, text: str) -> str:
  return f'<span><i style="background: {color}"></i>{html.escape(text)}</span>'


def every_policy(results: dict) -> str:
  count = len(results["policies"])
  body = f'<details class="fold">\n<summary>{count} policies</summary>\n'
  return section("Every policy", f"{body}{tables.every_policy(results)}\n</details>")


def method(results: dict) -> str:
  run = results["run"]
  prices = "; ".join(
    f"{html.escape(name)} {p['input']:g} in, {p['cached_input']:g} cached, {p['output']:g} out"
    + ("" if p["cache_write"] is None else f", {p['cache_write']:g} cache write")
    for name, p in run["prices_usd_per_million"].items()
  )
  scripted = (
    "<p>Scripted models are two programs that act in the real environment with stated error rates. "
    "Their costs are list-price dollars for the text they exchange; no model was called.</p>"
  )
  if run["stand_ins"]:
    scripted += (
      f"<p>The zero-shot router of this run is a stand-in: {STAND_IN}, at the judge's list price. "
      "It says nothing about that model.</p>"
    )
  environment = ""
  if run["own_tasks"]:
    environment += "The tasks are made by this project, not the benchmark's own. "
  if run["environment_mb"]:
    environment += f"Environments take {run['environment_mb']:.0f} MB for each live episode."
  if environment:
    environment = f"<p>{environment}</p>"
  shape = run["router"]
  trained = ""
  if results["methods"]:
    trained = f"<h3>How each method was trained</h3>\n{study_tables.methods(results)}"
  return f"""<section class="method">
<h2>What stands behind it</h2>
{scripted if models_text(results) == "scripted models" else ""}
{environment}
<p>Prices in dollars per million tokens: {prices}. Router: {shape["num_layers"]} layers of
width {shape["hidden_size"]}, {shape["num_heads"]} heads, {shape["vocab_size"]} tokens, view
{html.escape(shape["view"])}, priced at ${shape["usd_per_million_tokens"]:g} per million tokens.</p>
{trained}
<h3>What the run has cost</h3>
{budget_tables.ledger(results)}
<p>All figures as data: <code>results.json</code> beside this page.</p>
</section>"""


def section(title: str, body: str) -> str:
  return f"<section>\n<h2>{title}</h2>\n{body}\n</section>"


def _figure(svg: str, caption: str, kind: str = "") -> str:
  return f'<figure class="{kind}">{svg}<figcaption>{html.escape(caption)}</figcaption></figure>'
