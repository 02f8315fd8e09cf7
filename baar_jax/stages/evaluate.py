"""Stage evaluate: every policy on the held-out tasks, the same way."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from baar_jax.config import ABLATIONS, Config
from baar_jax.episode import SMALL, Task
from baar_jax.report.optimum import Exact
from baar_jax.rollout.entries import FIRST_LARGE, Entry, entries, routers
from baar_jax.rollout.live import Job, Live, Policy
from baar_jax.rollout.policies import RulePolicy, always, oracle, random_large
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.router.zero_shot import ZeroShotPolicy, judged_view
from baar_jax.run import Run
from baar_jax.stages.bopo import load_bopo
from baar_jax.stages.cascade import CascadePolicy, load_cascade, measure_cascade, proposing_view
from baar_jax.stages.sft import load_sft
from baar_jax.stages.single_turn import load_single_turn
from baar_jax.train.thresholds import measure, threshold


def load_router(run: Run, family: str, lam: float | None) -> Qwen2:
  """A trained router. Raises ValueError if it has not been trained to its end."""
  if family in ABLATIONS:
    return load_bopo(run.ablated(family), lam)
  loads = {"sft": load_sft, "cascade": load_cascade, "single-turn": load_single_turn}
  return loads[family](run) if family in loads else load_bopo(run, lam, family)


class Policies:
  """Makes the entries' policies. Those of one router come one after the other, and it is kept for
  them alone."""

  def __init__(self, run: Run):
    self._run = run
    self._model = lru_cache(maxsize=1)(lambda family, lam: load_router(run, family, lam))
    self._measured = lru_cache(maxsize=1)(self._measure)

  def make(self, entry: Entry) -> Policy:
    """The policy of an entry; raises ValueError if its router has not been trained."""
    run, name = self._run, entry.policy
    if entry.family == "always-small":
      return always(SMALL, name)
    if entry.family in ("always-large", FIRST_LARGE):
      return always(len(run.config.models.names) - 1, name)
    if entry.family == "random":
      return random_large(entry.parameters["p"], name)
    if entry.family == "oracle":
      return oracle(name)
    if entry.family == "optimum":
      return _optimum(run.config, entry.parameters["mu"], name)
    if entry.family == "zero-shot":
      judge = run.pair.judge(run.config.baselines.judge)
      return ZeroShotPolicy(name, judge, judged_view(run.config.router, run.tokenizer))
    return self._router(entry)

  def _router(self, entry: Entry) -> RouterPolicy:
    run, c, parameters = self._run, self._run.config.router, entry.parameters
    key = entry.family, parameters.get("lam")
    if "share" in parameters:
      decide = Threshold(threshold(self._measured(*key), parameters["share"]))
    else:
      decide = Threshold(parameters["threshold"])
    cascade = entry.family == "cascade"
    kind = CascadePolicy if cascade else RouterPolicy
    view = proposing_view(run) if cascade else View(c, run.tokenizer)
    return kind(entry.policy, self._model(*key), view, c, decide, run.live_episodes, run.mesh)

  def _measure(self, family: str, lam: float | None) -> np.ndarray:
    run, model = self._run, self._model(family, lam)
    if family == "cascade":
      return measure_cascade(run, model)
    return measure(run, model, View(run.config.router, run.tokenizer))


def main(run: Run) -> None:
  for family, parameters in routers(run.config):  # what is missing is said before anything is run
    load_router(run, family, parameters.get("lam"))
  policies = Policies(run)
  jobs = [Job(task, seed) for task in test_tasks(run) for seed in range(run.config.evaluate.seeds)]
  for entry in entries(run.config):
    if entry.unlimited:
      _reuse(run, entry, jobs)
    limits = entry.call_budget, entry.usd_budget
    run.collect(entry.policy, policies.make(entry), jobs, *limits)


def test_tasks(run: Run) -> list[Task]:
  """The held-out tasks to evaluate on."""
  tasks = run.tasks("test")
  return tasks[: run.config.evaluate.tasks or len(tasks)]


def _reuse(run: Run, entry: Entry, jobs: Sequence[Job]) -> None:
  """Stores the episodes that a budget would not have changed, instead of running them again.

  A policy that is not shown its budget makes the same decisions until the budget is spent, and
  the same draws follow from the same task, seed and step.
  """
  missing = {(job.task.id, job.seed) for job in jobs} - run.store.keys(entry.policy)
  others = run.store.table([entry.unlimited])
  # With all K calls made, a router would not be asked again.
  others = others[others.large_calls < entry.call_budget]
  keys = missing & set(zip(others.task_id, others.seed))
  run.store.add_equal(entry.policy, entry.call_budget, entry.unlimited, keys)


def _optimum(config: Config, mu: float, name: str) -> RulePolicy:
  """The sandbox's best policy given the cues, for a weight of dollars."""
  choose = Exact(max_steps=config.env.max_steps, names=config.models.names).optimal_choice(mu)

  def rule(live: Live) -> int:
    seen = [(step.model, step.action, step.observation) for step in live.steps]
    return choose(live.task.description, seen, live.observation)

  return RulePolicy(name, rule)
