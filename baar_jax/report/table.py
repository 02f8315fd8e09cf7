"""What a run has stored, read as tables: the evaluation's episodes, the ledger, the curves."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import Field, create_model

from baar_jax.config import SERVED, Config, evaluation_seeds
from baar_jax.envs.table import load
from baar_jax.episode import SMALL
from baar_jax.llms.calls import Spent
from baar_jax.report import frontier
from baar_jax.rollout.policies import BOUNDARIES, Entry, entries, routers
from baar_jax.store import Store

COMPARED = "compared"  # BoPO's points at the weight of cost that the ablations are trained with
DIFFICULTIES = ["easy", "hard", "intractable"]
METRICS = ("score_percent", "success_percent")
LEFT_OUT_LIMIT = 0.05  # a policy that lacks a larger share of its episodes has not been evaluated
PARTS = ("small_usd", "large_usd", "proposals_usd", "judge_usd", "retries_usd", "router_usd")
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

  `entries` has a row per policy, by its name, in the report's order: the fields of `Entry` (NaN is
  no cap) and trained (a router). `episodes` has a row per policy, task and seed: the columns of
  `Store.table`, deciding_usd (a router's and a judge's) and training_seed.
  """

  entries: pd.DataFrame
  episodes: pd.DataFrame
  tasks: list[str]  # ids in the evaluation's order
  left_out: list[str]  # the tasks and seeds that not every policy has
  resamples: int
  sr: str  # which of METRICS is the environment's SR

  def per_task(self, column: str) -> pd.DataFrame:
    """A column of the episodes, or one of METRICS, by policy and task, averaged over seeds."""
    return self._by_seed(column).T.groupby(level="task_id", sort=False).mean().T

  @functools.cached_property
  def resampled(self) -> dict[str, pd.DataFrame]:
    """Of cost_usd and METRICS the mean by policy: over all episodes, then in each resample."""
    shape = len(self.entries), len(self.tasks), self.episodes.training_seed.nunique()
    draws = frontier.draw(*shape[1:], self.resamples)
    trained_P, means = self.entries.trained.to_numpy(), {}
    for column in ("cost_usd", *METRICS):
      frame = self._by_seed(column)
      mean_PxB = frontier.means(frame.to_numpy().reshape(shape), trained_P, draws)
      means[column] = pd.DataFrame(mean_PxB, frame.index)
    return means

  def _by_seed(self, column: str) -> pd.DataFrame:
    """A column by policy, and by task and training seed (nan where a task lacks one)."""
    keys = ["policy", "task_id", "training_seed"]
    means = self.episodes.groupby(keys)[column.removesuffix("_percent")].mean().unstack(keys[1:])
    seeds = sorted(self.episodes.training_seed.unique())
    columns = pd.MultiIndex.from_product([self.tasks, seeds], names=keys[1:])
    means = means.reindex(index=self.entries.index, columns=columns)
    return 100 * means if column in METRICS else means


def list_keys(store: Store, config: Config, split: str) -> pd.MultiIndex:
  """(task_id, seed) of what each policy plays on "dev" or "test"; of either the first
  `evaluate.tasks` tasks count, 0 is all."""
  tasks = [task.id for task in store.tasks(split)][: config.evaluate.tasks or None]
  return pd.MultiIndex.from_product([tasks, evaluation_seeds(config, split)])


