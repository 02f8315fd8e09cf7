"""Run the stages that make and use training data: profile to baselines, and export."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator

from baar_jax.config import SFTConfig
from baar_jax.episode import Task
from baar_jax.mesh import exchange
from baar_jax.router.tokenizer import adopt_tokenizer, train_tokenizer
from baar_jax.router.view import text_pieces
from baar_jax.router.weights import check_pretrained, save_qwen2, weights_directory
from baar_jax.run import Run
from baar_jax.train import dataset, jobs, losses
from baar_jax.train.checkpoint import load_router
from baar_jax.train.families import FAMILIES, Loader, list_trained
from baar_jax.train.fit import fit_stored
from baar_jax.train.jobs import ALWAYS_LARGE, BOPO, SFT, Planned

WARMUP = 10  # updates of the pretraining


def profile(run: Run) -> None:
  """Measure every task's difficulty and costs, and train or adopt the tokenizer."""
  config = run.config
  if config.router.weights:  # before hours of episodes
    check_pretrained(config.router)
  tasks = run.tasks("train") + run.tasks("dev")
  play_all(run, jobs.list_profile(config, tasks), "profile ")
  train = dataset.load_profiles(run.store, config, "train")
  dev = dataset.load_profiles(run.store, config, "dev")
  for task in tasks:
    if task.id not in train and task.id not in dev:
      run.print(f"left out: {task.id} has no trial of both boundaries")
  if run.is_main and not (run.tokenizer / "tokenizer.json").exists():
    models = len(config.models.names)
    if config.router.weights:
      weights = weights_directory(config.router.weights)
      adopt_tokenizer(weights, run.tokenizer, models)
    else:
      texts = list_texts(tasks, train, models)
      train_tokenizer(texts, config.router.vocab_size, run.tokenizer, models)
  exchange(None)  # waits until every process is here
  run.store.finish("profile")
  for split, profiles in (("train", train.values()), ("dev", dev.values())):
    mix = dict(collections.Counter(p.difficulty for p in profiles))
    inverted = sum(p.cost_small > p.cost_large for p in profiles)
    counts = f"{len(profiles)} tasks, {mix}, SMALL dearer than LARGE on {inverted}"
    run.print(f"profile of {split}: {counts}")


def play_all(run: Run, planned: Iterable[Planned], title: str = "") -> None:
  """Play the missing episodes of rules that a stage has declared."""
  loader = Loader(run.training(), run.live_episodes)
  for spec, wanted in planned:
    if wanted:
      run.play(f"{title}{spec.key}", spec, wanted, loader.build)


def list_texts(
  tasks: list[Task], profiles: dict[str, dataset.Profile], models: int
) -> Iterator[str]:
  """List the texts of profiled tasks' trials that a tokenizer is trained on."""
  for task in tasks:
    if task.id in profiles:
      trials = profiles[task.id]
      for episode in (*trials.small, *trials.large):
        yield from text_pieces(task, episode, models)


def references(run: Run) -> None:
  """Collect the trajectory tau* of every training task, for SFT, and dev task."""
  run.require("profile")
  config = run.config
  profiles = dataset.load_profiles(run.store, config, "train", "dev")
  learning = run.tasks("train") + run.tasks("dev")
  tasks = dataset.split_by_profile(learning, profiles)
  play_all(run, jobs.list_references(config, tasks))
  trajectories = dataset.load_references(run.store, config, profiles)
  run.store.finish("references")
  chosen = [trajectories[task.id] for task in tasks.hard]
  fallback = sum(episode.policy == ALWAYS_LARGE.key for episode in chosen)
  large = sum(episode.large_calls for episode in chosen)
  steps = sum(len(episode.steps) for episode in chosen)
  counts = (
    f"{len(chosen)} hard tasks, LARGE at {large / max(steps, 1):.0%} of their steps"
  )
  lack = f"{fallback} had no stratified success and take a LARGE trial of the profile"
  run.print(f"references: {counts}; {lack}")


def pretrain(run: Run) -> None:
  """Teach a router from random weights what tends to come next (our choice).

  It has read nothing, and rewards alone are too sparse to learn from which words
  foretell a difficult step. So at every decision of the stored episodes of the profile
  and the references it first predicts the tokens of the coming action and its result.
  """
  c = run.config.pretrain
  if c.epochs == 0:
    return
  run.require("references")
  episodes = dataset.load_pretraining_episodes(run.store, run.config)
  updates = max(1, c.epochs * len(episodes) // c.batch_episodes)
  settings = SFTConfig(
    updates,
    learning_rates=(c.learning_rate,),
    warmup_share=min(1.0, WARMUP / updates),
    weight_decay=1e-4,
  )
  for training in run.trainings():
    draw = functools.partial(
      dataset.draw_batches,
      episodes,
      c.batch_episodes,
      training.config.seed,
      newest_first=True,
    )
    fit_stored(training, "pretrain", losses.PRETRAINING, settings, draw)


def train_families(stage: str) -> Callable[[Run], None]:
  """Make the stage that trains its families of the table, as far as they are wanted."""

  def train(run: Run) -> None:
    specs = list_trained(run.config)
    names = dict.fromkeys(spec.family for spec in specs)
    wanted = [FAMILIES[name] for name in names if FAMILIES[name].stage == stage]
    if wanted:
      run.require("references")
    for training in run.trainings():
      for family in wanted:
        family.train(training)

  return train


def export(run: Run) -> None:
  """Write routers of the first training seed as Hugging Face directories.

  They are <run>/export/sft and <run>/export/bopo-lam<lam>; one that is there stays.
  """
  training = run.training()
  routers = [(SFT, None)]
  routers += [(BOPO, lam) for lam in run.config.bopo.lam]
  for family, lam in routers:
    name = family if lam is None else f"{family}-lam{lam:g}"
    directory = run.dir / "export" / name
    if not directory.exists():
      model = load_router(training, family, lam)
      tokenizer = run.tokenizer / "tokenizer.json"
      save_qwen2(model, directory, tokenizer, run.config.router.dtype)
    run.print(f"export: {directory}")
