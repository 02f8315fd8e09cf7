"""The child process's side of process.py: one environment per slot, driven by JSON lines."""

import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from baar_jax.envs.base import Env, EnvDied

# Imported by the child alone, and only the one that it runs.
KINDS = {
  "sandbox": ("baar_jax.envs.sandbox", "Sandbox"),
  "scienceworld": ("baar_jax.envs.scienceworld", "ScienceWorld"),
  "alfworld": ("baar_jax.envs.alfworld", "ALFWorld"),
  "appworld": ("baar_jax.envs.appworld", "AppWorld"),
}
# What the caller did wrong; the child goes on after it. Anything else ends the child, as does a
# ValueError amid an episode, which is the environment's own.
PASSED_ON = {error.__name__: error for error in (ValueError, NotImplementedError, EnvDied)}
AMID_AN_EPISODE = ("step", "score")
PARENT_SEEN_S = 1.0  # how often the child looks whether its parent is still there
# As they are now: AppWorld turns functions off while an agent's code is executed, and that code
# may change any module.
_killpg, _sleep, _dumps = os.killpg, time.sleep, json.dumps


def main(kind: str, kwargs: str) -> None:
  """The child: answers requests until its input ends or its parent is gone.

  Args:
    kind: one of KINDS, or "FILE.py:CLASS" for an environment of one's own.
    kwargs: of the environment, as JSON.
  """
  # What an environment prints must not get between the answers, nor may it read the requests.
  requests = os.fdopen(os.dup(0))
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

  def answer(fields: dict) -> None:
    answers.write(_dumps(fields) + "\n")
    answers.flush()

  def attempt(method: str, work: Callable[[], object]) -> None:
    try:
      value = work()
    except Exception as error:  # the process boundary: the parent raises it
      passed_on = type(error) in PASSED_ON.values() and method not in AMID_AN_EPISODE
      name = type(error).__name__
      answer({"error": name, "message": _describe(error, passed_on), "passed_on": passed_on})
      if not passed_on:
        raise SystemExit(1) from None
    else:
      answer({"value": value})

  envs: dict[int, Env] = {}

  def env_of(slot: int) -> Env:
    if slot not in envs:
      envs[slot] = _class_of(kind)(**json.loads(kwargs))
    return envs[slot]

  shown = ("system_prompt", "code_actions", "episodes_per_process")
  attempt("open", lambda: {name: getattr(env_of(0), name) for name in shown})
  for line in requests:
    slot, method, args = json.loads(line)
    attempt(method, lambda s=slot, m=method, a=args: _act(env_of(s), m, a))


def _class_of(kind: str) -> type[Env]:
  if kind in KINDS:
    module, name = KINDS[kind]
    return getattr(importlib.import_module(module), name)
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


def _end_with(parent: int) -> None:
  """Ends the child and all that it started once its parent is gone, even amid a call."""
  while os.getppid() == parent:
    _sleep(PARENT_SEEN_S)
  _killpg(os.getpgrp(), signal.SIGKILL)


def _act(env: Env, method: str, args: list) -> object:
  if method == "reset":
    state = _state(env, env.reset(*args), done=False)
    return state | {"system_prompt": env.system_prompt}  # which may depend on the task
  if method == "step":
    return _state(env, *env.step(*args))
  if method == "tasks":
    return [dataclasses.asdict(task) for task in env.tasks(*args)]
  if method == "mistake":
    return env.mistake(*args)
  if method == "score":
    return env.score()
  raise AssertionError(f"no such request: {method}")


def _state(env: Env, observation: str, done: bool) -> dict:
  oracle, no_oracle = None, "the episode is over"
  if not done:
    try:
      oracle = dataclasses.asdict(env.oracle())
    except NotImplementedError as error:
      no_oracle = str(error)
  return {"observation": observation, "done": done, "oracle": oracle, "no_oracle": no_oracle}


def _describe(error: Exception, passed_on: bool) -> str:
  """One line; for a bug also where it is."""
  text = (str(error).splitlines() or [""])[0]
  if passed_on:
    return text
  frame = traceback.extract_tb(error.__traceback__)[-1]
  return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


if __name__ == "__main__":
  main(*sys.argv[1:])
