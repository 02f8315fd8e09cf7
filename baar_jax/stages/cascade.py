"""The cascade (FrugalGPT): SMALL proposes, a trained scorer says whether LARGE must act instead.

The scorer is a router of the same shape, from the same initial weights, that reads the transcript
and SMALL's proposal. It predicts whether the episode will still fail: p(LARGE) is p(failure). Both
calls are billed.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from baar_jax.config import SFTConfig
from baar_jax.episode import SMALL, Episode, Task
from baar_jax.rollout.entries import stratified_name
from baar_jax.rollout.live import Live
from baar_jax.router.build import abstract_model
from baar_jax.router.policy import RouterPolicy
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.stages.sft import fit
from baar_jax.train.batches import Batch
from baar_jax.train.dataset import load_profiles, shuffled, success
from baar_jax.train.thresholds import measure, score
from baar_jax.train.trainer import load_trained

HELD_OUT = 6  # every so-manieth training task is kept for the calibration
BINS = 10


class CascadePolicy(RouterPolicy):
  """A router that is shown what SMALL proposes; a decision for SMALL takes the proposal."""

  def prepare(self, live: Live) -> None:
    live.proposal = live.agents[SMALL].reply(live.messages, len(live.steps))


def settings(run: Run) -> SFTConfig:
  """How scorer and classifier are fitted: as SFT is, with their own number of updates."""
  return dataclasses.replace(run.config.sft, updates=run.config.baselines.updates)


def proposing_view(run: Run) -> View:
  return View(run.config.router, run.tokenizer, proposals=True)


def proposed(episode: Episode) -> Episode:
  """The episode as a cascade would have seen it: where SMALL acted, its action was proposed."""
  steps = [
    dataclasses.replace(step, proposal=step.action if step.model == SMALL else None)
    for step in episode.steps
  ]
  return dataclasses.replace(episode, steps=steps)


def failures(episodes: Sequence[Episode], batch: Batch) -> Batch:
  """The batch with failure as what is to be decided, where SMALL acted."""
  failed_B = np.zeros(len(batch.mask_BxS), bool)
  failed_B[: len(episodes)] = [not success(e) for e in episodes]
  mask_BxS = batch.mask_BxS & (batch.action_BxS == SMALL)
  action_BxS = np.where(mask_BxS, failed_B[:, None], 0).astype(np.int32)
  return dataclasses.replace(batch, action_BxS=action_BxS, mask_BxS=mask_BxS)


def load_cascade(run: Run) -> Qwen2:
  """The trained scorer. Raises ValueError if it has not been trained to its end."""
  model = abstract_model(run.config.router, proposing_view(run).decision_ids)
  updates = run.config.baselines.updates
  return load_trained(_directory(run), updates, model, run.mesh, "baselines")


def measure_cascade(run: Run, model: Qwen2) -> np.ndarray:
  """p_D: the scorer's p(failure) where SMALL acted in stored training episodes."""
  return measure(run, model, proposing_view(run), failures, proposed)


def main(run: Run) -> None:
  """Trains the scorer on the stored episodes in which SMALL acted, and notes its calibration."""
  tasks = run.store.tasks("train")
  known, held_out = split(tasks)
  episodes = [e for e in map(proposed, _episodes(run)) if any(s.model == SMALL for s in e.steps)]
  mine = [e for e in episodes if e.task_id in known]
  view, config = proposing_view(run), settings(run)
  batches = shuffled(mine, config.batch_episodes, f"{run.config.seed}|cascade")
  fit(run, "cascade", _directory(run), view, config, batches, failures)
  others = [e for e in episodes if e.task_id in held_out]
  calibrated = f"calibration of {_directory(run).name}"
  if others and not run.store.finished(calibrated):
    p_D, failed_D = score(run, load_cascade(run), view, others, failures)
    run.log(stage="cascade-calibration", **calibration(p_D, failed_D))
    run.store.finish(calibrated)


def split(tasks: Sequence[Task]) -> tuple[set[str], set[str]]:
  """The ids of the training tasks to fit on, and of those held out."""
  held_out = {task.id for i, task in enumerate(tasks, 1) if i % HELD_OUT == 0}
  return {task.id for task in tasks} - held_out, held_out


def calibration(p_D: np.ndarray, failed_D: np.ndarray) -> dict:
  """How far predicted probabilities can be taken at their word.

  Args:
    p_D: predicted probability of failure.
    failed_D: whether it failed.

  Returns:
    brier: the mean squared difference (Brier 1950); base_rate: of failures; bins: of equal width,
    those with any decision: mean prediction, observed rate and count.
  """
  place_D = np.minimum((p_D * BINS).astype(int), BINS - 1)
  bins = [
    {
      "predicted": float(p_D[place_D == place].mean()),
      "observed": float(failed_D[place_D == place].mean()),
      "count": int((place_D == place).sum()),
    }
    for place in np.unique(place_D)
  ]
  brier = float(np.mean((p_D - failed_D) ** 2))
  return {"brier": brier, "base_rate": float(np.mean(failed_D)), "bins": bins}


def _directory(run: Run):
  return run.checkpoints(f"cascade-{run.config.baselines.updates}")


def _episodes(run: Run) -> list[Episode]:
  stratified = run.store.episodes(stratified_name(run.config))
  return [e for p in load_profiles(run.store, run.config).values() for e in p.small] + stratified
