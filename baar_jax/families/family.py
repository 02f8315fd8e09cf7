"""Define what a policy family is, and what the families of trained routers share.

`learn_stored` trains a router on stored episodes, `learn_on_policy` on its own ones.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import jax
import numpy as np
from flax import nnx

from baar_jax.config import Config
from baar_jax.episode import Episode, Task
from baar_jax.learn.batches import (
  ACTED,
  SAMPLED,
  Batcher,
  Encoder,
  Labels,
  draw_batches,
)
from baar_jax.learn.checkpoint import (
  WRITING,
  Checkpoints,
  ParameterFile,
)
from baar_jax.learn.trainer import ShardedRouter, Trainer, bopo_optimizer, sft_optimizer
from baar_jax.mesh import split_parameters
from baar_jax.paper.bopo import Learner, bopo
from baar_jax.paper.losses import bopo_loss, sft_batch_loss
from baar_jax.paper.sft import Progress, sft
from baar_jax.rollout.jobs import BOPO, SFT, Plan, list_updates
from baar_jax.rollout.policy import Policy
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.router.network import InputsEncoder
from baar_jax.router.policy import (
  ARGMAX,
  RouterPolicy,
  apply_threshold,
  switch_thresholds,
)
from baar_jax.router.qwen2 import softmax
from baar_jax.router.reader import TextEncoder
from baar_jax.router.view import read_tokenizer
from baar_jax.router.weights import load_pretrained
from baar_jax.run import (
  RouterFiles,
  Run,
  load_profiles,
  load_references,
  load_threshold_episodes,
  load_vocabulary,
)


@dataclasses.dataclass(frozen=True)
class Family:
  """A policy family: all policies of one rule or of one trained method.

  Attributes:
    name: the family's name in keys and in the configuration.
    label: its name in the report.
    is_rival: whether it is left out unless `baselines.rivals` names it.
    stage: the stage that trains it; "" if it does not learn.
  """

  name: str
  label: str
  is_rival: bool = False
  stage: ClassVar[str] = ""

  def points(self, config: Config) -> Iterable[PolicySpec]:
    """List the policies to evaluate, in the report's order."""
    return ()

  def open(self, spec: PolicySpec, files: RouterFiles) -> Policy:
    """Open a policy of the family, so that it can decide.

    Raises:
      ValueError: its training has not ended.
    """
    raise NotImplementedError

  def train(self, run: Run) -> None:
    """Train the family with each training seed, unless that was done."""

  def list_training(
    self, config: Config, train: Sequence[Task], dev: Sequence[Task]
  ) -> Iterable[Plan]:
    """List the episodes that the training plays, for the dry run."""
    return ()


def cap_each(
  config: Config,
  specs: Iterable[PolicySpec],
  is_calls: bool = True,
  is_usd: bool = True,
) -> Iterator[PolicySpec]:
  """Yield policies under each cap of the configuration.

  Args:
    config: supplies the caps.
    specs: the policies without a cap.
    is_calls: whether they are evaluated under caps on LARGE calls.
    is_usd: whether they are evaluated under caps on dollars.
  """
  caps = [Cap(calls=K) for K in config.evaluate.call_budgets * is_calls]
  caps += [Cap(usd=usd) for usd in config.evaluate.usd_budgets * is_usd]
  for cap in caps:
    for spec in specs:
      yield spec.under(cap)


def play_each(config: Config, specs: Iterable[PolicySpec]) -> Iterator[PolicySpec]:
  """Yield each policy without a cap and then under all caps."""
  for spec in specs:
    yield spec
    yield from cap_each(config, [spec])


@dataclasses.dataclass(frozen=True)
class RouterSpec(PolicySpec):
  """A policy of a trained router.

  Attributes:
    lam: the cost weight with which the router was trained.
    update: the last update of the router's training.
    seeds: the number of routers, of different training seeds, that all play as this
      policy; None for 1.
    threshold: LARGE is chosen if its probability reaches this value.
    share: the threshold is set so that LARGE's probability reaches the threshold in
      this share of stored decisions.
  """

  lam: float | None = None
  update: int | None = None
  seeds: int | None = None
  threshold: float | None = None
  share: float | None = None


SWITCHES = "switches"  # The key of the thresholds in `RouterFiles.kept`.


