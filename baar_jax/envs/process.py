"""Any environment in a child process, by JSON lines; several episodes may share one child.

A child that dies, hangs or fails is reported as EnvDied, and the next reset() starts a new one.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from baar_jax.envs.base import Env, EnvDied, Oracle
from baar_jax.envs.engines import environ_of, python_of
from baar_jax.envs.worker import KINDS, PASSED_ON
from baar_jax.episode import Task

WORKER = "baar_jax.envs.worker"
STARTS_ANEW = ("reset", "tasks")  # these need no earlier state


class _Child:
  """One child process with an environment per slot; one call at a time."""

  def __init__(self, kind: str, kwargs: dict, timeout_s: float) -> None:
    self._command = [*python_of(kind), WORKER, kind, json.dumps(kwargs)]
    self._environ = environ_of(kind)
    self._timeout_s = timeout_s
    self._lock = threading.Lock()
    self._counting = threading.Lock()
    self._ended = False
    self._why_dead = "it was closed"
    self._process: subprocess.Popen | None = None
    self.generation = 0
    self.open_slots = 0
    self._episodes = 0  # of the process that there is
    self._most_episodes = 0
    self._start()

  def _start(self) -> None:
    self.generation += 1
    self._episodes = 0
    self._process = subprocess.Popen(
      self._command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=self._environ,
      start_new_session=True,  # Ctrl-C is for the parent alone, and the JVM can be ended with it
    )

  @property
  def pid(self) -> int | None:
    return self._process.pid if self._process else None

  def first_answer(self) -> dict:
    """What the child says of itself once it has started."""
    with self._lock:
      shown = self._answer(self._timeout_s)["value"]
    self._most_episodes = shown.pop("episodes_per_process")
    return shown

  def call(self, generation: int, slot: int, method: str, *args) -> tuple[object, int]:
    """Calls a method of a slot's environment.

    Args:
      generation: of the child that holds the caller's episode.

    Returns:
      What the method returned, and the generation of the child that answered.

    Raises:
      EnvDied: the child is gone, or another than the caller's took its place.
      ValueError, NotImplementedError: as raised by the environment.
    """
    with self._lock:
      if self._ended:
        raise EnvDied("the environment is closed")
      if self._process is not None and self._process.poll() is not None:
        self._kill(f"it exited with code {self._process.returncode}")
      if method == "reset" and 0 < self._most_episodes <= self._episodes and self.open_slots == 1:
        self._kill("a fresh one takes over")
      if method in STARTS_ANEW:
        if self._process is None:
          self._start()
          self._answer(self._timeout_s)
      elif self._process is None or generation != self.generation:
        raise EnvDied(f"the environment's process is gone: {self._why_dead}")
      self._episodes += method == "reset"
      try:
        return self._exchange(slot, method, args), self.generation
      except KeyboardInterrupt:
        # The answer that is still to come would be taken for the next call's.
        self._kill("a call was interrupted")
        raise

  def _exchange(self, slot: int, method: str, args: tuple) -> object:
    try:
      self._process.stdin.write(json.dumps([slot, method, args]).encode() + b"\n")
      self._process.stdin.flush()
    except OSError:
      raise self._died("it closed its input") from None
    # A first listing makes solutions for minutes; the environment bounds its own calls there.
    return self._answer(None if method == "tasks" else self._timeout_s)["value"]

  def _answer(self, timeout_s: float | None) -> dict:
    # At most one line is ever under way, so nothing can wait unseen in the buffer.
    ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
    if not ready:
      raise self._died(f"no answer within {timeout_s:g} s")
    line = self._process.stdout.readline()
    if not line.endswith(b"\n"):
      raise self._died("it ended without an answer")
    answer = json.loads(line)
    error = answer.get("error")
    if error and answer["passed_on"]:
      raise PASSED_ON[error](answer["message"])
    if error:
      raise self._died(f"{error}: {answer['message']}")
    return answer

  def _died(self, why: str) -> EnvDied:
    self._kill(why)
    return EnvDied(f"the environment's process died: {why}")

  def _kill(self, why: str) -> None:
    """Ends the child with all that it started; its group may outlive it by a JVM."""
    self._why_dead = why
    process, self._process = self._process, None
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with contextlib.suppress(OSError):  # a request that the child will never read
      process.stdin.close()

  def end(self) -> None:
    """Ends the child for good; who waits for its answer is told at once."""
    self._ended = True
    process = self._process
    if process is not None and process.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with self._lock:
      if self._process is not None:
        self._kill("it was closed")

  def release(self) -> None:
    """Gives up one slot; the last one ends the child."""
    with self._counting:  # not the lock of calls, which one may hold for minutes
      self.open_slots -= 1
      last = self.open_slots == 0
    if last:
      self.end()


class ProcessEnv(Env):
  """An Env whose episodes run in a slot of a child process.

  Calls from several threads are safe as long as each handle is used by one at a time. What the
  expert says travels with each observation, so asking for it costs nothing.
  """

  def __init__(self, child: _Child, slot: int, system_prompt: str, code_actions: bool) -> None:
    self.system_prompt = system_prompt
    self.code_actions = code_actions
    self._child = child
    self._slot = slot
    self._generation = child.generation
    self._state: dict = {}
    self._closed = False
    child.open_slots += 1

  def _call(self, method: str, *args):
    if self._closed:
      raise EnvDied("the environment is closed")
    if method not in ("mistake", "score"):
      self._state = {}
    value, self._generation = self._child.call(self._generation, self._slot, method, *args)
    return value

  def tasks(self, split: str) -> list[Task]:
    return [Task(**fields) for fields in self._call("tasks", split)]

  def reset(self, task_id: str) -> str:
    self._state = self._call("reset", task_id)
    self.system_prompt = self._state["system_prompt"]
    return self._state["observation"]

  def step(self, action: str) -> tuple[str, bool]:
    self._state = self._call("step", action)
    return self._state["observation"], self._state["done"]

  def score(self) -> float:
    self._known()
    return self._call("score")

  def oracle(self) -> Oracle:
    known = self._known()
    if known["oracle"] is None:
      raise NotImplementedError(known["no_oracle"])
    return Oracle(**known["oracle"])

  def mistake(self, kind: str, key: str) -> str:
    return self._call("mistake", kind, key)

  def _known(self) -> dict:
    if not self._state:
      raise RuntimeError("no episode has been started: call reset() first")
    return self._state

  @property
  def pid(self) -> int | None:
    """Of the child; None while there is none."""
    return self._child.pid

  def close(self) -> None:
    """Gives the slot up; the last one of a child ends it."""
    if not self._closed:
      self._closed = True
      self._child.release()


def open_envs(
  kind: str, kwargs: dict, processes: int, live_per_process: int, timeout_s: float = 120.0
) -> list[ProcessEnv]:
  """Starts child processes side by side and opens their slots.

  Args:
    kind: one of KINDS, or "FILE.py:CLASS" for an environment of one's own.
    kwargs: the environment's, as JSON takes them.
    processes: how many; 0 is one per core.
    live_per_process: slots of each.
    timeout_s: of one call; over it the child is taken for hung and killed.

  Returns:
    One handle per slot, neighbours in different processes.

  Raises:
    ValueError: the kind or its arguments are wrong, or its engine is not installed.
  """
  if kind not in KINDS and ".py:" not in kind:
    raise ValueError(f"unknown environment {kind!r}; known: {', '.join(KINDS)}, FILE.py:CLASS")
  children: list[_Child] = []
  try:
    for _ in range(processes or os.cpu_count() or 1):
      children.append(_Child(kind, kwargs, timeout_s))
    shown = [child.first_answer() for child in children]
  except BaseException:
    for child in children:
      child.end()
    raise
  return [
    ProcessEnv(child, slot, **of_child)
    for slot in range(live_per_process)
    for child, of_child in zip(children, shown)
  ]


def memory_mb(envs: Sequence[ProcessEnv]) -> tuple[float, float] | None:
  """Resident memory of the children and all that they started: now, and the sum of the peaks.

  Returns:
    None where the system has no /proc.
  """
  groups = {env.pid for env in envs}
  now = peak = 0
  if not Path("/proc/self/status").exists():
    return None
  for directory in Path("/proc").glob("[0-9]*"):
    try:
      group = int((directory / "stat").read_text().rpartition(")")[2].split()[2])
      status = (directory / "status").read_text()
    except (OSError, IndexError):
      continue  # it ended meanwhile
    if group in groups:
      kilobytes = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in status.splitlines())
        if name in ("VmRSS", "VmHWM")
      }
      now += kilobytes.get("VmRSS", 0)
      peak += kilobytes.get("VmHWM", 0)
  return now / 1024, peak / 1024
