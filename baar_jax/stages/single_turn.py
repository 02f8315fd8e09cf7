"""The single-turn router (RouteLLM): a preference classifier on (state, winner), applied per step.

Of the k-th trial of both boundaries on a task, LARGE is the winner where it alone succeeded; a draw
goes to the cheaper one. Every state of either trial is labelled with that winner: what a single
query's preference data would say of it.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from baar_jax.episode import Episode
from baar_jax.router.build import abstract_model
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.stages.cascade import settings
from baar_jax.stages.sft import fit
from baar_jax.train.batches import Batch
from baar_jax.train.dataset import load_profiles, shuffled, success
from baar_jax.train.trainer import load_trained


def large_wins(small: Sequence[Episode], large: Sequence[Episode]) -> dict[tuple[str, int], bool]:
  """By task and trial, for trials of which both are there: whether LARGE alone succeeded."""
  good = {(e.task_id, e.seed): success(e) for e in small}
  return {
    (e.task_id, e.seed): success(e) and not good[e.task_id, e.seed]
    for e in large
    if (e.task_id, e.seed) in good
  }


class Winners:
  """Labels the decisions of profile episodes with the winner of their trial."""

  def __init__(self, wins: Mapping[tuple[str, int], bool]):
    self._wins = wins

  def __call__(self, episodes: Sequence[Episode], batch: Batch) -> Batch:
    win_B = np.zeros(len(batch.mask_BxS), bool)
    win_B[: len(episodes)] = [self._wins[e.task_id, e.seed] for e in episodes]
    action_BxS = np.where(batch.mask_BxS, win_B[:, None], 0).astype(np.int32)
    return dataclasses.replace(batch, action_BxS=action_BxS)


def load_single_turn(run: Run) -> Qwen2:
  """The trained classifier. Raises ValueError if it has not been trained to its end."""
  model = abstract_model(run.config.router, View(run.config.router, run.tokenizer).decision_ids)
  updates = run.config.baselines.updates
  return load_trained(_directory(run), updates, model, run.mesh, "baselines")


def main(run: Run) -> None:
  """Trains the classifier on the profile."""
  profiles = load_profiles(run.store, run.config).values()
  small, large = [e for p in profiles for e in p.small], [e for p in profiles for e in p.large]
  wins = large_wins(small, large)
  episodes = [e for e in small + large if (e.task_id, e.seed) in wins]
  view, config = View(run.config.router, run.tokenizer), settings(run)
  batches = shuffled(episodes, config.batch_episodes, f"{run.config.seed}|single-turn")
  fit(run, "single-turn", _directory(run), view, config, batches, Winners(wins))


def _directory(run: Run):
  return run.checkpoints(f"single-turn-{run.config.baselines.updates}")
