"""Read a run's stored episodes, dollars and training curves as tables."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import pandas as pd
from pydantic import Field, create_model

from baar_jax.config import Config
from baar_jax.envs.table import load
from baar_jax.episode import SMALL, Episode
from baar_jax.llms.ledger import Spent
from baar_jax.llms.prices import Price
from baar_jax.report import frontier
from baar_jax.rollout.jobs import label_family
from baar_jax.rollout.specs import PolicySpec, seed_of
from baar_jax.store import BUDGETS, Store

METRICS = ("score_percent", "success_percent")


@dataclasses.dataclass(frozen=True)
class Facts:
  """Facts about the run that its configuration does not state.

  Attributes:
    environment: the environment's name, or the class name of your own Env.
    has_synthetic_games: whether the tasks are synthetic games, not real ones.
    models: "scripted models", or "models at HOST" with the hosts of the endpoints.
    prices_usd_per_million: by model, the price in US dollars per million tokens.
    test_tasks: the number of test tasks in the results.
    left_out_episodes: texts with the test tasks and seeds that are left out of the
      results, because a policy has no episode of them.
    sr: the metric of METRICS that is the environment's SR.
    main: the family of the page's claims, with which all others are compared.
    train_tasks: the number of training tasks with a profile.
  """

  environment: str
  has_synthetic_games: bool
  models: str
  prices_usd_per_million: dict[str, Price]
  test_tasks: int
  left_out_episodes: list[str]
  sr: str
  main: str
  train_tasks: int


class Style(Protocol):
  """The label of a family in the report."""

  label: str


@dataclasses.dataclass(frozen=True)
class ExactFrontier:
  """The best frontier that any router can reach over all tasks of the sandbox.

  Attributes:
    hull: the frontier's corners: dollars per task, and success in [0, 1].
    area: the area under the frontier.
  """

  hull: Sequence[tuple[float, float]]
  area: float


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
  """The results of the evaluation.

  Except for `dev`, all results are of test tasks and of the policies that were chosen
  on dev. Columns named *_percent are in percent, and *_share in [0, 1]. Columns *_low
  and *_high are the ends of 95 % intervals. NaN or None stands for a value that cannot
  be computed.

  Attributes:
    config: the run's configuration.
    run: facts that the configuration does not state.
    dev: a row per policy, chosen or not, with its mean dollars and METRICS on dev.
    policies: a row per chosen policy, by its key, with its label and figures.
    frontiers: a row per family and metric, with its area, and the main family's area
      minus this area.
    ablations: rows as in `frontiers`, for ablations. The gain is the area of BoPO with
      the same `lam` minus the ablation's area.
    hard_budget: a row per cap K and family, with the family's best policy on dev.
    by_difficulty: each family's shares of dollars on easy, hard and intractable tasks.
    latency: each family's seconds per episode.
    robustness: rows that compare the tasks' difficulty by different numbers of trials.
    training: a row per update of each training.
    ledger: US dollars of the run, by what they were for.
    exact: the sandbox's exact frontier; None without one.
    episodes: some test episodes of the main family's typical policy (see `Choice`).
    styles: the labels of each family.
  """

  config: Config
  run: Facts
  dev: pd.DataFrame
  policies: pd.DataFrame
  frontiers: pd.DataFrame
  ablations: pd.DataFrame
  hard_budget: pd.DataFrame
  by_difficulty: pd.DataFrame
  latency: pd.DataFrame
  robustness: list[dict]
  training: pd.DataFrame
  ledger: dict[str, float]
  exact: ExactFrontier | None
  episodes: list[Episode]
  styles: Mapping[str, Style]

  def label(self, family: str) -> str:
    """Return a family's label for readers; any other text is returned unchanged."""
    return self.styles[family].label if family in self.styles else family

  @functools.cached_property
  def metrics(self) -> list[str]:
    """Return the metrics that the report shows, the environment's SR first.

    If the mean score equals the rate of successes for every policy, only SR is shown.
    """
    table = self.policies
    if (table.score_percent == table.success_percent).all():
      return [self.run.sr]
    return sorted(METRICS, key=lambda metric: metric != self.run.sr)

  @functools.cached_property
  def cost_digits(self) -> int:
    """Return the number of decimals with which dollars per task are written.

    This number shows three significant digits of the cheapest policy without a cap in
    dollars.
    """
    cheapest = self.policies.cost_usd[self.policies.usd_budget.isna()].min()
    if not cheapest > 0:
      return 4
    return 2 - math.floor(math.log10(cheapest))


