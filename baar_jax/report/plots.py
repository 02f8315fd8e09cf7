"""The figures of the page: results -> matplotlib figures."""

import math
from collections.abc import Mapping

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baar_jax.report.table import CURVES
from baar_jax.report.texts import FAMILIES, METRIC_NAMES, family_name, shown_metrics
from baar_jax.rollout.entries import ALWAYS_SMALL, BOUNDARIES

MUTED = "#5f6875"
ABOVE = {"loc": "outside upper center", "ncols": 3}  # the place of a legend
STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "legend.frameon": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#dfe3e8"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}


def draw_all(results: Mapping) -> dict[str, Figure]:
  """Every figure that the results have data for, by file name."""
  metrics, figures = shown_metrics(results), {}
  with matplotlib.rc_context(STYLE):
    for metric in metrics:
      figures[f"frontier_{metric.removesuffix('_percent')}"] = draw_frontier(results, metric)
    if len(results["hard_budget"]):
      figures["hard_budget"] = draw_hard_budget(results, metrics[0])
    if len(results["ablations"]):
      figures["ablations"] = draw_frontier(results, metrics[0], "ablations")
    for stage, curves in results["training"].groupby("stage", sort=False):
      figures[f"training_{stage}"] = draw_training(results, curves)
  return figures


def family_style(results: Mapping, family: str) -> dict[str, str]:
  _, color, marker = FAMILIES.get(family, (family, MUTED, "o"))
  return {"color": color, "marker": marker, "label": family_name(results, family)}


def new_axes(x: str, metric: str) -> Axes:
  axes = Figure(figsize=(5.6, 5.0), layout="constrained").subplots()
  axes.set(xlabel=x, ylabel=f"{METRIC_NAMES[metric]}, %")
  return axes


def draw_frontier(results: Mapping, metric: str, table="frontiers") -> Figure:
  """Cost against score: the line between the boundaries, and each family's along the points that
  dev has chosen, with their intervals."""
  policies, rows = results["policies"], results[table]
  axes = new_axes("dollars per task (list price)", metric)
  if metric == "success_percent" and results["exact"]:
    usd, share = np.array(results["exact"]["optimum"]).T
    axes.plot(usd, 100 * share, ":", color=MUTED, label="exact optimum, all tasks")
  ends = policies.loc[[*BOUNDARIES], ["cost_usd", metric]].to_numpy()
  axes.plot(*ends.T, "--", color=MUTED, linewidth=0.9, zorder=1)
  for family, end, below in zip(BOUNDARIES, ends, (-12, 5)):
    style = family_style(results, family)
    axes.annotate(style.pop("label"), end, (9, below), textcoords="offset points", fontsize=8)
    axes.plot(*end, **style, zorder=4)
  for row in rows[rows.metric == metric].itertuples():
    points, style = policies.loc[row.policies], family_style(results, row.family)
    line = np.vstack([ends[:1], points[["cost_usd", metric]], ends[1:]])
    thick = row.family == results["run"]["main"]
    axes.plot(*line.T, color=style["color"], linewidth=1.0 + 1.4 * thick, zorder=2 + thick)
    faint = {"color": style["color"], "linewidth": 0.8, "alpha": 0.4}
    axes.hlines(points[metric], points.cost_usd_low, points.cost_usd_high, **faint)
    axes.vlines(points.cost_usd, points[f"{metric}_low"], points[f"{metric}_high"], **faint)
    axes.plot(points.cost_usd, points[metric], **style, linestyle="", zorder=4)
  handles, labels = axes.get_legend_handles_labels()
  axes.figure.legend(handles[::-1], labels[::-1], **ABOVE)
  return axes.figure


def draw_hard_budget(results: Mapping, metric: str) -> Figure:
  """Score under a budget of K LARGE calls, a line per family."""
  axes, rows = new_axes("K, LARGE calls allowed per task", metric), results["hard_budget"]
  for family, curve in rows[rows.family != ALWAYS_SMALL].groupby("family", sort=False):
    thick = family == results["run"]["main"]
    style = family_style(results, family) | {"linewidth": 1.0 + 1.4 * thick, "zorder": 2 + thick}
    axes.plot(curve.K, curve[metric], **style)
  for family, dashes in zip(BOUNDARIES, (":", "--")):
    style = {"color": MUTED, "linestyle": dashes, "label": FAMILIES[family][0]}
    axes.axhline(results["policies"][metric][family], **style)
  axes.set_xticks(sorted(set(rows.K)))
  axes.figure.legend(**ABOVE)
  return axes.figure


def draw_training(results: Mapping, lines: pd.DataFrame) -> Figure:
  """A stage's quantities over the updates, a line of moving means per router."""
  names = [name for name in CURVES if lines[name].notna().any()]
  routers = lines.ablation.map(lambda name: f"{family_name(results, name)} ")
  routers += lines.lam.map(lambda lam: f"λ = {lam:g}" if lam == lam else "")
  routers += lines.learning_rate.map(lambda rate: f"rate {rate:g}" if rate == rate else "")
  curves = lines.assign(router=routers).pivot(index="update", columns="router", values=names)
  means = curves.rolling(max(1, len(curves) // 12), min_periods=1).mean()
  figure = Figure(figsize=(9.2, 4.0 if len(names) > 4 else 2.3), layout="constrained")
  panels = figure.subplots(math.ceil(len(names) / 4), 4, squeeze=False, sharex=True).ravel()
  for axes, name in zip(panels, names):
    means[name].plot(ax=axes, legend=False, colormap="viridis", xlabel="update")
    axes.set_title(name.replace("_", " "), loc="left")
  for axes in panels[len(names) :]:
    axes.set_visible(False)
  if routers.nunique() > 1:
    figure.legend(*panels[0].get_legend_handles_labels(), **ABOVE)
  return figure
