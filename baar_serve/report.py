"""Write a page on sessions that another program recorded: what they cost, and where.

python -m baar_serve.report --config.traces=FILE_OR_DIRECTORY
"""

import collections
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from baar_jax.llms.prices import (
  CACHE_RULES,
  Billing,
  Price,
  Read,
  drop_version,
  find_row,
  list_price,
  prices_of,
)
from baar_serve.app import PAGE
from baar_serve.config import ServeConfig, run_command
from baar_serve.forecast import (
  FORECAST,
  Facts,
  cross_validate,
  fit_forecast,
  list_scored,
  tabulate_calibration,
  tabulate_steps,
)
from baar_serve.logs.read import read_logs
from baar_serve.logs.record import Calls

# A session goes in circles once an action has brought the same observation for this
# time (our choice).
CIRCLE = 3
# Most sessions in circles that the page lists.
MOST_ROWS = 20
# The last prompt of a session that has none.
COLD = Read(0, 0.0)


def report(config: ServeConfig) -> None:
  """Write the page of the sessions in `--config.traces`, and print its figures.

  Raises:
    ValueError: no file is named, or it has no call.
  """
  broken = []
  rows = [*list_rows(read_logs(config, broken))]
  for line in broken:
    print(line)
  if not rows:
    raise ValueError(
      f"{config.traces} has no call. Set --config.traces to logs of sessions."
    )
  prices = dict(zip(config.models.names, prices_of(config.models)))
  costs = price_rows(rows, prices)
  calls = make_frame(rows)
  tables = list_tables(calls)
  tables["The same tokens at list prices, each model with its own cache"] = costs
  directory = Path(config.runs) / config.name
  page = directory / "report" / "logs.html"
  page.parent.mkdir(parents=True, exist_ok=True)
  scored = list_scored(calls)
  if len(scored):
    forecasts = cross_validate(scored)
    tables["Forecast of success by step"] = tabulate_steps(forecasts)
    tables["Calibration of the forecast"] = tabulate_calibration(forecasts)
    weight_F = fit_forecast(np.stack(scored.facts), scored.success)
    np.save(directory / FORECAST, weight_F)
  for title, table in tables.items():
    print(f"\n{title}\n{table.to_string(index=False)}")
  page.write_text(PAGE.render(config=config, tables=tables, broken=broken))
  print(f"\n{page}")


def list_rows(calls: Calls) -> Iterator[dict]:
  """Yield a row for each call, with hashes for its texts.

  A row also has the facts before the call, and `last`, the prompt of its session that
  models may have cached. A prompt that is shorter than the last one begins a new
  history, of which nothing is cached (our choice).
  """
  reads = {}
  facts = collections.defaultdict(Facts)
  for call in calls:
    session = call.session
    read = Read(call.usage.prompt_tokens, call.at_s or 0.0)
    last = reads.get(session, COLD)
    reads[session] = read
    day = call.at_s and time.strftime("%F", time.gmtime(call.at_s))
    yield vars(call) | dict(
      text="",
      model=drop_version(call.model).rpartition("/")[2],
      observation=hash(call.observation),
      # An action that is not recorded, whose hash is 0, is no repeat.
      action=hash(call.action) or None,
      day=day or "unknown",
      at_s=read.at_s,
      last=last if last.tokens <= read.tokens else COLD,
      facts=facts[session].list(),
    )
    facts[session].add(call.observation, call.action, call.usage, call.usd or 0.0)


def price_rows(rows: list[dict], prices: dict[str, Price]) -> pd.DataFrame:
  """Compute the dollars that all calls cost at each model's price, with its own cache.

  The rows get the dollars that the log does not state, and the cached tokens of usage
  that is estimated.

  Args:
    rows: see `list_rows`.
    prices: the prices of the configured models; other models have list prices.

  Returns:
    A row for each model that has a price.
  """
  costs = []
  for model in sorted({*prices, *(row["model"] for row in rows)}):
    try:
      price = prices.get(model) or list_price(model)
    except ValueError:
      continue
    billing = Billing((price,), (find_row(CACHE_RULES, model),))
    usd = 0.0
    for row in rows:
      usage = row["usage"]
      call = billing.bill(
        0, [row["last"]], usage.prompt_tokens, usage.completion_tokens, row["at_s"]
      )
      usd += call.cost_usd
      if row["model"] != model:
        continue
      if row["is_estimated"]:
        row["usage"] = call.usage
      if row["usd"] is None:
        row["usd"] = price.cost_usd(row["usage"])
    costs.append(dict(model=model, usd=usd))
  return pd.DataFrame(costs)


def make_frame(rows: list[dict]) -> pd.DataFrame:
  """Make a table of priced calls, with their tokens, step and session's success."""
  calls = pd.DataFrame(rows)
  calls = calls.join(pd.DataFrame([*calls.usage])).astype(dict(usd=float))
  sessions = calls.groupby("session")
  calls["step"] = sessions.cumcount() + 1
  # The last score that a session has is the score of all its rows.
  calls["score"] = sessions.score.transform("last").astype(float)
  calls["success"] = calls.score // 1
  results = calls.groupby(["session", sessions.action.shift(), "observation"])
  is_circle = results.cumcount() >= CIRCLE - 1
  calls["is_circling"] = is_circle.groupby(calls.session).cummax()
  return calls


def list_tables(calls: pd.DataFrame) -> dict[str, pd.DataFrame]:
  """Compute the tables of the page, by title."""
  circling = calls[calls.is_circling].groupby("session")
  circles = pd.DataFrame(
    dict(
      log=circling.session.first(),
      from_step=circling.step.first(),
      steps_after=circling.size(),
      after_usd=circling.usd.sum(min_count=1),
      score=circling.score.first(),
    )
  )
  circles = circles.sort_values(["after_usd", "steps_after"], ascending=False)
  total = add_up(calls.assign(all="all"), "all")
  total["sessions_in_circles"] = len(circles)
  total["circles_usd"] = circles.after_usd.sum(min_count=1)
  return {
    "All sessions": total,
    "By model": add_up(calls, "model"),
    "By day (UTC)": add_up(calls, "day"),
    "Sessions in circles: one action, one observation, three times": circles.head(
      MOST_ROWS
    ),
  }


def add_up(calls: pd.DataFrame, key: str) -> pd.DataFrame:
  """Add up the calls with one value of a column, a row for each value."""
  groups = calls.groupby(key)
  prompt_tokens = groups.prompt_tokens.sum()
  columns = dict(
    sessions=groups.session.nunique(),
    steps=groups.size(),
    usd=groups.usd.sum(min_count=1),
    prompt_tokens=prompt_tokens,
    cached_share=groups.cached_tokens.sum() / prompt_tokens,
    completion_tokens=groups.completion_tokens.sum(),
    success_rate=calls.drop_duplicates([key, "session"]).groupby(key).success.mean(),
    steps_with_estimated_tokens=groups.is_estimated.sum(),
    steps_without_a_price=groups.size() - groups.usd.count(),
  )
  return pd.DataFrame(columns).reset_index(names=key)


if __name__ == "__main__":
  run_command(report)
