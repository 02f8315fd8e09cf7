"""The report: all results as one dict of tables, and the files that show them, first the page."""

import base64
import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baar_jax.config import Config
from baar_jax.llms.calls import Spent
from baar_jax.llms.endpoints import endpoints
from baar_jax.llms.prices import prices_of
from baar_jax.report import compare, texts
from baar_jax.report.compare import choose, main_family
from baar_jax.report.optimum import exact_frontier
from baar_jax.report.table import CURVES, Evaluation, load, run_ledger
from baar_jax.report.texts import FAMILIES, METRIC_NAMES, family_name, shown_metrics
from baar_jax.rollout.policies import ALWAYS_SMALL, BOUNDARIES, Entry
from baar_jax.store import Store
from baar_jax.train.dataset import load_profiles, measure_robustness

MUTED = "#5f6875"
ABOVE = {"loc": "outside upper center", "ncols": 3}  # the place of a legend
STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "legend.frameon": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#dfe3e8"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}


def compute_results(
  store: Store,
  entries: Sequence[Entry],
  config: Config,
  spent: Spent | None = None,
  forecast: Mapping | None = None,
  own_tasks: bool = False,
  curves: pd.DataFrame | None = None,
) -> dict:
  """The results of the evaluation, tables and values, by name.

  All but "dev" are of test and of what dev has chosen. *_percent is in percent, *_share in [0, 1];
  *_low and *_high are ends of 95 % intervals; NaN or None is what cannot be computed. `spent` are
  the recorded calls of API models, `forecast` what the stage kept; `own_tasks` were generated here,
  `curves` are as of `read_curves`.
  Raises ValueError where the profile or an entry's episodes are missing.
  """
  profiles = load_profiles(store, config)  # a run without a profile is told to make one first
  choice = choose(store, entries, config)
  shown = [entry for entry in entries if entry.policy in choice.policies]
  data = load(store, shown, config, "test")
  table = compare.policies(data)
  headline = compare.headline(data, choice, table)
  difficulty = compare.difficulties(data, config.profile.easy_rate)
  results = {
    "run": _facts(config, data) | {"train_tasks": len(profiles), "own_tasks": own_tasks},
    "dev": choice.dev,
    "policies": table,
    "headline": headline,
    "frontiers": compare.frontiers(data, choice),
    "ablations": compare.ablations(data, choice),
    "hard_budget": compare.hard_budgets(data, table),
    "by_difficulty": compare.by_difficulty(data, choice.typical, difficulty),
    "latency": compare.latency(data, choice.typical),
    "robustness": measure_robustness(store, config),
    "forecast": forecast,
    "training": pd.DataFrame(columns=["stage"]) if curves is None else curves,
    "ledger": run_ledger(store.table(), spent, len(config.models.names)),
    "exact": exact_frontier(config),
    "episodes": showcase(store, data, headline["policy"], difficulty) if headline else None,
  }
  return results | {"paper": texts.beside_paper(results)}


def _facts(config: Config, data: Evaluation) -> dict:
  """What was run: environment, models, router, and how many tasks and seeds."""
  models, scripted = config.models, config.models.kind == "scripted"
  hosts = [] if scripted else [endpoint.host for endpoint in endpoints(models)]
  prices = map(dataclasses.asdict, prices_of(models.names, models.prices))
  return {
    "name": config.name,
    "environment": config.env.kind.rpartition(":")[2],  # the class of one of the user's own
    "models": {"kind": models.kind, "names": list(models.names), "hosts": hosts},
    "prices_usd_per_million": dict(zip(models.names, prices)),
    "router": dataclasses.asdict(config.router),
    "test_tasks": len(data.tasks),
    "seeds": config.evaluate.seeds,
    "profile_trials": config.profile.trials,
    "train_seeds": config.train_seeds,
    "main": main_family(data.entries.family),
    "left_out_episodes": data.left_out,
    # Families of which a scripted run evaluates something else under their name.
    "stand_ins": ["zero-shot"] if scripted and "zero-shot" in set(data.entries.family) else [],
    "sr": data.sr,
  }


def showcase(store: Store, data: Evaluation, policy: str, difficulty: pd.Series) -> pd.DataFrame:
  """A policy's first episode, by task and seed, of each difficulty and outcome."""
  descriptions = {task.id: task.description for task in store.tasks("test")}
  stored = {(episode.task_id, episode.seed): episode for episode in store.episodes(policy)}
  rows = data.episodes[data.episodes.policy == policy]
  rows = rows.assign(difficulty=rows.task_id.map(difficulty), text=rows.task_id.map(descriptions))
  rows = rows.sort_values("difficulty", kind="stable").drop_duplicates(["difficulty", "success"])
  rows["episode"] = [stored[key] for key in zip(rows.task_id, rows.seed)]
  return rows[["difficulty", "success", "text", "episode"]]


