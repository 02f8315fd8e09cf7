"""The evaluation as one table: every policy's episodes on the keys that all policies share."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd

from baar_jax.config import Config, compared_lam
from baar_jax.rollout.entries import ALWAYS_LARGE, ALWAYS_SMALL, Entry
from baar_jax.store import Store

METRICS = ("score_percent", "success_percent")
# Episodes that ended in an error are left out, for all policies alike. A policy that lacks a larger
# share of its episodes has not been evaluated.
LEFT_OUT_LIMIT = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """What was evaluated.

  Attributes:
    entries: one row per policy, by its name, in the report's order: family, parameters, lam,
      call_budget and usd_budget (NaN is no cap).
    episodes: one row per policy, task and seed: the columns of `Store.table`, and
      deciding_usd (of a router and of a judge).
    tasks: ids in the evaluation's order.
    left_out: the tasks and seeds that not every policy has.
    picks_BxN: all tasks once, and below as many drawn with replacement for each resample.
    sr: which of METRICS is the environment's SR.
    compared_lam: the weight of cost whose BoPO router is held against methods without one.
  """

  entries: pd.DataFrame
  episodes: pd.DataFrame
  tasks: list[str]
  left_out: list[str]
  picks_BxN: np.ndarray
  sr: str
  compared_lam: float

  def per_task(self, column: str) -> pd.DataFrame:
    """A column of the episodes, or one of METRICS, by policy and task, averaged over seeds."""
    values = self.episodes.groupby(["policy", "task_id"])[column.removesuffix("_percent")]
    means = values.mean().unstack().loc[self.entries.index, self.tasks]
    return 100 * means if column in METRICS else means

  def soft(self, *families: str) -> pd.DataFrame:
    """The entries of some families, or of all, that have no budget."""
    lines = self.entries[self.entries.call_budget.isna() & self.entries.usd_budget.isna()]
    return lines[lines.family.isin(families)] if families else lines


def draw(tasks: int, resamples: int) -> np.ndarray:
  """picks_BxN of `Evaluation`: one draw for all figures, so that their differences are paired."""
  drawn = np.random.default_rng(0).integers(tasks, size=(resamples, tasks))
  return np.vstack([np.arange(tasks), drawn])


def load(store: Store, entries: Sequence[Entry], config: Config) -> Evaluation:
  """Reads the evaluation.

  Raises:
    ValueError: a boundary or the test tasks are missing, or too many of a policy's episodes.
  """
  lines = pd.DataFrame([vars(entry) for entry in entries]).set_index("policy")
  lines = lines.astype({"call_budget": float, "usd_budget": float}).drop(columns="unlimited")
  lines["lam"] = [parameters.get("lam", np.nan) for parameters in lines.parameters]
  missing = sorted({ALWAYS_SMALL, ALWAYS_LARGE} - set(lines.index))
  tasks = [task.id for task in store.tasks("test")][: config.evaluate.tasks or None]
  if missing or not tasks:
    what = f"no entry for {', '.join(missing)}" if missing else "there are no test tasks"
    raise ValueError(f"{what}: run --stage=evaluate first")
  keys = pd.MultiIndex.from_product([tasks, range(config.evaluate.seeds)])
  episodes = store.table(list(lines.index)).set_index(["task_id", "seed"], drop=False)
  episodes = episodes[episodes.index.isin(keys)]
  counts = episodes.policy.value_counts().reindex(lines.index, fill_value=0)
  for policy, count in counts[counts < (1 - LEFT_OUT_LIMIT) * len(keys)].items():
    raise ValueError(f"{policy} has {count} of {len(keys)} episodes: run --stage=evaluate first")
  shared = episodes.index.value_counts().reindex(keys, fill_value=0) == len(lines)
  if not shared.any():
    raise ValueError("no task and seed has an episode of every policy: run --stage=evaluate again")
  episodes = episodes[episodes.index.isin(keys[shared])].reset_index(drop=True)
  episodes["deciding_usd"] = episodes.router_usd + episodes.judge_usd
  tasks = [task for task in tasks if task in set(episodes.task_id)]
  left_out = [f"{task} seed {seed}" for task, seed in keys[~shared]]
  sr = METRICS[config.env.kind != "scienceworld"]
  picks_BxN = draw(len(tasks), config.evaluate.bootstrap)
  return Evaluation(lines, episodes, tasks, left_out, picks_BxN, sr, compared_lam(config))
