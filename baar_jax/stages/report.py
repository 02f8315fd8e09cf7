"""Stage report: the evaluation's results as a page, PNGs, results.json and the terminal's table."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from pydantic import FiniteFloat, create_model

from baar_jax.envs import engines
from baar_jax.llms.calls import read_spent
from baar_jax.report import texts
from baar_jax.report.table import FORECAST, list_evaluated, read_curves
from baar_jax.run import Run

# What it reads from what the stage forecast has kept.
NUMBER = (FiniteFloat, ...)
ROW = dict.fromkeys([f"forecast_share{end}" for end in ("", "_low", "_high")], NUMBER)
ROW |= {"budget": (str, ...), "measured_share": (FiniteFloat | None, None)}
BIN = dict.fromkeys(("predicted", "observed", "count"), NUMBER)
FIT = create_model("fit", brier=NUMBER, bins=(list[create_model("bin", **BIN)], ...))
ROWS = (list[create_model("row", **ROW)], ...)
FORECAST_MODEL = create_model("forecast", rows=ROWS, calibration=(FIT | None, None))


def main(run: Run) -> None:
  if not run.is_main:
    return
  # matplotlib takes a second to import, which the other stages need not pay.
  from baar_jax.report import page

  spent = None if run.pair.kind == "scripted" else read_spent(run.dir, len(run.pair.names) + 1)
  c = run.config.env
  own_tasks = c.kind in engines.ENGINES and engines.uses_generated_data(c.kind, c.data)
  forecast = read_forecast(run.dir / FORECAST) if run.config.value.updates else None
  played, curves = list_evaluated(run.store, run.config), read_curves(run.dir / "metrics.jsonl")
  results = page.compute_results(run.store, played, run.config, spent, forecast, own_tasks, curves)
  print(terminal_table(results))
  print(f"report: {page.write(results, run.dir / 'report')}")


def read_forecast(path: Path) -> dict | None:
  """What the stage forecast kept; None if nothing. Raises ValueError if it cannot be read."""
  try:
    return FORECAST_MODEL.model_validate_json(path.read_text()).model_dump()
  except FileNotFoundError:
    return None
  except ValueError as error:
    raise ValueError(f"{path} cannot be read: run --stage=forecast again") from error


def terminal_table(results: Mapping) -> str:
  """A line per policy, those under a cap in dollars last, and per area; what the run has cost."""
  mark = {family: " (stand-in)" for family in results["run"]["stand_ins"]}
  sr, digits = results["run"]["sr"], texts.cost_digits(results)
  lines = [f"{'policy':<44}{'SR':>7}{'success':>9}{'$/task':>10}{'LARGE':>7}{'Use%':>6}"]
  table = results["policies"].sort_values("usd_budget", key=pd.notna, kind="stable")
  for policy, p in table.iterrows():
    use = "" if pd.isna(p.use_share) else f"{100 * p.use_share:.0f}"
    lines.append(
      f"{texts.clean(policy) + mark.get(p.family, ''):<44}{p[sr]:>7.1f}{p.success_percent:>9.1f}"
      f"{p.cost_usd:>10.{digits}f}{p.large_calls:>7.1f}{use:>6}"
    )
  rows = results["frontiers"]
  for row in rows[(rows.metric == sr) & rows.area.notna()].itertuples():
    lines.append(f"area of {row.family}{mark.get(row.family, '')}: {row.area:.3f}")
  *parts, (_, total_usd) = texts.ledger(results).items()
  line = ", ".join(f"{title} ${usd:.4f}" for title, usd in parts)
  line = f"spent by this run: ${total_usd:.4f} ({line})"
  if presumed_usd := results["ledger"]["presumed_usd"]:
    line += f", and at most ${presumed_usd:.4f} for calls whose outcome is unknown"
  return "\n".join([*lines, f"{line}; {texts.models_text(results)}"])
