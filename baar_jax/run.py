"""A run's directory, and what every stage opens from it."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from tqdm import tqdm

from baar_jax.agent import Pair
from baar_jax.config import Config
from baar_jax.envs.base import Env
from baar_jax.envs.process import open_envs
from baar_jax.envs.sandbox import Sandbox
from baar_jax.episode import SMALL, Episode, Task
from baar_jax.llms.prices import Usage, cost_usd
from baar_jax.llms.scripted import SandboxErrors, ScienceWorldErrors, ScriptedPair
from baar_jax.policies import always
from baar_jax.rollout import Job, Policy, run_episodes
from baar_jax.store import Store

ERRORS = {"sandbox": SandboxErrors, "scienceworld": ScienceWorldErrors}
SPLITS = ("train", "test")
ABSENT = object()  # a field that one version of the configuration does not have
# What may change between stages of one run: it changes no result that is already stored.
FREE_FIELDS = ("runs", "env.processes", "env.live_per_process", "bopo.lam", "evaluate")


class Run:
  """The directory <runs>/<name>: config.json, episodes.sqlite, checkpoints/, metrics.jsonl,
  report/; and the environments and models of its config. Close it to end child processes."""

  def __init__(self, config: Config):
    """Opens or creates the directory.

    Raises:
      ValueError: it was made with another config, or cannot be written, or the models are not
        a priced pair.
    """
    self.config = config
    self.pair: Pair = ScriptedPair(config.models.names, ERRORS[config.env.kind]())
    for name in self.pair.names:
      cost_usd(name, Usage(0, 0, 0))  # a model without a price is found before anything is run
    self.dir = Path(config.runs) / config.name
    try:
      self.dir.mkdir(parents=True, exist_ok=True)
      self._check_config()
    except OSError as error:
      raise ValueError(
        f"cannot write to {self.dir} ({error.strerror}); set --config.runs"
      ) from None
    self.store = Store(self.dir / "episodes.sqlite")
    self.boundaries = (
      always(SMALL, "always-small"),
      always(len(self.pair.names) - 1, "always-large"),
    )
    self._envs: list[Env] = []
    # Shapes are compiled once for all stages, restarts and values of lam.
    jax.config.update("jax_compilation_cache_dir", str((self.dir / "compiled").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

  def _check_config(self) -> None:
    path = self.dir / "config.json"
    wanted = json.loads(json.dumps(dataclasses.asdict(self.config)))
    if path.exists():
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
          f"{self.dir} was made with {name}={was}, this config has {now}: "
          "set it back, or choose another --config.name"
        )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(wanted, indent=2))
    os.replace(temporary, path)

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
        self._envs = [Sandbox(**sizes) for _ in range(self.live_episodes)]
      else:
        gold = {"gold_dir": str(Path(self.config.runs) / "gold")}
        processes = self.live_episodes // c.live_per_process
        self._envs = open_envs(c.kind, sizes | gold, processes, c.live_per_process)
    return self._envs

  def tasks(self, split: str) -> list[Task]:
    """The tasks of a split; both splits are listed at once, and from the store ever after."""
    if not self.store.tasks(split):
      envs = self.envs()[0], self.envs()[-1]  # of different processes if there are two
      print("listing the tasks; the first time this can take a minute", file=sys.stderr)
      threads = ThreadPoolExecutor()
      listings = threads.map(lambda env, name: env.tasks(name), envs, SPLITS)
      threads.shutdown(wait=False)  # an interrupted listing, which may take minutes, is not awaited
      for name, tasks in zip(SPLITS, listings):
        self.store.put_tasks(name, tasks)
    return self.store.tasks(split)

  def collect(
    self, label: str, policy: Policy, jobs: Sequence[Job], call_budget: int | None = None
  ) -> list[Episode]:
    """Runs the jobs whose episodes are not stored yet, stores each as it ends, and returns all.

    An episode that ended in an error is reported and left out; the next run tries it again.
    """
    known = self.store.keys(policy.name)
    missing = [job for job in jobs if (job.task.id, job.seed) not in known]
    if missing:
      self._run_and_store(label, policy, missing, len(jobs), call_budget)
    wanted = {(job.task.id, job.seed) for job in jobs}
    return [e for e in self.store.episodes(policy.name) if (e.task_id, e.seed) in wanted]

  def _run_and_store(self, label, policy, missing, total, call_budget) -> None:
    failed, cost_usd = [], 0.0
    episodes = run_episodes(missing, policy, self.pair, self.envs(), call_budget)
    bar = tqdm(total=total, initial=total - len(missing), desc=label, unit="ep", disable=None)
    with bar:
      for episode in episodes:
        if episode.stop.startswith("error:"):
          failed.append(episode)
        else:
          self.store.add(episode)
        cost_usd += episode.cost_usd
        bar.set_postfix_str(f"${cost_usd:.2f}", refresh=False)
        bar.update()
    for episode in failed:
      print(f"left out: {episode.task_id} seed {episode.seed} of {policy.name}: {episode.stop}")

  def checkpoints(self, name: str) -> Path:
    """Where a stage keeps the checkpoints of the router `name`."""
    return self.dir / "checkpoints" / name

  def finish(self, stage: str) -> None:
    """Notes that a stage has been run to its end, for `require`."""
    self.store.finish(stage)

  def require(self, stage: str) -> None:
    """Raises ValueError unless the stage has been run to its end."""
    if not self.store.finished(stage):
      raise ValueError(f"{self.dir} has no finished {stage}: run --stage={stage} first")

  def log(self, **values) -> None:
    """Appends a line to metrics.jsonl."""
    with (self.dir / "metrics.jsonl").open("a") as file:
      file.write(json.dumps(values) + "\n")

  def close(self) -> None:
    for env in self._envs:
      env.close()
    self._envs = []
    self.store.close()


def _differences(made: dict, wanted: dict, prefix: str = ""):
  """(field, was, now) of every leaf that differs."""
  for key in sorted(made.keys() | wanted.keys()):
    was, now = made.get(key, ABSENT), wanted.get(key, ABSENT)
    if isinstance(was, dict) and isinstance(now, dict):
      yield from _differences(was, now, f"{prefix}{key}.")
    elif was != now:
      yield f"{prefix}{key}", was, now
