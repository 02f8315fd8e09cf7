"""Who decides: what policies see of an episode, their rules, and the entries of the evaluation."""

import dataclasses
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence

from baar_jax.config import ABLATIONS, REFERENCE_SEEDS, Config, compared_lam
from baar_jax.envs.base import Env
from baar_jax.envs.table import load
from baar_jax.episode import SMALL, Reply, Step, Task
from baar_jax.llms import agent
from baar_jax.rollout.budget import CallBudget, DollarBudget, hold

ALWAYS_SMALL, ALWAYS_LARGE = BOUNDARIES = ("always-small", "always-large")  # also the families
# The stored trials that routers learn from, and that the values alone do.
STRATIFIED, TOGETHER, EXPLORED = "stratified", "together", "explored"
ALWAYS = "always"  # a model between the boundaries, named by its rank from 1
FIRST_LARGE = "first-large"  # always-large under a call budget: LARGE for the first K calls
CONDITIONED = "conditioned"  # the one router that knows its budget and the price of a dollar
BOLD = (1, 2)  # by how many deviations of its votes LARGE is raised where it is told of no cap
ARGMAX = 0.5  # the threshold that takes the most probable model
OPTIMUM_WEIGHTS = (40, 60, 90, 130, 200, 300)  # mu: how much success a dollar is worth
PRIVILEGED_WEIGHTS = (10, 30, 100)  # mu of the privileged rule
ROUTINE_WEIGHTS = (0, 3)  # small mu, without caps: they would be spent on routine steps


@dataclasses.dataclass(frozen=True)
class Job:  # an episode to be run
  task: Task
  seed: int


@dataclasses.dataclass(frozen=True)
class Decision:
  """The choice of a model, its log-probability if sampled, and what deciding took."""

  model: int
  logp: float | None = None
  cost_usd: float = 0.0
  latency_s: float = 0.0
  p_A: Sequence[float] = ()  # the router's probability of each model, where it has some


@dataclasses.dataclass(eq=False)
class Live:
  """An episode that is being run.

  A policy decides from `task`, `steps`, `observation`, the limits of its own budgets and what its
  `prepare` has left; the privileged rule also from `agents`.
  """

  job: Job
  env: Env  # runs this episode alone
  call_budget: CallBudget = dataclasses.field(default_factory=lambda: CallBudget(None))
  dollar_budget: DollarBudget = dataclasses.field(default_factory=lambda: DollarBudget(None))
  run_budget: DollarBudget | None = None  # None is no cap
  restarts: int = 0  # how often it was run again because its environment died
  price: float | None = None  # of a dollar, of the policy's prices; None is the least of them
  agents: Sequence[agent.Agent] = ()  # one per model
  messages: agent.Messages = dataclasses.field(default_factory=list)  # what the agents are shown
  steps: list[Step] = dataclasses.field(default_factory=list)
  observation: str = ""
  # The next step: the model that is decided for, and what has been called and decided so far.
  step: Step = dataclasses.field(default_factory=lambda: Step("", SMALL, ""))
  allowed: Sequence[int] = ()  # models whose next call fits, ascending; none ends the episode
  proposal_reply: Reply | None = None  # a cascade: the last for the next step; it is paid for
  coroutine: Iterator[None] | None = None  # plays the episode; it yields where it needs a decision
  stop: str = ""  # as of `Episode`, once the episode is over
  error: BaseException | None = None  # the one that has ended the episode
  score: float = 0.0

  @property
  def task(self) -> Task:
    return self.job.task

  @property
  def proposer(self) -> int:
    """The model of the last proposal, SMALL without one."""
    return self.proposal_reply.call.model if self.proposal_reply else SMALL

  def propose(self, reply: Reply) -> None:
    """Shows the policy a model's reply before it decides."""
    self.proposal_reply = reply
    self.step.proposal = agent.parse_action(reply.text, self.env.code_actions) or ""

  @property
  def hold(self) -> agent.Hold:
    """`budget.hold` on the budgets of this episode and of the run."""
    return functools.partial(hold, self.dollar_budget, self.run_budget)


class Policy:
  """Chooses a model for each episode that is ready: by a rule, unless a subclass does it."""

  prices: Sequence[float] = ()  # of a dollar, of which an episode may name one (`Live.price`)

  def __init__(self, name: str, rule: Callable[[Live], int]):
    self.name = name  # part of the episodes' key: it carries every parameter and checkpoint
    self._rule = rule

  def prepare(self, live: Live) -> None:
    """Asks models for what the next decision needs, in a worker thread, where there is a choice."""

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """One decision per episode; the loop replaces a model that a budget forbids."""
    return [Decision(self._rule(live)) for live in ready]

  def finish(self, live: Live) -> None:
    """Frees what is kept of an episode that ended or starts again: here nothing."""


