"""Read a run's stored episodes and dollars as tables."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from baar_jax.config import Config
from baar_jax.envs.base import load
from baar_jax.episode import PRESUMED, RETRY
from baar_jax.paper import rewards
from baar_jax.paper.references import Profile
from baar_jax.report import frontier
from baar_jax.rollout.jobs import BOUNDARY_KEYS
from baar_jax.rollout.specs import PolicySpec
from baar_jax.store import BUDGETS, KEY, Store, read_spent

RESAMPLES = 1000  # Number of resamples of the tasks per interval.
# The family of BoPO's points without a cap, which the ablations are compared with.
COMPARED = "compared"
# The metrics of the report, with their names for readers.
METRICS = {"score_percent": "mean score", "success_percent": "success rate"}
COMPARED_COLUMNS = ("cost_usd", *METRICS)
# Largest share of its episodes that a policy may lack and still be evaluated.
LEFT_OUT_LIMIT = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """The stored episodes of policies on one split, and means over them.

  Attributes:
    entries: a row per policy, by its key, in the report's order, with its family, its
      caps (NaN without), and whether it has a router for each training seed.
    episodes: a row per policy, task and trial, with the columns of `Store.table`,
      `training_seed` (its number, from 0), `hard` (whether the task is hard, by the
      boundaries' episodes on this split) and `hard_usd` (the dollars if so, else 0).
    tasks: ids of the tasks, in the evaluation's order.
    left_out: the number of pairs of task and trial that are left out, because a policy
      has no episode of them.
    sr: the metric of METRICS that is the environment's SR.
  """

  entries: pd.DataFrame
  episodes: pd.DataFrame
  tasks: list[str]
  left_out: int
  sr: str

  def per_task(self, column: str) -> pd.DataFrame:
    """Average a column over the evaluation seeds of each task.

    Args:
      column: a column of the episodes, or one of METRICS.

    Returns:
      A row per policy and a column per task.
    """
    return self._by_seed(column).T.groupby(level="task_id", sort=False).mean().T

  def mean(self, columns: Iterable[str]) -> pd.DataFrame:
    """Average columns over the evaluation seeds of each task, then over tasks.

    Returns:
      A row per policy, and the given columns.
    """
    return pd.DataFrame(
      {column: self.per_task(column).mean(axis=1) for column in columns}
    )

  @functools.cached_property
  def resampled(self) -> dict[str, pd.DataFrame]:
    """Compute the mean dollars and METRICS of each policy in each resample.

    Returns:
      For each of COMPARED_COLUMNS, `hard` and `hard_usd` a table with a row per policy
        and a column per resample. Column 0 has the means of the unchanged data.
    """
    tasks = len(self.tasks)
    seeds = self.episodes.training_seed.nunique()
    draws = frontier.draw(tasks, seeds, RESAMPLES)
    means = {}
    for column in (*COMPARED_COLUMNS, "hard", "hard_usd"):
      value_PxNxR = self._by_seed(column).to_numpy().reshape(-1, tasks, seeds)
      mean_PxB = frontier.means(value_PxNxR, self.entries.trained.to_numpy(), draws)
      means[column] = pd.DataFrame(mean_PxB, self.entries.index)
    return means

  def _by_seed(self, column: str) -> pd.DataFrame:
    """Average a column by policy, task and training seed.

    Returns:
      A row per policy, and a column per task and training seed. A value without any
        episode is NaN.
    """
    axes = ["task_id", "training_seed"]
    values = self.episodes.groupby(["policy", *axes])[column.removesuffix("_percent")]
    seeds = sorted(self.episodes.training_seed.unique())
    columns = pd.MultiIndex.from_product([self.tasks, seeds], names=axes)
    means = values.mean().unstack(axes)
    means = means.reindex(index=self.entries.index, columns=columns)
    return 100 * means if column in METRICS else means


def load_split(
  store: Store, listed: Sequence[PolicySpec], config: Config, split: str
) -> Evaluation:
  """Read the policies' episodes on a split.

  Only the pairs of task and trial are read of which every policy has an episode,
  because a failed call says nothing of the router (our choice; in the paper all count).

  Args:
    store: the run's store.
    listed: the policies.
    config: the run's configuration.
    split: "dev" or "test".

  Raises:
    ValueError: a policy lacks more than the share LEFT_OUT_LIMIT of its episodes, or
      there is no pair of task and trial of which every policy has an episode.
  """
  ids = [task.id for task in store.tasks(split)]
  trials = range(config.evaluate.seeds)
  keys = pd.MultiIndex.from_product([ids, [split], trials])
  episodes = store.table([spec.key for spec in listed])
  episodes = episodes.set_index([*KEY[1:]], drop=False)
  episodes = episodes[episodes.index.isin(keys)]
  counts = episodes.policy.value_counts()
  entries = {}
  for spec in listed:
    if counts.get(spec.key, 0) < (1 - LEFT_OUT_LIMIT) * len(keys):
      raise ValueError(
        f"{spec.family} lacks episodes on {split}: play or record them first "
        "(--stage=evaluate)"
      )
    entries[spec.key] = {
      "family": spec.family,
      "call_budget": spec.cap.calls,
      "usd_budget": spec.cap.usd,
      "trained": "seeds" in spec.parameters,
    }
  frame = pd.DataFrame.from_dict(entries, orient="index").rename_axis("policy")
  frame = frame.astype(dict.fromkeys(BUDGETS, float))
  counts = episodes.index.value_counts().reindex(keys, fill_value=0)
  complete = keys[counts.to_numpy() == len(frame)]
  if complete.empty:
    raise ValueError(
      f"no task and trial of {split} has an episode of every policy: play or record "
      "them first (--stage=evaluate)"
    )
  episodes = episodes[episodes.index.isin(complete)].reset_index(drop=True)
  successes = episodes.groupby(["task_id", "policy"]).success.agg(list)
  trials = successes.unstack()[[*BOUNDARY_KEYS]]
  difficulty = trials.apply(lambda row: rewards.difficulty(*row), axis=1)
  episodes["hard"] = episodes.task_id.map(difficulty) == "hard"
  episodes["hard_usd"] = episodes.cost_usd * episodes.hard
  # The stage evaluate shares out the evaluation seeds among the training seeds in turn.
  episodes["training_seed"] = episodes.trial % config.train_seeds
  tasks = [*complete.unique(0)]
  left_out = len(keys) - len(complete)
  sr = f"{load(config.env.kind).metric}_percent"
  return Evaluation(frame, episodes, tasks, left_out, sr)


def read_ledger(config: Config, directory: Path) -> pd.DataFrame:
  """Read what a run has spent; scripted and recorded models are never paid.

  The recorded calls include those of episodes that failed. A reply that was replayed
  from the record counts once.

  Args:
    config: the run's configuration.
    directory: the run's directory.

  Returns:
    A row per part with its US dollars: the replies of each model, those of the judge,
    attempts that were billed without an answer, calls whose outcome is unknown at
    their worst case, and the sum; no rows if no API model is called.
  """
  rows = []
  if config.models.kind == "chat":
    # The judge's calls are recorded under the index after the last model's.
    spent_usd = read_spent(directory)
    for model, name in enumerate([*config.models.names, "zero-shot router"]):
      rows.append((name, spent_usd[model]))
    rows += [
      ("attempts without an answer", spent_usd[RETRY]),
      ("calls of unknown outcome, at most", spent_usd[PRESUMED]),
      ("total, at most", spent_usd.total()),
    ]
  return pd.DataFrame(rows, columns=["part", "usd"])


def measure_robustness(
  profiles: Mapping[str, Profile],
  base_trials: int,
  repeats: Mapping[int, Mapping[str, Profile]],
) -> pd.DataFrame:
  """Measure how stable the difficulties are under new trials (paper: appendix).

  Only tasks that have all trials of both compared numbers count.

  Args:
    profiles: the profiles by task id.
    base_trials: the number of their trials.
    repeats: for each number of new trials, the profiles by these trials.

  Returns:
    A row per number of `trials`. `tasks` is the number of compared tasks, and
    `agreement` the share of them with the same difficulty. `hard` and `base_hard` count
    the hard tasks by these trials and by the profile's. `hard_jaccard` is the Jaccard
    similarity of the two sets of hard tasks. A share is NaN if there is nothing to
    compare.
  """
  rows = []
  base = _label_tasks(profiles, base_trials)
  for trials, repeated in repeats.items():
    labels = {"base": base, "new": _label_tasks(repeated, trials)}
    compared = pd.DataFrame(labels).dropna()
    is_hard = compared == "hard"
    row = {
      "trials": trials,
      "tasks": len(compared),
      "agreement": (compared.base == compared.new).mean(),
      "hard": is_hard.new.sum(),
      "base_hard": is_hard.base.sum(),
      "hard_jaccard": is_hard[is_hard.any(axis=1)].all(axis=1).mean(),
    }
    rows.append(row)
  return pd.DataFrame(rows)


def _label_tasks(profiles: Mapping[str, Profile], trials: int) -> dict[str, str]:
  """Return the difficulty of each task, by its id.

  A task that lacks trials is left out.

  Args:
    profiles: the profiles by task id.
    trials: the number of trials of each boundary that a complete profile has.
  """
  labels = {}
  for id_, profile in profiles.items():
    if len(profile.small) == len(profile.large) == trials:
      labels[id_] = profile.difficulty
  return labels
