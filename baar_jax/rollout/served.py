"""Sessions that clients have played, as episodes of a run: their tasks, their seeds, which lack."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from baar_jax.config import PROFILE_SEEDS, REFERENCE_SEEDS, ROLLOUT_SEEDS, Config, evaluation_seeds
from baar_jax.episode import Episode
from baar_jax.rollout.policies import BOUNDARIES, Job, stratified_name
from baar_jax.store import Store

NAMED = 3  # missing trials that a message names


def add_sessions(
  store: Store, config: Config, sessions: Iterable[tuple[Episode, str]], marks: Iterable[str] = ()
) -> list[Episode]:
  """Stores scored sessions, each with its task's text, and marks as of `Store.finish`.

  A task is fixed to a split when it is first named; a session's seed is the first free one among
  those that a stage reads. Raises ValueError if one has no step, and then stores none.
  """
  episodes, taken = [], collections.defaultdict(set)
  for episode, description in sessions:
    if not episode.steps:
      raise ValueError(f"a session of {episode.task_id!r:.80} has no call of a model to be scored")
    task = store.name_task(episode.task_id, description, config.env.max_steps)
    if episode.policy not in taken:
      taken[episode.policy] |= store.keys(episode.policy)
    seeds = list_seeds(config, episode.policy, task.split, episode.seed)
    seed = next(seed for seed in seeds if (task.id, seed) not in taken[episode.policy])
    taken[episode.policy].add((task.id, seed))
    episodes.append(dataclasses.replace(episode, seed=seed))
  store.add(*episodes, finished=marks)
  return episodes


def list_seeds(config: Config, policy: str, split: str, seed: int = -1) -> Iterator[int]:
  """The seeds of a policy's sessions of a task, in the order in which they are given out.

  They are those by which the stages tell the profile's trials, stratified samples, rollouts and
  the evaluation apart. Seed k of N is of the k-th stratum, so a stratified session keeps its own.
  """
  c, trials = config, max(config.profile.trials, *config.profile.robustness, 0)
  if policy == stratified_name(c):
    own = [seed] if 0 < seed - REFERENCE_SEEDS <= c.references.samples else []
    return itertools.chain(own, itertools.count(REFERENCE_SEEDS + 1))
  profile = range(PROFILE_SEEDS, PROFILE_SEEDS + trials) if policy in BOUNDARIES else ()
  first = ROLLOUT_SEEDS if split == "train" else evaluation_seeds(c, split).start
  return itertools.chain(profile if split != "test" else (), itertools.count(first))


def find_sessions(store: Store, policy: str, jobs: Sequence[Job]) -> list[Episode]:
  """A policy's stored episodes of these jobs. Raises ValueError, in one line, if there are some
  that clients still have to play, for a boundary those of both."""
  policies = BOUNDARIES if policy in BOUNDARIES else (policy,)
  keys = {(job.task.id, job.seed) for job in jobs}
  missing = collections.Counter(
    (task_id, name) for name in policies for task_id, _ in sorted(keys - store.keys(name))
  )
  if missing:
    counts = f"{missing.total()} of {len(policies) * len(keys)} trials are missing"
    counts += f", of {len({task_id for task_id, _ in missing})} tasks, such as "
    some = [f"{n} of {id_!r:.80} by {name}" for (id_, name), n in missing.most_common(NAMED)]
    raise ValueError(f"{counts}{', '.join(some)}: serve them (docs/serving.md)")
  episodes = [e for e in store.episodes(policy) if (e.task_id, e.seed) in keys]
  if not all(any(step.observation or step.action for step in e.steps) for e in episodes):
    problem = f"sessions of {policy} were stored without their texts, so nothing learns from them"
    raise ValueError(f"{problem}: serve another --config.name with --config.serve.record_text=True")
  return episodes
