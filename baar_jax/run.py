"""A run's directory, and what every stage opens from it."""

import contextlib
import copy
import dataclasses
import fcntl
import itertools
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import psutil
from tqdm import tqdm

from baar_jax import mesh as sharding
from baar_jax.config import Config, ablate
from baar_jax.envs import engines
from baar_jax.envs.base import Env
from baar_jax.envs.process import ProcessEnv, open_envs
from baar_jax.envs.sandbox import Sandbox
from baar_jax.episode import SMALL, Episode, Task
from baar_jax.llms import pair as models
from baar_jax.rollout.budget import DollarBudget
from baar_jax.rollout.live import Job, Policy
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.policies import always
from baar_jax.router.build import check_pretrained
from baar_jax.store import Store

SPLITS = ("train", "test")
EXCHANGED = 256  # episodes that are sent to other processes at a time
ABSENT = object()  # a field that one version of the configuration does not have
# What may change between stages of one run: it changes no result that is already stored.
FREE_FIELDS = ("runs", "env.processes", "env.live_per_process", "env.timeout_s", "bopo.lam")
FREE_FIELDS += ("profile.robustness",)  # its trials are compared, and nothing is trained on them
FREE_FIELDS += ("baselines", "evaluate", "distributed", "bench", "max_usd", "dry_run")
FREE_FIELDS += tuple(
  f"models.{name}" for name in ("key_variables", "token_limit_field", "concurrency", "timeout_s")
)
FREE_FIELDS += ("models.retries", "models.record")
UNSTRATIFIED = "no-stratified"  # the ablation that changes what SFT imitates


