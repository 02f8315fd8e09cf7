"""Compute the report's results, and write them as a page, figures and tables."""

import base64
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baar_jax.config import ABLATIONS, Config
from baar_jax.envs.table import load
from baar_jax.llms.ledger import read_spent
from baar_jax.llms.prices import prices_of
from baar_jax.llms.provider import endpoints
from baar_jax.paper.references import Profile, measure_robustness
from baar_jax.report import compare, texts
from baar_jax.report.compare import Choice
from baar_jax.report.table import (
  CURVES,
  Evaluation,
  Facts,
  Results,
  Style,
  load_split,
  read_curves,
  run_ledger,
)
from baar_jax.report.texts import METRIC_NAMES
from baar_jax.rollout.jobs import BOUNDARY_KEYS, COMPARED, SFT
from baar_jax.store import Store

MUTED = "#5f6875"
# Matplotlib's markers of the families' lines, by order of appearance.
MARKERS = "*ovs^Dp<h>P"
# Arguments of a figure's legend that place it above the figure.
ABOVE = {"loc": "outside upper center", "ncols": 3}
STYLE = {
  "font.size": 9,
  "axes.titlesize": 9,
  "legend.fontsize": 8,
  "legend.frameon": False,
  "axes.grid": True,
  "axes.axisbelow": True,
  "grid.color": "#dfe3e8",
  "axes.spines.top": False,
  "axes.spines.right": False,
}
# Number of test episodes that the page shows step by step.
EPISODES = 3


def compute_results(
  store: Store,
  choice: Choice,
  profiles: Mapping[str, Profile],
  config: Config,
  directory: Path,
  styles: Mapping[str, Style],
) -> Results:
  """Compute the results of the evaluation.

  Args:
    store: the run's store.
    choice: the policies that were chosen on dev.
    profiles: the profiles of training tasks, with all trials.
    config: the run's configuration.
    directory: the run's directory.
    styles: the look of each family.

  Raises:
    ValueError: a chosen policy's episodes are missing, or a file of the run cannot be
      read.
  """
  data = load_split(store, choice.entries, config, "test")
  labels = {spec.key: texts.label_policy(spec, styles) for spec in choice.entries}
  table = compare.tabulate_policies(data).assign(label=pd.Series(labels))
  rivals = [
    f for f, _ in choice.vertices if f not in (*BOUNDARY_KEYS, *ABLATIONS, COMPARED)
  ]
  ablations = []
  if config.baselines.ablations:
    ablations = [COMPARED, SFT, *ABLATIONS]
  models = len(config.models.names)
  spent = None
  if config.models.kind == "chat":
    # The judge's calls are recorded under the index after the last model's.
    spent = read_spent(directory, models + 1)
  policy = choice.typical.get(choice.main, BOUNDARY_KEYS[0])
  test_keys = [key for key in sorted(store.keys(policy)) if key[0] in data.tasks]
  return Results(
    config=config,
    run=_list_facts(config, data, choice.main, len(profiles)),
    dev=choice.dev,
    policies=table,
    frontiers=compare.areas(data, choice, [*dict.fromkeys([choice.main, *rivals])]),
    ablations=compare.areas(data, choice, ablations),
    hard_budget=compare.hard_budgets(data, table, choice),
    by_difficulty=compare.by_difficulty(data, choice.typical),
    latency=compare.latency(data, choice.typical),
    robustness=measure_robustness(
      profiles, config.profile.trials, config.profile.robustness
    ),
    training=read_curves(directory / "metrics.jsonl"),
    ledger=run_ledger(store.table(), spent, models),
    exact=compare.exact_frontier(config),
    episodes=store.episodes(policy, test_keys[:EPISODES]),
    styles=styles,
  )


def _list_facts(config: Config, data: Evaluation, main: str, train_tasks: int) -> Facts:
  """Collect the facts about the run that its configuration does not state.

  Args:
    config: the run's configuration.
    data: the evaluation on test.
    main: the family that the others are compared with (see `Choice`).
    train_tasks: the number of training tasks with a profile.
  """
  env = config.env
  engine = load(env.kind).engine
  models = config.models
  origin = "scripted models"
  if models.kind != "scripted":
    hosts = dict.fromkeys(endpoint.host for endpoint in endpoints(models))
    origin = f"models at {' and '.join(hosts)}"
  return Facts(
    environment=env.kind.rpartition(":")[2],
    has_synthetic_games=engine is not None
    and not engine.named_data(env.options.get("data", "")),
    models=origin,
    prices_usd_per_million=dict(zip(models.names, prices_of(models))),
    test_tasks=len(data.tasks),
    left_out_episodes=data.left_out,
    sr=data.sr,
    main=main,
    train_tasks=train_tasks,
  )


def write(results: Results, directory: Path) -> Path:
  """Write index.html, its figures as PNG files, results.json and hard_budget.tex.

  Args:
    results: the results to write.
    directory: the directory of the files; it is created if it is missing.

  Returns:
    The path of the page.
  """
  directory.mkdir(parents=True, exist_ok=True)
  files = {"results.json": json.dumps(plain(results), indent=1, allow_nan=False)}
  if len(results.hard_budget):
    table = texts.hard_budget(results)
    narrow = table.loc[:, table.columns.isin(["Family", "SR", "Use%"], level=1)]
    files["hard_budget.tex"] = texts.to_latex(narrow)
  images = {}
  for name, figure in draw_all(results).items():
    file = directory / f"{name}.png"
    figure.savefig(file, dpi=144)
    images[name] = (
      f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    )
  jinja = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    finalize=texts.clean,
  )
  page = jinja.get_template("page.html.j2").render(
    results=results, texts=texts, images=images
  )
  files["index.html"] = page.replace(" %", "\u00a0%")
  for name, text in files.items():
    (directory / name).write_text(text, encoding="utf-8")
  return directory / "index.html"


