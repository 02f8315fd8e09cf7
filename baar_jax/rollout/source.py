"""Play the episodes that a run lacks, or read those that another program has stored."""

import contextlib
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from pydantic import (
  PydanticUserError,
  TypeAdapter,
  ValidationError,
  with_config,
)
from tqdm import tqdm

from baar_jax.config import RECORDED, STRICT, Config, explain
from baar_jax.envs import base, engines
from baar_jax.envs.base import Env
from baar_jax.envs.process import open_envs
from baar_jax.episode import SPLITS, Episode
from baar_jax.llms.prices import format_usd
from baar_jax.rollout.budget import DollarBudget
from baar_jax.rollout.jobs import BOUNDARIES, Plan, list_evaluation
from baar_jax.rollout.loop import Pair, Trial, run_episodes
from baar_jax.rollout.policy import Build
from baar_jax.rollout.specs import PolicySpec
from baar_jax.store import Store


@dataclasses.dataclass
class SelfPlay:
  """Play the episodes of a run that are not stored yet.

  Attributes:
    config: the run's configuration.
    pair: the models to route between.
    store: the run's store.
    budget: the budget of the run; None is no cap.
    open_bar: opens a progress bar, see `Run.progress`.
    opened: the environments, which are opened when they are first needed.
  """

  config: Config
  pair: Pair
  store: Store
  budget: DollarBudget | None
  open_bar: Callable[[str, int, int, str], tqdm]
  opened: list[Env] = dataclasses.field(default_factory=list)

  @property
  def live_episodes(self) -> int:
    """Return the number of episodes that this process plays at the same time."""
    return self.config.env.live_episodes

  def envs(self) -> list[Env]:
    """Return one environment per live episode. The first call opens them."""
    if not self.opened:
      env = self.config.env
      args = env_arguments(self.config)
      engine = base.load(env.kind).engine
      is_trusted = env.options.get("trusted") or self.config.models.kind == "scripted"
      if engine and engine.code_reads and not is_trusted:
        engines.check_walls(engine)
      if base.load(env.kind).needs_process:
        live = env.live_per_process
        count = self.live_episodes // live
        self.opened += open_envs(env.kind, args, count, live, env.timeout_s)
      else:
        self.opened += [base.make(env.kind, **args) for _ in range(self.live_episodes)]
    return self.opened

  def list_tasks(self, split: str) -> None:
    """List the environment's tasks of all splits, and store them.

    Args:
      split: not used, because all splits are listed together.

    Raises:
      ValueError: a task is listed twice.
    """
    print("listing the tasks; this can take a minute in a new run", file=sys.stderr)
    # Neighbours are in different child processes, so splits are listed in parallel.
    envs = self.envs() * len(SPLITS)
    with ThreadPoolExecutor() as threads:
      listings = list(threads.map(lambda env, name: env.tasks(name), envs, SPLITS))
    tasks = [*itertools.chain(*listings)]
    task_id, count = Counter(task.id for task in tasks).most_common(1)[0]
    if count > 1:
      raise ValueError(
        f"--config.env.kind={self.config.env.kind} lists the task {task_id!r} twice: "
        "list each task once, in one split"
      )
    for name, tasks in zip(SPLITS, listings):
      self.store.put_tasks(name, tasks)

  def play(self, title: str, plan: Plan, build: Build) -> list[Episode]:
    """Play the missing episodes of policies at once, and return those of all jobs.

    Each finished episode is stored before it counts. If an episode ends in an error, a
    line is printed and the episode is not stored. The next command plays it again.

    Args:
      title: the name for readers, in the progress bar.
      plan: the policies, each with the episodes that it has to have.
      build: makes a policy; it is called only if an episode is missing.

    Returns:
      The episodes, ordered by policy and key.

    Raises:
      CapReached: the next call could exceed --config.max_usd.
      ValueError: too many episodes in a row have failed.
    """
    distributed = self.config.distributed
    count = 0
    trials = []
    for spec, jobs in plan.items():
      self.store.sync(spec.key)
      stored = self.store.keys(spec.key)
      task_ids = list(dict.fromkeys(job.task.id for job in jobs))
      assigned_ids = set(task_ids[distributed.process :: distributed.processes])
      assigned = [job for job in jobs if job.task.id in assigned_ids]
      count += len(assigned)
      missing = [job for job in assigned if job.key not in stored]
      if missing:
        policy = build(spec)
        trials += [Trial(policy, job) for job in missing]
    if trials:
      with self.open_bar(title, count, count - len(trials), "ep") as bar:
        self._play(trials, bar)
    episodes = []
    for spec, jobs in plan.items():
      self.store.sync(spec.key)
      episodes += self.store.episodes(spec.key, {job.key for job in jobs})
    return episodes

  def _play(self, trials: Sequence[Trial], bar: tqdm) -> None:
    """Play episodes, and store each finished one."""
    episodes = run_episodes(trials, self.pair, self.envs(), self.budget)
    cost_usd = 0.0
    # If this block ends early, closing `episodes` ends the model calls in flight. This
    # must happen before the store is closed.
    with contextlib.closing(episodes):
      for ended in episodes:
        if ended.episode:
          self.store.add(ended.episode)
        else:
          policy, job = ended.trial
          name = f"{job.task.id}, {job.purpose} {job.trial}, {policy.spec.key}"
          print(f"left out: {name}: {ended.error}; run again to play it again")
        cost_usd += sum(step.cost_usd for step in ended.live.steps)
        bar.set_postfix_str(format_usd(cost_usd), refresh=False)
        bar.update()

  def list_playable(self, specs: Sequence[PolicySpec]) -> Sequence[PolicySpec]:
    """Return the policies that can be evaluated: all of the given ones."""
    return specs

  def close(self) -> None:
    """Close the environments and the models."""
    while self.opened:
      self.opened.pop().close()
    self.pair.close()


