"""Define every policy family: how it is listed, built and trained.

Evaluation, training, the dry run, the server and the report take all families from
`FAMILIES`. To add a rule, write its function and a row in `FAMILIES`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np

from baar_jax.conditioned.fit import fit_values, load_heads
from baar_jax.conditioned.policy import (
  ConditionedPolicy,
  Situation,
  ValueFunction,
  pick_best,
)
from baar_jax.config import (
  VANILLA_BATCHES,
  ZERO_SHOT,
  Config,
  ablate,
  compared_lam,
  require,
)
from baar_jax.learn.batches import ACTED, FAILURES, Batcher
from baar_jax.learn.checkpoint import (
  RouterFiles,
  Training,
  load_router,
  open_finished,
)
from baar_jax.learn.trainer import ShardedRouter
from baar_jax.llms.prices import prices_of
from baar_jax.paper import losses
from baar_jax.paper.bopo import fit_rollouts, train_rollouts, train_vanilla
from baar_jax.paper.references import load_threshold_episodes
from baar_jax.paper.sft import fit_rival, fit_sft, learn_scorer, learn_winners
from baar_jax.rivals import listing, valued
from baar_jax.rivals.cascade import CascadePolicy
from baar_jax.rivals.listing import Tasks
from baar_jax.rivals.optimum import FREE, Exact
from baar_jax.rivals.zero_shot import ZeroShotPolicy
from baar_jax.rollout import jobs, rules
from baar_jax.rollout.jobs import CONDITIONED, LABELS, SFT, Planned, list_ranks
from baar_jax.rollout.loop import Pair
from baar_jax.rollout.rules import Policy, RulePolicy
from baar_jax.rollout.specs import Live, PolicySpec
from baar_jax.router.inputs import StateReader
from baar_jax.router.policy import RouterPolicy, Sample, Threshold
from baar_jax.router.qwen2 import Qwen2, softmax
from baar_jax.router.reader import Reader
from baar_jax.store import Store


@dataclasses.dataclass(frozen=True)
class Family:
  """Describe a policy family: all policies of one rule or one trained method.

  Attributes:
    label: the name of the family in the report.
    list_specs: a function of (config, name of the family) that lists the policies to
      evaluate, in the report's order.
    rule: a function of (live episode, spec of the policy) that returns the index of the
      model to act; None if the family has `build`.
    build: builds a policy from its spec; None if the family has `rule`.
    stage: the stage that trains the family; "" if the family does not learn.
    train: trains the family for one training seed; None if the family does not learn.
    list_jobs: a function of (config, spec, tasks of each split) that lists the episodes
      that the training plays; None if it plays none.
    is_rival: whether the family is left out unless `baselines.rivals` names it.
  """

  label: str
  list_specs: Callable[[Config, str], Iterable[PolicySpec]] = lambda config, name: ()
  rule: Callable[[Live, PolicySpec], int] | None = None
  build: Callable[[PolicySpec, "Loader"], Policy] | None = None
  stage: str = ""
  train: Callable[[Training], None] | None = None
  list_jobs: Callable[[Config, PolicySpec, Tasks], Iterable[Planned]] | None = None
  is_rival: bool = False


@dataclasses.dataclass
class Loader:
  """Build policies from their specs; keep the router that was loaded last.

  Attributes:
    files: the trained routers.
    rows: the largest number of episodes that are live at once.
    pair: the LLMs of the run; needed only for policies that ask a judge.
    store: the stored episodes; needed only for policies with a `share`.
    load: `read_router`; it keeps the router that was loaded last.
    predict_stored: `compute_stored`; it keeps the last result.
  """

  files: RouterFiles
  rows: int
  pair: Pair | None = None
  store: Store | None = None

  def __post_init__(self) -> None:
    """Let the loader keep one router, and its probabilities at stored decisions."""
    self.load = functools.lru_cache(1)(self.read_router)
    self.predict_stored = functools.lru_cache(1)(self.compute_stored)

  def read_router(self, family: str, lam: float | None = None) -> Qwen2:
    """Read a trained router.

    Args:
      family: the family of the router.
      lam: the cost weight of the training; None if the family has none.

    Raises:
      ValueError: the training has not ended.
    """
    return load_router(self.files, family, lam)

  def compute_stored(
    self, family: str, lam: float | None, proposals: bool
  ) -> np.ndarray:
    """Compute a router's probabilities p_NxA at stored training decisions.

    Args:
      family: the family of the router.
      lam: the cost weight of the training; None if the family has none.
      proposals: whether the router reads the proposals of a cascade.
    """
    config = self.files.config
    view = self.files.open_view(proposals)
    episodes = load_threshold_episodes(self.store, config)
    model = self.load(family, lam)
    router = ShardedRouter(model, view.logit_ids, self.files.mesh, config.router.dtype)
    labels = FAILURES if proposals else ACTED
    batcher = Batcher(config, view, self.store.tasks("train"), labels)
    return softmax(batcher.compute(router.logits, episodes), "stored episodes")

  def build(self, spec: PolicySpec) -> Policy:
    """Build a policy from its spec.

    Raises:
      ValueError: its training has not ended.
    """
    family = FAMILIES[spec.family]
    if family.rule:
      return RulePolicy(spec, family.rule)
    return family.build(spec, self)


def list_specs(config: Config) -> list[PolicySpec]:
  """Return all policies to evaluate, in the order of `FAMILIES`.

  Policies of the same router are adjacent. Rivals that the configuration does not name
  are left out.
  """
  specs = []
  for name, family in FAMILIES.items():
    if not family.is_rival or name in config.baselines.rivals:
      specs += family.list_specs(config, name)
  return specs


def list_trained(config: Config) -> list[PolicySpec]:
  """Return one policy for each trained router that the evaluation needs."""
  routers = {}
  for spec in list_specs(config):
    if FAMILIES[spec.family].train:
      routers[spec.family, spec.lam] = spec
  return [*routers.values()]


def check_trained(files: RouterFiles) -> None:
  """Check that all routers of the evaluation are trained.

  Raises:
    ValueError: a training has not ended.
  """
  for spec in list_trained(files.config):
    if spec.family == CONDITIONED:
      load_heads(files)
    else:
      with open_finished(files, spec.family, spec.lam):
        pass


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
  valued = {"cache-sticky", "one-escalation"}.intersection(baselines.rivals)
  has_heads = config.value.updates > 0 or not valued
  require(has_heads, "value.updates", f"above 0 for {' and '.join(sorted(valued))}")
  for name in baselines.ablations:
    requirement = f"without {name}: this configuration leaves that part out already"
    require(ablate(config, name) != config, "baselines.ablations", requirement)


def _build_optimum(spec: PolicySpec, loader: Loader) -> Policy:
  """Build the sandbox's exact policy, for a mu (successes per dollar) or a cap."""
  config = loader.files.config
  exact = Exact(config.models, config.env.max_steps)
  mu = FREE if spec.mu is None else spec.mu
  return RulePolicy(spec, exact.optimal_rule(mu, spec.cap.calls))


