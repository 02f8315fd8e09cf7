"""List every policy family: its label, its points, how it decides and how it learns.

The dry run, the stages, the report and `open.py` take all families from `FAMILIES`. To
add a rule, write its function and a row here. To add a rival that learns, write its
file and a row here.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax

from baar_jax.config import (
  RECORDED,
  VANILLA_BATCHES,
  ZERO_SHOT,
  BoPOConfig,
  Config,
  ablate,
  require,
)
from baar_jax.episode import Episode, Task
from baar_jax.learn.batches import ACTED, Batch, Labels
from baar_jax.paper import bopo, losses
from baar_jax.paper.bopo import Learner, Update
from baar_jax.paper.references import Profile, Trials
from baar_jax.rivals import cascade, foresight, single_turn, vanilla
from baar_jax.rollout import jobs, rules
from baar_jax.rollout.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  CONDITIONED,
  LABELS,
  SFT,
  Planned,
  Source,
)
from baar_jax.rollout.specs import Cap, Live, PolicySpec
from baar_jax.router.policy import ARGMAX, RouterPolicy

# The policies of foresight are evaluated with these values of mu.
FORESIGHT_WEIGHTS = (0, 0.01, 0.03, 0.1, 0.3, 1)


class Points(NamedTuple):
  """Policies of a family to evaluate, without their caps.

  Attributes:
    free: the policies that are evaluated without a cap.
    capped: the policies that are evaluated under each cap.
    calls: whether `capped` are evaluated under caps on LARGE calls.
    usd: whether `capped` are evaluated under caps on dollars.
  """

  free: Iterable[PolicySpec] = ()
  capped: Iterable[PolicySpec] = ()
  calls: bool = True
  usd: bool = True


@dataclasses.dataclass(frozen=True)
class OnPolicy:
  """Tell how a family learns from its own episodes.

  Attributes:
    update: the updates of a training, such as `paper.bopo.bopo`.
    loss: the loss of a batch, given the settings of BoPO.
    anchored: whether the loss uses the SFT router's logits.
    from_sft: whether the training starts from the SFT router, or from the router before
      it.
    batches: the most rollout batches, as a multiple of BoPO's updates.
    configure: changes the configuration for this family.
  """

  update: Callable[
    [Source, Mapping[str, Profile], Mapping[str, Episode], Learner, Iterable[Planned]],
    Iterator[Update],
  ]
  loss: Callable[[BoPOConfig, jax.Array, Batch], dict[str, jax.Array]]
  anchored: bool = True
  from_sft: bool = True
  batches: int = 1
  configure: Callable[[Config], Config] = lambda config: config


@dataclasses.dataclass(frozen=True)
class FromStored:
  """Tell how a rival learns from stored episodes.

  Attributes:
    learn: labels the episodes of training and dev tasks to imitate.
    list_jobs: lists the episodes that have to be played first.
  """

  learn: Callable[[Trials], tuple[Labels, list[Episode]]]
  list_jobs: Callable[[Config, list[Task]], list[Planned]] = lambda config, tasks: []


@dataclasses.dataclass(frozen=True)
class Family:
  """Describe a policy family: all policies of one rule or one trained method.

  Attributes:
    label: the name of the family in the report.
    points: a function of (config, name of the family) that lists the policies to
      evaluate, in the report's order.
    needs: what decides: "" is `rule`, "router" a trained router, "heads" the value
      heads, "judge" and "foresight" what their names say.
    rule: returns the index of the model to act.
    policy: the class of the policy if a router decides.
    labels: how this router reads stored decisions, for policies with a `share`.
    stage: the stage that trains the family; "" if the family does not learn.
    learns: how the stages "bopo" and "baselines" train it.
    is_rival: whether the family is left out unless `baselines.rivals` names it.
  """

  label: str
  points: Callable[[Config, str], Iterable[Points]] = lambda config, name: ()
  needs: str = ""
  rule: Callable[[Live, PolicySpec], int] | None = None
  policy: type[RouterPolicy] = RouterPolicy
  labels: Labels = ACTED
  stage: str = ""
  learns: OnPolicy | FromStored | None = None
  is_rival: bool = False


def list_specs(config: Config) -> list[PolicySpec]:
  """Return all policies to evaluate, in the order of `FAMILIES`.

  Policies of the same router are adjacent. Rivals that the configuration does not name
  are left out.
  """
  call_caps = [Cap(calls=K) for K in config.evaluate.call_budgets]
  usd_caps = [Cap(usd=usd) for usd in config.evaluate.usd_budgets]
  specs = []
  for name, family in FAMILIES.items():
    if family.is_rival and name not in config.baselines.rivals:
      continue
    for points in family.points(config, name):
      specs += points.free
      for cap in call_caps * points.calls + usd_caps * points.usd:
        specs += [spec.under(cap) for spec in points.capped]
  # Values that are equal in six digits give the same key, and so are one policy.
  return [*{spec.key: spec for spec in specs}.values()]


def list_trained(config: Config) -> list[PolicySpec]:
  """Return one policy for each router of a training seed that the evaluation needs."""
  routers = {}
  for spec in list_specs(config):
    if FAMILIES[spec.family].stage:
      routers[spec.family, spec.lam] = spec
  return [*routers.values()]


def check_baselines(config: Config) -> None:
  """Check the names of rivals, and that each ablation changes the configuration.

  Raises:
    ValueError: a rival is not in `FAMILIES` or needs value heads that are not trained,
      or the configuration already lacks the part that an ablation leaves out.
  """
  baselines = config.baselines
  names = sorted(name for name, family in FAMILIES.items() if family.is_rival)
  are_rivals = {*names}.issuperset(baselines.rivals)
  require(are_rivals, "baselines.rivals", f"some of {', '.join(names)}")
  has_judge = ZERO_SHOT not in baselines.rivals or config.models.kind != RECORDED
  require(has_judge, "baselines.rivals", f"without {ZERO_SHOT} with recorded models")
  for name in baselines.ablations:
    requirement = f"without {name}: this configuration leaves that part out already"
    require(ablate(config, name) != config, "baselines.ablations", requirement)


def find_uncapped(spec: PolicySpec) -> PolicySpec | None:
  """Find the uncapped policy that acts like a capped policy until the cap is spent.

  The evaluation reuses the uncapped policy's episodes if they stay within the cap.

  Args:
    spec: the capped policy.

  Returns:
    The policy; None if `spec` is cap-conditioned or has no cap on calls. A cap on
    dollars alone also gives None, because stored episodes lack the reservations.
  """
  if spec.cap.calls is None or spec.cap_conditioned:
    return None
  if spec.family == jobs.FIRST_LARGE:
    return ALWAYS_LARGE
  return spec.under(Cap())


def zero_shot_spec(config: Config) -> PolicySpec:
  """Return the zero-shot policy.

  The policy's key has a digest of all settings that the judge's answers depend on.
  """
  judge = config.baselines.judge
  settings = (
    config.models.kind,
    judge.base_urls,
    judge.temperature,
    judge.max_completion_tokens,
    judge.reasoning_effort,
    judge.prices,
  )
  digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:6]
  name = f"{judge.names[0]} {digest}"
  return PolicySpec(ZERO_SHOT, judge=name, cap_conditioned=True)


def trained_spec(
  config: Config, family: str, update: int, lam: float | None = None
) -> PolicySpec:
  """Return the policy of a trained router, without a threshold or a share.

  With several training seeds, one policy stands for the routers of all of them.

  Args:
    config: the configuration.
    family: the family of the router.
    update: the number of updates of the training.
    lam: the cost weight of the training; None if the family has none.
  """
  seeds = config.train_seeds if config.train_seeds > 1 else None
  reads_cap = bool(config.router.weights)  # A text states the remaining cap.
  return PolicySpec(
    family, lam=lam, update=update, seeds=seeds, cap_conditioned=reads_cap
  )


def _router_points(config: Config, router: PolicySpec) -> Points:
  """List a router's policies, the same under caps.

  They are argmax, each threshold, and each share of LARGE. All trained routers get the
  same ones (our choice; the paper traces a frontier by λ or a threshold, by family).
  """
  points = []
  for threshold in dict.fromkeys((ARGMAX, *config.evaluate.thresholds)):
    points.append(dataclasses.replace(router, threshold=threshold))
  for share in config.evaluate.shares:
    points.append(dataclasses.replace(router, share=share))
  return Points(points, points)


def _list_sft(config: Config, name: str) -> list[Points]:
  """List the policies of the SFT router, or of a rival that learns likewise."""
  return [_router_points(config, trained_spec(config, name, config.sft.updates))]


def _list_learnt(config: Config, name: str) -> Iterator[Points]:
  """Yield the policies of a family that trains one router per cost weight."""
  for lam in config.bopo.lam:
    router = trained_spec(config, name, config.bopo.updates, lam)
    yield _router_points(config, router)


def _list_ablation(config: Config, name: str) -> Iterator[Points]:
  """Yield the policies of an ablation; none unless the configuration names it.

  The paper has ablations in ScienceWorld alone; here every environment may have them.
  """
  if name in config.baselines.ablations:
    for lam in config.bopo.lam:
      router = trained_spec(config, name, config.bopo.updates, lam)
      yield Points(_router_points(config, router).free)


def _list_conditioned(config: Config, name: str) -> Iterator[Points]:
  """Yield the policies of the budget-conditioned router, if it is trained.

  Under each cap there is a cap-conditioned and a cap-blind policy for each cost weight.
  """
  settings = config.value
  if settings.updates == 0:
    return
  router = trained_spec(config, name, settings.updates)
  router = dataclasses.replace(router, cap_conditioned=True)
  free = []
  for weight in settings.cost_weights:
    free.append(dataclasses.replace(router, cost_weight=weight))
  yield Points(free)
  for weight in settings.capped_cost_weights:
    conditioned = dataclasses.replace(router, cost_weight=weight)
    blind = dataclasses.replace(conditioned, blind=1, cap_conditioned=False)
    yield Points((), (conditioned, blind))


def _list_each(specs: Iterable[PolicySpec]) -> Iterator[Points]:
  """Yield each policy without a cap and then under all caps."""
  for spec in specs:
    yield Points((spec,), (spec,))


def _list_foresight(config: Config, name: str) -> Iterator[Points]:
  """Yield a policy of foresight for each mu, and for each cap on calls."""
  if config.models.kind == RECORDED:
    capped = PolicySpec(name, cap_conditioned=True)
    free = [dataclasses.replace(capped, mu=mu) for mu in FORESIGHT_WEIGHTS]
    yield Points(free, (capped,), usd=False)


LEARNS_BOPO = OnPolicy(bopo.bopo, losses.bopo_loss)
LEARNS_VANILLA = OnPolicy(
  vanilla.vanilla,
  vanilla.dapo_loss,
  anchored=False,
  batches=VANILLA_BATCHES,
  configure=vanilla.configure,
)


def _ablation(name: str, label: str) -> Family:
  """Make the row of an ablation in `FAMILIES`; an ablation is BoPO without one part.

  Args:
    name: a key of `config.ABLATIONS`.
    label: the name of the ablation in the report.
  """
  learns = dataclasses.replace(
    LEARNS_BOPO, configure=functools.partial(ablate, name=name)
  )
  return Family(label, _list_ablation, "router", stage="baselines", learns=learns)


FAMILIES = {
  ALWAYS_SMALL.family: Family(
    LABELS[ALWAYS_SMALL.family],
    # A cap on calls would not change always-SMALL's episodes.
    lambda config, name: [Points((ALWAYS_SMALL,), (ALWAYS_SMALL,), calls=False)],
    rule=rules.take_small,
  ),
  ALWAYS_LARGE.family: Family(
    LABELS[ALWAYS_LARGE.family],
    lambda config, name: [Points((ALWAYS_LARGE,))],
    rule=rules.take_large,
  ),
  jobs.FIRST_LARGE: Family(
    LABELS[jobs.FIRST_LARGE],
    lambda config, name: [Points((), (PolicySpec(name),))],
    rule=rules.take_large,
  ),
  jobs.ALWAYS: Family(
    "always the intermediate model",
    lambda config, name: [Points(jobs.list_ranks(config))],
    rule=rules.take_rank,
  ),
  jobs.RANDOM: Family(
    "random",
    lambda config, name: _list_each(
      PolicySpec(name, p=p) for p in config.evaluate.random_p
    ),
    rule=rules.take_randomly,
  ),
  "escalate": Family(
    "escalate after a failure",
    lambda config, name: _list_each((PolicySpec(name),)),
    rule=rules.take_large_after_failure,
    is_rival=True,
  ),
  foresight.CLAIRVOYANT: Family("clairvoyant", _list_foresight, "foresight"),
  foresight.KNOWS_FUNCTION: Family("knows the function", _list_foresight, "foresight"),
  foresight.SCHEDULE: Family("best schedule", _list_foresight, "foresight"),
  ZERO_SHOT: Family(
    "zero-shot router",
    lambda config, name: _list_each((zero_shot_spec(config),)),
    "judge",
    is_rival=True,
  ),
  CONDITIONED: Family(LABELS[CONDITIONED], _list_conditioned, "heads", stage="value"),
  SFT: Family(LABELS[SFT], _list_sft, "router", stage=SFT),
  jobs.BOPO: Family(
    LABELS[jobs.BOPO], _list_learnt, "router", stage=jobs.BOPO, learns=LEARNS_BOPO
  ),
  "cascade": Family(
    "cascade",
    _list_sft,
    "router",
    policy=cascade.CascadePolicy,
    labels=cascade.FAILURES,
    stage="baselines",
    learns=FromStored(cascade.learn_scorer),
    is_rival=True,
  ),
  "single-turn": Family(
    "single-turn classifier",
    _list_sft,
    "router",
    stage="baselines",
    learns=FromStored(single_turn.learn_winners, jobs.list_ranked_trials),
    is_rival=True,
  ),
  jobs.VANILLA: Family(
    "vanilla RL",
    _list_learnt,
    "router",
    stage="baselines",
    learns=dataclasses.replace(LEARNS_VANILLA, from_sft=False),
    is_rival=True,
  ),
  "vanilla-sft": Family(
    "vanilla RL from BoSFT",
    _list_learnt,
    "router",
    stage="baselines",
    learns=LEARNS_VANILLA,
    is_rival=True,
  ),
  # These policies play the episodes that routers learn from.
  "stratified": Family("stratified samples", rule=rules.take_sampled),
  "exploration": Family("samples of hard tasks", rule=rules.take_sampled),
  "exploration-all": Family("samples of other tasks", rule=rules.take_sampled),
  # Each ablation is BoPO without one part.
  "no-stratified": _ablation("no-stratified", "no stratified sampling"),
  "no-reference": _ablation("no-reference", "no reference advantage"),
  "no-hard-bonus": _ablation("no-hard-bonus", "no hard bonus"),
  # This row is for tables: BoPO's points without a cap, as ablations have them.
  jobs.COMPARED: Family("BoPO at the same λ"),
}
