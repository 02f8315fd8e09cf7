"""Run environments in child processes.

Parent and child exchange lines of JSON. A child may run several episodes, each in its
own slot. If a child dies, hangs or fails, the parent raises EnvDied, and the next
reset() starts a new child. The first half of this file runs in the child.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from baar_jax.envs import base
from baar_jax.envs.base import Env, EnvDied, Oracle
from baar_jax.envs.engines import can_confine, command_of, confine, environ_of
from baar_jax.episode import Task

# If the child raises one of these errors, the parent raises the same error. Any other
# error counts as a bug of the environment, and the parent ends the child. A ValueError
# in step() or score() counts as a bug, too.
RETURNED = {
  error.__name__: error for error in (ValueError, NotImplementedError, EnvDied)
}
FREE_METHODS = ("tasks", "reset")  # methods that work without a live episode


def _is_right(name: str, result: Any) -> bool:
  """Return whether a method of an environment gave what `Env` says."""
  if name == "tasks":
    is_list = isinstance(result, list) and {*map(type, result)} == {Task}
    return is_list and all(type(t.max_steps) is int and t.max_steps > 0 for t in result)
  if name == "step":
    return isinstance(result, tuple) and [*map(type, result)] == [str, bool]
  if name == "score":
    return isinstance(result, int | float) and 0 <= result <= 1
  return isinstance(result, Oracle if name == "oracle" else str)


def answer_requests(scratch: str, kind: str, kwargs: str) -> None:
  """Run the child: answer requests until the input ends or the parent has ended.

  Args:
    scratch: the child's directory for temporary files, which is removed when the child
      ends.
    kind: the kind of environment; see `base.load`.
    kwargs: the keyword arguments of `base.make`, as JSON.
  """
  # Requests and answers get file descriptors of their own. So an environment can
  # neither read a request nor print into an answer.
  requests = os.fdopen(os.dup(0))
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  tempfile.tempdir = scratch
  threading.Thread(target=_end_with, args=(os.getppid(), scratch), daemon=True).start()
  make = functools.partial(base.make, kind, **json.loads(kwargs))
  env_of: dict[int, Env] = defaultdict(make)  # one environment per slot
  for line in requests:
    slot, method, args = json.loads(line)
    try:
      env = env_of[slot]
      value = getattr(env, method)
      if callable(value):
        value = value(*args)
      answer = {"value": value}
      if not _is_right(method, value):
        answer = _refuse(env, method, value)
    except Exception as error:  # The parent gets every error of an environment.
      answer = _describe(error, method)
    print(json.dumps(answer, default=vars), file=answers, flush=True)


def _end_with(parent: int, scratch: str) -> None:
  """Wait until the parent has ended; then kill the child's process group.

  Args:
    parent: the parent's process id.
    scratch: the child's directory for temporary files, removed first.
  """
  while os.getppid() == parent:
    time.sleep(1.0)
  shutil.rmtree(scratch, ignore_errors=True)
  os.killpg(os.getpgrp(), signal.SIGKILL)


def _refuse(env: Env, name: str, value: object) -> dict[str, str]:
  """Write the answer to a call that gave a value of the wrong kind."""
  message = (
    f"{type(env).__name__}.{name} gave {value!r:.80}: give what Env.{name} in "
    "baar_jax/envs/base.py says"
  )
  return {"error": "ValueError", "message": message}


def _describe(error: Exception, method: str) -> dict[str, str]:
  """Write the answer to a call that raised an error.

  Returns:
    {"error": name, "message": text} if the parent is to raise the same error. Otherwise
    {"death": cause}; the parent then ends this process and reports the cause.
  """
  name = type(error).__name__
  message = [*str(error).splitlines(), ""][0]
  is_bug = name == "ValueError" and method in ("step", "score")
  if name in RETURNED and not is_bug:
    return {"error": name, "message": message}
  frame = traceback.extract_tb(error.__traceback__)[-1]
  return {"death": f"{name}: {message} ({Path(frame.filename).name}:{frame.lineno})"}


# One thread starts all children, because bubblewrap ends what it runs when the thread
# that has started it ends.
STARTER = ThreadPoolExecutor(1)
MAX_ANSWER_BYTES = 64 << 20  # A longer answer is cut, and counts as the child's death.


class Child:
  """The parent's handle of a child process, with one environment per slot."""

  def __init__(self, kind: str, kwargs: dict, timeout_s: float) -> None:
    """Prepare a child; the first call starts its process.

    Args:
      kind: the kind of environment; see `base.load`.
      kwargs: the keyword arguments of `base.make`; JSON must be able to write them.
      timeout_s: a child that needs more seconds for a call is killed.

    Raises:
      ValueError: the kind is wrong, or its engine is not installed.
    """
    scratch = tempfile.TemporaryDirectory(
      prefix="baar_jax-", ignore_cleanup_errors=True
    )
    engine = base.load(kind).engine
    arguments = [scratch.name, kind, json.dumps(kwargs)]
    command = [*command_of(engine), "baar_jax.envs.process", *arguments]
    errors = None
    options = kwargs.get("options", {})
    is_walled = engine and engine.code_reads and not options.get("trusted")
    if is_walled and can_confine(engine):
      data = Path(options["data"], engine.code_reads)
      command = confine(engine, data, scratch.name) + command
      errors = subprocess.DEVNULL  # A terminal would give the user's input to the code.
    self._start = functools.partial(
      STARTER.submit,
      subprocess.Popen,
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=errors,
      env=environ_of(engine),
      # The child leads a process group of its own. So Ctrl-C reaches the parent only,
      # and killing the group also kills the Java process that a child may start.
      start_new_session=True,
    )
    self._scratch = scratch
    self._timeout_s = timeout_s
    self._lock = threading.Lock()
    self._closed = False
    self._live_slots: set[int] = set()  # slots with a live episode in the process
    self._cause_of_death = "no episode has been started"
    # None stands for no process: before the first call, and after a process was killed.
    self.process: subprocess.Popen | None = None

  def call(self, slot: int, method: str, *args: str) -> Any:
    """Call a method of a slot's environment and return its result.

    Args:
      slot: index of the environment in the child.
      method: the name of a method or an attribute of Env.
      *args: the method's arguments.

    Raises:
      EnvDied: the process with the slot's episode has died or been closed.
      ValueError: the environment raised it.
      NotImplementedError: the environment raised it.
    """
    with self._lock:
      if self._closed:
        raise EnvDied("the environment is closed: open a new one")
      if method in FREE_METHODS:
        self.process = self.process or self._start().result()
      elif slot not in self._live_slots:
        raise EnvDied(f"no live episode ({self._cause_of_death}): call reset() first")
      if method == "reset":
        self._live_slots.add(slot)
      # The first listing of tasks may take minutes, because the engine searches for
      # solutions. Each search has its own time limit in the engine.
      timeout_s = None if method == "tasks" else self._timeout_s
      answer = self._ask(json.dumps([slot, method, args]), timeout_s)
      if "death" in answer:
        raise self._kill(answer["death"])
      if "error" in answer:
        raise RETURNED[answer["error"]](answer["message"])
      return answer["value"]

  def _ask(self, request: str, timeout_s: float | None) -> dict[str, Any]:
    """Send a request to the child and return its answer.

    Args:
      request: one line of JSON.
      timeout_s: seconds to wait; None is without a limit.

    Raises:
      EnvDied: no answer came in time, or the child ended.
    """
    answers = self.process.stdout
    try:
      self.process.stdin.write(request.encode() + b"\n")
      self.process.stdin.flush()
      # The child sends one line per request, so the read buffer is empty here and
      # select() sees every answer.
      if not select.select([answers], [], [], timeout_s)[0]:
        limit = "the limit --config.env.timeout_s"
        raise self._kill(f"no answer in {timeout_s:g} s, {limit}")
      return json.loads(answers.readline(MAX_ANSWER_BYTES))
    # The child has ended or cut its answer, or its answer is no JSON.
    except (OSError, ValueError, RecursionError):
      raise self._kill("it ended without an answer") from None

  def _kill(self, cause: str) -> EnvDied:
    """Kill the child's process group, and return the EnvDied that reports the cause."""
    process = self.process
    self.process = None
    self._live_slots.clear()
    self._cause_of_death = cause
    # Closing the pipe of an unread request raises OSError.
    with contextlib.suppress(OSError), process:
      _kill_group(process)
    return EnvDied(
      f"the environment's process died ({cause}): "
      "correct the environment or its settings"
    )

  def close(self) -> None:
    """Kill the child; a thread that waits for its answer gets EnvDied at once."""
    self._closed = True
    if (process := self.process) is not None:
      _kill_group(process)  # A call may hold the lock for minutes: do not wait for it.
    with self._lock:
      if self.process is not None:
        self._kill("it was closed")
      self._scratch.cleanup()


