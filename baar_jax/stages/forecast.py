"""Stage forecast: the score that the heads expect under each budget, and how it came out."""

import dataclasses
import json

import numpy as np

from baar_jax.report import bootstrap
from baar_jax.report.choice import choose
from baar_jax.report.table import FORECAST, load
from baar_jax.rollout.entries import ALWAYS_SMALL, CONDITIONED, entries
from baar_jax.router.head import count_calls_left, describe, estimate
from baar_jax.run import Run
from baar_jax.train.fit import measure_calibration
from baar_jax.train.values import load_heads, read_transitions


def main(run: Run) -> None:
  """Prints, and keeps for the report, the mean over test tasks under each budget and without one.

  A forecast is the value at the first decision, at price 0. What was measured is of the router at
  the price that dev has chosen there; the calibration counts each test task under each cap once.
  """
  c = run.config
  if c.value.updates == 0:
    return
  chosen = choose(run.store, entries(c), c).policies
  played = [e for e in entries(c) if e.family == CONDITIONED and e.policy in chosen]
  data = load(run.store, played, c, "test")
  score_PxN = data.per_task("score_percent") / 100
  budgets = [(K, None) for K in c.evaluate.call_budgets]
  budgets += [(None, usd) for usd in c.evaluate.usd_budgets]
  rows, pairs = [], []
  for calls, usd in [*budgets, (None, None)]:
    forecast_N = predict_scores(run, data.tasks, calls, usd)
    draws = bootstrap.draw(len(forecast_N), 1, c.evaluate.bootstrap)
    mean_B = bootstrap.means(forecast_N[None, :, None], np.array([False]), draws)[0]
    budget = "no cap" if calls is usd is None else f"${usd:g}" if calls is None else f"K = {calls}"
    row = {"budget": budget, "measured_share": None} | bootstrap.interval("forecast_share", mean_B)
    text = "forecast of SR, {}: {:.1f} [{:.1f}, {:.1f}]"
    text = text.format(
      budget, *(100 * row[f"forecast_share{end}"] for end in ("", "_low", "_high"))
    )
    capped = [e.policy for e in played if (e.call_budget, e.usd_budget) == (calls, usd)]
    if budget != "no cap" and capped:
      measured_N = score_PxN.loc[capped[0]].to_numpy()
      row["measured_share"] = float(measured_N.mean())
      pairs.append((forecast_N, measured_N))
      text += f"; measured {100 * row['measured_share']:.1f}"
    rows.append(row)
    run.print(text)
  if pairs and run.is_main:
    result = {"rows": rows} | measure_calibration(*map(np.concatenate, zip(*pairs)))
    draft = run.dir / "forecast.tmp"
    draft.write_text(json.dumps(result))
    draft.replace(run.dir / FORECAST)


def predict_scores(run: Run, task_ids, calls: int | None, usd: float | None) -> np.ndarray:
  """The score in [0, 1] that is expected of each test task under a cap, from its first text."""
  first = {e.task_id: e for e in run.store.episodes(ALWAYS_SMALL) if e.steps}
  episodes = [dataclasses.replace(first[id_], steps=first[id_].steps[:1]) for id_ in task_ids]
  forecasts = []
  for trained in run.trainings():
    data, heads = read_transitions(trained, episodes, "test"), load_heads(trained)
    left = count_calls_left(heads, calls, usd, ())
    value_N, advantage_NxA = estimate(
      heads, data.hidden_NxD, describe(left, 0.0, 0, 0, data.steps_N)
    )
    best_N = advantage_NxA.max(axis=1) if left >= 1 else advantage_NxA[:, 0]
    forecasts.append(np.clip(value_N + best_N, 0.0, 1.0))
  return np.mean(forecasts, axis=0)
