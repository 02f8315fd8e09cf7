"""Stage evaluate: every policy on the held-out tasks, the same way."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from baar_jax.bopo import load_bopo
from baar_jax.config import Config
from baar_jax.envs.sandbox_optimum import Exact
from baar_jax.episode import SMALL
from baar_jax.policies import RulePolicy, always, oracle, random_large
from baar_jax.qwen2 import Qwen2
from baar_jax.rollout import Job, Live, Policy
from baar_jax.router import RouterPolicy, Threshold
from baar_jax.run import Run
from baar_jax.sft import load_sft
from baar_jax.view import View

Make = Callable[[str], Policy]  # from the name under which its episodes are stored

FIRST_LARGE = "first-large"  # always-large under a call budget: LARGE for the first K calls
ROUTERS = ("sft", "bopo")
NO_BUDGET: dict[str, float] = {}
ARGMAX = 0.5  # the threshold that takes the more probable of two models
OPTIMUM_WEIGHTS = (40, 60, 90, 130, 200, 300)  # success per dollar


@dataclasses.dataclass(frozen=True)
class Entry:
  """One line of the evaluation.

  Attributes:
    family: "always-small", "always-large", "random", "first-large", "sft", "bopo", "oracle" or
      "optimum"; points of one family make one frontier.
    parameters: of the policy within its family, such as {"p": 0.25} or {"lam": 0.3,
      "threshold": 0.5}.
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
  """The lines of the evaluation, in the order of the report."""
  return [entry for entry, _ in _lineup(config, None)]


def main(run: Run) -> None:
  load_sft(run)  # what is not trained yet is said before anything is run
  for lam in run.config.bopo.lam:
    load_bopo(run, lam)
  tasks = run.tasks("test")
  jobs = [Job(task, seed) for task in tasks for seed in range(run.config.evaluate.seeds)]
  for entry, make in _lineup(run.config, run):
    if entry.unlimited and not (entry.family in ROUTERS and run.config.router.show_budget):
      _reuse(run, entry, jobs)
    run.collect(entry.policy, make(entry.policy), jobs, entry.call_budget, entry.usd_budget)


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


def _lineup(c: Config, run: Run | None) -> list[tuple[Entry, Make]]:
  """Every entry with what makes its policy; a checkpoint is read when its policy is made.

  Nothing can be made of a configuration without its run.
  """
  budgets = [{"K": K} for K in c.evaluate.call_budgets]
  budgets += [{"usd": usd} for usd in c.evaluate.usd_budgets]
  large = len(c.models.names) - 1
  lineup: list[tuple[Entry, Make]] = []

  def add(make: Make, family: str, budget: dict[str, float] = NO_BUDGET, **parameters) -> None:
    name, unlimited = _name(family, parameters | budget), None
    if "K" in budget:  # what dollars would not have changed cannot be told from an episode
      unlimited = "always-large" if family == FIRST_LARGE else _name(family, parameters)
    entry = Entry(family, parameters, name, budget.get("K"), unlimited, budget.get("usd"))
    lineup.append((entry, make))

  def router(load: Callable[[], Qwen2], threshold: float, name: str) -> RouterPolicy:
    view = View(c.router, run.tokenizer)
    decide = Threshold(threshold)
    return RouterPolicy(name, load(), view, c.router, decide, run.live_episodes, run.mesh)

  add(partial(always, SMALL), "always-small")
  add(partial(always, large), "always-large")
  for budget in budgets:
    if "usd" in budget:  # it caps SMALL too
      add(partial(always, SMALL), "always-small", budget)
    add(partial(always, large), FIRST_LARGE, budget)
  for p in c.evaluate.random_p:
    for budget in (NO_BUDGET, *budgets):
      add(partial(random_large, p), "random", budget, p=p)
  scripted = c.models.kind == "scripted"
  if scripted:
    for budget in (NO_BUDGET, *budgets):
      add(oracle, "oracle", budget)
  if c.env.kind == "sandbox" and scripted and not c.models.prices:  # what it is computed for
    for mu in OPTIMUM_WEIGHTS:
      add(partial(_optimum, c, mu), "optimum", mu=mu)
  # Routers come one after the other, and each is kept for its own entries alone.
  load_router = lru_cache(maxsize=1)(
    lambda lam: load_sft(run) if lam is None else load_bopo(run, lam)
  )
  trained = [("sft", {"update": c.sft.updates}, partial(load_router, None))]
  for lam in c.bopo.lam:
    parameters = {"lam": lam, "update": c.bopo.updates}
    trained.append(("bopo", parameters, partial(load_router, lam)))
  for family, parameters, load in trained:
    for threshold in (ARGMAX, *c.evaluate.thresholds):
      add(partial(router, load, threshold), family, **parameters, threshold=threshold)
    for budget in budgets:
      add(partial(router, load, ARGMAX), family, budget, **parameters, threshold=ARGMAX)
  return lineup


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
