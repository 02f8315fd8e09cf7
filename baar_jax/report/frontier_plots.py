"""Figures of cost against score and of score under budgets: results -> matplotlib figures."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baar_jax.report import frontier
from baar_jax.report.cells import family_name
from baar_jax.report.samples import LARGE_FAMILY, SMALL_FAMILY
from baar_jax.report.theme import FAMILIES, LIGHT, MARKERS, parameter_text, sr_name

DASHED = {"color": LIGHT["muted"], "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1}
INSIDE = 5  # a legend of more families is written above the axes


def draw_frontier(results: dict, metric: str, size: tuple[float, float]) -> Figure:
  """Cost against score: every family's points, its upper hull, and the straight line."""
  figure, axes = new_axes(size)
  policies = results["policies"]
  ends = _draw_boundaries(axes, results, metric)
  if "exact" in results and metric == "success":
    costs, scores = zip(*results["exact"]["optimum"])
    label = "exact optimum, all tasks"
    percents = [100 * score for score in scores]
    axes.plot(costs, percents, color=LIGHT["optimum"], linestyle=":", linewidth=1.6, label=label)
  # BoPO last, so that it lies on top.
  for family in sorted(results["frontiers"], key="bopo".__eq__):
    front = results["frontiers"][family]
    own = [policies[i] for i in front["policies"]]
    best = [policies[i] for i in front["pareto"][metric]]
    _draw_family(axes, results, family, own, best, metric, ends)
    if family == "bopo":
      _label_points(axes, best, metric, LIGHT["bopo"])
  _finish(axes, metric)
  return figure


def draw_ablations(results: dict, metric: str) -> Figure:
  """Every ablation's points and hull, and BoPO's points of the same weights and settings."""
  figure, axes = new_axes((4.6, 4.0))
  policies, rows = results["policies"], results["ablations"]["rows"]
  ends = _draw_boundaries(axes, results, metric)
  for row in rows:
    own = [policies[i] for i in row["policies"]]
    if own:
      _draw_family(axes, results, row["family"], own, own, metric, ends)
  bopo = [policies[i] for i in dict.fromkeys(i for row in rows for i in row["bopo_policies"])]
  if bopo:
    _draw_family(axes, results, "bopo", bopo, bopo, metric, ends)
  _finish(axes, metric)
  return figure


def draw_hard_budget(results: dict, metric: str) -> Figure:
  """Score under a budget of K LARGE calls, per family, its parameters picked on other tasks."""
  figure, axes = new_axes((4.6, 3.8))
  curves: dict[str, dict[int, float]] = {}
  for budget, best in results["hard_budget_best"].items():
    for family, row in best["families"].items():
      if family != SMALL_FAMILY:  # a line of its own
        curves.setdefault(family, {})[int(budget)] = row[f"{metric}_percent"]
  for family, scores in curves.items():
    color, budgets = LIGHT.get(family, LIGHT["muted"]), sorted(scores)
    style = {"marker": MARKERS.get(family, "o"), "linewidth": 1.8 if family == "bopo" else 1.0}
    label = family_name(results, family)
    axes.plot(budgets, [scores[K] for K in budgets], color=color, label=label, **style)
  for name in (SMALL_FAMILY, LARGE_FAMILY):
    value = next(p[f"{metric}_percent"] for p in results["policies"] if p["family"] == name)
    axes.axhline(value, **DASHED)
    axes.annotate(
      FAMILIES[name], (0.01, value), (0, 3), ("axes fraction", "data"), "offset points", fontsize=8
    )
  axes.set_xticks(sorted(map(int, results["hard_budget_best"])))
  axes.set_xlabel("K, LARGE calls allowed per task")
  axes.set_ylabel(sr_name(metric))
  legend_above(axes, 3)
  return figure


def new_axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
  figure = Figure(figsize=size, layout="constrained")
  return figure, figure.subplots()


def legend_above(axes: Axes, columns: int) -> None:
  axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)


def _draw_boundaries(axes: Axes, results: dict, metric: str) -> list[tuple[float, float]]:
  """Always-SMALL and always-LARGE and the line between them; returns their points."""
  soft = {p["family"]: p for p in results["policies"] if p["call_budget"] is None}
  boundaries = [soft[name] for name in ("always-small", "always-large")]
  ends = [_point(policy, metric) for policy in boundaries]
  axes.plot(*zip(*ends), **DASHED)
  _draw_points(axes, boundaries, boundaries, metric, LIGHT["small"], "X")
  for policy, place in zip(boundaries, ((9, -12), (9, 5))):
    text, point = FAMILIES[policy["family"]], _point(policy, metric)
    axes.annotate(text, point, place, textcoords="offset points", fontsize=8)
  return ends


def _draw_family(
  axes: Axes,
  results: dict,
  family: str,
  own: Sequence[dict],
  best: Sequence[dict],
  metric: str,
  ends: list[tuple[float, float]],
) -> None:
  """A family's points and hull, and its line of the legend."""
  color, width = LIGHT.get(family, LIGHT["muted"]), 1.8 if family == "bopo" else 0.9
  hull = _hull([_point(p, metric) for p in own], ends)
  axes.plot(*zip(*hull), color=color, linewidth=width, alpha=0.9, zorder=2)
  _draw_points(axes, own, best, metric, color, MARKERS.get(family, "o"))
  axes.lines[-1].set_label(family_name(results, family))


def _finish(axes: Axes, metric: str) -> None:
  """Labels, and the legend: within the axes where few families leave room."""
  axes.set_xlabel("dollars per task (list price)")
  axes.set_ylabel(sr_name(metric))
  handles, labels = axes.get_legend_handles_labels()
  style = {"handletextpad": 0.4, "labelspacing": 0.35}
  place = {"loc": "lower right"}
  if len(labels) > INSIDE:
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 3}
  axes.legend(handles[::-1], labels[::-1], **place, **style)


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
  """Writes the parameters beside the points, leaving out what would lie on another text."""
  axes.figure.draw_without_rendering()  # the places of texts are known once the axes are laid out
  written = [text.get_window_extent() for text in axes.texts]
  offset = {"xytext": (-6, 6), "textcoords": "offset points", "ha": "right"}
  for p in policies:
    text = parameter_text(p["parameters"])
    label = axes.annotate(text, _point(p, metric), color=color, fontsize=7.5, **offset)
    box = label.get_window_extent().padded(2)
    if any(map(box.overlaps, written)):
      label.remove()
    else:
      written.append(box)
