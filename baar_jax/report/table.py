"""A run's stored episodes, ledger and curves, read as tables."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import Field, create_model

from baar_jax.config import Config
from baar_jax.envs.table import load
from baar_jax.episode import SMALL
from baar_jax.llms.calls import Spent
from baar_jax.report import frontier
from baar_jax.report.results import METRICS
from baar_jax.rollout.specs import PolicySpec, seed_of
from baar_jax.store import BUDGETS, Store
from baar_jax.train.jobs import BOUNDARIES

COMPARED_COLUMNS = ("cost_usd", *METRICS)
DIFFICULTIES = ["easy", "hard", "intractable"]
# A policy that lacks a larger share of its episodes has not been evaluated.
LEFT_OUT_LIMIT = 0.05
PARTS = (
  "small_usd",
  "large_usd",
  "proposals_usd",
  "judge_usd",
  "retries_usd",
  "router_usd",
)
CURVES = ["loss", "dev_loss", "reward", "success", "kl", "gradient_norm"]
# Of a line of metrics.jsonl; its words become names of files and labels.
WORD = Field(pattern=r"^[a-z-]{1,40}$")
LINE = create_model(
  "line",
  stage=(Annotated[str, WORD], ...),
  ablation=(Annotated[str, WORD] | None, None),
  train_seed=(int | None, None),
  **dict.fromkeys(("lam", "learning_rate", "update", *CURVES), (float | None, None)),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """The entries' episodes on one split.

  `entries` has a row per policy, by its key, in the report's order: `describe` (NaN is
  no cap). `episodes` has a row per policy, task and seed: the columns of `Store.table`,
  deciding_usd (a router's and a judge's) and training_seed.
  """

  entries: pd.DataFrame
  episodes: pd.DataFrame
  tasks: list[str]  # ids in the evaluation's order
  left_out: list[str]  # the tasks and seeds that not every policy has
  resamples: int
  sr: str  # which of METRICS is the environment's SR

  def per_task(self, column: str) -> pd.DataFrame:
    """Average a column of the episodes, or a metric, by policy and task."""
    return self._by_seed(column).T.groupby(level="task_id", sort=False).mean().T

  def mean(self, columns: Iterable[str]) -> pd.DataFrame:
    """Average columns by policy, over seeds and then over tasks."""
    return pd.DataFrame(
      {column: self.per_task(column).mean(axis=1) for column in columns}
    )

  @functools.cached_property
  def resampled(self) -> dict[str, pd.DataFrame]:
    """Compute each policy's mean cost_usd and METRICS over all, then by resample."""
    tasks = len(self.tasks)
    seeds = self.episodes.training_seed.nunique()
    draws = frontier.draw(tasks, seeds, self.resamples)
    means = {}
    for column in COMPARED_COLUMNS:
      value_PxNxR = self._by_seed(column).to_numpy().reshape(-1, tasks, seeds)
      mean_PxB = frontier.means(value_PxNxR, self.entries.trained.to_numpy(), draws)
      means[column] = pd.DataFrame(mean_PxB, self.entries.index)
    return means

  def _by_seed(self, column: str) -> pd.DataFrame:
    """Average a column by policy, task and training seed (nan if one is lacking)."""
    axes = ["task_id", "training_seed"]
    values = self.episodes.groupby(["policy", *axes])[column.removesuffix("_percent")]
    seeds = sorted(self.episodes.training_seed.unique())
    columns = pd.MultiIndex.from_product([self.tasks, seeds], names=axes)
    means = (
      values.mean().unstack(axes).reindex(index=self.entries.index, columns=columns)
    )
    if column in METRICS:
      means *= 100
    return means


def list_keys(store: Store, config: Config, split: str) -> pd.MultiIndex:
  """List (task_id, seed) of the episodes that each policy plays on "dev" or "test".

  Of either split the first `evaluate.tasks` tasks count; 0 is all.
  """
  tasks = [task.id for task in store.tasks(split)][: config.evaluate.tasks or None]
  seeds = range(seed_of(split, 0), seed_of(split, config.evaluate.seeds))
  return pd.MultiIndex.from_product([tasks, seeds])


def describe(spec: PolicySpec) -> dict[str, object]:
  """List what the report tells of a policy."""
  return {
    "policy": spec.key,
    "family": spec.family,
    "parameters": spec.settings,
    "call_budget": spec.cap.calls,
    "usd_budget": spec.cap.usd,
    "trained": spec.update is not None,
  }


