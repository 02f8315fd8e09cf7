"""The tables of the page: figures -> DataFrames of texts -> HTML, Markdown, LaTeX."""

import math
import re
from collections.abc import Callable, Mapping

import pandas as pd
from markupsafe import Markup, escape

from baar_jax.report.compare import PRIVILEGED
from baar_jax.report.spend import DIFFICULTIES
from baar_jax.report.table import METRICS
from baar_jax.rollout.entries import ALWAYS_LARGE, ALWAYS_SMALL

FAMILIES = {  # name, colour and marker
  ALWAYS_SMALL: ("always SMALL", "#1d2530", "X"),
  ALWAYS_LARGE: ("always LARGE", "#1d2530", "X"),
  "random": ("random", "#848b96", "^"),
  "first-large": ("First-Large", "#2f8a5b", "D"),
  "zero-shot": ("zero-shot LLM", "#0f8a94", "X"),
  "cascade": ("cascade", "#7a5a2e", "v"),
  "single-turn": ("single-turn", "#b8408f", "<"),
  "vanilla": ("vanilla RL", "#3c4cc0", "h"),
  "sft": ("SFT only", "#2f6cb3", "s"),
  "bopo": ("BoPO", "#c9452c", "o"),
  "no-stratified": ("no stratified sampling", "#6d7d1f", "v"),
  "no-reference": ("no reference advantage", "#0d6e5e", "D"),
  "no-hard-bonus": ("no hard bonus", "#a05a7a", "^"),
  "oracle": ("oracle (privileged)", "#8a5eb0", "P"),
  "optimum": ("optimum (exact policy)", "#ad7a10", "*"),
}
METRIC_NAMES = dict(zip(METRICS, ("mean score", "success rate")))
LEDGER = {"small_usd": "SMALL", "large_usd": "LARGE", "proposals_usd": "proposals not taken"}
LEDGER |= {"judge_usd": "zero-shot router", "retries_usd": "attempts without an answer"}
LEDGER |= {"router_usd": "router", "total_usd": "all of it"}
NONE = "–"


def family_name(results: Mapping, family: str) -> str:
  """As a reader knows it; another family goes by its own name."""
  if family in results["run"]["stand_ins"]:
    return f"{family} (stand-in)"
  return FAMILIES[family][0] if family in FAMILIES else family


def parameter_text(parameters: Mapping) -> str:
  """A policy's parameters, but for the training's length and the threshold of 0.5."""
  symbols = {"lam": "λ", "mu": "μ", "threshold": "t"}
  return ", ".join(
    f"share {100 * v:g} %" if k == "share" else f"{symbols.get(k, k)} = {v:g}"
    for k, v in parameters.items()
    if k != "update" and (k, v) != ("threshold", 0.5)
  )


def shown_metrics(results: Mapping) -> list[str]:
  """The environment's own metric first; one suffices where every score is 0 or 1."""
  sr, table = results["run"]["sr"], results["policies"]
  same = (table.score_percent == table.success_percent).all()
  return [sr] if same else sorted(METRICS, key=sr.__ne__)


def models_text(results: Mapping) -> str:
  """Which models were asked; what a host in one's own network serves is not called real."""
  models = results["run"]["models"]
  if models["kind"] == "scripted":
    return "scripted models"
  names = " and ".join(dict.fromkeys(host["name"] for host in models["hosts"]))
  return f"{'' if any(host['own'] for host in models['hosts']) else 'real '}models at {names}"


def cost_digits(results: Mapping) -> int:
  """Decimals at which the cheapest policy's dollars have three significant digits."""
  table = results["policies"]
  cheapest = table.cost_usd[table.usd_budget.isna()].min()
  return 2 - math.floor(math.log10(cheapest)) if cheapest > 0 else 4


def texts(frame: pd.DataFrame, columns: Mapping) -> dict:
  """Columns of a frame as texts such as "58.7 [49.1, 68.0]", with the interval where it has one.

  Args:
    columns: title -> (name, digits) or (name, digits, "+"); shares are shown in percent.
  """
  result = {}
  for title, (name, digits, *sign) in columns.items():
    scale = 100.0 if name.endswith("_share") else 1.0
    # z: what rounds to 0 has no minus.
    form = f"{{:{''.join(sign)}z.{digits}f}}".format
    ends = (name, f"{name}_low", f"{name}_high") if f"{name}_low" in frame else (name,)
    cells = (scale * frame[list(ends)]).map(form, na_action="ignore").astype("string")
    value, *ends = (cells[end] for end in ends)
    with_ends = value + " [" + ends[0] + ", " + ends[1] + "]" if ends else value
    result[title] = with_ends.fillna(value).fillna(NONE)
  return result


