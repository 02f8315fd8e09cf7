"""The figures of the page: results -> matplotlib figures."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baar_jax.report import spend
from baar_jax.report.frontier import pareto, upper_hull
from baar_jax.report.table import LARGE_FAMILY, SMALL_FAMILY
from baar_jax.report.tables import (
  FAMILIES,
  METRIC_NAMES,
  family_name,
  parameter_text,
  shown_metrics,
)

MUTED = "#5f6875"
DIFFICULTY_COLORS = {"easy": "#82bfa6", "hard": "#dd8a4b", "intractable": "#8e8bb8"}
DASHED = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1}
ABOVE = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 3}
STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "legend.frameon": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#dfe3e8"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "report"}


def draw_all(results: Mapping) -> dict[str, Figure]:
  """Every figure that the results have data for, by file name."""
  metrics = shown_metrics(results)
  with matplotlib.rc_context(STYLE):
    figures = {
      f"frontier_{metric.removesuffix('_percent')}": draw_frontier(results, metric)
      for metric in metrics
    }
    figures["spend"] = draw_spend(results)
    if len(results["hard_budget"]):
      figures["hard_budget"] = draw_hard_budget(results, metrics[0])
    if len(results["ablations"]):
      figures["ablations"] = draw_ablations(results, metrics[0])
    if results["calibration"]:
      figures["calibration"] = draw_calibration(results["calibration"])
    for stage, curves in results["training"].groupby("stage", sort=False):
      figures[f"training_{stage}"] = draw_training(results, curves)
  return figures


def look(family: str) -> tuple[str, str]:
  """Colour and marker."""
  return FAMILIES.get(family, (family, MUTED, "o"))[1:]


def new_axes() -> tuple[Figure, Axes]:
  figure = Figure(figsize=(5.6, 5.0), layout="constrained")
  return figure, figure.subplots()


def draw_frontier(results: Mapping, metric: str) -> Figure:
  """Cost against score: every family's points, its upper hull, and the straight line."""
  rows = results["frontiers"]
  rows = rows[(rows.metric == metric) & rows.lam.isna()]
  groups = dict(zip(rows.family, rows.policies))
  figure, axes = new_axes()
  if results["exact"] and metric == "success_percent":
    cost_usd, success = zip(*results["exact"]["optimum"])
    style = {"color": look("optimum")[0], "label": "exact optimum, all tasks"}
    axes.plot(cost_usd, [100 * share for share in success], ":", **style)
  _draw_groups(axes, results, groups, metric)
  return figure


def draw_ablations(results: Mapping, metric: str) -> Figure:
  """Every ablation's points and hull, and BoPO's points of the same weights and settings."""
  rows = results["ablations"]
  rows = rows[rows.metric == metric]
  bopo = list(dict.fromkeys(name for names in rows.compared_with for name in names))
  figure, axes = new_axes()
  _draw_groups(axes, results, dict(zip(rows.family, rows.policies)) | {"bopo": bopo}, metric)
  return figure


def _draw_groups(
  axes: Axes, results: Mapping, groups: Mapping[str, Sequence[str]], metric: str
) -> None:
  """The boundaries, the line between them, and each family's points and hull, BoPO's on top."""
  table = results["policies"]
  ends = list(zip(*table.loc[[SMALL_FAMILY, LARGE_FAMILY], ["cost_usd", metric]].to_numpy().T))
  axes.plot(*zip(*ends), **DASHED)
  axes.plot(*zip(*ends), "X", color=look(SMALL_FAMILY)[0], zorder=4)
  for family, end, offset in zip((SMALL_FAMILY, LARGE_FAMILY), ends, ((9, -12), (9, 5))):
    axes.annotate(FAMILIES[family][0], end, offset, textcoords="offset points", fontsize=8)
  for family in sorted(groups, key="bopo".__eq__):
    points = table.loc[groups[family]]
    if points.empty:
      continue
    color, marker = look(family)
    clipped_usd = points.cost_usd.clip(ends[0][0], ends[1][0])
    hull = upper_hull([*ends, *zip(clipped_usd, points[metric])])
    axes.plot(*zip(*hull), color=color, linewidth=1.8 if family == "bopo" else 0.9, zorder=2)
    best = points.iloc[pareto(points.cost_usd, points[metric])]
    for p in best.to_dict("records"):
      x, y = p["cost_usd"], p[metric]
      ends_x, ends_y = ([p[f"{n}_low"], p[f"{n}_high"]] for n in ("cost_usd", metric))
      axes.plot(ends_x, [y, y], color=color, linewidth=0.8, alpha=0.4)
      axes.plot([x, x], ends_y, color=color, linewidth=0.8, alpha=0.4)
    axes.plot(points.cost_usd, points[metric], marker, color=color, alpha=0.45, zorder=3)
    label = family_name(results, family)
    axes.plot(best.cost_usd, best[metric], marker, color=color, label=label, zorder=4)
    if family == "bopo":
      _label_points(axes, best, metric)
  axes.set_xlabel("dollars per task (list price)")
  axes.set_ylabel(f"{METRIC_NAMES[metric]}, %")
  handles, labels = axes.get_legend_handles_labels()
  axes.legend(handles[::-1], labels[::-1], **ABOVE, handletextpad=0.4)


