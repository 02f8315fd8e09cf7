"""What a run has stored, read as tables: the evaluation's episodes, the ledger, training curves."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd

from baar_jax.config import DEV_SEEDS, TEST_SEEDS, Config, compared_lam
from baar_jax.episode import SMALL
from baar_jax.llms.calls import Spent
from baar_jax.rollout.entries import Entry
from baar_jax.store import Store

METRICS = ("score_percent", "success_percent")
LEFT_OUT_LIMIT = 0.05  # a policy that lacks a larger share of its episodes has not been evaluated
PARTS = ("small_usd", "large_usd", "proposals_usd", "judge_usd", "retries_usd", "router_usd")
CURVES = ["loss", "dev_loss", "accuracy", "reward", "success", "kl", "entropy", "large_share"]
CURVES += ["clipped"]
CURVE_STAGES = ("sft", "bopo", "vanilla", "cascade", "single-turn")


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """The evaluation's entries and episodes.

  `entries` has a row per policy, by its name, in the report's order: the fields of `Entry` (NaN is
  no cap), and the parameters lam, threshold and share. `episodes` has a row per policy, task and
  seed: the columns of `Store.table`, and deciding_usd (of a router and of a judge).
  """

  entries: pd.DataFrame
  episodes: pd.DataFrame
  tasks: list[str]  # ids in the evaluation's order
  left_out: list[str]  # the tasks and seeds that not every policy has
  picks_BxN: np.ndarray  # indices of tasks: all of them, then those of each bootstrap resample
  sr: str  # which of METRICS is the environment's SR
  compared_lam: float  # the weight of cost whose BoPO router is held against methods without one

  def per_task(self, column: str) -> pd.DataFrame:
    """A column of the episodes, or one of METRICS, by policy and task, averaged over seeds."""
    values = self.episodes.groupby(["policy", "task_id"])[column.removesuffix("_percent")]
    means = values.mean().unstack().loc[self.entries.index, self.tasks]
    return 100 * means if column in METRICS else means

  def uncapped(self, *families: str) -> pd.DataFrame:
    """The entries of some families, or of all, that have no budget."""
    entries = self.entries[self.entries.call_budget.isna() & self.entries.usd_budget.isna()]
    return entries[entries.family.isin(families)] if families else entries


def load(store: Store, entries: Sequence[Entry], config: Config, split: str) -> Evaluation:
  """Reads the entries' episodes on "dev" or "test". Raises ValueError where a part of them has not
  been run. Of either split the first `evaluate.tasks` count, 0 is all."""
  frame = pd.DataFrame([vars(entry) for entry in entries]).set_index("policy")
  frame = frame.astype({"call_budget": float, "usd_budget": float}).drop(columns="unlimited")
  parameters = pd.DataFrame(frame.parameters.tolist(), frame.index, dtype=float)
  frame = frame.join(parameters.reindex(columns=["lam", "threshold", "share"]))
  tasks = [task.id for task in store.tasks(split)][: config.evaluate.tasks or None]
  first = {"dev": DEV_SEEDS, "test": TEST_SEEDS}[split]
  keys = pd.MultiIndex.from_product([tasks, range(first, first + config.evaluate.seeds)])
  episodes = store.table(list(frame.index)).set_index(["task_id", "seed"], drop=False)
  episodes = episodes[episodes.index.isin(keys)]
  counts = episodes.policy.value_counts().reindex(frame.index, fill_value=0)
  for policy, count in counts[counts < (1 - LEFT_OUT_LIMIT) * len(keys)].items():
    raise ValueError(f"{policy} has {count} of {len(keys)} episodes on {split}: run --stage=evaluate first")
  shared = episodes.index.value_counts().reindex(keys, fill_value=0) == len(frame)
  if not shared.any():
    raise ValueError("no task and seed has an episode of every policy: run --stage=evaluate again")
  episodes = episodes[episodes.index.isin(keys[shared])].reset_index(drop=True)
  episodes["deciding_usd"] = episodes.router_usd + episodes.judge_usd
  tasks = [task for task in tasks if task in set(episodes.task_id)]
  left_out = [f"{task} seed {seed}" for task, seed in keys[~shared]]
  sr = METRICS[config.env.kind != "scienceworld"]
  # One draw for all results, so that their differences are paired.
  size = config.evaluate.bootstrap, len(tasks)
  picks_BxN = np.vstack(
    [np.arange(len(tasks)), np.random.default_rng(0).integers(size[1], size=size)]
  )
  return Evaluation(frame, episodes, tasks, left_out, picks_BxN, sr, compared_lam(config))


def run_ledger(table: pd.DataFrame, spent: Spent | None, models: int) -> dict[str, float]:
  """Dollars of a run: PARTS, total_usd (their sum), presumed_usd and replayed_usd.

  `presumed_usd` may have been billed beyond the sum, at most; `replayed_usd` is what replayed acts
  and proposals would have cost again. `table` is of all episodes. `spent` are the recorded calls
  of API models (None of scripted ones), which also know of calls whose episode was lost and count a
  replayed reply once: of SMALL, of the other `models` - 1, which are "large", and of the judge.
  """
  usd = table.loc[~table.reused, [*PARTS, "presumed_usd", "proposed_usd", "replayed_usd"]].sum()
  ledger, presumed_usd = usd[list(PARTS)].to_dict(), usd.presumed_usd
  if spent is not None:
    ledger["proposals_usd"] = usd.proposed_usd
    ledger["judge_usd"] = sum(spent.replies_usd[models:])
    ledger["small_usd"] = spent.replies_usd[SMALL] - usd.proposed_usd
    ledger["large_usd"] = sum(spent.replies_usd[1:models])
    ledger["retries_usd"], presumed_usd = spent.retries_usd, spent.presumed_usd
  totals = {"total_usd": sum(ledger.values()), "presumed_usd": presumed_usd}
  return ledger | totals | {"replayed_usd": usd.replayed_usd}


def training(metrics: Sequence[Mapping], families: Collection[str]) -> pd.DataFrame:
  """The curves of what is evaluated: lines of metrics.jsonl, the newest of each update, which a
  resumed run repeats."""
  key = ["stage", "ablation", "lam", "learning_rate", "update"]
  lines = pd.DataFrame(metrics, columns=[*key, *CURVES], dtype=object)
  lines = lines.astype(dict.fromkeys([*key[2:], *CURVES], float))
  evaluated = lines.ablation.fillna(lines.stage).isin({"sft", "bopo", *families})
  lines = lines[lines.stage.isin(CURVE_STAGES) & evaluated].fillna({"ablation": ""})
  return lines.drop_duplicates(key, keep="last")
