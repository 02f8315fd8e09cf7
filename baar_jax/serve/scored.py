"""Scored sessions become episodes of a run: each has a task, its split, and a seed."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baar_jax.config import Config
from baar_jax.episode import Episode
from baar_jax.rollout.specs import PURPOSE_OF_SPLIT, seed_of
from baar_jax.store import Store
from baar_jax.train.jobs import BOUNDARY_KEYS, count_trials, stratified_spec


class ScoredSession(NamedTuple):
  """A session that has ended, as it is handed in."""

  mark: str  # tells that it is stored
  episode: Episode  # with any seed
  description: str  # the text of its task


def add_sessions(
  store: Store, config: Config, sessions: Sequence[ScoredSession]
) -> int:
  """Store scored sessions that are not stored yet; return their number.

  A task is fixed to a split when it is first named. A session's seed is the first free
  one among those that a stage reads.
  """
  new = [session for session in sessions if not store.finished(session.mark)]
  episodes = []
  taken = {}
  for session in new:
    episode = session.episode
    description = session.description
    task = store.name_task(episode.task_id, description, config.env.max_steps)
    keys = taken.setdefault(episode.policy, store.keys(episode.policy))
    for seed in list_seeds(config, episode.policy, task.split):
      if (task.id, seed) not in keys:
        break
    keys.add((task.id, seed))
    episodes.append(dataclasses.replace(episode, seed=seed))
  store.add(*episodes, finished=[session.mark for session in new])
  return len(new)


def list_seeds(config: Config, policy: str, split: str) -> Iterator[int]:
  """List the seeds of a policy's sessions of a task, in the order of their scores.

  They are those of the stages' jobs: first a boundary's trials of the profile.
  """
  if policy == stratified_spec(config).key:
    return itertools.count(seed_of("reference", 1))
  trials = 0
  if policy in BOUNDARY_KEYS and split != "test":
    trials = count_trials(config)
  profile = range(seed_of("profile", 0), seed_of("profile", trials))
  later = itertools.count(seed_of(PURPOSE_OF_SPLIT[split], 0))
  return itertools.chain(profile, later)
