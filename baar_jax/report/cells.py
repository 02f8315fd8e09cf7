"""How the report writes numbers: cells, rows and notes of its tables."""

import html
import math
from collections.abc import Sequence

from baar_jax.report.theme import COLORS, FAMILIES

STAND_IN = "a rule on the same text stands in for the judge"


def family_name(results: dict, family: str) -> str:
  """As a reader knows it; a family of one's own goes by its own name."""
  stand_in = family in results["run"]["stand_ins"]
  return f"{family} (stand-in)" if stand_in else FAMILIES.get(family, family)


def short_name(results: dict, family: str) -> str:
  """The same without an explanation in brackets; a stand-in stays one."""
  name = family_name(results, family)
  return name if family in results["run"]["stand_ins"] else name.split(" (")[0]


def candidates(results: dict) -> dict[str, str]:
  """Out of how many each family's parameters under a K are picked."""
  counts: dict[str, list[int]] = {}
  for best in results["hard_budget_best"].values():
    for family, row in best["families"].items():
      counts.setdefault(family, []).append(len(row["candidates"]))
  ends = {family: dict.fromkeys((min(many), max(many))) for family, many in counts.items()}
  return {family: " to ".join(map(str, both)) for family, both in ends.items()}


def picked(results: dict) -> str:
  """How families' parameters under each K were picked, and out of how many."""
  texts = [
    f"{family_name(results, family)} {many}"
    for family, many in candidates(results).items()
    if many != "1"
  ]
  if not texts:
    return "No family has more than one candidate at a K."
  return (
    "A family's parameters at a K are picked on one half of these tasks and measured on the other, "
    f"and the other way round, out of so many candidates: {', '.join(texts)}."
  )


def cost_digits(results: dict) -> int:
  """Decimals at which the cheapest policy's dollars have three significant digits."""
  cheapest = min(p["cost_usd"] for p in results["policies"])
  return 2 - math.floor(math.log10(cheapest)) if cheapest > 0 else 4


def models_text(results: dict) -> str:
  """What was asked, and where: what a host within one's own network serves is not ours to say."""
  models = results["run"]["models"]
  if models["kind"] == "scripted":
    return "scripted models"
  names = " and ".join(dict.fromkeys(host["name"] for host in models["hosts"]))
  real = not any(host["own"] for host in models["hosts"])
  return f"{'real models' if real else 'models'} at {names}"


def stands(results: dict) -> str:
  run = results["run"]
  return f"{run['test_tasks']} held-out tasks, {run['seeds']} seeds, {models_text(results)}."


def interval_text(
  interval: Sequence[float] | None, factor: float, digits: int, between: str, sign: str = ""
) -> str:
  """Both ends times the factor; a dash where there is no interval."""
  if interval is None:
    return "–"
  # z: what rounds to 0 has no minus.
  return between.join(f"{factor * end:{sign}z.{digits}f}" for end in interval)


def interval_cell(interval: Sequence[float] | None, digits: int, sign: str = "") -> str:
  return f"<small>[{interval_text(interval, 1, digits, ', ', sign)}]</small>"


def percent(share: float | None) -> str:
  return "–" if share is None else f"{100 * share:.0f} %"


def row(results: dict, family: str, second: str, cells: str) -> str:
  name = html.escape(family_name(results, family))
  kind = ' class="own"' if family == "bopo" else ""
  return f'<tr{kind}><th scope="row">{name}</th><td>{html.escape(second)}</td>{cells}</tr>'


def strip(area: dict | None, family: str) -> str:
  """The area and its interval on a line from 0 to 1.2."""
  if area is None:
    return ""
  place = lambda value: 100 * min(max(value, 0.0), 1.2) / 1.2  # noqa: E731
  low, high = area["interval"] or (area["value"], area["value"])
  color = f"var(--{family if family in COLORS else 'muted'})"
  return (
    '<svg class="strip" viewBox="0 0 100 12" aria-hidden="true">'
    f'<path d="M0 6H100M{place(0.5):.1f} 2V10M{place(1.0):.1f} 2V10" stroke="var(--rule)"/>'
    f'<path d="M{place(low):.1f} 6H{place(high):.1f}" stroke="{color}" stroke-width="2"/>'
    f'<circle cx="{place(area["value"]):.1f}" cy="6" r="3.2" fill="{color}"/></svg>'
  )


def table(head: str, rows: Sequence[str], note: str = "", kind: str = "") -> str:
  """A table that scrolls sideways where it is wider than the page, and its note."""
  note = f'\n<p class="note">{note}</p>' if note else ""
  kind = f' class="{kind}"' if kind else ""
  return f"""<div class="scroll"><table{kind}>
<thead>{head}</thead>
<tbody>{"".join(rows)}</tbody>
</table></div>{note}"""


def number(value: float | None, digits: int) -> str:
  return "–" if value is None else f"{value:.{digits}f}"
