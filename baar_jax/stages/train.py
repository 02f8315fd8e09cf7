"""Stages setup to baselines: what routers learn from, and their training; and export."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

import pandas as pd

from baar_jax.config import PROFILE_SEEDS, REFERENCE_SEEDS, SFTConfig, compared_lam
from baar_jax.envs import engines
from baar_jax.episode import SPLITS, Episode, Task
from baar_jax.mesh import exchange
from baar_jax.rollout import policies
from baar_jax.rollout.policies import STRATIFIED, Job, rule_policy, samples_name
from baar_jax.router.view import adopt_tokenizer, text_pieces, train_tokenizer
from baar_jax.router.weights import save_qwen2, weights_directory
from baar_jax.run import Run
from baar_jax.train import dataset
from baar_jax.train.batches import Labels
from baar_jax.train.checkpoint import load_router
from baar_jax.train.fit import fit_rollouts, fit_sft, fit_stored
from baar_jax.train.training import UNSTRATIFIED, Training
from baar_jax.train.values import fit_values

WARMUP = 10  # updates of the pretraining


def setup(run: Run) -> None:
  """Installs the environment's engine and provides its tasks, where they are missing."""
  c = run.config.env
  if c.kind not in engines.ENGINES:
    run.print(f"setup: {c.kind} needs nothing more")
  else:
    sizes = [getattr(c, f"{split}_tasks") for split in SPLITS]
    engines.set_up(c.kind, c.data, sizes, run.print)
    run.tasks("train")  # shows whether they can be used


def profile(run: Run) -> None:
  """Measures every task's difficulty and costs, and trains or adopts the tokenizer."""
  tasks = run.tasks("train") + run.tasks("dev")
  trials = max((run.config.profile.trials, *run.config.profile.robustness))
  jobs = [Job(task, PROFILE_SEEDS + k) for task in tasks for k in range(trials)]
  for policy in run.boundaries:
    run.collect(f"profile {policy.name}", policy, jobs)
  train, dev = (dataset.load_profiles(run.store, run.config, split) for split in ("train", "dev"))
  for id_ in [task.id for task in tasks if task.id not in train and task.id not in dev]:
    run.print(f"left out: {id_} has no trial of both boundaries")
  models = len(run.pair.names)
  if run.is_main and not (run.tokenizer / "tokenizer.json").exists():
    if run.config.router.weights:
      adopt_tokenizer(weights_directory(run.config.router.weights), run.tokenizer, models)
    else:
      episodes = {task_id: (*p.small, *p.large) for task_id, p in train.items()}
      texts = (text_pieces(task, e, models) for task in tasks for e in episodes.get(task.id, ()))
      pieces = itertools.chain.from_iterable(texts)
      train_tokenizer(pieces, run.config.router.vocab_size, run.tokenizer, models)
  exchange(None)  # waits until every process is here
  run.store.finish("profile")
  for split, profiles in (("train", train.values()), ("dev", dev.values())):
    mix = dict(collections.Counter(p.difficulty for p in profiles))
    inverted = sum(p.cost_small > p.cost_large for p in profiles)
    counts = f"{len(profiles)} tasks, {mix}, SMALL dearer than LARGE on {inverted}"
    run.print(f"profile of {split}: {counts}")


def references(run: Run) -> None:
  """Collects the trajectory tau* of every training task, for SFT, and of every dev task."""
  run.require("profile")
  c, profiles = run.config.references, dataset.load_profiles(run.store, run.config, "train", "dev")
  profiled = [t for t in run.tasks("train") + run.tasks("dev") if t.id in profiles]
  hard = [t for t in profiled if profiles[t.id].difficulty == "hard"]

  def collect(family: str, tasks: Sequence[Task]) -> None:
    counts = policies.sample_counts(run.config, family)
    seeds = [REFERENCE_SEEDS + k for k in range(1, sum(counts.values()) + 1)]
    jobs = [Job(task, seed) for task in tasks for seed in seeds]
    run.collect(family, rule_policy(family, **counts), jobs)

  if not c.clone_large:
    collect(policies.STRATIFIED, hard)
    if c.explored:
      rest = [t for t in profiled if t.split == "train" and profiles[t.id].difficulty != "hard"]
      collect(policies.EXPLORED, rest)
  collect(policies.TOGETHER, [task for task in hard if task.split == "train"])
  trajectories = dataset.load_references(run.store, run.config, profiles)
  run.store.finish("references")
  chosen = [trajectories[task.id] for task in hard]
  fallback = sum(episode.policy == policies.ALWAYS_LARGE for episode in chosen)
  large, steps = sum(e.large_calls for e in chosen), sum(len(e.steps) for e in chosen)
  share = f"{len(hard)} hard tasks, LARGE at {large / max(steps, 1):.0%} of their steps"
  lack = f"{fallback} had no stratified success and take a LARGE trial of the profile"
  run.print(f"references: {share}; {lack}")


