"""The report: all results as one dict of tables, and the files that show them, first the page."""

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baar_jax.config import ABLATIONS, Config
from baar_jax.envs.table import load
from baar_jax.llms.calls import read_spent
from baar_jax.llms.endpoints import endpoints
from baar_jax.llms.prices import prices_of
from baar_jax.report import compare, texts
from baar_jax.report.optimum import exact_frontier
from baar_jax.report.table import COMPARED, CURVES, Evaluation, load_split, read_curves, run_ledger
from baar_jax.report.texts import FAMILIES, METRIC_NAMES, shown_metrics
from baar_jax.rollout.policies import BOUNDARIES, Entry
from baar_jax.store import Store
from baar_jax.train.dataset import load_profiles, measure_robustness

MUTED = "#5f6875"
ABOVE = {"loc": "outside upper center", "ncols": 3}  # the place of a legend
STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "legend.frameon": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#dfe3e8"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}


def compute_results(
  store: Store, entries: Sequence[Entry], config: Config, directory: Path
) -> dict:
  """The results of the evaluation, tables and values, by name.

  All but "dev" are of test and of what dev has chosen. *_percent is in percent, *_share in [0, 1];
  *_low and *_high are ends of 95 % intervals; NaN or None is what cannot be computed. `directory`
  is the run's. Raises ValueError where the profile or an entry's episodes are missing.
  """
  profiles = load_profiles(store, config, "train")  # a run without any is told to make them first
  choice = compare.choose_on_dev(store, entries, config)
  data = load_split(store, choice.entries, config, "test")
  table, headline = compare.tabulate_policies(data), choice.headline
  if headline and table.loc[headline, ["cost_gap_share", "success_gap_share"]].isna().any():
    headline = None  # there is no gap on test
  families = [e.family for e in entries if e.family not in (*BOUNDARIES, *ABLATIONS)]
  ablations = ["sft", *ABLATIONS] if config.baselines.ablations else []
  models, is_chat = len(config.models.names), config.models.kind == "chat"
  spent = read_spent(directory, models + 1) if is_chat else None  # with the judge
  episodes = store.episodes(headline or BOUNDARIES[0])
  results = {
    "config": config,
    "run": _facts(config, data) | {"main": choice.main, "train_tasks": len(profiles)},
    "dev": choice.dev,
    "policies": table,
    "headline": headline,
    "frontiers": compare.areas(data, choice, choice.main, families),
    "ablations": compare.areas(data, choice, COMPARED, ablations),
    "hard_budget": compare.hard_budgets(data, table, choice),
    "by_difficulty": compare.by_difficulty(data, choice.typical, config.profile.easy_rate),
    "latency": compare.latency(data, choice.typical),
    "robustness": measure_robustness(store, config),
    "forecast": _read_forecast(directory / compare.FORECAST, data, choice.best),
    "training": read_curves(directory / "metrics.jsonl"),
    "ledger": run_ledger(store.table(), spent, models),
    "exact": exact_frontier(config),
    "episodes": [episode for episode in episodes if episode.task_id in data.tasks][:3],
  }
  return results | {"paper": texts.beside_paper(results)}


def _facts(config: Config, data: Evaluation) -> dict:
  """What was run, in words and numbers that are not in the config."""
  env, models = config.env, config.models
  hosts = dict.fromkeys(endpoint.host for endpoint in endpoints(models))
  engine = load(env.kind).engine
  own_tasks = engine is not None and not engine.named_data(env.options.get("data", ""))
  is_scripted = models.kind == "scripted"
  return {
    "environment": env.kind.rpartition(":")[2],  # the class of one of the user's own
    "own_tasks": own_tasks,  # generated here, not the benchmark's
    "models": "scripted models" if is_scripted else f"models at {' and '.join(hosts)}",
    "prices_usd_per_million": dict(zip(models.names, prices_of(models.names, models.prices))),
    "test_tasks": len(data.tasks),
    "left_out_episodes": data.left_out,
    "sr": data.sr,
  }


def _read_forecast(path: Path, data: Evaluation, best: Sequence[str]) -> dict | None:
  if not path.exists():
    return None
  try:
    score_NxK = pd.read_csv(path, index_col=0, dtype=str).astype(float).loc[data.tasks]
  except (ValueError, KeyError):
    raise ValueError(f"{path} cannot be read: run --stage=forecast again") from None
  return compare.forecasts(data, score_NxK, best)


