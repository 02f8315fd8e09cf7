"""Open what the stages of a run share: its directory, environments and models."""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from baar_jax.config import RECORDED, STORED, Config
from baar_jax.envs import base, engines
from baar_jax.envs.base import Env
from baar_jax.envs.process import open_envs
from baar_jax.episode import SPLITS, Episode, Task
from baar_jax.learn.checkpoint import RouterFiles
from baar_jax.llms.ledger import Calls, read_spent
from baar_jax.llms.prices import format_usd
from baar_jax.llms.provider import check_models
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.mesh import exchange, make_mesh
from baar_jax.rollout.budget import DollarBudget
from baar_jax.rollout.conditions import (
  adopt_episodes,
  check_recording,
  write_conditions,
)
from baar_jax.rollout.jobs import BOUNDARIES, Planned, label_family, list_evaluation
from baar_jax.rollout.loop import Failure, Pair, Trial, run_episodes
from baar_jax.rollout.rules import Build
from baar_jax.rollout.specs import PolicySpec
from baar_jax.store import (
  CHANGEABLE,
  RESTORE,
  Store,
  differences,
  flatten,
  lock,
  read_config,
)

# Settings of tqdm for a line a minute, in place of a bar that is drawn again and again.
LINES = dict(
  delay=60.0,
  mininterval=60.0,
  bar_format="{desc}: {n_fmt} of {total_fmt} {unit} in {elapsed}{postfix}\n",
)
# Fields of the configuration that may differ between the processes of one run.
OF_PROCESS = ("runs", "distributed.process", "env.processes", "env.live_per_process")


