"""Runs environments in child processes, by JSON lines; episodes may share one.

A child that dies, hangs or fails is reported as EnvDied, and the next reset() starts a
new one. The first half of this file is the child's side.
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from baar_jax.envs import table
from baar_jax.envs.base import Env, EnvDied, Oracle
from baar_jax.envs.engines import command_of, environ_of, hide_process
from baar_jax.episode import Task


class WrongResult(ValueError):
  """A method of an environment returned a value that its protocol forbids."""


# What the parent raises by the name of the child's error. Any other ends the child, and
# so does a ValueError within step or score, which is the environment's own.
RETURNED = (WrongResult, ValueError, NotImplementedError, EnvDied)
RETURNED_ERRORS = {error.__name__: error for error in RETURNED}
FREE_METHODS = ("greet", "tasks", "reset")  # they need no earlier state of a slot
GREETING = ("system_prompt", "code_actions", "scores_steps")


def _are_types(values: Iterable[object], *types: type) -> bool:
  return [*map(type, values)] == [*types]


def _is_task(task: object) -> bool:
  return type(task) is Task and _are_types(vars(task).values(), str, str, str, int)


TEXT = ("a text", lambda r: isinstance(r, str))
EXPECTED = {  # of each method: words, and whether a result is right
  "tasks": (
    "one Task or more in each split",
    lambda r: isinstance(r, list) and r and all(map(_is_task, r)),
  ),
  "reset": TEXT,
  "step": ("(text, bool)", lambda r: isinstance(r, tuple) and _are_types(r, str, bool)),
  "score": (
    "a number in [0, 1]",
    lambda r: isinstance(r, int | float) and 0 <= r <= 1,
  ),
  "oracle": ("an Oracle", lambda r: isinstance(r, Oracle)),
  "mistake": TEXT,
  "system_prompt": TEXT,
}


def answer_requests(scratch: str, kind: str, kwargs: str) -> None:
  """Answer as the child until the input ends or the parent is gone.

  Args:
    scratch: the child's directory for temporary files, which ends with it.
    kind: of the environment.
    kwargs: those of `table.make`, as JSON.
  """
  # What an environment prints must not mix with the answers, and it must not read the
  # requests.
  requests = os.fdopen(os.dup(0))
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  tempfile.tempdir = scratch
  threading.Thread(target=_end_with, args=(os.getppid(), scratch), daemon=True).start()
  make = functools.partial(table.make, kind, **json.loads(kwargs))
  env_of: dict[int, Env] = defaultdict(make)  # by slot
  for line in requests:
    slot, method, args = json.loads(line)
    try:
      answer = {"value": _call(env_of[slot], method, args)}
    except Exception as error:  # the process boundary: the parent raises it
      answer = _describe(error, method)
    print(json.dumps(answer, default=vars), file=answers, flush=True)


def _end_with(parent: int, scratch: str) -> None:
  """End the child and all that it started once its parent is gone."""
  while os.getppid() == parent:
    time.sleep(1.0)
  shutil.rmtree(scratch, ignore_errors=True)
  os.killpg(os.getpgrp(), signal.SIGKILL)


def _call(env: Env, method: str, args: list) -> object:
  """Return one method's result.

  Prompt and oracle, which may change, travel with each observation.
  """
  if method == "greet":
    _check(env, "system_prompt", env.system_prompt)
    return {name: getattr(env, name) for name in GREETING}
  result = _check(env, method, getattr(env, method)(*args), *args)
  if method not in ("reset", "step"):
    return result
  observation, done = (result, False) if method == "reset" else result
  oracle = None
  with contextlib.suppress(NotImplementedError):
    if not done:
      oracle = _check(env, "oracle", env.oracle())
  return observation, done, env.system_prompt, oracle


def _describe(error: Exception, method: str) -> dict[str, str]:
  """Describe an error that the parent raises, or the cause of this process's death."""
  name = type(error).__name__
  message = [*str(error).splitlines(), ""][0]
  own = name == "ValueError" and method in ("step", "score")
  if name in RETURNED_ERRORS and not own:
    return {"error": name, "message": message}
  frame = traceback.extract_tb(error.__traceback__)[-1]
  return {"death": f"{name}: {message} ({Path(frame.filename).name}:{frame.lineno})"}


def _check(env: Env, name: str, result: Any, *args: object) -> Any:
  expected, is_right = EXPECTED[name]
  if not is_right(result):
    call = f"{type(env).__name__}.{name}"
    if args:
      call += f"({', '.join(map(repr, args)):.80})"
    raise WrongResult(f"{call} gave {result!r:.80}; expected {expected}")
  return result