def plain(results: Results) -> dict:
  """Convert results to values that strict JSON can hold.

  A table becomes a list of its rows, and NaN becomes None.
  """

  def convert(item: pd.DataFrame | np.generic) -> object:
    """Convert a table to its rows, or a NumPy number to Python."""
    if not isinstance(item, pd.DataFrame):
      return item.item()
    if item.index.name:
      item = item.reset_index()
    return item.to_dict("records")

  fields = dataclasses.asdict(results)
  del fields["styles"]
  text = json.dumps(fields, default=convert)
  return json.loads(text, parse_constant=lambda _: None)


def draw_all(results: Results) -> dict[str, Figure]:
  """Draw every figure of the page for which there are data.

  Returns:
    The figures by file name, without its ending.
  """
  figures = {}
  with matplotlib.rc_context(STYLE):
    for metric in results.metrics:
      figures[f"frontier_{metric.removesuffix('_percent')}"] = draw_frontier(
        results, metric
      )
    if len(results.hard_budget):
      figures["hard_budget"] = draw_hard_budget(results)
    for stage, curves in results.training.groupby("stage", sort=False):
      figures[f"training_{stage}"] = draw_training(curves)
  return figures


def family_style(results: Results, family: str) -> dict:
  """Return Matplotlib's keyword arguments for a family's line.

  Colours and markers follow the order of the families in the table of areas. The line
  of the main family is thicker than the others.
  """
  place = [*results.frontiers.family.unique()].index(family)
  is_main = family == results.run.main
  style = {"color": f"C{place}", "marker": MARKERS[place % len(MARKERS)]}
  style["label"] = results.label(family)
  return style | {"linewidth": 1.0 + 1.4 * is_main, "zorder": 2 + is_main}


def new_axes(x: str, metric: str) -> Axes:
  """Open a figure with a metric on its vertical axis.

  Args:
    x: the label of the horizontal axis.
    metric: one of METRICS.
  """
  axes = Figure(figsize=(5.6, 5.0), layout="constrained").subplots()
  axes.set(xlabel=x, ylabel=f"{METRIC_NAMES[metric]}, %")
  return axes


def draw_frontier(results: Results, metric: str) -> Figure:
  """Draw a metric against dollars per task, with a line per family.

  A family's line goes from always-SMALL through the policies of the family's hull on
  dev to always-LARGE. Crosses are the intervals of the points.
  """
  axes = new_axes("dollars per task (list price)", metric)
  policies = results.policies
  small, large = BOUNDARY_KEYS
  if metric == "success_percent" and results.exact:
    usd, share = np.array(results.exact.hull).T
    axes.plot(usd, 100 * share, ":", color=MUTED, label="exact optimum, all tasks")
  ends = policies.loc[[small, large], ["cost_usd", metric]]
  axes.plot(*ends.to_numpy().T, "--", color=MUTED, linewidth=0.9, zorder=1)
  for family, offset in ((small, -12), (large, 5)):
    point = ends.loc[family]
    name = results.label(family)
    axes.annotate(name, point, (9, offset), fontsize=8, textcoords="offset points")
  rows = results.frontiers
  for row in rows[rows.metric == metric].itertuples():
    style = family_style(results, row.family)
    line = policies.loc[[small, *row.policies, large]]
    axes.plot(line.cost_usd, line[metric], **style)
    faint = {"color": style["color"], "linewidth": 0.8, "alpha": 0.4}
    points = line[1:-1]
    axes.hlines(points[metric], points.cost_usd_low, points.cost_usd_high, **faint)
    axes.vlines(
      points.cost_usd, points[f"{metric}_low"], points[f"{metric}_high"], **faint
    )
  axes.plot(*ends.to_numpy().T, "X", color=MUTED, zorder=4)
  handles, labels = axes.get_legend_handles_labels()
  axes.figure.legend(handles[::-1], labels[::-1], **ABOVE)
  return axes.figure


def draw_hard_budget(results: Results) -> Figure:
  """Draw SR against the cap K on LARGE calls, with one line per family."""
  metric = results.metrics[0]
  rows = results.hard_budget
  axes = new_axes("K, LARGE calls allowed per task", metric)
  for family, curve in rows[~rows.family.isin(BOUNDARY_KEYS)].groupby(
    "family", sort=False
  ):
    axes.plot(curve.K, curve[metric], **family_style(results, family))
  for family, dashes in zip(BOUNDARY_KEYS, (":", "--")):
    score = results.policies[metric][family]
    axes.axhline(score, color=MUTED, linestyle=dashes, label=results.label(family))
  axes.set_xticks(rows.K.unique())
  axes.figure.legend(**ABOVE)
  return axes.figure


def draw_training(curves: pd.DataFrame) -> Figure:
  """Draw the values that a training stage has logged, over its updates.

  Each training of the stage has a line, which is a moving mean.

  Args:
    curves: the rows of one stage in `Results.training`.
  """
  names = [name for name in CURVES if curves[name].notna().any()]
  figure = Figure(figsize=(9.2, 2.4), layout="constrained")
  places = figure.subplots(1, max(1, len(names)), squeeze=False)[0]
  for axes, name in zip(places, names):
    lines = curves.dropna(subset=[name]).pivot(
      index="update", columns="training", values=name
    )
    means = lines.rolling(max(1, len(lines) // 12), min_periods=1).mean()
    means.plot(ax=axes, title=name.replace("_", " "), xlabel="", legend=False)
  if curves.training.nunique() > 1:
    figure.legend(*figure.axes[0].get_legend_handles_labels(), **ABOVE)
  return figure
