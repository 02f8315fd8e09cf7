"""Compare families on dev tasks: PYTHONPATH=. python tests/dev_table.py RUN...

Policies are chosen on one half of the dev tasks and measured on the other half, and the
other way round, with paired 95 % intervals. So no task chooses what it measures, and no
test task is read. The first family of the first run is compared with every family of
every run. All runs need the same tasks and seeds.

A second table compares, for the budget-conditioned router's best policy of each budget,
the dollars that `Billing.forecast_calls` expects before each call with the dollars that
were spent.
"""

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from baar_jax.episode import Episode
from baar_jax.llms.prices import Billing
from baar_jax.mesh import one_device
from baar_jax.report import frontier
from baar_jax.report.table import METRICS, Evaluation, list_played, load_split
from baar_jax.rollout.specs import PolicySpec
from baar_jax.store import Store, read_run
from baar_jax.train.checkpoint import RouterFiles
from baar_jax.train.families import list_specs
from baar_jax.train.jobs import BOUNDARY_KEYS, CONDITIONED
from baar_jax.train.values import load_heads


class Half(NamedTuple):
  """The evaluation of the tasks that choose, and of those that measure."""

  choosing: Evaluation
  measuring: Evaluation


def split_tasks(data: Evaluation) -> list[Half]:
  """Split the tasks into two halves, each of which chooses for the other."""
  parts = []
  for first in (0, 1):
    tasks = data.tasks[first::2]
    episodes = data.episodes[data.episodes.task_id.isin(tasks)]
    parts.append(dataclasses.replace(data, episodes=episodes, tasks=tasks))
  return [Half(*parts), Half(*parts[::-1])]


def measure_area(half: Half, names: list[str], metric: str) -> np.ndarray:
  """Compute the area under the line through the policies on the choosing half's hull."""
  mean = half.choosing.mean(["cost_usd", metric]).round(12)
  small, large = mean.loc[[*BOUNDARY_KEYS]].to_numpy()
  points = mean.loc[names]
  chosen = frontier.vertices(points.cost_usd, points[metric], small, large)
  line = [BOUNDARY_KEYS[0], *points.index[chosen], BOUNDARY_KEYS[1]]
  resampled = half.measuring.resampled
  return frontier.area_along(
    resampled["cost_usd"].loc[line], resampled[metric].loc[line]
  )


def measure_capped(half: Half, names: list[str], metric: str) -> np.ndarray:
  """Compute the resampled mean of the policy that is best on the choosing half.

  As on dev, the best policy has the highest sum of SR and success.
  """
  mean = half.choosing.mean(METRICS).round(12)
  best = mean.loc[names].sum(axis=1).idxmax()
  return half.measuring.resampled[metric].loc[best].to_numpy()


def write_cell(value_B: np.ndarray, first_B: np.ndarray) -> str:
  """Write a mean, and the first family's gain over it with its 95 % interval."""
  gain = frontier.interval("gain", first_B - value_B)
  cell = f"{value_B[0]:.2f}"
  if first_B is not value_B:
    cell += f" ({gain['gain']:+.2f} [{gain['gain_low']:.2f}, {gain['gain_high']:.2f}])"
  return cell


def forecast_usd(billing: Billing, tokens: list[float], episode: Episode) -> float:
  """Add up the dollars that are expected before each call of an episode.

  Args:
    billing: the prices and prompt caches of the models.
    tokens: the expected tokens of the first prompt, and of a reply.
    episode: the episode.
  """
  usd = 0.0
  for number, step in enumerate(episode.steps, 1):
    outlooks = billing.forecast_calls(episode.steps[:number], *tokens)
    usd += outlooks[step.model].usd
  return usd


def print_forecasts(
  files: RouterFiles, store: Store, specs: list[PolicySpec], data: Evaluation
) -> None:
  """Print the forecast and the spent dollars per task of each budget."""
  print(
    "\n| budget | policy | forecast | spent | forecast / spent |\n|---|---|---|---|---|"
  )
  heads, _ = load_heads(files)
  scale = heads.scale
  tokens = [scale.opening_tokens, scale.reply_tokens]
  mean = data.mean([*METRICS])
  by_cap = {}
  for spec in specs:
    if spec.family == CONDITIONED:
      by_cap.setdefault(spec.cap, []).append(spec)
  for cap, listed in by_cap.items():
    best = max(listed, key=lambda spec: mean.loc[spec.key].sum())
    episodes = store.episodes(best.key)
    episodes = [episode for episode in episodes if episode.task_id in data.tasks]
    usd = [forecast_usd(files.billing, tokens, episode) for episode in episodes]
    forecast = np.mean(usd)
    spent = np.mean([episode.cost_usd for episode in episodes])
    ratio = f"{forecast / spent:.3f}"
    print(f"| {cap} | {best.key} | {forecast:.6f} | {spent:.6f} | {ratio} |")


def main(directories: list[str]) -> None:
  """Print one table over all runs."""
  first = {}
  for directory in directories:
    config = read_run(Path(directory))
    store = Store(Path(directory) / "episodes.sqlite")
    specs = list_played(store, list_specs(config), config, "dev")
    halves = split_tasks(load_split(store, specs, config, "dev"))
    caps = sorted({spec.cap.calls for spec in specs if spec.cap.calls is not None})
    cells_of = list(itertools.product(METRICS, caps))
    titles = [f"{metric} K = {K}" for metric, K in cells_of]
    titles += [f"area {metric}" for metric in METRICS]
    print(f"\n| {directory} | {' | '.join(titles)} |\n|{'---|' * (1 + len(titles))}")
    families = dict.fromkeys(spec.family for spec in specs)
    for family in sorted(families, key=lambda name: name != CONDITIONED):
      listed = [spec for spec in specs if spec.family == family]
      cells = []
      for metric, K in cells_of:
        names = [spec.key for spec in listed if spec.cap.calls == K]
        if not names:
          cells.append("")
          continue
        value_B = np.mean([measure_capped(h, names, metric) for h in halves], axis=0)
        cells.append(write_cell(value_B, first.setdefault((metric, K), value_B)))
      for metric in METRICS:
        names = [spec.key for spec in listed]
        value_B = np.mean([measure_area(h, names, metric) for h in halves], axis=0)
        cells.append(write_cell(value_B, first.setdefault(metric, value_B)))
      print(f"| {family} | {' | '.join(cells)} |")
    files = RouterFiles(Path(directory), config, one_device())
    print_forecasts(files, store, specs, load_split(store, specs, config, "dev"))


if __name__ == "__main__":
  main(sys.argv[1:])