def load_split(store: Store, listed: Sequence[Entry], config: Config, split: str) -> Evaluation:
  """Reads the entries' episodes on "dev" or "test". Raises ValueError where a part of them has not
  been run."""
  frame = pd.DataFrame([vars(entry) for entry in listed]).set_index("policy")
  frame = frame.astype({"call_budget": float, "usd_budget": float}).drop(columns="uncapped_policy")
  frame["trained"] = frame.family.isin(dict(routers(config)))
  seeds, keys = evaluation_seeds(config, split), list_keys(store, config, split)
  episodes = store.table(list(frame.index)).set_index(["task_id", "seed"], drop=False)
  episodes = episodes[episodes.index.isin(keys)]
  for policy in frame.index:
    if not has_enough(store, policy, keys):
      raise ValueError(f"{policy} lacks episodes on {split}: run --stage=evaluate first")
  shared = episodes.index.value_counts().reindex(keys, fill_value=0) == len(frame)
  if not shared.any():
    raise ValueError("no task and seed has an episode of every policy: run --stage=evaluate")
  episodes = episodes[episodes.index.isin(keys[shared])].reset_index(drop=True)
  episodes["deciding_usd"] = episodes.router_usd + episodes.judge_usd
  episodes["training_seed"] = (episodes.seed - seeds[0]) % config.train_seeds  # as evaluate plays
  tasks = [task for task in keys.unique(0) if task in set(episodes.task_id)]
  left_out = [f"{task} seed {seed}" for task, seed in keys[~shared]]
  sr = f"{load(config.env.kind).metric}_percent"
  return Evaluation(frame, episodes, tasks, left_out, config.evaluate.bootstrap, sr)


def has_enough(store: Store, policy: str, keys: pd.MultiIndex) -> bool:
  """Whether a policy has been played on a split, but for a few of its episodes' `keys`."""
  return len(store.keys(policy) & set(keys)) >= (1 - LEFT_OUT_LIMIT) * len(keys)


def list_evaluated(store: Store, config: Config) -> list[Entry]:
  """The entries of the evaluation; of a served run those of which clients have played enough on dev
  and on test. Raises ValueError if these are the boundaries at most."""
  if config.env.kind != SERVED:
    return entries(config)
  keys = [list_keys(store, config, split) for split in ("dev", "test")]
  played = [e for e in entries(config) if all(has_enough(store, e.policy, k) for k in keys)]
  if len(played) <= len(BOUNDARIES):
    problem = "clients have played no policy but the boundaries on dev and on test"
    raise ValueError(f"{problem}: serve one of this config (docs/serving.md)")
  return played


def run_ledger(table: pd.DataFrame, spent: Spent | None, models: int) -> dict[str, float]:
  """Dollars of a run: PARTS, total_usd (their sum), and presumed_usd.

  `presumed_usd` may have been billed beyond the sum, at most. `table` is of all episodes. `spent`
  are the recorded calls of API models (None of scripted ones), which also know of calls whose
  episode was lost and count a replayed reply once: of SMALL, of the other `models` - 1, which are
  "large", and of the judge.
  """
  usd = table.loc[~table.reused, [*PARTS, "presumed_usd"]].sum()
  ledger, presumed_usd = usd[list(PARTS)].to_dict(), usd.presumed_usd
  if spent is not None:
    ledger["judge_usd"] = sum(spent.replies_usd[models:])
    ledger["small_usd"] = spent.replies_usd[SMALL] - usd.proposals_usd
    ledger["large_usd"] = sum(spent.replies_usd[1:models])
    ledger["retries_usd"], presumed_usd = spent.retries_usd, spent.presumed_usd
  return ledger | {"total_usd": sum(ledger.values()), "presumed_usd": presumed_usd}


def read_curves(path: Path) -> pd.DataFrame:
  """A row per update of each training, from the lines of metrics.jsonl: stage, training (what tells
  it from the stage's others), update and CURVES, NaN where a stage has none.

  Of several training seeds it has the first, of an update that a resumed run has repeated the
  newest. Raises ValueError if a line is wrong.
  """
  key, numbers = ["stage", "ablation", "lam", "learning_rate"], ["update", *CURVES]
  try:
    texts = path.read_text(errors="replace").splitlines() if path.exists() else []
    lines = [dict(LINE.model_validate_json(text)) for text in texts]
  except ValueError:
    raise ValueError(f"{path} cannot be read: remove it, and no curve is drawn") from None
  table = pd.DataFrame(lines, columns=[*key, "train_seed", *numbers], dtype=object)
  table = table[table["update"].notna() & table.train_seed.isna()]
  table = table.drop_duplicates([*key, "update"], keep="last").astype(dict.fromkeys(numbers, float))
  parameters = (row.dropna() for _, row in table[key[1:]].iterrows())
  table["training"] = [", ".join(f"{k} {v}" for k, v in row.items()) for row in parameters]
  return table[["stage", "training", *numbers]]
