"""Stage evaluate: every policy on the held-out tasks, the same way."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from baar_jax.config import Config
from baar_jax.episode import Task
from baar_jax.report.optimum import Exact
from baar_jax.rollout.entries import Entry, entries, routers
from baar_jax.rollout.live import Job, Live, Policy, rule_policy
from baar_jax.router.policy import RouterPolicy, Threshold, ZeroShotPolicy
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.train.batches import label_failures
from baar_jax.train.checkpoint import load_router
from baar_jax.train.dataset import add_proposals, load_threshold_episodes
from baar_jax.train.fit import score_episodes


def main(run: Run) -> None:
  for family, parameters in routers(run.config):  # a missing one is reported before anything is run
    load_router(run.dir, run.config, run.mesh, family, parameters.get("lam"))
  policies = Policies(run)
  jobs = [Job(task, seed) for task in test_tasks(run) for seed in range(run.config.evaluate.seeds)]
  for entry in entries(run.config):
    if entry.unlimited:
      _reuse(run, entry, jobs)
    policy, K, usd = policies.make(entry), entry.call_budget, entry.usd_budget
    run.collect(entry.policy, policy, jobs, call_budget=K, usd_budget=usd)


def test_tasks(run: Run) -> list[Task]:
  """The held-out tasks to evaluate on."""
  return run.tasks("test")[: run.config.evaluate.tasks or None]


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


class Policies:
  """Makes the entries' policies. The last router is kept: entries of one router are adjacent."""

  def __init__(self, run: Run):
    self._run = run
    self._model = lru_cache(maxsize=1)(partial(load_router, run.dir, run.config, run.mesh))
    self._p = lru_cache(maxsize=1)(self._measure)

  def make(self, entry: Entry) -> Policy:
    """The policy of an entry; raises ValueError if its router has not been trained."""
    if policy := rule_policy(entry):
      return policy
    config = self._run.config
    if entry.family == "optimum":
      return Policy(entry.policy, _optimal_rule(config, entry.parameters["mu"]))
    if entry.family == "zero-shot":
      judge = self._run.pair.judge(config.baselines.judge)
      return ZeroShotPolicy(entry.policy, judge, config.router, self._run.tokenizer)
    return self._router(entry)

  def _router(self, entry: Entry) -> RouterPolicy:
    run, family, threshold = self._run, entry.family, entry.parameters.get("threshold")
    key = family, entry.parameters.get("lam")
    if threshold is None:
      threshold = float(np.quantile(self._p(*key), 1.0 - entry.parameters["share"]))
    model, view, rule = self._model(*key), self._view(family), Threshold(threshold)
    return RouterPolicy(entry.policy, model, view, rule, run.live_episodes, run.mesh)

  def _view(self, family: str) -> View:
    return View(self._run.config.router, self._run.tokenizer, proposals=family == "cascade")

  def _measure(self, family: str, lam: float | None) -> np.ndarray:
    """p_D: the router's p(LARGE) of decisions in stored training episodes."""
    episodes, relabel = load_threshold_episodes(self._run.store, self._run.config), None
    if family == "cascade":  # which is asked where SMALL acts, and shown what it proposes
      episodes, relabel = list(map(add_proposals, episodes)), label_failures
    model, view = self._model(family, lam), self._view(family)
    return score_episodes(self._run, model, view, episodes, relabel)[0]


def _optimal_rule(config: Config, mu: float) -> Callable[[Live], int]:
  """The sandbox's best policy given the cues, for a weight of dollars."""
  choose = Exact(max_steps=config.env.max_steps, names=config.models.names).optimal_choice(mu)

  def rule(live: Live) -> int:
    history = [(step.model, step.action, step.observation) for step in live.steps]
    return choose(live.task.description, history, live.observation)

  return rule
