"""The entries of the evaluation: policies, their budgets, and the names of stored episodes."""

import dataclasses
import hashlib
import json

from baar_jax.config import ABLATIONS, Config, compared_lam

ALWAYS_SMALL, ALWAYS_LARGE = BOUNDARIES = ("always-small", "always-large")  # also the families
ALWAYS = "always"  # a model between the boundaries, named by its rank from 1
FIRST_LARGE = "first-large"  # always-large under a call budget: LARGE for the first K calls
CONDITIONED = "conditioned"  # the one router that knows its budget and the price of a dollar
UNTOLD = {"told": 0}  # under a cap: that router, which then spends as without one until it is spent
ARGMAX = 0.5  # the threshold that takes the most probable model
OPTIMUM_WEIGHTS = (40, 60, 90, 130, 200, 300)  # success per dollar
PRIVILEGED_WEIGHTS = (0, 3, 10, 30, 100)  # the same
ROUTINE_WEIGHT = 3  # with it or less, privileged rules spend a cap on routine steps


@dataclasses.dataclass(frozen=True)
class Entry:
  """One entry of the evaluation: a policy under a budget."""

  family: str  # of `entries`' table; points of one family make one frontier
  # Of the policy within its family, such as {"p": 0.25} or {"lam": 0.3, "threshold": 0.5}; "share"
  # stands for a threshold that training episodes have set.
  parameters: dict[str, float]
  policy: str  # the name under which its episodes are stored
  call_budget: int | None = None  # K; None is no cap on large calls
  # Under a call budget, the name of the same policy without one, if the policy is not shown its
  # budget and so makes the same decisions until the budget is spent.
  unlimited: str | None = None
  usd_budget: float | None = None  # B_max; None is no cap on dollars


def entries(config: Config) -> list[Entry]:
  """The entries of the evaluation in the order of the report; those of one router are adjacent."""
  c, scripted = config, config.models.kind == "scripted"
  calls = [{"K": K} for K in c.evaluate.call_budgets]
  dollars = [{"usd": usd} for usd in c.evaluate.usd_budgets]
  uncapped, capped = [{}], [*calls, *dollars]
  # Families with the parameters of one policy and the budgets that it runs under.
  table = [(ALWAYS_SMALL, {}, uncapped), (ALWAYS_LARGE, {}, uncapped), (FIRST_LARGE, {}, calls)]
  table += [(ALWAYS, {"model": rank}, uncapped) for rank in range(2, len(c.models.names))]
  for budget in dollars:  # a cap on dollars limits SMALL too
    table += [(ALWAYS_SMALL, {}, [budget]), (FIRST_LARGE, {}, [budget])]
  table += [("random", {"p": p}, uncapped + capped) for p in c.evaluate.random_p]
  if scripted and c.env.kind != "sandbox":
    for mu in PRIVILEGED_WEIGHTS:
      budgets = uncapped if mu <= ROUTINE_WEIGHT else uncapped + capped
      table.append(("privileged", {"mu": mu}, budgets))
  elif scripted and not (c.models.prices or c.models.skills):  # the optimum is known for these
    table += [("optimum", {"mu": mu}, uncapped) for mu in OPTIMUM_WEIGHTS]
    table.append(("optimum", {}, calls))
  if "zero-shot" in c.baselines.rivals:
    table.append(("zero-shot", {}, uncapped + capped))
  rules = [{"threshold": value} for value in (ARGMAX, *c.evaluate.thresholds)]
  rules += [{"share": share} for share in c.evaluate.shares]
  capped_rules = rules if c.evaluate.budget_rules else rules[:1]
  for family, parameters in routers(c):
    if family == CONDITIONED:
      prices = [parameters | {"price": p} for p in c.value.prices]
      table += [(family, priced, uncapped) for priced in prices]
      table.append((family, parameters | {"price": min(c.value.prices)}, capped))
      table += [(family, priced | UNTOLD, capped) for priced in prices]
      continue
    table += [(family, parameters | rule, uncapped) for rule in rules]
    for budget in capped if family not in ABLATIONS else ():
      table += [(family, parameters | rule, [budget]) for rule in capped_rules]
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
  base = zero_shot_name(config) if family == "zero-shot" else family
  shown = config.router.show_budget and family in dict(routers(config))
  shown |= family in ("zero-shot", "optimum")
  if family == CONDITIONED:  # its text does not say it
    shown = "told" not in parameters
  unlimited = None
  if "K" in budget and not shown:  # of a cap on dollars an episode does not tell what it changed
    freely = {key: value for key, value in parameters.items() if key not in UNTOLD}
    unlimited = ALWAYS_LARGE if family == FIRST_LARGE else policy_name(base, freely)
  policy = policy_name(base, parameters | budget)
  return Entry(family, parameters, policy, budget.get("K"), unlimited, budget.get("usd"))


def policy_name(base: str, parameters: dict[str, float]) -> str:
  """The name under which a policy's episodes are stored: it carries every parameter."""
  settings = ",".join(f"{key}={value:g}" for key, value in parameters.items())
  return f"{base}({settings})" if settings else base


def stratified_name(config: Config) -> str:
  """The policy whose episodes the references of hard tasks are chosen from."""
  return f"stratified(samples={config.references.samples})"


def together_name(config: Config) -> str:
  """The policy of `together_rule`, from whose episodes the values learn too."""
  return f"together(samples={config.references.together})"


def rollouts_name(family: str, lam: float, update: int, train_seed: int = 0) -> str:
  """The policy whose episodes are rolled out for an update."""
  seed = f",seed={train_seed}" if train_seed else ""
  return f"{family}(lam={lam:g}{seed})/{update}"


def zero_shot_name(config: Config) -> str:
  """The zero-shot policy without a budget: the name carries all that the answers depend on."""
  c = config.baselines.judge
  settings = config.models.kind, c.base_urls, c.temperature, c.max_completion_tokens, c.prices
  digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:6]
  return f"zero-shot {c.names[0]} {digest}"
