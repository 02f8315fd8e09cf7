"""The table of families: every method and rule that is evaluated, trained or served.

Evaluation, training, the dry run, the server and the report read this table alone. A
new rule is a function and a row here.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np

from baar_jax.config import (
  VANILLA_BATCHES,
  ZERO_SHOT,
  Config,
  ablate,
  compared_lam,
  require,
)
from baar_jax.episode import Episode
from baar_jax.llms.prices import prices_of
from baar_jax.rollout import rules
from baar_jax.rollout.optimum import FREE, Exact
from baar_jax.rollout.specs import Live, PolicySpec
from baar_jax.rollout.turn import Policy, RulePolicy
from baar_jax.router.cascade import CascadePolicy
from baar_jax.router.conditioned import ConditionedPolicy
from baar_jax.router.policy import ARGMAX, RouterPolicy, Rule, Sample, Threshold
from baar_jax.router.view import View
from baar_jax.router.zero_shot import ZeroShotPolicy
from baar_jax.train import losses
from baar_jax.train.checkpoint import Checkpoints, open_finished
from baar_jax.train.fit import fit_rival, fit_sft
from baar_jax.train.jobs import (
  ALWAYS,
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  BOPO,
  COMPARED,
  FIRST_LARGE,
  SFT,
  Planned,
  list_ranks,
  rollout_spec,
  stratified_spec,
)
from baar_jax.train.listing import (
  Tasks,
  list_ablation,
  list_capped,
  list_classifier,
  list_conditioned,
  list_learnt,
  list_optimum,
  list_privileged,
  list_random,
  list_sft,
  list_single_turn,
  list_small,
  list_uncapped,
  list_updates,
  list_zero_shot,
  trained_spec,
)
from baar_jax.train.loader import Loaded, RouterLoader
from baar_jax.train.rivals import learn_scorer, learn_winners
from baar_jax.train.rollouts import fit_rollouts
from baar_jax.train.training import RouterFiles, Training
from baar_jax.train.values import fit_values, load_heads

RANDOM = "random"
CONDITIONED = "conditioned"  # the budget-conditioned router
VANILLA = "vanilla"


@dataclasses.dataclass(frozen=True)
class Family:
  """A method or a rule."""

  label: str  # for people
  color: str
  marker: str
  # The policies of a name to evaluate, in the report's order.
  list_specs: Callable[[Config, str], Iterable[PolicySpec]] = lambda config, name: ()
  # It decides by a rule, or as the policy does that is built of a spec.
  rule: Callable[[Live, PolicySpec], int] | None = None
  build: Callable[[PolicySpec, "Loader"], Policy] | None = None
  # Of a family that learns: the stage that trains it, how, and which episodes a policy
  # of it plays for that, on the tasks of each split.
  stage: str = ""
  train: Callable[[Training], None] | None = None
  list_jobs: Callable[[Config, PolicySpec, Tasks], Iterable[Planned]] | None = None
  is_rival: bool = False  # it takes part only if the configuration's baselines name it


class Loader(RouterLoader):
  """Builds the policies of specs."""

  def build(self, spec: PolicySpec) -> Policy:
    """Build the policy of a spec; raise ValueError if its training has not ended."""
    family = FAMILIES[spec.family]
    if family.rule:
      return RulePolicy(spec, family.rule)
    return family.build(spec, self)


def list_specs(config: Config) -> list[PolicySpec]:
  """List the policies of the evaluation; those of one router are adjacent.

  A rival has none unless the configuration names it.
  """
  specs = []
  for name, family in FAMILIES.items():
    if not family.is_rival or name in config.baselines.rivals:
      specs += family.list_specs(config, name)
  return specs


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
  routers = {}
  for spec in list_specs(config):
    if FAMILIES[spec.family].train:
      routers[spec.family, spec.lam] = spec
  return [*routers.values()]


def check_trained(files: RouterFiles) -> None:
  """Raise ValueError unless every router of the evaluation is trained to its end."""
  for spec in list_trained(files.config):
    if spec.family == CONDITIONED:
      load_heads(files)
    else:
      with open_finished(files, spec.family, spec.lam):
        pass


def check_baselines(config: Config) -> None:
  """Raise ValueError unless rivals are in the table, and ablations leave a part out."""
  c = config.baselines
  rivals = sorted(name for name, family in FAMILIES.items() if family.is_rival)
  known = {*rivals}.issuperset(c.rivals)
  require(known, "baselines.rivals", f"of {', '.join(rivals)}")
  for name in c.ablations:
    must = f"without {name}: that is left out anyway"
    require(ablate(config, name) != config, "baselines.ablations", must)


def _build_privileged(spec: PolicySpec, loader: Loader) -> Policy:
  """Build the privileged rule."""
  return rules.PrivilegedPolicy(spec)


def _build_optimum(spec: PolicySpec, loader: Loader) -> Policy:
  """Build the sandbox's exact policy."""
  config = loader.files.config
  exact = Exact(max_steps=config.env.max_steps, names=config.models.names)
  mu = FREE if spec.mu is None else spec.mu
  return RulePolicy(spec, exact.optimal_rule(mu, spec.cap.calls))


