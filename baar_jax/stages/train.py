"""Run the stages that train routers: value, sft, bopo, baselines; export."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from baar_jax.conditioned import fit
from baar_jax.config import ABLATIONS, Config
from baar_jax.episode import Episode
from baar_jax.learn.batches import ACTED, Batcher, Labels, draw_batches
from baar_jax.learn.checkpoint import (
  WRITING,
  Checkpoints,
  ParameterFile,
  check_metrics,
)
from baar_jax.learn.trainer import Trainer, sft_optimizer
from baar_jax.mesh import exchange
from baar_jax.open import (
  HEADS,
  Loader,
  RouterFiles,
  load_initial,
  load_profiles,
  load_references,
  load_router,
  load_value_episodes,
  load_vocabulary,
  open_encoder,
  open_learner,
  save_heads,
)
from baar_jax.paper.losses import sft_batch_loss
from baar_jax.paper.references import (
  Trials,
  mean_large_usd,
  profile_tasks,
)
from baar_jax.paper.sft import Progress, mix_batches, sft
from baar_jax.rivals.families import FAMILIES, OnPolicy, list_trained
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import BOPO, SFT
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.weights import save_qwen2
from baar_jax.run import Run

SAVE_EVERY = 50  # The number of updates on stored episodes between two checkpoints.
SAVE_EVERY_ROLLOUTS = 5  # The number of updates on rollouts between two checkpoints.


class Lesson(NamedTuple):
  """Describe a training on stored episodes.

  Attributes:
    stage: the name of the training in the log.
    draw: returns a new iterator over batches of episodes, one batch for each update.
    dev: the episodes of the loss on dev; if there are none, the loss of the last update
      counts.
    labels: the labels to learn.
  """

  stage: str
  draw: Callable[[], Iterator[list[Episode]]]
  dev: list[Episode]
  labels: Labels = ACTED


def value(run: Run, load: Callable = load_value_episodes) -> None:
  """Fit the value heads of the budget-conditioned router with each training seed.

  Raises:
    ValueError: a loss is not finite.
  """
  config = run.config.value
  if config.updates == 0:
    return
  run.require("references")
  tasks = {task.id: task for task in run.store.tasks("train")}
  models = len(run.config.models.names)
  unfitted = []
  for files in run.all_files():
    # All processes must agree: either all of them fit the heads, or none does.
    if not all(exchange((files.checkpoints("value") / HEADS).exists())):
      unfitted.append(files)
  if not unfitted:
    return
  episodes = load(run.store, run.config)
  unit_usd = mean_large_usd(profile_tasks(tasks, episodes).values())
  # All training seeds learn from the same transitions, so they are read once.
  vocabulary = load_vocabulary(run.files())
  scale, data = fit.prepare(vocabulary, tasks, episodes, unit_usd)
  for files in unfitted:
    seed = files.config.seed
    heads = fit.draw_start(config, scale, models, seed)
    with run.progress("value", config.updates, 0, "update") as bar:
      for done, fitted, loss in fit.fit_heads(heads, data, config, seed):
        run.log(**files.marks, stage="value", update=done, loss=loss)
        check_metrics("value", done, {"loss": loss})
        bar.update(done - bar.n)
        heads = fitted
    if run.is_main:
      save_heads(files, heads)
    exchange(None)  # Wait until the main process has written the file.


def bosft(run: Run) -> None:
  """Train the SFT router on the reference trajectories, with each training seed."""
  run.require("references")
  for files in run.all_files():
    imitate_references(run, files)


def imitate_references(run: Run, files: RouterFiles) -> None:
  """Train the SFT router on the reference trajectories (paper: BoSFT).

  Raises:
    ValueError: references are missing, or a metric is not finite.
  """
  prepare = functools.partial(_prepare_sft, run, files)
  train_stored(run, files, files.sft_family, prepare)


def _prepare_sft(run: Run, files: RouterFiles) -> Lesson:
  """Load the references that the SFT router imitates.

  The loss on dev is measured on one batch of references of dev tasks, with the same
  share of hard tasks as in training.
  """
  settings = files.config.sft
  seed = files.config.seed
  train = _load_reference_pools(run, files.config, "train")
  dev = _load_reference_pools(run, files.config, "dev")
  draw = functools.partial(mix_batches, *train, settings.batch_episodes, seed=seed)
  # The dev batch has at least as many episodes as there are dev tasks.
  dev_episodes = max(settings.batch_episodes, sum(map(len, dev)))
  dev_batch = next(mix_batches(*dev, dev_episodes, seed=seed))
  return Lesson(SFT, draw, dev_batch)


def _load_reference_pools(
  run: Run, config: Config, split: str
) -> tuple[list[Episode], list[Episode]]:
  """Load the references of a split: those of hard tasks, and those of other tasks."""
  profiles = load_profiles(run.store, config, split)
  hard = []
  rest = []
  for id_, episode in load_references(run.store, config, profiles).items():
    pool = hard if profiles[id_].hard else rest
    pool.append(episode)
  return hard, rest


def bopo(run: Run) -> None:
  """Train BoPO's router with each cost weight and each training seed."""
  run.require("references")
  for files in run.all_files():
    for lam in run.config.bopo.lam:
      train_rollouts(run, files, PolicySpec(BOPO, lam=lam))


