"""Measure the scripted models as docs/scripted_models.md compares them with real runs.

    python -m tools.calibrate --config=configs/sciworld.py --config.env.train_tasks=100

The flags are those of main.py. Training tasks are played, TRIALS times by each policy.
"""

import contextlib
import re
from collections.abc import Sequence

import numpy as np
from absl import app

import main
from baar_jax.config import Config
from baar_jax.envs.base import ERROR_WORDS, load, read_verb
from baar_jax.episode import Episode
from baar_jax.rivals.families import FAMILIES
from baar_jax.rollout.jobs import ALWAYS_LARGE, ALWAYS_SMALL, Planned, cap_spec
from baar_jax.rollout.rules import RulePolicy
from baar_jax.rollout.specs import Cap, Job, PolicySpec
from baar_jax.run import Run

TRIALS = 2
FOLDS = 5
LATE = 10  # steps
# Shares of always-LARGE's calls at which the paper has a row of First-Large.
SHARES = {
  "scienceworld": (0.2, 0.4, 0.6),
  "alfworld": (0.25, 0.5, 0.75),
  "appworld": (0.27, 0.53, 0.8),
}


def measure(run: Run) -> dict[str, float]:
  """Play the boundary policies and First-Large; return the table's figures."""
  kind = run.config.env.kind
  jobs = [Job(task, "profile", i) for task in run.tasks("train") for i in range(TRIALS)]

  def play(spec: PolicySpec) -> list[Episode]:
    """Return a rule's episodes, ordered by task and seed."""
    build = lambda spec: RulePolicy(spec, FAMILIES[spec.family].rule)  # noqa: E731
    return run.source.episodes(spec.key, Planned(spec, jobs), build)

  small = play(ALWAYS_SMALL)
  large = play(ALWAYS_LARGE)
  steps = np.mean([len(e.steps) for e in large])
  calls = [0.0]
  scores = [mean_score(small)]
  for share in SHARES[kind]:
    cap = Cap(max(1, round(share * steps)))
    episodes = play(cap_spec(ALWAYS_LARGE, cap))
    calls.append(np.mean([e.large_calls for e in episodes]) / steps)
    scores.append(mean_score(episodes))
  calls.append(1.0)
  scores.append(mean_score(large))
  figures = {"small": scores[0], "large": scores[-1]}
  for share in SHARES[kind]:
    reached = np.interp(share, calls, scores)
    figures[f"first-large {share}"] = (reached - scores[0]) / (scores[-1] - scores[0])
  pairs = [(a.score == 1, b.score == 1) for a, b in zip(small, large)]
  figures["weaker alone"] = np.mean([a and not b for a, b in pairs])
  figures["after 10"] = np.mean([e.score == 1 for e in small if len(e.steps) > LATE])
  figures["without effect"] = np.mean([x for e in small for x in list_failures(e)])
  figures["repeated"] = np.mean([x for e in small for x in list_repeats(e)])
  pattern = load(kind).Errors.TYPE
  for step in (0, 4, 6):
    figures[f"AUC {step}"] = auc(small, step, pattern)
  return {name: float(value) for name, value in figures.items()}


def mean_score(episodes: Sequence[Episode]) -> float:
  """Return the mean score."""
  return np.mean([episode.score for episode in episodes])


def list_failures(episode: Episode) -> list[bool]:
  """Tell for each action but the last whether its result has a word of an error."""
  results = [step.observation for step in episode.steps[1:]]
  return [bool(ERROR_WORDS.search(result)) for result in results]


def list_repeats(episode: Episode) -> list[bool]:
  """Tell for each action whether an earlier action of the episode was the same."""
  actions = [step.action for step in episode.steps]
  return [action in actions[:i] for i, action in enumerate(actions)]


def auc(episodes: Sequence[Episode], step: int, pattern: str) -> float:
  """Predict success from the type of task and facts of the first steps.

  A logistic regression predicts each task from the tasks of the other folds.

  Args:
    episodes: the episodes; those that have ended before the step are left out.
    step: the number of steps that are read.
    pattern: finds the type of a task in its id.

  Returns:
    The area under the ROC curve.
  """
  alive = [e for e in episodes if len(e.steps) > step]
  types = [re.search(pattern, e.task_id)[0] for e in alive]
  features = [[kind == name for name in sorted({*types})] for kind in types]
  for row, episode in zip(features, alive):
    if step:
      row += list_facts(episode, step)
  x_ExF = np.array(features, float)
  x_ExF = (x_ExF - x_ExF.mean(0)) / (x_ExF.std(0) + 1e-9)
  solved_E = np.array([e.score == 1 for e in alive])
  ids = np.unique([e.task_id for e in alive], return_inverse=True)[1]
  logit_E = np.zeros(len(alive))
  for fold in range(FOLDS):
    held_E = ids % FOLDS == fold
    logit_E[held_E] = x_ExF[held_E] @ fit(x_ExF[~held_E], solved_E[~held_E])
  gap = logit_E[solved_E][:, None] - logit_E[~solved_E]
  return ((gap > 0) + 0.5 * (gap == 0)).mean()


def list_facts(episode: Episode, step: int) -> list[float]:
  """Compute five facts of an episode's first steps."""
  failures = list_failures(episode)[:step]
  verbs = {read_verb(past.action) for past in episode.steps[:step]}
  return [
    sum(failures),
    failures[-1],
    sum(list_repeats(episode)[:step]),
    len(verbs),
    episode.steps[step - 1].score or 0.0,
  ]


def fit(x_ExF: np.ndarray, y_E: np.ndarray) -> np.ndarray:
  """Fit a logistic regression with an L2 penalty, by ten steps of Newton's method."""
  x_ExF = np.insert(x_ExF, 0, 1.0, axis=1)
  w_F = np.zeros(x_ExF.shape[1])
  for _ in range(10):
    p_E = 1 / (1 + np.exp(-x_ExF @ w_F))
    hessian = (x_ExF.T * (p_E * (1 - p_E))) @ x_ExF + np.eye(len(w_F))
    w_F -= np.linalg.solve(hessian, x_ExF.T @ (p_E - y_E) + w_F)
  return w_F[1:]


def show(command: tuple[Config, str]) -> None:
  """Print the figures of a configuration's environment."""
  config, _ = command
  config.name += "-calibration"
  with contextlib.closing(Run(config)) as run:
    for name, value in measure(run).items():
      print(f"{name:18} {value:.3f}")


if __name__ == "__main__":
  app.run(show, flags_parser=main.parse)
