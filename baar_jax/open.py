"""Open what a run has stored: episodes, profiles, references, routers and policies."""

import contextlib
import dataclasses
import functools
import itertools
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from pydantic import TypeAdapter

from baar_jax.conditioned import fit
from baar_jax.conditioned.heads import TERMS, Heads, Scale
from baar_jax.conditioned.policy import ConditionedPolicy, ValueFunction
from baar_jax.config import Config
from baar_jax.episode import Episode, Task
from baar_jax.learn.batches import SAMPLED, Batcher
from baar_jax.learn.checkpoint import Checkpoints, RouterFiles
from baar_jax.learn.trainer import ShardedRouter, Trainer, bopo_optimizer
from baar_jax.llms.prices import prices_of
from baar_jax.mesh import split_parameters
from baar_jax.paper.bopo import Learner
from baar_jax.paper.references import Profile, choose_references, profile_tasks
from baar_jax.rivals import families
from baar_jax.rivals.families import FAMILIES, OnPolicy
from baar_jax.rivals.optimum import FREE, Exact
from baar_jax.rivals.zero_shot import ZeroShotPolicy
from baar_jax.rollout.jobs import (
  BOPO,
  BOUNDARIES,
  CONDITIONED,
  SFT,
  exploration_specs,
  stratified_spec,
)
from baar_jax.rollout.loop import Pair
from baar_jax.rollout.rules import Policy, PrivilegedPolicy, RulePolicy
from baar_jax.rollout.specs import PolicySpec, Purpose, seed_of
from baar_jax.router import weights as router_weights
from baar_jax.router.inputs import BUCKETS, DIRECTIONS, StateReader, Vocabulary
from baar_jax.router.policy import ARGMAX, Threshold
from baar_jax.router.qwen2 import Qwen2, check_finite, softmax
from baar_jax.router.reader import Reader
from baar_jax.router.view import View
from baar_jax.store import Store

HEADS = "value_heads.npz"  # The name of the file with the value heads.
# The texts in the file of the value heads: a vocabulary without its directions.
TEXTS = TypeAdapter(tuple[dict[str, float], float, dict[str, float]])


def load_profiles(
  store: Store,
  config: Config,
  *splits: str,
  purpose: Purpose = "profile",
  trials: Iterable[int] = (),
) -> dict[str, Profile]:
  """Load the profiles of the tasks of some splits.

  A task without a trial of both boundaries is left out.

  Args:
    splits: "train", "dev" or both.
    purpose: "profile" or "robustness"; the purpose of the trials to read.
    trials: the numbers of the trials to read per task and boundary; if empty, all of
      `profile.trials`.

  Returns:
    The profiles by task id, in the order of the tasks.

  Raises:
    ValueError: no task has these trials.
  """
  ids = [task.id for split in splits for task in store.tasks(split)]
  trials = trials or range(config.profile.trials)
  profiles = profile_tasks(ids, _load_boundaries(store, trials, ids, purpose))
  if not profiles:
    raise ValueError(
      f"{config.runs}/{config.name} has no {purpose} trials: run --stage=profile first"
    )
  return profiles


def load_references(
  store: Store, config: Config, profiles: Mapping[str, Profile]
) -> dict[str, Episode]:
  """Load the reference trajectory tau* of each task with a profile.

  Returns:
    Episodes by task id.

  Raises:
    ValueError: a hard task has no stratified sample yet.
  """
  if config.references.clone_large:
    return choose_references(profiles, [])
  # The store sorts by seed, and seeds ascend with k. So samples come in order of k.
  stratified = store.episodes(stratified_spec(config).key)
  sampled = {episode.task_id for episode in stratified}
  missing = [id_ for id_, p in profiles.items() if p.hard and id_ not in sampled]
  if missing:
    problem = f"lacks references of {len(missing)} hard tasks: run --stage=references"
    raise ValueError(f"{config.runs}/{config.name} {problem}")
  return choose_references(profiles, stratified)