COMPARED_COLUMNS = ("cost_usd", *METRICS)
DIFFICULTIES = ["easy", "hard", "intractable"]
# Largest share of its episodes that a policy may lack and still be evaluated.
LEFT_OUT_LIMIT = 0.05
LEDGER_COLUMNS = (
  "small_usd",
  "large_usd",
  "proposals_usd",
  "judge_usd",
  "retries_usd",
  "router_usd",
)
CURVES = ["loss", "dev_loss", "reward", "success", "kl", "gradient_norm"]
# Texts of metrics.jsonl become file names and labels, so only these characters are
# allowed.
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
  """The stored episodes of policies on one split, and means over them.

  Attributes:
    entries: a row per policy, by its key, in the report's order, with the columns of
      `describe`. A column for caps has NaN if the policy has no cap.
    episodes: a row per policy, task and seed, with the columns of `Store.table`,
      `deciding_usd` (dollars of the router and the judge) and `training_seed` (its
      number, from 0).
    tasks: ids of the tasks, in the evaluation's order.
    left_out: texts with the tasks and seeds that are left out, because a policy has no
      episode of them.
    resamples: the number of bootstrap resamples.
    sr: the metric of METRICS that is the environment's SR.
  """

  entries: pd.DataFrame
  episodes: pd.DataFrame
  tasks: list[str]
  left_out: list[str]
  resamples: int
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
      For each of COMPARED_COLUMNS a table with a row per policy and a column per
        resample. Column 0 has the means of the unchanged data.
    """
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
    """Average a column by policy, task and training seed.

    Returns:
      A row per policy, and a column per task and training seed. A value without any
        episode is NaN.
    """
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
  """Return the (task_id, seed) pairs of the episodes that each policy plays on a split.

  Args:
    split: "dev" or "test". Its first `--config.evaluate.tasks` tasks are played.
  """
  tasks = [task.id for task in store.tasks(split)][: config.evaluate.tasks or None]
  seeds = range(seed_of(split, 0), seed_of(split, config.evaluate.seeds))
  return pd.MultiIndex.from_product([tasks, seeds])


def describe(spec: PolicySpec) -> dict[str, object]:
  """Return the values of a policy's row in `Evaluation.entries`, by column."""
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
  """Read the policies' episodes on a split.

  Only the pairs of task and seed are read of which every policy has an episode.

  Args:
    store: the run's store.
    listed: the policies.
    config: the run's configuration.
    split: "dev" or "test".

  Raises:
    ValueError: a policy lacks more than the share LEFT_OUT_LIMIT of its episodes, or
      there is no pair of task and seed of which every policy has an episode.
  """
  frame = pd.DataFrame([describe(spec) for spec in listed]).set_index("policy")
  frame = frame.astype(dict.fromkeys(BUDGETS, float))
  keys = list_keys(store, config, split)
  episodes = store.table([*frame.index]).set_index(["task_id", "seed"], drop=False)
  episodes = episodes[episodes.index.isin(keys)]
  for policy in frame.index:
    if not _has_enough(store, policy, keys):
      name = label_family(frame.family[policy])
      raise ValueError(f"{name} lacks episodes on {split}: run --stage=evaluate first")
  is_complete = episodes.index.value_counts().reindex(keys, fill_value=0) == len(frame)
  if not is_complete.any():
    raise ValueError(
      f"no task and seed of {split} has an episode of every policy: "
      "run --stage=evaluate first"
    )
  episodes = episodes[episodes.index.isin(keys[is_complete])].reset_index(drop=True)
  episodes["deciding_usd"] = episodes.router_usd + episodes.judge_usd
  trials = episodes.seed - seed_of(split, 0)
  # The stage evaluate shares out the evaluation seeds among the training seeds in turn.
  episodes["training_seed"] = trials % config.train_seeds
  tasks = [*keys[is_complete].unique(0)]
  left_out = [f"{task} seed {seed}" for task, seed in keys[~is_complete]]
  sr = f"{load(config.env.kind).metric}_percent"
  return Evaluation(frame, episodes, tasks, left_out, config.evaluate.bootstrap, sr)