class Run:
  """The directory <runs>/<name>: config.json, episodes.sqlite, checkpoints/, metrics.jsonl,
  report/; and the environments and models of its config. Close it to end child processes.

  Several processes share the directory, on a disk that all of them see. Each has a store of its
  own in it and runs its own share of the tasks; what one has stored, all get before they go on.
  """

  def __init__(self, config: Config):
    """Opens or creates the directory.

    Raises:
      ValueError: it was made with another config, cannot be written or is in use, or the models
        are not a priced pair.
    """
    self.config = config
    models.check(config)
    if config.router.weights:  # before hours of episodes
      check_pretrained(config.router)
    d = config.distributed
    sharding.join(d.coordinator, d.processes, d.process)
    self.first = config.distributed.process == 0
    if config.distributed.processes > 1:
      _same_flags(config)
    self.mesh = sharding.make_mesh(config.distributed.fsdp)
    if config.sft.micro_episodes % self.mesh.size:
      raise ValueError(
        f"--config.sft.micro_episodes is {config.sft.micro_episodes}; it must be a multiple of "
        f"the number of devices, {self.mesh.size}"
      )
    self.dir = Path(config.runs) / config.name
    try:
      self.dir.mkdir(parents=True, exist_ok=True)
      number = "" if self.first else f"-{config.distributed.process}"
      path = self.dir / f"episodes{number}.sqlite"
      self._lock = (self.dir / f"lock{number}").open("a")  # the cap is read once, at the start
      fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process, however
      self.store = Store(path)
      self._check_config()
    except BlockingIOError:
      raise ValueError(
        f"another process is using {self.dir}: wait for it or choose another --config.name"
      ) from None
    except OSError as error:
      raise ValueError(
        f"cannot write to {self.dir} ({error.strerror}); set --config.runs"
      ) from None
    self.pair = models.open_pair(config, path)
    self.cap = _open_cap(config, self.dir, self.store)
    self.tokenizer = self.dir / "tokenizer"
    self.boundaries = (
      always(SMALL, "always-small"),
      always(len(self.pair.names) - 1, "always-large"),
    )
    self.ablation = ""
    self._envs: list[Env] = []
    # Shapes are compiled once for all stages, restarts and values of lam.
    jax.config.update("jax_compilation_cache_dir", str((self.dir / "compiled").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

  def _check_config(self) -> None:
    path = self.dir / "config.json"
    wanted = json.loads(json.dumps(dataclasses.asdict(self.config)))
    if path.exists() and self.store.tasks("train"):  # before that nothing has been made with it
      try:
        made = json.loads(path.read_text())
      except ValueError:
        raise ValueError(f"{path} is not JSON; restore a copy, or choose another name") from None
      for name, was, now in _differences(made, wanted):
        if any(name == free or name.startswith(free + ".") for free in FREE_FIELDS):
          continue
        if ABSENT in (was, now):
          raise ValueError(
            f"{self.dir} was made by another version of this program, which differs in {name}: "
            "choose another --config.name"
          )
        raise ValueError(
          f"{self.dir} was made with {name}={was!r}, this config has {now!r}: "
          "set it back, or choose another --config.name"
        )
    if not self.first:
      return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(wanted, indent=2))
    os.replace(temporary, path)

  def ablated(self, name: str) -> "Run":
    """This run without one part of the method: the same store, models and environments."""
    other = copy.copy(self)
    other.config, other.ablation = ablate(self.config, name), name
    return other

  @property
  def labels(self) -> dict[str, str]:
    """What its lines in metrics.jsonl say of it."""
    return {"ablation": self.ablation} if self.ablation else {}

  @property
  def live_episodes(self) -> int:
    processes = self.config.env.processes or os.cpu_count() or 1
    return processes * self.config.env.live_per_process

  def envs(self) -> list[Env]:
    """The environments, opened on first use."""
    if not self._envs:
      c = self.config.env
      sizes = {"train_tasks": c.train_tasks, "test_tasks": c.test_tasks, "max_steps": c.max_steps}
      if c.kind == "sandbox":
        self._envs += [Sandbox(**sizes) for _ in range(self.live_episodes)]
        return self._envs
      if c.kind == "scienceworld":
        sizes["gold_dir"] = str(Path(self.config.runs) / "gold")
      elif c.kind in engines.ENGINES:
        sizes["data"] = str(engines.data_of(c.kind, c.data))
        sizes |= {"train_split": c.train_split, "test_split": c.test_split}
      processes = self.live_episodes // c.live_per_process
      self._envs += open_envs(c.kind, sizes, processes, c.live_per_process, c.timeout_s)
    return self._envs

  def tasks(self, split: str) -> list[Task]:
    """The tasks of a split; both splits are listed at once, and from the store ever after."""
    if self.first and not self.store.tasks(split):
      envs = self.envs()[0], self.envs()[-1]  # of different processes if there are two
      print("listing the tasks; the first time this can take a minute", file=sys.stderr)
      threads = ThreadPoolExecutor()
      listings = threads.map(lambda env, name: env.tasks(name), envs, SPLITS)
      threads.shutdown(wait=False)  # an interrupted listing, which may take minutes, is not awaited
      for name, tasks in zip(SPLITS, listings):
        self.store.put_tasks(name, tasks)
    if self.config.distributed.processes > 1:
      for name in SPLITS:
        listed = sharding.exchange([dataclasses.asdict(t) for t in self.store.tasks(name)])[0]
        if not self.first:
          self.store.put_tasks(name, [Task(**fields) for fields in listed])
    return self.store.tasks(split)

  def collect(
    self,
    label: str,
    policy: Policy,
    jobs: Sequence[Job],
    call_budget: int | None = None,
    usd_budget: float | None = None,
  ) -> list[Episode]:
    """Runs the jobs whose episodes are not stored yet, stores each as it ends, and returns all.

    Of several processes each runs the tasks that are its own, and all return the same. An episode
    that ended in an error is reported and left out; the next run tries it again.

    Raises:
      CapReached: the next call may pass --config.max_usd; what was finished is stored.
    """
    self._share(policy.name)
    known = self.store.keys(policy.name)
    place = {task_id: i for i, task_id in enumerate(dict.fromkeys(job.task.id for job in jobs))}
    c = self.config.distributed
    mine = [job for job in jobs if place[job.task.id] % c.processes == c.process]
    missing = [job for job in mine if (job.task.id, job.seed) not in known]
    if missing:
      limits = call_budget, usd_budget, self.cap
      self._run_and_store(label, policy, missing, len(mine), limits)
    self._share(policy.name)
    wanted = {(job.task.id, job.seed) for job in jobs}
    return [e for e in self.store.episodes(policy.name) if (e.task_id, e.seed) in wanted]

  def _share(self, policy: str) -> None:
    """Gives every process the stored episodes of a policy that any of them has."""
    if self.config.distributed.processes == 1:
      return
    own = self.store.keys(policy)
    held = [set(map(tuple, keys)) for keys in sharding.exchange(sorted(own))]
    lacking = sorted(set.union(*held) - set.intersection(*held))
    # Each is sent by the first process that has it.
    sender = {key: next(i for i, keys in enumerate(held) if key in keys) for key in lacking}
    for start in range(0, len(lacking), EXCHANGED):
      part = lacking[start : start + EXCHANGED]
      mine = {key for key in part if sender[key] == self.config.distributed.process}
      texts = [e.to_json() for e in self.store.episodes(policy) if (e.task_id, e.seed) in mine]
      for text in itertools.chain(*sharding.exchange(texts)):
        episode = Episode.from_json(text)
        if (episode.task_id, episode.seed) not in own:
          self.store.add(episode)

  def _run_and_store(self, label, policy, missing, total, limits) -> None:
    failed, cost_usd = [], 0.0
    episodes = run_episodes(missing, policy, self.pair, self.envs(), *limits)
    done = total - len(missing)
    bar = self.progress(total=total, initial=done, desc=label, unit="ep")
    with contextlib.closing(episodes), bar:  # no call is in flight when the books are closed
      for episode in episodes:
        if episode.stop.startswith("error:"):
          failed.append(episode)
        else:
          self.store.add(episode)
        cost_usd += episode.cost_usd
        bar.set_postfix_str(f"${cost_usd:.2f}", refresh=False)
        bar.update()
    self._log_environments()
    for episode in failed:
      print(f"left out: {episode.task_id} seed {episode.seed} of {policy.name}: {episode.stop}")

  def _log_environments(self) -> None:
    """Notes what the report says of them: their memory, and whether their tasks are our own."""
    c, envs = self.config.env, self.envs()
    used = None if c.kind == "sandbox" else memory_mb(envs)
    own = c.kind in engines.ENGINES and engines.wants_own_data(c.kind, c.data)
    if used:
      self.log(stage="environments", mb_per_live_episode=used / len(envs), own_tasks=own)

  def wait(self) -> None:
    """Waits until every process is here."""
    if self.config.distributed.processes > 1:
      sharding.exchange(None)

  def say(self, text: str) -> None:
    """Prints a stage's result, once for all processes."""
    if self.first:
      print(text)

  def progress(self, **settings) -> tqdm:
    """A progress bar on the first process's terminal, if it is one."""
    return tqdm(disable=None if self.first else True, **settings)

  def checkpoints(self, name: str) -> Path:
    """Where a stage keeps the checkpoints of the router `name`."""
    return self.dir / "checkpoints" / name

  def alone(self, stage: str) -> None:
    """Raises ValueError if there are other processes."""
    if self.config.distributed.processes > 1:
      raise ValueError(f"--stage={stage} runs in one process: leave out --config.distributed")

  def finish(self, stage: str) -> None:
    """Notes that a stage has been run to its end, for `require`."""
    self.store.finish(stage)

  def require(self, stage: str) -> None:
    """Raises ValueError, in every process, unless all have run the stage to its end."""
    if not all(sharding.exchange(self.store.finished(stage))):
      raise ValueError(f"{self.dir} has no finished {stage}: run --stage={stage} first")

  def log(self, **values) -> None:
    """Appends a line to metrics.jsonl, once for all processes."""
    if not self.first:
      return
    with (self.dir / "metrics.jsonl").open("a") as file:
      file.write(json.dumps(values) + "\n")

  def log_once(self, **values) -> None:
    """Appends a line unless the newest one of the same stage says the same."""
    path, newest = self.dir / "metrics.jsonl", None
    for line in path.read_text().splitlines() if self.first and path.exists() else ():
      if f'"stage": "{values["stage"]}"' in line and line.endswith("}"):  # not cut by a kill
        newest = json.loads(line)
    if newest != json.loads(json.dumps(values)):
      self.log(**values)

  def close(self) -> None:
    for env in self._envs:
      env.close()
    self._envs.clear()
    self.pair.close()
    self.store.close()
    self._lock.close()


def memory_mb(envs: Sequence[ProcessEnv]) -> float:
  """Resident memory of the environments' processes and of all that these have started."""
  total = 0
  for pid in {env.pid for env in envs} - {None}:
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
      process = psutil.Process(pid)
      total += sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
  return total / 2**20


def _open_cap(config: Config, directory: Path, store: Store) -> DollarBudget | None:
  """What the run may still spend, with all that it has spent counted; None where it has no cap.

  Of several processes each gets an equal share of what is left, so that together they keep it. The
  dollars of scripted models are those of the episodes of this process's store.
  """
  if not config.max_usd:
    return None
  cap = DollarBudget(config.max_usd)
  if config.models.kind == "scripted":
    episodes = store.table()
    cap.spend(episodes.spent_usd[~episodes.reused].sum())
  else:
    cap.spend(models.spent(directory, config.models.names).at_most_usd)
  processes = config.distributed.processes
  if processes > 1:
    left = max(0.0, cap.remaining)
    cap.spend(left - left / processes)
  return cap


def _same_flags(config: Config) -> None:
  """Raises ValueError in every process where they would not do the same."""
  mine = dataclasses.asdict(config)
  del mine["runs"], mine["distributed"]["process"]
  del mine["env"]["processes"], mine["env"]["live_per_process"]
  first, *others = sharding.exchange(mine)
  for number, other in enumerate(others, 1):
    for name, here, there in _differences(first, other):
      raise ValueError(
        f"process 0 has {name}={here}, process {number} has {there}: "
        "start all with the same flags but --config.distributed.process"
      )


def _differences(made: dict, wanted: dict, prefix: str = ""):
  """(field, was, now) of every leaf that differs."""
  for key in sorted(made.keys() | wanted.keys()):
    was, now = made.get(key, ABSENT), wanted.get(key, ABSENT)
    if isinstance(was, dict) and isinstance(now, dict):
      yield from _differences(was, now, f"{prefix}{key}.")
    elif was != now:
      yield f"{prefix}{key}", was, now