def baselines(run: Run) -> None:
  """Train the rivals and ablations that the configuration names."""
  for files in run.all_files():
    for spec in list_trained(run.config):
      family = FAMILIES[spec.family]
      if family.stage != "baselines":
        continue
      run.require("references")
      if isinstance(family.learns, OnPolicy):
        train_rollouts(run, files, spec)
      else:
        prepare = functools.partial(_prepare_rival, run, files, spec.family)
        train_stored(run, files, spec.family, prepare)


def _prepare_rival(run: Run, files: RouterFiles, name: str) -> Lesson:
  """Collect and label the episodes that the router of a rival imitates.

  The settings are those of SFT. The loss on dev is measured on the episodes of dev
  tasks.

  Args:
    name: the family of the rival.
  """
  config = files.config
  learns = FAMILIES[name].learns
  tasks = run.store.tasks("train") + run.store.tasks("dev")
  loader = Loader(files, run.source.live_episodes)
  intermediate = []
  for planned in learns.list_jobs(config, tasks):
    title = f"{FAMILIES[name].label}, trials of model {planned.spec.rank}"
    intermediate.append(run.source.episodes(title, [planned], loader.build))
  trials = Trials(
    load_profiles(run.store, config, "train", "dev"),
    run.store.episodes(jobs.stratified_spec(config).key),
    intermediate,
    len(config.models.names),
  )
  labels, episodes = learns.learn(trials)
  dev_ids = {task.id for task in run.store.tasks("dev")}
  train = [e for e in episodes if e.task_id not in dev_ids]
  dev = [e for e in episodes if e.task_id in dev_ids]
  seed = f"{config.seed}|{name}"
  draw = functools.partial(draw_batches, train, config.sft.batch_episodes, seed)
  return Lesson(name, draw, dev, labels)


def train_stored(
  run: Run, files: RouterFiles, family: str, prepare: Callable[[], Lesson]
) -> None:
  """Train a router on stored episodes, from the last checkpoint if there is one.

  The last checkpoint has the parameters with the least loss on dev.

  Args:
    files: the routers of the training seed.
    family: the family of the router, which names its directory.
    prepare: makes the lesson; it is called only if the training has not ended.

  Raises:
    ValueError: a metric is not finite. Then no checkpoint is saved.
  """
  directory = files.checkpoints(family)
  with contextlib.closing(Checkpoints(directory, create=True)) as checkpoints:
    progress = Progress(**checkpoints.progress)
    if progress.finished:
      return
    lesson = prepare()
    settings = files.config.sft
    trainer, batcher = _open_trainer(run, files, lesson)
    best = ParameterFile(directory)
    done = checkpoints.last_update
    if done:
      state = trainer.state
      state = checkpoints.restore(state | {"best": state["params"]})
      best.write(state.pop("best"))
      trainer.load(state)
    updates = itertools.islice(enumerate(lesson.draw(), 1), done, settings.updates)
    dev_batches = batcher.micro_batches(lesson.dev)
    name = jobs.label_family(lesson.stage)
    with run.progress(name, settings.updates, done, "update") as bar:
      for metrics in sft(trainer, batcher, updates, dev_batches, settings, progress):
        number = progress.updates
        check_metrics(lesson.stage, number, metrics, checkpoints.newest)
        run.log(
          **files.marks,
          stage=lesson.stage,
          update=number,
          updates=settings.updates,
          learning_rate=settings.learning_rate,
          **metrics,
        )
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
      f"{jobs.label_family(family)}, training seed {files.training_seed}: "
      f"least dev loss {progress.dev_loss:g} at update {progress.best_update} of "
      f"{progress.updates}"
    )


