"""The table of families: every method and rule that is evaluated, trained or served.

Evaluation, training, the dry run, the server and the report read this table alone. A
new rule is a function and a row here.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from baar_jax.config import VANILLA_BATCHES, Config, ablate, compared_lam, require
from baar_jax.envs.table import load
from baar_jax.episode import Task
from baar_jax.llms.pair import Pair
from baar_jax.llms.prices import prices_of
from baar_jax.rollout import rules
from baar_jax.rollout.turn import Policy, RulePolicy
from baar_jax.rollout.optimum import FREE, Exact
from baar_jax.rollout.specs import Cap, Live, PolicySpec
from baar_jax.router.cascade import CascadePolicy
from baar_jax.router.conditioned import ConditionedPolicy
from baar_jax.router.policy import ARGMAX, RouterPolicy, Sample, Threshold
from baar_jax.router.qwen2 import Qwen2, softmax
from baar_jax.router.view import View
from baar_jax.router.zero_shot import ZeroShotPolicy
from baar_jax.store import Store
from baar_jax.train import losses
from baar_jax.train.batches import ACTED, FAILURES, Batcher
from baar_jax.train.checkpoint import load_router
from baar_jax.train.dataset import draw_task_batches, load_threshold_episodes
from baar_jax.train.fit import fit_rival, fit_rollouts, fit_sft
from baar_jax.train.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  COMPARED,
  FIRST_LARGE,
  SFT,
  Planned,
  list_ranked_trials,
  list_rollouts,
  rollout_spec,
  stratified_spec,
)
from baar_jax.train.rivals import label_winners, list_scored
from baar_jax.train.trainer import ShardedRouter
from baar_jax.train.training import RouterFiles, Training
from baar_jax.train.values import fit_values, load_heads, load_trunk

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

Tasks = Mapping[str, list[Task]]  # by split
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
  # Of a family that learns: the stage that trains it, how, and which episodes a policy
  # of it plays for that, on the tasks of each split.
  stage: str = ""
  train: Callable[[Training], None] | None = None
  list_jobs: Callable[[Config, PolicySpec, Tasks], Iterable[Planned]] | None = None


class Loader:
  """Builds policies; it keeps the router that was loaded last."""

  def __init__(
    self,
    files: RouterFiles,
    rows: int,
    pair: Pair | None = None,
    store: Store | None = None,
  ):
    """Take what policies are built from.

    Args:
      files: of the trained routers.
      rows: the most episodes that are live at once.
      pair: the models; without one a policy that asks a judge cannot be built.
      store: with the training episodes that thresholds are quantiles of.
    """
    self.files = files
    self.rows = rows
    self.pair = pair
    self._store = store
    self._loaded: tuple = ()
    self._model: Qwen2 | None = None
    self._p_NxA: np.ndarray | None = None

  def build(self, spec: PolicySpec) -> Policy:
    """Build the policy of a spec; raise ValueError if its training has not ended."""
    return FAMILIES[spec.family].build(spec, self)

  def check(self, spec: PolicySpec) -> None:
    """Raise ValueError if a router's training has not ended."""
    if spec.family == CONDITIONED:
      load_heads(self.files)
    else:
      load_router(self.files, spec.family, spec.lam)

  def load(self, family: str, lam: float | None) -> Qwen2:
    """Load a trained router."""
    if (family, lam) != self._loaded:
      self._p_NxA = None
      self._model = load_router(self.files, family, lam)
      self._loaded = (family, lam)
    return self._model

  def predict_stored(self, view: View) -> np.ndarray:
    """Compute p_NxA of the loaded router at decisions of stored training episodes."""
    if self._p_NxA is None:
      config = self.files.config
      episodes = load_threshold_episodes(self._store, config)
      dtype = config.router.dtype
      router = ShardedRouter(self._model, view.logit_ids, self.files.mesh, dtype)
      labels = FAILURES if view.proposals else ACTED
      batcher = Batcher(config, view, self._store.tasks("train"), labels)
      logits_NxA = batcher.compute(router.logits, episodes)
      self._p_NxA = softmax(logits_NxA, "stored episodes")
    return self._p_NxA


def list_specs(config: Config) -> list[PolicySpec]:
  """List the policies of the evaluation; those of one router are adjacent."""
  specs = []
  for name in FAMILIES:
    specs += list_family(config, name)
  return specs


def list_family(config: Config, name: str) -> list[PolicySpec]:
  """List a family's policies of the evaluation; none of a rival that is not named."""
  is_wanted = name not in RIVALS or name in config.baselines.rivals
  return FAMILIES[name].list_specs(config) if is_wanted else []


def served_specs(config: Config) -> dict[str, PolicySpec]:
  """Return the rules that clients of the endpoint can ask for, by their words."""
  return {
    "small": ALWAYS_SMALL,
    "large": ALWAYS_LARGE,
    "random": PolicySpec(RANDOM, p=0.5),
    "stratified": stratified_spec(config),
  }


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


