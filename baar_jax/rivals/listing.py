"""Define the policies to evaluate of each family, and the episodes that train it.

Each function of (config, name) lists the policies of the family `name`, in the order
of the report.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

from baar_jax.config import ZERO_SHOT, Config, compared_lam
from baar_jax.envs.table import load
from baar_jax.episode import Task
from baar_jax.learn.checkpoint import Checkpoints, RouterFiles
from baar_jax.paper.references import draw_task_batches
from baar_jax.rivals.optimum import has_optimum
from baar_jax.rollout.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  BOPO,
  CONDITIONED,
  FIRST_LARGE,
  RANDOM,
  SFT,
  Planned,
  list_ranked_trials,
  list_rollouts,
  rollout_spec,
  stratified_spec,
)
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.router.policy import ARGMAX

# The exact policy is evaluated with these values of mu, the number of successes that
# one US dollar is worth.
OPTIMUM_WEIGHTS = (40, 60, 90, 130, 200, 300)
# The privileged rule is evaluated with this value of mu (our choice).
PRIVILEGED_WEIGHT = 100
# The stage rule's `patience` is chosen on dev from these numbers of steps (our choice).
PATIENCE = (1, 2, 3, 5, 10)

Specs = Iterator[PolicySpec]
Tasks = Mapping[str, list[Task]]  # The tasks of each split.


def under(
  config: Config, *specs: PolicySpec, calls: bool = True, usd: bool = True
) -> Specs:
  """Yield policies under each cap of the evaluation, one cap after another.

  Args:
    config: supplies `evaluate.call_budgets` and `evaluate.usd_budgets`.
    specs: the policies.
    calls: whether to include the caps on LARGE calls.
    usd: whether to include the caps on dollars.
  """
  caps = []
  if calls:
    caps += [Cap(calls=K) for K in config.evaluate.call_budgets]
  if usd:
    caps += [Cap(usd=limit) for limit in config.evaluate.usd_budgets]
  for cap in caps:
    for spec in specs:
      yield spec.under(cap)


def with_caps(config: Config, spec: PolicySpec) -> Specs:
  """Yield a policy without a cap, then under each cap of the evaluation."""
  yield spec
  yield from under(config, spec)


def list_small(config: Config, name: str) -> list[PolicySpec]:
  """Return always-SMALL without a cap and under each cap on dollars.

  Always-SMALL makes no LARGE calls, so a cap on calls would not change its episodes.
  """
  return [ALWAYS_SMALL, *under(config, ALWAYS_SMALL, calls=False)]


def list_uncapped(config: Config, name: str) -> list[PolicySpec]:
  """Return the uncapped policy of a family whose policies have no parameters."""
  return [PolicySpec(name)]


def list_capped(config: Config, name: str) -> Specs:
  """Yield the policy of a family without parameters, under each cap."""
  return under(config, PolicySpec(name))


def list_random(config: Config, name: str) -> Specs:
  """Yield the random policy for each probability of LARGE, uncapped and under caps."""
  for p in config.evaluate.random_p:
    yield from with_caps(config, PolicySpec(name, p=p))


def list_privileged(config: Config, name: str) -> Specs:
  """Yield the privileged rule; mu is the number of successes that a US dollar is worth.

  The rule reads the error rates of scripted models. So nothing is listed for a run with
  other models. Nothing is listed either if the environment has an exact optimum.
  """
  if config.models.kind != "scripted" or load(config.env.kind).has_optimum:
    return
  yield PolicySpec(name, mu=PRIVILEGED_WEIGHT)


def list_optimum(config: Config, name: str) -> Specs:
  """Yield the exact policy for each mu, and for each cap on calls.

  The exact policy is the optimal policy of the sandbox. mu is the number of successes
  that one US dollar is worth.

  Nothing is listed if the optimum of this run cannot be computed.
  """
  if not has_optimum(config):
    return
  for mu in OPTIMUM_WEIGHTS:
    yield PolicySpec(name, mu=mu, cap_conditioned=True)
  yield from under(config, PolicySpec(name, cap_conditioned=True), usd=False)


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
    judge.prices,
  )
  digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:6]
  name = f"{judge.names[0]} {digest}"
  return PolicySpec(ZERO_SHOT, judge=name, cap_conditioned=True)


def list_zero_shot(config: Config, name: str) -> Specs:
  """Yield the zero-shot policy, without a cap and under each cap."""
  return with_caps(config, zero_shot_spec(config))


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
  reads_cap = config.router.show_budget
  return PolicySpec(
    family, lam=lam, update=update, seeds=seeds, cap_conditioned=reads_cap
  )


def list_points(config: Config, router: PolicySpec) -> list[PolicySpec]:
  """Return one policy of a router for each rule that turns p(LARGE) into a decision.

  The rules are the most probable model (argmax), each threshold of
  `evaluate.thresholds`, and each share of LARGE decisions in `evaluate.shares`.

  Args:
    config: supplies the thresholds and the shares.
    router: the policy of the router, without a rule.
  """
  points = []
  for threshold in dict.fromkeys((ARGMAX, *config.evaluate.thresholds)):
    points.append(dataclasses.replace(router, threshold=threshold))
  for share in config.evaluate.shares:
    points.append(dataclasses.replace(router, share=share))
  return points


def list_router(
  config: Config, name: str, updates: int, lam: float | None = None
) -> Specs:
  """Yield the policies of `list_points` for a trained router, uncapped and under caps.

  Under caps only the first policy (argmax) is listed, unless `evaluate.budget_rules` is
  set.

  Args:
    config: the configuration.
    name: the family of the router.
    updates: the number of updates of the training.
    lam: the cost weight of the training; None if the family has none.
  """
  points = list_points(config, trained_spec(config, name, updates, lam))
  yield from points
  if not config.evaluate.budget_rules:
    points = points[:1]
  yield from under(config, *points)


def list_sft(config: Config, name: str) -> Specs:
  """Yield the policies of the SFT router."""
  return list_router(config, name, config.sft.updates)


def list_learnt(config: Config, name: str) -> Specs:
  """Yield the policies of a family that trains one router per cost weight."""
  for lam in config.bopo.lam:
    yield from list_router(config, name, config.bopo.updates, lam)


def list_classifier(config: Config, name: str) -> Specs:
  """Yield the policies of a rival that learns from stored episodes."""
  return list_router(config, name, config.baselines.updates)


def list_ablation(config: Config, name: str) -> Iterable[PolicySpec]:
  """Return the policies of an ablation; none unless the configuration names it."""
  if name not in config.baselines.ablations:
    return ()
  router = trained_spec(config, name, config.bopo.updates, compared_lam(config))
  return list_points(config, router)


def list_conditioned(config: Config, name: str) -> Specs:
  """Yield the policies of the budget-conditioned router.

  Without a cap there is a policy for each cost weight. Under each cap there is a
  cap-conditioned and a cap-blind policy for each cost weight for caps. Nothing is
  listed if `value.updates` is 0.
  """
  settings = config.value
  if settings.updates == 0:
    return
  router = trained_spec(config, name, settings.updates)
  router = dataclasses.replace(router, cap_conditioned=True)
  for weight in settings.cost_weights:
    yield dataclasses.replace(router, cost_weight=weight)
  for weight in settings.capped_cost_weights:
    conditioned = dataclasses.replace(router, cost_weight=weight)
    blind = dataclasses.replace(conditioned, blind=1, cap_conditioned=False)
    yield from under(config, conditioned, blind)


def list_valued(config: Config, name: str) -> Specs:
  """Yield the policies of a rival that decides by the value heads.

  There is a cap-blind policy for each cost weight, uncapped and under caps.
  """
  router = trained_spec(config, name, config.value.updates)
  router = dataclasses.replace(router, cap_conditioned=False)
  for weight in config.value.cost_weights:
    yield from with_caps(config, dataclasses.replace(router, cost_weight=weight))


def list_patient(config: Config, name: str) -> Specs:
  """Yield the stage rule for each patience, uncapped and under caps."""
  for patience in PATIENCE:
    yield from with_caps(config, PolicySpec(name, patience=patience))


def list_updates(
  config: Config, spec: PolicySpec, tasks: Tasks, batches: int = 1
) -> Iterator[Planned]:
  """Yield the rollouts of all updates of a training, for each training seed.

  Args:
    config: the configuration.
    spec: a policy of the family that is trained.
    tasks: the tasks of each split.
    batches: the largest number of updates, as a multiple of BoPO's.
  """
  settings = config.bopo
  for number in range(config.train_seeds):
    seed = config.seed + number
    drawn = draw_task_batches(tasks["train"], settings.tasks_per_update, seed)
    for update in range(1, batches * settings.updates + 1):
      rollout = rollout_spec(spec.family, spec.lam, update, number)
      yield list_rollouts(config, rollout, next(drawn))


def list_single_turn(
  config: Config, spec: PolicySpec, tasks: Tasks
) -> Iterable[Planned]:
  """Return the trials of intermediate models that train the single-turn router."""
  return list_ranked_trials(config, tasks["train"] + tasks["dev"])


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
  if spec.family == FIRST_LARGE:
    return ALWAYS_LARGE
  return spec.under(Cap())


def served_specs(config: Config) -> dict[str, PolicySpec]:
  """Return the policies that clients can ask for, by the word after "baar:"."""
  return {
    "small": ALWAYS_SMALL,
    "large": ALWAYS_LARGE,
    "random": PolicySpec(RANDOM, p=0.5),
    "stratified": stratified_spec(config),
  }


def find_router(files: RouterFiles, sample: bool = False) -> PolicySpec:
  """Find the router to serve.

  The budget-conditioned router is preferred, then BoPO's router with the first cost
  weight, then the SFT router. Routers that are not trained are passed over.

  Args:
    files: the routers of a run.
    sample: whether the served router samples episodes for BoPO's next update. Then
      BoPO's router is served, or the SFT router before the first update.
  """
  config = files.config
  conditioned = [*list_conditioned(config, CONDITIONED)]
  if conditioned and not sample and files.checkpoints("value").exists():
    return conditioned[0]
  lam = config.bopo.lam[0]
  directory = files.checkpoints(BOPO, lam)
  with contextlib.closing(Checkpoints(directory)) as checkpoints:
    # The last update is 0 too if BoPO made the directory, but had no sessions yet.
    update = checkpoints.last_update
  if sample:
    return rollout_spec(BOPO, lam, update + 1)
  spec = trained_spec(config, SFT, config.sft.updates)
  if update:
    spec = trained_spec(config, BOPO, update, lam)
  return dataclasses.replace(spec, threshold=ARGMAX)
