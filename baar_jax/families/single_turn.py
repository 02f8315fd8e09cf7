"""Learn which model a whole task needs, the single-turn classifier (RouteLLM)."""

import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar

import pandas as pd

from baar_jax.config import Config
from baar_jax.episode import Episode, Key, Task
from baar_jax.families.family import Lesson, RouterFamily, divide
from baar_jax.learn.batches import Labels
from baar_jax.rollout.jobs import Plan, list_ranked_trials
from baar_jax.rollout.policy import RulePolicy
from baar_jax.run import RouterFiles, Run, load_profiles


def find_winners(trials: Sequence[Sequence[Episode]]) -> dict[Key, int]:
  """Find the winner of each trial: the cheapest model that succeeded, else SMALL.

  Args:
    trials: the episodes of each model, the cheapest model first.

  Returns:
    The index of the winning model by the trial's key. A trial that a model lacks is
    left out.
  """
  columns = {}
  for model, episodes in enumerate(trials):
    columns[model] = {e.key: e.success for e in episodes}
  success = pd.DataFrame(columns).dropna().astype(bool)
  # `idxmax` returns the first column with True, the cheapest model that succeeded. If
  # no column has True, it returns the first column, SMALL.
  return success.idxmax(axis=1).to_dict()


class SingleTurn(RouterFamily):
  """The single-turn classifier, which learns the model that a whole task needs.

  The k-th trials of all models on a task are compared. The winner is the label of every
  step of these trials, as a preference is the label of a single query.
  """

  stage: ClassVar[str] = "baselines"

  def list_training(
    self, config: Config, train: Sequence[Task], dev: Sequence[Task]
  ) -> list[Plan]:
    """List the trials of the intermediate models."""
    return [list_ranked_trials(config, [*train, *dev])]

  def prepare(self, run: Run, files: RouterFiles) -> Lesson:
    """Play the trials of the intermediate models, and label those of all models."""
    config = files.config
    tasks = run.store.tasks("train") + run.store.tasks("dev")
    profiles = load_profiles(run.store, config, "train", "dev").values()
    open_policy = functools.partial(RulePolicy, rule=lambda live, spec: spec.rank - 1)
    by_model = [[*itertools.chain(*(profile.small for profile in profiles))]]
    for spec, jobs in list_ranked_trials(config, tasks).items():
      title = f"{self.label}, trials of model {spec.rank}"
      by_model.append(run.play(title, {spec: jobs}, open_policy))
    by_model.append([*itertools.chain(*(profile.large for profile in profiles))])
    winners = find_winners(by_model)
    labelled = []
    for episodes in by_model:
      labelled += [e for e in episodes if e.key in winners]
    labels = Labels(lambda e: [winners[e.key]] * len(e.steps))
    return divide(files, self.name, labels, labelled)
