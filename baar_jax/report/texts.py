"""Write results as labels and as tables, for the page, files and the terminal."""

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pandas as pd

from baar_jax.report.table import METRICS, Results, Style
from baar_jax.rollout.jobs import BOPO, FIRST_LARGE
from baar_jax.rollout.specs import PolicySpec

METRIC_NAMES = dict(zip(METRICS, ("mean score", "success rate")))
LEDGER = {
  "small_usd": "SMALL",
  "large_usd": "LARGE",
  "proposals_usd": "proposals not taken",
  "judge_usd": "zero-shot router",
  "retries_usd": "attempts without an answer",
  "router_usd": "router",
  "total_usd": "total",
}
# Words for a policy's parameters and cap in its label, by name.
PARAMETERS = {
  "lam": "λ {:g}",
  "threshold": "LARGE from probability {:g}",
  "share": "LARGE share {:g} in training",
  "cost_weight": "cost weight {:g}",
  "blind": "cap-blind",
  "p": "LARGE with probability {:g}",
  "mu": "μ {:g}",
  "rank": "model {:g}",
  "patience": "patience {:g}",
  "calls": "at most {} LARGE calls",
  "usd": "at most ${:g}",
}
# Explanations on the page, by the part of the page.
NOTES = {
  "area": (
    "Area 0.50 is a coin flip between SMALL and LARGE for each task. Area 1.00 is "
    "LARGE's score at SMALL's price. Brackets are 95 % intervals."
  ),
  "main_budgets": (
    "SR is the mean score × 100 in ScienceWorld, and the success rate elsewhere. It is "
    "shown with at most K LARGE calls per task. The difference is paired by task."
  ),
  "frontier": (
    "Dollars per task, without the router's own compute. A line joins a family's "
    "points. The dashed line is a random mix of both models."
  ),
  "synthetic": "The tasks are synthetic, not the benchmark's own.",
  "gain": "A gain is the main family's figure minus the row's, paired by task.",
  "hard_budget": (
    "Use% is the mean number of LARGE calls divided by K. A row is the family's best "
    "policy on dev."
  ),
  "scripted": (
    "Scripted models are programs with stated error rates in the real environment. "
    "Costs are the list prices of the texts that they exchange. No model was called. "
    "The privileged rule reads the error rates, which no router can. A rule stands in "
    "for the judge of a zero-shot router."
  ),
  "areas": (
    "An area is the share of the rectangle between the boundaries that lies under a "
    "family's line. The points of the line, and their order, were chosen on dev."
  ),
  "ablations": (
    "Each row is BoPO without one part, or BoSFT. Here a gain is the area of BoPO at "
    "the same λ minus the row's area."
  ),
  "by_difficulty": (
    "The shares of a family's dollars that went to easy, hard and intractable tasks. "
    "One policy stands for each family: on dev, the one nearest to the middle of the "
    "boundaries' costs. The task mix has the shares of the tasks. In the paper "
    "BoPO spends 21.8, 52.2 and 26.0 % on easy, hard and intractable tasks, and 25.8 % "
    "of the tasks are intractable."
  ),
  "robustness": (
    "K is the number of trials of each boundary on a training task. The labels of "
    "other numbers are compared with those of the configured number (base). In the "
    "paper 3 and 10 trials give the same label as 5 to 78.5 and 87.4 % of the tasks, "
    "and the sets of hard tasks have a Jaccard similarity of 0.69 and 0.76."
  ),
  "latency": (
    "The same policies at the paper's tokens per second: LARGE 80, SMALL 90, and the "
    "router 180 with one token per decision (below 2 % of the time in the paper). "
    "Waited is the measured time in which an episode waited for its router or judge."
  ),
  "policies": (
    "Dollars, calls and steps are per task. Use% is the share of the cap that was "
    "used. λ is the cost weight in a router's training. The cost weight is the "
    "score that one normalised dollar costs. A cap-conditioned policy reads what is "
    "left of its cap; a cap-blind one decides as if there were no cap, until the cap "
    "is spent. A trained router calls LARGE from probability 0.5 on, or from the "
    "stated one. A LARGE share sets the probability above which LARGE has this share "
    "of the stored training decisions. μ is the success that a dollar must bring. "
    "Patience is the number of steps for which LARGE acts after an error or a "
    "repeated observation."
  ),
}


NEXT_STEPS = {
  "Serve your own agent (docs/serving.md):": "--stage=serve",
  "Use real models (docs/models_and_money.md):": "--config.models.kind=chat",
}


class Column(NamedTuple):
  """The title and number format of a column in the report."""

  title: str
  # A format of Python. Its letter z writes -0 as 0. The percent sign that its letter %
  # appends is left out of the cell.
  format: str


