"""Compare rules that end sessions early when all of them spend the same dollars.

PYTHONPATH=. python tests/serve/stopping.py --config.traces=DIRECTORY

A rule ends a session before the call at which its score exceeds a limit. The limit is
the one that saves a share of the dollars over all sessions; between two limits, chance
picks one. Each forecast is from the sessions of other tasks. Of the pairs of caps, the
best is taken in hindsight. Tasks that are left out at random cost nothing.
"""

import numpy as np
import pandas as pd

from baar_jax.report.frontier import draw, interval
from baar_serve.config import run_command
from baar_serve.forecast import cross_validate, list_scored
from baar_serve.logs.read import read_logs
from baar_serve.report import list_rows, make_frame, price_rows

# The shares of the dollars that the rules save; fixed before the first measurement.
SAVED = (0.13, 0.27, 0.50)
LIMITS = 300
RESAMPLES = 1000


def trace_rule(calls, score):
  """Trace a rule: the dollars and the solved sessions of each task at all limits."""
  peak = score.groupby(calls.session).cummax()
  # A session is solved by its last call.
  solved = calls.success & ~calls.session.duplicated(keep="last")
  task = pd.factorize(calls.task)[0]
  sums = []
  for limit in np.quantile(peak, np.linspace(0, 1, LIMITS)):
    is_made = peak <= limit
    usd_T = np.bincount(task, calls.usd * is_made)
    sums.append([usd_T, np.bincount(task, solved & is_made)])
  return np.array(sums)


def solve(sums_Lx2xT, weight_BxT):
  """Count the sessions that a rule solves when it saves each share of `SAVED`."""
  usd_BxL, solved_BxL = (sums_Lx2xT @ weight_BxT.T).transpose(1, 2, 0)
  counts = []
  for usd_L, solved_L in zip(usd_BxL, solved_BxL):
    counts.append(np.interp((1 - np.array(SAVED)) * usd_L[-1], usd_L, solved_L))
  return np.array(counts).T


def tabulate_rules(calls):
  """Count what each rule solves, and the forecast's gain over the best other rule.

  The gain has the 95 % interval of a bootstrap over tasks.
  """
  step = calls.step / calls.step.mean()
  spent = calls.groupby("session").usd.cumsum() - calls.usd
  spent /= spent.mean()
  scores = {"forecast": -calls.forecast, "step cap": step, "dollar cap": spent}
  for ratio in (0.5, 1, 2):
    scores[f"both caps, 1 to {ratio}"] = np.maximum(step, ratio * spent)
  sums = {rule: trace_rule(calls, score) for rule, score in scores.items()}
  everything_2xT = sums["forecast"][-1]
  sums["tasks left out"] = np.stack([0 * everything_2xT, everything_2xT])
  tasks = everything_2xT.shape[1]
  weight_BxT = tasks * draw(tasks, 0, RESAMPLES).task_BxN
  solved_RxCxB = np.array([solve(curve, weight_BxT) for curve in sums.values()])
  rows = []
  for place, saved in enumerate(SAVED):
    solved_RxB = solved_RxCxB[:, place]
    best = 1 + solved_RxB[1:, 0].argmax()
    gain = interval("gain", solved_RxB[0] - solved_RxB[best])
    rows.append({"saved": saved} | dict(zip(sums, solved_RxB[:, 0])) | gain)
  return pd.DataFrame(rows)


def compare(config):
  """Print the table of the sessions in `--config.traces`."""
  rows = [*list_rows(read_logs(config, []))]
  price_rows(rows, {})
  calls = list_scored(make_frame(rows)).fillna(dict(usd=0.0))
  # Without any dollars, each call costs 1.
  if not calls.usd.any():
    calls["usd"] = 1.0
  print(tabulate_rules(cross_validate(calls)).round(2).to_string(index=False))


if __name__ == "__main__":
  run_command(compare)
