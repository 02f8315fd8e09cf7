"""Store ended conversations as episodes of a run, and name the tasks of clients."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baar_jax.config import Config
from baar_jax.episode import SPLITS, Episode, Task
from baar_jax.rollout.jobs import (
  ALWAYS_LARGE,
  ALWAYS_SMALL,
  RANDOM,
  list_profile,
  stratified_spec,
)
from baar_jax.rollout.specs import PolicySpec, seed_of
from baar_jax.store import Store

# The splits of five successive new tasks of clients. The next five tasks get the same
# splits, and so on (our choice).
SPLIT_OF = ("train", "dev", "train", "test", "train")


class ScoredSession(NamedTuple):
  """An ended session that is to be stored as an episode.

  Attributes:
    mark: the session's unique name in `Store.finished`, which prevents storing it
      twice.
    episode: the episode; `add_sessions` replaces its seed.
    description: the text of the task.
  """

  mark: str
  episode: Episode
  description: str


def add_sessions(
  store: Store, config: Config, sessions: Sequence[ScoredSession]
) -> int:
  """Store the episodes of ended sessions, except of those that were stored before.

  A task whose name is new gets its split here. An episode gets the first seed of
  `list_seeds` that its policy and task do not have yet.

  Returns:
    The number of sessions that were stored now.
  """
  new_sessions = [session for session in sessions if not store.finished(session.mark)]
  episodes = []
  keys_by_policy = {}
  for session in new_sessions:
    episode = session.episode
    description = session.description
    task = name_task(store, episode.task_id, description, config.env.max_steps)
    keys = keys_by_policy.setdefault(episode.policy, store.keys(episode.policy))
    for seed in list_seeds(config, episode.policy, task):
      if (task.id, seed) not in keys:
        break
    keys.add((task.id, seed))
    episodes.append(dataclasses.replace(episode, seed=seed))
  store.add(*episodes, finished=[session.mark for session in new_sessions])
  return len(new_sessions)


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
    for spec, jobs in list_profile(config, [task]):
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
    "random": PolicySpec(RANDOM, p=0.5),
    "stratified": stratified_spec(config),
  }