def _open_trainer(
  run: Run, files: RouterFiles, lesson: Lesson
) -> tuple[Trainer, Batcher]:
  """Make a trainer with a copy of the router that the training starts from."""
  encoder = open_encoder(files, lesson.labels)
  tasks = run.store.tasks("train") + run.store.tasks("dev")
  batcher = Batcher(files.config, encoder, tasks, lesson.labels)
  model = load_initial(files, encoder)
  optimizer = sft_optimizer(files.config.sft)
  trainer = Trainer(model, encoder, sft_batch_loss, optimizer, files.mesh)
  return trainer, batcher


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


def train_rollouts(run: Run, files: RouterFiles, spec: PolicySpec) -> None:
  """Train a router on its own episodes, from the last checkpoint if there is one.

  The training ends when it has taken `bopo.updates` gradient steps, at the latest after
  `OnPolicy.batches` times as many updates.

  Args:
    files: the routers of the training seed.
    spec: a policy of the family and the cost weight to train.

  Raises:
    ValueError: a metric is not finite, or an update has no group.
  """
  family = spec.family
  learns = FAMILIES[family].learns
  ablation = family if family in ABLATIONS else ""
  config = learns.configure(files.config)
  files = dataclasses.replace(files, config=config, ablation=ablation)
  stage = BOPO if ablation else family
  if files.sft_family != SFT:
    imitate_references(run, files)
  directory = files.checkpoints(family, spec.lam)
  last = config.bopo.updates * learns.batches
  with contextlib.closing(Checkpoints(directory, create=True)) as checkpoints:
    progress = RolloutProgress(**checkpoints.progress)
    if progress.finished:
      return
    profiles = load_profiles(run.store, config, "train")
    references = load_references(run.store, config, profiles)
    tasks = [task for task in run.store.tasks("train") if task.id in references]
    learner = open_learner(files, learns, tasks, run.source.live_episodes)
    done = checkpoints.last_update
    if done:
      learner.trainer.load(checkpoints.restore(learner.trainer.state))
    rollouts = jobs.list_updates(config, spec, tasks, files.training_seed)
    rollouts = itertools.islice(rollouts, done, last)
    for update in learns.update(run.source, profiles, references, learner, rollouts):
      progress.episodes += update.episodes
      progress.gradient_steps += update.gradient_steps
      check_metrics(stage, update.number, update.metrics, checkpoints.newest)
      is_enough = progress.gradient_steps >= config.bopo.updates
      progress.finished = is_enough or update.number == last
      run.log(
        **files.marks,
        stage=stage,
        lam=spec.lam,
        update=update.number,
        **vars(progress),
        **update.metrics,
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


def export(run: Run) -> None:
  """Write the first training seed's BoSFT and BoPO routers as Hugging Face directories.

  The directories are <run>/export/sft and, for each `lam`, <run>/export/bopo-lam<lam>.
  A directory that exists is kept.

  Raises:
    ValueError: the routers are networks on inputs, or are not trained.
  """
  if not run.config.router.weights:
    problem = "only text routers have Hugging Face's format"
    raise ValueError(f"{problem}: train with --config.router.weights set")
  files = run.files()
  routers = [(SFT, None)]
  routers += [(BOPO, lam) for lam in run.config.bopo.lam]
  for family, lam in routers:
    directory = run.dir / "export" / files.checkpoints(family, lam).name
    if not directory.exists():
      model = load_router(files, family, lam)
      save_qwen2(model, directory, files.tokenizer, run.config.router.dtype)
    run.print(f"export: {directory}")
