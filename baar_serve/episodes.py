"""Store ended conversations as episodes of a run, and name the tasks of clients."""

import dataclasses
import itertools
from collections.abc import Iterator

from baar_jax.config import Config
from baar_jax.episode import SPLITS, Episode, Task
from baar_jax.rollout.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  RANDOM,
  list_profile,
  stratified_spec,
)
from baar_jax.rollout.specs import PolicySpec, RandomSpec, seed_of
from baar_jax.store import Store

# The splits of five successive new tasks of clients. The next five tasks get the same
# splits, and so on (our choice).
SPLIT_OF = ("train", "dev", "train", "test", "train")


def add_session(
  store: Store, config: Config, mark: str, episode: Episode, description: str
) -> bool:
  """Store the episode of an ended session, unless it was stored before.

  A task whose name is new gets its split here. The episode gets the first seed of
  `list_seeds` that its policy and task do not have yet.

  Args:
    mark: the session's unique name in `Store.finished`.
    description: the text of the task.

  Returns:
    Whether it was stored now.
  """
  if store.finished(mark):
    return False
  task = name_task(store, episode.task_id, description, config.env.max_steps)
  keys = store.keys(episode.policy)
  for seed in list_seeds(config, episode.policy, task):
    if (task.id, seed) not in keys:
      break
  store.add(dataclasses.replace(episode, seed=seed), finished=[mark])
  return True


def list_seeds(config: Config, policy: str, task: Task) -> Iterator[int]:
  """Return the seeds for a policy's sessions of one task, in the order of use.

  The stages read episodes by their seeds. The sessions of a boundary policy become
  trials of the profile first, then of the evaluation; on dev it is the other way round.

  Args:
    policy: the key of the policy.
    task: the task.
  """
  if policy == stratified_spec(config).key:
    return itertools.count(seed_of("reference", 1))
  profile_seeds = []
  if task.split != "test":
    for spec, jobs in list_profile(config, [task]).items():
      if spec.key == policy:
        profile_seeds = [job.seed for job in jobs]
  purpose = "rollout" if task.split == "train" else task.split
  first = seed_of(purpose, 0)
  # Only the evaluation needs every validation task.
  judged = config.evaluate.seeds * (task.split == "dev")
  evaluation_seeds = range(first, first + judged)
  return itertools.chain(evaluation_seeds, profile_seeds, itertools.count(first))


def name_task(store: Store, task_id: str, description: str, max_steps: int) -> Task:
  """Return the task with this name; a new name becomes a new task.

  A task that has no text yet gets this one.
  SPLIT_OF assigns the split of a new task, unless a task with the same text has one
  already. The task keeps this split.

  Args:
    task_id: the name by which clients call the task.
    description: the text of the task, if it is new.
    max_steps: the largest number of steps of the task, if it is new.
  """
  named = {task.id: task for split in SPLITS for task in store.tasks(split)}
  known = named.get(task_id)
  if known and description and not known.description:
    named[task_id] = dataclasses.replace(known, description=description)
    tasks = [named[task.id] for task in store.tasks(known.split)]
    store.put_tasks(known.split, tasks)
  elif not known:
    split = SPLIT_OF[len(named) % len(SPLIT_OF)]
    for task in named.values():
      if description and task.description == description:
        split = task.split
    named[task_id] = Task(task_id, split, description, max_steps)
    store.put_tasks(split, [*store.tasks(split), named[task_id]])
  return named[task_id]


def client_specs(config: Config) -> dict[str, PolicySpec]:
  """Return the policies that clients can ask for, by the word after "baar:"."""
  return {
    "small": ALWAYS_SMALL,
    "large": ALWAYS_LARGE,
    "random": RandomSpec(RANDOM, 0.5),
    "stratified": stratified_spec(config),
  }
