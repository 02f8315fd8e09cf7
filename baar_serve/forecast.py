"""Forecast the success of a session from the facts of its calls so far.

A forecast is of the models that answered. It does not tell what another model would
gain. Facts and model are our choice.
"""

import re

import numpy as np
import pandas as pd

from baar_jax.episode import Usage

# The file of a run's forecast.
FORECAST = "forecast.npy"
# What marks the observation of an error, and an action that writes or that tests.
ERROR = re.compile(
  r"<returncode>(?!0<)|exit code:? [1-9]|\berror\b|traceback|exception|failed|invalid"
  r"|cannot|no such|not found|nothing happens",
  re.IGNORECASE,
)
EDIT = re.compile(r"<<|>\s*\w|sed -i|\bput\b|patch|replace|write|edit", re.IGNORECASE)
TEST = re.compile(r"test|check|reproduce|verify", re.IGNORECASE)
# Characters at the beginning of a text that are searched, so that no text takes long.
SEARCHED = 600
PENALTY = 10.0
NEWTON_STEPS = 20
# The tasks are in so many parts, and the forecast of one is from the others.
FOLDS = 5
# The fewest sessions of each outcome from which a forecast is made.
FEWEST = 10
STEPS = (1, 2, 4, 8, 16, 24, 32, 48)


class Facts:
  """The facts of a session so far."""

  def __init__(self) -> None:
    """Start before the first call."""
    self._seen = set()
    self._sums_K = np.zeros(9)

  def add(self, observation: str, action: str, usage: Usage, usd: float) -> None:
    """Go on behind a step.

    Args:
      observation: the result of the action before it.
      usage: the tokens of its call, which may be estimated.
    """
    result = observation[:SEARCHED]
    reply = action[:SEARCHED]
    self._sums_K += [
      1,
      100 * usd,
      usage.prompt_tokens,
      usage.completion_tokens,
      ERROR.search(result) is not None,
      observation in self._seen,
      action in self._seen,
      EDIT.search(reply) is not None,
      TEST.search(reply) is not None,
    ]
    # A text that is not recorded is no repeat.
    self._seen |= {observation, action} - {""}

  def list(self) -> np.ndarray:
    """Return the facts before the next step.

    They are 1, the logarithms of the dollars and tokens so far, the shares of the steps
    with an error, a repeated result, a repeated action, an edit and a test, and all of
    these times the logarithm of the steps.

    Returns:
      facts_F, float64.
    """
    steps, *_ = self._sums_K
    amounts = np.log1p(self._sums_K[1:4])
    shares = self._sums_K[4:] / max(1, steps)
    facts_F = np.concatenate([[1.0], amounts, shares])
    return np.concatenate([facts_F, facts_F * np.log1p(steps)])


def forecast(facts_PxF: np.ndarray, weight_F: np.ndarray) -> np.ndarray:
  """Compute the chance of success at each row of facts, by a logistic regression."""
  return 1 / (1 + np.exp(-facts_PxF @ weight_F))


def fit_forecast(facts_PxF: np.ndarray, success_P: np.ndarray) -> np.ndarray:
  """Fit a forecast to calls of sessions by Newton's method.

  The penalty is that of standardised facts, and the first weight has none.

  Args:
    facts_PxF: the facts before each call.
    success_P: whether its session succeeded.

  Returns:
    weight_F.
  """
  penalty_FxF = np.diag(PENALTY * facts_PxF.var(axis=0) + 1e-6)
  weight_F = np.zeros(len(penalty_FxF))
  for _ in range(NEWTON_STEPS):
    chance_P = forecast(facts_PxF, weight_F)
    slope_F = facts_PxF.T @ (success_P - chance_P) - penalty_FxF @ weight_F
    slope_PxF = facts_PxF * (chance_P * (1 - chance_P))[:, None]
    weight_F += np.linalg.solve(facts_PxF.T @ slope_PxF + penalty_FxF, slope_F)
  return weight_F


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
  table = groups.agg(
    forecast=("forecast", "mean"),
    success_rate=("success", "mean"),
    calls=("session", "size"),
    sessions=("session", "nunique"),
  )
  return table.reset_index()
