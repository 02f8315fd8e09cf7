"""Runs any environment in a child process, by JSON lines; several episodes may share one child.

A child that dies, hangs or fails is reported as EnvDied, and the next reset() starts a new one.
The first half of this file is the child's side.
"""

import contextlib
import functools
import importlib
import json
import os
import runpy
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
from pathlib import Path

from baar_jax.envs.base import Env, EnvDied, Oracle
from baar_jax.envs.engines import ENGINES, environ_of, hide_process, python_of
from baar_jax.episode import Task

# The class of each kind, whose name is that of its module; a child imports only its own.
KINDS = {name.lower(): name for name in ("Sandbox", "ScienceWorld", "ALFWorld", "AppWorld")}


class WrongResult(ValueError):
  """A method of an environment returned what its protocol forbids."""


# What the parent raises by the name of the child's error. Any other ends the child, and so does a
# ValueError within step or score, which is the environment's own.
RETURNED_ERRORS = {e.__name__: e for e in (WrongResult, ValueError, NotImplementedError, EnvDied)}
TEXT = ("a text", lambda result: isinstance(result, str))


def _is_task(task: object) -> bool:
  return type(task) is Task and [*map(type, vars(task).values())] == [str, str, str, int]


EXPECTED = {  # what each method must return
  "tasks": (
    "one Task or more in each split",
    lambda r: isinstance(r, list) and r and all(map(_is_task, r)),
  ),
  "reset": TEXT,
  "step": ("(text, bool)", lambda r: isinstance(r, tuple) and [*map(type, r)] == [str, bool]),
  "score": ("a number in [0, 1]", lambda r: isinstance(r, int | float) and 0 <= r <= 1),
  "oracle": ("an Oracle", lambda result: isinstance(result, Oracle)),
  "mistake": TEXT,
  "system_prompt": TEXT,
}


def answer_requests(scratch: str, kind: str, kwargs: str) -> None:
  """The child: it answers until the input ends or the parent is gone, with which `scratch` ends."""
  # What an environment prints must not mix with the answers, and it must not read the requests.
  requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  tempfile.tempdir = scratch
  threading.Thread(target=_end_with, args=(os.getppid(), scratch), daemon=True).start()
  env_of: dict[int, Env] = defaultdict(lambda: class_of(kind)(**json.loads(kwargs)))  # by slot
  for line in requests:
    slot, method, args = json.loads(line)
    try:
      answer = {"value": _call(env_of[slot], method, args)}
    except Exception as error:  # the process boundary: the parent raises it
      answer = _describe(error, method)
    print(json.dumps(answer, default=vars), file=answers, flush=True)


def class_of(kind: str) -> type[Env]:
  """The class of a kind. Raises ValueError if the user's file or its class does not exist."""
  if kind in KINDS:
    return getattr(importlib.import_module(f"baar_jax.envs.{kind}"), KINDS[kind])
  path, _, name = kind.rpartition(":")
  if not Path(path).is_file():
    raise ValueError(f"--config.env.kind is {kind!r}, but there is no file {path}")
  contents = runpy.run_path(path)
  if name not in contents:
    raise ValueError(f"--config.env.kind is {kind!r}, but {path} has no class {name}")
  return contents[name]


def _end_with(parent: int, scratch: str) -> None:
  """Ends the child and all that it started once its parent is gone, even during a call."""
  while os.getppid() == parent:
    time.sleep(1.0)
  shutil.rmtree(scratch, ignore_errors=True)
  os.killpg(os.getpgrp(), signal.SIGKILL)


def _call(env: Env, method: str, args: list) -> object:
  """One method's result; prompt and oracle, which may change, travel with each observation."""
  if method == "greet":
    _check(env, "system_prompt", env.system_prompt)
    return {name: getattr(env, name) for name in ("system_prompt", "code_actions", "scores_steps")}
  result = _check(env, method, getattr(env, method)(*args), *args)
  if method not in ("reset", "step"):
    return result
  observation, done = (result, False) if method == "reset" else result
  oracle = None
  with contextlib.suppress(NotImplementedError):
    oracle = None if done else _check(env, "oracle", env.oracle())
  return observation, done, env.system_prompt, oracle


