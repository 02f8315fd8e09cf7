"""Write a page on sessions that another program recorded: what they cost, and where.

python -m baar_serve.report --config.traces=FILE_OR_DIRECTORY
"""

import collections
import time
from collections.abc import Iterator
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd

from baar_jax.episode import Call
from baar_jax.llms.prices import (
  CACHE_RULES,
  Billing,
  Price,
  Read,
  find_row,
  list_price,
  prices_of,
)
from baar_serve.app import TEMPLATE_DIRS
from baar_serve.config import ServeConfig, run_command
from baar_serve.forecast import FORECAST, Facts, fit_forecast
from baar_serve.logs.read import DATE, find_logs, read_logs
from baar_serve.logs.record import Calls
from baar_serve.validation import (
  cross_validate,
  list_scored,
  tabulate_calibration,
  tabulate_steps,
)

# A session goes in circles once an action has brought the same observation for this
# time (our choice).
CIRCLE = 3
# Most sessions in circles that the page lists.
MOST_ROWS = 20


def report(config: ServeConfig) -> None:
  """Write the page of the sessions in `--config.traces`, and print its figures.

  Raises:
    ValueError: no file is named, or it has no call.
  """
  broken = []
  path, scores = find_logs(config)
  rows = [*list_rows(read_logs(path, scores, broken))]
  for line in broken:
    print(line)
  if not rows:
    raise ValueError(f"{path} has no call. Set --config.traces to logs of sessions.")
  tables = list_tables(rows, dict(zip(config.models.names, prices_of(config.models))))
  directory = Path(config.runs) / config.name
  page = directory / "report" / "logs.html"
  page.parent.mkdir(parents=True, exist_ok=True)
  scored = list_scored(make_frame(rows))
  if len(scored):
    forecasts = cross_validate(scored)
    tables["Forecast of success by step"] = tabulate_steps(forecasts)
    tables["Calibration of the forecast"] = tabulate_calibration(forecasts)
    weight_F = fit_forecast(np.stack(scored.facts), scored.success)
    np.save(directory / FORECAST, weight_F)
  for title, table in tables.items():
    print(f"\n{title}\n{table.to_string(index=False)}")
  jinja = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATE_DIRS), autoescape=True
  )
  shown = {}
  for title, table in tables.items():
    shown[title] = table.astype(object).where(table.notna(), None).to_dict("records")
  text = jinja.get_template("sessions.html.j2").render(
    config=config, tables=shown, broken=broken
  )
  page.write_text(text)
  print(f"\n{page}")


def list_rows(calls: Calls) -> Iterator[dict]:
  """Yield the figures of each call, without its texts.

  `usd` is what the log states; None without.
  """
  steps = collections.Counter()
  read_tokens = {}
  actions = {}
  results = collections.Counter()
  circling = set()
  facts = collections.defaultdict(Facts)
  for call in calls:
    session = call.session
    usage = call.usage or call.estimate_usage(read_tokens.get(session, 0))
    read_tokens[session] = usage.prompt_tokens + usage.completion_tokens
    if actions.get(session):
      result = hash((session, actions[session], call.observation))
      results[result] += 1
      if results[result] >= CIRCLE:
        circling.add(session)
    actions[session] = call.action
    steps[session] += 1
    day = call.at_s and time.strftime("%F", time.gmtime(call.at_s))
    facts_F = facts[session].list()
    usd = call.cost_usd or 0.0
    facts[session].add(call.observation, call.action, usage, usd)
    yield dict(
      session=session,
      task=call.task,
      step=steps[session],
      # A provider answers with the dated name of a model.
      model=DATE.sub("", call.model).rpartition("/")[2],
      day=day or "unknown",
      at_s=call.at_s or 0.0,
      usage=usage,
      is_estimated=call.usage is None,
      usd=call.cost_usd,
      is_circling=session in circling,
      score=call.score,
      facts=facts_F,
    )


def bill(rows: list[dict], model: str, price: Price) -> list[Call]:
  """Bill all calls at a model's price and with its prompt cache.

  The tokens stay as they are. A prompt that is shorter than the last one of its session
  begins a new history, of which nothing is cached (our choice).
  """
  billing = Billing((price,), (find_row(CACHE_RULES, model),))
  reads = {}
  calls = []
  for row in rows:
    usage = row["usage"]
    prompt_tokens = usage.prompt_tokens
    last = reads.get(row["session"])
    kept = [last] if last and last.tokens <= prompt_tokens else []
    now_s = row["at_s"]
    reads[row["session"]] = Read(prompt_tokens, now_s)
    call = billing.bill(0, kept, prompt_tokens, usage.completion_tokens, now_s)
    calls.append(call)
  return calls


def list_tables(rows: list[dict], prices: dict[str, Price]) -> dict[str, pd.DataFrame]:
  """Compute the tables of the page, by title.

  Args:
    rows: the figures of the calls.
    prices: the prices of the configured models; other models have list prices.
  """
  costs = []
  for model in sorted({*prices, *(row["model"] for row in rows)}):
    try:
      price = prices.get(model) or list_price(model)
    except ValueError:
      continue
    calls = bill(rows, model, price)
    costs.append(dict(model=model, usd=sum(call.cost_usd for call in calls)))
    for row, call in zip(rows, calls):
      if row["model"] == model and row["is_estimated"]:
        row["usage"] = call.usage
      if row["model"] == model and row["usd"] is None:
        row["usd"] = price.cost_usd(row["usage"])
  frame = make_frame(rows)
  circling = frame[frame.is_circling].groupby("session")
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
  total = add_up(frame.assign(all="all"), "all")
  total["sessions_in_circles"] = len(circles)
  total["circles_usd"] = circles.after_usd.sum(min_count=1)
  return {
    "All sessions": total,
    "By model": add_up(frame, "model"),
    "By day (UTC)": add_up(frame, "day"),
    "The same tokens at list prices, each model with its own cache": pd.DataFrame(
      costs
    ),
    "Sessions in circles: one action, one observation, three times": circles.head(
      MOST_ROWS
    ),
  }


def make_frame(rows: list[dict]) -> pd.DataFrame:
  """Make a table of the calls, with their tokens, dollars, facts and score."""
  usages = pd.DataFrame([row["usage"] for row in rows])
  frame = pd.concat([pd.DataFrame(rows), usages], axis=1)
  frame["usd"] = frame.usd.astype(float)
  # The last score that a session has is the score of all its rows.
  frame["score"] = frame.groupby("session").score.transform("last").astype(float)
  return frame


def add_up(frame: pd.DataFrame, key: str) -> pd.DataFrame:
  """Add up the calls with one value of a column, a row for each value."""
  groups = frame.groupby(key)
  scores = frame.drop_duplicates([key, "session"]).dropna(subset="score")
  prompt_tokens = groups.prompt_tokens.sum()
  columns = dict(
    sessions=groups.session.nunique(),
    steps=groups.size(),
    usd=groups.usd.sum(min_count=1),
    prompt_tokens=prompt_tokens,
    cached_share=groups.cached_tokens.sum() / prompt_tokens,
    completion_tokens=groups.completion_tokens.sum(),
    success_rate=(scores.score >= 1).groupby(scores[key]).mean(),
    steps_with_estimated_tokens=groups.is_estimated.sum(),
    steps_without_a_price=frame.usd.isna().groupby(frame[key]).sum(),
  )
  return pd.DataFrame(columns).reset_index(names=key)


if __name__ == "__main__":
  run_command(report)
