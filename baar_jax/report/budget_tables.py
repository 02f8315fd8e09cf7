"""Tables of budgets: K LARGE calls as HTML, Markdown and LaTeX; dollars; the ledger."""

import dataclasses
import html
from collections.abc import Sequence

from baar_jax.report.cells import (
  candidates,
  cost_digits,
  family_name,
  interval_text,
  models_text,
  picked,
  row,
  stands,
)
from baar_jax.report.samples import LARGE_FAMILY, SMALL_FAMILY
from baar_jax.report.theme import parameter_text, sr_name

BOLD_RULE = (
  "Bold is the best of the families that see no more than a router may, only where the paired 95 % "
  "interval of its gain over the next one lies above 0. Intervals hold fixed what was picked, and "
  "which family is best and which next."
)
TEX = {
  **{symbol: f"\\{symbol}" for symbol in "&%$#_{}"},
  "\\": r"\textbackslash{}",
  "~": r"\textasciitilde{}",
  "^": r"\textasciicircum{}",
  "λ": r"$\lambda$",
  "μ": r"$\mu$",
  "–": "--",
  "<": "$<$",
  ">": "$>$",
}


@dataclasses.dataclass(frozen=True)
class Cell:
  """A policy or a family under one K: texts without markup.

  Attributes:
    sr, success, use: percent; "–" where there is none.
    interval: of SR, in brackets.
    gain: BoPO's SR minus this one's with its interval.
    bold: by BOLD_RULE.
    overruns: episodes of more than K LARGE calls.
  """

  sr: str = "–"
  interval: str = ""
  success: str = "–"
  use: str = "–"
  gain: str = "–"
  bold: bool = False
  overruns: int = 0


def hard_budget_grid(results: dict) -> tuple[list[int], list[tuple[str, str, list[Cell]]]]:
  """The budgets K, and per family its name, how many candidates it has, and a cell per K.

  The boundaries come first, for comparison: always-LARGE is not capped.
  """
  metric = results["run"]["sr_metric"]
  by_K = {int(K): best for K, best in results["hard_budget_best"].items()}
  soft = {p["family"]: p for p in results["policies"] if p["call_budget"] is None}
  uncapped = _cell(soft[LARGE_FAMILY], metric)
  families = dict.fromkeys(f for best in by_K.values() for f in best["families"])
  counts, grid = {LARGE_FAMILY: "no cap"} | candidates(results), []
  for family in dict.fromkeys((SMALL_FAMILY, LARGE_FAMILY, *families)):
    missing = uncapped if family == LARGE_FAMILY else Cell()
    cells = []
    for best in by_K.values():
      found = best["families"].get(family)
      bold = best["clear"] and best["best"] == family
      cells.append(_cell(found, metric, bold) if found else missing)
    grid.append((family, counts[family], cells))
  return list(by_K), grid


def _cell(figures: dict, metric: str, bold: bool = False) -> Cell:
  share, more = figures["use_share"], figures.get("gain")
  return Cell(
    sr=f"{figures[f'{metric}_percent']:.1f}",
    interval=f"[{interval_text(figures[f'{metric}_interval'], 1, 1, ', ')}]",
    success=f"{figures['success_percent']:.1f}",
    use="–" if share is None else f"{100 * share:.0f}",
    gain=f"{more['value']:+z.1f} [{interval_text(more['interval'], 1, 1, ', ', '+')}]"
    if more
    else "–",
    bold=bold,
    overruns=figures["overruns"],
  )


def hard_budget(results: dict) -> str:
  """Per family SR, success where SR is something else, Use%, and BoPO's gain at each K, as HTML."""
  budgets, grid = hard_budget_grid(results)
  over = sum(p["overruns"] for p in results["policies"])
  total = sum(p["episodes"] for p in results["policies"] if p["call_budget"] is not None)
  bopo = any(family == "bopo" for family, _, _ in grid)
  note = f"""{BOLD_RULE} {html.escape(picked(results))} {over} of {total} episodes made more than K
LARGE calls. {stands(results)} Also as <code>hard_budget.md</code> and
<code>hard_budget.tex</code>."""
  return _budget_table(results, "Candidates", budgets, grid, note, bopo)


