"""A run: its directory, and the environments and models that stages use."""

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pandas
from jax.sharding import Mesh
from tqdm import tqdm

from baar_jax.config import SERVED, Config
from baar_jax.envs import engines, table
from baar_jax.envs.base import Env
from baar_jax.envs.process import open_envs
from baar_jax.episode import SPLITS, Episode, Task
from baar_jax.llms.calls import Calls, read_spent
from baar_jax.llms.endpoints import check_models
from baar_jax.llms.pair import Pair
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.mesh import exchange, make_mesh
from baar_jax.rollout.budget import DollarBudget
from baar_jax.rollout.loop import Failure, run_episodes
from baar_jax.rollout.specs import Job, PolicySpec
from baar_jax.rollout.turn import Policy
from baar_jax.store import RESTORE, Store, read_config
from baar_jax.train.jobs import BOUNDARIES
from baar_jax.train.training import Training

# These fields may change between stages of one run. No stored result depends on them,
# nor any training but for the rounding of sums.
CHANGEABLE_FIELDS = """runs train_seeds env.processes env.live_per_process env.timeout_s
bopo.lam traces serve baselines profile.robustness evaluate value.prices distributed
max_usd dry_run models.key_variables models.concurrency models.token_limit_field
models.timeout_s models.retries models.max_failures sft.micro_episodes"""
CHANGEABLE = tuple(f"{name}." for name in CHANGEABLE_FIELDS.split())
OF_PROCESS = ("runs", "distributed.process", "env.processes", "env.live_per_process")


