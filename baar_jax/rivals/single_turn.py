"""Learn which model a whole task needs, the single-turn classifier (RouteLLM)."""

from collections.abc import Sequence

import pandas as pd

from baar_jax.episode import Episode
from baar_jax.learn.batches import Labels
from baar_jax.paper.references import Trials


def learn_winners(trials: Trials) -> tuple[Labels, list[Episode]]:
  """Label trials with the model that should have played them.

  The k-th trials of all models on a task are compared. The winner is the cheapest model
  that succeeded, or SMALL if none did (our choice). The winner is the label of every
  step of these trials, as a preference is the label of a single query.

  Returns:
    The labels, and the trials that have a winner.
  """
  small, large = trials.of_boundaries()
  by_model = [small, *trials.intermediate, large]
  winners = find_winners(by_model)
  labelled = []
  for episodes in by_model:
    labelled += [e for e in episodes if (e.task_id, e.seed) in winners]
  return Labels(lambda e: [winners[e.task_id, e.seed]] * len(e.steps)), labelled


def find_winners(trials: Sequence[Sequence[Episode]]) -> dict[tuple[str, int], int]:
  """Find the winner of each trial: the cheapest model that succeeded, else SMALL.

  Args:
    trials: the episodes of each model, the cheapest model first.

  Returns:
    The index of the winning model by (task id, seed) of the trial. A trial that a
    model lacks is left out.
  """
  columns = {}
  for model, episodes in enumerate(trials):
    columns[model] = {(e.task_id, e.seed): e.success for e in episodes}
  success = pd.DataFrame(columns).dropna().astype(bool)
  # `idxmax` returns the first column with True, the cheapest model that succeeded. If
  # no column has True, it returns the first column, SMALL.
  return success.idxmax(axis=1).to_dict()