def _describe(error: Exception, method: str) -> dict:
  """An error that the parent raises, or the cause of this process's death."""
  name, message = type(error).__name__, (str(error).splitlines() or [""])[0]
  if name in RETURNED_ERRORS and not (name == "ValueError" and method in ("step", "score")):
    return {"error": name, "message": message}
  frame = traceback.extract_tb(error.__traceback__)[-1]
  return {"death": f"{name}: {message} ({Path(frame.filename).name}:{frame.lineno})"}


def _check(env: Env, name: str, result, *args):
  expected, is_right = EXPECTED[name]
  if not is_right(result):
    call = name + (f"({', '.join(map(repr, args)):.80})" if args else "")
    raise WrongResult(f"{type(env).__name__}.{call} gave {result!r:.80}; expected {expected}")
  return result


class Child:
  """The parent's end of a child process with an environment per slot, which takes turns."""

  def __init__(self, kind: str, kwargs: dict, timeout_s: float) -> None:
    self._scratch = tempfile.TemporaryDirectory(prefix="baar_jax-", ignore_cleanup_errors=True)
    module = ["baar_jax.envs.process", self._scratch.name, kind, json.dumps(kwargs)]
    options = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE) | {"env": environ_of(kind)}
    # Ctrl-C reaches the parent alone; a child is killed with its JVM, as a group.
    options["start_new_session"] = True
    self._start = functools.partial(subprocess.Popen, [*python_of(kind), *module], **options)
    self._timeout_s, self._lock, self._closed = timeout_s, threading.Lock(), False
    self._playing: set[int] = set()  # the slots whose episode is in this process
    self._cause_of_death = "no episode has begun"
    self.process: subprocess.Popen | None = None  # until a call starts it; None after it died

  def call(self, slot: int, method: str, *args):
    """What a method of a slot's environment returns, or raises as of RETURNED_ERRORS.

    Raises EnvDied if the process of the slot's episode is gone.
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
        answer = json.loads(self.process.stdout.readline())
      except (OSError, json.JSONDecodeError):  # the pipe or the line is cut
        raise self._kill("it ended without an answer") from None
      if "death" in answer:
        raise self._kill(answer["death"])
      if "error" in answer:
        raise RETURNED_ERRORS[answer["error"]](answer["message"])
      return answer["value"]

  def _kill(self, cause: str) -> EnvDied:
    """Ends the process with everything that it started, and returns the error that says so."""
    process, self.process = self.process, None
    self._playing.clear()
    self._cause_of_death = cause
    with contextlib.suppress(OSError), process:  # OSError: a request that it will never read
      _kill_group(process)
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
  """An Env whose episodes run in a slot of a child process; it serves one thread at a time."""

  def __init__(self, child: Child, slot: int, greeting: dict) -> None:
    vars(self).update(greeting)  # the attributes of the environment in the child
    self.child, self._call, self._oracle = child, functools.partial(child.call, slot), None

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
    # Where none came with the observation, the environment raises what says why.
    return Oracle(**(self._oracle or self._call("oracle")))

  def mistake(self, kind: str, key: str) -> str:
    return self._call("mistake", kind, key)

  def close(self) -> None:
    """Ends the child, with the episodes of its other slots."""
    self.child.close()


def open_envs(
  kind: str, kwargs: dict, processes: int, live_per_process: int, timeout_s: float = 120.0
) -> list[ProcessEnv]:
  """Environments in child processes, one per slot; neighbours are in different processes.

  The kind is one of KINDS, or "FILE.py:CLASS" of the user's own; `kwargs` of its constructor are
  JSON's types. A child that takes longer than `timeout_s` for a call is killed. Raises ValueError
  if the kind is wrong or its engine is not installed.
  """
  if kind in ENGINES:
    hide_process()  # agents' code must not read this process's keys
  children = [Child(kind, kwargs, timeout_s) for _ in range(processes)]
  greeting = children[0].call(0, "greet")
  return [ProcessEnv(c, slot, greeting) for slot in range(live_per_process) for c in children]


if __name__ == "__main__":
  answer_requests(*sys.argv[1:])
