"""Stages evaluate (every policy on dev, the chosen ones on test), forecast, report."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from baar_jax.config import ABLATIONS, SERVED, Config, compared_lam
from baar_jax.episode import SMALL
from baar_jax.report import frontier
from baar_jax.report.compare import FORECAST, Choice, budget_name, compare_forecast
from baar_jax.report.results import METRICS
from baar_jax.report.table import (
  COMPARED_COLUMNS,
  list_played,
  load_split,
)
from baar_jax.rollout.specs import Cap, Job, PolicySpec
from baar_jax.router.head import Heads, count_calls_left, describe, estimate
from baar_jax.run import Run
from baar_jax.store import BUDGETS, Store
from baar_jax.train.dataset import load_profiles
from baar_jax.train.families import (
  CONDITIONED,
  FAMILIES,
  Loader,
  check_trained,
  list_specs,
)
from baar_jax.train.jobs import (
  ALWAYS_SMALL,
  BOPO,
  BOUNDARIES,
  BOUNDARY_KEYS,
  COMPARED,
  list_evaluation,
)
from baar_jax.train.listing import find_uncapped
from baar_jax.train.values import States, load_heads, read_states


def main(run: Run) -> None:
  """Play every policy on dev, then on test those that dev has chosen."""
  config = run.config
  if config.env.kind == SERVED:
    _check_played(run)
    return
  # A missing router is reported before anything is run.
  for training in run.trainings():
    check_trained(training)
  specs = list_specs(config)
  _play(run, specs, "dev")
  _play(run, choose_on_dev(run.store, specs, config).entries, "test")


def _check_played(run: Run) -> None:
  """Print the policies that clients have played.

  Raises:
    ValueError: they still have to play some.
  """
  for split in ("dev", "test"):
    jobs = list_evaluation(run.config, run.tasks(split), split)
    run.check_played(BOUNDARIES, jobs)
    # The forecast reads the first observations of SMALL's.
    run.check_texts(ALWAYS_SMALL, jobs)
  names = [spec.key for spec in list_evaluated(run.store, run.config)]
  run.print(f"evaluated: {', '.join(names)}")


def _play(run: Run, specs: Sequence[PolicySpec], split: str) -> None:
  """Run the policies' episodes on a split; each trial plays one of the trainings.

  A policy without a cap comes before the capped ones that reuse its episodes.
  """
  for training in run.trainings():
    loader = Loader(training, run.live_episodes, run.pair, run.store)
    jobs = list_evaluation(run.config, run.tasks(split), split, training.number)
    for spec in specs:
      uncapped = find_uncapped(spec)
      if uncapped:
        _reuse(run.store, spec, uncapped, jobs)
      run.play(f"{split} {spec.key}", spec, jobs, loader.build)


def _reuse(
  store: Store, spec: PolicySpec, uncapped: PolicySpec, jobs: Sequence[Job]
) -> None:
  """Store the episodes that a cap would not have changed, and run none again.

  A cap-blind policy makes the same decisions until its cap is spent, and the same draws
  follow from the same task, seed and step.
  """
  missing = {job.key for job in jobs} - store.keys(spec.key)
  table = store.table([uncapped.key])
  # With all K calls made, a router would not be asked again.
  unchanged = table[table.large_calls < spec.cap.calls]
  keys = missing & set(zip(unchanged.task_id, unchanged.seed))
  store.add_equal(spec.key, spec.cap.calls, uncapped.key, keys)


def list_evaluated(store: Store, config: Config) -> list[PolicySpec]:
  """List the evaluation's entries, of a served run those that clients have played.

  Raises:
    ValueError: clients have played the boundaries at most.
  """
  if config.env.kind != SERVED:
    return list_specs(config)
  played = list_played(store, list_specs(config), config, "dev")
  played = list_played(store, played, config, "test")
  if len(played) <= len(BOUNDARIES):
    problem = "clients have played no policy but the boundaries on dev and on test"
    raise ValueError(f"{problem}: serve one of this config (docs/serving.md)")
  return played


def choose_on_dev(
  store: Store, planned: Sequence[PolicySpec], config: Config
) -> Choice:
  """Choose the policies that test plays by the entries' episodes on dev.

  Chosen are the boundaries, per family the points on a hull (by any of METRICS) and the
  best by SR under each budget; of equal ones the first. Test has no say, so that its
  figures are unbiased.

  Raises:
    ValueError: some episodes have not been run.
  """
  data = load_split(store, planned, config, "dev")
  # Equal sums of floats may differ in the last bits.
  mean = data.mean(COMPARED_COLUMNS).round(12)
  points = _list_points(planned, config)
  vertices = {}
  for family, metric in itertools.product(points, METRICS):
    vertices[family, metric] = _on_hull(mean, points[family], metric)
  main = CONDITIONED if CONDITIONED in points else BOPO
  headline = _find_highest(mean, points.get(main, []))
  is_capped = data.entries[[*BUDGETS]].notna().any(axis=1)
  typical = {}
  for family in data.entries.family[~is_capped].unique():
    if family not in ABLATIONS:
      names = vertices[family, data.sr] or points[family]
      distances = (mean.cost_usd[names] - mean.cost_usd[headline or names[0]]).abs()
      typical[family] = distances.idxmin()  # without a headline the first point
  capped = data.entries[is_capped].assign(sr=mean[data.sr])
  best = capped.groupby(["family", *BUDGETS], dropna=False).sr.idxmax()
  chosen = {headline, *typical.values(), *best}.union(*vertices.values())
  listed = [spec for spec in planned if spec.key in chosen]
  return Choice(mean, listed, main, [*best], vertices, headline, typical)


def _list_points(planned: Sequence[PolicySpec], config: Config) -> dict[str, list[str]]:
  """List each family's points without a cap on dollars, and those ablations meet."""
  points = {}
  compared = []
  for spec in planned:
    if spec.cap.usd is None:
      points.setdefault(spec.family, []).append(spec.key)
    # Ablations run without a cap.
    if spec.family == BOPO and not spec.cap and spec.lam == compared_lam(config):
      compared.append(spec.key)
  if config.baselines.ablations:
    points[COMPARED] = compared
  return points


