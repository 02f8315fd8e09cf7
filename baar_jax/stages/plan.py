"""Print the remaining work of a run and its expected cost (the dry run)."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from baar_jax.config import STORED, Config
from baar_jax.envs import base
from baar_jax.episode import SPLITS, Task, Usage
from baar_jax.families.table import list_specs, list_trained
from baar_jax.families.zero_shot import ZeroShotSpec
from baar_jax.llms.prices import format_usd, prices_of
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import BOUNDARY_KEYS, Plan
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.weights import check_directory
from baar_jax.run import adopt_episodes, load_profiles
from baar_jax.store import Store, read_config

# The next numbers are assumed if a run has no stored episodes (our choice). STEPS
# is the length of an episode as a share of `--config.env.max_steps`.
STEPS = 0.6
# Number of tokens of an episode's first prompt.
PROMPT = 1000
# Number of tokens of a model's reply.
REPLY = 60
# Seconds of a step with an API model, if no reply is stored: one until the first token,
# the reply at the paper's 80 tokens per second, and the rest for the environment and
# the router.
STEP_S = 2.0
# Tokens of the judge per step: prompt, cached prompt, reply.
JUDGED = Usage(1000, 0, 200)
FORMATS = {
  "episodes": "{:,.0f}".format,
  "calls": "{:,.0f}".format,
  "hours": "{:,.1f}".format,
  "dollars": "{:,.4f}".format,
}


def main(config: Config, stages: Sequence[str]) -> None:
  """Print the number of episodes that stages still have to play, and their dollars.

  The numbers of calls and dollars are estimates. No environment is started, no model is
  called, and no file is written. Hours leave out the router's decisions and trainings.

  Args:
    config: the configuration.
    stages: names of the stages.

  Raises:
    ValueError: the router's weights cannot be used.
  """
  if config.router.weights:
    check_directory(config.router.weights)
  rows = tabulate(config, stages)
  prices = "the configured" if config.models.prices else "list"
  kind = config.models.kind
  unpaid = "" if kind == "chat" else f" ({kind} models are never paid)"
  print(
    f"dry run: nothing is played or paid; estimates, at {prices} prices{unpaid}; hours "
    "are those of API models, without the router"
  )
  print(rows.to_string(formatters=FORMATS))


def require_cap(config: Config, stages: Sequence[str]) -> None:
  """Raise an error if stages are expected to cost money, and the run has no cap.

  Raises:
    ValueError: --config.max_usd is 0; the message has the estimates of the dry run.
  """
  if config.max_usd or config.models.kind != "chat" or config.env.kind == STORED:
    return
  total = tabulate(config, stages).loc["in all"]
  if total.dollars:
    raise ValueError(
      "--config.max_usd is 0, but these models cost money: about "
      f"{format_usd(total.dollars)} and {total.hours:,.1f} hours by the dry run, "
      "without the router; set --config.max_usd to the most dollars this run may spend"
    )


def tabulate(config: Config, stages: Sequence[str]) -> pd.DataFrame:
  """Estimate the remaining work of stages.

  Returns:
    A row per stage and the row "in all", with the columns FORMATS. Hours are those of
    API models, without the router's decisions and trainings.
  """
  path = Path(config.runs) / config.name / "episodes.sqlite"
  # This call raises an error if the run has a configuration and its store is missing.
  read_config(path.parent)
  # The dry run reads a copy in memory, because another process may be using the file.
  store = Store(path if path.exists() else ":memory:", in_memory=True)
  if config.reuse and not store.tasks("train"):
    adopt_episodes(config, store)
  outcomes = load_outcomes(config, store)
  rows = pd.DataFrame(0.0, [*stages], [*FORMATS])
  for stage in stages:
    for plan in list_plans(config, store, stage):
      for spec, planned in plan.items():
        stored = store.keys(spec.key)
        missing = sum(job.key not in stored for job in planned)
        calls, usd = estimate(config, outcomes, spec)
        rows.loc[stage] += [missing, missing * calls, 0.0, missing * usd]
  if config.models.kind == "chat":
    live = config.env.live_episodes * config.distributed.processes
    rows.hours = rows.calls * (store.mean_latency_s() or STEP_S) / live / 3600
  store.close()
  rows.loc["in all"] = rows.sum()
  return rows


def load_outcomes(config: Config, store: Store) -> pd.DataFrame:
  """Compute the mean steps and dollars of each policy's stored episodes.

  A boundary policy without stored episodes gets the values assumed above.

  Returns:
    A row per policy, by its key, with the columns steps and spent_usd.
  """
  outcomes = store.table().groupby("policy")[["steps", "spent_usd"]].mean()
  prices = prices_of(config.models)
  growth = base.load(config.env.kind).prompt_growth
  for key, price in zip(BOUNDARY_KEYS, (prices[0], prices[-1])):
    if key not in outcomes.index:
      steps = STEPS * config.env.max_steps
      # The mean prompt of an episode, in tokens. `growth` is the number of tokens by
      # which each step lengthens the prompt.
      prompt = PROMPT + growth * (steps - 1) / 2
      usd = steps * price.cost_usd(Usage(round(prompt), 0, REPLY))
      outcomes.loc[key] = [steps, usd]
  return outcomes


def estimate(
  config: Config, outcomes: pd.DataFrame, spec: PolicySpec
) -> tuple[float, float]:
  """Estimate the model calls and dollars of one episode of a policy.

  If the policy has stored episodes, the estimate is their mean. Else it is the mean of
  the episodes without a cap of a family that has no parameters, or else the mean of the
  two boundary policies. To the latter a zero-shot router's judge is added.

  Args:
    config: the configuration.
    outcomes: the result of `load_outcomes`.
    spec: the policy.

  Returns:
    The number of model calls, and US dollars.
  """
  if spec.key in outcomes.index:
    calls, usd = outcomes.loc[spec.key]
  elif spec.family in outcomes.index:
    calls, usd = outcomes.loc[spec.family]
  else:
    calls, usd = outcomes.loc[[*BOUNDARY_KEYS]].mean()
    if isinstance(spec, ZeroShotSpec):
      (price,) = prices_of(config.baselines.judge)
      usd += calls * price.cost_usd(JUDGED)
  if spec.cap.usd is not None:
    usd = min(usd, spec.cap.usd)
  return calls, usd


def list_plans(config: Config, store: Store, stage: str) -> Iterator[Plan]:
  """Yield the policies of a stage with the episodes that it needs.

  The tasks are those that the run has stored. Before the first run, the configured
  numbers of tasks are assumed.

  Args:
    config: the configuration.
    store: the run's store.
    stage: the stage's name.
  """
  tasks = {}
  for split in SPLITS:
    count = getattr(config.env, f"{split}_tasks")
    assumed = [Task(f"{split}-{n}", split, "", 1) for n in range(count)]
    tasks[split] = store.tasks(split) or assumed
  learning = tasks["train"] + tasks["dev"]
  if stage == "profile":
    yield jobs.list_profile(config, learning)
  elif stage == "references":
    is_hard = label_tasks(config, store, learning)
    yield jobs.list_references(config, learning, is_hard)
  elif stage == "evaluate":
    # Which policies play test is not known before dev is played, so all policies are
    # counted.
    for split, number in itertools.product(("dev", "test"), range(config.train_seeds)):
      played = jobs.list_evaluation(config, tasks[split], split, number)
      yield dict.fromkeys(list_specs(config), played)
  else:
    for family in list_trained(config):
      if family.stage == stage:
        yield from family.list_training(config, tasks["train"], tasks["dev"])


def label_tasks(
  config: Config, store: Store, learning: Sequence[Task]
) -> dict[str, bool]:
  """Tell by a task's id whether it is hard.

  If the stage profile has not finished, two of five tasks are assumed to be hard (our
  choice).

  Args:
    config: the configuration.
    store: the run's store.
    learning: the training and dev tasks.
  """
  if store.finished("profile"):
    profiles = load_profiles(store, config, "train", "dev")
    return {id_: profile.hard for id_, profile in profiles.items()}
  return {task.id: place % 5 < 2 for place, task in enumerate(learning)}
