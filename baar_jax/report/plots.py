"""The figures of the report as matplotlib figures, one function each, and as SVG."""

import html
import re
from collections.abc import Sequence
from io import StringIO

import matplotlib
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from baar_jax.report.cells import short_name
from baar_jax.report.frontier_plots import (
  DASHED,
  draw_ablations,
  draw_frontier,
  draw_hard_budget,
  legend_above,
  new_axes,
)
from baar_jax.report.learning import CURVE_STAGES
from baar_jax.report.theme import FAMILIES, LIGHT, MARKERS, STYLE, parameter_text, shown_metrics

CURVES = {
  "loss": "loss",
  "accuracy": "accuracy",
  "reward": "reward",
  "success": "success",
  "kl": "KL to SFT, nats",
  "entropy": "entropy, nats",
  "large_share": "share of LARGE",
  "clipped": "clipped groups",
}
DESCRIPTIONS = {
  "frontier_score": "Dollars per task against mean score, every policy and its family's hull",
  "frontier_success": "Dollars per task against success rate, every policy and its family's hull",
  "ablations": "Dollars per task against score, every ablation and BoPO at the same settings",
  "calibration": "Observed against predicted failures of the cascade's scorer",
  "hard_budget": "Score under a budget of K LARGE calls, per family",
  "spend_dollars": "Share of dollars by difficulty, per policy",
  "spend_large": "Share of LARGE calls by difficulty, per policy",
  "progress": "Share of LARGE along the episode, per policy",
  "costs": "Median cost of SMALL against LARGE, per training task",
}
PANELS = 3  # of the progress figure, side by side


def draw_all(results: dict) -> dict[str, Figure]:
  """Every figure that the results have data for, by file name."""
  first, *others = shown_metrics(results)
  with matplotlib.rc_context(STYLE):
    figures = {
      f"frontier_{first}": draw_frontier(results, first, (5.0, 4.5)),
      **{f"frontier_{other}": draw_frontier(results, other, (4.6, 3.8)) for other in others},
      "spend_dollars": draw_spend(results, "cost_share", "share of dollars"),
      "spend_large": draw_spend(results, "large_share", "share of LARGE calls"),
      "progress": draw_progress(results),
    }
    if results["hard_budget"]:
      figures["hard_budget"] = draw_hard_budget(results, first)
    if results["ablations"]:
      figures["ablations"] = draw_ablations(results, first)
    if results["calibration"]:
      figures["calibration"] = draw_calibration(results["calibration"])
    if results["costs"]:
      figures["costs"] = draw_costs(results["costs"])
    for stage in CURVE_STAGES:
      series = [s for s in results["training"] if s["stage"] == stage]
      for name, label in CURVES.items():
        if any(v is not None for s in series for v in s["values"].get(name, ())):
          figures[f"{stage}_{name}"] = draw_curve(series, name, label)
  return figures


def description(name: str) -> str:
  """The figure in a few words, for a reader that cannot see it; the page's tables say the rest."""
  stage, _, rest = name.partition("_")
  if stage in CURVE_STAGES:
    return f"{FAMILIES[stage]} training curve: {CURVES[rest]}"
  return DESCRIPTIONS[name]


def draw_spend(results: dict, share: str, label: str) -> Figure:
  """One stacked bar per policy: what part of its spend falls on each difficulty."""
  spend = results["spend"]
  bars = [("task mix", spend["task_mix"])]
  for row in spend["policies"]:
    words = short_name(results, row["family"])
    bars.append((f"{words} {parameter_text(row['parameters'])}".strip(), row[share]))
  figure, axes = new_axes((4.6, 0.9 + 0.34 * len(bars)))
  for place, (_, parts) in enumerate(bars):
    if parts is None:
      axes.text(1, place, "none", va="center", color=LIGHT["muted"])
    left = 0.0
    for difficulty, part in (parts or {}).items():
      axes.barh(place, 100 * part, 0.72, 100 * left, color=LIGHT[difficulty])
      if part >= 0.07:
        # Black is readable on the fills of light and of dark pages.
        center = 100 * (left + part / 2), place
        axes.text(*center, f"{100 * part:.0f}", ha="center", va="center", color="#101010")
      left += part
  axes.set_yticks(range(len(bars)), [name for name, _ in bars])
  axes.invert_yaxis()
  axes.axhline(0.5, color=LIGHT["muted"], linewidth=0.8)
  axes.set_xlim(0, 100)
  axes.set_xlabel(f"{label}, %")
  axes.grid(visible=False)
  axes.spines["left"].set_visible(False)
  axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
  return figure


def draw_costs(costs: Sequence[dict]) -> Figure:
  """Median dollars of SMALL against LARGE per training task; above the diagonal is inverted."""
  figure, axes = new_axes((4.6, 3.8))
  for inverted, color, marker in ((False, LIGHT["sft"], "o"), (True, LIGHT["bopo"], "D")):
    points = [(c["large_usd"], c["small_usd"]) for c in costs if c["inverted"] is inverted]
    name = "SMALL is dearer" if inverted else "LARGE is dearer"
    label = f"{name} ({len(points)})"
    if points:
      axes.plot(*zip(*points), marker, color=color, markersize=4.5, alpha=0.75, label=label)
  values = [c[name] for c in costs for name in ("small_usd", "large_usd")]
  low, high = min(values), max(values)
  if low > 0 and high > 8 * low:
    axes.loglog()
    for axis in (axes.xaxis, axes.yaxis):
      axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
      axis.set_major_formatter("{x:g}")
      axis.set_minor_formatter(NullFormatter())
  axes.plot([low, high], [low, high], **DASHED)
  axes.set_xlabel("LARGE, dollars per episode")
  axes.set_ylabel("SMALL, dollars per episode")
  legend_above(axes, 2)
  return figure