def every_budget(results: dict) -> str:
  """The same of every policy, each at parameters of its own."""
  metric, rows = results["run"]["sr_metric"], results["hard_budget"]
  budgets = sorted({int(K) for r in rows for K in r["budgets"]})
  grid = []
  for r in rows:
    found = [r["budgets"].get(str(K)) for K in budgets]
    cells = [_cell(figures, metric) if figures else Cell() for figures in found]
    grid.append((r["family"], parameter_text(r["parameters"]), cells))
  note = (
    "Families cannot be compared by their best rows here, which would be picked on the tasks that "
    f"they are measured on. {stands(results)}"
  )
  return _budget_table(results, "Parameters", budgets, grid, note, gains=False)


def _budget_table(
  results: dict,
  second: str,
  budgets: Sequence[int],
  grid: Sequence[tuple[str, str, list[Cell]]],
  note: str,
  gains: bool,
) -> str:
  metric = results["run"]["sr_metric"]
  both = metric != "success"
  width = 2 + both + gains
  lines = []
  for family, text, line in grid:
    cells = ""
    for cell in line:
      value = f"<b>{cell.sr}</b>" if cell.bold else cell.sr
      over = f' <span class="alarm">{cell.overruns} over K</span>' if cell.overruns else ""
      cells += f"<td>{value} <small>{cell.interval}</small>{over}</td>"
      cells += f"<td>{cell.success}</td>" if both else ""
      cells += f"<td>{cell.use}</td>"
      cells += f"<td><small>{cell.gain}</small></td>" if gains else ""
    lines.append(row(results, family, text or "–", cells))
  columns = f"<th>SR</th>{'<th>Success</th>' if both else ''}<th>Use%</th>"
  columns += "<th>BoPO minus it</th>" if gains else ""
  heads = "".join(f'<th colspan="{width}" class="group">K = {K}</th>' for K in budgets)
  return f"""<div class="scroll"><table class="dense">
<thead><tr><th rowspan="2">Family</th><th rowspan="2">{second}</th>{heads}</tr>
<tr>{columns * len(budgets)}</tr></thead>
<tbody>{"".join(lines)}</tbody>
</table></div>
<p class="note">SR is the {sr_name(metric).split(",")[0]} × 100. Use% is the mean number of LARGE
calls over K. In brackets 95 % bootstrap intervals over tasks; differences are paired. {note}</p>"""


def hard_budget_markdown(results: dict) -> str:
  """SR with its interval and Use% of each family under each K as a Markdown table."""
  budgets, grid = hard_budget_grid(results)
  names = "".join(f" K = {K} SR | Use% |" for K in budgets)
  lines = [f"| Family | Candidates |{names}", "|---|---:|" + "---:|" * (2 * len(budgets))]
  for family, many, line in grid:
    texts = [_markdown(family_name(results, family)), many]
    for cell in line:
      sr = f"**{cell.sr}**" if cell.bold else cell.sr
      texts += [f"{sr} {cell.interval}".strip(), cell.use]
    lines.append(f"| {' | '.join(texts)} |")
  return "\n".join(lines) + f"\n\n{BOLD_RULE} {_markdown(picked(results))} {stands(results)}\n"


def hard_budget_latex(results: dict) -> str:
  """The same for LaTeX with booktabs."""
  budgets, grid = hard_budget_grid(results)
  heads = "".join(rf" & \multicolumn{{2}}{{c}}{{$K={K}$}}" for K in budgets)
  rules = "".join(rf"\cmidrule(lr){{{3 + 2 * i}-{4 + 2 * i}}}" for i in range(len(budgets)))
  lines = []
  for place, (family, many, line) in enumerate(grid):
    texts = [latex(family_name(results, family)), many]
    for cell in line:
      sr = latex(cell.sr)
      sr = rf"\textbf{{{sr}}}" if cell.bold else sr
      texts += [f"{sr} {cell.interval}".strip(), latex(cell.use)]
    lines.append(" & ".join(texts) + r" \\" + ("\n\\midrule" if place == 1 else ""))
  body = "\n".join(lines)
  columns = r" & SR & Use\%" * len(budgets)
  return rf"""% {BOLD_RULE.replace("%", "percent")}
% {picked(results)}
% {stands(results)}
\begin{{tabular}}{{lr{"rr" * len(budgets)}}}
\toprule
Family & Candidates{heads} \\
{rules}
 & {columns} \\
\midrule
{body}
\bottomrule
\end{{tabular}}
"""


