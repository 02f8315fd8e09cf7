"""Results as texts: tables of texts in HTML, Markdown and LaTeX, and phrases."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pandas as pd

from baar_jax.report.results import METRICS, Results

METRIC_NAMES = dict(zip(METRICS, ("mean score", "success rate")))
LEDGER = {
  "small_usd": "SMALL",
  "large_usd": "LARGE",
  "proposals_usd": "proposals not taken",
  "judge_usd": "zero-shot router",
  "retries_usd": "attempts without an answer",
  "router_usd": "router",
  "total_usd": "all of it",
}
OPTIONAL = ("proposals_usd", "judge_usd")  # only baselines cost them


class Column(NamedTuple):
  """How a column of a table is shown."""

  title: str
  # Of its numbers; z drops the minus of what rounds to 0, % is left out of the cells.
  format: str


def columns(form: str, **titles: str) -> dict[str, Column]:
  """Describe columns of one format by their titles."""
  return {name: Column(title, form) for name, title in titles.items()}


COLUMNS = columns(
  "z.0%",
  use_share="Use%",
  cost_gap_share="Cost gap, %",
  success_gap_share="Success gap, %",
  easy_share="Easy, %",
  hard_share="Hard, %",
  intractable_share="Intractable, %",
  agreement="Same label, %",
  router_share="Router, %",
  forecast_share="Forecast, %",
  measured_share="Measured, %",
  predicted_share="Predicted, %",
  observed_share="Observed, %",
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
  call_budget="K",
  usd_budget="Cap, $",
  paper="The paper",
  ours="This run",
  cost_usd="Cost, $",
  deciding_usd="Router cost, $",
)
DASH = "–"  # no value


def clean(value: object) -> object:
  """Put a text into one line, without unseen and reordering characters."""
  if type(value) is not str:  # what is safe HTML is clean
    return value
  return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(value.split()))


def parameter_text(parameters: Mapping) -> str:
  """Tell a policy's parameters, except for those that are the same for all."""
  symbols = {"lam": "λ", "mu": "μ", "threshold": "t"}
  words = []
  for name, value in parameters.items():
    if name == "share":
      words.append(f"share {100 * value:g} %")
    elif name not in ("update", "seeds") and (name, value) != ("threshold", 0.5):
      words.append(f"{symbols.get(name, name)} = {value:g}")
  return ", ".join(words)


def as_texts(
  results: Results, frame: pd.DataFrame | list, names: Iterable[str] = ()
) -> pd.DataFrame:
  """Write a frame's columns, or all, as texts, with intervals if it has them."""
  frame = pd.DataFrame(frame)
  digits = results.cost_digits  # only the cheapest policy's three count
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


def _write(
  results: Results, form: str, value: float | str | Mapping | list | None
) -> str:
  """Write a value: a number by its format, a family, parameters, or a list's length."""
  if isinstance(value, str):
    return clean(results.label(value))
  if isinstance(value, dict):
    return parameter_text(value) or DASH
  if isinstance(value, list):
    return str(len(value))
  if pd.isna(value):
    return DASH
  return format(value, form).removesuffix("%")


def side_by_side(
  results: Results, frame: pd.DataFrame, by: str, names: Iterable[str]
) -> pd.DataFrame:
  """Write the families, and beside them a block of columns for each value of `by`."""
  blocks = {}
  for value, group in frame.groupby(by, sort=False):
    block = as_texts(results, group, ["family", *names])
    blocks[value] = block.set_index("Family")
  return pd.concat(blocks, axis=1).fillna(DASH).reset_index(col_level=1)


def areas(results: Results, frame: pd.DataFrame) -> pd.DataFrame:
  """Write the rows of `frontiers` or `ablations`."""
  frame = (
    frame.set_index("metric").loc[results.metrics].rename(METRIC_NAMES).reset_index()
  )
  return side_by_side(results, frame, "metric", ["policies", "area", "area_gain"])


def hard_budget(results: Results) -> pd.DataFrame:
  """Write each family's figures under each K."""
  rows = results.hard_budget.rename(
    columns=lambda name: name.replace(results.run.sr, "sr_percent")
  )
  rows = rows.assign(K=rows.K.map("K = {}".format))
  names = ["sr_percent", "use_share", "gain", "success_percent"]
  return side_by_side(results, rows, "K", [name for name in names if name in rows])


def ledger(results: Results) -> dict[str, float]:
  """List dollars by title; those of baselines only if a baseline has cost something."""
  book = results.ledger
  return {title: book[p] for p, title in LEDGER.items() if book[p] or p not in OPTIONAL}


def to_markdown(table: pd.DataFrame) -> str:
  """Write a table of texts in Markdown, with its special characters escaped."""
  cells = table.map(lambda text: re.sub(r"([\\|*_`<>]|(?<=\])\()", r"\\\1", text))
  cells.columns = [" ".join(names).strip() for names in cells.columns]
  return cells.to_markdown(index=False, disable_numparse=True)


def to_latex(table: pd.DataFrame) -> str:
  """Write a table of texts in LaTeX."""
  style = table.style.hide(axis="index").format(escape="latex")
  style = style.format_index(escape="latex", axis="columns")
  alignment = "l".ljust(len(table.columns), "r")
  return style.to_latex(hrules=True, column_format=alignment, multicol_align="c")


def terminal_table(results: Results) -> str:
  """Write a line per policy and per area, and the costs."""
  sr = results.run.sr
  lines = [
    f"{'policy':<44}{'SR':>7}{'success':>9}{'$/task':>10}{'LARGE':>7}{'Use%':>6}"
  ]
  table = results.policies.sort_values("usd_budget", key=pd.notna, kind="stable")
  for policy, p in table.iterrows():
    use = "" if pd.isna(p.use_share) else f"{100 * p.use_share:.0f}"
    lines.append(
      f"{clean(policy):<44}{p[sr]:>7.1f}{p.success_percent:>9.1f}"
      f"{p.cost_usd:>10.{results.cost_digits}f}{p.large_calls:>7.1f}{use:>6}"
    )
  rows = results.frontiers
  for row in rows[(rows.metric == sr) & rows.area.notna()].itertuples():
    lines.append(f"area of {row.family}: {row.area:.3f}")
  *parts, (_, total_usd) = ledger(results).items()
  words = ", ".join(f"{title} ${usd:.4f}" for title, usd in parts)
  line = f"spent by this run: ${total_usd:.4f} ({words})"
  if presumed_usd := results.ledger["presumed_usd"]:
    line += f", and at most ${presumed_usd:.4f} for calls whose outcome is unknown"
  return "\n".join([*lines, f"{line}; {results.run.models}"])
