"""The table of families: every method and rule that is evaluated, trained or served.

Evaluation, training, the dry run, the server and the report read this table alone. A
new rule is a function and a row here.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable

import numpy as np

from baar_jax.config import ABLATIONS, Config, compared_lam
from baar_jax.rollout import rules
from baar_jax.rollout.live import Policy, RulePolicy
from baar_jax.rollout.optimum import Exact
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.router.cascade import CascadePolicy
from baar_jax.router.conditioned import ConditionedPolicy
from baar_jax.router.policy import ARGMAX, RouterPolicy, Sample, Threshold
from baar_jax.router.qwen2 import Qwen2, softmax
from baar_jax.router.view import View, open_view
from baar_jax.router.zero_shot import ZeroShotPolicy
from baar_jax.train import fit, rivals
from baar_jax.train.checkpoint import load_router
from baar_jax.train.dataset import load_threshold_episodes
from baar_jax.train.jobs import ALWAYS_LARGE, ALWAYS_SMALL, BOUNDARIES
from baar_jax.train.trainer import Batcher, ShardedRouter
from baar_jax.train.training import Training
from baar_jax.train.values import fit_values, load_heads, load_trunk

OPTIMUM_WEIGHTS = (40, 60, 90, 130, 200, 300)  # mu: success that a dollar is worth
PRIVILEGED_WEIGHTS = (10, 30, 100)  # mu of the privileged rule
ROUTINE_WEIGHTS = (0, 3)  # small mu, without caps: they would go to routine steps
OPTIMISM = (1, 2)  # ensemble deviations that dev chooses from


@dataclasses.dataclass(frozen=True)
class Family:
  """A method or a rule."""

  label: str  # for people
  color: str
  marker: str
  # The policies to evaluate, in the report's order.
  list_specs: Callable[[Config], list[PolicySpec]]
  build: Callable[[PolicySpec, "Loader"], Policy]
  # Of a family that learns: the stage that trains it, and how.
  stage: str = ""
  train: Callable[[Training], None] | None = None
  is_rival: bool = False  # only if the configuration's baselines name it


class Loader:
  """Builds policies; it keeps the router that was loaded last."""

  def __init__(self, training: Training):
    self.training = training
    self._name: tuple = ()
    self._model: Qwen2 | None = None

  def build(self, spec: PolicySpec) -> Policy:
    """Build the policy of a spec; raise ValueError if its training has not ended."""
    return FAMILIES[spec.family].build(spec, self)

  def load(self, spec: PolicySpec) -> Qwen2:
    """Load the trained router of a spec, or the trunk of the value heads."""
    name = spec.family, spec.lam
    if name != self._name:
      self._model = load_router(self.training, spec.family, spec.lam)
      self._name = name
    return self._model

  @functools.cached_property
  def trunk(self) -> tuple[Qwen2, View]:
    return load_trunk(self.training)


def list_specs(config: Config) -> list[PolicySpec]:
  """List the policies of the evaluation; those of one router are adjacent."""
  specs = []
  for family in FAMILIES.values():
    specs += family.list_specs(config)
  return specs


def list_trained(config: Config) -> list[PolicySpec]:
  """List every trained router of the evaluation, each once."""
  specs = [spec for spec in list_specs(config) if FAMILIES[spec.family].train]
  routers = {(spec.family, spec.lam): spec for spec in specs}
  return [*routers.values()]


def find_uncapped(spec: PolicySpec) -> PolicySpec | None:
  """Find the policy whose episodes this one's are until its cap is spent.

  None if it sees its cap. Episodes do not tell what a cap on dollars would change.
  """
  if spec.cap.calls is None or spec.cap_conditioned:
    return None
  if spec.family == FIRST_LARGE:
    return ALWAYS_LARGE
  return spec.under(Cap())


def check_rivals(config: Config) -> None:
  """Raise ValueError unless the configuration's rivals are in the table."""
  unknown = {*config.baselines.rivals} - {*RIVALS}
  if unknown:
    raise ValueError(f"--config.baselines.rivals must be of {', '.join(RIVALS)}")


