"""The table of families: every method and rule that is evaluated, trained or served.

Evaluation, training, the dry run, the server and the report read this table alone. A
new rule is a function and a row here.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np

from baar_jax.config import Config, ablate, compared_lam, require
from baar_jax.llms.pair import Pair
from baar_jax.llms.prices import prices_of
from baar_jax.rollout import rules
from baar_jax.rollout.optimum import FREE, Exact
from baar_jax.rollout.specs import Cap, Live, PolicySpec
from baar_jax.rollout.turn import Policy, RulePolicy
from baar_jax.router.cascade import CascadePolicy
from baar_jax.router.conditioned import ConditionedPolicy
from baar_jax.router.policy import RouterPolicy, Sample, Threshold
from baar_jax.router.qwen2 import Qwen2, softmax
from baar_jax.router.view import View
from baar_jax.router.zero_shot import ZeroShotPolicy
from baar_jax.store import Store
from baar_jax.train import listing, losses
from baar_jax.train.batches import ACTED, FAILURES, Batcher
from baar_jax.train.checkpoint import Checkpoints, load_router
from baar_jax.train.dataset import load_threshold_episodes
from baar_jax.train.fit import fit_rival, fit_rollouts, fit_sft
from baar_jax.train.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  COMPARED,
  FIRST_LARGE,
  SFT,
  Planned,
  rollout_spec,
  stratified_spec,
)
from baar_jax.train.listing import (
  ALWAYS,
  ARGMAX,
  BOPO,
  CASCADE,
  CONDITIONED,
  OPTIMUM,
  PRIVILEGED,
  RANDOM,
  RIVALS,
  SINGLE_TURN,
  VANILLA,
  ZERO_SHOT,
  Tasks,
  trained_spec,
)
from baar_jax.train.rivals import label_winners, list_scored
from baar_jax.train.trainer import ShardedRouter
from baar_jax.train.training import RouterFiles, Training
from baar_jax.train.values import fit_values, load_heads, load_trunk, open_trunk_view


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

  def load(self, family: str, lam: float | None = None) -> Qwen2:
    """Load a trained router, or the trunk of the value heads."""
    if (family, lam) != self._loaded:
      self._p_NxA = None
      if family == CONDITIONED:
        self._model, _ = load_trunk(self.files)
      else:
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
  model = loader.load(CONDITIONED)
  view = open_trunk_view(files)
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


def find_router(files: RouterFiles, sample: bool = False) -> PolicySpec:
  """Find the router to serve: the budget-conditioned one, else BoPO's, else SFT's.

  Of several weights of cost that BoPO was trained with it is the first.

  Args:
    sample: of the last two, and it samples for BoPO's next update.
  """
  config = files.config
  conditioned = list_family(config, CONDITIONED)
  if conditioned and not sample:
    stage = FAMILIES[CONDITIONED].stage
    if files.checkpoints(stage).exists():
      return conditioned[0]
  lam = config.bopo.lam[0]
  directory = files.checkpoints(BOPO, lam)
  with contextlib.closing(Checkpoints(directory)) as checkpoints:
    update = checkpoints.last_update  # 0 also if it has asked for sessions in vain
  if sample:
    return rollout_spec(BOPO, lam, update + 1)
  spec = trained_spec(config, SFT, config.sft.updates)
  if update:
    spec = trained_spec(config, BOPO, update, lam)
  return dataclasses.replace(spec, threshold=ARGMAX)


def open_router(files: RouterFiles, rows: int, sample: bool = False) -> Policy:
  """Open the router to serve, for `rows` live episodes; ValueError without one."""
  return Loader(files, rows).build(find_router(files, sample))


FAMILIES = {
  ALWAYS_SMALL.family: Family(
    "always SMALL", "#1d2530", "X", listing.list_small, _build_rule(rules.take_small)
  ),
  ALWAYS_LARGE.family: Family(
    "always LARGE", "#1d2530", "X", listing.list_large, _build_rule(rules.take_large)
  ),
  FIRST_LARGE: Family(
    "First-Large", "#2f8a5b", "D", listing.list_capped, _build_rule(rules.take_large)
  ),
  ALWAYS: Family(
    "always one between",
    "#5f6875",
    "X",
    listing.list_ranks,
    _build_rule(rules.take_rank),
  ),
  RANDOM: Family(
    "random", "#848b96", "^", listing.list_random, _build_rule(rules.take_randomly)
  ),
  PRIVILEGED: Family(
    "privileged (error model)",
    "#8a5eb0",
    "P",
    listing.list_privileged,
    _build_privileged,
  ),
  OPTIMUM: Family(
    "optimum (exact policy)", "#ad7a10", "*", listing.list_optimum, _build_optimum
  ),
  ZERO_SHOT: Family(
    "zero-shot router", "#0f8a94", "X", listing.list_zero_shot, _build_zero_shot
  ),
  CONDITIONED: Family(
    "router that knows its budget",
    "#111111",
    "*",
    listing.list_conditioned,
    _build_conditioned,
    stage="value",
    train=fit_values,
  ),
  SFT: Family(
    "SFT only",
    "#2f6cb3",
    "s",
    listing.list_sft,
    _build_router,
    stage=SFT,
    train=_train_sft,
  ),
  BOPO: Family(
    "BoPO",
    "#c9452c",
    "o",
    lambda config: listing.list_learnt(BOPO, config),
    _build_router,
    stage=BOPO,
    train=_train_bopo,
    list_jobs=listing.list_updates,
  ),
  CASCADE: Family(
    "cascade",
    "#7a5a2e",
    "v",
    lambda config: listing.list_classifier(CASCADE, config),
    _build_cascade,
    stage="baselines",
    train=_train_cascade,
  ),
  SINGLE_TURN: Family(
    "single-turn",
    "#b8408f",
    "<",
    lambda config: listing.list_classifier(SINGLE_TURN, config),
    _build_router,
    stage="baselines",
    train=_train_single_turn,
    list_jobs=listing.list_single_turn,
  ),
  VANILLA: Family(
    "vanilla RL",
    "#3c4cc0",
    "h",
    lambda config: listing.list_learnt(VANILLA, config),
    _build_router,
    stage="baselines",
    train=_train_vanilla,
    list_jobs=listing.list_vanilla,
  ),
}
SAMPLED = {  # of samples that routers learn from: label
  "stratified": "stratified samples",
  "exploration": "samples of hard tasks",
  "exploration-all": "samples of other tasks",
}
for _name, _label in SAMPLED.items():
  FAMILIES[_name] = Family(
    _label, "#848b96", "^", lambda config: [], _build_rule(rules.take_sampled)
  )
ABLATED = {  # label, colour and marker of BoPO without a part
  "no-stratified": ("no stratified sampling", "#6d7d1f", "v"),
  "no-reference": ("no reference advantage", "#0d6e5e", "D"),
  "no-hard-bonus": ("no hard bonus", "#a05a7a", "^"),
}
for _name, _style in ABLATED.items():
  FAMILIES[_name] = Family(
    *_style,
    functools.partial(listing.list_ablation, _name),
    _build_router,
    stage="baselines",
    train=functools.partial(_train_ablation, _name),
    list_jobs=listing.list_updates,
  )
FAMILIES[COMPARED] = dataclasses.replace(
  FAMILIES[BOPO], label="BoPO at the same λ", list_specs=lambda config: []
)