def draw_progress(results: dict) -> Figure:
  """Share of LARGE among the decisions of each tenth of an episode: a panel per policy.

  BoPO's line is in every panel, faint.
  """
  rows = results["spend"]["policies"]
  shown = [row for row in rows if not row["family"].startswith("always-")]
  columns = min(PANELS, max(1, len(shown)))
  lines = max(1, -(-len(shown) // columns))
  figure = Figure(figsize=(4.6, 0.7 + 1.35 * lines), layout="constrained")
  grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
  bopo = next((row for row in shown if row["family"] == "bopo"), None)
  for axes, row in zip(grid, shown):
    color = LIGHT.get(row["family"], LIGHT["muted"])
    if bopo and row is not bopo:
      axes.plot(*zip(*_by_progress(bopo)), color=LIGHT["bopo"], linewidth=0.9, alpha=0.45)
    style = {"marker": MARKERS.get(row["family"], "o"), "markersize": 3}
    axes.plot(*zip(*_by_progress(row)), color=color, linewidth=1.4, **style)
    axes.set_title(short_name(results, row["family"]), color=color, fontsize=8)
    axes.set_xlim(0, 100)
    axes.set_xticks((0, 50, 100))
  for axes in grid[len(shown) :]:
    axes.set_visible(False)
  if shown:
    top = max(share for row in shown for _, share in _by_progress(row))
    grid[0].set_ylim(0, max(5.0, 1.1 * top))
  figure.supxlabel("progress through the episode, % of its steps", fontsize=9)
  figure.supylabel("LARGE, % of decisions", fontsize=9)
  return figure


def _by_progress(row: dict) -> list[tuple[float, float]]:
  """(percent of the steps, percent LARGE) of the tenths that hold a decision."""
  shares = row["large_share_by_progress"]
  return [(100 * (i + 0.5) / len(shares), 100 * s) for i, s in enumerate(shares) if s is not None]


def draw_calibration(calibration: dict) -> Figure:
  """Reliability of the cascade's scorer: observed against predicted failures, with counts."""
  figure = Figure(figsize=(4.6, 3.8), layout="constrained")
  axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
  bins = calibration["bins"]
  predicted = [100 * b["predicted"] for b in bins]
  axes.plot([0, 100], [0, 100], **DASHED)
  observed = [100 * b["observed"] for b in bins]
  axes.plot(predicted, observed, MARKERS["cascade"] + "-", color=LIGHT["cascade"], linewidth=1.4)
  axes.set_title(f"Brier score {calibration['brier']:.3f}")
  axes.set_ylabel("observed failures, %")
  axes.set_ylim(-3, 103)
  counts.bar(predicted, [b["count"] for b in bins], 3, color=LIGHT["cascade"])
  counts.set_xlim(-3, 103)
  counts.set_xlabel("predicted probability of failure, %")
  counts.set_ylabel("decisions")
  return figure


def curve_style(series: dict, place: int, curves: int) -> dict:
  """Colour and dash of the place-th of a stage's curves: ablations in their own colour, dashed."""
  if series["ablation"] is not None:
    color = LIGHT.get(series["ablation"], LIGHT["muted"])
    return {"color": color, "linestyle": (0, (3, 1.5))}
  if series["lam"] is None:
    return {"color": LIGHT.get(series["stage"], LIGHT["sft"])}
  return {"color": to_hex(matplotlib.colormaps["viridis"](0.2 + 0.65 * place / curves))}


def curve_name(series: dict) -> str:
  """What tells a stage's curves apart."""
  lam = "" if series["lam"] is None else f"λ = {series['lam']:g}"
  ablation = FAMILIES.get(series["ablation"], series["ablation"] or "")
  return ", ".join(part for part in (ablation, lam) if part)


def draw_curve(series: Sequence[dict], name: str, label: str) -> Figure:
  """One quantity over the updates, a line per curve: raw values faint, their mean strong."""
  figure, axes = new_axes((3.2, 2.2))
  for i, s in enumerate(series):
    known = [(u, v) for u, v in zip(s["update"], s["values"].get(name, ())) if v is not None]
    if not known:
      continue
    style = curve_style(s, i, len(series))
    updates, values = zip(*known)
    window = max(1, len(values) // 12)
    parts = [values[max(0, j - window + 1) : j + 1] for j in range(len(values))]
    axes.plot(updates, values, color=style["color"], linewidth=0.6, alpha=0.3)
    axes.plot(updates, [sum(part) / len(part) for part in parts], linewidth=1.4, **style)
  axes.set_title(label)
  axes.set_xlabel("update")
  return figure


def to_svg(figure: Figure, name: str, description: str) -> str:
  """The figure as SVG for the page: its colours are variables, its ids are its own."""
  file = StringIO()
  metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
  figure.savefig(file, format="svg", transparent=True, metadata=metadata)
  root, body = file.getvalue().split("<svg", 1)[1].split(">", 1)
  box = re.search(r'viewBox="[^"]*"', root)[0]
  body = body.replace("xlink:href", "href")
  body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
  body = re.sub(r'(url\(|href=")#', rf"\1#{name}-", body)
  for color, light in LIGHT.items():
    body = body.replace(light, f"var(--{color})")
  return f'<svg role="img" aria-label="{html.escape(description)}" {box}>{body}'