def _build_zero_shot(spec: PolicySpec, loader: Loader) -> Policy:
  """Build the zero-shot router on the configured judge."""
  config = loader.files.config
  judge = loader.pair.judge(config.baselines.judge)
  models = len(config.models.names)
  return ZeroShotPolicy(spec, judge, config.router, loader.files.tokenizer, models)


def _build_conditioned(spec: PolicySpec, loader: Loader) -> Policy:
  """Build the budget-conditioned router."""
  files = loader.files
  model = loader.load_trunk(spec.family)
  view = files.open_trunk_view()
  weights = files.config.value.prices
  heads = load_heads(files)
  return ConditionedPolicy(spec, model, view, heads, weights, loader.rows, files.mesh)


def _build_router(
  spec: PolicySpec, loader: Loader, policy: type[RouterPolicy] = RouterPolicy
) -> Policy:
  """Build a trained router that samples, or that decides by a threshold."""
  files = loader.files
  if spec.rollout and spec.update == 1:
    loaded = loader.load(SFT)  # the first update samples from it
  else:
    loaded = loader.load(spec.family, spec.lam)
  view = files.open_view(proposals=policy is CascadePolicy)
  rule = _make_rule(spec, loader, loaded, view)
  return policy(spec, loaded.model, view, rule, loader.rows, files.mesh)


def _make_rule(spec: PolicySpec, loader: Loader, loaded: Loaded, view: View) -> Rule:
  """Make the rule of a trained router: it samples, or decides by a threshold.

  The threshold of a share is a quantile of the router's p at stored decisions.
  """
  if spec.rollout:
    return Sample(spec.key)
  models = loader.files.config.models
  usd_A = [price.input for price in prices_of(models.names, models.prices)]
  if spec.share is None:
    return Threshold(spec.threshold, usd_A)
  p_NxA = loader.predict_stored(loaded, view)
  switch_N = Threshold(usd_A=usd_A).switch_thresholds(p_NxA)
  return Threshold(float(np.quantile(switch_N, 1.0 - spec.share)), usd_A)


def _build_cascade(spec: PolicySpec, loader: Loader) -> Policy:
  """Build the cascade."""
  return _build_router(spec, loader, CascadePolicy)


def _train_bopo(training: Training) -> None:
  """Train BoPO with each weight of cost."""
  method = losses.bopo_method(training.config.bopo)
  for lam in training.config.bopo.lam:
    fit_rollouts(training, BOPO, method, lam)


def _train_vanilla(training: Training) -> None:
  """Train vanilla RL (DAPO) with each weight of cost."""
  for lam in training.config.bopo.lam:
    fit_rollouts(training, VANILLA, losses.DAPO, lam)


def _train_rival(
  name: str,
  learn: Callable[[Training], tuple[losses.Method, list[Episode]]],
  training: Training,
) -> None:
  """Train a rival that learns from stored episodes."""
  method, episodes = learn(training)
  fit_rival(training, name, method, episodes)


def _train_ablation(name: str, training: Training) -> None:
  """Train BoPO without a part, and SFT too if the part changes it."""
  ablated = training.ablate(name)
  if ablated.sft_family != training.sft_family:
    fit_sft(ablated)
  method = losses.bopo_method(ablated.config.bopo)
  fit_rollouts(ablated, BOPO, method, compared_lam(training.config))