@dataclasses.dataclass
class Stored:
  """Read the episodes of a run that another program has stored.

  Attributes:
    config: the run's configuration.
    store: the run's store.
    pair: None, because no model is called.
    live_episodes: 1, because no episode is played.
  """

  config: Config
  store: Store
  pair: ClassVar[None] = None
  live_episodes: ClassVar[int] = 1

  def list_tasks(self, split: str) -> None:
    """Raise an error, because only the recording program knows the tasks.

    Raises:
      ValueError: always.
    """
    raise ValueError(f"no {split} task is recorded yet: record five tasks first")

  def play(self, title: str, plan: Plan, build: Build) -> list[Episode]:
    """Return the recorded episodes of all jobs, ordered by policy and key.

    Args:
      title: not used.
      plan: the policies, each with the episodes that it has to have.
      build: not used.

    Raises:
      ValueError: episodes are missing, with up to three examples, or a router cannot
        learn from them, because they have no texts.
    """
    found = []
    for spec, jobs in plan.items():
      keys = {job.key for job in jobs}
      absent = keys - self.store.keys(spec.key)
      if absent:
        counts = Counter(task_id for task_id, *_ in sorted(absent))
        examples = [f"{n} of {id_!r:.80}" for id_, n in counts.most_common(3)]
        raise ValueError(
          f"{len(absent)} of {len(keys)} episodes of {spec.key} are missing, such as "
          f"{', '.join(examples)}: record them first"
        )
      episodes = self.store.episodes(spec.key, keys)
      is_learnt = any(job.purpose not in SPLITS for job in jobs)
      for episode in episodes if is_learnt else ():
        if not any(step.observation or step.action for step in episode.steps):
          raise ValueError(
            f"episodes of {spec.key} were recorded without texts to learn from: record "
            "new ones with texts under another --config.name"
          )
      found += episodes
    return found

  def list_playable(self, specs: Sequence[PolicySpec]) -> list[PolicySpec]:
    """Return the boundaries, and the given policies that are recorded completely.

    Raises:
      ValueError: only the boundaries are recorded.
    """
    keys = set()
    for split in ("dev", "test"):
      jobs = list_evaluation(self.config, self.store.tasks(split), split)
      keys.update(job.key for job in jobs)
    recorded = []
    for spec in specs:
      if spec in BOUNDARIES or self.store.keys(spec.key) >= keys:
        recorded.append(spec)
    if len(recorded) <= len(BOUNDARIES):
      raise ValueError(
        "on dev and test only always-SMALL and always-LARGE are recorded: record "
        "another policy too"
      )
    return recorded

  def close(self) -> None:
    """Close nothing, because nothing is open."""


def read_options(kind: str, options: Mapping[str, Any]) -> Any:
  """Check an environment's options, and convert them to the types of their fields.

  Args:
    kind: the kind of environment; see `base.load`.
    options: values of options by name. Missing options keep their defaults.

  Returns:
    An instance of the environment's class `Options`.

  Raises:
    ValueError: an option has a wrong name, type or value.
  """
  Options = base.load(kind).Options
  try:
    return TypeAdapter(with_config(STRICT)(Options)).validate_python(options)
  except PydanticUserError:
    raise ValueError(
      f"--config.env.kind={kind}: annotate the options in this file with bool, int, "
      "float or str, and without from __future__ import annotations"
    ) from None
  except ValidationError as error:
    names = ", ".join(vars(Options())) or "none"
    problem = explain(error, "--config.env.options")
    if not error.errors()[0]["loc"]:  # The class of the options refuses a value.
      problem = problem.replace(".options.", ".options: ")
    raise ValueError(f"{problem}; the options of {kind}: {names}") from None


def env_arguments(config: Config) -> dict:
  """Return the keyword arguments with which `base.make` opens an environment.

  Raises:
    ValueError: an option of the environment is invalid.
  """
  env = config.env
  options = read_options(env.kind, env.options)
  if env.kind == "code":
    recording = config.models.recording if config.models.kind == RECORDED else ""
    options = dataclasses.replace(options, recording=recording)
  completed = base.load(env.kind).complete(options, Path(config.runs))
  args = {f"{split}_tasks": getattr(env, f"{split}_tasks") for split in SPLITS}
  return args | {"max_steps": env.max_steps, "options": vars(completed)}