def write(results: Mapping, directory: Path) -> Path:
  """Writes index.html, PNGs, results.json and hard_budget.*; returns the page's path."""
  directory.mkdir(parents=True, exist_ok=True)
  files = {"results.json": json.dumps(plain(results), indent=1, allow_nan=False)}
  if len(results["hard_budget"]):
    table = texts.hard_budget(results)
    narrow = table.loc[:, table.columns.isin(["Family", "SR", "Use%"], level=1)]
    files["hard_budget.md"] = texts.to_markdown(narrow)
    files["hard_budget.tex"] = texts.to_latex(narrow)
  images = {}
  for name, figure in draw_all(results).items():
    file = directory / f"{name}.png"
    figure.savefig(file, dpi=144)
    images[name] = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
  loader, clean = jinja2.FileSystemLoader(Path(__file__).parent), texts.clean
  jinja = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, finalize=clean)
  page = jinja.get_template("page.html.j2").render(results=results, texts=texts, images=images)
  files["index.html"] = page.replace(" %", "\u00a0%")
  for name, text in files.items():
    (directory / name).write_text(text, encoding="utf-8")
  return directory / "index.html"


def plain(value):
  """A value as lists and dicts that strict JSON can hold: tables as rows, NaN as None."""

  def convert(item):
    if isinstance(item, pd.DataFrame):
      return (item.reset_index() if item.index.name else item).to_dict("records")
    return dataclasses.asdict(item) if dataclasses.is_dataclass(item) else item.item()  # NumPy's

  return json.loads(json.dumps(value, default=convert), parse_constant=lambda _: None)


def draw_all(results: Mapping) -> dict[str, Figure]:
  """Every figure that the results have data for, by file name."""
  metrics, figures = shown_metrics(results), {}
  with matplotlib.rc_context(STYLE):
    for metric in metrics:
      figures[f"frontier_{metric.removesuffix('_percent')}"] = draw_frontier(results, metric)
    if len(results["hard_budget"]):
      figures["hard_budget"] = draw_hard_budget(results, metrics[0])
    for stage, curves in results["training"].groupby("stage", sort=False):
      figures[f"training_{stage}"] = draw_training(curves)
  return figures


def family_style(results: Mapping, family: str) -> dict:
  """Colour, marker, label and width of a family's line; the main family's is thick."""
  label, color, marker = FAMILIES[family]
  thick = family == results["run"]["main"]
  style = {"color": color, "marker": marker, "label": label}
  return style | {"linewidth": 1.0 + 1.4 * thick, "zorder": 2 + thick}


def new_axes(x: str, metric: str) -> Axes:
  axes = Figure(figsize=(5.6, 5.0), layout="constrained").subplots()
  axes.set(xlabel=x, ylabel=f"{METRIC_NAMES[metric]}, %")
  return axes


def draw_frontier(results: Mapping, metric: str) -> Figure:
  """Cost against score: the line between the boundaries, and each family's along the points that
  dev has chosen, with their intervals."""
  policies, rows = results["policies"], results["frontiers"]
  axes = new_axes("dollars per task (list price)", metric)
  if metric == "success_percent" and results["exact"]:
    usd, share = np.array(results["exact"]["optimum"]).T
    axes.plot(usd, 100 * share, ":", color=MUTED, label="exact optimum, all tasks")
  ends = policies.loc[[*BOUNDARIES], ["cost_usd", metric]].to_numpy()
  axes.plot(*ends.T, "--", color=MUTED, linewidth=0.9, zorder=1)
  for family, end, below in zip(BOUNDARIES, ends, (-12, 5)):
    place = {"xytext": (9, below), "textcoords": "offset points"}
    axes.annotate(FAMILIES[family][0], end, fontsize=8, **place)
  for row in rows[rows.metric == metric].itertuples():
    points, style = policies.loc[row.policies], family_style(results, row.family)
    line = np.vstack([ends[:1], points[["cost_usd", metric]], ends[1:]])
    axes.plot(*line.T, **style)
    faint = {"color": style["color"], "linewidth": 0.8, "alpha": 0.4}
    axes.hlines(points[metric], points.cost_usd_low, points.cost_usd_high, **faint)
    axes.vlines(points.cost_usd, points[f"{metric}_low"], points[f"{metric}_high"], **faint)
  axes.plot(*ends.T, "X", color=MUTED, zorder=4)
  handles, labels = axes.get_legend_handles_labels()
  axes.figure.legend(handles[::-1], labels[::-1], **ABOVE)
  return axes.figure


def draw_hard_budget(results: Mapping, metric: str) -> Figure:
  """Score under a budget of K LARGE calls, a line per family."""
  axes, rows = new_axes("K, LARGE calls allowed per task", metric), results["hard_budget"]
  for family, curve in rows[~rows.family.isin(BOUNDARIES)].groupby("family", sort=False):
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
  for axes, name in zip(figure.subplots(1, max(1, len(names)), squeeze=False)[0], names):
    lines = curves.dropna(subset=[name]).pivot(index="update", columns="training", values=name)
    means = lines.rolling(max(1, len(lines) // 12), min_periods=1).mean()
    means.plot(ax=axes, title=name.replace("_", " "), xlabel="", legend=False)
  if curves.training.nunique() > 1:
    figure.legend(*figure.axes[0].get_legend_handles_labels(), **ABOVE)
  return figure