def find_router(files: RouterFiles, sample: bool = False) -> PolicySpec:
  """Find the router to serve: the budget-conditioned one, else BoPO's, else SFT's.

  Of several weights of cost that BoPO was trained with it is the first.

  Args:
    sample: of the last two, and it samples for BoPO's next update.
  """
  config = files.config
  conditioned = [*list_conditioned(config, CONDITIONED)]
  if conditioned and not sample and files.checkpoints("value").exists():
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
  """Open the router to serve, for at most `rows` live episodes.

  Raises:
    ValueError: none is trained.
  """
  return Loader(files, rows).build(find_router(files, sample))


def _ablation(name: str, label: str, color: str, marker: str) -> Family:
  """Make the row of BoPO without a part."""
  return Family(
    label,
    color,
    marker,
    list_ablation,
    build=_build_router,
    stage="baselines",
    train=functools.partial(_train_ablation, name),
    list_jobs=list_updates,
  )


FAMILIES = {
  ALWAYS_SMALL.family: Family(
    "always SMALL", "#1d2530", "X", list_small, rule=rules.take_small
  ),
  ALWAYS_LARGE.family: Family(
    "always LARGE", "#1d2530", "X", list_uncapped, rule=rules.take_large
  ),
  FIRST_LARGE: Family(
    "First-Large", "#2f8a5b", "D", list_capped, rule=rules.take_large
  ),
  ALWAYS: Family(
    "always one between", "#5f6875", "X", list_ranks, rule=rules.take_rank
  ),
  RANDOM: Family("random", "#848b96", "^", list_random, rule=rules.take_randomly),
  "privileged": Family(
    "privileged (error model)", "#8a5eb0", "P", list_privileged, build=_build_privileged
  ),
  "optimum": Family(
    "optimum (exact policy)", "#ad7a10", "*", list_optimum, build=_build_optimum
  ),
  ZERO_SHOT: Family(
    "zero-shot router",
    "#0f8a94",
    "X",
    list_zero_shot,
    build=_build_zero_shot,
    is_rival=True,
  ),
  CONDITIONED: Family(
    "router that knows its budget",
    "#111111",
    "*",
    list_conditioned,
    build=_build_conditioned,
    stage="value",
    train=fit_values,
  ),
  SFT: Family(
    "SFT only", "#2f6cb3", "s", list_sft, build=_build_router, stage=SFT, train=fit_sft
  ),
  BOPO: Family(
    "BoPO",
    "#c9452c",
    "o",
    list_learnt,
    build=_build_router,
    stage=BOPO,
    train=_train_bopo,
    list_jobs=list_updates,
  ),
  "cascade": Family(
    "cascade",
    "#7a5a2e",
    "v",
    list_classifier,
    build=_build_cascade,
    stage="baselines",
    train=functools.partial(_train_rival, "cascade", learn_scorer),
    is_rival=True,
  ),
  "single-turn": Family(
    "single-turn",
    "#b8408f",
    "<",
    list_classifier,
    build=_build_router,
    stage="baselines",
    train=functools.partial(_train_rival, "single-turn", learn_winners),
    list_jobs=list_single_turn,
    is_rival=True,
  ),
  VANILLA: Family(
    "vanilla RL",
    "#3c4cc0",
    "h",
    list_learnt,
    build=_build_router,
    stage="baselines",
    train=_train_vanilla,
    list_jobs=functools.partial(list_updates, batches=VANILLA_BATCHES),
    is_rival=True,
  ),
  # Samples that routers learn from.
  "stratified": Family("stratified samples", "#848b96", "^", rule=rules.take_sampled),
  "exploration": Family(
    "samples of hard tasks", "#848b96", "^", rule=rules.take_sampled
  ),
  "exploration-all": Family(
    "samples of other tasks", "#848b96", "^", rule=rules.take_sampled
  ),
  # BoPO without a part.
  "no-stratified": _ablation("no-stratified", "no stratified sampling", "#6d7d1f", "v"),
  "no-reference": _ablation("no-reference", "no reference advantage", "#0d6e5e", "D"),
  "no-hard-bonus": _ablation("no-hard-bonus", "no hard bonus", "#a05a7a", "^"),
  # BoPO's points at the ablations' weight of cost.
  COMPARED: Family("BoPO at the same λ", "#c9452c", "o"),
}
# The stages that train families.
STAGES = [*dict.fromkeys(row.stage for row in FAMILIES.values() if row.stage)]