def _caps(config: Config) -> list[Cap]:
  calls = [Cap(calls=K) for K in config.evaluate.call_budgets]
  return calls + _dollar_caps(config)


def _dollar_caps(config: Config) -> list[Cap]:
  return [Cap(usd=usd) for usd in config.evaluate.usd_budgets]


def _under(spec: PolicySpec, caps: Iterable[Cap]) -> list[PolicySpec]:
  return [spec.under(cap) for cap in caps]


def _list_small(config: Config) -> list[PolicySpec]:
  return [ALWAYS_SMALL, *_under(ALWAYS_SMALL, _dollar_caps(config))]


def _list_ranks(config: Config) -> list[PolicySpec]:
  ranks = range(2, len(config.models.names))
  return [PolicySpec("always", rank=rank) for rank in ranks]


def _list_random(config: Config) -> list[PolicySpec]:
  specs = []
  for p in config.evaluate.random_p:
    specs += _under(PolicySpec("random", p=p), [Cap(), *_caps(config)])
  return specs


def _list_privileged(config: Config) -> list[PolicySpec]:
  if config.models.kind != "scripted" or _has_optimum(config):
    return []
  specs = [PolicySpec("privileged", mu=mu) for mu in ROUTINE_WEIGHTS]
  for mu in PRIVILEGED_WEIGHTS:
    specs += _under(PolicySpec("privileged", mu=mu), [Cap(), *_caps(config)])
  return specs


def _list_optimum(config: Config) -> list[PolicySpec]:
  c = config.models
  if c.kind != "scripted" or not _has_optimum(config) or c.prices or c.skills:
    return []  # it is known for the others alone
  base = PolicySpec("optimum", cap_conditioned=True)
  specs = [dataclasses.replace(base, mu=mu) for mu in OPTIMUM_WEIGHTS]
  return specs + _under(base, [Cap(calls=K) for K in config.evaluate.call_budgets])


def _has_optimum(config: Config) -> bool:
  return config.env.kind == "sandbox"


def zero_shot_spec(config: Config) -> PolicySpec:
  """Return the zero-shot policy; its key carries all that the answers depend on."""
  c = config.baselines.judge
  kind = config.models.kind
  settings = (kind, c.base_urls, c.temperature, c.max_completion_tokens, c.prices)
  digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:6]
  judge = f"{c.names[0]} {digest}"
  return PolicySpec("zero-shot", judge=judge, cap_conditioned=True)


def _list_zero_shot(config: Config) -> list[PolicySpec]:
  if "zero-shot" not in config.baselines.rivals:
    return []
  return _under(zero_shot_spec(config), [Cap(), *_caps(config)])


def trained_spec(
  config: Config, family: str, update: int, lam: float | None = None
) -> PolicySpec:
  """Return the policy of a trained router, before it is told how to decide.

  It stands for the routers of all training seeds.
  """
  seeds = config.train_seeds if config.train_seeds > 1 else None
  told = config.router.show_budget
  return PolicySpec(
    family, lam=lam, update=update, seeds=seeds, cap_conditioned=told
  )


