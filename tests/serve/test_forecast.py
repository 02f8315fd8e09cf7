"""Test the facts of a session, and the forecast of its success."""

import numpy as np
import pandas as pd
from endpoint import ASK, REPLY, Client, assistant, user
from scipy.optimize import minimize

from baar_jax.episode import Usage
from baar_serve import forecast
from baar_serve.forecast import FORECAST, Facts, fit_forecast


def test_facts_count_errors_repeats_edits_and_tests():
  facts = Facts()
  facts.add("", "pytest a.py", Usage(10, 0, 3), 0.01)
  facts.add("exit code: 1", "sed -i s/a/b/ a.py", Usage(20, 5, 4), 0.02)
  facts.add("<returncode>0</returncode>", "pytest a.py", Usage(30, 0, 2), 0.0)
  facts.add("exit code: 1", "", Usage(40, 0, 1), 0.0)
  # 3 cents, 100 tokens in, 10 out; of 4 steps 2 errors, 1 repeated result, 1 repeated
  # action, 1 edit, 2 tests.
  expected = [1, np.log(4), np.log(101), np.log(11), 0.5, 0.25, 0.25, 0.25, 0.5]
  expected += [np.log(5) * fact for fact in expected]
  np.testing.assert_allclose(facts.list(), expected)


def test_the_fit_is_the_penalised_maximum_likelihood():
  rng = np.random.default_rng(0)
  facts_PxF = np.insert(rng.normal(2.0, 3.0, (60, 2)), 0, 1.0, axis=1)
  success_P = rng.random(60) < 1 / (1 + np.exp(2 - facts_PxF[:, 1]))

  def loss(weight_F):
    margins = np.where(success_P, 1, -1) * (facts_PxF @ weight_F)
    # 10 / 2 for each standardised fact, and none for the first one.
    penalty = 5 * np.square(weight_F[1:] * facts_PxF[:, 1:].std(axis=0)).sum()
    return np.logaddexp(0, -margins).sum() + penalty

  best = minimize(loss, np.zeros(3)).x
  np.testing.assert_allclose(fit_forecast(facts_PxF, success_P), best, atol=1e-3)


def make_calls(success, facts):
  """Make sessions of one call, two of each task."""
  sessions = np.arange(len(success))
  columns = dict(session=sessions, task=sessions // 2, step=1, usd=1.0, facts=facts)
  return pd.DataFrame(columns | dict(success=success, score=success.astype(float)))


def test_a_forecast_knows_nothing_of_its_own_task():
  rng = np.random.default_rng(1)
  success = rng.random(40) < 0.5
  calls = make_calls(success, list(np.insert(rng.random((40, 3)), 0, 1.0, axis=1)))
  before = forecast.cross_validate(calls).forecast
  flipped = calls.assign(success=success ^ (calls.task == 7))
  changed = forecast.cross_validate(flipped).forecast != before
  assert not changed[calls.task == 7].any() and changed.sum() > 20


def test_auc_and_calibration_by_hand(monkeypatch):
  monkeypatch.setattr(forecast, "FEWEST", 2)
  calls = make_calls(np.array([True, False, True, False]), [0.0] * 4)
  calls = calls.assign(step=2, forecast=[0.81, 0.52, 0.48, 0.23])
  # Of the four pairs of a success and a failure, 0.48 < 0.52 is in the wrong order.
  (row,) = forecast.tabulate_steps(calls).to_dict("records")
  assert row == dict(steps=1, sessions=4, success_rate=0.5, auc=0.75)
  table = forecast.tabulate_calibration(calls)
  assert [*table.success_rate] == [0, 0.5, 1] and [*table.forecast] == [0.23, 0.5, 0.81]


def test_each_answer_has_the_forecast_of_the_run(tmp_path, upstream):
  with Client(tmp_path, upstream) as client:
    assert "x-baar-forecast" not in client.chat().headers
  weight_F = np.zeros(18)
  weight_F[4] = -2.0  # the share of errors
  np.save(tmp_path / "served" / FORECAST, weight_F)
  with Client(tmp_path, upstream) as client:
    messages = [*ASK]
    forecasts = []
    for result in ("no such door", "fine", "fine", ""):
      answer = client.chat("t", messages=messages)
      forecasts.append(answer.headers["x-baar-forecast"])
      messages += [assistant(REPLY), user(result)]
  # 1 / (1 + exp(2 / 2)) and 1 / (1 + exp(2 / 3)): the second step saw the error.
  assert forecasts == ["0.50", "0.50", "0.27", "0.34"]
