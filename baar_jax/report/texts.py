"""Write results as texts, for the page and the terminal."""

import math

import pandas as pd

from baar_jax.config import ModelsConfig
from baar_jax.llms.provider import endpoints
from baar_jax.report.compare import Results
from baar_jax.report.table import METRICS
from baar_jax.rollout.jobs import BOPO, FIRST_LARGE

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
  rows = results.hard_budget
  scores = rows.pivot(index="K", columns="family", values=results.data.sr)
  compared = [family for family in _compared(results) if family in scores]
  table = scores[compared].map("{:.1f}".format, na_action="ignore")
  if FIRST_LARGE in compared:
    first = rows[rows.family == FIRST_LARGE].set_index("K")
    place = min(1, len(compared))
    table.insert(place, "Over First-Large", as_texts(results, first, "gain_points"))
  table = table.rename(columns=results.label).rename_axis(None, axis=1)
  return table.reset_index().fillna(DASH)


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
  paid for it, the page's claim, and its advice. Dollars have three significant digits
  of the cheapest policy without a cap in dollars.
  """
  sr = results.data.sr
  lines = [f"{'SR':>5}{'success':>9}{'$/task':>10}{'LARGE':>7}{'Use%':>6}  policy"]
  table = results.policies.sort_values("usd_budget", key=pd.notna, kind="stable")
  cheapest_usd = table.cost_usd[table.usd_budget.isna()].min()
  digits = 4
  if cheapest_usd > 0:
    digits = 2 - math.floor(math.log10(cheapest_usd))
  for _, p in table.iterrows():
    use = "" if pd.isna(p.use_share) else f"{100 * p.use_share:.0f}"
    lines.append(
      f"{p[sr]:>5.1f}{p.success_percent:>9.1f}{p.cost_usd:>10.{digits}f}"
      f"{p.large_calls:>7.1f}{use:>6}  {p.label}"
    )
  if len(results.hard_budget):
    lines.append(main_budgets(results).to_string(index=False))
  parts = [describe_models(results.config.models)]
  for part, usd in results.ledger.itertuples(index=False):
    parts.append(f"{part} ${usd:.4f}")
  lines.append(", ".join(parts))
  return "\n".join(filter(None, [*lines, claim(results, sr), advise(results)]))