def pretrain(run: Run) -> None:
  """A router from random weights learns what tends to come next (our choice).

  It has read nothing, and rewards alone are too sparse to learn from which words foretell a
  difficult step. So at every decision of the stored episodes of the profile and the references it
  first predicts the tokens of the coming action and its result.
  """
  c = run.config.pretrain
  if c.epochs == 0:
    return
  run.require("references")
  episodes = dataset.load_pretraining_episodes(run.store, run.config)
  updates = max(1, c.epochs * len(episodes) // c.batch_episodes)
  rates, warmup_share = (c.learning_rate,), min(1.0, WARMUP / updates)
  config = SFTConfig(updates, learning_rates=rates, warmup_share=warmup_share, weight_decay=1e-4)
  for training in run.trainings():
    seed = training.config.seed
    draw = partial(dataset.draw_batches, episodes, c.batch_episodes, seed, newest_first=True)
    fit_stored(training, "pretrain", config, draw)


def value(run: Run) -> None:
  """Heads that know the budget and the price of a dollar are fitted to what is stored."""
  if run.config.value.updates == 0:
    return
  run.require("references")
  for training in run.trainings():
    fit_values(training)


def sft(run: Run) -> None:
  """The router imitates the decisions of the references (paper: BoSFT)."""
  run.require("references")
  for training in run.trainings():
    fit_sft(training)


def bopo(run: Run) -> None:
  """The router improves on its own episodes, anchored to the boundaries (paper: BoPO).

  Of a served run it takes one update, from what clients have sampled since the last one, if any.
  """
  run.require("references")
  for training in run.trainings():
    for lam in run.config.bopo.lam:
      fit_rollouts(training, "bopo", lam)


def baselines(run: Run) -> None:
  """The rivals of BoPO and its ablations are trained on what the run has stored."""
  c = run.config.baselines
  run.require("references")
  for training in run.trainings():
    if "cascade" in c.rivals:
      train_cascade(training)
    if "single-turn" in c.rivals:
      train_single_turn(training)
    # Vanilla RL has BoPO's SFT router, tasks, seeds and number of episodes (paper).
    for lam in run.config.bopo.lam if "vanilla" in c.rivals else ():
      fit_rollouts(training, "vanilla", lam)
    for ablation in c.ablations:
      ablated = run.training(training.number, ablation)
      if ablation == UNSTRATIFIED:
        fit_sft(ablated)
      fit_rollouts(ablated, "bopo", compared_lam(run.config))


def train_cascade(training: Training) -> None:
  """The cascade (FrugalGPT): SMALL proposes, a scorer says whether the next model must do it.

  Each next model proposes in turn, and the dearest acts. The scorer is a router of the same shape
  and initial weights that reads the proposal too. It learns, where any model but the dearest acted,
  whether the episode will still fail: p(going on) is p(failure).
  """
  config, store = training.config, training.store
  profiles = dataset.load_profiles(store, config, "train", "dev")
  trials, dearest = [e for p in profiles.values() for e in p.small], training.models - 1
  mixed = store.episodes(samples_name(config, STRATIFIED))
  trials += [e for e in mixed if e.task_id in profiles]
  _fit_rival(training, "cascade", [e for e in trials if any(s.model != dearest for s in e.steps)])


def train_single_turn(training: Training) -> None:
  """The single-turn router (RouteLLM): a preference classifier on (state, winner), asked per step.

  Of the k-th trial of each model on a task the winner is the cheapest one that succeeded, SMALL
  where none did. Every state of these trials is labelled with it, as by preference data on single
  queries. The trials of models between the boundaries are played here.
  """
  config, store = training.config, training.store
  tasks, trials = store.tasks("train") + store.tasks("dev"), range(config.profile.trials)
  jobs = [Job(task, PROFILE_SEEDS + k) for task in tasks for k in trials]
  rules = [rule_policy(policies.ALWAYS, model=rank) for rank in range(2, training.models)]
  between = [training.collect(f"single-turn {rule.name}", rule, jobs) for rule in rules]
  profiles = dataset.load_profiles(store, config, "train", "dev").values()
  small, large = [e for p in profiles for e in p.small], [e for p in profiles for e in p.large]
  winners = find_winners(small, *between, large)
  learnt = [e for e in sum([small, *between, large], []) if (e.task_id, e.seed) in winners]
  labels = Labels(lambda e: [winners[e.task_id, e.seed]] * len(e.steps))
  _fit_rival(training, "single-turn", learnt, labels)


def find_winners(*trials: Sequence[Episode]) -> dict[tuple[str, int], int]:
  """By task and trial, of trials that all models have: the cheapest that succeeded, or SMALL."""
  columns = ({(e.task_id, e.seed): e.success for e in episodes} for episodes in trials)
  success = pd.DataFrame(dict(enumerate(columns))).dropna().astype(bool)  # a column per model
  return success.idxmax(axis=1).to_dict()  # the first of the largest


def _fit_rival(
  training: Training, name: str, episodes: Sequence[Episode], labels: Labels | None = None
) -> None:
  """Trains a rival's router on episodes of training tasks, with SFT's settings but for the updates;
  the dev loss is of those of dev tasks."""
  c = training.config
  config = dataclasses.replace(c.sft, updates=c.baselines.updates)
  dev_ids = {task.id for task in training.store.tasks("dev")}
  train = [e for e in episodes if e.task_id not in dev_ids]
  dev = [e for e in episodes if e.task_id in dev_ids]
  draw = partial(dataset.draw_batches, train, config.batch_episodes, f"{c.seed}|{name}")
  fit_stored(training, name, config, draw, dev, labels)


def export(run: Run) -> None:
  """Writes routers of the first training seed, if still to be written, as Hugging Face directories
  <run>/export/sft and <run>/export/bopo-lam<lam>."""
  routers = [(f"bopo-lam{lam:g}", "bopo", lam) for lam in run.config.bopo.lam]
  for name, family, lam in [("sft", "sft", None), *routers]:
    directory = run.dir / "export" / name
    if not directory.exists():
      model = load_router(run.training(), family, lam)
      save_qwen2(model, directory, run.tokenizer / "tokenizer.json", run.config.router.dtype)
    run.print(f"export: {directory}")