def _build_zero_shot(spec: PolicySpec, loader: Loader) -> Policy:
  """Build the zero-shot router, which asks the configured judge at each step."""
  files = loader.files
  config = files.config
  judge = loader.pair.judge(config.baselines.judge)
  models = len(config.models.names)
  return ZeroShotPolicy(spec, judge, config.router, files.tokenizer, models)


def _build_conditioned(
  spec: PolicySpec,
  loader: Loader,
  pick: Callable[[np.ndarray, Situation], int] = pick_best,
) -> Policy:
  """Build a policy on the value heads.

  Args:
    spec: the policy.
    loader: gives the value heads.
    pick: picks a model; see `ValueFunction.pick`.
  """
  files = loader.files
  settings = files.config.value
  heads, vocabulary = load_heads(files)
  values = ValueFunction(heads, settings.cost_weights, files.billing, pick)
  return ConditionedPolicy(spec, StateReader(vocabulary), values)


def _build_router(
  spec: PolicySpec, loader: Loader, policy: type[RouterPolicy] = RouterPolicy
) -> Policy:
  """Build the policy of a trained router.

  Args:
    spec: the policy.
    loader: loads the router.
    policy: the class of the policy.
  """
  files = loader.files
  if spec.rollout and spec.update == 1:
    # The first update of a training samples its rollouts from the SFT router.
    model = loader.load(SFT)
  else:
    model = loader.load(spec.family, spec.lam)
  view = files.open_view(proposals=policy is CascadePolicy)
  rule = _make_rule(spec, loader, view.proposals)
  reader = Reader(model, view, view.logit_ids, loader.rows, files.mesh)
  return policy(spec, reader, rule)


def _make_rule(spec: PolicySpec, loader: Loader, proposals: bool) -> Sample | Threshold:
  """Make the rule by which a trained router decides.

  A policy of rollouts samples from the probabilities. Other policies compare p(LARGE)
  with a threshold. If `spec.share` is set, the threshold is the quantile at which LARGE
  gets this share of the stored decisions.
  """
  if spec.rollout:
    return Sample(spec.key)
  models = loader.files.config.models
  usd_A = [price.input for price in prices_of(models)]
  if spec.share is None:
    return Threshold(spec.threshold, usd_A)
  p_NxA = loader.predict_stored(spec.family, spec.lam, proposals)
  switch_N = Threshold(usd_A=usd_A).switch_thresholds(p_NxA)
  return Threshold(float(np.quantile(switch_N, 1.0 - spec.share)), usd_A)