def load_split(
  store: Store, listed: Sequence[PolicySpec], config: Config, split: str
) -> Evaluation:
  """Read the entries' episodes on "dev" or "test".

  Raises:
    ValueError: a part of them has not been run.
  """
  frame = pd.DataFrame([describe(spec) for spec in listed]).set_index("policy")
  frame = frame.astype(dict.fromkeys(BUDGETS, float))
  keys = list_keys(store, config, split)
  episodes = store.table([*frame.index]).set_index(["task_id", "seed"], drop=False)
  episodes = episodes[episodes.index.isin(keys)]
  for policy in frame.index:
    if not _has_enough(store, policy, keys):
      raise ValueError(
        f"{policy} lacks episodes on {split}: run --stage=evaluate first"
      )
  shared = episodes.index.value_counts().reindex(keys, fill_value=0) == len(frame)
  if not shared.any():
    raise ValueError(
      "no task and seed has an episode of every policy: run --stage=evaluate"
    )
  episodes = episodes[episodes.index.isin(keys[shared])].reset_index(drop=True)
  episodes["deciding_usd"] = episodes.router_usd + episodes.judge_usd
  trials = episodes.seed - seed_of(split, 0)
  episodes["training_seed"] = trials % config.train_seeds  # as evaluate plays
  tasks = [*keys[shared].unique(0)]
  left_out = [f"{task} seed {seed}" for task, seed in keys[~shared]]
  sr = f"{load(config.env.kind).metric}_percent"
  return Evaluation(frame, episodes, tasks, left_out, config.evaluate.bootstrap, sr)


def _has_enough(store: Store, policy: str, keys: pd.MultiIndex) -> bool:
  """Tell whether nearly all of a policy's episodes on a split are stored."""
  return len(store.keys(policy) & set(keys)) >= (1 - LEFT_OUT_LIMIT) * len(keys)


def list_played(
  store: Store, listed: Iterable[PolicySpec], config: Config, split: str
) -> list[PolicySpec]:
  """List the boundaries, and the policies that have been played on a split."""
  keys = list_keys(store, config, split)
  return [s for s in listed if s in BOUNDARIES or _has_enough(store, s.key, keys)]


def run_ledger(
  table: pd.DataFrame, spent: Spent | None, models: int
) -> dict[str, float]:
  """Sum up the dollars of a run: PARTS, total_usd (their sum), and presumed_usd.

  Args:
    table: the summaries of all episodes.
    spent: the recorded calls of API models (None of scripted ones), which also know of
      calls whose episode was lost and count a replayed reply once: of SMALL, of the
      other `models` - 1, which are "large", and of the judge.
    models: their number without the judge.

  Returns:
    Dollars by part; `presumed_usd` may have been billed beyond the sum, at most.
  """
  usd = table.loc[~table.reused, [*PARTS, "presumed_usd"]].sum()
  ledger = usd[[*PARTS]].to_dict()
  presumed_usd = usd.presumed_usd
  if spent is not None:
    ledger["small_usd"] = spent.replies_usd[SMALL] - usd.proposals_usd
    ledger["large_usd"] = sum(spent.replies_usd[1:models])
    ledger["judge_usd"] = sum(spent.replies_usd[models:])
    ledger["retries_usd"] = spent.retries_usd
    presumed_usd = spent.presumed_usd
  return ledger | {"total_usd": sum(ledger.values()), "presumed_usd": presumed_usd}


def read_curves(path: Path) -> pd.DataFrame:
  """Read a row per update of each training from the lines of metrics.jsonl.

  Of several training seeds it has the first, of an update that a resumed run has
  repeated the newest.

  Returns:
    stage, training (its parameters, which tell it from the stage's others), update and
    CURVES, NaN where a stage has none.

  Raises:
    ValueError: a line is wrong.
  """
  lines = []
  try:
    if path.exists():
      texts = path.read_text(errors="replace").splitlines()
      lines = [dict(LINE.model_validate_json(text)) for text in texts]
  except ValueError:
    raise ValueError(
      f"{path} cannot be read: remove it, and no curve is drawn"
    ) from None
  table = pd.DataFrame(lines, columns=[*LINE.model_fields], dtype=object)
  table = table[table["update"].notna() & table.train_seed.isna()]
  parameters = ["ablation", "lam", "learning_rate"]
  table = table.drop_duplicates(["stage", *parameters, "update"], keep="last")
  trainings = []
  for _, row in table[parameters].iterrows():
    trainings.append(
      ", ".join(f"{name} {value}" for name, value in row.dropna().items())
    )
  numbers = ["update", *CURVES]
  table = table.assign(training=trainings)[["stage", "training", *numbers]]
  return table.astype(dict.fromkeys(numbers, float))
