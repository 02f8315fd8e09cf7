"""The dry run: which episodes a stage has still to run, and what their calls may cost."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from baar_jax.checks import read_config
from baar_jax.config import DEV_SEEDS, ROLLOUT_SEEDS, VANILLA_BATCHES, Config
from baar_jax.envs import engines
from baar_jax.envs.worker import class_of
from baar_jax.episode import SPLITS, Usage
from baar_jax.llms.calls import read_spent
from baar_jax.llms.prices import Price, prices_of
from baar_jax.rollout.entries import (
  BOUNDARIES,
  entries,
  rollouts_name,
  routers,
  stratified_name,
  together_name,
)
from baar_jax.run import env_arguments
from baar_jax.store import Store
from baar_jax.train.dataset import load_profiles

RANGE = ["least", "expected", "most"]  # R in the names of arrays
OUTCOME = ["episodes", "steps", *RANGE]  # of a policy: how many, their mean steps, dollars of one
# What is assumed where nothing is stored: shares of env.max_steps, of the training tasks and of
# the older texts of a prompt; and tokens, of which a judge's reply has at most what it may have.
SHARES = {"steps": [0.25, 0.6, 1.0], "hard_tasks": [0.2, 0.4, 0.6], "cached": [1, 0, 0]}
TOKENS = {"first_prompt": 1000, "growth": 150, "reply": 60, "judge_prompt": [300, 1000, 2500]}
ASSUMED = pd.DataFrame(SHARES | TOKENS | {"judge_reply": [1, 200, np.inf]}, RANGE)
IN_ALFWORLD = ASSUMED.assign(growth=[190, 210, 230])  # measured; it lists all that is possible


def main(config: Config, stages: Sequence[str]) -> None:
  """Prints what the stages have still to run; opens no environment and asks no model."""
  path = Path(config.runs) / config.name / "episodes.sqlite"
  read_config(path.parent)  # refuses a directory whose store is gone
  store = Store(path if path.exists() else ":memory:")
  print(f"tasks: {'listed before' if store.tasks('train') else check_tasks(config)}")
  groups = store.table().groupby("policy")
  outcomes = pd.DataFrame({name: summarize_outcomes(group) for name, group in groups}, OUTCOME).T
  print("dry run: nothing is run, nothing is spent; calls of the models, list prices")
  print(f"{'stage':<12}{'episodes':>10}{'calls':>10}{'$ expected':>12}   $ range")
  assumptions = IN_ALFWORLD if config.env.kind == "alfworld" else ASSUMED
  rows = {stage: np.zeros(5) for stage in stages}
  for stage in stages:
    for policy, family, episodes_R, usd_budget in list_rollouts(config, store, stage):
      calls, usd_R = estimate(config, assumptions, outcomes, policy, family)
      usd_R = np.minimum(usd_R, np.inf if usd_budget is None else usd_budget)
      rows[stage] += [episodes_R[1], episodes_R[1] * calls, *episodes_R * usd_R]
  for stage, (n, calls, least, expected, most) in (rows | {"in all": sum(rows.values())}).items():
    print(f"{stage:<12}{n:>10,.0f}{calls:>10,.0f}{expected:>12.4f}   {least:.4f} to {most:.4f}")
  if not {*BOUNDARIES} <= {*outcomes.index}:
    print(f"assumed where nothing is stored (shares and tokens):\n{assumptions.T.to_string()}")
  if config.models.kind == "scripted":
    print("scripted models: these are list-price dollars for text, and nobody is paid")
  elif path.exists():
    spent = read_spent(path.parent, len(config.models.names) + 1)
    print(f"spent so far: at most ${spent.at_most_usd:.4f}")
  store.close()


def check_tasks(config: Config) -> str:
  """Lists the tasks where that needs no engine. Raises ValueError where a run would."""
  c = config.env
  if c.kind not in engines.ENGINES or engines.uses_generated_data(c.kind, c.data):
    return "not checked, for that takes the engine or --stage=setup"
  env = class_of(c.kind)(**env_arguments(config))
  return ", ".join(f"{len(env.tasks(split))} {split}" for split in SPLITS)


def summarize_outcomes(episodes: pd.DataFrame) -> list[float]:
  """OUTCOME of stored episodes; the ends leave out the cheapest and the dearest tenth."""
  usd, tenth = np.sort(episodes.spent_usd), len(episodes) // 10
  return [len(usd), episodes.steps.mean(), usd[tenth], usd.mean(), usd[-1 - tenth]]


def list_rollouts(c: Config, store: Store, stage: str) -> Iterator[tuple]:
  """(policy, family, episodes_R, dollars that each may cost) of what a stage has still to run."""
  ids = {split: {task.id for task in store.tasks(split)} for split in SPLITS}
  tasks = {split: len(ids[split]) or getattr(c.env, f"{split}_tasks") for split in SPLITS}
  profiled, count = ids["train"] | ids["dev"], tasks["train"] + tasks["dev"]
  planned: list[tuple] = []  # first the tasks that each policy plays
  if stage == "profile":
    trials = max(c.profile.trials, *c.profile.robustness, 0)
    planned = [(profiled, name, name, count * trials, None) for name in BOUNDARIES]
  elif stage == "references" and not c.references.clone_large:
    hard = {split: ASSUMED.hard_tasks.to_numpy() * tasks[split] for split in ("train", "dev")}
    for split in hard if store.finished("profile") else ():
      profiles = load_profiles(store, c, split=split).values()
      hard[split] = sum(profile.difficulty == "hard" for profile in profiles)
    samples, together = sum(hard.values()) * c.references.samples, c.references.together
    planned = [(profiled, stratified_name(c), "", samples, None)]
    planned.append((ids["train"], together_name(c), "", hard["train"] * together, None))
  elif stage in ("bopo", "baselines"):
    if stage == "baselines" and "single-turn" in c.baselines.rivals:
      between = [e.policy for e in entries(c) if e.family == "always"]
      planned = [(profiled, name, "", count * c.profile.trials, None) for name in between]
    episodes = min(c.bopo.tasks_per_update, tasks["train"]) * c.bopo.group_size
    for family, parameters in routers(c):
      if "lam" in parameters and (family == "bopo") == (stage == "bopo"):
        limit = c.bopo.updates * (VANILLA_BATCHES if family == "vanilla" else 1)
        # The later updates are made only as far as they are needed.
        for update, seed in product(range(1, limit + 1), range(c.train_seeds)):
          needed_R = [1, 1, 1] if update <= c.bopo.updates else [0, 0.5, 1]
          name = rollouts_name(family, parameters["lam"], update, seed)
          planned.append((ids["train"], name, family, episodes * np.array(needed_R), None))
  elif stage == "evaluate":  # on test at most all entries, for dev has yet to choose
    for split in ("dev", "test"):
      episodes = min(tasks[split], c.evaluate.tasks or tasks[split]) * c.evaluate.seeds
      planned += [(ids[split], e.policy, e.family, episodes, e.usd_budget) for e in entries(c)]
  for task_ids, policy, family, episodes, usd_budget in planned:
    # The profile's and the evaluation's episodes of the boundaries have the same names.
    seeds = [seed for task_id, seed in store.keys(policy) if task_id in task_ids]
    stored = sum((DEV_SEEDS <= s < ROLLOUT_SEEDS) == (stage == "evaluate") for s in seeds)
    yield policy, family, np.maximum(np.zeros(3), episodes - stored), usd_budget


def estimate(c: Config, a: pd.DataFrame, outcomes: pd.DataFrame, policy: str, family: str) -> tuple:
  """Calls of an episode, and usd_R without a budget: as the policy's stored episodes have them,
  else the boundaries that it lies between, else as `a` assumes."""
  *cheaper, large = prices_of(c.models.names, c.models.prices)
  stored = policy in outcomes.index
  names = [policy] if stored else [family] if family in BOUNDARIES else [*BOUNDARIES]
  if not {*names} <= {*outcomes.index}:
    steps = a.steps * c.env.max_steps
    rows = [[1, steps.expected, *compute_usd(price, steps, a)] for price in (cheaper[0], large)]
    outcomes = pd.DataFrame(rows, [*BOUNDARIES], OUTCOME)
  near = outcomes.loc[names]
  calls = np.average(near.steps, weights=near.episodes)
  usd_R = np.array([near.least.min(), near.expected.mean(), near.most.max()])
  if family == "cascade" and not stored:  # what is proposed and LARGE does instead
    usd_R[1:] += sum(compute_usd(price, calls, a)[1] for price in cheaper) / 2
  if family == "zero-shot" and not stored:
    price, *_ = prices_of(c.baselines.judge.names, c.baselines.judge.prices)
    replies = np.minimum(a.judge_reply, c.baselines.judge.max_completion_tokens)
    answers = zip(a.judge_prompt, replies)
    usd_R += [calls * price.cost_usd(Usage(prompt, 0, reply)) for prompt, reply in answers]
  return calls, usd_R


def compute_usd(price: Price, steps, a: pd.DataFrame) -> list[float]:
  """usd_R of all calls of an episode of one model, with the tokens that are assumed."""
  prompt = steps * a.first_prompt + a.growth * steps * np.maximum(0.0, steps - 1) / 2
  cached = a.cached * np.maximum(0.0, prompt - steps * a.growth)
  usages = zip(prompt, cached, steps * a.reply)
  return [price.cost_usd(Usage(*map(round, tokens))) for tokens in usages]