def _train_ablation(name: str, training: Training) -> None:
  """Train BoPO without one part, and SFT too if the part matters to SFT.

  Args:
    name: a key of `config.ABLATIONS`.
    training: the training of the complete method.
  """
  ablated = training.ablate(name)
  if ablated.sft_family != training.sft_family:
    fit_sft(ablated)
  method = losses.bopo_method(ablated.config.bopo)
  fit_rollouts(ablated, jobs.BOPO, method, compared_lam(training.config))


def open_router(files: RouterFiles, rows: int, sample: bool = False) -> Policy:
  """Open the router that `listing.find_router` selects for serving.

  Args:
    files: the routers of a run.
    rows: the largest number of episodes that are live at once.
    sample: whether the router samples its decisions, for BoPO's next update.

  Raises:
    ValueError: no router is trained.
  """
  return Loader(files, rows).build(listing.find_router(files, sample))


def _ablation(name: str, label: str) -> Family:
  """Make the row of an ablation in `FAMILIES`; an ablation is BoPO without one part.

  Args:
    name: a key of `config.ABLATIONS`.
    label: the name of the ablation in the report.
  """
  return Family(
    label,
    listing.list_ablation,
    build=_build_router,
    stage="baselines",
    train=functools.partial(_train_ablation, name),
    list_jobs=listing.list_updates,
  )


FAMILIES = {
  jobs.ALWAYS_SMALL.family: Family(
    LABELS[jobs.ALWAYS_SMALL.family],
    listing.list_small,
    rule=rules.take_small,
  ),
  jobs.ALWAYS_LARGE.family: Family(
    LABELS[jobs.ALWAYS_LARGE.family],
    listing.list_uncapped,
    rule=rules.take_large,
  ),
  jobs.FIRST_LARGE: Family(
    LABELS[jobs.FIRST_LARGE], listing.list_capped, rule=rules.take_large
  ),
  jobs.ALWAYS: Family(
    "always the intermediate model", list_ranks, rule=rules.take_rank
  ),
  jobs.RANDOM: Family("random", listing.list_random, rule=rules.take_randomly),
  "privileged": Family(
    "privileged (error model)",
    listing.list_privileged,
    build=lambda spec, loader: rules.PrivilegedPolicy(spec),
  ),
  "optimum": Family(
    "optimum (exact policy)", listing.list_optimum, build=_build_optimum
  ),
  ZERO_SHOT: Family(
    "zero-shot router",
    listing.list_zero_shot,
    build=_build_zero_shot,
    is_rival=True,
  ),
  CONDITIONED: Family(
    LABELS[CONDITIONED],
    listing.list_conditioned,
    build=_build_conditioned,
    stage="value",
    train=fit_values,
  ),
  "cache-sticky": Family(
    "cache-sticky rule",
    listing.list_valued,
    build=functools.partial(_build_conditioned, pick=valued.stay_warm),
    is_rival=True,
  ),
  "one-escalation": Family(
    "one escalation",
    listing.list_valued,
    build=functools.partial(_build_conditioned, pick=valued.escalate_once),
    is_rival=True,
  ),
  "stage-rule": Family(
    "stage rule",
    listing.list_patient,
    rule=rules.take_after_trouble,
    is_rival=True,
  ),
  SFT: Family(
    LABELS[SFT],
    listing.list_sft,
    build=_build_router,
    stage=SFT,
    train=fit_sft,
  ),
  jobs.BOPO: Family(
    LABELS[jobs.BOPO],
    listing.list_learnt,
    build=_build_router,
    stage=jobs.BOPO,
    train=functools.partial(train_rollouts, jobs.BOPO, losses.bopo_method),
    list_jobs=listing.list_updates,
  ),
  "cascade": Family(
    "cascade",
    listing.list_classifier,
    build=functools.partial(_build_router, policy=CascadePolicy),
    stage="baselines",
    train=functools.partial(fit_rival, "cascade", learn_scorer),
    is_rival=True,
  ),
  "single-turn": Family(
    "single-turn classifier",
    listing.list_classifier,
    build=_build_router,
    stage="baselines",
    train=functools.partial(fit_rival, "single-turn", learn_winners),
    list_jobs=listing.list_single_turn,
    is_rival=True,
  ),
  jobs.VANILLA: Family(
    "vanilla RL",
    listing.list_learnt,
    build=_build_router,
    stage="baselines",
    train=train_vanilla,
    list_jobs=functools.partial(listing.list_updates, batches=VANILLA_BATCHES),
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
  # This row is for plots: BoPO's points at the one cost weight that all ablations have.
  jobs.COMPARED: Family("BoPO at the same λ"),
}
# The stages that train a family.
STAGES = [*dict.fromkeys(row.stage for row in FAMILIES.values() if row.stage)]
