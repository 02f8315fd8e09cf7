"""Write the report: a page, its figures, results as JSON, and the terminal's lines."""

import base64
import json
from pathlib import Path
from typing import NamedTuple

import jinja2
import pandas as pd
from matplotlib import style
from matplotlib.figure import Figure

from baar_jax.config import EnvConfig, ModelsConfig
from baar_jax.envs.base import load
from baar_jax.llms.provider import endpoints
from baar_jax.report.compare import Results
from baar_jax.report.table import METRICS
from baar_jax.rollout.jobs import BOPO, BOUNDARY_KEYS, FIRST_LARGE

# Matplotlib's markers of the families' lines, by order of appearance.
MARKERS = "*ovs^Dp<h>P"
# The formats of columns, by the last word of their names; others have the format "g".
# The letter z writes -0 as 0.
FORMATS = {
  "area": "z.2f",
  "gain": "+z.2f",
  "share": "z.0%",
  "agreement": "z.0%",
  "jaccard": "z.2f",
  "percent": "z.1f",
  "points": "+z.1f",
  "calls": "z.1f",
  "steps": "z.1f",
  "usd": "z.6f",
}
ADVICE = (
  "Use the model name baar:cost_weight={:g}: it costs ${} per task, which saves {} of "
  "always-LARGE's dollars, at {} points of {}, on {} test tasks{}."
)
FEW_TASKS = 10  # Fewer test tasks than this are too few to tell (our choice).
# Text of a table's cell without a value.
DASH = "–"
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
  with style.context("seaborn-v0_8-whitegrid"):
    for metric in results.metrics:
      file = directory / f"frontier_{metric.removesuffix('_percent')}.png"
      draw_frontier(results, metric).savefig(file, dpi=144)
      picture = base64.b64encode(file.read_bytes()).decode()
      figures[metric] = f"data:image/png;base64,{picture}"
  (directory / "results.json").write_text(to_json(results), encoding="utf-8")
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
  )
  template = environment.get_template("page.html.j2")
  page = directory / "index.html"
  page.write_text(
    template.render(
      results=results,
      as_texts=as_texts,
      main_budgets=main_budgets,
      claim=claim,
      advise=advise,
      describe_models=describe_models,
      notes=NOTES,
      figures=figures,
      folds=FOLDS,
      is_synthetic=has_synthetic_games(results.config.env),
    ),
    encoding="utf-8",
  )
  return page


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
  axes.set(xlabel="dollars per task (list price)", ylabel=f"{METRICS[metric]}, %")
  policies = results.policies
  small, large = BOUNDARY_KEYS
  ends = policies.loc[[small, large], ["cost_usd", metric]]
  mixes = "always-SMALL to always-LARGE"
  axes.plot(*ends.to_numpy().T, "--X", color="gray", label=mixes)
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
    inner = line[1:-1]
    axes.hlines(inner[metric], inner.cost_usd_low, inner.cost_usd_high, **faint)
    axes.vlines(
      inner.cost_usd, inner[f"{metric}_low"], inner[f"{metric}_high"], **faint
    )
  figure.legend(loc="outside upper center", ncols=2)
  return figure


def as_texts(results: Results, frame: pd.DataFrame, *names: str) -> pd.DataFrame:
  """Write columns of a table as texts, with their names as titles.

  If the table has the ends of a column's intervals, they follow each cell in brackets.

  Args:
    results: the results, which have the names of families and metrics.
    frame: the rows.
    names: the columns to write.
  """
  texts = pd.DataFrame(index=frame.index)
  for name in names:
    form = FORMATS.get(name.rpartition("_")[2], "g")
    rows = frame.reindex(columns=[name, f"{name}_low", f"{name}_high"])
    cells = [_write(results, form, *row) for row in rows.itertuples(index=False)]
    texts[name.replace("_", " ")] = cells
  return texts


