"""Stage forecast: the score that the heads expect under each budget, and what was measured."""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from baar_jax.config import evaluation_seeds
from baar_jax.episode import SMALL
from baar_jax.report import bootstrap
from baar_jax.report.choice import choose
from baar_jax.report.table import FORECAST, load
from baar_jax.rollout.entries import CONDITIONED, entries
from baar_jax.router.head import Heads, count_calls_left, describe, estimate
from baar_jax.run import Run
from baar_jax.train.fit import measure_calibration
from baar_jax.train.values import Transitions, load_heads, read_transitions


def main(run: Run) -> None:
  """Prints, and keeps for the report, the mean over test tasks under each budget and without one.

  A forecast is the value at the first decision, at price 0. What was measured, where the budget has
  been evaluated, is of the router at the price that dev has chosen there; the calibration counts
  each test task under each cap once.
  """
  c = run.config
  if c.value.updates == 0:
    run.print("no forecast: --config.value.updates is 0")
    return
  dev = evaluation_seeds(c, "dev")
  played = [e for e in entries(c) if any(seed in dev for _, seed in run.store.keys(e.policy))]
  if not any(entry.family == CONDITIONED for entry in played):
    raise ValueError(f"{run.dir} has no evaluated {CONDITIONED} router: run --stage=evaluate first")
  chosen = choose(run.store, played, c).policies
  played = [e for e in played if e.family == CONDITIONED and e.policy in chosen]
  data = load(run.store, played, c, "test")
  score_PxN = data.per_task("score_percent") / 100
  first = {e.task_id: e for e in run.store.episodes(played[0].policy) if e.steps}
  texts = [dataclasses.replace(first[id_], steps=first[id_].steps[:1]) for id_ in data.tasks]
  routers = [(load_heads(r), read_transitions(r, texts, "test")) for r in run.trainings()]
  budgets = [(K, None) for K in c.evaluate.call_budgets]
  budgets += [(None, usd) for usd in c.evaluate.usd_budgets]
  rows, pairs = [], []
  for calls, usd in [*budgets, (None, None)]:
    forecast_N = predict_scores(routers, calls, usd)
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
  if run.is_main:
    predictions = map(np.concatenate, zip(*pairs))
    calibration = measure_calibration(*predictions) if pairs else None
    result = {"rows": rows, "calibration": calibration}
    draft = run.dir / "forecast.tmp"
    draft.write_text(json.dumps(result))
    draft.replace(run.dir / FORECAST)


def predict_scores(
  routers: Sequence[tuple[Heads, Transitions]], calls: int | None, usd: float | None
) -> np.ndarray:
  """score_N in [0, 1] that is expected under a cap, at first decisions: the mean of the routers."""
  forecasts = []
  for heads, data in routers:
    left = count_calls_left(heads, calls, usd, ())
    facts_NxF = describe(left, 0.0, 0, 0, data.steps_N)
    value_N, advantage_NxA = estimate(heads, data.hidden_NxD, facts_NxF)
    best_N = advantage_NxA.max(axis=1) if left >= 1 else advantage_NxA[:, SMALL]
    forecasts.append(np.clip(value_N + best_N, 0.0, 1.0))
  return np.mean(forecasts, axis=0)