class Run:
  """A run's directory <runs>/<name>, with its environments and models.

  Several processes may share the directory. Each of them has its own store, and plays a
  share of the tasks. Each holds a lock, so that two commands do not spend the same
  dollars of --config.max_usd twice; the operating system frees the lock of a process
  that is killed.
  """

  def __init__(self, config: Config):
    """Open the run's directory and models. Create the directory if it is missing.

    Raises:
      ValueError: the directory or the models cannot be used.
    """
    check_models(config)
    self.config = config
    # Of several processes, only the main one prints, logs and lists the tasks.
    self.is_main = config.distributed.process == 0
    self.dir = Path(config.runs) / config.name
    stored_config = read_config(self.dir)
    self.mesh = _open_mesh(config)
    number = "" if self.is_main else f"-{config.distributed.process}"
    path = self.dir / f"episodes{number}.sqlite"
    self._lock = lock(self.dir / f"lock{number}")
    self.store = Store(path)
    self._check_config(stored_config)
    self.budget = _open_budget(config, self.dir, self.store)
    if config.env.kind == STORED:
      self.source = Stored(self)
    else:
      self.source = SelfPlay(self, open_pair(config, path))
    # All runs of a user share JAX's compiled programs, which are in the user's cache.
    # They are not kept in a run's directory, because that may come from somebody else,
    # and compiled programs would be executed.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
      jax.config.update("jax_compilation_cache_dir", str(engines.cache() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

  def _check_config(self, stored: Config | None) -> None:
    """Compare this command's configuration with the stored one, then store it.

    Args:
      stored: the configuration in the run's directory; None in a new directory.

    Raises:
      ValueError: a field differs that stored results depend on, or the run has
        checkpoints and no tasks.
    """
    # As long as no tasks are stored, no result depends on the configuration, so any
    # field may change.
    if not self.store.tasks("train"):
      if (self.dir / "checkpoints").exists():
        raise ValueError(
          f"{self.dir} has checkpoints, and its store has no tasks: {RESTORE}"
        )
      if self.config.reuse:
        adopt_episodes(self.config, self.store)
      if self.is_main:
        write_conditions(self.config, self.dir)
    elif stored:
      changeable = CHANGEABLE
      if self.config.env.kind == STORED:
        # No result of a run that plays nothing depends on where its models are.
        changeable += ("models.base_urls.",)
      changes = differences(flatten(stored), flatten(self.config))
      for name, before, after in changes:
        if not f"{name}.".startswith(changeable):
          raise ValueError(
            f"{self.dir} has {name}={before!r}, this command has {after!r}: "
            f"set --config.{name} back, or choose another --config.name"
          )
      check_recording(self.config, self.dir)
    if self.is_main:
      path = self.dir / "config.tmp"
      path.write_text(json.dumps(dataclasses.asdict(self.config), indent=2))
      path.replace(path.with_suffix(".json"))

  def files(self, number: int = 0) -> RouterFiles:
    """Locate the routers of one training seed.

    Args:
      number: the number of the training seed, from 0.
    """
    config = dataclasses.replace(self.config, seed=self.config.seed + number)
    return RouterFiles(self.dir, config, self.mesh, number)

  def all_files(self) -> list[RouterFiles]:
    """Locate the routers of each training seed.

    The trainings of different training seeds have their own directories and random
    numbers.
    """
    return [self.files(number) for number in range(self.config.train_seeds)]

  def tasks(self, split: str) -> list[Task]:
    """Return the tasks of a split. The first call lists the tasks of all splits.

    Every process must call this method, because the main process sends its tasks to the
    others.

    Raises:
      ValueError: a task is listed twice, or no task of this split is recorded.
    """
    if not self.store.tasks(split) and self.is_main:
      self.source.list_tasks(split)
    for name in SPLITS:
      listing = exchange([vars(task) for task in self.store.tasks(name)])[0]
      if not self.is_main:
        self.store.put_tasks(name, [Task(**fields) for fields in listing])
    return self.store.tasks(split)

  def print(self, text: str) -> None:
    """Print a line at once, for a program that may wait; only the main process does."""
    if self.is_main:
      print(text, flush=True)

  def progress(self, title: str, total: int, done: int, unit: str) -> tqdm:
    """Open a progress bar of the main process; without a terminal, a line a minute.

    Args:
      title: the text before the bar.
      total: the number of units at which the bar is full.
      done: the number of units at which the bar starts.
      unit: the unit's name in the bar, such as "ep" for episodes.
    """
    lines = {} if sys.stderr.isatty() else LINES
    hidden = not self.is_main
    return tqdm(
      desc=title, total=total, initial=done, unit=unit, disable=hidden, **lines
    )

  def require(self, stage: str) -> None:
    """Raise an error unless all processes have finished a stage.

    Raises:
      ValueError: a process has not finished the stage.
    """
    if not all(exchange(self.store.finished(stage))):
      raise ValueError(
        f"{self.dir} has not finished the stage {stage}: run --stage={stage} first"
      )

  def log(self, **values: object) -> None:
    """Append values as a JSON line to metrics.jsonl, in the main process only."""
    if self.is_main:
      with (self.dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")

  def close(self) -> None:
    """Close what gives the episodes, and the store, and free the lock."""
    self.source.close()
    self.store.close()
    self._lock.close()


class SelfPlay:
  """Play the episodes of a run that are not stored yet.

  Attributes:
    pair: the models to route between.
    live_episodes: the number of episodes that this process plays at the same time.
  """

  def __init__(self, run: "Run", pair: Pair):
    """Open nothing yet: the environments are opened when they are first needed.

    Args:
      run: the run, whose store and budget are used.
      pair: the models to route between.
    """
    self.pair = pair
    self.live_episodes = run.config.env.live_episodes
    self._run = run
    self._config = run.config
    self._envs: list[Env] = []

  def envs(self) -> list[Env]:
    """Return one environment per live episode. The first call opens them."""
    if not self._envs:
      env = self._config.env
      args = env_arguments(self._config)
      engine = base.load(env.kind).engine
      is_trusted = env.options.get("trusted") or self._config.models.kind == "scripted"
      if engine and engine.code_reads and not is_trusted:
        engines.check_walls(engine)
      if base.load(env.kind).needs_process:
        live = env.live_per_process
        count = self.live_episodes // live
        self._envs += open_envs(env.kind, args, count, live, env.timeout_s)
      else:
        self._envs += [base.make(env.kind, **args) for _ in range(self.live_episodes)]
    return self._envs

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
        f"--config.env.kind={self._config.env.kind} lists the task {task_id!r} twice: "
        "list each task once, in one split"
      )
    for name, tasks in zip(SPLITS, listings):
      self._run.store.put_tasks(name, tasks)

  def episodes(
    self, title: str, planned: Sequence[Planned], build: Build
  ) -> list[Episode]:
    """Play the missing episodes of policies at once, and return those of all jobs.

    Each finished episode is stored before it counts. If an episode ends in an error, a
    line is printed and the episode is not stored. The next command plays it again.

    Args:
      title: the name for readers, in the progress bar.
      planned: the policies, each with the episodes that it has to have.
      build: makes a policy; it is called only if an episode is missing.

    Returns:
      The episodes, ordered by policy, task and seed.

    Raises:
      CapReached: the next call could exceed --config.max_usd.
      ValueError: too many episodes in a row have failed.
    """
    distributed = self._config.distributed
    count = 0
    trials = []
    for spec, jobs in planned:
      self._run.store.sync(spec.key)
      stored = self._run.store.keys(spec.key)
      task_ids = list(dict.fromkeys(job.task.id for job in jobs))
      assigned_ids = set(task_ids[distributed.process :: distributed.processes])
      assigned = [job for job in jobs if job.task.id in assigned_ids]
      count += len(assigned)
      missing = [job for job in assigned if job.key not in stored]
      if missing:
        policy = build(spec)
        trials += [Trial(policy, job) for job in missing]
    if trials:
      with self._run.progress(title, count, count - len(trials), "ep") as bar:
        self._play(trials, bar)
    episodes = []
    for spec, jobs in planned:
      self._run.store.sync(spec.key)
      episodes += self._run.store.episodes(spec.key, {job.key for job in jobs})
    return episodes

  def _play(self, trials: Sequence[Trial], bar: tqdm) -> None:
    """Play episodes, and store each finished one."""
    episodes = run_episodes(
      trials,
      self.pair,
      self.envs(),
      self._run.budget,
      self._config.models.max_failures,
    )
    cost_usd = 0.0
    # If this block ends early, closing `episodes` ends the model calls in flight. This
    # must happen before the store is closed.
    with contextlib.closing(episodes):
      for ended in episodes:
        if isinstance(ended, Failure):
          policy, job = ended.trial
          name = f"{job.task.id} seed {job.seed}, {policy.spec.key}"
          print(f"left out: {name}: {ended.error}; run again to play it again")
        else:
          self._run.store.add(ended)
        cost_usd += sum(step.cost_usd for step in ended.steps)
        bar.set_postfix_str(format_usd(cost_usd), refresh=False)
        bar.update()

  def policies(
    self, planned: Sequence[PolicySpec], check_trained: Callable[[RouterFiles], None]
  ) -> Sequence[PolicySpec]:
    """Return the policies that can be evaluated: all of the planned ones.

    Args:
      planned: the policies.
      check_trained: raises an error unless all routers of a training seed are trained.
    """
    for files in self._run.all_files():
      check_trained(files)
    return planned

  def close(self) -> None:
    """Close the environments and the models."""
    while self._envs:
      self._envs.pop().close()
    self.pair.close()


class Stored:
  """Read the episodes of a run that another program has stored.

  Attributes:
    pair: None, because no model is called.
    live_episodes: 1, because no episode is played.
  """

  pair = None
  live_episodes = 1

  def __init__(self, run: "Run"):
    """Read from the store of a run."""
    self._config = run.config
    self._store = run.store

  def list_tasks(self, split: str) -> None:
    """Raise an error, because only the recording program knows the tasks.

    Raises:
      ValueError: always.
    """
    raise ValueError(f"no {split} task is recorded yet: record five tasks first")

  def episodes(
    self, title: str, planned: Sequence[Planned], build: Build
  ) -> list[Episode]:
    """Return the recorded episodes of all jobs, ordered by policy, task and seed.

    Args:
      title: not used.
      planned: the policies, each with the episodes that it has to have.
      build: not used.

    Raises:
      ValueError: episodes are missing, with up to three examples, or a router cannot
        learn from them, because they have no texts.
    """
    found = []
    for spec, jobs in planned:
      name = label_family(spec.family)
      keys = {job.key for job in jobs}
      absent = keys - self._store.keys(spec.key)
      if absent:
        counts = Counter(task_id for task_id, _ in sorted(absent))
        examples = [f"{n} of {id_!r:.80}" for id_, n in counts.most_common(3)]
        raise ValueError(
          f"{len(absent)} of {len(keys)} episodes of {name} are missing, such as "
          f"{', '.join(examples)}: record them first"
        )
      episodes = self._store.episodes(spec.key, keys)
      is_learnt = any(job.purpose not in SPLITS for job in jobs)
      for episode in episodes if is_learnt else ():
        if not any(step.observation or step.action for step in episode.steps):
          raise ValueError(
            f"episodes of {name} were recorded without texts to learn from: record new "
            "ones with texts under another --config.name"
          )
      found += episodes
    return found

  def policies(
    self, planned: Sequence[PolicySpec], check_trained: Callable[[RouterFiles], None]
  ) -> Sequence[PolicySpec]:
    """Return the boundaries, and the planned policies that are recorded completely.

    Args:
      planned: the policies.
      check_trained: not used, because no router has to play.

    Raises:
      ValueError: only the boundaries are recorded.
    """
    keys = set()
    for split in ("dev", "test"):
      jobs = list_evaluation(self._config, self._store.tasks(split), split)
      keys.update(job.key for job in jobs)
    recorded = []
    for spec in planned:
      if spec in BOUNDARIES or self._store.keys(spec.key) >= keys:
        recorded.append(spec)
    if len(recorded) <= len(BOUNDARIES):
      raise ValueError(
        "on dev and test only always-SMALL and always-LARGE are recorded: record "
        "another policy too"
      )
    return recorded

  def close(self) -> None:
    """Close nothing, because nothing is open."""


def open_pair(config: Config, path: Path) -> Pair:
  """Open the models that the router chooses from.

  Args:
    config: the run's configuration.
    path: the file of the run's store, in which the calls of API models are recorded.
  """
  models = config.models
  if models.kind == "scripted":
    return ScriptedPair(models, base.load(config.env.kind))
  if models.kind == RECORDED:
    from baar_jax.envs.code.adapter import read_functions
    from baar_jax.llms.recorded import RecordedPair

    return RecordedPair(models, read_functions(config.env.options.get("data", "")))
  # Other runs start faster without the client of API models.
  from baar_jax.llms.chat import ChatPair

  return ChatPair(models, Calls(path))


def env_arguments(config: Config) -> dict:
  """Return the keyword arguments with which `base.make` opens an environment.

  Raises:
    ValueError: an option of the environment is invalid.
  """
  env = config.env
  options = base.read_options(env.kind, env.options)
  if env.kind == "code":
    recording = config.models.recording if config.models.kind == RECORDED else ""
    options = dataclasses.replace(options, recording=recording)
  completed = base.load(env.kind).complete(options, Path(config.runs))
  args = {f"{split}_tasks": getattr(env, f"{split}_tasks") for split in SPLITS}
  return args | {"max_steps": env.max_steps, "options": vars(completed)}


def _open_mesh(config: Config) -> Mesh:
  """Connect the run's processes, and return the mesh of all their devices.

  Raises:
    ValueError: the processes have different configurations.
  """
  distributed = config.distributed
  # JAX must connect the processes before anything else uses JAX.
  if distributed.processes > 1:
    jax.distributed.initialize(
      distributed.coordinator, distributed.processes, distributed.process
    )
  first, *others = exchange(flatten(config))
  for other in others:
    for name, *_ in differences(first, other):
      if name not in OF_PROCESS:
        raise ValueError(
          f"the processes have different --config.{name}: "
          "start all processes with the same value"
        )
  return make_mesh(distributed.fsdp)


def _open_budget(config: Config, directory: Path, store: Store) -> DollarBudget | None:
  """Open a budget with this process's share of the remaining dollars of the run.

  Returns:
    The budget; None if `--config.max_usd` is 0, which is no cap.
  """
  if not config.max_usd:
    return None
  if config.models.kind != "chat":
    episodes = store.table()
    spent_usd = episodes.spent_usd[~episodes.reused].sum()
  else:
    spent_usd = read_spent(directory, len(config.models.names) + 1).at_most_usd
  left_usd = max(0.0, config.max_usd - spent_usd)
  # The budget has the whole cap, so that messages state it. The shares of the other
  # processes count as spent.
  others_usd = left_usd - left_usd / config.distributed.processes
  return DollarBudget(config.max_usd, spent_usd + others_usd)
