"""Run the stages that collect episodes: setup, profile and references."""

import collections
from collections.abc import Iterable, Iterator
from pathlib import Path

from baar_jax.envs import base
from baar_jax.episode import Task
from baar_jax.mesh import exchange
from baar_jax.open import Loader, load_profiles, load_references
from baar_jax.paper.references import Profile, split_by_profile
from baar_jax.report.compare import label_policy
from baar_jax.rivals.families import FAMILIES
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import ALWAYS_LARGE, Planned
from baar_jax.router.view import adopt_tokenizer, text_pieces, train_tokenizer
from baar_jax.router.weights import check_pretrained
from baar_jax.run import Run


def setup(run: Run) -> None:
  """Install the environment's engine, and check the router's pretrained weights.

  If its tasks are missing, a line says how to get real or synthetic ones.

  Raises:
    ValueError: the weights, the engine or the tasks cannot be used.
  """

  def say(line: str) -> None:
    """Print a line with the name of this stage."""
    run.print(f"setup: {line}")

  if run.config.router.weights:
    check_pretrained(run.config.router)
  env = run.config.env
  engine = base.load(env.kind).engine
  if engine is None:
    say(f"{env.kind} needs no engine")
    return
  engine.install()
  say(f"the engine of {engine.name} is in {engine.directory}")
  data = engine.find_data(env.options.get("data", ""))
  if problem := engine.explain_missing(data):
    say(problem)
  else:
    # This call raises an error if the tasks cannot be used.
    run.tasks("train")


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
  train = load_profiles(run.store, config, "train")
  dev = load_profiles(run.store, config, "dev")
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
  """Collect the episodes of a stage from the run's source.

  Args:
    planned: the policies of the stage, each with the episodes that it needs.
    title: the text before the policy's label in each progress bar.
  """
  loader = Loader(run.files(), run.source.live_episodes)
  for item in planned:
    if item.jobs:
      label = label_policy(item.spec, FAMILIES)
      run.source.episodes(title + label, item, loader.build)


def list_texts(
  tasks: list[Task], profiles: dict[str, Profile], models: int
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
  profiles = load_profiles(run.store, config, "train", "dev")
  learning = run.tasks("train") + run.tasks("dev")
  tasks = split_by_profile(learning, profiles)
  play_all(run, jobs.list_references(config, tasks))
  trajectories = load_references(run.store, config, profiles)
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
