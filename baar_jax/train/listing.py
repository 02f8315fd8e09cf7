"""List the policies of each family to evaluate, and the rollouts that train them."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

from baar_jax.config import ZERO_SHOT, Config, compared_lam
from baar_jax.envs.table import load
from baar_jax.episode import Task
from baar_jax.rollout.optimum import has_optimum
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.router.policy import ARGMAX
from baar_jax.train.dataset import draw_task_batches
from baar_jax.train.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  FIRST_LARGE,
  Planned,
  list_ranked_trials,
  list_rollouts,
  rollout_spec,
)

OPTIMUM_WEIGHTS = (40, 60, 90, 130, 200, 300)  # mu: success that a dollar is worth
PRIVILEGED_WEIGHTS = (10, 30, 100)  # mu of the privileged rule
ROUTINE_WEIGHTS = (0, 3)  # small mu, without caps: they would go to routine steps
# Ensemble deviations that dev chooses from, of routers that ignore the cap.
OPTIMISM = (0.0, 1, 2)

Specs = Iterator[PolicySpec]
Tasks = Mapping[str, list[Task]]  # by split


def under(
  config: Config, *specs: PolicySpec, calls: bool = True, usd: bool = True
) -> Specs:
  """List policies under the first cap of the evaluation, then under the next.

  Args:
    calls: whether the caps on calls count.
    usd: whether those on dollars do.
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
  """List a policy without a cap, then under each."""
  yield spec
  yield from under(config, spec)


def list_small(config: Config, name: str) -> list[PolicySpec]:
  """List always-SMALL, which no cap on calls changes."""
  return [ALWAYS_SMALL, *under(config, ALWAYS_SMALL, calls=False)]


def list_uncapped(config: Config, name: str) -> list[PolicySpec]:
  """List a policy without parameters or caps."""
  return [PolicySpec(name)]


def list_capped(config: Config, name: str) -> Specs:
  """List a policy without parameters under each cap alone."""
  return under(config, PolicySpec(name))


def list_random(config: Config, name: str) -> Specs:
  """List each probability of LARGE."""
  for p in config.evaluate.random_p:
    yield from with_caps(config, PolicySpec(name, p=p))


def list_privileged(config: Config, name: str) -> Specs:
  """List each weight of the privileged rule, which stands in for the optimum."""
  if config.models.kind != "scripted" or load(config.env.kind).has_optimum:
    return
  for mu in ROUTINE_WEIGHTS:
    yield PolicySpec(name, mu=mu)
  for mu in PRIVILEGED_WEIGHTS:
    yield from with_caps(config, PolicySpec(name, mu=mu))


def list_optimum(config: Config, name: str) -> Specs:
  """List each weight of the exact policy, and the policy of each cap on calls."""
  if not has_optimum(config):
    return
  for mu in OPTIMUM_WEIGHTS:
    yield PolicySpec(name, mu=mu, cap_conditioned=True)
  yield from under(config, PolicySpec(name, cap_conditioned=True), usd=False)


def zero_shot_spec(config: Config) -> PolicySpec:
  """Return the zero-shot policy; its key carries all that the answers depend on."""
  c = config.baselines.judge
  kind = config.models.kind
  settings = (kind, c.base_urls, c.temperature, c.max_completion_tokens, c.prices)
  digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:6]
  judge = f"{c.names[0]} {digest}"
  return PolicySpec(ZERO_SHOT, judge=judge, cap_conditioned=True)


def list_zero_shot(config: Config, name: str) -> Specs:
  """List the zero-shot policy."""
  return with_caps(config, zero_shot_spec(config))


def trained_spec(
  config: Config, family: str, update: int, lam: float | None = None
) -> PolicySpec:
  """Return the policy of a trained router, without how it decides.

  It stands for the routers of all training seeds.
  """
  seeds = config.train_seeds if config.train_seeds > 1 else None
  reads_cap = config.router.show_budget
  return PolicySpec(
    family, lam=lam, update=update, seeds=seeds, cap_conditioned=reads_cap
  )


def list_points(config: Config, router: PolicySpec) -> list[PolicySpec]:
  """List a router's thresholds, argmax first, and its shares."""
  points = []
  for threshold in (ARGMAX, *config.evaluate.thresholds):
    points.append(dataclasses.replace(router, threshold=threshold))
  for share in config.evaluate.shares:
    points.append(dataclasses.replace(router, share=share))
  return points


def list_router(
  config: Config, name: str, updates: int, lam: float | None = None
) -> Specs:
  """List a router's points without a cap, then under each cap argmax or all."""
  points = list_points(config, trained_spec(config, name, updates, lam))
  yield from points
  if not config.evaluate.budget_rules:
    points = points[:1]
  yield from under(config, *points)


def list_sft(config: Config, name: str) -> Specs:
  """List the points of the SFT router."""
  return list_router(config, name, config.sft.updates)


def list_learnt(config: Config, name: str) -> Specs:
  """List the points of the router of each weight of cost."""
  for lam in config.bopo.lam:
    yield from list_router(config, name, config.bopo.updates, lam)


def list_classifier(config: Config, name: str) -> Specs:
  """List the points of a rival that learns from stored episodes."""
  return list_router(config, name, config.baselines.updates)


def list_ablation(config: Config, name: str) -> Iterable[PolicySpec]:
  """List the points of an ablation, if it is wanted."""
  if name not in config.baselines.ablations:
    return ()
  router = trained_spec(config, name, config.bopo.updates, compared_lam(config))
  return list_points(config, router)


def list_conditioned(config: Config, name: str) -> Specs:
  """List each cost weight; under caps cap-conditioned and cap-blind, with optimism."""
  c = config.value
  if c.updates == 0:
    return
  router = trained_spec(config, name, c.updates)
  router = dataclasses.replace(router, optimism=0.0, cap_conditioned=True)
  for weight in c.prices:
    yield dataclasses.replace(router, cost_weight=weight)
  least = dataclasses.replace(router, cost_weight=min(c.prices))
  yield from under(config, least)
  for optimism in OPTIMISM:
    blind = dataclasses.replace(least, optimism=optimism, cap_conditioned=False)
    if optimism:  # without, it decides as a cap-conditioned one that has no cap
      yield blind
    yield from under(config, blind)


def list_updates(
  config: Config, spec: PolicySpec, tasks: Tasks, batches: int = 1
) -> Iterator[Planned]:
  """List the rollouts of all updates, at most `batches` times BoPO's."""
  c = config.bopo
  for number in range(config.train_seeds):
    seed = config.seed + number
    drawn = draw_task_batches(tasks["train"], c.tasks_per_update, seed)
    for update in range(1, batches * c.updates + 1):
      rollout = rollout_spec(spec.family, spec.lam, update, number)
      yield list_rollouts(config, rollout, next(drawn))


def list_single_turn(
  config: Config, spec: PolicySpec, tasks: Tasks
) -> Iterable[Planned]:
  """List the trials of intermediate models that winners are told by."""
  return list_ranked_trials(config, tasks["train"] + tasks["dev"])


def find_uncapped(spec: PolicySpec) -> PolicySpec | None:
  """Find the policy whose episodes this one's are until its cap is spent.

  None if it sees its cap. Episodes do not tell what a cap on dollars would change.
  """
  if spec.cap.calls is None or spec.cap_conditioned:
    return None
  if spec.family == FIRST_LARGE:
    return ALWAYS_LARGE
  return spec.under(Cap())
