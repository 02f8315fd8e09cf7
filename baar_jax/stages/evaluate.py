"""Stages evaluate (every policy on dev, on test what dev has chosen), forecast and report."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import pandas as pd

from baar_jax.config import SERVED, evaluation_seeds
from baar_jax.episode import SMALL
from baar_jax.report.compare import FORECAST, budget_name, choose_on_dev, forecasts
from baar_jax.report.optimum import Exact
from baar_jax.report.table import has_enough, list_evaluated, list_keys, load_split
from baar_jax.rollout.policies import CONDITIONED, Entry, Job, Policy, entries, routers, rule_policy
from baar_jax.router.head import count_calls_left, describe, estimate
from baar_jax.router.policy import ConditionedPolicy, RouterPolicy, Threshold, ZeroShotPolicy
from baar_jax.router.qwen2 import softmax
from baar_jax.run import Run
from baar_jax.train.batches import ACTED, FAILURES, Batcher
from baar_jax.train.checkpoint import load_router
from baar_jax.train.dataset import load_threshold_episodes
from baar_jax.train.trainer import ShardedRouter
from baar_jax.train.training import Training
from baar_jax.train.values import load_heads, load_trunk, read_transitions


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
        load_heads(training)
      else:
        load_router(training, family, parameters.get("lam"))
  _play(run, entries(c), "dev")
  _play(run, choose_on_dev(run.store, entries(c), c).entries, "test")


def _play(run: Run, planned: Sequence[Entry], split: str) -> None:
  """Runs entries' episodes on a split; its n-th seed plays training seed n modulo their number."""
  for training in run.trainings():
    load = lru_cache(maxsize=1)(partial(_load_trained, training))  # a router's entries are adjacent
    jobs = _list_jobs(run, split, training.number, run.config.train_seeds)
    for entry in planned:
      if entry.uncapped_policy:
        _reuse(run, entry, jobs)
      policy = rule_policy(entry.family, entry.policy, **entry.parameters)
      policy = policy or _make_policy(run, entry, load)
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


def _load_trained(training: Training, family: str, lam: float | None) -> tuple:
  """A trained router, its view, and p_NxA, its probabilities at decisions in stored training
  episodes; in place of p_NxA the heads of the router that knows its budget."""
  if family == CONDITIONED:
    return *load_trunk(training), load_heads(training)
  model = load_router(training, family, lam)
  view = training.open_view(family)
  config = training.config
  if not config.evaluate.shares:
    return model, view, None
  router = ShardedRouter(model, view.logit_ids, training.mesh, config.router.dtype)
  labels = FAILURES if view.proposals else ACTED
  batcher = Batcher(config, view, training.store.tasks("train"), labels)
  logits_NxA = batcher.compute(router.logits, load_threshold_episodes(training.store, config))
  return model, view, softmax(logits_NxA, "stored episodes")


def forecast(run: Run) -> None:
  """Prints and keeps the score that the heads expect of each test task under each budget: the value
  at its first decision, at price 0."""
  c, store = run.config, run.store
  if c.value.updates == 0:
    run.print("no forecast: --config.value.updates is 0")
    return
  names, keys = {rule.name for rule in run.boundaries}, list_keys(store, c, "dev")
  listed = list_evaluated(store, c)  # of new budgets nothing has been played
  known = [e for e in listed if e.policy in names or has_enough(store, e.policy, keys)]
  choice = choose_on_dev(store, known, c)
  shown = [e for e in choice.entries if e.policy in names.union(choice.best)]
  data = load_split(store, shown, c, "test")
  first = {e.task_id: e for e in store.episodes(run.boundaries[0].name) if e.steps}
  openings = [dataclasses.replace(first[id_], steps=first[id_].steps[:1]) for id_ in data.tasks]
  forecasters = [
    (load_heads(training), read_transitions(training, openings)) for training in run.trainings()
  ]
  budgets = [(K, None) for K in c.evaluate.call_budgets]
  budgets += [(None, usd) for usd in c.evaluate.usd_budgets]
  scores = {budget_name(*b): predict_scores(forecasters, *b) for b in [*budgets, (None, None)]}
  score_NxK = pd.DataFrame(scores, data.tasks, dtype=float)
  rows = forecasts(data, score_NxK, choice.best)["rows"].set_index("budget")
  run.print("forecast of SR, and what was measured:")
  run.print(rows.to_string(float_format="{:.1%}".format, na_rep="–"))
  if run.is_main:
    draft = run.dir / "forecast.tmp"
    score_NxK.to_csv(draft)
    draft.replace(run.dir / FORECAST)


def predict_scores(forecasters: Sequence, calls: int | None, usd: float | None) -> np.ndarray:
  """score_N in [0, 1] expected under a cap at first decisions: the mean of (heads, transitions)."""
  scores = []
  for heads, data in forecasters:
    left = count_calls_left(heads, calls, usd, ())
    facts = describe(left, 0.0, data.progress_NxP)
    value_N, advantage_NxA = estimate(heads, data.hidden_NxD, facts)
    allowed_NxA = advantage_NxA if left >= 1 else advantage_NxA[:, [SMALL]]
    scores.append(np.clip(value_N + allowed_NxA.max(axis=1), 0.0, 1.0))
  return np.mean(scores, axis=0)


def report(run: Run) -> None:
  """Writes the results as a page, PNGs, results.json and tables, and prints the main ones."""
  if not run.is_main:
    return
  # matplotlib takes a second to import, which the other stages need not pay.
  from baar_jax.report import page

  played = list_evaluated(run.store, run.config)
  results = page.compute_results(run.store, played, run.config, run.dir)
  print(page.texts.terminal_table(results))
  print(f"report: {page.write(results, run.dir / 'report')}")