def check_baselines(config: Config) -> None:
  """Raise ValueError unless rivals are in the table, and ablations leave a part out."""
  c = config.baselines
  known = RIVALS.issuperset(c.rivals)
  require(known, "baselines.rivals", f"of {', '.join(sorted(RIVALS))}")
  for name in c.ablations:
    must = f"without {name}: that is left out anyway"
    require(ablate(config, name) != config, "baselines.ablations", must)


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
  return [PolicySpec(ALWAYS, rank=rank) for rank in ranks]


def _list_random(config: Config) -> list[PolicySpec]:
  specs = []
  for p in config.evaluate.random_p:
    specs += _under(PolicySpec(RANDOM, p=p), [Cap(), *_caps(config)])
  return specs


def _list_privileged(config: Config) -> list[PolicySpec]:
  if config.models.kind != "scripted" or load(config.env.kind).has_optimum:
    return []
  specs = [PolicySpec(PRIVILEGED, mu=mu) for mu in ROUTINE_WEIGHTS]
  for mu in PRIVILEGED_WEIGHTS:
    specs += _under(PolicySpec(PRIVILEGED, mu=mu), [Cap(), *_caps(config)])
  return specs


def _list_optimum(config: Config) -> list[PolicySpec]:
  c = config.models
  has_optimum = load(config.env.kind).has_optimum
  if c.kind != "scripted" or not has_optimum or c.prices or c.skills:
    return []
  base = PolicySpec(OPTIMUM, cap_conditioned=True)
  specs = [dataclasses.replace(base, mu=mu) for mu in OPTIMUM_WEIGHTS]
  return specs + _under(base, [Cap(calls=K) for K in config.evaluate.call_budgets])


def zero_shot_spec(config: Config) -> PolicySpec:
  """Return the zero-shot policy; its key carries all that the answers depend on."""
  c = config.baselines.judge
  kind = config.models.kind
  settings = (kind, c.base_urls, c.temperature, c.max_completion_tokens, c.prices)
  digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:6]
  judge = f"{c.names[0]} {digest}"
  return PolicySpec(ZERO_SHOT, judge=judge, cap_conditioned=True)


def _list_zero_shot(config: Config) -> list[PolicySpec]:
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
  return _list_points(config, trained_spec(config, SFT, config.sft.updates))


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
  config = loader.files.config
  exact = Exact(max_steps=config.env.max_steps, names=config.models.names)
  mu = FREE if spec.mu is None else spec.mu
  return RulePolicy(spec, exact.optimal_rule(mu, spec.cap.calls))


def _build_zero_shot(spec: PolicySpec, loader: Loader) -> Policy:
  config = loader.files.config
  judge = loader.pair.judge(config.baselines.judge)
  models = len(config.models.names)
  return ZeroShotPolicy(spec, judge, config.router, loader.files.tokenizer, models)


def _build_conditioned(spec: PolicySpec, loader: Loader) -> Policy:
  files = loader.files
  model, view = load_trunk(files)
  weights = files.config.value.prices
  heads = load_heads(files)
  return ConditionedPolicy(spec, model, view, heads, weights, loader.rows, files.mesh)


def _build_router(
  spec: PolicySpec, loader: Loader, policy: type[RouterPolicy] = RouterPolicy
) -> Policy:
  files = loader.files
  config = files.config
  family = spec.family
  if spec.rollout and spec.update == 1:
    family = SFT  # that the first update samples from
  model = loader.load(family, spec.lam if family == spec.family else None)
  view = files.open_view(proposals=policy is CascadePolicy)
  prices = prices_of(config.models.names, config.models.prices)
  rule = Threshold(spec.threshold, [price.input for price in prices])
  if spec.rollout:
    rule = Sample(spec.key)
  elif spec.share is not None:
    switch_N = rule.switch_thresholds(loader.predict_stored(view))
    rule.value = float(np.quantile(switch_N, 1.0 - spec.share))
  return policy(spec, model, view, rule, loader.rows, files.mesh)


def _build_cascade(spec: PolicySpec, loader: Loader) -> Policy:
  return _build_router(spec, loader, CascadePolicy)


def _train_sft(training: Training) -> None:
  fit_sft(training, losses.IMITATION)


def _train_bopo(training: Training) -> None:
  for lam in training.config.bopo.lam:
    fit_rollouts(training, BOPO, losses.bopo_method(training.config.bopo), lam)


def _train_vanilla(training: Training) -> None:
  for lam in training.config.bopo.lam:
    fit_rollouts(training, VANILLA, losses.DAPO, lam)


def _train_cascade(training: Training) -> None:
  fit_rival(training, CASCADE, losses.FAILURE, list_scored(training))


def _train_single_turn(training: Training) -> None:
  episodes, labels = label_winners(training)
  method = dataclasses.replace(losses.IMITATION, labels=labels)
  fit_rival(training, SINGLE_TURN, method, episodes)


