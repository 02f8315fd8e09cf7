"""Write the report: a page, its figures, and all results as JSON."""

import base64
import json
from pathlib import Path
from typing import NamedTuple

import jinja2
import matplotlib
from matplotlib.figure import Figure

from baar_jax.config import EnvConfig
from baar_jax.envs.base import load
from baar_jax.report import texts
from baar_jax.report.compare import Results
from baar_jax.report.table import METRICS
from baar_jax.rollout.jobs import BOUNDARY_KEYS

MUTED = "#5f6875"
# Matplotlib's markers of the families' lines, by order of appearance.
MARKERS = "*ovs^Dp<h>P"
STYLE = {
  "axes.axisbelow": True,
  "axes.grid": True,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "grid.color": "#dfe3e8",
  "legend.frameon": False,
}


# Explanations on the page's first screen.
NOTES = {
  "frontier": (
    "Area 0.50 is a random mix of both models (the dashed line), area 1.00 is LARGE's "
    "score at SMALL's price. A line joins a family's points. Dollars are without the "
    "router's own compute."
  ),
  "main_budgets": (
    "SR with at most K LARGE calls per task: the mean score × 100 in ScienceWorld, the "
    "success rate elsewhere. The difference is paired by task."
  ),
  "scripted": (
    "Scripted models are programs with stated error rates in the real environment. "
    "Costs are the list prices of the texts that they exchange. No model was called. "
    "A rule stands in for the judge of a zero-shot router."
  ),
  "recorded": (
    "Recorded models: real models gave each reply once, after each sequence of models, "
    "and the functions' tests decided. No model was called in this run."
  ),
  "synthetic": "The tasks are synthetic, not the benchmark's own.",
}


class Fold(NamedTuple):
  """A table that the page shows folded.

  Attributes:
    title: the line that is always visible.
    table: the name of the table in `Results`.
    columns: the columns to show.
    note: the explanation below the table.
  """

  title: str
  table: str
  columns: tuple[str, ...]
  note: str


AREA_COLUMNS = ("metric", "family", "vertices", "area", "area_gain")
FOLDS = (
  Fold(
    "Area under each frontier",
    "frontiers",
    AREA_COLUMNS,
    "An area is the share of the rectangle between always-SMALL and always-LARGE that "
    "lies under a family's line. The points of the line, and their order, were chosen "
    "on dev. A gain is the main family's area minus the row's, paired by task.",
  ),
  Fold(
    "Claims of the paper",
    "claims",
    ("claim", "verdict", "gain"),
    "A claim holds if the interval of its gain is above 0, and does not hold if it is "
    "below 0. The gain is the difference of two areas; for dollars the share "
    "that BoPO spends on hard tasks minus the share of these tasks (paper: 52.2 %), of "
    "the policy nearest on dev to the middle of the boundaries' costs. With one "
    "training seed, no interval has the chance of training.",
  ),
  Fold(
    "What each part of BoPO is worth",
    "ablations",
    AREA_COLUMNS,
    "Each row is BoPO with one part changed, or BoSFT. Here a gain is BoPO's area "
    "without caps minus the row's area.",
  ),
  Fold(
    "Hard budgets: at most K LARGE calls",
    "hard_budget",
    ("K", "family", *METRICS, "use_share", "gain_points"),
    "A row is the family's best policy on dev. The use share is the mean number of "
    "LARGE calls divided by K. A gain is the main family's SR minus the row's.",
  ),
  Fold(
    "Difficulty by other trials",
    "robustness",
    ("trials", "tasks", "agreement", "hard", "base_hard", "hard_jaccard"),
    "The labels by so many new trials are compared with those by the profile's (base). "
    "In the paper 3 and 10 trials give the same label as 5 to 78.5 and 87.4 % of the "
    "tasks, and the sets of hard tasks have a Jaccard similarity of 0.69 and 0.76.",
  ),
  Fold(
    "Every policy",
    "policies",
    (
      "label",
      *METRICS,
      "cost_usd",
      "saved_share",
      "deciding_usd",
      "spent_usd",
      "large_calls",
      "steps",
      "use_share",
      "overspends",
    ),
    "Dollars, calls and steps are per task; the saved share is of always-LARGE's "
    "dollars; deciding dollars are the router's, and "
    "spent dollars what all calls were billed, with the provider's prompt cache. λ is "
    "the cost weight in a router's training, and a cost weight is the score that one "
    "normalised dollar costs. A cap-conditioned policy reads what is left of its cap; "
    "a cap-blind one decides as if there were no cap, until the cap is spent.",
  ),
  Fold(
    "What the run has cost",
    "ledger",
    ("part", "usd"),
    "The dollars of all calls of API models, in all stages.",
  ),
)


