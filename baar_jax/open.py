"""Open what a run has stored: episodes, profiles, references, routers and policies."""

import contextlib
import dataclasses
import functools
import itertools
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from pydantic import TypeAdapter

from baar_jax.conditioned.heads import Heads, Nets, Scale
from baar_jax.conditioned.policy import ConditionedPolicy, ValueFunction
from baar_jax.config import Config
from baar_jax.episode import Episode, Task
from baar_jax.learn.batches import ACTED, SAMPLED, Batcher, Encoder, Labels
from baar_jax.learn.checkpoint import Checkpoints, RouterFiles
from baar_jax.learn.trainer import ShardedRouter, Trainer, bopo_optimizer
from baar_jax.llms.prices import open_billing, prices_of
from baar_jax.mesh import split_parameters
from baar_jax.paper.bopo import Learner
from baar_jax.paper.references import Profile, choose_references, profile_tasks
from baar_jax.rivals import families
from baar_jax.rivals.families import FAMILIES, OnPolicy
from baar_jax.rivals.foresight import Foresight
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
from baar_jax.rollout.rules import Policy, RulePolicy
from baar_jax.rollout.specs import PolicySpec, Purpose, seed_of
from baar_jax.router.inputs import StateReader, Vocabulary
from baar_jax.router.network import InputsEncoder
from baar_jax.router.policy import ARGMAX, Threshold
from baar_jax.router.qwen2 import check_finite, softmax
from baar_jax.router.reader import TextEncoder
from baar_jax.router.view import View, read_tokenizer
from baar_jax.router.weights import load_pretrained
from baar_jax.store import Store

HEADS = "value_heads.npz"  # The name of the file with the value heads.
DEFAULT = "default.npz"  # The name of the file with the default cost weight.
VOCABULARY = "vocabulary.npz"  # The name of the file with the vocabulary.
# The part of the vocabulary that is stored as text: idf, new_idf and rarities.
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