def load_hard_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the episodes of training tasks that pretraining learns from.

  These are the first `profile.trials` trials of both boundaries, the stratified samples
  and the exploration of hard tasks.
  """
  samples = range(1, config.references.samples + 1)
  episodes = _load_samples(store, config, range(config.profile.trials), samples)
  explore_hard, _ = exploration_specs(config)
  return episodes + store.episodes(explore_hard.key)


def load_value_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the episodes of training tasks that the value heads learn from.

  These are the episodes of `load_hard_episodes`, and the exploration of tasks that are
  not hard (our choice). Without this exploration, only hard tasks would have episodes
  that mix the models. Then the heads would learn that a task with a mix of models is a
  task that can be solved.
  """
  episodes = load_hard_episodes(store, config)
  _, explore_rest = exploration_specs(config)
  return episodes + store.episodes(explore_rest.key)


def load_threshold_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the training episodes at whose decisions thresholds are computed.

  A threshold is a quantile of the router's p(LARGE) at the decisions of these episodes.
  The episodes are one trial of each boundary per task, and the stratified samples
  k = N/4, N/2 and 3N/4 (our choice).
  """
  quarters = {max(1, config.references.samples * quarter // 4) for quarter in (1, 2, 3)}
  return _load_samples(store, config, {0}, quarters)


def _load_samples(
  store: Store, config: Config, trials: Iterable[int], samples: Iterable[int]
) -> list[Episode]:
  """Load trials of both boundaries, and stratified samples, of all training tasks.

  Args:
    trials: the numbers of the trials, from 0.
    samples: the numbers k of the stratified samples, from 1.
  """
  train = [task.id for task in store.tasks("train")]
  episodes = _load_boundaries(store, trials, train)
  stratified = stratified_spec(config)
  return episodes + _load_trials(store, stratified, "reference", samples, train)


def _load_boundaries(
  store: Store,
  trials: Iterable[int],
  ids: Sequence[str],
  purpose: Purpose = "profile",
) -> list[Episode]:
  """Load trials of always-SMALL, then of always-LARGE, on tasks."""
  episodes = []
  for boundary in BOUNDARIES:
    episodes += _load_trials(store, boundary, purpose, trials, ids)
  return episodes


def _load_trials(
  store: Store,
  spec: PolicySpec,
  purpose: Purpose,
  numbers: Iterable[int],
  ids: Iterable[str],
) -> list[Episode]:
  """Load the stored trials of a policy on tasks, and skip missing ones.

  Args:
    store: the stored episodes.
    spec: the policy.
    purpose: the purpose of the trials, such as "profile"; it decides their seeds.
    numbers: the numbers of the trials.
    ids: the ids of the tasks.
  """
  seeds = [seed_of(purpose, number) for number in numbers]
  return store.episodes(spec.key, {*itertools.product(ids, seeds)})


def load_initial(files: RouterFiles, view: View) -> Qwen2:
  """Load the untrained router that SFT starts from.

  The router has pretrained weights (`router.weights`), or the weights of the stage
  "pretrain", or random weights. Random and pretrained ones of our own get the same
  embedding row for all decision tokens (our choice). Then all models are equally
  probable at first, and past decisions do not predict the next decision.
  """
  config = files.config
  if config.router.weights:
    return router_weights.load_pretrained(view, files.mesh)
  if config.pretrain.epochs > 0:
    model = load_router(files, "pretrain")
  else:
    model = router_weights.build_model(config.router, config.seed)
  router_weights.set_rows(
    model, view.decision_ids, [view.decision_ids] * len(view.decision_ids)
  )
  return model


def load_router(files: RouterFiles, family: str, lam: float | None = None) -> Qwen2:
  """Load a trained router.

  Args:
    files: the routers of a training seed.
    family: the family of the router, see `RouterFiles.checkpoints`.
    lam: the cost weight of its training, if the family has one.

  Raises:
    ValueError: the training has not ended, or the checkpoint cannot be read.
  """
  with open_finished(files, family, lam) as checkpoints:
    shape = router_weights.find_shape(
      files.config.router, files.open_view().decision_ids
    )
    graphdef, like = nnx.split(router_weights.make_abstract_model(shape))
    shardings = split_parameters(like, files.mesh)
    like = jax.tree.map(
      lambda x, sharding: x.update(sharding=sharding), like, shardings
    )
    restored = checkpoints.restore({"params": nnx.to_pure_dict(like)})
  nnx.replace_by_pure_dict(like, restored["params"])
  return nnx.merge(graphdef, like)


@contextlib.contextmanager
def open_finished(
  files: RouterFiles, family: str, lam: float | None = None
) -> Iterator[Checkpoints]:
  """Open the checkpoints of a trained router, without reading its parameters.

  Args:
    files: the routers of a training seed.
    family: the family of the router, see `RouterFiles.checkpoints`.
    lam: the cost weight of its training, if the family has one.

  Raises:
    ValueError: the training has not ended.
  """
  directory = files.checkpoints(family, lam)
  with contextlib.closing(Checkpoints(directory)) as checkpoints:
    if not checkpoints.progress.get("finished"):
      stage = family if family in ("pretrain", SFT, BOPO) else "baselines"
      problem = f"{directory} has no finished router"
      raise ValueError(f"{problem}: run --stage={stage} first")
    yield checkpoints


def check_trained(files: RouterFiles) -> None:
  """Check that all routers of the evaluation are trained.

  Raises:
    ValueError: a training has not ended.
  """
  for spec in families.list_trained(files.config):
    if spec.family == CONDITIONED:
      load_heads(files)
    else:
      with open_finished(files, spec.family, spec.lam):
        pass


def open_learner(
  files: RouterFiles, learns: OnPolicy, tasks: Sequence[Task], rows: int
) -> Learner:
  """Make the learner of a family. Its router starts as the SFT router.

  Args:
    files: the routers of the training seed.
    learns: how the family learns.
    tasks: the tasks to learn from.
    rows: the most episodes that are live at once.
  """
  config = files.config
  sft = load_router(files, files.sft_family)
  view = files.open_view()
  ids = view.decision_ids
  dtype = config.router.dtype
  loss = functools.partial(learns.loss, config.bopo)
  trainer = Trainer(sft, loss, bopo_optimizer(config.bopo), ids, files.mesh, dtype)
  anchor = None
  if learns.anchored:
    anchor = ShardedRouter(sft, ids, files.mesh, dtype)
  batcher = Batcher(config, view, tasks, SAMPLED)
  return Learner(config.bopo, trainer, batcher, anchor, rows, config.seed)


def save_heads(files: RouterFiles, heads: Heads, vocabulary: Vocabulary) -> None:
  """Write the value heads of a training, and the vocabulary that they read with."""
  path = files.checkpoints("value") / HEADS
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_suffix(".tmp.npz")
  directions_HxC, *rest = vocabulary
  leaves = map(np.asarray, jax.tree.leaves(heads))
  np.savez(draft, *leaves, directions_HxC, json.dumps(rest))
  draft.replace(path)


def load_heads(files: RouterFiles) -> tuple[Heads, Vocabulary]:
  """Load the value heads of a training, and the vocabulary that they read with.

  Raises:
    ValueError: the file is missing or damaged, or another version has written it.
  """
  path = files.checkpoints("value") / HEADS
  models = len(files.config.models.names)
  try:
    with np.load(path) as stored:
      *leaves, directions_HxC, text = stored.values()
    for x in (*leaves, directions_HxC):
      check_finite(x, "heads")
    zeros_D = np.zeros(leaves[0].shape[1] - TERMS)
    scale = Scale(zeros_D, zeros_D, *np.zeros(3), fit.QUANTILES)
    draw = functools.partial(fit.draw_start, files.config.value, models=models, seed=0)
    expected, structure = jax.tree.flatten(jax.eval_shape(draw, scale))
    shapes = [*map(np.shape, expected), (BUCKETS, DIRECTIONS)]
    if [*map(np.shape, (*leaves, directions_HxC))] != shapes:
      raise ValueError("another version wrote it")
    heads = jax.tree.unflatten(structure, leaves)
    return heads, Vocabulary(directions_HxC, *TEXTS.validate_json(text.item()))
  except (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OSError,
    EOFError,
    zipfile.BadZipFile,
  ) as error:
    problem = str(error).partition("\n")[0]
    raise ValueError(
      f"{path} is missing or damaged ({problem}): delete it if it exists, then run "
      "--stage=value"
    ) from error


@dataclasses.dataclass
class Loader:
  """Build policies from their specs; keep the router that was loaded last.

  Attributes:
    files: the trained routers.
    rows: the largest number of episodes that are live at once.
    pair: the LLMs of the run; needed only for policies that ask a judge.
    store: the stored episodes; needed only for policies with a `share`.
    load: `load_router`; it keeps the router that was loaded last.
    predict_stored: `compute_stored`; it keeps the last result.
  """

  files: RouterFiles
  rows: int
  pair: Pair | None = None
  store: Store | None = None

  def __post_init__(self) -> None:
    """Let the loader keep one router, and its probabilities at stored decisions."""
    self.load = functools.lru_cache(1)(functools.partial(load_router, self.files))
    self.predict_stored = functools.lru_cache(1)(self.compute_stored)

  def build(self, spec: PolicySpec) -> Policy:
    """Build a policy from its spec.

    Raises:
      ValueError: its training has not ended.
    """
    row = FAMILIES[spec.family]
    config = self.files.config
    if row.needs == "router":
      return self._build_router(spec)
    if row.needs == "heads":
      heads, vocabulary = load_heads(self.files)
      weights = config.value.cost_weights
      values = ValueFunction(heads, weights, self.files.billing, row.pick)
      return ConditionedPolicy(spec, StateReader(vocabulary), values)
    if row.needs == "judge":
      judge = self.pair.judge(config.baselines.judge)
      models = len(config.models.names)
      return ZeroShotPolicy(spec, judge, config.router, self.files.tokenizer, models)
    if row.needs == "optimum":
      exact = Exact(config.models, config.env.max_steps)
      mu = FREE if spec.mu is None else spec.mu
      return RulePolicy(spec, exact.optimal_rule(mu, spec.cap.calls))
    if row.needs == "errors":
      return PrivilegedPolicy(spec)
    return RulePolicy(spec, row.rule)

  def _build_router(self, spec: PolicySpec) -> Policy:
    """Build the policy of a trained router."""
    files = self.files
    row = FAMILIES[spec.family]
    view = files.open_view(row.labels.answers)
    model = self.load(spec.family, spec.lam)
    rule = self._make_rule(spec)
    reader = Reader(model, view, view.logit_ids, self.rows, files.mesh)
    return row.policy(spec, reader, rule)

  def _make_rule(self, spec: PolicySpec) -> Threshold:
    """Make the threshold of p(LARGE) by which a trained router decides.

    If `spec.share` is set, the threshold is the quantile at which LARGE gets this share
    of the stored decisions.
    """
    usd_A = [price.input for price in prices_of(self.files.config.models)]
    if spec.share is None:
      return Threshold(spec.threshold, usd_A)
    p_NxA = self.predict_stored(spec.family, spec.lam)
    switch_N = Threshold(usd_A=usd_A).switch_thresholds(p_NxA)
    return Threshold(float(np.quantile(switch_N, 1.0 - spec.share)), usd_A)

  def compute_stored(self, family: str, lam: float | None) -> np.ndarray:
    """Compute a router's probabilities p_NxA at stored training decisions.

    Args:
      family: the family of the router.
      lam: the cost weight of the training; None if the family has none.
    """
    files = self.files
    labels = FAMILIES[family].labels
    view = files.open_view(labels.answers)
    episodes = load_threshold_episodes(self.store, files.config)
    dtype = files.config.router.dtype
    model = self.load(family, lam)
    router = ShardedRouter(model, view.logit_ids, files.mesh, dtype)
    batcher = Batcher(files.config, view, self.store.tasks("train"), labels)
    return softmax(batcher.compute(router.logits, episodes), "stored episodes")


def open_router(files: RouterFiles, rows: int) -> Policy:
  """Open the router that a run has trained.

  The budget-conditioned router is preferred, then BoPO's router with the first cost
  weight, then the SFT router. Routers that are not trained are passed over.

  Args:
    files: the routers of a run.
    rows: the largest number of episodes that are live at once.

  Raises:
    ValueError: no router is trained.
  """
  config = files.config
  first_lam = config.bopo.lam[0]
  router = families.trained_spec(config, SFT, config.sft.updates)
  with contextlib.closing(Checkpoints(files.checkpoints(BOPO, first_lam))) as bopo:
    if bopo.last_update:
      router = families.trained_spec(config, BOPO, bopo.last_update, first_lam)
  spec = dataclasses.replace(router, threshold=ARGMAX)
  conditioned = [s for s in families.list_specs(config) if s.family == CONDITIONED]
  if conditioned and files.checkpoints("value").exists():
    spec = conditioned[0]
  return Loader(files, rows).build(spec)
