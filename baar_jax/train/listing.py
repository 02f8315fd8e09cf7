"""Which policies of each family are evaluated, and what is rolled out to train them."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

from baar_jax.config import VANILLA_BATCHES, Config, compared_lam
from baar_jax.envs.table import load
from baar_jax.episode import Task
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.train.dataset import draw_task_batches
from baar_jax.train.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  FIRST_LARGE,
  SFT,
  Planned,
  list_ranked_trials,
  list_rollouts,
  rollout_spec,
)

ALWAYS = "always"  # an intermediate model
RANDOM = "random"
PRIVILEGED = "privileged"
OPTIMUM = "optimum"
ZERO_SHOT = "zero-shot"
CONDITIONED = "conditioned"  # the budget-conditioned router
BOPO = "bopo"
CASCADE = "cascade"
SINGLE_TURN = "single-turn"
VANILLA = "vanilla"
RIVALS = {ZERO_SHOT, CASCADE, SINGLE_TURN, VANILLA}  # only if baselines name them
ARGMAX = 0.5  # the threshold that takes the most probable model
OPTIMUM_WEIGHTS = (40, 60, 90, 130, 200, 300)  # mu: success that a dollar is worth
PRIVILEGED_WEIGHTS = (10, 30, 100)  # mu of the privileged rule
ROUTINE_WEIGHTS = (0, 3)  # small mu, without caps: they would go to routine steps
OPTIMISM = (1, 2)  # ensemble deviations that dev chooses from

Tasks = Mapping[str, list[Task]]  # by split


def list_caps(config: Config) -> list[Cap]:
  calls = [Cap(calls=K) for K in config.evaluate.call_budgets]
  return calls + dollar_caps(config)


def dollar_caps(config: Config) -> list[Cap]:
  return [Cap(usd=usd) for usd in config.evaluate.usd_budgets]


def under(spec: PolicySpec, caps: Iterable[Cap]) -> list[PolicySpec]:
  return [spec.under(cap) for cap in caps]


def list_small(config: Config) -> list[PolicySpec]:
  return [ALWAYS_SMALL, *under(ALWAYS_SMALL, dollar_caps(config))]


def list_large(config: Config) -> list[PolicySpec]:
  return [ALWAYS_LARGE]


def list_capped(config: Config) -> list[PolicySpec]:
  return under(PolicySpec(FIRST_LARGE), list_caps(config))


def list_ranks(config: Config) -> list[PolicySpec]:
  ranks = range(2, len(config.models.names))
  return [PolicySpec(ALWAYS, rank=rank) for rank in ranks]


def list_random(config: Config) -> list[PolicySpec]:
  specs = []
  for p in config.evaluate.random_p:
    specs += under(PolicySpec(RANDOM, p=p), [Cap(), *list_caps(config)])
  return specs


def list_privileged(config: Config) -> list[PolicySpec]:
  if config.models.kind != "scripted" or load(config.env.kind).has_optimum:
    return []
  specs = [PolicySpec(PRIVILEGED, mu=mu) for mu in ROUTINE_WEIGHTS]
  for mu in PRIVILEGED_WEIGHTS:
    specs += under(PolicySpec(PRIVILEGED, mu=mu), [Cap(), *list_caps(config)])
  return specs


def list_optimum(config: Config) -> list[PolicySpec]:
  c = config.models
  has_optimum = load(config.env.kind).has_optimum
  if c.kind != "scripted" or not has_optimum or c.prices or c.skills:
    return []
  base = PolicySpec(OPTIMUM, cap_conditioned=True)
  specs = [dataclasses.replace(base, mu=mu) for mu in OPTIMUM_WEIGHTS]
  return specs + under(base, [Cap(calls=K) for K in config.evaluate.call_budgets])


def zero_shot_spec(config: Config) -> PolicySpec:
  """Return the zero-shot policy; its key carries all that the answers depend on."""
  c = config.baselines.judge
  kind = config.models.kind
  settings = (kind, c.base_urls, c.temperature, c.max_completion_tokens, c.prices)
  digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:6]
  judge = f"{c.names[0]} {digest}"
  return PolicySpec(ZERO_SHOT, judge=judge, cap_conditioned=True)


def list_zero_shot(config: Config) -> list[PolicySpec]:
  return under(zero_shot_spec(config), [Cap(), *list_caps(config)])


def trained_spec(
  config: Config, family: str, update: int, lam: float | None = None
) -> PolicySpec:
  """Return the policy of a trained router, before it is told how to decide.

  It stands for the routers of all training seeds.
  """
  seeds = config.train_seeds if config.train_seeds > 1 else None
  told = config.router.show_budget
  return PolicySpec(family, lam=lam, update=update, seeds=seeds, cap_conditioned=told)


def list_points(
  config: Config, router: PolicySpec, capped: bool = True
) -> list[PolicySpec]:
  """List a router's points: thresholds without a cap, then under each cap."""
  c = config.evaluate
  points = [dataclasses.replace(router, threshold=t) for t in (ARGMAX, *c.thresholds)]
  for share in c.shares:
    points.append(dataclasses.replace(router, share=share))
  specs = list(points)
  if not c.budget_rules:
    points = points[:1]
  for cap in list_caps(config) if capped else ():
    specs += [point.under(cap) for point in points]
  return specs


