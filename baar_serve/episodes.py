"""Store ended conversations as episodes of a run, and name the tasks of clients."""

import dataclasses
import itertools
from collections.abc import Iterator

from baar_jax.config import Config
from baar_jax.episode import SPLITS, Episode, Purpose, Task
from baar_jax.families.rules import RandomSpec
from baar_jax.rollout.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  RANDOM,
  list_profile,
  stratified_spec,
)
from baar_jax.rollout.specs import PolicySpec
from baar_jax.store import Store

# The splits of five successive new tasks of clients. The next five tasks get the same
# splits, and so on (our choice).
SPLIT_OF = ("train", "dev", "train", "test", "train")


def add_session(
  store: Store, config: Config, mark: str, episode: Episode, description: str
) -> bool:
  """Store the episode of an ended session, unless it was stored before.

  A task whose name is new gets its split here. The episode becomes the first trial of
  `list_trials` that its policy and task do not have yet.

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
  for purpose, trial in list_trials(config, episode.policy, task):
    if (task.id, purpose, trial) not in keys:
      break
  episode = dataclasses.replace(episode, purpose=purpose, trial=trial)
  store.add(episode, finished=[mark])
  return True


def list_trials(
  config: Config, policy: str, task: Task
) -> Iterator[tuple[Purpose, int]]:
  """Yield purpose and trial for a policy's sessions of one task, in the order of use.

  The stages read episodes by purpose and trial. The sessions of a boundary policy
  become trials of the profile first, then of the evaluation; on dev it is the other way
  round.

  Args:
    policy: the key of the policy.
    task: the task.
  """
  if policy == stratified_spec(config).key:
    for trial in itertools.count(1):
      yield "reference", trial
  profile = []
  if task.split != "test":
    for spec, jobs in list_profile(config, [task]).items():
      if spec.key == policy:
        profile = [(job.purpose, job.trial) for job in jobs]
  purpose = "rollout" if task.split == "train" else task.split
  if task.split == "dev":  # Only the evaluation needs every validation task.
    for trial in range(config.evaluate.seeds):
      yield purpose, trial
  yield from profile
  for trial in itertools.count():
    yield purpose, trial


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