def _kill_group(process: subprocess.Popen) -> None:
  """Kill a process and all processes of its group."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)


class ProcessEnv(Env):
  """The parent's handle of an environment that runs in a slot of a child.

  Only one thread at a time may use a handle. Each method may raise EnvDied; see
  `Child.call`.
  """

  def __init__(
    self,
    environment: type[Env],
    child: Child,
    slot: int,
  ) -> None:
    """Connect to a slot of a child.

    Args:
      environment: the class of the environment.
      child: the child process.
      slot: index of the environment in the child.
    """
    self.code_actions = environment.code_actions
    self.scores_steps = environment.scores_steps
    self.opening = environment.opening
    self.success_score = environment.success_score
    self.child = child
    self._call = functools.partial(child.call, slot)

  @property
  def system_prompt(self) -> str:
    """Return the agent's instructions; see Env."""
    return self._call("system_prompt")

  def tasks(self, split: str) -> list[Task]:
    """Return a split's tasks; see Env.tasks."""
    return [Task(**fields) for fields in self._call("tasks", split)]

  def reset(self, task_id: str) -> str:
    """Start a task and return the first observation; see Env.reset."""
    return self._call("reset", task_id)

  def step(self, action: str) -> tuple[str, bool]:
    """Execute an action; see Env.step."""
    return tuple(self._call("step", action))

  def score(self) -> float:
    """Return the current score; see Env.score."""
    return self._call("score")

  def oracle(self) -> Oracle:
    """Return the expert's next step; see Env.oracle."""
    return Oracle(**self._call("oracle"))

  def mistake(self, kind: str, key: str) -> str:
    """Return a wrong action in place of the expert's; see Env.mistake."""
    return self._call("mistake", kind, key)

  def close(self) -> None:
    """Kill the child, and with it the episodes of its other slots."""
    self.child.close()


def open_envs(
  kind: str,
  kwargs: dict,
  processes: int,
  live_per_process: int,
  timeout_s: float = 120.0,
) -> list[ProcessEnv]:
  """Open one environment for each slot of each child process.

  Args:
    kind: the kind of environment; see `base.load`.
    kwargs: the keyword arguments of `base.make`; JSON must be able to write them.
    processes: number of child processes.
    live_per_process: number of slots of each child.
    timeout_s: a child that needs more seconds for a call is killed.

  Returns:
    The environments. Neighbours in the list are in different children, if there are
    several.

  Raises:
    ValueError: the kind or an option is wrong, or the engine is not installed.
  """
  environment = base.load(kind)
  children = [Child(kind, kwargs, timeout_s) for _ in range(processes)]
  envs = []
  for slot in range(live_per_process):
    envs += [ProcessEnv(environment, child, slot) for child in children]
  return envs


if __name__ == "__main__":
  answer_requests(*sys.argv[1:])
