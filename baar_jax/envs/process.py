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
from baar_jax.envs.worker import KINDS, RETURNED_ERRORS
from baar_jax.episode import Task

WORKER = "baar_jax.envs.worker"


class _Child:
  """One child process with an environment per slot; it answers one call at a time.

  `process` is None after it died, until the next reset(); `open_slots` have an open handle.
  """

  def __init__(self, kind: str, kwargs: dict, slots: int, timeout_s: float) -> None:
    self._scratch = tempfile.TemporaryDirectory(prefix="baar_jax-", ignore_cleanup_errors=True)
    self._command = [*python_of(kind), WORKER, self._scratch.name, kind, json.dumps(kwargs)]
    self._environ = environ_of(kind)
    self._timeout_s = timeout_s
    self._lock = threading.Lock()
    self._cause_of_death = ""
    self.open_slots = set(range(slots))
    self._start()

  def _start(self) -> None:
    self._playing: set[int] = set()  # the slots whose episode is in this process
    # Ctrl-C reaches the parent alone; a child is killed with its JVM, as a group.
    options = {"env": self._environ, "start_new_session": True}
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    self.process = subprocess.Popen(self._command, **options)

  def call(self, slot: int, method: str, *args):
    """Calls a method of a slot's environment and returns its result.

    Raises EnvDied if the process of the slot's episode is gone, and RETURNED_ERRORS as the
    environment does.
    """
    with self._lock:
      if slot not in self.open_slots:
        raise EnvDied("the environment is closed")
      if self.process is not None and self.process.poll() is not None:
        self._kill(f"it exited with code {self.process.returncode}")
      if method in ("reset", "tasks"):  # they need no earlier state
        if self.process is None:
          self._start()
          self.read_answer(self._timeout_s)
      elif self.process is None or slot not in self._playing:
        raise EnvDied(f"the environment's process is gone: {self._cause_of_death}")
      if method == "reset":
        self._playing.add(slot)
      try:
        self.process.stdin.write(json.dumps([slot, method, args]).encode() + b"\n")
        self.process.stdin.flush()
      except OSError:
        raise self._kill("it closed its input") from None
      # A first listing may compute solutions for minutes; the environment limits its own calls.
      return self.read_answer(None if method == "tasks" else self._timeout_s)

  def read_answer(self, timeout_s: float | None):
    """The next answer. A child that has started says at first what its environment is like."""
    # The child sends one line per request, so no answer can wait unseen in the buffer.
    if not select.select([self.process.stdout], [], [], timeout_s)[0]:
      raise self._kill(f"no answer within {timeout_s:g} s")
    line = self.process.stdout.readline()
    if not line.endswith(b"\n"):
      raise self._kill("it ended without an answer")
    answer = json.loads(line)
    if "value" in answer:
      return answer["value"]
    if answer["survived"]:
      raise RETURNED_ERRORS[answer["error"]](answer["message"])
    raise self._kill(f"{answer['error']}: {answer['message']}")

  def _kill(self, cause: str) -> EnvDied:
    """Ends the process with everything that it started, and returns the error that says so."""
    process, self.process = self.process, None
    _kill_group(process)
    process.wait()
    process.stdout.close()
    with contextlib.suppress(OSError):  # a request that the child will never read
      process.stdin.close()
    self._cause_of_death = cause
    return EnvDied(f"the environment's process died: {cause}")

  def close(self, *slots: int) -> None:
    """Closes slots. The last one ends the child; who waits for its answer gets EnvDied at once."""
    self.open_slots -= set(slots)
    if not self.open_slots:
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

  def __init__(
    self, child: _Child, slot: int, system_prompt: str, code_actions: bool, scores_steps: bool
  ) -> None:
    self.system_prompt, self.code_actions = system_prompt, code_actions
    self.scores_steps = scores_steps
    self._child, self._slot = child, slot
    self._call = functools.partial(child.call, slot)
    self._state: dict = {}  # what the last reset or step answered

  def _move(self, method: str, text: str) -> str:
    self._state = {}
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
    if not self._state:
      raise RuntimeError("no episode has been started: call reset() first")
    if self._state["oracle"] is None:
      raise NotImplementedError(self._state["no_oracle"])
    return Oracle(**self._state["oracle"])

  def mistake(self, kind: str, key: str) -> str:
    return self._call("mistake", kind, key)

  @property
  def pid(self) -> int | None:
    """Of the child; None while there is none."""
    process = self._child.process
    return process.pid if process else None

  def close(self) -> None:
    """Gives the slot up; the last one of a child ends it."""
    self._child.close(self._slot)


def open_envs(
  kind: str, kwargs: dict, processes: int, live_per_process: int, timeout_s: float = 120.0
) -> list[ProcessEnv]:
  """Starts child processes and returns a handle per slot; neighbours are in different processes.

  The kind is one of KINDS, or "FILE.py:CLASS" of the user's own file; `kwargs` of its constructor
  are JSON's types. A child that takes longer than `timeout_s` for a call is killed. Raises
  ValueError if the kind or its arguments are wrong, or its engine is not installed.
  """
  if kind not in KINDS and ".py:" not in kind:
    raise ValueError(f"unknown environment {kind!r}; known: {', '.join(KINDS)}, FILE.py:CLASS")
  if kind in ENGINES:
    hide_process()  # agents' code must not read this process's keys
  children: list[_Child] = []
  try:
    for _ in range(processes):
      children.append(_Child(kind, kwargs, live_per_process, timeout_s))
    greetings = [child.read_answer(timeout_s) for child in children]
  except BaseException:
    for child in children:
      child.close(*child.open_slots)
    raise
  slots = range(live_per_process)
  return [ProcessEnv(c, slot, **g) for slot in slots for c, g in zip(children, greetings)]
