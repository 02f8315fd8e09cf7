"""Stage evaluate: every policy on the held-out tasks, the same way."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from baar_jax.config import ABLATIONS, Config, compared_lam
from baar_jax.episode import SMALL, Task
from baar_jax.report.optimum import Exact
from baar_jax.rollout.live import Job, Live, Policy
from baar_jax.rollout.policies import RulePolicy, always, oracle, random_large
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.router.zero_shot import ZeroShotPolicy, judged_view, zero_shot_name
from baar_jax.run import Run
from baar_jax.stages.bopo import load_bopo
from baar_jax.stages.cascade import CascadePolicy, load_cascade, measure_cascade, proposing_view
from baar_jax.stages.sft import load_sft
from baar_jax.stages.single_turn import load_single_turn
from baar_jax.train.thresholds import measure, threshold

FIRST_LARGE = "first-large"  # always-large under a call budget: LARGE for the first K calls
NO_BUDGET: dict[str, float] = {}
ARGMAX = 0.5  # the threshold that takes the more probable of two models
OPTIMUM_WEIGHTS = (40, 60, 90, 130, 200, 300)  # success per dollar


@dataclasses.dataclass(frozen=True)
class Entry:
  """One line of the evaluation.

  Attributes:
    family: "always-small", "always-large", "random", "first-large", "sft", "bopo", "oracle" or
      "optimum", a rival or an ablation; points of one family make one frontier.
    parameters: of the policy within its family, such as {"p": 0.25} or {"lam": 0.3,
      "threshold": 0.5}; "share" stands for a threshold that training episodes have set.
    policy: the name under which its episodes are stored.
    call_budget: K, or None for no cap on LARGE calls.
    unlimited: under a call budget, the name of the same policy without one.
    usd_budget: B_max in dollars, or None for no cap.
  """

  family: str
  parameters: dict[str, float]
  policy: str
  call_budget: int | None = None
  unlimited: str | None = None
  usd_budget: float | None = None


def entries(config: Config) -> list[Entry]:
  """The lines of the evaluation, in the order of the report; those of one router together."""
  c = config
  budgets = [{"K": K} for K in c.evaluate.call_budgets]
  budgets += [{"usd": usd} for usd in c.evaluate.usd_budgets]
  lines: list[Entry] = []

  def add(family: str, budget: dict[str, float], sees: bool, named: str = "", **parameters) -> None:
    name, unlimited = _name(named or family, parameters | budget), None
    # What dollars would not have changed cannot be told from an episode.
    if "K" in budget and not sees:
      unlimited = "always-large" if family == FIRST_LARGE else _name(family, parameters)
    capped = budget.get("K"), unlimited, budget.get("usd")
    lines.append(Entry(family, parameters, name, *capped))

  add("always-small", NO_BUDGET, False)
  add("always-large", NO_BUDGET, False)
  for budget in budgets:
    if "usd" in budget:  # it caps SMALL too
      add("always-small", budget, False)
    add(FIRST_LARGE, budget, False)
  for p in c.evaluate.random_p:
    for budget in (NO_BUDGET, *budgets):
      add("random", budget, False, p=p)
  scripted = c.models.kind == "scripted"
  if scripted:
    for budget in (NO_BUDGET, *budgets):
      add("oracle", budget, False)
  if c.env.kind == "sandbox" and scripted and not c.models.prices:  # what it is computed for
    for mu in OPTIMUM_WEIGHTS:
      add("optimum", NO_BUDGET, False, mu=mu)
  if "zero-shot" in c.baselines.rivals:
    for budget in (NO_BUDGET, *budgets):
      add("zero-shot", budget, True, named=zero_shot_name(c))
  for family, parameters in routers(c):
    rules = [{"threshold": t} for t in (ARGMAX, *c.evaluate.thresholds)]
    rules += [{"share": share} for share in c.evaluate.shares]
    for rule in rules:
      add(family, NO_BUDGET, False, **parameters, **rule)
    for budget in budgets if family not in ABLATIONS else ():
      for rule in rules if c.evaluate.budget_rules else rules[:1]:
        add(family, budget, c.router.show_budget, **parameters, **rule)
  return lines


def routers(config: Config) -> Iterator[tuple[str, dict[str, float]]]:
  """Family and training's parameters of every trained router."""
  c, rivals = config, config.baselines.rivals
  trained, fitted = {"update": c.bopo.updates}, {"update": c.baselines.updates}
  yield "sft", {"update": c.sft.updates}
  for lam in c.bopo.lam:
    yield "bopo", {"lam": lam} | trained
  for family in ("cascade", "single-turn"):
    if family in rivals:
      yield family, fitted
  for lam in c.bopo.lam if "vanilla" in rivals else ():
    yield "vanilla", {"lam": lam} | trained
  for ablation in c.baselines.ablations:
    yield ablation, {"lam": compared_lam(c)} | trained


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
  for episode in run.store.episodes(entry.unlimited):
    # With all K calls made, a router would not be asked again.
    unchanged = episode.large_calls < entry.call_budget
    if unchanged and (episode.task_id, episode.seed) in missing:
      own = {"policy": entry.policy, "call_budget": entry.call_budget, "reused": True}
      run.store.add(dataclasses.replace(episode, **own))


def _name(family: str, parameters: dict[str, float]) -> str:
  """The name under which an entry's episodes are stored: it carries every parameter."""
  settings = ",".join(f"{key}={value:g}" for key, value in parameters.items())
  return f"{family}({settings})" if settings else family


def _optimum(config: Config, mu: float, name: str) -> RulePolicy:
  """The sandbox's best policy given the cues, for a weight of dollars."""
  choose = Exact(max_steps=config.env.max_steps, names=config.models.names).optimal_choice(mu)

  def rule(live: Live) -> int:
    seen = [(step.model, step.action, step.observation) for step in live.steps]
    return choose(live.task.description, seen, live.observation)

  return RulePolicy(name, rule)