def write(results: Mapping, directory: Path) -> Path:
  """Writes index.html, PNGs, results.json and hard_budget.*; returns the page's path."""
  directory.mkdir(parents=True, exist_ok=True)
  files = {"results.json": json.dumps(plain(results), indent=1, allow_nan=False)}
  if len(results["hard_budget"]):
    table = texts.hard_budget(results)
    narrow = table.loc[:, table.columns.isin(["Family", "Candidates", "SR", "Use%"], level=1)]
    files["hard_budget.md"] = texts.to_markdown(narrow)
    files["hard_budget.tex"] = texts.to_latex(narrow)
  images = {}
  for name, figure in draw_all(results).items():
    file = directory / f"{name}.png"
    figure.savefig(file, dpi=144)
    images[name] = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
  files["index.html"] = render(results, images)
  for name, text in files.items():
    (directory / name).write_text(text, encoding="utf-8")
  return directory / "index.html"


def render(results: Mapping, images: Mapping[str, str]) -> str:
  """The page, with images by name as URLs. Whatever the results hold, the template escapes it."""
  files, clean = jinja2.FileSystemLoader(Path(__file__).parent), texts.clean
  jinja = jinja2.Environment(loader=files, autoescape=True, trim_blocks=True, finalize=clean)
  context = {"results": results, "texts": texts, "compare": compare, "exp": np.exp}
  page = jinja.get_template("page.html.j2").render(context, images=images)
  return page.replace(" %", "\u00a0%")


def plain(value):
  """A value as lists and dicts that strict JSON can hold: tables as rows, NaN as None."""
  if isinstance(value, pd.DataFrame):
    value = (value.reset_index() if value.index.name else value).to_dict("records")
  elif dataclasses.is_dataclass(value):
    value = dataclasses.asdict(value)
  if isinstance(value, Mapping):
    return {key: plain(item) for key, item in value.items()}
  if isinstance(value, Collection) and not isinstance(value, str):
    return [plain(item) for item in value]
  value = value.item() if hasattr(value, "item") else value  # a number of NumPy's
  wrong = isinstance(value, float) and not math.isfinite(value)
  return None if wrong or value is pd.NA else value


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
      figures[f"training_{stage}"] = draw_training(curves)
  return figures


def family_style(results: Mapping, family: str) -> dict:
  """Colour, marker, label and width of a family's line; the main family's is thick."""
  _, color, marker = FAMILIES.get(family, (family, MUTED, "o"))
  style = {"color": color, "marker": marker, "label": family_name(results, family)}
  thick = family == results["run"]["main"]
  return style | {"linewidth": 1.0 + 1.4 * thick, "zorder": 2 + thick}


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
    axes.plot(*end, **style | {"zorder": 4})
  for row in rows[rows.metric == metric].itertuples():
    points, style = policies.loc[row.policies], family_style(results, row.family)
    line = np.vstack([ends[:1], points[["cost_usd", metric]], ends[1:]])
    axes.plot(*line.T, **style | {"marker": "", "label": None})
    faint = {"color": style["color"], "linewidth": 0.8, "alpha": 0.4}
    axes.hlines(points[metric], points.cost_usd_low, points.cost_usd_high, **faint)
    axes.vlines(points.cost_usd, points[f"{metric}_low"], points[f"{metric}_high"], **faint)
    axes.plot(points.cost_usd, points[metric], **style | {"linestyle": "", "zorder": 4})
  handles, labels = axes.get_legend_handles_labels()
  axes.figure.legend(handles[::-1], labels[::-1], **ABOVE)
  return axes.figure


def draw_hard_budget(results: Mapping, metric: str) -> Figure:
  """Score under a budget of K LARGE calls, a line per family."""
  axes, rows = new_axes("K, LARGE calls allowed per task", metric), results["hard_budget"]
  for family, curve in rows[rows.family != ALWAYS_SMALL].groupby("family", sort=False):
    axes.plot(curve.K, curve[metric], **family_style(results, family))
  for family, dashes in zip(BOUNDARIES, (":", "--")):
    style = {"color": MUTED, "linestyle": dashes, "label": FAMILIES[family][0]}
    axes.axhline(results["policies"][metric][family], **style)
  axes.set_xticks(sorted(set(rows.K)))
  axes.figure.legend(**ABOVE)
  return axes.figure


def draw_training(curves: pd.DataFrame) -> Figure:
  """What a stage has logged over its updates, a line of moving means per training."""
  names = [name for name in CURVES if curves[name].notna().any()]
  figure = Figure(figsize=(9.2, 2.4), layout="constrained")
  panels = figure.subplots(1, max(1, len(names)), squeeze=False)[0]
  for axes, name in zip(panels, names):
    for training, line in curves[curves[name].notna()].groupby("training", sort=False):
      means = line[name].rolling(max(1, len(line) // 12), min_periods=1).mean()
      axes.plot(line["update"], means, label=training)
    axes.set_title(name.replace("_", " "), loc="left")
  if curves.training.nunique() > 1:
    figure.legend(*panels[0].get_legend_handles_labels(), **ABOVE)
  return figure
