"""Stage report: the evaluation's results as results.json, PNGs and one self-contained page."""

import json
from pathlib import Path

from baar_jax.config import Config
from baar_jax.episode import SMALL
from baar_jax.llms import pair as models
from baar_jax.report import budget_tables, results
from baar_jax.report.cells import cost_digits
from baar_jax.report.methods import methods
from baar_jax.report.optimum import Exact
from baar_jax.rollout.entries import entries
from baar_jax.run import Run
from baar_jax.train.dataset import load_profiles


def main(run: Run) -> None:
  if not run.first:
    return
  summary = results.summarize(
    run.store,
    entries(run.config),
    run.config,
    load_profiles(run.store, run.config),
    read_metrics(run.dir),
    exact_frontier(run.config),
    None if run.pair.kind == "scripted" else models.spent(run.dir, run.pair.names),
    methods(run),
  )
  page = write_report(summary, run.dir / "report")
  print(terminal_table(summary))
  print(f"report: {page}")


def exact_frontier(config: Config) -> dict | None:
  """The sandbox's optimal frontier and boundaries over the distribution of tasks.

  None in another environment, for other models or prices than those that it is computed for, and
  where there are too few steps for LARGE to gain anything.
  """
  c = config.models
  if config.env.kind != "sandbox" or c.kind != "scripted" or c.prices:
    return None
  exact = Exact(max_steps=config.env.max_steps, names=config.models.names)
  small, large = exact.always(SMALL), exact.always(len(config.models.names) - 1)
  if large[1] <= small[1]:
    return None
  optimum = [list(point) for point in exact.hull()]
  return {"optimum": optimum, "small": list(small), "large": list(large)}


def read_metrics(directory: Path) -> list[dict]:
  """The lines of metrics.jsonl; none if nothing was trained."""
  path = directory / "metrics.jsonl"
  lines = []
  for line in path.read_text().splitlines() if path.exists() else ():
    try:
      lines.append(json.loads(line))
    except json.JSONDecodeError:
      continue  # cut short by a kill; the resumed run wrote its update again
  return lines


def write_report(summary: dict, directory: Path) -> Path:
  """Writes results.json, a PNG per figure, the hard-budget table as Markdown and LaTeX, and
  index.html; returns the page's path."""
  # matplotlib takes a second to import, which the other stages need not pay.
  from baar_jax.report import page, plots

  directory.mkdir(parents=True, exist_ok=True)
  text = json.dumps(summary, indent=1, allow_nan=False)
  (directory / "results.json").write_text(text, encoding="utf-8")
  svg = {}
  for name, figure in plots.draw_all(summary).items():
    svg[name] = plots.to_svg(figure, name, plots.description(name))
    figure.savefig(directory / f"{name}.png", dpi=144, facecolor="white")
  if summary["hard_budget"]:
    markdown, latex = (
      render(summary)
      for render in (budget_tables.hard_budget_markdown, budget_tables.hard_budget_latex)
    )
    (directory / "hard_budget.md").write_text(markdown, encoding="utf-8")
    (directory / "hard_budget.tex").write_text(latex, encoding="utf-8")
  path = directory / "index.html"
  path.write_text(page.render(summary, svg), encoding="utf-8")
  return path


def terminal_table(summary: dict) -> str:
  """A line per policy for the terminal."""
  mark = lambda family: " (stand-in)" if family in summary["run"]["stand_ins"] else ""  # noqa: E731
  lines = [f"{'policy':<44}{'SR':>7}{'success':>9}{'$/task':>10}{'LARGE':>7}{'Use%':>6}"]
  digits = cost_digits(summary)
  sr = f"{summary['run']['sr_metric']}_percent"
  for p in (*summary["policies"], *summary["dollar_budget"]):
    use = "" if p["use_share"] is None else f"{100 * p['use_share']:.0f}"
    lines.append(
      f"{p['policy'] + mark(p['family']):<44}{p[sr]:>7.1f}{p['success_percent']:>9.1f}"
      f"{p['cost_usd']:>10.{digits}f}{p['large_calls']:>7.1f}{use:>6}"
    )
  for family, front in summary["frontiers"].items():
    area = front["area"][summary["run"]["sr_metric"]]
    if area is not None:
      lines.append(f"area of {family}{mark(family)}: {area['value']:.3f}")
  lines.append(budget_tables.ledger_text(summary))
  return "\n".join(lines)