def load_value_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the episodes of training tasks that the value heads learn from.

  These are the first `profile.trials` trials of both boundaries, the stratified
  samples, and the exploration of hard and of other tasks (our choice). Without the
  exploration of others, only hard tasks would have episodes that mix the models. Then
  the heads would learn that a task with a mix of models is a task that can be solved.
  """
  samples = range(1, config.references.samples + 1)
  episodes = _load_samples(store, config, range(config.profile.trials), samples)
  for spec in exploration_specs(config):
    episodes += store.episodes(spec.key)
  return episodes


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


def load_initial(files: RouterFiles, encoder: Encoder) -> nnx.Module:
  """Load the router that SFT starts from: pretrained, or a network of random weights.

  Args:
    files: the routers of the training seed.
    encoder: the result of `open_encoder`.
  """
  if files.config.router.weights:
    return load_pretrained(encoder.view, files.mesh)
  return encoder.build(files.config.seed)


def load_router(
  files: RouterFiles, family: str, lam: float | None = None
) -> nnx.Module:
  """Load a trained router.

  Args:
    files: the routers of a training seed.
    family: the family of the router, see `RouterFiles.checkpoints`.
    lam: the cost weight of its training, if the family has one.

  Raises:
    ValueError: the training has not ended, or the checkpoint cannot be read.
  """
  with open_finished(files, family, lam) as checkpoints:
    row = FAMILIES.get(family, FAMILIES[SFT])
    build = functools.partial(open_encoder(files, row.labels).build, 0)
    graphdef, like = nnx.split(nnx.eval_shape(build))
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
      stage = family if family in (SFT, BOPO) else "baselines"
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
  """Make the learner of a family, with the router that it starts from.

  Args:
    files: the routers of the training seed.
    learns: how the family learns.
    tasks: the tasks to learn from.
    rows: the most episodes that are live at once.
  """
  config = files.config
  encoder = open_encoder(files)
  if learns.from_sft:
    start = load_router(files, files.sft_family)
  else:
    start = load_initial(files, encoder)
  loss = functools.partial(learns.loss, config.bopo)
  optimizer = bopo_optimizer(config.bopo)
  trainer = Trainer(start, encoder, loss, optimizer, files.mesh)
  anchor = None
  if learns.anchored:
    # The anchor never changes, so it is kept in the dtype of the computation.
    frozen = jax.tree.map(lambda x: x.astype(encoder.dtype), start)
    anchor = ShardedRouter(frozen, encoder, files.mesh)
  batcher = Batcher(config, encoder, tasks, SAMPLED)
  return Learner(config.bopo, trainer, batcher, anchor, rows)


def open_encoder(files: RouterFiles, labels: Labels = ACTED) -> Encoder:
  """Open the encoder of a router: of texts with pretrained weights, else of inputs.

  Args:
    files: the routers of a training seed.
    labels: what the router learns.

  Raises:
    ValueError: the tokenizer or the vocabulary cannot be read.
  """
  config = files.config.router
  models = len(files.config.models.names)
  if config.weights:
    tokenizer = read_tokenizer(files.tokenizer)
    return TextEncoder(View(config, tokenizer, models, labels.answers))
  answers = labels.answers or models
  return InputsEncoder(load_vocabulary(files), answers, labels.rewrite is not None)


def save_vocabulary(directory: Path, vocabulary: Vocabulary) -> None:
  """Write the vocabulary of the run in a directory."""
  texts = json.dumps([vocabulary.idf, vocabulary.new_idf, vocabulary.rarities])
  arrays = (vocabulary.directions_HxC, vocabulary.mean_D, vocabulary.spread_D)
  _save_arrays(directory / VOCABULARY, *arrays, texts)


def load_vocabulary(files: RouterFiles) -> Vocabulary:
  """Load the statistics of stored episodes that a run has learned.

  Raises:
    ValueError: the file is missing or damaged.
  """
  with _open_arrays(files.directory / VOCABULARY, "references") as arrays:
    directions_HxC, mean_D, spread_D, texts = arrays
    return Vocabulary(
      directions_HxC, *TEXTS.validate_json(texts.item()), mean_D, spread_D
    )


def save_heads(files: RouterFiles, heads: Heads) -> None:
  """Write the value heads of a training."""
  path = files.checkpoints("value") / HEADS
  _save_arrays(path, *map(np.asarray, jax.tree.leaves(heads)))


def load_heads(files: RouterFiles) -> Heads:
  """Load the value heads of a training.

  Raises:
    ValueError: the file is missing or damaged.
  """
  with _open_arrays(files.checkpoints("value") / HEADS, "value") as leaves:
    # Each of the two networks has three layers of weights and a bias.
    layers = [*zip(leaves[:12:2], leaves[1:12:2])]
    return Heads(Nets(layers[:3], layers[3:]), Scale(*leaves[12:]))


def save_default(files: RouterFiles, cost_weight: float) -> None:
  """Write the cost weight that the budget-conditioned router uses by default.

  The file is beside the value heads, and has one number (float64) as NumPy stores it.
  """
  path = files.checkpoints("value") / DEFAULT
  _save_arrays(path, np.array(cost_weight))


def load_default(files: RouterFiles) -> float:
  """Load the default cost weight; without the file it is the smallest one.

  Raises:
    ValueError: the file is damaged.
  """
  path = files.checkpoints("value") / DEFAULT
  if not path.exists():
    return min(files.config.value.cost_weights)
  with _open_arrays(path, "evaluate") as arrays:
    return float(np.array(*arrays))


def _save_arrays(path: Path, *arrays: np.ndarray | str) -> None:
  """Write arrays to a file, which gets its name when it is complete."""
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_suffix(".tmp.npz")
  np.savez(draft, *arrays)
  draft.replace(path)


@contextlib.contextmanager
def _open_arrays(path: Path, stage: str) -> Iterator[list[np.ndarray]]:
  """Read the arrays of a file.

  Args:
    path: the file.
    stage: the stage that writes it.

  Raises:
    ValueError: the file is missing, or this or the block that reads it has failed.
  """
  try:
    with np.load(path) as stored:
      arrays = [*stored.values()]
    for x in arrays:
      if x.shape or x.dtype.kind != "U":
        check_finite(x, "arrays")
    yield arrays
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
      f"--stage={stage}"
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
      heads = load_heads(self.files)
      weights = config.value.cost_weights
      values = ValueFunction(heads, weights, open_billing(config.models))
      reader = StateReader(load_vocabulary(self.files))
      return ConditionedPolicy(spec, reader, values)
    if row.needs == "judge":
      judge = self.pair.judge(config.baselines.judge)
      models = len(config.models.names)
      return ZeroShotPolicy(spec, judge, models)
    if row.needs == "foresight":
      return RulePolicy(spec, Foresight(config).make_rule(spec))
    return RulePolicy(spec, row.rule)

  def _build_router(self, spec: PolicySpec) -> Policy:
    """Build the policy of a trained router."""
    files = self.files
    row = FAMILIES[spec.family]
    encoder = open_encoder(files, row.labels)
    model = self.load(spec.family, spec.lam)
    rule = self._make_rule(spec)
    reader = encoder.open_reader(model, self.rows, files.mesh)
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
    encoder = open_encoder(files, labels)
    episodes = load_threshold_episodes(self.store, files.config)
    router = ShardedRouter(self.load(family, lam), encoder, files.mesh)
    batcher = Batcher(files.config, encoder, self.store.tasks("train"), labels)
    return softmax(batcher.compute(router.logits, episodes), "stored episodes")


def open_router(files: RouterFiles, rows: int) -> Policy:
  """Open the router that a run has trained.

  The budget-conditioned router with its default cost weight is preferred, then BoPO's
  router with the first cost weight, then the SFT router. Routers that are not trained
  are passed over.

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
    spec = dataclasses.replace(conditioned[0], cost_weight=load_default(files))
  return Loader(files, rows).build(spec)