class Run:
  """A run's directory <runs>/<name>, and the environments and models of its config.

  Several processes share the directory. Each has its own store and its share of the
  tasks.
  """

  def __init__(self, config: Config):
    """Open the directory, or create it.

    Raises:
      ValueError: the directory or the models cannot be used.
    """
    check_models(config)
    self.config = config
    # The main process prints, logs and lists the tasks.
    self.is_main = config.distributed.process == 0
    self.dir = Path(config.runs) / config.name
    stored_config = read_config(self.dir)
    self.mesh = _open_mesh(config)
    self.tokenizer = self.dir / "tokenizer"
    number = "" if self.is_main else f"-{config.distributed.process}"
    path = self.dir / f"episodes{number}.sqlite"
    try:
      self.dir.mkdir(parents=True, exist_ok=True)
      # Two users of a directory would spend the same rest of a cap. The system frees
      # the lock after a kill.
      self._lock = (self.dir / f"lock{number}").open("a")
      fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      self.store = Store(path)
      self._check_config(stored_config)
    except BlockingIOError:
      problem = f"another process is using {self.dir}"
      remedy = "wait for it or choose another --config.name"
      raise ValueError(f"{problem}: {remedy}") from None
    self.pair = open_pair(config, path)
    self.budget = _open_budget(config, self.dir, self.store)
    self._envs: list[Env] = []
    # Shapes are compiled once for all runs. The run's directory keeps no programs,
    # because it may come from a stranger.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
      jax.config.update("jax_compilation_cache_dir", str(engines.cache() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

  def _check_config(self, stored: Config | None) -> None:
    """Refuse a config that contradicts the directory's; then write it there."""
    # A configuration binds nothing before tasks are stored.
    if not self.store.tasks("train"):
      if (self.dir / "checkpoints").exists():
        raise ValueError(f"{self.dir} has checkpoints and no tasks: {RESTORE}")
    elif stored:
      old = flatten(stored)
      new = flatten(self.config)
      for name in old | new:  # an option may be in one alone
        before = old.get(name)
        after = new.get(name)
        if before != after and not f"{name}.".startswith(CHANGEABLE):
          problem = f"{self.dir} was made with {name}={before!r}"
          remedy = "set it back, or choose another --config.name"
          raise ValueError(f"{problem}, this config has {after!r}: {remedy}")
    if self.is_main:
      path = self.dir / "config.tmp"
      path.write_text(json.dumps(dataclasses.asdict(self.config), indent=2))
      path.replace(path.with_suffix(".json"))

  def training(self, number: int = 0) -> Training:
    """Open the training of a training seed; 0 is the first."""
    marks = {"train_seed": number} if number else {}
    return Training(
      directory=self.dir,
      config=dataclasses.replace(self.config, seed=self.config.seed + number),
      mesh=self.mesh,
      number=number,
      store=self.store,
      live_episodes=self.live_episodes,
      is_main=self.is_main,
      log=functools.partial(self.log, **marks),
      progress=self.progress,
      print=self.print,
      collect=self.collect,
    )

  def trainings(self) -> list[Training]:
    """Open the training of each training seed.

    Each has directories and draws of its own.
    """
    return [self.training(number) for number in range(self.config.train_seeds)]

  @property
  def live_episodes(self) -> int:
    """Compute the number of episodes that are played at a time."""
    c = self.config.env
    return (c.processes or os.cpu_count()) * c.live_per_process

  def envs(self) -> list[Env]:
    """Open the environments on first use; return them."""
    if not self._envs:
      c = self.config.env
      args = env_arguments(self.config)
      count = self.live_episodes
      live = c.live_per_process
      if table.load(c.kind).needs_process:
        self._envs += open_envs(c.kind, args, count // live, live, c.timeout_s)
      else:
        self._envs += [table.make(c.kind, **args) for _ in range(count)]
    return self._envs

  def tasks(self, split: str) -> list[Task]:
    """Read the tasks of a split; list those of all splits on first use.

    Every process must call it: all take the main one's tasks.
    """
    if not self.store.tasks(split):
      if self.config.env.kind == SERVED:
        raise ValueError(
          f"clients have named no {split} task yet: five tasks fill all splits"
        )
      if self.is_main:
        self._list_tasks()
    for name in SPLITS:
      listing = exchange([vars(task) for task in self.store.tasks(name)])[0]
      if not self.is_main:
        self.store.put_tasks(name, [Task(**fields) for fields in listing])
    return self.store.tasks(split)

  def _list_tasks(self) -> None:
    """List the environment's tasks of all splits, and store them.

    Raises:
      ValueError: a task is listed twice.
    """
    print("listing the tasks; the first time this can take a minute", file=sys.stderr)
    envs = self.envs() * len(SPLITS)  # neighbours are in different processes
    with ThreadPoolExecutor() as threads:
      listings = list(threads.map(lambda env, name: env.tasks(name), envs, SPLITS))
    counts = Counter(task.id for task in itertools.chain(*listings))
    task_id, count = counts.most_common(1)[0]
    if count > 1:
      problem = f"--config.env.kind={self.config.env.kind} lists the task {task_id!r}"
      raise ValueError(f"{problem} twice: each is in one split, once")
    for name, tasks in zip(SPLITS, listings):
      self.store.put_tasks(name, tasks)

  def play(
    self,
    title: str,
    spec: PolicySpec,
    jobs: Sequence[Job],
    build: Callable[[PolicySpec], Policy],
  ) -> list[Episode]:
    """Play the jobs whose episodes are not stored yet, and store each as it ends.

    An episode that ended in an error is reported and left out; the next run tries it
    again. Clients play those of a served run.

    Args:
      title: of the progress bar.
      build: makes the policy, if an episode is missing.

    Returns:
      The episodes that were played now.

    Raises:
      CapReached: the next call may pass --config.max_usd.
      ValueError: clients still have to play some.
    """
    key = spec.key
    if self.config.env.kind == SERVED:
      self.check_played(BOUNDARIES if spec in BOUNDARIES else [spec], jobs)
      self.check_texts(spec, jobs)
      return []
    self.store.sync(key)
    stored = self.store.keys(key)
    d = self.config.distributed
    task_ids = list(dict.fromkeys(job.task.id for job in jobs))
    own_ids = set(task_ids[d.process :: d.processes])
    own = [job for job in jobs if job.task.id in own_ids]
    missing = [job for job in own if job.key not in stored]
    played = []
    if missing:
      most = self.config.models.max_failures
      policy = build(spec)
      episodes = run_episodes(
        missing, policy, self.pair, self.envs(), self.budget, most
      )
      bar = self.progress(title, len(own), len(own) - len(missing), "ep")
      # Calls in flight end before the store closes.
      with contextlib.closing(episodes), bar:
        cost_usd = 0.0
        for ended in episodes:
          if isinstance(ended, Failure):
            name = f"{ended.job.task.id} seed {ended.job.seed} of {key}"
            print(f"left out: {name}: error:{ended.error}")
          else:
            self.store.add(ended)
            played.append(ended)
          cost_usd += sum(step.cost_usd for step in ended.steps)
          bar.set_postfix_str(f"${cost_usd:.2f}", refresh=False)
          bar.update()
    self.store.sync(key)
    return played

  def collect(
    self,
    title: str,
    spec: PolicySpec,
    jobs: Sequence[Job],
    build: Callable[[PolicySpec], Policy],
  ) -> list[Episode]:
    """Play the jobs as `play` does; return the episodes of all, by task and seed."""
    played = self.play(title, spec, jobs, build)
    keys = {job.key for job in jobs}
    keys -= {(episode.task_id, episode.seed) for episode in played}
    episodes = played + self.store.episodes(spec.key, keys)
    return sorted(episodes, key=lambda episode: (episode.task_id, episode.seed))

  def check_played(self, specs: Sequence[PolicySpec], jobs: Sequence[Job]) -> None:
    """Raise ValueError if clients still have to play jobs of some policies."""
    keys = {job.key for job in jobs}
    missing = Counter()
    for spec in specs:
      for task_id, _ in sorted(keys - self.store.keys(spec.key)):
        missing[task_id, spec.key] += 1
    if missing:
      some = [
        f"{n} of {id_!r:.80} by {key}" for (id_, key), n in missing.most_common(3)
      ]
      count = f"{missing.total()} of {len(specs) * len(keys)} trials are missing"
      raise ValueError(
        f"{count}, such as {', '.join(some)}: serve them (docs/serving.md)"
      )

  def check_texts(self, spec: PolicySpec, jobs: Sequence[Job]) -> None:
    """Raise ValueError if clients stored no texts of a policy's jobs."""
    keys = {job.key for job in jobs}
    for episode in self.store.episodes(spec.key, keys):
      if not any(step.observation or step.action for step in episode.steps):
        problem = f"sessions of {spec.key} were stored without their texts"
        remedy = "serve another --config.name with --config.serve.record_text=True"
        raise ValueError(f"{problem}: {remedy}, to learn from them")

  def print(self, text: str) -> None:
    """Print a stage's result, once for all processes."""
    if self.is_main:
      print(text, flush=True)  # programs wait for a server's address

  def progress(self, title: str, total: int, done: int, unit: str) -> tqdm:
    """Open a progress bar, if the main process has a terminal."""
    # None leaves the choice to tqdm.
    disable = not self.is_main or None
    return tqdm(desc=title, total=total, initial=done, unit=unit, disable=disable)

  def require(self, stage: str) -> None:
    """Raise ValueError unless all processes have run the stage to its end."""
    if not all(exchange(self.store.finished(stage))):
      raise ValueError(f"{self.dir} has no finished {stage}: run --stage={stage} first")

  def log(self, **values: object) -> None:
    """Append a line to metrics.jsonl, once for all processes."""
    if self.is_main:
      with (self.dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")

  def close(self) -> None:
    """Close the environments, models, store and lock."""
    while self._envs:
      self._envs.pop().close()
    self.pair.close()
    self.store.close()
    self._lock.close()


def open_pair(config: Config, path: Path) -> Pair:
  """Open the configured models.

  Args:
    path: the store; API models record their calls there.
  """
  c = config.models
  if c.kind == "scripted":
    errors = table.load(config.env.kind).Errors(len(c.names), c.skills)
    return ScriptedPair(c.names, errors, c.prices)
  # A scripted run does without the client.
  from baar_jax.llms.chat import ChatPair

  return ChatPair(c, Calls(path))


def env_arguments(config: Config) -> dict:
  """Return the arguments of `table.make`. Raises ValueError if an option is wrong."""
  c = config.env
  options = table.read_options(c.kind, c.options)
  completed = table.load(c.kind).complete(options, Path(config.runs))
  args = {f"{split}_tasks": getattr(c, f"{split}_tasks") for split in SPLITS}
  return args | {"max_steps": c.max_steps, "options": vars(completed)}


def _open_mesh(config: Config) -> Mesh:
  """Join the run's processes, and make the mesh of all devices.

  Raises:
    ValueError: the processes have different configurations.
  """
  d = config.distributed
  # It must come before anything else that uses JAX.
  if d.processes > 1:
    jax.distributed.initialize(d.coordinator, d.processes, d.process)
  first, *others = exchange(flatten(config))
  for other in others:
    for name in first | other:
      if name not in OF_PROCESS and other.get(name) != first.get(name):
        problem = f"the processes have different --config.{name}"
        raise ValueError(f"{problem}: start all with one")
  return make_mesh(d.fsdp)


def _open_budget(config: Config, directory: Path, store: Store) -> DollarBudget | None:
  """Open the budget of this process: an equal share of the rest of the cap, if any."""
  if not config.max_usd:
    return None
  if config.models.kind == "scripted":
    episodes = store.table()
    spent_usd = episodes.spent_usd[~episodes.reused].sum()
  else:
    spent_usd = read_spent(directory, len(config.models.names) + 1).at_most_usd
  left_usd = max(0.0, config.max_usd - spent_usd)
  # The shares of the others count as spent, so that messages name the whole cap.
  others_usd = left_usd - left_usd / config.distributed.processes
  return DollarBudget(config.max_usd, spent_usd + others_usd)


def flatten(config: Config) -> dict[str, object]:
  """Map the names of all fields, such as bopo.lam, to their values."""
  return pandas.json_normalize(dataclasses.asdict(config)).to_dict("records")[0]