def _list_points(
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
  for cap in _caps(config) if capped else ():
    specs += [point.under(cap) for point in points]
  return specs


def _list_sft(config: Config) -> list[PolicySpec]:
  return _list_points(config, trained_spec(config, "sft", config.sft.updates))


def _list_rollouts(name: str, config: Config) -> list[PolicySpec]:
  specs = []
  for lam in config.bopo.lam:
    router = trained_spec(config, name, config.bopo.updates, lam)
    specs += _list_points(config, router)
  return specs


def _list_classifier(name: str, config: Config) -> list[PolicySpec]:
  return _list_points(config, trained_spec(config, name, config.baselines.updates))


def _list_ablation(name: str, config: Config) -> list[PolicySpec]:
  if name not in config.baselines.ablations:
    return []
  router = trained_spec(config, name, config.bopo.updates, compared_lam(config))
  return _list_points(config, router, capped=False)


def _list_conditioned(config: Config) -> list[PolicySpec]:
  """List each cost weight; under caps cap-conditioned and cap-blind, with optimism."""
  if config.value.updates == 0:
    return []
  router = trained_spec(config, CONDITIONED, config.value.updates)
  router = dataclasses.replace(router, optimism=0.0, cap_conditioned=True)
  weights = config.value.prices
  specs = [dataclasses.replace(router, cost_weight=weight) for weight in weights]
  least = dataclasses.replace(router, cost_weight=min(weights))
  specs += _under(least, _caps(config))
  blind = dataclasses.replace(least, cap_conditioned=False)
  specs += _under(blind, _caps(config))
  for optimism in OPTIMISM:
    bold = dataclasses.replace(blind, optimism=optimism)
    specs += _under(bold, [Cap(), *_caps(config)])
  return specs


def _build_rule(
  rule: Callable[[Live, PolicySpec], int],
) -> Callable[[PolicySpec, Loader], Policy]:
  return lambda spec, loader: RulePolicy(spec, rule)


def _build_privileged(spec: PolicySpec, loader: Loader) -> Policy:
  return rules.PrivilegedPolicy(spec)


def _build_optimum(spec: PolicySpec, loader: Loader) -> Policy:
  config = loader.training.config
  exact = Exact(max_steps=config.env.max_steps, names=config.models.names)
  return RulePolicy(spec, exact.optimal_rule(spec))


def _build_zero_shot(spec: PolicySpec, loader: Loader) -> Policy:
  training = loader.training
  config = training.config
  judge = training.pair.judge(config.baselines.judge)
  models = len(config.models.names)
  return ZeroShotPolicy(spec, judge, config.router, training.tokenizer, models)


def _build_conditioned(spec: PolicySpec, loader: Loader) -> Policy:
  training = loader.training
  model, view = loader.trunk
  weights = training.config.value.prices
  rows = training.live_episodes
  return ConditionedPolicy(
    spec, model, view, load_heads(training), weights, rows, training.mesh
  )


def _build_router(
  spec: PolicySpec, loader: Loader, policy: type[RouterPolicy] = RouterPolicy
) -> Policy:
  training = loader.training
  model = loader.load(spec)
  proposals = policy is CascadePolicy
  view = open_view(training.config, training.tokenizer, proposals)
  rule = Threshold(spec.threshold, [price.input for price in training.pair.prices])
  if spec.share is not None:
    switch_N = rule.switch_thresholds(loader.predict_stored(model, view))
    rule.value = float(np.quantile(switch_N, 1.0 - spec.share))
  return policy(spec, model, view, rule, training.live_episodes, training.mesh)


def _build_cascade(spec: PolicySpec, loader: Loader) -> Policy:
  return _build_router(spec, loader, CascadePolicy)


FAMILIES = {
  ALWAYS_SMALL.family: Family(
    "always SMALL", "#1d2530", "X", _list_small, _build_rule(rules.take_small)
  ),
  ALWAYS_LARGE.family: Family(
    "always LARGE",
    "#1d2530",
    "X",
    lambda config: [ALWAYS_LARGE],
    _build_rule(rules.take_large),
  ),
  FIRST_LARGE: Family(
    "First-Large",
    "#2f8a5b",
    "D",
    lambda config: _under(PolicySpec(FIRST_LARGE), _caps(config)),
    _build_rule(rules.take_large),
  ),
  ALWAYS: Family(
    "always one between", "#5f6875", "X", _list_ranks, _build_rule(rules.take_rank)
  ),
  "random": Family(
    "random", "#848b96", "^", _list_random, _build_rule(rules.take_randomly)
  ),
}