@dataclasses.dataclass(frozen=True)
class RouterFamily(Family):
  """A family whose policies decide by a trained router.

  A subclass that learns from stored episodes says in `prepare` from which; any other
  replaces `train`.

  Attributes:
    labels: what the router learns to answer.
    policy: the class of the policy.
  """

  labels: ClassVar[Labels] = ACTED
  policy: ClassVar[type[RouterPolicy]] = RouterPolicy

  def list_routers(self, config: Config) -> list[RouterSpec]:
    """List the routers of a training seed, without a threshold or a share.

    With several training seeds, one policy stands for the routers of all of them.
    """
    return [self.name_router(config, config.sft.updates)]

  def name_router(
    self, config: Config, update: int, lam: float | None = None
  ) -> RouterSpec:
    """Name a trained router.

    Args:
      config: the configuration.
      update: the number of updates of the training.
      lam: the cost weight of the training; None if the family has none.
    """
    seeds = config.train_seeds if config.train_seeds > 1 else None
    reads_cap = bool(config.router.weights)  # A text states the remaining cap.
    return RouterSpec(self.name, lam, update, seeds, cap_conditioned=reads_cap)

  def points(self, config: Config) -> Iterator[RouterSpec]:
    """Yield each router's policies without a cap, and the same ones under each cap.

    They are argmax, each threshold, and each share of LARGE. All trained routers get
    the same ones (our choice; the paper traces a frontier by λ or a threshold, by
    family).
    """
    for router in self.list_routers(config):
      points = []
      for threshold in dict.fromkeys((ARGMAX, *config.evaluate.thresholds)):
        points.append(dataclasses.replace(router, threshold=threshold))
      for share in config.evaluate.shares:
        points.append(dataclasses.replace(router, share=share))
      yield from points
      yield from cap_each(config, points)

  def prepare(self, run: Run, files: RouterFiles) -> "Lesson":
    """Make the lesson of a training seed whose training has not ended."""
    raise NotImplementedError

  def train(self, run: Run) -> None:
    """Train the router on stored episodes with each training seed."""
    for files in run.all_files():
      learn_stored(run, files, self)

  def open(self, spec: RouterSpec, files: RouterFiles) -> RouterPolicy:
    """Load a trained router, or take the one that was loaded last."""
    key = (self.name, spec.lam)
    if key not in files.kept:
      files.kept.clear()  # Free the memory of the router that was loaded last.
      encoder = open_encoder(files, self.labels)
      files.kept[key] = encoder, load_router(files, encoder, *key)
    encoder, model = files.kept[key]
    threshold = spec.threshold
    if spec.share is not None:
      if SWITCHES not in files.kept:
        files.kept[SWITCHES] = self.find_switches(files, encoder, model)
      threshold = float(np.quantile(files.kept[SWITCHES], 1.0 - spec.share))
    reader = encoder.open_reader(model, files.rows, files.mesh)
    pick = functools.partial(apply_threshold, threshold=threshold)
    return self.policy(spec, reader, pick)

  def find_switches(
    self, files: RouterFiles, encoder: Encoder, model: nnx.Module
  ) -> np.ndarray:
    """Find the threshold of each stored training decision; see `switch_thresholds`.

    With the threshold that is their quantile, LARGE gets a share of these decisions.

    Args:
      files: the routers of a training seed.
      encoder: the encoder of the router.
      model: the router.
    """
    episodes = load_threshold_episodes(files.store, files.config)
    router = ShardedRouter(model, encoder, files.mesh)
    tasks = files.store.tasks("train")
    batcher = Batcher(files.config, encoder, tasks, self.labels)
    logits_NxA = batcher.compute(router.logits, episodes)
    return switch_thresholds(softmax(logits_NxA, "stored episodes"))


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
    return TextEncoder(config, tokenizer, models, labels.answers)
  answers = labels.answers or models
  return InputsEncoder(load_vocabulary(files), answers, labels.describe_draft)


def load_initial(files: RouterFiles, encoder: Encoder) -> nnx.Module:
  """Load the router that SFT starts from: pretrained, or a network of random weights.

  Args:
    files: the routers of the training seed.
    encoder: the result of `open_encoder`.
  """
  if files.config.router.weights:
    return load_pretrained(encoder, files.mesh)
  return encoder.build(files.seed)


def load_router(
  files: RouterFiles, encoder: Encoder, family: str, lam: float | None = None
) -> nnx.Module:
  """Load a trained router.

  Args:
    files: the routers of a training seed.
    encoder: the result of `open_encoder` for what the router has learned.
    family: the family of the router, see `RouterFiles.checkpoints`.
    lam: the cost weight of its training, if the family has one.

  Raises:
    ValueError: the training has not ended, or the checkpoint cannot be read.
  """
  directory = files.checkpoints(family, lam)
  with contextlib.closing(Checkpoints(directory)) as checkpoints:
    if not checkpoints.progress.get("finished"):
      stage = family if family in (SFT, BOPO) else "baselines"
      problem = f"{directory} has no finished router"
      raise ValueError(f"{problem}: run --stage={stage} first")
    model = nnx.eval_shape(functools.partial(encoder.build, 0))
    graphdef, like = nnx.split(model)
    shardings = split_parameters(like, files.mesh)
    like = jax.tree.map(
      lambda x, sharding: x.update(sharding=sharding), like, shardings
    )
    restored = checkpoints.restore({"params": nnx.to_pure_dict(like)})
  nnx.replace_by_pure_dict(like, restored["params"])
  return nnx.merge(graphdef, like)


