"""Measure how often the intervals of baar_serve/offpolicy.py hold the truth.

PYTHONPATH=.:tests python tests/serve/coverage.py RUN TASKS SESSIONS

RUN is the directory of a finished run of main.py with a budget-conditioned router. The
script plays what is missing on dev and test: ten random sessions of each task, all
stratified samples, and ten sessions of the router at three cost weights, whose mean is
the truth. Then it draws TASKS tasks and SESSIONS sessions of each, 200 times.

The arguments `runs/reproduce-sandbox 300 2` gave coverages of 91, 96.5 and 97 % for the
score and 85, 94.5 and 94.5 % for the dollars, at the cost weights 0.2, 0.5 and 1. The
arguments `runs/reproduce 120 3 5`, for five sessions as the truth, gave 93.5, 95.5 and
94.5 %, and 95.5, 95 and 96 %. The dollars with 85 % were estimated 5 % too high.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np

from baar_jax.episode import SPLITS
from baar_jax.open import Loader
from baar_jax.rollout.jobs import Planned
from baar_jax.rollout.specs import Job
from baar_jax.run import Run
from baar_jax.store import Store, read_run
from baar_serve.episodes import client_specs
from baar_serve.offpolicy import STORE, estimate_means, list_mixes, read_sample

WEIGHTS = (0.2, 0.5, 1.0)
TRIALS = 10
REPETITIONS = 200


def play(run, spec, purpose, trials):
  """Return the sessions of a policy on all tasks of dev and test."""
  loader = Loader(run.files(), run.source.live_episodes, run.source.pair, run.store)
  jobs = []
  for split in SPLITS[1:]:
    jobs += [
      Job(task, purpose or split, k) for task in run.tasks(split) for k in trials
    ]
  return run.source.episodes(spec.key, [Planned(spec, jobs)], loader.build)


class Served(Store):
  """A store whose sessions begin at the time 0, as simulated time does."""

  def episodes(self, policy):
    for episode in super().episodes(policy):
      episode.steps[0].started_s = 0.0
      yield episode


def main(directory, tasks, sessions, trials=TRIALS):
  """Print a row of the table for each cost weight."""
  run = Run(dataclasses.replace(read_run(directory), runs=str(directory.parent)))
  specs = client_specs(run.config)
  mixes = list_mixes(run.config)
  count = specs["stratified"].plans[0].count
  play(run, specs["random"], None, range(trials))
  play(run, specs["stratified"], "reference", range(1, count + 1))
  sample, targets = read_sample(run.files(), Served(directory / STORE), mixes)
  bounds = np.flatnonzero(sample.place_N == 0)[1:]
  rows_B = np.split(np.arange(len(sample.place_N)), bounds)
  task_B = np.array([sample.task_N[rows[0]] for rows in rows_B])
  for spec, target_NxA in targets.items():
    if spec.cost_weight not in WEIGHTS:
      continue
    # The targets are those of the first training seed.
    one = dataclasses.replace(spec, seeds=None)
    truth = np.mean(
      [(e.score, e.cost_usd) for e in play(run, one, None, range(trials))], 0
    )
    draw = np.random.default_rng(1)
    means, hits, widths, sizes = [], [], [], []
    for _ in range(REPETITIONS):
      drawn = draw.choice(task_B[-1] + 1, tasks, replace=False)
      picked = [
        draw.choice(np.flatnonzero(task_B == t), sessions, False) for t in sorted(drawn)
      ]
      rows = np.concatenate([rows_B[b] for b in np.concatenate(picked)])
      part = type(sample)(*[array[rows] for array in sample])
      part = part._replace(task_N=np.unique(part.task_N, return_inverse=True)[1])
      mean_RxV, size_S = estimate_means(part, target_NxA[rows])
      low_V, high_V = np.percentile(mean_RxV[1:], [2.5, 97.5], axis=0)
      means.append(mean_RxV[0])
      hits.append((low_V <= truth) & (truth <= high_V))
      widths.append(high_V - low_V)
      sizes.append(size_S[[0, -1]])
    print(
      spec.cost_weight,
      truth,
      *(np.mean(x, 0) for x in (means, hits, widths)),
      np.median(sizes, 0),
      flush=True,
    )
  run.close()


if __name__ == "__main__":
  main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
