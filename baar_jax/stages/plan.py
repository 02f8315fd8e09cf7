"""The dry run: which episodes the stages have still to run, and what their calls may cost."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pandas as pd

from baar_jax.config import DEV_SEEDS, ROLLOUT_SEEDS, VANILLA_BATCHES, Config
from baar_jax.envs import table
from baar_jax.episode import SPLITS, Usage
from baar_jax.llms.prices import prices_of
from baar_jax.rollout import policies
from baar_jax.rollout.policies import BOUNDARIES, entries, routers
from baar_jax.run import env_arguments
from baar_jax.store import Store, read_config
from baar_jax.train.dataset import load_profiles

# What is assumed where nothing is stored: shares of env.max_steps and of the tasks, and tokens.
STEPS, HARD_TASKS, PROMPT, REPLY, JUDGED = 0.6, 0.4, 1000, 60, Usage(1000, 0, 200)
FORMATS = {"episodes": "{:,.0f}".format, "calls": "{:,.0f}".format, "dollars": "{:,.4f}".format}


def main(config: Config, stages: Sequence[str]) -> None:
  """Prints what the stages have still to run; opens no environment and asks no model."""
  path = Path(config.runs) / config.name / "episodes.sqlite"
  read_config(path.parent)  # refuses a directory whose store is gone
  store = Store(path if path.exists() else ":memory:")
  print(f"tasks: {'listed before' if store.tasks('train') else check_tasks(config)}")
  outcomes, rows = load_outcomes(config, store), pd.DataFrame(0.0, [*stages], [*FORMATS])
  for stage in stages:
    for policy, family, episodes, usd_budget in list_rollouts(config, store, stage):
      calls, usd = estimate(config, outcomes, policy, family)
      usd = usd if usd_budget is None else min(usd, usd_budget)
      rows.loc[stage] += [episodes, episodes * calls, episodes * usd]
  store.close()
  rows.loc["in all"] = rows.sum()
  print("dry run: nothing is run, nothing is spent; expected calls of the models, list prices")
  print(rows.to_string(formatters=FORMATS))


def check_tasks(config: Config) -> str:
  """Lists the tasks where that needs no engine. Raises ValueError where a run would."""
  c = config.env
  engine = table.load(c.kind).engine
  if engine is None or not engine.named_data(c.options.get("data", "")):
    return "not checked, for that takes the engine or --stage=setup"
  env = table.make(c.kind, **env_arguments(config))
  return ", ".join(f"{len(env.tasks(split))} {split}" for split in SPLITS)


def load_outcomes(config: Config, store: Store) -> pd.DataFrame:
  """Mean steps and dollars of an episode of each stored policy, and of both boundaries, which are
  assumed where they have no episodes."""
  outcomes = store.table().groupby("policy")[["steps", "spent_usd"]].mean()
  prices = prices_of(config.models.names, config.models.prices)
  for name, price in zip(BOUNDARIES, (prices[0], prices[-1])):
    if name not in outcomes.index:
      steps = STEPS * config.env.max_steps
      growth = table.load(config.env.kind).prompt_growth
      prompt = PROMPT + growth * (steps - 1) / 2  # the mean of all steps
      outcomes.loc[name] = steps, steps * price.cost_usd(Usage(round(prompt), 0, REPLY))
  return outcomes


def estimate(c: Config, outcomes: pd.DataFrame, policy: str, family: str) -> tuple[float, float]:
  """Calls and dollars of an episode without a budget: as the policy's stored episodes have them,
  else the mean of the boundaries that it lies between."""
  if policy in outcomes.index:
    return tuple(outcomes.loc[policy])
  calls, usd = outcomes.loc[[family] if family in BOUNDARIES else [*BOUNDARIES]].mean()
  if family == "zero-shot":
    (price,) = prices_of(c.baselines.judge.names, c.baselines.judge.prices)
    usd += calls * price.cost_usd(JUDGED)
  return calls, usd


def list_rollouts(c: Config, store: Store, stage: str) -> Iterator[tuple]:
  """(policy, family, episodes, dollars that each may cost) of what a stage has still to run."""
  ids = {split: {task.id for task in store.tasks(split)} for split in SPLITS}
  tasks = {split: len(ids[split]) or getattr(c.env, f"{split}_tasks") for split in SPLITS}
  profiled, count = ids["train"] | ids["dev"], tasks["train"] + tasks["dev"]
  planned: list[tuple] = []  # first the tasks that each policy plays
  if stage == "profile":
    trials = max((c.profile.trials, *c.profile.robustness))
    planned = [(profiled, name, name, count * trials, None) for name in BOUNDARIES]
  elif stage == "references":
    hard = {split: HARD_TASKS * tasks[split] for split in ("train", "dev")}
    for split in hard if store.finished("profile") else ():
      profiles = load_profiles(store, c, split).values()
      hard[split] = sum(profile.difficulty == "hard" for profile in profiles)
    sampled = {policies.TOGETHER: hard["train"]}  # how many tasks
    if not c.references.clone_large:
      rest = (tasks["train"] - hard["train"]) * c.references.explored
      sampled |= {policies.STRATIFIED: sum(hard.values()), policies.EXPLORED: rest}
    for family in sampled:
      episodes = sampled[family] * sum(policies.sample_counts(c, family).values())
      played = profiled if family == policies.STRATIFIED else ids["train"]
      planned.append((played, policies.samples_name(c, family), "", episodes, None))
  elif stage in ("bopo", "baselines"):
    if stage == "baselines" and "single-turn" in c.baselines.rivals:
      between = [e.policy for e in entries(c) if e.family == policies.ALWAYS]
      planned = [(profiled, name, "", count * c.profile.trials, None) for name in between]
    episodes = min(c.bopo.tasks_per_update, tasks["train"]) * c.bopo.group_size
    for family, parameters in routers(c):
      if "lam" in parameters and (family == "bopo") == (stage == "bopo"):
        updates = c.bopo.updates * (VANILLA_BATCHES if family == "vanilla" else 1)  # at most
        for update, seed in product(range(1, updates + 1), range(c.train_seeds)):
          name = policies.rollouts_name(family, parameters["lam"], update, seed)
          planned.append((ids["train"], name, family, episodes, None))
  elif stage == "evaluate":  # on test at most all entries, for dev has yet to choose
    for split in ("dev", "test"):
      episodes = min(tasks[split], c.evaluate.tasks or tasks[split]) * c.evaluate.seeds
      planned += [(ids[split], e.policy, e.family, episodes, e.usd_budget) for e in entries(c)]
  for task_ids, policy, family, episodes, usd_budget in planned:
    # The profile's and the evaluation's episodes of the boundaries have the same names.
    seeds = [seed for task_id, seed in store.keys(policy) if task_id in task_ids]
    stored = sum((DEV_SEEDS <= s < ROLLOUT_SEEDS) == (stage == "evaluate") for s in seeds)
    yield policy, family, max(0, episodes - stored), usd_budget