def areas(results: Mapping, frame: pd.DataFrame) -> pd.DataFrame:
  """The rows of `frontiers` or `ablations`: each area, BoPO's, and BoPO's minus it."""
  titles = {"its area": ("area", 2), "BoPO's": ("bopo_area", 2)}
  titles |= {"BoPO minus it": ("bopo_gain", 2, "+")}
  first = frame[frame.metric == METRICS[0]]
  columns = {
    ("", "Family"): [family_name(results, family) for family in first.family],
    ("", "λ"): [NONE if pd.isna(lam) else f"{lam:g}" for lam in first.lam],
    ("", "Points"): list(map(len, first.policies)),
  }
  for metric in shown_metrics(results):
    rows = frame[frame.metric == metric].reset_index()
    columns |= texts(rows, {(METRIC_NAMES[metric], title): titles[title] for title in titles})
  return pd.DataFrame(columns)


def hard_budget(results: Mapping) -> tuple[pd.DataFrame, pd.DataFrame]:
  """Per family SR, Use%, BoPO's gain, and success where SR is something else, under each K.

  The boundaries come first, for comparison: always-LARGE is not capped.

  Returns:
    Texts, and a table of the same shape: True where a text is bold.
  """
  rows, sr = results["hard_budget"], results["run"]["sr"]
  titles = {"SR": (sr, 1), "Use%": ("use_share", 0), "BoPO minus it": ("gain", 1, "+")}
  if sr != "success_percent":
    titles["Success"] = ("success_percent", 1)
  families = list(dict.fromkeys((ALWAYS_SMALL, ALWAYS_LARGE, *rows.family)))
  counts = rows.candidates.map(len).groupby(rows.family)
  counts = counts.agg(lambda n: " to ".join(map(str, sorted({n.min(), n.max()}))))
  columns = {
    ("", "Family"): [family_name(results, family) for family in families],
    ("", "Candidates"): [counts.get(family, "no cap") for family in families],
  }
  bold = pd.DataFrame(index=families)
  for K, group in rows.groupby("K"):
    group = group.set_index("family").reindex(families)
    figures = [metric + end for metric in METRICS for end in ("", "_low", "_high")]
    group.loc[ALWAYS_LARGE, figures] = results["policies"].loc[ALWAYS_LARGE, figures]
    columns |= texts(group, {(f"K = {K}", title): titles[title] for title in titles})
    bold[f"K = {K}", "SR"] = group.clear.eq(True)
  frame = pd.DataFrame(columns, families)
  return frame, bold.reindex(columns=frame.columns, fill_value=False)


def every_policy(results: Mapping, dollars: bool) -> pd.DataFrame:
  """The figures of all policies under a cap in dollars, or of all others."""
  table, digits = results["policies"], cost_digits(results)
  table = table[table.usd_budget.notna() == dollars]
  cap = table.usd_budget if dollars else table.call_budget
  columns = {
    "Family": [family_name(results, family) for family in table.family],
    "Parameters": [parameter_text(p) or NONE for p in table.parameters],
    "Cap, $" if dollars else "K": [NONE if pd.isna(k) else f"{k:g}" for k in cap],
  }
  titles = {
    "Mean score": ("score_percent", 1),
    "Success": ("success_percent", 1),
    "Model cost, $": ("cost_usd", digits),
    "Router cost, $": ("deciding_usd", digits + 1),
    "Cost gap, %": ("cost_gap_share", 0),
    "Success gap, %": ("success_gap_share", 0),
    "LARGE calls": ("large_calls", 1),
    "Steps": ("steps", 1),
    "Use%": ("use_share", 0),
    "Overruns": ("overruns", 0),
  }
  return pd.DataFrame(columns | texts(table, titles))


def spending(results: Mapping) -> pd.DataFrame:
  """Which part of a family's dollars and LARGE calls each difficulty takes, in percent."""
  rows, columns = results["by_difficulty"], {}
  for column, title in (("cost_usd", "share of dollars, %"), ("large_calls", "of LARGE calls, %")):
    shares = 100 * rows[rows.column == column].set_index("family")[DIFFICULTIES]
    columns |= texts(shares, {(title, name): (name, 0) for name in DIFFICULTIES})
  frame = pd.DataFrame(columns)
  frame.insert(0, ("", "Family"), [family_name(results, family) for family in frame.index])
  return frame


def latency(results: Mapping) -> pd.DataFrame:
  rows = results["latency"].reset_index()
  names = {"SMALL, s": "small_s", "LARGE, s": "large_s", "router, s": "router_s"}
  names |= {"router, %": "router_share"}
  titles = {("by the paper's rates", title): (name, 2) for title, name in names.items()}
  names = {"a decision, s": "decision_s", "router, s": "waited_s", "models, s": "models_s"}
  names |= {"router, %": "waited_share"}
  titles |= {("measured", title): (name, 3) for title, name in names.items()}
  families = [family_name(results, family) for family in rows.family]
  return pd.DataFrame({("", "Family"): families} | texts(rows, titles))


