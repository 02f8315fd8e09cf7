"""Measure by cross-validation how well the success of scored sessions is forecast."""

import numpy as np
import pandas as pd

from baar_serve.forecast import fit_forecast, forecast

# All of these numbers are our choice.
FOLDS = 5
# The fewest sessions of each outcome from which a forecast is made.
FEWEST = 10
STEPS = (1, 2, 4, 8, 16, 24, 32, 48)


def list_scored(calls: pd.DataFrame) -> pd.DataFrame:
  """Return the calls of scored sessions; none if too few have one of the outcomes.

  Args:
    calls: a row for each call; see `report.make_frame`.
  """
  scored = calls.dropna(subset="score").astype(dict(success=bool))
  counts = scored.success[scored.step == 1].value_counts().reindex([True, False])
  return scored if (counts >= FEWEST).all() else scored[:0]


def cross_validate(calls: pd.DataFrame) -> pd.DataFrame:
  """Add the column forecast, each from the sessions of other tasks."""
  facts_PxF = np.stack(calls.facts)
  task_P = pd.factorize(calls.task)[0]
  fold_P = np.random.default_rng(0).permutation(max(task_P) + 1)[task_P] % FOLDS
  chance_P = np.zeros(len(calls))
  for fold in range(FOLDS):
    is_held_P = fold_P == fold
    weight_F = fit_forecast(facts_PxF[~is_held_P], calls.success[~is_held_P])
    chance_P[is_held_P] = forecast(facts_PxF[is_held_P], weight_F)
  return calls.assign(forecast=chance_P)


def tabulate_steps(calls: pd.DataFrame) -> pd.DataFrame:
  """Tabulate how well the forecast orders the sessions that go on after some steps.

  The AUC is the probability that it is higher for a success than for a failure.
  """
  rows = []
  for step in STEPS:
    going = calls[calls.step == step + 1]
    wins = going.success.sum()
    losses = len(going) - wins
    if min(wins, losses) >= FEWEST:
      mean_rank = going.forecast.rank()[going.success].mean()
      auc = (mean_rank - (wins + 1) / 2) / losses
      rate = wins / len(going)
      rows.append(dict(steps=step, sessions=len(going), success_rate=rate, auc=auc))
  return pd.DataFrame(rows)


def tabulate_calibration(calls: pd.DataFrame) -> pd.DataFrame:
  """Tabulate the success rate of the sessions of calls with about equal forecasts."""
  groups = calls.groupby(calls.forecast.round(1).rename("about"))
  columns = dict(
    forecast=groups.forecast.mean(),
    success_rate=groups.success.mean(),
    calls=groups.size(),
    sessions=groups.session.nunique(),
  )
  return pd.DataFrame(columns).reset_index()
