"""Run the stages setup, profile, references and export."""

import collections
from pathlib import Path

from baar_jax.envs import base
from baar_jax.families.family import load_router, open_encoder
from baar_jax.families.table import open_with
from baar_jax.mesh import exchange
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import ALWAYS_LARGE, BOPO, SFT
from baar_jax.router.inputs import learn_vocabulary
from baar_jax.router.view import adopt_tokenizer
from baar_jax.router.weights import check_pretrained, save_qwen2
from baar_jax.run import (
  VOCABULARY,
  Run,
  load_profiles,
  load_references,
  load_value_episodes,
  save_vocabulary,
)


def setup(run: Run) -> None:
  """Install the environment's engine, and check the router's pretrained weights.

  If its tasks are missing, a line says how to get real or synthetic ones.

  Raises:
    ValueError: the weights, the engine or the tasks cannot be used.
  """

  if run.config.router.weights:
    check_pretrained(run.config.router)
  env = run.config.env
  engine = base.load(env.kind).engine
  if engine is None:
    run.print(f"setup: {env.kind} needs no engine")
    return
  engine.install()
  run.print(f"setup: the engine of {engine.name} is in {engine.directory}")
  data = engine.find_data(env.options.get("data", ""))
  if problem := engine.explain_missing(data):
    run.print(f"setup: {problem}")
  else:
    # This call raises an error if the tasks cannot be used.
    run.tasks("train")


def profile(run: Run) -> None:
  """Measure every task's difficulty and costs, and copy the weights' tokenizer.

  Both boundary policies play every training and dev task.
  """
  config = run.config
  # Check the weights first, because playing the episodes can take hours.
  if config.router.weights:
    check_pretrained(config.router)
  tasks = run.tasks("train") + run.tasks("dev")
  run.play("profile", jobs.list_profile(config, tasks), open_with(run.files()))
  for split in ("train", "dev"):
    profiles = load_profiles(run.store, config, split)
    for task in run.tasks(split):
      if task.id not in profiles:
        run.print(f"left out: {task.id} lacks a trial of always-SMALL or always-LARGE")
    mix = dict(collections.Counter(p.difficulty for p in profiles.values()))
    run.print(f"profile of {split}: {len(profiles)} tasks, {mix}")
  weights = config.router.weights
  tokenizer = run.files().tokenizer
  if run.is_main and weights and not (tokenizer / "tokenizer.json").exists():
    adopt_tokenizer(Path(weights), tokenizer, len(config.models.names))
  # This call waits until every process has reached this line, so that all of them have
  # finished the stage.
  exchange(None)
  run.store.finish("profile")


def references(run: Run) -> None:
  """Collect the reference trajectory of every training and dev task (paper: tau*).

  BoSFT imitates these trajectories, and BoPO compares its episodes with them. The
  vocabulary of facts, offers and words is learned from all episodes of training tasks.
  """
  run.require("profile")
  config = run.config
  profiles = load_profiles(run.store, config, "train", "dev")
  learning = run.tasks("train") + run.tasks("dev")
  is_hard = {id_: profile.hard for id_, profile in profiles.items()}
  plan = jobs.list_references(config, learning, is_hard)
  run.play("references", plan, open_with(run.files()))
  trajectories = load_references(run.store, config, profiles)
  update_vocabulary(run)
  # Wait until the main process has written the file.
  exchange(None)
  run.store.finish("references")
  chosen = [trajectories[id_] for id_ in profiles if is_hard[id_]]
  fallback = sum(episode.policy == ALWAYS_LARGE.key for episode in chosen)
  trials = f"{fallback} without a successful sample take a trial of always-LARGE"
  run.print(f"references: {len(chosen)} hard tasks; {trials}")


def update_vocabulary(run: Run) -> None:
  """Learn the vocabulary from the stored episodes, unless routers depend on it.

  Routers are trained with one vocabulary. So it is learned again only before them, or
  after their checkpoints were deleted.

  Raises:
    ValueError: there are checkpoints, and no vocabulary.
  """
  path = run.dir / VOCABULARY
  checkpoints = run.dir / "checkpoints"
  if checkpoints.exists():
    if not path.exists():
      problem = f"{path} is missing, and trained routers depend on it"
      raise ValueError(f"{problem}: restore it, or delete {checkpoints} to train again")
  elif run.is_main:
    tasks = {task.id: task for task in run.store.tasks("train")}
    episodes = load_value_episodes(run.store, run.config)
    save_vocabulary(run.dir, learn_vocabulary(tasks, episodes))


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
  encoder = open_encoder(files)
  routers = [(SFT, None)]
  routers += [(BOPO, lam) for lam in run.config.bopo.lam]
  for family, lam in routers:
    directory = run.dir / "export" / files.checkpoints(family, lam).name
    if not directory.exists():
      model = load_router(files, encoder, family, lam)
      save_qwen2(model, directory, files.tokenizer, run.config.router.dtype)
    run.print(f"export: {directory}")