def write(results: Results, directory: Path) -> Path:
  """Write index.html, its figures as PNG files, and results.json.

  Args:
    results: the results to write.
    directory: the directory of the files; it is created if it is missing.

  Returns:
    The path of the page.
  """
  directory.mkdir(parents=True, exist_ok=True)
  figures = {}
  with matplotlib.rc_context(STYLE):
    for metric in results.metrics:
      file = directory / f"frontier_{metric.removesuffix('_percent')}.png"
      figures[metric] = save(draw_frontier(results, metric), file)
  (directory / "results.json").write_text(to_json(results), encoding="utf-8")
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
  )
  template = environment.get_template("page.html.j2")
  page = directory / "index.html"
  page.write_text(
    template.render(
      results=results,
      texts=texts,
      notes=NOTES,
      figures=figures,
      folds=FOLDS,
      is_synthetic=has_synthetic_games(results.config.env),
    ),
    encoding="utf-8",
  )
  return page


def save(figure: Figure, file: Path) -> str:
  """Write a figure to a PNG file, and return it as a data URL for the page."""
  figure.savefig(file, dpi=144)
  return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def has_synthetic_games(config: EnvConfig) -> bool:
  """Tell whether the tasks are synthetic games, not the benchmark's own."""
  engine = load(config.kind).engine
  return engine is not None and not engine.named_data(config.options.get("data", ""))


def to_json(results: Results) -> str:
  """Write all tables as JSON: each as a list of its rows, with null for NaN."""
  rows = {}
  tables = {fold.table: getattr(results, fold.table) for fold in FOLDS}
  for name, table in (tables | {"dev": results.choice.dev}).items():
    table = table.reset_index(drop=not table.index.name)
    text = table.to_json(orient="records", double_precision=15)
    rows[name] = json.loads(text)
  return json.dumps(rows, indent=1)


def draw_frontier(results: Results, metric: str) -> Figure:
  """Draw a metric against dollars per task, with a line per family.

  A family's line goes from always-SMALL through the policies of the family's hull on
  dev to always-LARGE. Crosses are the intervals of the points. The line of the main
  family is thicker than the others.

  Args:
    results: the results to draw.
    metric: one of METRICS.
  """
  figure = Figure(figsize=(5.6, 5.0), layout="constrained")
  axes = figure.subplots()
  axes.set(xlabel="dollars per task (list price)")
  axes.set(ylabel=f"{METRICS[metric]}, %")
  policies = results.policies
  small, large = BOUNDARY_KEYS
  ends = policies.loc[[small, large], ["cost_usd", metric]]
  axes.plot(*ends.to_numpy().T, "--X", color=MUTED, label="random mix of both models")
  for name, side, up in ((small, "left", -14), (large, "right", 8)):
    place = {"textcoords": "offset points", "xytext": (0, up), "ha": side}
    axes.annotate(results.label(name), ends.loc[name], **place)
  rows = results.frontiers[results.frontiers.metric == metric]
  for place, row in enumerate(rows.itertuples()):
    is_main = row.family == results.choice.main
    line = policies.loc[[small, *row.policies, large]]
    axes.plot(
      line.cost_usd,
      line[metric],
      color=f"C{place}",
      marker=MARKERS[place % len(MARKERS)],
      linewidth=1.0 + 1.4 * is_main,
      zorder=2 + is_main,
      label=results.label(row.family),
    )
    faint = {"color": f"C{place}", "alpha": 0.4, "linewidth": 0.8}
    for _, p in line[1:-1].iterrows():
      axes.hlines(p[metric], p.cost_usd_low, p.cost_usd_high, **faint)
      axes.vlines(p.cost_usd, p[f"{metric}_low"], p[f"{metric}_high"], **faint)
  figure.legend(loc="outside upper center", ncols=2)
  return figure
