"""Choose what rivals learn from stored episodes: cascade and single-turn router."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import pandas as pd

from baar_jax.episode import Episode
from baar_jax.rollout.rules import take_rank
from baar_jax.rollout.turn import RulePolicy
from baar_jax.train import dataset, jobs, losses
from baar_jax.train.batches import Labels
from baar_jax.train.losses import Method
from baar_jax.train.training import Training


def learn_scorer(training: Training) -> tuple[Method, list[Episode]]:
  """Return how the cascade's scorer learns (FrugalGPT), and from which episodes.

  SMALL proposes first, then each next model in turn, and the costliest acts. The scorer
  is a router of the same shape and initial weights that reads the proposal too. It
  learns, if any model but the costliest acted, whether the episode will still fail:
  p(going on) is p(failure).
  """
  store = training.store
  profiles = dataset.load_profiles(store, training.config, "train", "dev")
  trials = []
  for profile in profiles.values():
    trials += profile.small
  stratified = store.episodes(jobs.stratified_spec(training.config).key)
  trials += [e for e in stratified if e.task_id in profiles]
  costliest = training.models - 1
  scored = [e for e in trials if any(s.model != costliest for s in e.steps)]
  return losses.FAILURE, scored


def learn_winners(training: Training) -> tuple[Method, list[Episode]]:
  """Return how the single-turn classifier learns (RouteLLM), and from which episodes.

  Of the k-th trial of each model on a task, the winner is the cheapest model that
  succeeded, SMALL if none did. Every state of these trials is labelled with it, as by
  preference data on single queries. The trials of intermediate models are played here.
  """
  store = training.store
  config = training.config
  tasks = store.tasks("train") + store.tasks("dev")
  build = partial(RulePolicy, rule=take_rank)
  between = []
  for spec, planned in jobs.list_ranked_trials(config, tasks):
    title = f"single-turn {spec.key}"
    between.append(training.collect(title, spec, planned, build))
  small = []
  large = []
  for profile in dataset.load_profiles(store, config, "train", "dev").values():
    small += profile.small
    large += profile.large
  trials = [small, *between, large]
  winners = find_winners(trials)
  labelled = []
  for episodes in trials:
    labelled += [e for e in episodes if (e.task_id, e.seed) in winners]
  labels = Labels(lambda e: [winners[e.task_id, e.seed]] * len(e.steps))
  method = dataclasses.replace(losses.IMITATION, labels=labels)
  return method, labelled


def find_winners(trials: Sequence[Sequence[Episode]]) -> dict[tuple[str, int], int]:
  """Find the cheapest model that succeeded, or SMALL, by task and trial.

  Args:
    trials: the episodes of each model, the cheapest first.

  Returns:
    The winners of those trials that all models have.
  """
  columns = {}
  for model, episodes in enumerate(trials):
    columns[model] = {(e.task_id, e.seed): e.success for e in episodes}
  success = pd.DataFrame(columns).dropna().astype(bool)
  return success.idxmax(axis=1).to_dict()  # the first of the largest