@dataclasses.dataclass(frozen=True)
class Entry:
  """One entry of the evaluation: a policy under a budget."""

  family: str  # of `entries`' table; points of one family make one frontier
  parameters: dict[str, float]  # such as {"p": 0.25}; "share" sets a threshold by stored episodes
  policy: str  # the name under which its episodes are stored
  call_budget: int | None = None  # K; None is no cap on large calls
  # Where the policy is not told its call budget: the one without, which makes the same decisions.
  uncapped_policy: str | None = None
  usd_budget: float | None = None  # B_max; None is no cap on dollars


def rule_policy(family: str, name: str = "", **parameters: float) -> Policy | None:
  """The policy of a family that decides by a rule, else None; its usual name is `policy_name`'s."""
  rules = {
    ALWAYS_SMALL: lambda live: SMALL,
    ALWAYS_LARGE: lambda live: len(live.agents) - 1,
    FIRST_LARGE: lambda live: len(live.agents) - 1,  # as long as its budget allows
    ALWAYS: lambda live: parameters["model"] - 1,
    "random": lambda live: random_rule(live, **parameters),
    STRATIFIED: lambda live: sampled_rule(live, **parameters),
    TOGETHER: lambda live: sampled_rule(live, 0, *parameters.values()),  # none of the first kind
    EXPLORED: lambda live: sampled_rule(live, **parameters),
    "privileged": lambda live: privileged_rule(live, **parameters),
  }
  return Policy(name or policy_name(family, parameters), rules[family]) if family in rules else None


def random_rule(live: Live, p: float) -> int:
  """One of the models dearer than SMALL, evenly, with probability p, else SMALL (our choice)."""
  # The draw depends on task, seed and step alone.
  draw = random.Random(f"random|{live.task.id}|{live.job.seed}|{len(live.steps)}")
  return draw.choice(range(1, len(live.agents))) if draw.random() < p else SMALL


def sampled_rule(live: Live, samples: int, together: int = 0, repeats: int = 0) -> int:
  """What stored trial k of a task, from 1, takes: first come `samples`, then the other two kinds.

  k and N count within a kind. The first is LARGE with probability k / N at each step (paper), the
  others, our choice, until a clock is at k / (2 N) of the task's steps, or for even k from then on.
  The clock of `together` counts steps, that of `repeats` observations that were not new: so values
  also learn what first-large does, and giving up, or LARGE, once an episode goes in circles.
  """
  k, N, clock = live.job.seed - REFERENCE_SEEDS, samples, len(live.steps)
  if k <= N:
    return random_rule(live, k / N)
  k, N = k - N, together
  if k > N:
    seen = [*(step.observation for step in live.steps), live.observation]
    k, N, clock = k - N, repeats, len(seen) - len(set(seen))
  early = clock < k / (2 * N) * live.task.max_steps
  return random_rule(live, float(early == k % 2))


def privileged_rule(live: Live, mu: float) -> int:
  """The model that gains the most over SMALL, where a dollar more costs `mu` of the task.

  It reads the scripted models' errors, which no router sees, one step ahead (our choice). The gain
  is SMALL's loss minus a model's, as far as that knows the task: one that it cannot do is given up.
  """
  small, *dearer = (model.prospect(live.messages, len(live.steps)) for model in live.agents)
  gains = [m.known_share * (small.loss - m.loss) - mu * (m.usd - small.usd) for m in dearer]
  return max(range(len(live.agents)), key=[0.0, *gains].__getitem__)  # SMALL where none is better