def columns(form: str, **titles: str) -> dict[str, Column]:
  """Describe columns whose numbers have the same format.

  Args:
    form: the format, for Python's function `format`.
    titles: the title of each column, by the column's name.
  """
  return {name: Column(title, form) for name, title in titles.items()}


COLUMNS = columns(
  "z.0%",
  use_share="Use%",
  easy_share="Easy, %",
  hard_share="Hard, %",
  intractable_share="Intractable, %",
  agreement="Same label, %",
  router_share="Router, %",
)
COLUMNS |= columns(
  "z.1f",
  sr_percent="SR",
  score_percent="Score, %",
  success_percent="Success, %",
  large_calls="LARGE calls",
  steps="Steps",
)
COLUMNS |= columns("z.2f", area="Area", hard_jaccard="Hard Jaccard")
COLUMNS |= columns(
  "z.3f",
  small_s="SMALL, s",
  large_s="LARGE, s",
  router_s="Router, s",
  waited_s="Waited, s",
)
COLUMNS |= columns("+z.1f", gain="Gain") | columns("+z.2f", area_gain="Gain")
COLUMNS |= columns(
  "g",
  policies="Points",
  label="Policy",
  cost_usd="Cost, $",
  deciding_usd="Router cost, $",
)
# Text of a table's cell without a value.
DASH = "–"


def clean(value: object) -> object:
  """Put a text into one line of printable characters.

  Control characters, and characters that change the direction of text, become U+FFFD. A
  value that is no plain text is returned unchanged.
  """
  # HTML that the template marks as safe has a subclass of str. It must not be changed.
  if type(value) is not str:
    return value
  return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(value.split()))


def label_policy(spec: PolicySpec, styles: Mapping[str, Style]) -> str:
  """Write a policy's label for readers.

  An example is "budget-conditioned router, cost weight 0.5, cap-blind, at most 3
  LARGE calls". Parameters that are equal for all policies of a run, such as the
  number of updates, are left out.

  Args:
    spec: the policy.
    styles: the families' labels, by family.
  """
  words = [styles[spec.family].label]
  # Only the budget-conditioned router has both variants, cap-conditioned and cap-blind,
  # so only its labels tell which one it is.
  if spec.cap and spec.cap_conditioned and spec.cost_weight is not None:
    words.append("cap-conditioned")
  settings = spec.settings | vars(spec.cap)
  # The threshold 0.5 is the usual one, and is left out of the label.
  if spec.threshold == 0.5:
    del settings["threshold"]
  for name, value in settings.items():
    if name in PARAMETERS and value is not None:
      words.append(PARAMETERS[name].format(value))
  return ", ".join(words).replace(" 1 LARGE calls", " 1 LARGE call")


def as_texts(
  results: Results, frame: pd.DataFrame | list, names: Iterable[str] = ()
) -> pd.DataFrame:
  """Write columns of a table as texts, with titles for readers.

  If the table has the ends of a column's intervals, they follow each cell in brackets.

  Args:
    results: the results of the report; they set the number of decimals of dollars.
    frame: the rows, as a DataFrame or a list of dicts.
    names: the columns to write; () writes all.
  """
  frame = pd.DataFrame(frame)
  digits = results.cost_digits
  dollars = {"cost_usd": f"z.{digits}f", "deciding_usd": f"z.{digits + 1}f"}
  texts = pd.DataFrame(index=frame.index)
  for name in names or frame:
    column = COLUMNS.get(name, Column(name.replace("_", " ").capitalize(), "g"))
    write = functools.partial(_write, results, dollars.get(name, column.format))
    cells = frame[name].map(write)
    if f"{name}_low" in frame:
      low = frame[f"{name}_low"].map(write)
      cells = cells.where(
        low == DASH, cells + " [" + low + ", " + frame[f"{name}_high"].map(write) + "]"
      )
    texts[column.title] = cells
  return texts


def _write(results: Results, form: str, value: float | str | list | None) -> str:
  """Write a cell's value as text.

  A number is written in the format, a family as its label, and a list as its length.

  Args:
    form: the format of a number.
    value: the cell's value.
  """
  if isinstance(value, str):
    return clean(results.label(value))
  if isinstance(value, list):
    return str(len(value))
  if pd.isna(value):
    return DASH
  return format(value, form).removesuffix("%")


def side_by_side(
  results: Results, frame: pd.DataFrame, by: str, names: Iterable[str]
) -> pd.DataFrame:
  """Write a table with a row per family, and blocks of columns side by side.

  Args:
    frame: several rows per family, which differ in the column `by`.
    by: the column that divides the rows into blocks. Its values become the blocks'
      titles.
    names: the columns that each block shows.
  """
  blocks = {}
  for value, group in frame.groupby(by, sort=False):
    block = as_texts(results, group, ["family", *names])
    blocks[value] = block.set_index("Family")
  return pd.concat(blocks, axis=1).fillna(DASH).reset_index(col_level=1)