def latex(text: str) -> str:
  """Text in which nothing is a command of LaTeX."""
  return "".join(TEX.get(symbol, symbol) for symbol in text)


def _markdown(text: str) -> str:
  """Text that neither ends its cell nor starts markup."""
  return "".join(f"\\{symbol}" if symbol in "\\|*_`<>" else symbol for symbol in text)


def dollar_budget(results: dict) -> str:
  """SR, success, Use% and overruns under each B_max."""
  rows = []
  digits = cost_digits(results)
  for p in results["dollar_budget"]:
    cell = _cell(p, results["run"]["sr_metric"])
    cells = (
      f"<td>{p['usd_budget']:g}</td><td>{cell.sr} <small>{cell.interval}</small></td>"
      f"<td>{cell.success}</td>"
      f"<td>{p['cost_usd']:.{digits}f}</td><td>{cell.use}</td><td>{cell.overruns}</td>"
    )
    rows.append(row(results, p["family"], parameter_text(p["parameters"]) or "–", cells))
  return f"""<div class="scroll"><table>
<thead><tr><th>Family</th><th>Parameters</th><th>B<sub>max</sub>, $</th><th>SR</th><th>Success</th>
<th>Model cost, $</th><th>Use%</th><th>Overruns</th></tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>
<p class="note">A call is made only if the most that it can cost fits what is left of the task's
dollars. Use% is the mean share of B<sub>max</sub> that was spent, failed attempts included. An
overrun is an episode that was billed for more than B<sub>max</sub>. In brackets 95 % bootstrap
intervals over tasks. {stands(results)}</p>"""


LEDGER_ROWS = (
  ("small_usd", "SMALL"),
  ("large_usd", "LARGE"),
  ("proposals_usd", "proposals not taken"),
  ("judge_usd", "zero-shot router"),
  ("retries_usd", "attempts without an answer"),
  ("router_usd", "router"),
  ("total_usd", "all of it"),
)


def _ledger_rows(results: dict) -> list[tuple[str, str]]:
  """The parts; those of baselines only where a baseline has cost something."""
  book, optional = results["ledger"], ("proposals_usd", "judge_usd")
  stand_in = {"judge_usd": " (stand-in)"} if results["run"]["stand_ins"] else {}
  return [
    (part, title + stand_in.get(part, ""))
    for part, title in LEDGER_ROWS
    if part not in optional or book[part]
  ]


def ledger(results: dict) -> str:
  """What the whole run has cost, part by part."""
  book = results["ledger"]
  rows = "".join(
    f'<tr><th scope="row">{title}</th><td>{book[part]:.6f}</td></tr>'
    for part, title in _ledger_rows(results)
  )
  return f"""<div class="scroll"><table>
<thead><tr><th>All stages of this run</th><th>$</th></tr></thead>
<tbody>{rows}</tbody>
</table></div>
<p class="note">Up to ${book["presumed_usd"]:.6f} more may have been billed for calls whose outcome
is unknown: time-outs, lost connections, a killed process. Replies that had been recorded before
saved ${book["replayed_usd"]:.6f}, which is not in these sums.</p>"""


def ledger_text(results: dict) -> str:
  """The same in a line for the terminal."""
  book = results["ledger"]
  parts = ", ".join(f"{title} ${book[part]:.4f}" for part, title in _ledger_rows(results)[:-1])
  line = f"spent by this run: ${book['total_usd']:.4f} ({parts})"
  if book["presumed_usd"]:
    line += f", and at most ${book['presumed_usd']:.4f} for calls whose outcome is unknown"
  return f"{line}; {models_text(results)}"