def _train_ablation(name: str, training: Training) -> None:
  ablated = training.ablate(name)
  if ablated.sft_family != training.sft_family:
    _train_sft(ablated)
  method = losses.bopo_method(ablated.config.bopo)
  fit_rollouts(ablated, BOPO, method, compared_lam(training.config))


def _list_updates(
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


def _list_vanilla(config: Config, spec: PolicySpec, tasks: Tasks) -> Iterator[Planned]:
  return _list_updates(config, spec, tasks, VANILLA_BATCHES)


def _list_single_turn(
  config: Config, spec: PolicySpec, tasks: Tasks
) -> Iterable[Planned]:
  return list_ranked_trials(config, tasks["train"] + tasks["dev"])


FAMILIES = {
  ALWAYS_SMALL.family: Family(
    label="always SMALL",
    color="#1d2530",
    marker="X",
    list_specs=_list_small,
    build=_build_rule(rules.take_small),
  ),
  ALWAYS_LARGE.family: Family(
    label="always LARGE",
    color="#1d2530",
    marker="X",
    list_specs=lambda config: [ALWAYS_LARGE],
    build=_build_rule(rules.take_large),
  ),
  FIRST_LARGE: Family(
    label="First-Large",
    color="#2f8a5b",
    marker="D",
    list_specs=lambda config: _under(PolicySpec(FIRST_LARGE), _caps(config)),
    build=_build_rule(rules.take_large),
  ),
  ALWAYS: Family(
    label="always one between",
    color="#5f6875",
    marker="X",
    list_specs=_list_ranks,
    build=_build_rule(rules.take_rank),
  ),
  RANDOM: Family(
    label="random",
    color="#848b96",
    marker="^",
    list_specs=_list_random,
    build=_build_rule(rules.take_randomly),
  ),
  PRIVILEGED: Family(
    label="privileged (error model)",
    color="#8a5eb0",
    marker="P",
    list_specs=_list_privileged,
    build=_build_privileged,
  ),
  OPTIMUM: Family(
    label="optimum (exact policy)",
    color="#ad7a10",
    marker="*",
    list_specs=_list_optimum,
    build=_build_optimum,
  ),
  ZERO_SHOT: Family(
    label="zero-shot router",
    color="#0f8a94",
    marker="X",
    list_specs=_list_zero_shot,
    build=_build_zero_shot,
  ),
  CONDITIONED: Family(
    label="router that knows its budget",
    color="#111111",
    marker="*",
    list_specs=_list_conditioned,
    build=_build_conditioned,
    stage="value",
    train=fit_values,
  ),
  SFT: Family(
    label="SFT only",
    color="#2f6cb3",
    marker="s",
    list_specs=_list_sft,
    build=_build_router,
    stage=SFT,
    train=_train_sft,
  ),
  BOPO: Family(
    label="BoPO",
    color="#c9452c",
    marker="o",
    list_specs=lambda config: _list_rollouts(BOPO, config),
    build=_build_router,
    stage=BOPO,
    train=_train_bopo,
    list_jobs=_list_updates,
  ),
  CASCADE: Family(
    label="cascade",
    color="#7a5a2e",
    marker="v",
    list_specs=lambda config: _list_classifier(CASCADE, config),
    build=_build_cascade,
    stage="baselines",
    train=_train_cascade,
  ),
  SINGLE_TURN: Family(
    label="single-turn",
    color="#b8408f",
    marker="<",
    list_specs=lambda config: _list_classifier(SINGLE_TURN, config),
    build=_build_router,
    stage="baselines",
    train=_train_single_turn,
    list_jobs=_list_single_turn,
  ),
  VANILLA: Family(
    label="vanilla RL",
    color="#3c4cc0",
    marker="h",
    list_specs=lambda config: _list_rollouts(VANILLA, config),
    build=_build_router,
    stage="baselines",
    train=_train_vanilla,
    list_jobs=_list_vanilla,
  ),
}
SAMPLED = {  # of samples that routers learn from: label
  "stratified": "stratified samples",
  "exploration": "samples of hard tasks",
  "exploration-all": "samples of other tasks",
}
for _name, _label in SAMPLED.items():
  FAMILIES[_name] = Family(
    label=_label,
    color="#848b96",
    marker="^",
    list_specs=lambda config: [],
    build=_build_rule(rules.take_sampled),
  )
ABLATED = {  # label, colour and marker of BoPO without a part
  "no-stratified": ("no stratified sampling", "#6d7d1f", "v"),
  "no-reference": ("no reference advantage", "#0d6e5e", "D"),
  "no-hard-bonus": ("no hard bonus", "#a05a7a", "^"),
}
for _name, _style in ABLATED.items():
  FAMILIES[_name] = Family(
    *_style,
    list_specs=functools.partial(_list_ablation, _name),
    build=_build_router,
    stage="baselines",
    train=functools.partial(_train_ablation, _name),
    list_jobs=_list_updates,
  )
FAMILIES[COMPARED] = dataclasses.replace(
  FAMILIES[BOPO], label="BoPO at the same λ", list_specs=lambda config: []
)