def areas(results: Results, frame: pd.DataFrame) -> pd.DataFrame:
  """Write the areas of families, with a block of columns per metric.

  Args:
    frame: `Results.frontiers` or `Results.ablations`.
  """
  frame = (
    frame.set_index("metric").loc[results.metrics].rename(METRIC_NAMES).reset_index()
  )
  return side_by_side(results, frame, "metric", ["policies", "area", "area_gain"])


def hard_budget(results: Results) -> pd.DataFrame:
  """Write a table of each family's results under each cap K on LARGE calls."""
  rows = results.hard_budget.rename(
    columns=lambda name: name.replace(results.run.sr, "sr_percent")
  )
  rows = rows.assign(K=rows.K.map("K = {}".format))
  names = ["sr_percent", "use_share", "gain", "success_percent"]
  return side_by_side(results, rows, "K", [name for name in names if name in rows])


def main_budgets(results: Results) -> pd.DataFrame:
  """Write the SR of the main family, First-Large and BoPO under each cap K.

  The difference is the main family's SR minus First-Large's, paired by task.
  """
  rows = results.hard_budget
  scores = rows.pivot(index="K", columns="family", values=results.run.sr)
  compared = [family for family in _compared(results) if family in scores]
  first = rows[rows.family == FIRST_LARGE].set_index("K")
  table = scores[compared].map(functools.partial(_write, results, "z.1f"))
  if FIRST_LARGE in scores:
    place = min(1, len(compared))
    table.insert(place, "Over First-Large", as_texts(results, first, ["gain"]))
  table = table.rename(columns=results.label).rename_axis(None, axis=1)
  return table.reset_index().fillna(DASH)


def _compared(results: Results) -> list[str]:
  """Return the families that the page's claims compare, the main family first."""
  return [*dict.fromkeys([results.run.main, FIRST_LARGE, BOPO])]


def claim(results: Results, metric: str) -> str:
  """Write a sentence with the area of the main family, and those of its rivals.

  The sentence says "not shown" if the main family's interval reaches down to 0.5, the
  area of a random mix of the boundaries.
  """
  rows = results.frontiers[results.frontiers.metric == metric].set_index("family")
  main = results.run.main
  name = f"The {results.label(main)}"
  if pd.isna(rows.area.get(main)):
    return f"{name} was not evaluated, or LARGE has no higher {METRIC_NAMES[metric]}."
  areas = as_texts(results, rows, ["area"]).Area
  verb = "beats" if rows.area_low[main] > 0.5 else "is not shown to beat"
  rivals = ""
  for family in _compared(results)[1:]:
    if family in areas:
      rivals += f", {results.label(family)} {areas[family]}"
  return (
    f"{name} {verb} a random mix of both models in {METRIC_NAMES[metric]}: "
    f"area {areas[main]}{rivals}."
  )


def ledger(results: Results) -> dict[str, float]:
  """Return the run's dollars by what they were for, with titles for readers."""
  return {title: results.ledger[part] for part, title in LEDGER.items()}


def to_latex(table: pd.DataFrame) -> str:
  """Write a table of texts in LaTeX, with special characters escaped."""
  style = table.style.hide(axis="index").format(escape="latex")
  style = style.format_index(escape="latex", axis="columns")
  alignment = "l".ljust(len(table.columns), "r")
  return style.to_latex(hrules=True, column_format=alignment, multicol_align="c")


def terminal_table(results: Results) -> str:
  """Write the main results for a terminal.

  There is a line per policy, a table of the caps K, a line with the run's dollars, and
  the page's claim.
  """
  sr = results.run.sr
  lines = [f"{'SR':>5}{'success':>9}{'$/task':>10}{'LARGE':>7}{'Use%':>6}  policy"]
  table = results.policies.sort_values("usd_budget", key=pd.notna, kind="stable")
  for _, p in table.iterrows():
    use = "" if pd.isna(p.use_share) else f"{100 * p.use_share:.0f}"
    lines.append(
      f"{p[sr]:>5.1f}{p.success_percent:>9.1f}{p.cost_usd:>10.{results.cost_digits}f}"
      f"{p.large_calls:>7.1f}{use:>6}  {clean(p.label)}"
    )
  if len(results.hard_budget):
    lines.append(main_budgets(results).to_string(index=False))
  words = ", ".join(f"{title} ${usd:.4f}" for title, usd in ledger(results).items())
  line = f"spent by this run: {words}"
  if presumed_usd := results.ledger["presumed_usd"]:
    line += f", and at most ${presumed_usd:.4f} for calls whose outcome is unknown"
  return "\n".join([*lines, f"{line}; {results.run.models}", claim(results, sr)])