SAVE_EVERY = 50  # Updates on stored episodes between two checkpoints.


class Lesson(NamedTuple):
  """The stored episodes that a router learns from.

  Attributes:
    batches: yields the episodes of each update.
    dev: the episodes of the loss on dev; if there are none, the loss of the last update
      counts.
    labels: the labels to learn.
  """

  batches: Iterator[list[Episode]]
  dev: list[Episode]
  labels: Labels = ACTED


def divide(
  files: RouterFiles, family: str, labels: Labels, episodes: Sequence[Episode]
) -> Lesson:
  """Make the lesson of a rival, with the settings of SFT.

  Args:
    files: the routers of the training seed.
    family: the rival; it decides the draws.
    labels: the labels to learn.
    episodes: the episodes to learn from, of training and dev tasks.
  """
  dev_ids = {task.id for task in files.store.tasks("dev")}
  train = [e for e in episodes if e.task_id not in dev_ids]
  dev = [e for e in episodes if e.task_id in dev_ids]
  size = files.config.sft.batch_episodes
  batches = draw_batches(train, size, f"{files.seed}|{family}")
  return Lesson(batches, dev, labels)


def learn_stored(run: Run, files: RouterFiles, family: RouterFamily) -> None:
  """Train a router on stored episodes, from the last checkpoint if there is one.

  The last checkpoint has the parameters with the least loss on dev.

  Args:
    run: the run.
    files: the routers of the training seed.
    family: makes the lesson, if the training has not ended.

  Raises:
    ValueError: a metric is not finite. Then no checkpoint is saved.
  """
  directory = files.checkpoints(family.name)
  with contextlib.closing(Checkpoints(directory, create=True)) as checkpoints:
    progress = Progress(**checkpoints.progress)
    if progress.finished:
      return
    lesson = family.prepare(run, files)
    settings = files.config.sft
    encoder = open_encoder(files, lesson.labels)
    tasks = run.store.tasks("train") + run.store.tasks("dev")
    batcher = Batcher(files.config, encoder, tasks, lesson.labels)
    start = load_initial(files, encoder)
    optimizer = sft_optimizer(settings)
    trainer = Trainer(start, encoder, sft_batch_loss, optimizer, files.mesh)
    del start  # The trainer has a copy.
    best = ParameterFile(directory)
    done = checkpoints.last_update
    if done:
      state = trainer.state
      state = checkpoints.restore(state | {"best": state["params"]})
      best.write(state.pop("best"))
      trainer.load(state)
    updates = itertools.islice(enumerate(lesson.batches, 1), done, settings.updates)
    dev_batches = batcher.micro_batches(lesson.dev)
    with run.progress(family.label, settings.updates, done, "update") as bar:
      for metrics in sft(trainer, batcher, updates, dev_batches, settings, progress):
        number = progress.updates
        run.log(files, family.name, number, metrics, checkpoints.newest)
        bar.update()
        params = trainer.state["params"]
        if progress.best_update == number:
          with checkpoints.explain(WRITING):
            best.write(params)
        if not progress.finished and checkpoints.is_due(number, SAVE_EVERY):
          state = trainer.state | {"best": best.read(params)}
          checkpoints.save(number, state, **vars(progress))
          del state  # Free the best parameters again.
    trainer.optimizer_state = None  # Free its memory for the best parameters.
    checkpoints.save(number, {"params": best.read(params)}, **vars(progress))
  if lesson.dev:
    run.print(
      f"{family.label}, training seed {files.training_seed}: least dev loss "
      f"{progress.dev_loss:g} at update {progress.best_update} of {progress.updates}"
    )


SAVE_EVERY_ROLLOUTS = 5  # Updates on rollouts between two checkpoints.


@dataclasses.dataclass
class RolloutProgress:
  """Record the progress of a training on rollouts, for its checkpoints and the log.

  Attributes:
    episodes: the number of episodes rolled out so far.
    gradient_steps: the number of gradient steps so far.
    finished: whether the training has ended.
  """

  episodes: int = 0
  gradient_steps: int = 0
  finished: bool = False


