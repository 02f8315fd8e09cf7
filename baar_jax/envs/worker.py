"""The child process's side of process.py: one environment per slot, driven by JSON lines."""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import reprlib
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path

from baar_jax.envs.base import Env, EnvDied, Oracle, WrongResult
from baar_jax.episode import Task

# The class of each kind, whose name is that of its module; a child imports only its own.
KINDS = {name.lower(): name for name in ("Sandbox", "ScienceWorld", "ALFWorld", "AppWorld")}
# Mistakes of the caller, which the child survives. Any other error ends the child; so does a
# ValueError within step or score, for it is the environment's own.
RETURNED_ERRORS = {
  error.__name__: error for error in (ValueError, NotImplementedError, EnvDied, WrongResult)
}
FATAL_METHODS = ("step", "score")
PARENT_CHECK_S = 1.0


def _are_tasks(tasks: object) -> bool:
  if not isinstance(tasks, list) or any(type(task) is not Task for task in tasks):
    return False
  types = {tuple(map(type, dataclasses.astuple(task))) for task in tasks}
  return types == {(str, str, str, int)} and len({task.id for task in tasks}) == len(tasks)


TEXT = ("a text", lambda result: isinstance(result, str))
EXPECTED = {  # what each method must return
  "tasks": ("a list of Task whose ids differ", _are_tasks),
  "reset": TEXT,
  "step": ("(text, bool)", lambda r: isinstance(r, tuple) and [*map(type, r)] == [str, bool]),
  "score": ("a number in [0, 1]", lambda r: isinstance(r, int | float) and 0 <= r <= 1),
  "oracle": ("an Oracle", lambda result: isinstance(result, Oracle)),
  "mistake": TEXT,
  "system_prompt": TEXT,
}


def main(scratch: str, kind: str, kwargs: str) -> None:
  """Answers requests until the input ends or the parent is gone.

  `scratch` is for temporary files and ends with the parent; kind and kwargs (JSON) as in open_envs.
  """
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
    answers.write(json.dumps(answer, default=vars) + "\n")
    answers.flush()
    if "death" in answer:
      raise SystemExit(1)


def class_of(kind: str) -> type[Env]:
  """The class of a kind. Raises ValueError if the user's file or its class does not exist."""
  if kind in KINDS:
    return getattr(importlib.import_module(f"baar_jax.envs.{kind}"), KINDS[kind])
  path, _, name = kind.rpartition(":")
  if not Path(path).is_file():
    raise ValueError(f"--config.env.kind is {kind!r}, but there is no file {path}")
  spec = importlib.util.spec_from_file_location(Path(path).stem, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  if not hasattr(module, name):
    raise ValueError(f"--config.env.kind is {kind!r}, but {path} has no class {name}")
  return getattr(module, name)


def _end_with(parent: int, scratch: str) -> None:
  """Ends the child and all that it started once its parent is gone, even during a call."""
  while os.getppid() == parent:
    time.sleep(PARENT_CHECK_S)
  shutil.rmtree(scratch, ignore_errors=True)
  os.killpg(os.getpgrp(), signal.SIGKILL)


def _call(env: Env, method: str, args: list) -> object:
  """One method's result; the oracle travels with each observation."""
  if method == "greet":
    _check(env, "system_prompt", env.system_prompt)
    return {name: getattr(env, name) for name in ("system_prompt", "code_actions", "scores_steps")}
  result = _check(env, method, getattr(env, method)(*args))
  if method not in ("reset", "step"):
    return result
  observation, done = (result, False) if method == "reset" else result
  # The prompt may depend on the task.
  state = {"observation": observation, "done": done, "system_prompt": env.system_prompt}
  if not done:
    with contextlib.suppress(NotImplementedError):
      state["oracle"] = _check(env, "oracle", env.oracle())
  return state


def _describe(error: Exception, method: str) -> dict:
  """An error that the parent raises, or the cause of this process's death."""
  name, message = type(error).__name__, (str(error).splitlines() or [""])[0]
  mistake = name in RETURNED_ERRORS and method not in FATAL_METHODS
  if mistake or isinstance(error, WrongResult):
    return {"error": name, "message": message}
  frame = traceback.extract_tb(error.__traceback__)[-1]
  return {"death": f"{name}: {message} ({Path(frame.filename).name}:{frame.lineno})"}


def _check(env: Env, name: str, result):
  expected, is_right = EXPECTED[name]
  if not is_right(result):
    text = reprlib.repr(result)
    raise WrongResult(f"{type(env).__name__}.{name} gave {text}; expected {expected}")
  return result


if __name__ == "__main__":
  main(*sys.argv[1:])
