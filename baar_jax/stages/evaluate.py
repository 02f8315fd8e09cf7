"""Stage evaluate: every policy on dev, and on test what dev has chosen, all the same way."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from baar_jax.config import evaluation_seeds
from baar_jax.report.choice import choose
from baar_jax.report.optimum import Exact
from baar_jax.rollout.entries import CONDITIONED, Entry, entries, routers
from baar_jax.rollout.live import Job, Policy, rule_policy
from baar_jax.router.policy import ConditionedPolicy, RouterPolicy, Threshold, ZeroShotPolicy
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.train.batches import label_failures
from baar_jax.train.checkpoint import load_router
from baar_jax.train.dataset import add_proposals, load_threshold_episodes
from baar_jax.train.fit import predict_large
from baar_jax.train.values import blind_view, load_heads, load_trunk


def main(run: Run) -> None:
  c = run.config
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
    return ZeroShotPolicy(entry.policy, judge, c.router, run.tokenizer)
  model, view, rest = load(entry.family, parameters.get("lam"))
  rows = run.live_episodes, run.mesh
  if entry.family == CONDITIONED:
    price = parameters["price"]
    return ConditionedPolicy(entry.policy, model, view, rest, price, *rows)
  threshold = parameters.get("threshold")
  if threshold is None:
    threshold = float(np.quantile(rest, 1.0 - parameters["share"]))
  rule = Threshold(threshold)
  return RouterPolicy(entry.policy, model, view, rule, *rows)


def _load_trained(run: Run, family: str, lam: float | None) -> tuple:
  """A trained router, its view, and p_D, its p(LARGE) of decisions in stored training episodes;
  in place of p_D the heads of the router that knows its budget."""
  if family == CONDITIONED:
    return load_trunk(run), blind_view(run), load_heads(run)
  model = load_router(run.dir, run.config, run.mesh, family, lam, train_seed=run.train_seed)
  view = View(run.config.router, run.tokenizer, proposals=family == "cascade")
  if not run.config.evaluate.shares:
    return model, view, None
  episodes, relabel = load_threshold_episodes(run.store, run.config), None
  if family == "cascade":  # which is asked where SMALL acts, and shown what it proposes
    episodes, relabel = list(map(add_proposals, episodes)), label_failures
  return model, view, predict_large(run, model, view, episodes, relabel)[0]
