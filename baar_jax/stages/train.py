"""Run the stages from setup to baselines, which train routers, and export."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from baar_jax.config import SFTConfig
from baar_jax.envs import table
from baar_jax.episode import SPLITS, Task
from baar_jax.learn.checkpoint import load_router
from baar_jax.mesh import exchange
from baar_jax.paper import losses
from baar_jax.paper import references as dataset
from baar_jax.paper.sft import fit_stored
from baar_jax.report.texts import label_policy
from baar_jax.rivals.families import FAMILIES, Loader, list_trained
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import ALWAYS_LARGE, BOPO, SFT, Planned
from baar_jax.router.view import adopt_tokenizer, text_pieces, train_tokenizer
from baar_jax.router.weights import check_pretrained, save_qwen2
from baar_jax.run import Run


def setup(run: Run) -> None:
  """Install the environment's engine, and check the router's pretrained weights.

  Synthetic tasks are generated if they are missing. Files that exist already are kept.

  Raises:
    ValueError: the weights, the engine or the tasks are missing or cannot be used.
  """

  def say(line: str) -> None:
    """Print a line with the name of this stage."""
    run.print(f"setup: {line}")

  router = run.config.router
  if router.weights:
    check_pretrained(router)
  env = run.config.env
  engine = table.load(env.kind).engine
  if engine is None:
    say(f"{env.kind} needs no engine")
  else:
    sizes = [getattr(env, f"{split}_tasks") for split in SPLITS]
    engine.set_up(env.options.get("data", ""), sizes, say)
    # This call raises an error if the tasks cannot be used.
    run.tasks("train")


# Number of gradient steps at the start of pretraining in which the learning rate rises.
WARMUP = 10


def profile(run: Run) -> None:
  """Measure every task's difficulty and costs, and make the tokenizer.

  Both boundary policies play every training and dev task. The tokenizer is that of the
  pretrained weights. Without weights it is trained on the texts of these episodes.
  """
  config = run.config
  # Check the weights first, because playing the episodes can take hours.
  if config.router.weights:
    check_pretrained(config.router)
  tasks = run.tasks("train") + run.tasks("dev")
  play_all(run, jobs.list_profile(config, tasks), "profile ")
  train = dataset.load_profiles(run.store, config, "train")
  dev = dataset.load_profiles(run.store, config, "dev")
  for task in tasks:
    if task.id not in train and task.id not in dev:
      run.print(f"left out: {task.id} lacks a trial of always-SMALL or always-LARGE")
  if run.is_main and not (run.tokenizer / "tokenizer.json").exists():
    models = len(config.models.names)
    if config.router.weights:
      adopt_tokenizer(Path(config.router.weights), run.tokenizer, models)
    else:
      texts = list_texts(tasks, train, models)
      train_tokenizer(texts, config.router.vocab_size, run.tokenizer, models)
  # This call waits until every process has reached this line, so that all of them have
  # finished the stage.
  exchange(None)
  run.store.finish("profile")
  for split, profiles in (("train", train.values()), ("dev", dev.values())):
    mix = dict(collections.Counter(p.difficulty for p in profiles))
    inverted = sum(p.cost_small > p.cost_large for p in profiles)
    counts = f"{len(profiles)} tasks, {mix}, SMALL costlier than LARGE on {inverted}"
    run.print(f"profile of {split}: {counts}")


def play_all(run: Run, planned: Iterable[Planned], title: str = "") -> None:
  """Play those episodes of a stage that are not stored yet.

  Args:
    planned: the policies of the stage, each with the episodes that it needs.
    title: the text before the policy's label in each progress bar.
  """
  loader = Loader(run.training(), run.live_episodes)
  for spec, declared in planned:
    if declared:
      label = label_policy(spec, FAMILIES)
      run.play(title + label, spec, declared, loader.build)


def list_texts(
  tasks: list[Task], profiles: dict[str, dataset.Profile], models: int
) -> Iterator[str]:
  """Yield the texts that a tokenizer is trained on: those of the profile's episodes.

  Args:
    tasks: the tasks, in order; those without a profile are skipped.
    profiles: the profiles by task id, with the episodes of both boundary policies.
    models: the number of models that the router chooses from.
  """
  for task in tasks:
    if task.id in profiles:
      trials = profiles[task.id]
      for episode in (*trials.small, *trials.large):
        yield from text_pieces(task, episode, models)


def references(run: Run) -> None:
  """Collect the reference trajectory of every training and dev task.

  BoSFT imitates these trajectories, and BoPO compares its episodes with them (paper:
  tau*).
  """
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
  trials = f"{fallback} without a successful sample take a trial of always-LARGE"
  run.print(f"references: {counts}; {trials}")


def pretrain(run: Run) -> None:
  """Train a router with random weights to predict the texts of episodes (our choice).

  This pretraining takes the place of the text that Qwen2.5 has read. Rewards alone are
  too sparse to learn which words announce a difficult step. The data are the episodes
  that the stages profile and references have stored. At every decision the router
  learns to predict the tokens of the next action and of its result. Rewards,
  difficulties and the choice of references are not used.
  """
  config = run.config.pretrain
  if config.epochs == 0:
    return
  run.require("references")
  episodes = dataset.load_pretraining_episodes(run.store, run.config)
  updates = max(1, config.epochs * len(episodes) // config.batch_episodes)
  settings = SFTConfig(
    updates,
    learning_rates=(config.learning_rate,),
    warmup_share=min(1.0, WARMUP / updates),
    weight_decay=1e-4,
  )
  for training in run.trainings():
    draw = functools.partial(
      dataset.draw_batches,
      episodes,
      config.batch_episodes,
      training.config.seed,
      newest_first=True,
    )
    fit_stored(training, "pretrain", losses.PRETRAINING, settings, draw)


def train_families(stage: str) -> Callable[[Run], None]:
  """Make the function that runs the training stage of this name.

  Args:
    stage: "value", "sft", "bopo" or "baselines".

  Returns:
    A function of a run. It trains the families of rivals/families.py that belong to the
      stage and that the configuration asks for.
  """

  def train(run: Run) -> None:
    """Train the families of the stage, once with each training seed."""
    specs = list_trained(run.config)
    names = dict.fromkeys(spec.family for spec in specs)
    families = [FAMILIES[name] for name in names if FAMILIES[name].stage == stage]
    if families:
      run.require("references")
    for training in run.trainings():
      for family in families:
        family.train(training)

  return train


def export(run: Run) -> None:
  """Write the first training seed's BoSFT and BoPO routers as Hugging Face directories.

  The directories are <run>/export/sft and, for each `lam`, <run>/export/bopo-lam<lam>.
  A directory that exists is kept.
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