class Child:
  """The parent's end of a child process with an environment per slot."""

  def __init__(self, kind: str, kwargs: dict, timeout_s: float) -> None:
    scratch = tempfile.TemporaryDirectory(
      prefix="baar_jax-", ignore_cleanup_errors=True
    )
    engine = table.load(kind).engine
    arguments = [scratch.name, kind, json.dumps(kwargs)]
    self._start = functools.partial(
      subprocess.Popen,
      [*command_of(engine), "baar_jax.envs.process", *arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=environ_of(engine),
      # Ctrl-C reaches the parent alone; a child is killed with its JVM, as a group.
      start_new_session=True,
    )
    self._scratch = scratch
    self._timeout_s = timeout_s
    self._lock = threading.Lock()
    self._closed = False
    self._playing: set[int] = set()  # the slots whose episode is in this process
    self._cause_of_death = "no episode has begun"
    # None until a call starts it, and after it died.
    self.process: subprocess.Popen | None = None

  def call(self, slot: int, method: str, *args: str) -> Any:
    """Return the result of a method of a slot's environment.

    Raises:
      EnvDied: the process of the slot's episode is gone.
      ValueError, NotImplementedError: as RETURNED_ERRORS of the environment.
    """
    with self._lock:
      if self._closed:
        raise EnvDied("the environment is closed")
      if method in FREE_METHODS:
        self.process = self.process or self._start()
      elif slot not in self._playing:
        raise EnvDied(f"the environment's process is gone: {self._cause_of_death}")
      if method == "reset":
        self._playing.add(slot)
      # A first listing may compute solutions for minutes; the environment limits its
      # own calls.
      timeout_s = None if method == "tasks" else self._timeout_s
      answer = self._ask(json.dumps([slot, method, args]), timeout_s)
      if "death" in answer:
        raise self._kill(answer["death"])
      if "error" in answer:
        raise RETURNED_ERRORS[answer["error"]](answer["message"])
      return answer["value"]

  def _ask(self, request: str, timeout_s: float | None) -> dict[str, Any]:
    """Send a request and return the answer. Raises EnvDied if none comes in time."""
    answers = self.process.stdout
    try:
      self.process.stdin.write(request.encode() + b"\n")
      self.process.stdin.flush()
      # The child sends one line per request, so no answer can wait in the buffer.
      if not select.select([answers], [], [], timeout_s)[0]:
        raise self._kill(f"no answer in {timeout_s:g} s")
      return json.loads(answers.readline())
    except (OSError, json.JSONDecodeError):  # the pipe or the line is cut
      raise self._kill("it ended without an answer") from None

  def _kill(self, cause: str) -> EnvDied:
    """End the process with everything that it started; return the error about it."""
    process = self.process
    self.process = None
    self._playing.clear()
    self._cause_of_death = cause
    with contextlib.suppress(OSError), process:  # OSError: a request never read
      _kill_group(process)
    return EnvDied(f"the environment's process died: {cause}")

  def close(self) -> None:
    """End the child. A thread that waits for its answer gets EnvDied at once."""
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
  """An Env whose episodes run in a slot of a child; it serves one thread at a time."""

  def __init__(self, child: Child, slot: int, greeting: dict[str, Any]) -> None:
    vars(self).update(greeting)  # the attributes of the environment in the child
    self.child = child
    self._call = functools.partial(child.call, slot)
    self._oracle: dict | None = None

  def tasks(self, split: str) -> list[Task]:
    return [Task(**fields) for fields in self._call("tasks", split)]

  def reset(self, task_id: str) -> str:
    return self._move("reset", task_id)[0]

  def step(self, action: str) -> tuple[str, bool]:
    return self._move("step", action)

  def _move(self, method: str, text: str) -> tuple[str, bool]:
    observation, done, self.system_prompt, self._oracle = self._call(method, text)
    return observation, done

  def score(self) -> float:
    return self._call("score")

  def oracle(self) -> Oracle:
    # If none came with the observation, the environment raises the reason.
    return Oracle(**(self._oracle or self._call("oracle")))

  def mistake(self, kind: str, key: str) -> str:
    return self._call("mistake", kind, key)

  def close(self) -> None:
    """End the child, with the episodes of its other slots."""
    self.child.close()


def open_envs(
  kind: str,
  kwargs: dict,
  processes: int,
  live_per_process: int,
  timeout_s: float = 120.0,
) -> list[ProcessEnv]:
  """Open environments in child processes, one per slot.

  Neighbours are in different processes.

  Args:
    kind: as for `table.load`.
    kwargs: those of `table.make`, of JSON's types.
    processes: how many children.
    live_per_process: slots of each.
    timeout_s: a child that takes longer for a call is killed.

  Raises:
    ValueError: the kind or an option is wrong, or the engine is not installed.
  """
  if table.load(kind).engine is not None:
    hide_process()  # agents' code must not read this process's keys
  children = [Child(kind, kwargs, timeout_s) for _ in range(processes)]
  greeting = children[0].call(0, "greet")
  envs = []
  for slot in range(live_per_process):
    envs += [ProcessEnv(child, slot, greeting) for child in children]
  return envs


if __name__ == "__main__":
  answer_requests(*sys.argv[1:])
