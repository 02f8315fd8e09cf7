"""Results as texts: tables of texts in HTML, Markdown and LaTeX, and phrases."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from baar_jax.report.table import COMPARED, METRICS
from baar_jax.rollout import policies

FAMILIES = {  # name, colour and marker
  policies.ALWAYS_SMALL: ("always SMALL", "#1d2530", "X"),
  policies.ALWAYS_LARGE: ("always LARGE", "#1d2530", "X"),
  policies.ALWAYS: ("always one between", "#5f6875", "X"),
  "random": ("random", "#848b96", "^"),
  policies.FIRST_LARGE: ("First-Large", "#2f8a5b", "D"),
  "zero-shot": ("zero-shot router", "#0f8a94", "X"),
  "cascade": ("cascade", "#7a5a2e", "v"),
  "single-turn": ("single-turn", "#b8408f", "<"),
  "vanilla": ("vanilla RL", "#3c4cc0", "h"),
  "sft": ("SFT only", "#2f6cb3", "s"),
  "bopo": ("BoPO", "#c9452c", "o"),
  COMPARED: ("BoPO at the same λ", "#c9452c", "o"),
  policies.CONDITIONED: ("router that knows its budget", "#111111", "*"),
  "no-stratified": ("no stratified sampling", "#6d7d1f", "v"),
  "no-reference": ("no reference advantage", "#0d6e5e", "D"),
  "no-hard-bonus": ("no hard bonus", "#a05a7a", "^"),
  "privileged": ("privileged (error model)", "#8a5eb0", "P"),
  "optimum": ("optimum (exact policy)", "#ad7a10", "*"),
}
METRIC_NAMES = dict(zip(METRICS, ("mean score", "success rate")))
LEDGER = {"small_usd": "SMALL", "large_usd": "LARGE", "proposals_usd": "proposals not taken"}
LEDGER |= {"judge_usd": "zero-shot router", "retries_usd": "attempts without an answer"}
LEDGER |= {"router_usd": "router", "total_usd": "all of it"}
# By the suffix of a column's name: what replaces it in the title, the factor, and the format, in
# which z drops the minus of what rounds to 0.
UNITS = {
  "_percent": (", %", 1.0, "z.1f"),
  "_share": (", %", 100.0, "z.0f"),
  "_usd": (", $", 1.0, ""),  # as many digits as the cheapest policy needs
  "_s": (", s", 1.0, "z.3f"),
  "area": ("area", 1.0, "z.2f"),
  "jaccard": ("Jaccard", 1.0, "z.2f"),
  "agreement": ("same label, %", 100.0, "z.0f"),
  "area_gain": ("gain", 1.0, "+z.2f"),
  "gain": ("gain", 1.0, "+z.1f"),
  "large_calls": ("LARGE calls", 1.0, "z.1f"),
  "steps": ("steps", 1.0, "z.1f"),
}
TITLES = {"policies": "Points", "call_budget": "K", "usd_budget": "Cap, $"}
TITLES |= {"sr_percent": "SR", "use_share": "Use%", "deciding_usd": "Router cost, $"}
TITLES |= {"small_s": "SMALL, s", "large_s": "LARGE, s", "paper": "The paper", "ours": "This run"}
DASH = "–"  # no value


def clean(value):
  """A text in one line, without characters that are not seen or reorder others; else the value."""
  if type(value) is not str:  # what is safe HTML is clean
    return value
  return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(value.split()))


def family_name(family: str) -> str:
  """As a reader knows it; another family goes by its own name."""
  return FAMILIES[family][0] if family in FAMILIES else clean(family)


def parameter_text(parameters: Mapping) -> str:
  """A policy's parameters, but for the training's length and seeds and the threshold of 0.5."""
  symbols = {"lam": "λ", "mu": "μ", "threshold": "t"}
  return ", ".join(
    f"share {100 * v:g} %" if k == "share" else f"{symbols.get(k, k)} = {v:g}"
    for k, v in parameters.items()
    if k not in ("update", "seeds") and (k, v) != ("threshold", 0.5)
  )


def shown_metrics(results: Mapping) -> list[str]:
  """The environment's own metric first; one suffices where every score is 0 or 1."""
  sr, table = results["run"]["sr"], results["policies"]
  same = (table.score_percent == table.success_percent).all()
  return [sr] if same else sorted(METRICS, key=lambda metric: metric != sr)


def cost_digits(results: Mapping) -> int:
  """Decimals at which the cheapest policy's dollars have three significant digits."""
  table = results["policies"]
  cheapest = table.cost_usd[table.usd_budget.isna()].min()
  return 2 - math.floor(math.log10(cheapest)) if cheapest > 0 else 4


def as_texts(results: Mapping, frame: pd.DataFrame | list, columns=()) -> pd.DataFrame:
  """Columns of a frame, or all, as texts, a number with its interval where the frame has one.

  The suffix of a column's name tells its unit; columns without one are words or settings.
  """
  frame, result = pd.DataFrame(frame), {}
  for name in columns or frame.columns:
    suffix = next(filter(name.endswith, UNITS), "")
    unit, factor, spec = UNITS.get(suffix, ("", 1.0, ""))
    if suffix == "_usd":
      spec = f"z.{cost_digits(results) + (name != 'cost_usd')}f"
    bounds = [bound for bound in (f"{name}_low", f"{name}_high") if bound in frame]
    title = (name.removesuffix(suffix) + unit).replace("_", " ")
    result[TITLES.get(name, title[:1].upper() + title[1:])] = [
      _number(factor * np.array(values, float), spec) if suffix else _word(*values)
      for values in zip(*(frame[column] for column in (name, *bounds)))
    ]
  return pd.DataFrame(result, dtype=object)