def _write(
  results: Results, form: str, value: float | str, low: float, high: float
) -> str:
  """Write a cell's value as text, with its interval if there is one.

  Args:
    results: the results, which have the names of families and metrics.
    form: the format of a number.
    value: the cell's value.
    low: the lower end of the interval, or NaN.
    high: the upper end of the interval, or NaN.
  """
  if isinstance(value, str):
    return results.label(value)
  if pd.isna(value):
    return DASH
  text = format(value, form)
  if pd.isna(low):
    return text
  return f"{text} [{low:{form}}, {high:{form}}]"


def main_budgets(results: Results) -> pd.DataFrame:
  """Write the SR of the main family, First-Large and BoPO under each cap K.

  The difference is the main family's SR minus First-Large's, paired by task.
  """
  rows = results.hard_budget.set_index("K")
  columns = {}
  for family in _compared(results):
    under = rows[rows.family == family]
    if family == FIRST_LARGE:
      gains = as_texts(results, under, "gain_points")
      columns["Over First-Large"] = gains["gain points"]
    columns[results.label(family)] = under[results.data.sr].map("{:.1f}".format)
  table = pd.DataFrame(columns).dropna(axis=1, how="all")
  return table.rename_axis("K").reset_index().fillna(DASH)


def _compared(results: Results) -> list[str]:
  """Return the families that the page's claims compare, the main family first."""
  return [*dict.fromkeys([results.choice.main, FIRST_LARGE, BOPO])]


def claim(results: Results, metric: str) -> str:
  """Write a sentence with the area of the main family, and those of its rivals.

  The sentence says "not shown" if the main family's interval reaches down to 0.5, the
  area of a random mix of the boundaries.
  """
  rows = results.frontiers[results.frontiers.metric == metric].set_index("family")
  main = results.choice.main
  name = f"The {results.label(main)}"
  if pd.isna(rows.area.get(main)):
    return f"{name} was not evaluated, or LARGE has no higher {METRICS[metric]}."
  verb = "beats" if rows.area_low[main] > 0.5 else "is not shown to beat"
  areas = as_texts(results, rows, "area").area
  rivals = ""
  for family in _compared(results)[1:]:
    if family in areas:
      rivals += f", {results.label(family)} {areas[family]}"
  return (
    f"{name} {verb} a random mix of both models in {METRICS[metric]}: "
    f"area {areas[main]}{rivals}."
  )


def advise(results: Results) -> str:
  """Write which model name to use, and what it saves against always-LARGE on test.

  The sentence is empty if the run has no default policy.
  """
  default = results.choice.default
  if default is None:
    return ""
  row = results.policies.loc[[default.key]]
  (texts,) = as_texts(results, row, "cost_usd", "saved_share", "lead_points").values
  sr = METRICS[results.data.sr]
  tasks = len(results.data.tasks)
  few = ": too few to tell" * (tasks < FEW_TASKS)
  return ADVICE.format(default.cost_weight, *texts, sr, tasks, few)


def describe_models(config: ModelsConfig) -> str:
  """Say what acted: "scripted models", "recorded models", or "models at HOST"."""
  if config.kind != "chat":
    return f"{config.kind} models"
  hosts = dict.fromkeys(endpoint.host for endpoint in endpoints(config))
  return f"models at {' and '.join(hosts)}"


def terminal_table(results: Results) -> str:
  """Write the main results for a terminal.

  There is a line per policy, a table of the caps K, a line with what acted and what was
  paid for it, the page's claim, and its advice.
  """
  columns = ["label", *results.metrics, "cost_usd", "large_calls", "use_share"]
  # Without the ends of the intervals, which the page has.
  policies = as_texts(results, results.policies[columns], *columns)
  lines = [policies.set_index("label").to_string()]
  if len(results.hard_budget):
    lines.append(main_budgets(results).to_string(index=False))
  parts = [describe_models(results.config.models)]
  for part, usd in results.ledger.itertuples(index=False):
    parts.append(f"{part} ${usd:.4f}")
  lines.append(", ".join(parts))
  return "\n".join(
    filter(None, [*lines, claim(results, results.data.sr), advise(results)])
  )
