"""Measure the scripted models as docs/scripted_models.md compares them with real runs.

    python -m tools.calibrate --config=configs/sciworld.py --config.env.train_tasks=100

The flags are those of main.py. Each policy plays every training task
--config.profile.trials times.
"""

import re
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pandas
from absl import app
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import StratifiedGroupKFold, cross_val_score

import main
from baar_jax.config import Config, require
from baar_jax.envs.base import ERROR_WORDS, load
from baar_jax.episode import Episode
from baar_jax.families.table import open_with
from baar_jax.flags import fail
from baar_jax.rollout.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  FIRST_LARGE,
  list_profile,
)
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.run import Run

# Shares of always-LARGE's calls for which the paper has a result of First-Large.
SHARES = {
  "scienceworld": (0.2, 0.4, 0.6),
  "alfworld": (0.25, 0.5, 0.75),
  "appworld": (0.27, 0.53, 0.8),
}


def measure(run: Run) -> dict[str, float]:
  """Play the boundary policies and First-Large; return the table's figures."""
  jobs = list_profile(run.config, run.tasks("train"))[ALWAYS_SMALL]

  def play(spec: PolicySpec) -> list[Episode]:
    """Return a policy's episodes, ordered by task and seed."""
    return run.play(spec.key, {spec: jobs}, open_with(run.files()))

  small = play(ALWAYS_SMALL)
  large = play(ALWAYS_LARGE)
  figures = {"small": mean_score(small), "large": mean_score(large)}
  gap = figures["large"] - figures["small"]
  steps = np.mean([len(episode.steps) for episode in large])
  for share in SHARES[run.config.env.kind]:
    spec = PolicySpec(FIRST_LARGE, cap=Cap(round(share * steps)))
    capped = play(spec)
    figures[f"first-large {share}"] = (mean_score(capped) - figures["small"]) / gap
  figures["weaker alone"] = np.mean(
    [a.success > b.success for a, b in zip(small, large)]
  )
  figures["after 10"] = np.mean([e.success for e in small if len(e.steps) > 10])
  flaws = [flaw for episode in small for flaw in list_flaws(episode)]
  figures["without effect"], figures["repeated"] = np.mean(flaws, axis=0)
  for step in (0, 4, 6):
    figures[f"AUC {step}"] = predict(small, step, load(run.config.env.kind).Errors.TYPE)
  return figures


def mean_score(episodes: Sequence[Episode]) -> float:
  """Return the mean score of episodes."""
  return np.mean([episode.score for episode in episodes])


def list_flaws(episode: Episode) -> list[tuple[bool, bool]]:
  """Tell for each action but the last whether it failed, and whether it is repeated.

  An action has failed if its result has a word of an error.
  """
  flaws = []
  actions = []
  for step, later in zip(episode.steps, episode.steps[1:]):
    failed = bool(ERROR_WORDS.search(later.observation))
    flaws.append((failed, step.action in actions))
    actions.append(step.action)
  return flaws


def predict(episodes: Sequence[Episode], step: int, pattern: str) -> float:
  """Predict success from the type of task and five facts of the first steps.

  A linear regression predicts the tasks of each fold from all other tasks.

  Args:
    episodes: the episodes; those that have ended before the step are left out.
    step: the number of steps that are read.
    pattern: finds the type of a task in its id.

  Returns:
    The area under the ROC curve, its mean over the folds.
  """
  alive = [episode for episode in episodes if len(episode.steps) > step]
  types = [re.search(pattern, episode.task_id)[0] for episode in alive]
  x_ExF = pandas.get_dummies(types).to_numpy(float)
  if step:
    flaws_ExSx2 = np.array([list_flaws(episode)[:step] for episode in alive])
    score_E = [episode.steps[step - 1].score or 0.0 for episode in alive]
    facts = (x_ExF, flaws_ExSx2.sum(axis=1), flaws_ExSx2[:, -1], score_E)
    x_ExF = np.column_stack(facts)
  folds = StratifiedGroupKFold(5)
  return cross_val_score(
    RidgeClassifier(),
    x_ExF,
    [episode.success for episode in alive],
    groups=[episode.task_id for episode in alive],
    cv=folds,
    scoring="roc_auc",
  ).mean()


def show(command: tuple[Config, str]) -> int:
  """Print the figures of a configuration's environment."""
  config, _ = command
  config.name += "-calibration"
  try:
    require(config.env.kind in SHARES, "config.env.kind", f"one of {', '.join(SHARES)}")
    with closing(Run(config)) as run:
      print(pandas.Series(measure(run)))
  except (ValueError, OSError) as error:
    return fail(error)
  return 0


if __name__ == "__main__":
  app.run(show, flags_parser=main.parse)
