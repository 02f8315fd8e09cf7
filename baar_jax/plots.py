"""The figures of the report: results -> matplotlib figures, one function each."""

import html
import re
from collections.abc import Sequence
from io import StringIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from baar_jax import frontier
from baar_jax.theme import FAMILIES, LIGHT, MARKERS, STYLE, parameter_text, shown_metrics, sr_name

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
  "hard_budget": "Score under a budget of K LARGE calls, per family",
  "spend_dollars": "Share of dollars by difficulty, per policy",
  "spend_large": "Share of LARGE calls by difficulty, per policy",
  "progress": "Share of LARGE along the episode, per policy",
  "costs": "Median cost of SMALL against LARGE, per training task",
}
DASHED = {"color": LIGHT["muted"], "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1}
LABEL_GAP_PT = 16  # a point nearer than this to a labelled one stays unlabelled


def draw_all(results: dict) -> dict[str, Figure]:
  """Every figure that the results have data for, by file name."""
  first, *others = shown_metrics(results)
  with matplotlib.rc_context(STYLE):
    figures = {
      f"frontier_{first}": draw_frontier(results, first, (6.0, 4.2)),
      **{f"frontier_{other}": draw_frontier(results, other, (4.6, 3.8)) for other in others},
      "spend_dollars": draw_spend(results["spend"], "cost_share", "share of dollars"),
      "spend_large": draw_spend(results["spend"], "large_share", "share of LARGE calls"),
      "progress": draw_progress(results["spend"]["policies"]),
    }
    if results["hard_budget"]:
      figures["hard_budget"] = draw_hard_budget(results, first)
    if results["costs"]:
      figures["costs"] = draw_costs(results["costs"])
    for stage in ("sft", "bopo"):
      series = [s for s in results["training"] if s["stage"] == stage]
      for name, label in CURVES.items():
        if any(v is not None for s in series for v in s["values"].get(name, ())):
          figures[f"{stage}_{name}"] = draw_curve(series, name, label)
  return figures


def description(name: str) -> str:
  """The figure in a few words, for a reader that cannot see it; the page's tables say the rest."""
  stage, _, rest = name.partition("_")
  if stage in ("sft", "bopo"):
    return f"{FAMILIES[stage]} training curve: {CURVES[rest]}"
  return DESCRIPTIONS[name]


def draw_frontier(results: dict, metric: str, size: tuple[float, float]) -> Figure:
  """Cost against score: every family's points, its upper hull, and the straight line."""
  figure, axes = _axes(size)
  policies = results["policies"]
  soft = {p["family"]: p for p in policies if p["call_budget"] is None}
  ends = [_point(soft[name], metric) for name in ("always-small", "always-large")]
  axes.plot(*zip(*ends), **DASHED)
  if "exact" in results and metric == "success":
    costs, scores = zip(*results["exact"]["optimum"])
    label = "exact optimum, all tasks"
    percents = [100 * score for score in scores]
    axes.plot(costs, percents, color=LIGHT["optimum"], linestyle=":", linewidth=1.6, label=label)
  # BoPO last, so that it lies on top.
  for family in sorted(results["frontiers"], key="bopo".__eq__):
    front, color = results["frontiers"][family], LIGHT.get(family, LIGHT["muted"])
    own = [policies[i] for i in front["policies"]]
    best = [policies[i] for i in front["pareto"][metric]]
    width = 1.8 if family == "bopo" else 0.9
    hull = _hull([_point(p, metric) for p in own], ends)
    axes.plot(*zip(*hull), color=color, linewidth=width, alpha=0.9, zorder=2)
    _draw_points(axes, own, best, metric, color, MARKERS.get(family, "o"))
    axes.lines[-1].set_label(FAMILIES.get(family, family))
    if family == "bopo":
      _label_points(axes, best, metric, color)
  boundaries = [soft[name] for name in ("always-small", "always-large")]
  _draw_points(axes, boundaries, boundaries, metric, LIGHT["small"], "X")
  for policy, place, align in zip(boundaries, ((9, -4), (-4, -14)), ("left", "right")):
    text, point = FAMILIES[policy["family"]], _point(policy, metric)
    axes.annotate(text, point, place, textcoords="offset points", ha=align, fontsize=8)
  axes.set_xlabel("dollars per task (list price)")
  axes.set_ylabel(sr_name(metric))
  handles, labels = axes.get_legend_handles_labels()
  axes.legend(handles[::-1], labels[::-1], loc="lower right", handletextpad=0.4, labelspacing=0.35)
  return figure


def draw_hard_budget(results: dict, metric: str) -> Figure:
  """Score under a budget of K LARGE calls: each family at its best parameters for that K."""
  figure, axes = _axes((4.6, 3.8))
  best: dict[str, dict[int, float]] = {}
  for row in results["hard_budget"]:
    for budget, cell in row["budgets"].items():
      value, scores = cell[f"{metric}_percent"], best.setdefault(row["family"], {})
      scores[int(budget)] = max(value, scores.get(int(budget), value))
  for family, scores in best.items():
    color, budgets = LIGHT.get(family, LIGHT["muted"]), sorted(scores)
    style = {"marker": MARKERS.get(family, "o"), "linewidth": 1.8 if family == "bopo" else 1.0}
    label = FAMILIES.get(family, family)
    axes.plot(budgets, [scores[K] for K in budgets], color=color, label=label, **style)
  for name in ("always-small", "always-large"):
    value = next(p[f"{metric}_percent"] for p in results["policies"] if p["family"] == name)
    axes.axhline(value, **DASHED)
    axes.annotate(
      FAMILIES[name], (0.01, value), (0, 3), ("axes fraction", "data"), "offset points", fontsize=8
    )
  axes.set_xticks(sorted({K for scores in best.values() for K in scores}))
  axes.set_xlabel("K, LARGE calls allowed per task")
  axes.set_ylabel(sr_name(metric))
  axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
  return figure


def draw_spend(spend: dict, share: str, label: str) -> Figure:
  """One stacked bar per policy: what part of its spend falls on each difficulty."""
  bars = [("task mix", spend["task_mix"])]
  for row in spend["policies"]:
    words = FAMILIES.get(row["family"], row["family"]).split(" (")[0]
    bars.append((f"{words} {parameter_text(row['parameters'])}".strip(), row[share]))
  figure, axes = _axes((4.6, 0.9 + 0.34 * len(bars)))
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


def draw_progress(rows: Sequence[dict]) -> Figure:
  """Share of LARGE among the decisions of each tenth of an episode."""
  figure, axes = _axes((4.6, 3.8))
  for row in rows:
    shares, family = row["large_share_by_progress"], row["family"]
    known = [
      (100 * (i + 0.5) / len(shares), 100 * s) for i, s in enumerate(shares) if s is not None
    ]
    if family.startswith("always-"):
      continue
    style = {"marker": MARKERS.get(family, "o"), "markersize": 4}
    width = 1.8 if family == "bopo" else 1.0
    label = f"{FAMILIES.get(family, family)} {parameter_text(row['parameters'])}"
    color = LIGHT.get(family, LIGHT["muted"])
    axes.plot(*zip(*known), color=color, linewidth=width, label=label, **style)
  axes.set_xlim(0, 100)
  axes.set_ylim(bottom=0)
  axes.set_xlabel("progress through the episode, % of its steps")
  axes.set_ylabel("LARGE, % of decisions")
  axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
  return figure


def draw_costs(costs: Sequence[dict]) -> Figure:
  """Median dollars of SMALL against LARGE per training task; above the diagonal is inverted."""
  figure, axes = _axes((4.6, 3.8))
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
  axes.legend(loc="lower right")
  return figure


def curve_color(lam: float | None, place: int, curves: int) -> str:
  """Of the place-th of a stage's curves."""
  if lam is None:
    return LIGHT["sft"]
  return to_hex(matplotlib.colormaps["viridis"](0.2 + 0.65 * place / curves))


def draw_curve(series: Sequence[dict], name: str, label: str) -> Figure:
  """One quantity over the updates, a line per lam: raw values faint, their moving mean strong."""
  figure, axes = _axes((3.2, 2.2))
  for i, s in enumerate(series):
    known = [(u, v) for u, v in zip(s["update"], s["values"].get(name, ())) if v is not None]
    if not known:
      continue
    color = curve_color(s["lam"], i, len(series))
    updates, values = zip(*known)
    window = max(1, len(values) // 12)
    parts = [values[max(0, j - window + 1) : j + 1] for j in range(len(values))]
    axes.plot(updates, values, color=color, linewidth=0.6, alpha=0.3)
    means = [sum(part) / len(part) for part in parts]
    axes.plot(updates, means, color=color, linewidth=1.4)
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


def _axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
  figure = Figure(figsize=size, layout="constrained")
  return figure, figure.subplots()


def _point(policy: dict, metric: str) -> tuple[float, float]:
  return policy["cost_usd"], policy[f"{metric}_percent"]


def _hull(points: list[tuple], ends: list[tuple]) -> list[tuple[float, float]]:
  """What `frontier.area` measures: costs clipped between the boundaries'."""
  low, high = ends[0][0], ends[1][0]
  return frontier.upper_hull([*ends, *((min(max(x, low), high), y) for x, y in points)])


def _draw_points(
  axes: Axes,
  policies: Sequence[dict],
  best: Sequence[dict],
  metric: str,
  color: str,
  marker: str,
) -> None:
  """All points as one line of markers; intervals for the best only, where many lie close."""
  for p in best:
    x, y = _point(p, metric)
    axes.plot(p["cost_interval_usd"], [y, y], color=color, linewidth=0.8, alpha=0.4)
    axes.plot([x, x], p[f"{metric}_interval"], color=color, linewidth=0.8, alpha=0.4)
  points = [_point(p, metric) for p in policies]
  axes.plot(*zip(*points), marker, color=color, markersize=5.5, zorder=3, alpha=0.45)
  axes.plot(*zip(*(_point(p, metric) for p in best)), marker, color=color, markersize=6, zorder=4)


def _label_points(axes: Axes, policies: Sequence[dict], metric: str, color: str) -> None:
  """Writes the parameters beside the points, leaving out what would lie on another label."""
  written: list[tuple[float, float]] = []
  axes.figure.draw_without_rendering()  # the places of points are known once the axes are laid out
  per_pt = axes.figure.dpi / 72
  for p in policies:
    x, y = axes.transData.transform(_point(p, metric)) / per_pt
    if all(abs(x - u) > 2 * LABEL_GAP_PT or abs(y - v) > LABEL_GAP_PT for u, v in written):
      written.append((x, y))
      text, point = parameter_text(p["parameters"]), _point(p, metric)
      offset = {"xytext": (-6, 6), "textcoords": "offset points", "ha": "right"}
      axes.annotate(text, point, color=color, fontsize=7.5, **offset)