def _has_enough(store: Store, policy: str, keys: pd.MultiIndex) -> bool:
  """Tell whether a policy lacks at most the share LEFT_OUT_LIMIT of its episodes."""
  return len(store.keys(policy) & set(keys)) >= (1 - LEFT_OUT_LIMIT) * len(keys)


def run_ledger(
  table: pd.DataFrame, spent: Spent | None, models: int
) -> dict[str, float]:
  """Add up the dollars of a run by part.

  Args:
    table: a row per stored episode (the result of `Store.table`).
    spent: the dollars of the recorded calls of API models; None for scripted models.
      They include calls of episodes that failed. A reply that was replayed from the
      record counts once.
    models: the number of models, without the judge.

  Returns:
    US dollars of each of LEDGER_COLUMNS, and their sum as `total_usd`. `presumed_usd`
      is the largest amount that may have been billed in addition, for calls whose
      outcome is unknown.
  """
  usd = table.loc[~table.reused, [*LEDGER_COLUMNS, "presumed_usd"]].sum()
  ledger = usd[[*LEDGER_COLUMNS]].to_dict()
  presumed_usd = usd.presumed_usd
  if spent is not None:
    ledger["small_usd"] = spent.replies_usd[SMALL] - usd.proposals_usd
    ledger["large_usd"] = sum(spent.replies_usd[1:models])
    ledger["judge_usd"] = sum(spent.replies_usd[models:])
    ledger["retries_usd"] = spent.retries_usd
    presumed_usd = spent.presumed_usd
  return ledger | {"total_usd": sum(ledger.values()), "presumed_usd": presumed_usd}


def read_curves(path: Path) -> pd.DataFrame:
  """Read the training curves of a run from metrics.jsonl.

  Only the first training seed is read. If a resumed run has repeated an update, its
  newest line is read.

  Args:
    path: the file, which may be missing.

  Returns:
    A row per update of each training, with the columns stage, training, update and
      CURVES. `training` is a text with the parameters that differ between the trainings
      of a stage. NaN stands for a value that a stage does not log.

  Raises:
    ValueError: a line cannot be read.
  """
  lines = []
  try:
    if path.exists():
      texts = path.read_text(errors="replace").splitlines()
      lines = [dict(LINE.model_validate_json(text)) for text in texts]
  except ValueError:
    raise ValueError(
      f"{path} cannot be read: remove it, and run --stage=report without curves"
    ) from None
  table = pd.DataFrame(lines, columns=[*LINE.model_fields], dtype=object)
  table = table[table["update"].notna() & table.train_seed.isna()]
  parameters = ["ablation", "lam", "learning_rate"]
  table = table.drop_duplicates(["stage", *parameters, "update"], keep="last")
  labels = table[parameters].set_axis(["ablation", "λ", "learning rate"], axis=1)
  trainings = []
  for _, row in labels.iterrows():
    trainings.append(
      ", ".join(f"{name} {value}" for name, value in row.dropna().items())
    )
  numbers = ["update", *CURVES]
  table = table.assign(training=trainings)[["stage", "training", *numbers]]
  return table.astype(dict.fromkeys(numbers, float))
