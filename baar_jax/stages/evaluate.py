"""Stages evaluate (every policy on dev, the chosen ones on test), forecast, report."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import pandas as pd

from baar_jax.config import ABLATIONS, SERVED, Config, compared_lam, evaluation_seeds
from baar_jax.episode import SMALL
from baar_jax.report import frontier
from baar_jax.report.compare import FORECAST, Choice, budget_name, compare_forecast
from baar_jax.report.results import METRICS
from baar_jax.report.table import (
  COMPARED,
  COMPARED_COLUMNS,
  Evaluation,
  list_evaluated,
  list_played,
  load_split,
)
from baar_jax.rollout.optimum import Exact
from baar_jax.rollout.policies import (
  BOUNDARIES,
  CONDITIONED,
  Entry,
  Job,
  Policy,
  entries,
  routers,
  rule_policy,
)
from baar_jax.router.head import Heads, count_calls_left, describe, estimate
from baar_jax.router.policy import (
  ConditionedPolicy,
  RouterPolicy,
  Threshold,
  ZeroShotPolicy,
)
from baar_jax.router.qwen2 import softmax
from baar_jax.router.view import open_view
from baar_jax.run import Run
from baar_jax.store import BUDGETS, Store
from baar_jax.train.checkpoint import load_router
from baar_jax.train.dataset import load_profiles, load_threshold_episodes
from baar_jax.train.trainer import Batcher, ShardedRouter
from baar_jax.train.values import Transitions, load_heads, load_trunk, read_transitions


def main(run: Run) -> None:
  c = run.config
  if c.env.kind == SERVED:  # clients have played
    for split in ("dev", "test"):  # for one boundary it looks for the episodes of both
      run.collect(split, run.boundaries[0], _list_jobs(run, split))
    run.print(f"evaluated: {', '.join(e.policy for e in list_evaluated(run.store, c))}")
    return
  for family, parameters in routers(c):  # a missing one is reported before anything is run
    for training in run.trainings():
      if family == CONDITIONED:
        load_heads(run.dir, c, training.train_seed)
      else:
        load_router(run.dir, c, run.mesh, family, parameters.get("lam"), training.train_seed)
  _play(run, entries(c), "dev")
  _play(run, choose_on_dev(run.store, entries(c), c).entries, "test")


def _play(run: Run, planned: Sequence[Entry], split: str) -> None:
  """Runs entries' episodes on a split; its n-th seed plays training seed n modulo their number."""
  for training in run.trainings():
    load = lru_cache(maxsize=1)(partial(_load_trained, training))  # a router's entries are adjacent
    jobs = _list_jobs(run, split, training.train_seed, run.config.train_seeds)
    for entry in planned:
      if entry.uncapped_policy:
        _reuse(run, entry, jobs)
      policy = rule_policy(entry.family, entry.policy, **entry.parameters)
      policy = policy or _make_policy(training, entry, load)
      run.collect(f"{split} {entry.policy}", policy, jobs, entry.call_budget, entry.usd_budget)


def _list_jobs(run: Run, split: str, number: int = 0, trainings: int = 1) -> list[Job]:
  tasks = run.tasks(split)[: run.config.evaluate.tasks or None]
  seeds = evaluation_seeds(run.config, split)[number::trainings]
  return [Job(task, seed) for task in tasks for seed in seeds]


def _reuse(run: Run, entry: Entry, jobs: Sequence[Job]) -> None:
  """Stores the episodes that a budget would not have changed, instead of running them again.

  A policy that is not shown its budget makes the same decisions until the budget is spent, and
  the same draws follow from the same task, seed and step.
  """
  missing = {(job.task.id, job.seed) for job in jobs} - run.store.keys(entry.policy)
  table = run.store.table([entry.uncapped_policy])
  # With all K calls made, a router would not be asked again.
  unchanged = table[table.large_calls < entry.call_budget]
  keys = missing & set(zip(unchanged.task_id, unchanged.seed))
  run.store.add_equal(entry.policy, entry.call_budget, entry.uncapped_policy, keys)


def _make_policy(run: Run, entry: Entry, load: Callable) -> Policy:
  """The policy of an entry that is computed, asks a judge, or is a router that `load` loads."""
  c, parameters = run.config, entry.parameters
  if entry.family == "optimum":
    exact = Exact(max_steps=c.env.max_steps, names=c.models.names)
    return Policy(entry.policy, exact.optimal_rule(**parameters, calls=entry.call_budget))
  if entry.family == "zero-shot":
    judge = run.pair.judge(c.baselines.judge)
    return ZeroShotPolicy(entry.policy, judge, c.router, run.tokenizer, len(c.models.names))
  model, view, heads_or_p = load(entry.family, parameters.get("lam"))
  placed = run.live_episodes, run.mesh
  if entry.family == CONDITIONED:
    choice = [parameters["price"]], *placed, parameters.get("bold")
    return ConditionedPolicy(entry.policy, model, view, heads_or_p, *choice)
  rule = Threshold(parameters.get("threshold"), [price.input for price in run.pair.prices])
  if "share" in parameters:
    rule.value = float(np.quantile(rule.switch_thresholds(heads_or_p), 1.0 - parameters["share"]))
  return RouterPolicy(entry.policy, model, view, rule, *placed)