def _label_points(axes: Axes, points: pd.DataFrame, metric: str) -> None:
  """Writes the parameters beside the points, leaving out what would lie on another text."""
  axes.figure.draw_without_rendering()  # texts have places once the axes are laid out
  boxes = [text.get_window_extent() for text in axes.texts]
  for p in points.itertuples():
    where = (p.cost_usd, getattr(p, metric)), (-6, 6)
    style = {"textcoords": "offset points", "color": look("bopo")[0], "fontsize": 7.5}
    label = axes.annotate(parameter_text(p.parameters), *where, ha="right", **style)
    box = label.get_window_extent().padded(2)
    if any(map(box.overlaps, boxes)):
      label.remove()
    else:
      boxes.append(box)


def draw_hard_budget(results: Mapping, metric: str) -> Figure:
  """Score under a budget of K LARGE calls, per family, its parameters picked on other tasks."""
  figure, axes = new_axes()
  rows = results["hard_budget"]
  for family, curve in rows[rows.family != SMALL_FAMILY].groupby("family", sort=False):
    color, marker = look(family)
    style = {"color": color, "marker": marker, "linewidth": 1.8 if family == "bopo" else 1.0}
    axes.plot(curve.K, curve[metric], label=family_name(results, family), **style)
  for family in (SMALL_FAMILY, LARGE_FAMILY):
    score = results["policies"][metric][family]
    axes.axhline(score, **DASHED)
    where = (0.01, score), (0, 3), ("axes fraction", "data"), "offset points"
    axes.annotate(FAMILIES[family][0], *where, fontsize=8)
  axes.set_xticks(sorted(set(rows.K)))
  axes.set_xlabel("K, LARGE calls allowed per task")
  axes.set_ylabel(f"{METRIC_NAMES[metric]}, %")
  axes.legend(**ABOVE)
  return figure


def draw_spend(results: Mapping) -> Figure:
  """A stacked bar per family: which part of its dollars and LARGE calls each difficulty takes."""
  rows = results["by_difficulty"]
  families = list(dict.fromkeys(rows.family))
  figure = Figure(figsize=(9.0, 1.1 + 0.32 * len(families)), layout="constrained")
  for axes, column, title in zip(
    figure.subplots(1, 2, sharey=True), ("cost_usd", "large_calls"), ("dollars", "LARGE calls")
  ):
    shares = 100 * rows[rows.column == column].set_index("family")[spend.DIFFICULTIES]
    left = pd.Series(0.0, shares.index)
    for difficulty, color in DIFFICULTY_COLORS.items():
      bars = axes.barh(families, shares[difficulty], 0.72, left, color=color, label=difficulty)
      texts = [f"{share:.0f}" if share >= 7 else "" for share in shares[difficulty]]
      axes.bar_label(bars, texts, label_type="center", color="#101010")
      left += shares[difficulty]
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"share of {title}, %")
    axes.grid(visible=False)
    axes.axhline(0.5, color=MUTED, linewidth=0.8)
  axes.set_yticks(range(len(families)), [family_name(results, family) for family in families])
  axes.invert_yaxis()
  figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
  return figure


def draw_calibration(calibration: Mapping) -> Figure:
  """Reliability of the cascade's scorer: observed against predicted failures, with counts."""
  figure = Figure(figsize=(4.6, 3.8), layout="constrained")
  axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
  bins = pd.DataFrame(calibration["bins"], columns=["predicted", "observed", "count"])
  color, marker = look("cascade")
  axes.plot([0, 100], [0, 100], **DASHED)
  axes.plot(100 * bins.predicted, 100 * bins.observed, f"{marker}-", color=color)
  axes.set_ylabel("observed failures, %")
  counts.bar(100 * bins.predicted, bins["count"], 3, color=color)
  counts.set_xlim(-3, 103)
  counts.set_xlabel("predicted probability of failure, %")
  counts.set_ylabel("decisions")
  return figure


def draw_training(results: Mapping, lines: pd.DataFrame) -> Figure:
  """A stage's quantities over the updates, a line of moving means per router."""
  names = [name for name in spend.CURVES if lines[name].notna().any()]
  panels = _panels(len(names))
  routers = lines.groupby(["ablation", "lam"], sort=False, dropna=False)
  for place, ((ablation, lam), curve) in enumerate(routers):
    color = matplotlib.colormaps["viridis"](0.1 + 0.7 * place / routers.ngroups)
    label = [family_name(results, ablation)] * bool(ablation) + [f"λ = {lam:g}"] * (lam == lam)
    curve = curve.set_index("update").sort_index()
    means = curve[names].rolling(max(1, len(curve) // 12), min_periods=1).mean()
    for axes, name in zip(panels, names):
      style = {"color": color, "linestyle": "--" if ablation else "-"}
      axes.plot(means[name].dropna(), label=", ".join(label), **style)
      axes.set_title(name.replace("_", " "), loc="left")
  figure = panels[0].figure
  figure.supxlabel("update", fontsize=9)
  if routers.ngroups > 1:
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
  return figure


def _panels(count: int) -> list[Axes]:
  """Axes in lines of four."""
  lines = math.ceil(count / 4)
  figure = Figure(figsize=(9.2, 1.7 * lines + 0.6), layout="constrained")
  grid = figure.subplots(lines, 4, squeeze=False, sharex=True).ravel()
  for axes in grid[count:]:
    axes.set_visible(False)
  return list(grid[:count])