def list_sft(config: Config) -> list[PolicySpec]:
  return list_points(config, trained_spec(config, SFT, config.sft.updates))


def list_learnt(name: str, config: Config) -> list[PolicySpec]:
  specs = []
  for lam in config.bopo.lam:
    router = trained_spec(config, name, config.bopo.updates, lam)
    specs += list_points(config, router)
  return specs


def list_classifier(name: str, config: Config) -> list[PolicySpec]:
  return list_points(config, trained_spec(config, name, config.baselines.updates))


def list_ablation(name: str, config: Config) -> list[PolicySpec]:
  if name not in config.baselines.ablations:
    return []
  router = trained_spec(config, name, config.bopo.updates, compared_lam(config))
  return list_points(config, router, capped=False)


def list_conditioned(config: Config) -> list[PolicySpec]:
  """List each cost weight; under caps cap-conditioned and cap-blind, with optimism."""
  if config.value.updates == 0:
    return []
  router = trained_spec(config, CONDITIONED, config.value.updates)
  router = dataclasses.replace(router, optimism=0.0, cap_conditioned=True)
  weights = config.value.prices
  specs = [dataclasses.replace(router, cost_weight=weight) for weight in weights]
  least = dataclasses.replace(router, cost_weight=min(weights))
  specs += under(least, list_caps(config))
  blind = dataclasses.replace(least, cap_conditioned=False)
  specs += under(blind, list_caps(config))
  for optimism in OPTIMISM:
    bold = dataclasses.replace(blind, optimism=optimism)
    specs += under(bold, [Cap(), *list_caps(config)])
  return specs


def list_updates(
  config: Config, spec: PolicySpec, tasks: Tasks, batches: int = 1
) -> Iterator[Planned]:
  """List the rollouts of all updates, at most `batches` times BoPO's."""
  for number in range(config.train_seeds):
    seed = config.seed + number
    size = config.bopo.tasks_per_update
    drawn = draw_task_batches(tasks["train"], size, seed)
    for update in range(1, batches * config.bopo.updates + 1):
      rollout = rollout_spec(spec.family, spec.lam, update, number)
      yield list_rollouts(config, rollout, next(drawn), number)


def list_vanilla(config: Config, spec: PolicySpec, tasks: Tasks) -> Iterator[Planned]:
  return list_updates(config, spec, tasks, VANILLA_BATCHES)


def list_single_turn(
  config: Config, spec: PolicySpec, tasks: Tasks
) -> Iterable[Planned]:
  return list_ranked_trials(config, tasks["train"] + tasks["dev"])