def _load_trained(run: Run, family: str, lam: float | None) -> tuple:
  """A trained router, its view, and p_NxA, its probabilities at decisions in stored training
  episodes; in place of p_NxA the heads of the router that knows its budget."""
  if family == CONDITIONED:
    trunk, view = load_trunk(run.dir, run.config, run.mesh, run.train_seed)
    return trunk, view, load_heads(run.dir, run.config, run.train_seed)
  model = load_router(run.dir, run.config, run.mesh, family, lam, train_seed=run.train_seed)
  view = open_view(run.config, run.tokenizer, family)
  if not run.config.evaluate.shares:
    return model, view, None
  router = ShardedRouter(model, view.logit_ids, run.mesh, run.config.router.dtype)
  batcher = Batcher(run.config, view, run.store.tasks("train"))
  logits_NxA = batcher.compute(router.logits, load_threshold_episodes(run.store, run.config))
  return model, view, softmax(logits_NxA, "stored episodes")


def choose_on_dev(store: Store, planned: Sequence[Entry], config: Config) -> Choice:
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
  points = _list_points(data, config)
  vertices = {}
  for family, metric in itertools.product(points, METRICS):
    vertices[family, metric] = _on_hull(mean, points[family], metric)
  main = CONDITIONED if CONDITIONED in points else "bopo"
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
  listed = [entry for entry in planned if entry.policy in chosen]
  return Choice(mean, listed, main, [*best], vertices, headline, typical)


def _list_points(data: Evaluation, config: Config) -> dict[str, pd.Index]:
  """List each family's points without a cap on dollars, and those ablations meet."""
  free = data.entries[data.entries.usd_budget.isna()]
  points = dict(free.groupby("family", sort=False).groups)
  if config.baselines.ablations:
    # Ablations run without a cap.
    bopo = free[(free.family == "bopo") & free.call_budget.isna()]
    points[COMPARED] = bopo.index[bopo.parameters.str["lam"] == compared_lam(config)]
  return points


def _on_hull(mean: pd.DataFrame, names: Sequence[str], metric: str) -> list[str]:
  """List those on the upper hull; none unless LARGE costs more and scores more."""
  points = mean.loc[names]
  small, large = mean.loc[[*BOUNDARIES], ["cost_usd", metric]].to_numpy()
  if (small >= large).any():
    return []
  return [
    *points.index[frontier.vertices(points.cost_usd, points[metric], small, large)]
  ]


def _find_highest(mean: pd.DataFrame, names: Sequence[str]) -> str | None:
  """Find the point whose share of the success gap exceeds that of the cost gap most."""
  columns = ["success_percent", "cost_usd"]
  small, large = mean.loc[[*BOUNDARIES], columns].to_numpy()
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
  shown = [e for e in choice.entries if e.policy in (*BOUNDARIES, *choice.best)]
  data = load_split(run.store, shown, c, "test")
  score_NxK = _predict(run, data.tasks)
  rows = compare_forecast(data, score_NxK, choice.best).rows.set_index("budget")
  run.print("forecast of SR, and what was measured:")
  run.print(rows.to_string(float_format="{:.1%}".format, na_rep="–"))
  if run.is_main:
    draft = run.dir / "forecast.tmp"
    score_NxK.to_csv(draft)
    draft.replace(run.dir / FORECAST)


def _predict(run: Run, tasks: Sequence[str]) -> pd.DataFrame:
  """Predict score_NxK, in [0, 1], of tasks under each of the budgets and none."""
  c = run.config.evaluate
  first = {e.task_id: e for e in run.store.episodes(BOUNDARIES[0]) if e.steps}
  openings = [
    dataclasses.replace(first[id_], steps=first[id_].steps[:1]) for id_ in tasks
  ]
  forecasters = []
  for training in run.trainings():
    heads = load_heads(run.dir, run.config, training.train_seed)
    forecasters.append((heads, read_transitions(training, openings)))
  scores = pd.DataFrame(index=tasks)
  budgets = itertools.product(c.call_budgets, [None])
  for calls, usd in [*budgets, *itertools.product([None], [*c.usd_budgets, None])]:
    score_RxN = [_predict_scores(*forecaster, calls, usd) for forecaster in forecasters]
    scores[budget_name(calls, usd)] = np.mean(score_RxN, axis=0)
  return scores.astype(float)


def _predict_scores(
  heads: Heads, data: Transitions, calls: int | None, usd: float | None
) -> np.ndarray:
  """Predict score_N in [0, 1] under a cap at first decisions."""
  left = count_calls_left(heads, calls, usd, ())
  facts = describe(left, 0.0, data.progress_NxP)
  value_N, advantage_NxA = estimate(heads, data.hidden_NxD, facts)
  if left < 1:
    advantage_NxA = advantage_NxA[:, [SMALL]]
  return np.clip(value_N + advantage_NxA.max(axis=1), 0.0, 1.0)


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
  results = page.compute_results(run.store, choice, len(profiles), c, run.dir)
  print(page.texts.terminal_table(results))
  print(f"report: {page.write(results, run.dir / 'report')}")