def _number(values: np.ndarray, spec: str) -> str:
  """A number, such as "58.7", or with the bounds of its interval "58.7 [49.1, 68.0]"."""
  value, *bounds = (DASH if np.isnan(value) else f"{value:{spec}}" for value in values)
  return f"{value} [{', '.join(bounds)}]" if bounds and DASH not in bounds else value


def _word(value) -> str:
  if isinstance(value, str):
    return family_name(value)
  if isinstance(value, dict):
    return parameter_text(value) or DASH
  if isinstance(value, list):
    return str(len(value))
  return DASH if pd.isna(value) else f"{value:g}"


def side_by_side(results: Mapping, frame: pd.DataFrame, by: str, columns) -> pd.DataFrame:
  """The families as texts, and beside them a block of columns for each value of `by`."""
  blocks = {}
  for value, group in frame.groupby(by, sort=False):
    block = as_texts(results, group, ["family", *columns])
    blocks[value] = block.set_index(block.columns[0])
  return pd.concat(blocks, axis=1).fillna(DASH).reset_index(col_level=1)


def areas(results: Mapping, frame: pd.DataFrame) -> pd.DataFrame:
  """The rows of `frontiers` or `ablations`."""
  frame = frame.set_index("metric").loc[shown_metrics(results)].rename(METRIC_NAMES).reset_index()
  return side_by_side(results, frame, "metric", ["policies", "area", "area_gain"])


def hard_budget(results: Mapping) -> pd.DataFrame:
  """Per family SR, Use%, the main family's gain over it, and success where that is not SR, under
  each K."""
  rows, sr = results["hard_budget"], results["run"]["sr"]
  rows = rows.rename(columns=lambda name: name.replace(sr, "sr_percent"))
  columns = [c for c in ("sr_percent", "use_share", "gain", "success_percent") if c in rows]
  rows = rows.assign(K=rows.K.map("K = {}".format))
  return side_by_side(results, rows, "K", columns)


def beside_paper(results: Mapping) -> pd.DataFrame:
  """The paper's SR, and Use% where there is a K, beside ours, as texts; of the policies that this
  run has too, in the paper's environments."""
  published = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
  sr, table = results["run"]["sr"], results["policies"]
  ours = {("", family): f"{table[sr][family]:.1f}" for family in policies.BOUNDARIES}
  for row in results["hard_budget"].to_dict("records"):
    ours[str(row["K"]), row["family"]] = f"{row[sr]:.1f} ({100 * row['use_share']:.0f} %)"
  rows = [
    (family, K, paper, ours[K, family])
    for K, group in published.get(results["run"]["environment"], {}).items()
    for family, paper in group.items()
    if (K, family) in ours
  ]
  return pd.DataFrame(rows, columns=["family", "K", "paper", "ours"])


def ledger(results: Mapping) -> dict[str, float]:
  """Dollars by title; those of baselines only where a baseline has cost something."""
  book = results["ledger"]
  optional = ("proposals_usd", "judge_usd")
  return {t: book[part] for part, t in LEDGER.items() if part not in optional or book[part]}


def to_markdown(table: pd.DataFrame) -> str:
  cells = table.map(lambda text: re.sub(r"([\\|*_`<>]|(?<=\])\()", r"\\\1", text))
  cells.columns = [" ".join(filter(None, names)) for names in cells.columns]
  return cells.to_markdown(index=False, disable_numparse=True)


def to_latex(table: pd.DataFrame) -> str:
  style = table.style.hide(axis="index").format(escape="latex")
  style = style.format_index(escape="latex", axis="columns")
  alignment = "l" + "r" * (len(table.columns) - 1)
  return style.to_latex(hrules=True, column_format=alignment, multicol_align="c")


def terminal_table(results: Mapping) -> str:
  """A line per policy, those under a cap in dollars last, and per area; what the run has cost."""
  sr, digits = results["run"]["sr"], cost_digits(results)
  lines = [f"{'policy':<44}{'SR':>7}{'success':>9}{'$/task':>10}{'LARGE':>7}{'Use%':>6}"]
  table = results["policies"].sort_values("usd_budget", key=pd.notna, kind="stable")
  for policy, p in table.iterrows():
    use = "" if pd.isna(p.use_share) else f"{100 * p.use_share:.0f}"
    lines.append(
      f"{clean(policy):<44}{p[sr]:>7.1f}{p.success_percent:>9.1f}"
      f"{p.cost_usd:>10.{digits}f}{p.large_calls:>7.1f}{use:>6}"
    )
  rows = results["frontiers"]
  for row in rows[(rows.metric == sr) & rows.area.notna()].itertuples():
    lines.append(f"area of {row.family}: {row.area:.3f}")
  *parts, (_, total_usd) = ledger(results).items()
  line = ", ".join(f"{title} ${usd:.4f}" for title, usd in parts)
  line = f"spent by this run: ${total_usd:.4f} ({line})"
  if presumed_usd := results["ledger"]["presumed_usd"]:
    line += f", and at most ${presumed_usd:.4f} for calls whose outcome is unknown"
  return "\n".join([*lines, f"{line}; {results['run']['models']}"])