class BoPO(RouterFamily):
  """The router that learns from its own episodes, with references (paper: BoPO).

  There is one router per cost weight. A method that learns from its own episodes in
  another way is a subclass that replaces some of the attributes.

  Attributes:
    update: the updates of a training.
    loss: the loss of a batch, given the settings of BoPO.
    anchored: whether the training starts from the SFT router, and the loss uses its
      logits. If not, it starts from the router before it.
    batches: the most rollout batches, as a multiple of BoPO's updates.
  """

  stage: ClassVar[str] = BOPO
  update: ClassVar[Callable] = staticmethod(bopo)
  loss: ClassVar[Callable] = staticmethod(bopo_loss)
  anchored: ClassVar[bool] = True
  batches: ClassVar[int] = 1

  def list_routers(self, config: Config) -> list[RouterSpec]:
    """List one router per cost weight."""
    updates = config.bopo.updates
    return [self.name_router(config, updates, lam) for lam in config.bopo.lam]

  def configure(self, run: Run, files: RouterFiles) -> RouterFiles:
    """Return the files of a training seed with the configuration of the training."""
    return files

  def train(self, run: Run) -> None:
    """Train a router with each training seed and each cost weight."""
    for files in run.all_files():
      files = self.configure(run, files)
      for lam in run.config.bopo.lam:
        learn_on_policy(run, files, self, lam)

  def list_training(
    self, config: Config, train: Sequence[Task], dev: Sequence[Task]
  ) -> Iterator[Plan]:
    """Yield the rollouts of each training, at most."""
    for lam in config.bopo.lam:
      for number in range(config.train_seeds):
        updates = list_updates(config, self.name, lam, train, number)
        for spec, jobs in itertools.islice(updates, self.batches * config.bopo.updates):
          yield {spec: jobs}


def learn_on_policy(run: Run, files: RouterFiles, family: BoPO, lam: float) -> None:
  """Train a router on its own episodes, from the last checkpoint if there is one.

  The training ends when it has taken `bopo.updates` gradient steps, at the latest after
  `family.batches` times as many updates.

  Args:
    run: the run.
    files: the routers of the training seed, with the configuration of the family.
    family: how the router learns.
    lam: the cost weight of the training.

  Raises:
    ValueError: a metric is not finite, or an update has no group.
  """
  config = files.config
  stage = BOPO if files.ablation else family.name
  last = config.bopo.updates * family.batches
  directory = files.checkpoints(family.name, lam)
  with contextlib.closing(Checkpoints(directory, create=True)) as checkpoints:
    progress = RolloutProgress(**checkpoints.progress)
    if progress.finished:
      return
    profiles = load_profiles(run.store, config, "train")
    references = load_references(run.store, config, profiles)
    tasks = [task for task in run.store.tasks("train") if task.id in references]
    learner = open_learner(files, family, tasks)
    done = checkpoints.last_update
    if done:
      learner.trainer.load(checkpoints.restore(learner.trainer.state))
    rollouts = list_updates(config, family.name, lam, tasks, files.training_seed)
    rollouts = itertools.islice(rollouts, done, last)
    for update in family.update(run.play, profiles, references, learner, rollouts):
      progress.episodes += update.episodes
      progress.gradient_steps += update.gradient_steps
      is_enough = progress.gradient_steps >= config.bopo.updates
      progress.finished = is_enough or update.number == last
      run.log(
        files,
        stage,
        update.number,
        update.metrics,
        checkpoints.newest,
        lam=lam,
        **vars(progress),
      )
      # While episodes wait, no checkpoint is saved. So a restarted training reads these
      # episodes from the store again.
      due = not update.waiting and checkpoints.is_due(
        update.number, SAVE_EVERY_ROLLOUTS
      )
      if progress.finished or due:
        checkpoints.save(update.number, learner.trainer.state, **vars(progress))
      if progress.finished:
        return


def open_learner(files: RouterFiles, family: BoPO, tasks: Sequence[Task]) -> Learner:
  """Make the learner of a family, with the router that it starts from.

  Args:
    files: the routers of the training seed.
    family: how the router learns.
    tasks: the tasks to learn from.
  """
  config = files.config
  encoder = open_encoder(files)
  if family.anchored:
    start = load_router(files, encoder, SFT)
  else:
    start = load_initial(files, encoder)
  loss = functools.partial(family.loss, config.bopo)
  optimizer = bopo_optimizer(config.bopo)
  trainer = Trainer(start, encoder, loss, optimizer, files.mesh)
  anchor = None
  if family.anchored:
    # The anchor never changes, so it is kept in the dtype of the computation.
    frozen = jax.tree.map(lambda x: x.astype(encoder.dtype), start)
    anchor = ShardedRouter(frozen, encoder, files.mesh)
  batcher = Batcher(config, encoder, tasks, SAMPLED)
  return Learner(config.bopo, trainer, batcher, anchor, files.rows, family.label)
