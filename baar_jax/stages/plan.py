"""The dry run: which episodes the stages have still to run, and what they may cost."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from baar_jax.config import Config
from baar_jax.envs import table
from baar_jax.episode import SPLITS, Task, Usage
from baar_jax.llms.prices import prices_of
from baar_jax.rollout.specs import PolicySpec
from baar_jax.run import env_arguments
from baar_jax.store import Store, read_config
from baar_jax.train import families, jobs
from baar_jax.train.dataset import load_profiles, split_by_profile
from baar_jax.train.jobs import BOUNDARIES, Planned, ProfiledTasks

# What is assumed where nothing is stored: shares of env.max_steps and of the tasks, and
# tokens. A prompt grows with each step.
STEPS = 0.6
HARD_TASKS = 0.4
PROMPT = 1000
REPLY = 60
JUDGED = Usage(1000, 0, 200)
FORMATS = {
  "episodes": "{:,.0f}".format,
  "calls": "{:,.0f}".format,
  "dollars": "{:,.4f}".format,
}


def main(config: Config, stages: Sequence[str]) -> None:
  """Print what the stages have still to run; open no environment and ask no model."""
  path = Path(config.runs) / config.name / "episodes.sqlite"
  read_config(path.parent)  # refuses a directory whose store is gone
  # Another process may own the file; an older version's is converted by a run alone.
  store = Store(path if path.exists() else ":memory:", in_memory=True)
  listed = "listed before" if store.tasks("train") else check_tasks(config)
  print(f"tasks: {listed}")
  outcomes = load_outcomes(config, store)
  rows = pd.DataFrame(0.0, [*stages], [*FORMATS])
  for stage in stages:
    for spec, planned in list_planned(config, store, stage):
      stored = store.keys(spec.key)
      missing = [job for job in planned if job.key not in stored]
      calls, usd = estimate(config, outcomes, spec)
      rows.loc[stage] += [len(missing), len(missing) * calls, len(missing) * usd]
  store.close()
  rows.loc["in all"] = rows.sum()
  print(
    "dry run: nothing is run, nothing is spent; "
    "expected calls of the models, list prices"
  )
  print(rows.to_string(formatters=FORMATS))


def check_tasks(config: Config) -> str:
  """List the tasks if that needs no engine; raise ValueError if a run would."""
  c = config.env
  engine = table.load(c.kind).engine
  if engine is None or not engine.named_data(c.options.get("data", "")):
    return "not checked, for that takes the engine or --stage=setup"
  env = table.make(c.kind, **env_arguments(config))
  return ", ".join(f"{len(env.tasks(split))} {split}" for split in SPLITS)


def load_outcomes(config: Config, store: Store) -> pd.DataFrame:
  """Compute mean steps and dollars of an episode of each stored policy.

  The boundaries are assumed where they have no episodes.
  """
  outcomes = store.table().groupby("policy")[["steps", "spent_usd"]].mean()
  prices = prices_of(config.models.names, config.models.prices)
  growth = table.load(config.env.kind).prompt_growth
  for spec, price in zip(BOUNDARIES, (prices[0], prices[-1])):
    if spec.key not in outcomes.index:
      steps = STEPS * config.env.max_steps
      prompt = PROMPT + growth * (steps - 1) / 2  # the mean of all steps
      usd = steps * price.cost_usd(Usage(round(prompt), 0, REPLY))
      outcomes.loc[spec.key] = [steps, usd]
  return outcomes


def estimate(
  config: Config, outcomes: pd.DataFrame, spec: PolicySpec
) -> tuple[float, float]:
  """Estimate calls and dollars of an episode of a policy.

  They are as its stored episodes have them, else the mean of the boundaries that it
  lies between.
  """
  if spec.key in outcomes.index:
    calls, usd = outcomes.loc[spec.key]
  else:
    between = [other.key for other in BOUNDARIES]
    if spec.family in between:
      between = [spec.family]
    calls, usd = outcomes.loc[between].mean()
    if spec.judge:
      judge = config.baselines.judge
      (price,) = prices_of(judge.names, judge.prices)
      usd += calls * price.cost_usd(JUDGED)
  if spec.cap.usd is not None:
    usd = min(usd, spec.cap.usd)
  return calls, usd


def list_planned(config: Config, store: Store, stage: str) -> Iterator[Planned]:
  """List what a stage declares, on the tasks that are stored or else on as many."""
  tasks = {}
  for split in SPLITS:
    count = getattr(config.env, f"{split}_tasks")
    assumed = [Task(f"{split}-{n}", split, "", 1) for n in range(count)]
    tasks[split] = store.tasks(split) or assumed
  learning = tasks["train"] + tasks["dev"]
  if stage == "profile":
    yield from jobs.list_profile(config, learning)
  elif stage == "references":
    yield from jobs.list_references(config, profile_tasks(config, store, tasks))
  elif stage == "evaluate":  # on test at most all, for dev has yet to choose
    for split in ("dev", "test"):
      for spec in families.list_specs(config):
        for number in range(config.train_seeds):
          played = jobs.list_evaluation(config, tasks[split], split, number)
          yield Planned(spec, played)
  else:
    for spec in families.list_trained(config):
      family = families.FAMILIES[spec.family]
      if family.stage == stage and family.list_jobs:
        yield from family.list_jobs(config, spec, tasks)


def profile_tasks(
  config: Config, store: Store, tasks: dict[str, list[Task]]
) -> ProfiledTasks:
  """Tell hard tasks from others, by the profile or else as is assumed."""
  learning = tasks["train"] + tasks["dev"]
  if store.finished("profile"):
    profiles = load_profiles(store, config, "train", "dev")
    return split_by_profile(learning, profiles)
  hard = []
  for split in ("train", "dev"):
    hard += tasks[split][: round(HARD_TASKS * len(tasks[split]))]
  return ProfiledTasks(hard, [task for task in learning if task not in hard])
