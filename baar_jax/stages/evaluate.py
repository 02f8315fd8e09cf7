"""Stages evaluate (every policy on dev, on test what dev has chosen) and forecast."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from baar_jax.config import SERVED, evaluation_seeds
from baar_jax.episode import SMALL
from baar_jax.report import frontier
from baar_jax.report.compare import choose
from baar_jax.report.optimum import Exact
from baar_jax.report.table import FORECAST, list_evaluated, load
from baar_jax.rollout.policies import CONDITIONED, Entry, Job, Policy, entries, routers, rule_policy
from baar_jax.router.head import Heads, count_calls_left, describe, estimate
from baar_jax.router.policy import ConditionedPolicy, RouterPolicy, Threshold, ZeroShotPolicy
from baar_jax.router.view import open_view
from baar_jax.run import Run
from baar_jax.train.batches import label_failures
from baar_jax.train.checkpoint import load_router
from baar_jax.train.dataset import add_proposals, load_threshold_episodes
from baar_jax.train.fit import measure_calibration, predict
from baar_jax.train.values import Transitions, blind_view, load_heads, load_trunk, read_transitions


def main(run: Run) -> None:
  c = run.config
  if c.env.kind == SERVED:  # clients have played
    for split in ("dev", "test"):
      tasks = run.tasks(split)[: c.evaluate.tasks or None]
      jobs = [Job(task, seed) for task in tasks for seed in evaluation_seeds(c, split)]
      run.collect(split, run.boundaries[0], jobs)
    run.print(f"evaluated: {', '.join(e.policy for e in list_evaluated(run.store, c))}")
    return
  for family, parameters in routers(c):  # a missing one is reported before anything is run
    for trained in run.trainings():
      if family == CONDITIONED:
        load_heads(trained)
      else:
        load_router(run.dir, c, run.mesh, family, parameters.get("lam"), trained.train_seed)
  _play(run, entries(c), "dev")
  chosen = choose(run.store, entries(c), c).policies
  _play(run, [entry for entry in entries(c) if entry.policy in chosen], "test")


def _play(run: Run, played: Sequence[Entry], split: str) -> None:
  """Runs the entries' episodes on dev or on test; the training seeds take turns by seed."""
  tasks, trainings = run.tasks(split)[: run.config.evaluate.tasks or None], run.trainings()
  for number, trained in enumerate(trainings):
    load = lru_cache(maxsize=1)(partial(_load_trained, trained))  # a router's entries are adjacent
    seeds = evaluation_seeds(run.config, split)[number :: len(trainings)]
    jobs = [Job(task, seed) for task in tasks for seed in seeds]
    for entry in played:
      if entry.unlimited:
        _reuse(run, entry, jobs)
      policy = rule_policy(entry) or _make_policy(trained, entry, load)
      run.collect(f"{split} {entry.policy}", policy, jobs, entry.call_budget, entry.usd_budget)


def _reuse(run: Run, entry: Entry, jobs: Sequence[Job]) -> None:
  """Stores the episodes that a budget would not have changed, instead of running them again.

  A policy that is not shown its budget makes the same decisions until the budget is spent, and
  the same draws follow from the same task, seed and step.
  """
  missing = {(job.task.id, job.seed) for job in jobs} - run.store.keys(entry.policy)
  table = run.store.table([entry.unlimited])
  # With all K calls made, a router would not be asked again.
  unchanged = table[table.large_calls < entry.call_budget]
  keys = missing & set(zip(unchanged.task_id, unchanged.seed))
  run.store.add_equal(entry.policy, entry.call_budget, entry.unlimited, keys)


def _make_policy(run: Run, entry: Entry, load: Callable) -> Policy:
  """The policy of an entry that is computed, asks a judge, or is a router that `load` loads."""
  c, parameters = run.config, entry.parameters
  if entry.family == "optimum":
    exact = Exact(max_steps=c.env.max_steps, names=c.models.names)
    return Policy(entry.policy, exact.optimal_rule(**parameters, calls=entry.call_budget))
  if entry.family == "zero-shot":
    judge = run.pair.judge(c.baselines.judge)
    return ZeroShotPolicy(entry.policy, judge, c.router, run.tokenizer, len(c.models.names))
  model, view, rest = load(entry.family, parameters.get("lam"))
  rows = run.live_episodes, run.mesh
  if entry.family == CONDITIONED:
    told = "told" not in parameters
    return ConditionedPolicy(entry.policy, model, view, rest, [parameters["price"]], *rows, told)
  rule = Threshold(parameters.get("threshold"), [price.input for price in run.pair.prices])
  if "share" in parameters:
    rule.value = float(np.quantile(rule.last_values(rest), 1.0 - parameters["share"]))
  return RouterPolicy(entry.policy, model, view, rule, *rows)


def _load_trained(run: Run, family: str, lam: float | None) -> tuple:
  """A trained router, its view, and p_DxA, its probabilities at decisions in stored training
  episodes; in place of p_DxA the heads of the router that knows its budget."""
  if family == CONDITIONED:
    return load_trunk(run), blind_view(run), load_heads(run)
  model = load_router(run.dir, run.config, run.mesh, family, lam, train_seed=run.train_seed)
  view, dearest = open_view(run.config, run.tokenizer, family == "cascade"), len(run.pair.names) - 1
  if not run.config.evaluate.shares:
    return model, view, None
  episodes, relabel = load_threshold_episodes(run.store, run.config), None
  if family == "cascade":  # which is asked where any but the dearest acts, and shown its proposal
    episodes = [add_proposals(episode, dearest) for episode in episodes]
    relabel = partial(label_failures, dearest=dearest)
  return model, view, predict(run, model, view, episodes, relabel)


def forecast(run: Run) -> None:
  """Prints and keeps the mean score that the heads expect on test tasks under each budget.

  A forecast is the value at the first decision, at price 0. What was measured, where the budget has
  been evaluated, is of the router at the price that dev has chosen there; the calibration counts
  each test task under each cap once.
  """
  c = run.config
  if c.value.updates == 0:
    run.print("no forecast: --config.value.updates is 0")
    return
  dev, candidates = evaluation_seeds(c, "dev"), list_evaluated(run.store, c)
  played = [e for e in candidates if any(seed in dev for _, seed in run.store.keys(e.policy))]
  if not any(entry.family == CONDITIONED for entry in played):
    if c.env.kind == SERVED:
      run.print(f"no forecast: clients have not played the {CONDITIONED} router on dev and on test")
      return
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
    draws = frontier.draw(len(forecast_N), 1, c.evaluate.bootstrap)
    mean_B = frontier.means(forecast_N[None, :, None], np.array([False]), draws)[0]
    budget = "no cap" if calls is usd is None else f"${usd:g}" if calls is None else f"K = {calls}"
    row = frontier.interval("forecast_share", mean_B)
    mean, low, high = (100 * share for share in row.values())
    row |= {"budget": budget, "measured_share": None}
    text = f"forecast of SR, {budget}: {mean:.1f} [{low:.1f}, {high:.1f}]"
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
    draft = run.dir / "forecast.tmp"
    draft.write_text(json.dumps({"rows": rows, "calibration": calibration}))
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