def _on_hull(mean: pd.DataFrame, names: Sequence[str], metric: str) -> list[str]:
  """List those on the upper hull; none unless LARGE costs more and scores more."""
  points = mean.loc[names]
  small, large = mean.loc[[*BOUNDARY_KEYS], ["cost_usd", metric]].to_numpy()
  if (small >= large).any():
    return []
  return [
    *points.index[frontier.vertices(points.cost_usd, points[metric], small, large)]
  ]


def _find_highest(mean: pd.DataFrame, names: Sequence[str]) -> str | None:
  """Find the point whose share of the success gap exceeds that of the cost gap most."""
  columns = ["success_percent", "cost_usd"]
  small, large = mean.loc[[*BOUNDARY_KEYS], columns].to_numpy()
  if not len(names) or (small >= large).any():
    return None
  shares = (mean.loc[names, columns] - small) / (large - small)
  return shares.success_percent.sub(shares.cost_usd).idxmax()


def forecast(run: Run) -> None:
  """Forecast the score of each test task under each budget, and print and keep it.

  It is the value that the heads expect at the first decision, at price 0.
  """
  c = run.config
  if c.value.updates == 0:
    run.print("no forecast: --config.value.updates is 0")
    return
  # Of new budgets nothing has been played.
  played = list_played(run.store, list_evaluated(run.store, c), c, "dev")
  choice = choose_on_dev(run.store, played, c)
  names = (*BOUNDARY_KEYS, *choice.best)
  shown = [spec for spec in choice.entries if spec.key in names]
  data = load_split(run.store, shown, c, "test")
  score_NxK = _predict(run, data.tasks)
  rows = compare_forecast(data, score_NxK, choice).rows.set_index("budget")
  run.print("forecast of SR, and what was measured:")
  run.print(rows.to_string(float_format="{:.1%}".format, na_rep="–"))
  if run.is_main:
    draft = run.dir / "forecast.tmp"
    score_NxK.to_csv(draft)
    draft.replace(run.dir / FORECAST)


def _predict(run: Run, tasks: Sequence[str]) -> pd.DataFrame:
  """Predict score_NxK, in [0, 1], of tasks under each of the budgets and none."""
  c = run.config.evaluate
  key = ALWAYS_SMALL.key
  keys = {stored for stored in run.store.keys(key) if stored[0] in tasks}
  # All episodes of a task begin alike; the last one that has a step is taken.
  played = {e.task_id: e for e in run.store.episodes(key, keys) if e.steps}
  openings = []
  for id_ in tasks:
    openings.append(dataclasses.replace(played[id_], steps=played[id_].steps[:1]))
  forecasters = []
  for training in run.trainings():
    states = read_states(training, openings)
    forecasters.append((load_heads(training), states))
  caps = [Cap(calls=K) for K in c.call_budgets]
  caps += [Cap(usd=usd) for usd in c.usd_budgets]
  scores = pd.DataFrame(index=tasks)
  for cap in [*caps, Cap()]:
    scores[budget_name(cap.calls, cap.usd)] = predict_scores(forecasters, cap)
  return scores.astype(float)


def predict_scores(forecasters: Sequence[tuple[Heads, States]], cap: Cap) -> np.ndarray:
  """Predict score_N in [0, 1] under a cap at first decisions."""
  scores = []
  for heads, states in forecasters:
    left = count_calls_left(heads, cap)
    facts = describe(left, 0.0, states.progress_NxP)
    value_N, advantage_NxA = estimate(heads, states.hidden_NxD, facts)
    if left < 1:
      advantage_NxA = advantage_NxA[:, [SMALL]]
    scores.append(np.clip(value_N + advantage_NxA.max(axis=1), 0.0, 1.0))
  return np.mean(scores, axis=0)


def report(run: Run) -> None:
  """Write the results as a page, PNGs and tables, and print the main ones."""
  if not run.is_main:
    return
  # matplotlib takes a second to import, which the other stages need not pay.
  from baar_jax.report import page

  c = run.config
  played = list_evaluated(run.store, c)
  # A run without any is told to make them first.
  profiles = load_profiles(run.store, c, "train")
  choice = choose_on_dev(run.store, played, c)
  results = page.compute_results(run.store, choice, len(profiles), c, run.dir, FAMILIES)
  print(page.texts.terminal_table(results))
  print(f"report: {page.write(results, run.dir / 'report')}")