def entries(config: Config) -> list[Entry]:
  """The entries of the evaluation in the order of the report; those of one router are adjacent."""
  c, scripted = config, config.models.kind == "scripted"
  calls = [{"K": K} for K in c.evaluate.call_budgets]
  dollars = [{"usd": usd} for usd in c.evaluate.usd_budgets]
  uncapped, capped, each = [{}], [*calls, *dollars], [{}, *calls, *dollars]
  # Families with the parameters of one policy and the budgets that it runs under.
  table = [(ALWAYS_SMALL, {}, [{}, *dollars])]  # a cap on dollars limits SMALL too
  table += [(ALWAYS_LARGE, {}, uncapped), (FIRST_LARGE, {}, capped)]
  table += [(ALWAYS, {"model": rank}, uncapped) for rank in range(2, len(c.models.names))]
  table += [("random", {"p": p}, each) for p in c.evaluate.random_p]
  if scripted and not load(c.env.kind).has_optimum:
    table += [("privileged", {"mu": mu}, uncapped) for mu in ROUTINE_WEIGHTS]
    table += [("privileged", {"mu": mu}, each) for mu in PRIVILEGED_WEIGHTS]
  elif scripted and not (c.models.prices or c.models.skills):  # the optimum is known for these
    table += [("optimum", {"mu": mu}, uncapped) for mu in OPTIMUM_WEIGHTS]
    table.append(("optimum", {}, calls))
  if "zero-shot" in c.baselines.rivals:
    table.append(("zero-shot", {}, each))
  thresholds = [{"threshold": value} for value in (ARGMAX, *c.evaluate.thresholds)]
  thresholds += [{"share": share} for share in c.evaluate.shares]
  capped_thresholds = thresholds if c.evaluate.budget_rules else thresholds[:1]
  for family, parameters in routers(c):
    if family == CONDITIONED:
      table += [(family, parameters | {"price": p}, uncapped) for p in c.value.prices]
      least = parameters | {"price": min(c.value.prices)}
      table += [(family, least, capped), (family, least | {"bold": 0}, capped)]
      table += [(family, least | {"bold": bold}, each) for bold in BOLD]
      continue
    table += [(family, parameters | threshold, uncapped) for threshold in thresholds]
    for budget in capped if family not in ABLATIONS else ():
      table += [(family, parameters | threshold, [budget]) for threshold in capped_thresholds]
  return [_entry(c, *policy, budget) for *policy, budgets in table for budget in budgets]


def routers(config: Config) -> list[tuple[str, dict[str, float]]]:
  """Family and training parameters of every trained router."""
  c, rivals = config, config.baselines.rivals
  seeds = {"seeds": c.train_seeds} if c.train_seeds > 1 else {}  # a point stands for all of them
  rollouts, steps = {"update": c.bopo.updates} | seeds, {"update": c.baselines.updates} | seeds
  return [
    *([(CONDITIONED, {"update": c.value.updates} | seeds)] if c.value.updates else []),
    ("sft", {"update": c.sft.updates} | seeds),
    *(("bopo", {"lam": lam} | rollouts) for lam in c.bopo.lam),
    *((family, steps) for family in ("cascade", "single-turn") if family in rivals),
    *(("vanilla", {"lam": lam} | rollouts) for lam in c.bopo.lam if "vanilla" in rivals),
    *((ablation, {"lam": compared_lam(c)} | rollouts) for ablation in c.baselines.ablations),
  ]


def _entry(config: Config, family: str, parameters: dict, budget: dict) -> Entry:
  """A policy under a budget, and whose episodes it may reuse."""
  base = zero_shot_name(config) if family == "zero-shot" else family
  shown, uncapped_policy = config.router.show_budget and family in dict(routers(config)), None
  if family in ("zero-shot", "optimum", CONDITIONED):  # whatever their texts show
    shown = "bold" not in parameters
  if "K" in budget and not shown:  # episodes do not tell what a cap on dollars would change
    freely = {key: value for key, value in parameters.items() if (key, value) != ("bold", 0)}
    uncapped_policy = ALWAYS_LARGE if family == FIRST_LARGE else policy_name(base, freely)
  policy = policy_name(base, parameters | budget)
  return Entry(family, parameters, policy, budget.get("K"), uncapped_policy, budget.get("usd"))


def policy_name(base: str, parameters: dict[str, float]) -> str:
  """The name under which a policy's episodes are stored: it carries every parameter."""
  settings = ",".join(f"{key}={value:g}" for key, value in parameters.items())
  return f"{base}({settings})" if settings else base


def sample_counts(config: Config, family: str) -> dict[str, int]:
  """How many trials of each kind a family's policy plays of a task: its parameters."""
  c = config.references
  repeats = {"repeats": c.repeats} if c.repeats else {}
  return {
    STRATIFIED: {"samples": c.samples},  # what the references of hard tasks are chosen from
    TOGETHER: {"samples": c.together} | repeats,
    EXPLORED: {"samples": c.samples, "together": c.together} | repeats,
  }[family]


def samples_name(config: Config, family: str) -> str:
  """The name of a family's policy, which plays trials that routers learn from."""
  return policy_name(family, sample_counts(config, family))


def rollouts_name(family: str, lam: float, update: int, train_seed: int = 0) -> str:
  """The policy whose episodes are rolled out for an update."""
  seed = {"seed": train_seed} if train_seed else {}
  return f"{policy_name(family, {'lam': lam} | seed)}/{update}"


def zero_shot_name(config: Config) -> str:
  """The zero-shot policy without a budget: the name carries all that the answers depend on."""
  c = config.baselines.judge
  settings = config.models.kind, c.base_urls, c.temperature, c.max_completion_tokens, c.prices
  digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:6]
  return f"zero-shot {c.names[0]} {digest}"
