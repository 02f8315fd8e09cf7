"""Runs any environment in a child process, by JSON lines; several episodes may share one child.

A child that dies, hangs or fails is reported as EnvDied, and the next reset() starts a new one.
"""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import tempfile
import threading

from baar_jax.envs.base import Env, EnvDied, Oracle
from baar_jax.envs.engines import ENGINES, environ_of, hide_process, python_of
from baar_jax.envs.worker import RETURNED_ERRORS
from baar_jax.episode import Task


class _Child:
  """One child process with an environment per slot; it answers one call at a time.

  `process` is None after it died, until the next reset().
  """

  def __init__(self, kind: str, kwargs: dict, timeout_s: float) -> None:
    self._scratch = tempfile.TemporaryDirectory(prefix="baar_jax-", ignore_cleanup_errors=True)
    command = [*python_of(kind), "baar_jax.envs.worker", self._scratch.name, kind]
    # Ctrl-C reaches the parent alone; a child is killed with its JVM, as a group.
    options = {"env": environ_of(kind), "start_new_session": True}
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    self._start = functools.partial(subprocess.Popen, [*command, json.dumps(kwargs)], **options)
    self._timeout_s = timeout_s
    self._lock = threading.Lock()
    self._closed, self._cause_of_death = False, "no episode has begun"
    self._playing: set[int] = set()  # the slots whose episode is in this process
    self.process: subprocess.Popen | None = self._start()

  def call(self, slot: int, method: str, *args):
    """Calls a method of a slot's environment and returns its result.

    Raises EnvDied if the process of the slot's episode is gone, and RETURNED_ERRORS as the
    environment does.
    """
    with self._lock:
      if self._closed:
        raise EnvDied("the environment is closed")
      if method in ("greet", "tasks", "reset"):  # they need no earlier state
        self.process = self.process or self._start()
      elif slot not in self._playing:
        raise EnvDied(f"the environment's process is gone: {self._cause_of_death}")
      if method == "reset":
        self._playing.add(slot)
      # A first listing may compute solutions for minutes; the environment limits its own calls.
      timeout_s = None if method == "tasks" else self._timeout_s
      try:
        self.process.stdin.write(json.dumps([slot, method, args]).encode() + b"\n")
        self.process.stdin.flush()
        # The child sends one line per request, so no answer can wait unseen in the buffer.
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
          raise self._kill(f"no answer in {timeout_s:g} s")
        line = self.process.stdout.readline()
      except OSError:
        line = b""
      if not line.endswith(b"\n"):
        raise self._kill("it ended without an answer")
      answer = json.loads(line)
      if "death" in answer:
        raise self._kill(answer["death"])
      if "error" in answer:
        raise RETURNED_ERRORS[answer["error"]](answer["message"])
      return answer["value"]

  def _kill(self, cause: str) -> EnvDied:
    """Ends the process with everything that it started, and returns the error that says so."""
    process, self.process = self.process, None
    self._playing.clear()
    _kill_group(process)
    process.wait()
    process.stdout.close()
    with contextlib.suppress(OSError):  # a request that the child will never read
      process.stdin.close()
    self._cause_of_death = cause
    return EnvDied(f"the environment's process died: {cause}")

  def close(self) -> None:
    """Ends the child. Who waits for its answer gets EnvDied at once."""
    self._closed = True
    if (process := self.process) is not None:
      _kill_group(process)  # without the lock: a call may hold it for minutes
    with self._lock:
      if self.process is not None:
        self._kill("it was closed")
      self._scratch.cleanup()


def _kill_group(process: subprocess.Popen) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)


class ProcessEnv(Env):
  """An Env whose episodes run in a slot of a child process.

  A handle serves one thread at a time. The oracle travels with each observation.
  """

  def __init__(self, child: _Child, slot: int, greeting: dict) -> None:
    """`greeting` has the attributes of the environment in the child."""
    vars(self).update(greeting)
    self._child = child
    self._call = functools.partial(child.call, slot)
    self._state: dict = {}  # what the last reset or step answered

  def _move(self, method: str, text: str) -> str:
    self._state = self._call(method, text)
    self.system_prompt = self._state["system_prompt"]
    return self._state["observation"]

  def tasks(self, split: str) -> list[Task]:
    return [Task(**fields) for fields in self._call("tasks", split)]

  def reset(self, task_id: str) -> str:
    return self._move("reset", task_id)

  def step(self, action: str) -> tuple[str, bool]:
    return self._move("step", action), self._state["done"]

  def score(self) -> float:
    return self._call("score")

  def oracle(self) -> Oracle:
    # Where none came with the observation, the environment raises what says why.
    return Oracle(**(self._state.get("oracle") or self._call("oracle")))

  def mistake(self, kind: str, key: str) -> str:
    return self._call("mistake", kind, key)

  @property
  def pid(self) -> int | None:
    """Of the child; None while there is none."""
    process = self._child.process
    return process.pid if process else None

  def close(self) -> None:
    """Ends the child, with the episodes of its other slots."""
    self._child.close()


def open_envs(
  kind: str, kwargs: dict, processes: int, live_per_process: int, timeout_s: float = 120.0
) -> list[ProcessEnv]:
  """Starts child processes and returns a handle per slot; neighbours are in different processes.

  The kind is one of worker.KINDS, or "FILE.py:CLASS" of the user's own file; `kwargs` of its
  constructor are JSON's types. A child that takes longer than `timeout_s` for a call is killed.
  Raises ValueError if the kind or its arguments are wrong, or its engine is not installed.
  """
  if kind in ENGINES:
    hide_process()  # agents' code must not read this process's keys
  children = [_Child(kind, kwargs, timeout_s) for _ in range(processes)]
  try:
    greeting = children[0].call(0, "greet")
  except BaseException:
    for child in children:
      child.close()
    raise
  return [ProcessEnv(c, slot, greeting) for slot in range(live_per_process) for c in children]