def calibration(results: Mapping) -> pd.DataFrame:
  """Per bin of the cascade's predictions: the mean of them, the observed rate, and the count."""
  bins = pd.DataFrame(results["calibration"]["bins"], columns=["predicted", "observed", "count"])
  bins = bins.rename(columns={"predicted": "predicted_share", "observed": "observed_share"})
  titles = {"Predicted failures, %": "predicted_share", "Observed, %": "observed_share"}
  titles |= {"Decisions": "count"}
  return pd.DataFrame(texts(bins, {title: (name, 0) for title, name in titles.items()}))


def robustness(results: Mapping) -> pd.DataFrame:
  rows = pd.DataFrame(results["robustness"], dtype=float)
  rows = rows.rename(columns={"agreement": "agreement_share"})
  titles = {"Trials K": "trials", "Tasks": "tasks", "Same label, %": "agreement_share"}
  titles |= {"Hard": "hard", f"Hard at K = {results['run']['profile_trials']}": "base_hard"}
  columns = {title: (name, 0) for title, name in titles.items()}
  return pd.DataFrame(texts(rows, columns | {"Jaccard of the hard": ("hard_jaccard", 2)}))


def paper(results: Mapping) -> pd.DataFrame:
  rows = results["paper"].fillna(NONE)
  figures = rows.figure.where(~rows.figure.duplicated(), "")
  names = [family_name(results, what) for what in rows.what]
  columns = {"Figure": figures, "": names, "The paper": rows.paper, "This run": rows.ours}
  return pd.DataFrame(columns)


def ledger(results: Mapping) -> dict[str, float]:
  """Dollars by title; those of baselines only where a baseline has cost something."""
  book, stand_in = results["ledger"], " (stand-in)" if results["run"]["stand_ins"] else ""
  return {
    title + stand_in * (part == "judge_usd"): book[part]
    for part, title in LEDGER.items()
    if part not in ("proposals_usd", "judge_usd") or book[part]
  }


def above_bopo(results: Mapping, frame: pd.DataFrame, gain: str, digits: int) -> list[str]:
  """Who is above BoPO by the point estimate, privileged families apart, in words."""
  rows = frame[(frame[gain] < 0) & ~frame.family.isin(PRIVILEGED)]
  if "metric" in frame:
    rows = rows[rows.metric.isin(shown_metrics(results))]
  low, high = -rows[f"{gain}_high"], -rows[f"{gain}_low"]
  leads = texts(rows.assign(by=-rows[gain], by_low=low, by_high=high), {"text": ("by", digits)})
  sentences = []
  for row in rows.assign(text=leads["text"], clear=low > 0).to_dict("records"):
    where = f"K = {row['K']}" if "K" in row else METRIC_NAMES[row["metric"]]
    verb = "excludes" if row["clear"] else "does not exclude"
    lead = f"{family_name(results, row['family'])}, {where}: by {row['text']}"
    sentences.append(f"{lead}; the 95 % interval {verb} 0")
  return sentences


def to_html(frame: pd.DataFrame, bold: pd.DataFrame | None = None) -> Markup:
  """The table as HTML. Its texts are escaped."""
  cells = _marked(frame, bold, lambda text: str(escape(text)), "<b>{}</b>")
  return Markup(cells.to_html(escape=False, index=False, border=0))


def to_markdown(frame: pd.DataFrame, bold: pd.DataFrame) -> str:
  cells = _marked(frame, bold, lambda text: re.sub(r"([\\|*_`<>])", r"\\\1", text), "**{}**")
  cells.columns = [" ".join(filter(None, names)) for names in cells.columns]
  return cells.to_markdown(index=False, disable_numparse=True)


def to_latex(frame: pd.DataFrame, bold: pd.DataFrame) -> str:
  """The table for LaTeX with booktabs."""
  style = frame.style.hide(axis="index").format(escape="latex")
  style = style.format_index(escape="latex", axis="columns")
  style = style.apply(lambda _: bold.replace({True: "textbf:--rwrap", False: ""}), axis=None)
  form = "l" + "r" * (len(frame.columns) - 1)
  return style.to_latex(hrules=True, column_format=form, multicol_align="c")


def _marked(
  frame: pd.DataFrame, bold: pd.DataFrame | None, quote: Callable[[str], str], strong: str
) -> pd.DataFrame:
  """The table with every text quoted, and some bold."""
  cells = frame.map(lambda text: quote(str(text))).rename(columns=quote)
  return cells if bold is None else cells.where(~bold.to_numpy(bool), cells.map(strong.format))
