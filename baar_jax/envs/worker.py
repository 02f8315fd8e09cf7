"""The child process's side of process.py: one environment per slot, driven by JSON lines."""

import dataclasses
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from baar_jax.envs.base import Env

# Imported by the child alone, and only the one that it runs.
KINDS = {
  "sandbox": ("baar_jax.envs.sandbox", "Sandbox"),
  "scienceworld": ("baar_jax.envs.scienceworld", "ScienceWorld"),
}
# What the caller did wrong; the child goes on after it. Anything else ends the child.
PASSED_ON = {"ValueError": ValueError, "NotImplementedError": NotImplementedError}


def serve(kind: str, kwargs: dict) -> None:
  """The child: answers requests until its input ends."""
  # What an environment prints must not get between the answers, nor may it read the requests.
  requests = os.fdopen(os.dup(0))
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)

  def answer(fields: dict) -> None:
    answers.write(json.dumps(fields) + "\n")
    answers.flush()

  def attempt(work, *args) -> None:
    try:
      value = work(*args)
    except Exception as error:  # the process boundary: the parent raises it
      answer({"error": type(error).__name__, "message": _describe(error)})
      if type(error) not in PASSED_ON.values():
        raise SystemExit(1) from None
    else:
      answer({"value": value})

  module, name = KINDS[kind]
  envs: dict[int, Env] = {}

  def env_of(slot: int) -> Env:
    if slot not in envs:
      envs[slot] = getattr(importlib.import_module(module), name)(**kwargs)
    return envs[slot]

  attempt(lambda: env_of(0).system_prompt)
  for line in requests:
    slot, method, args = json.loads(line)
    attempt(lambda s=slot, m=method, a=args: _act(env_of(s), m, a))


def _act(env: Env, method: str, args: list) -> object:
  if method == "reset":
    return _state(env, env.reset(*args), done=False)
  if method == "step":
    return _state(env, *env.step(*args))
  if method == "tasks":
    return [dataclasses.asdict(task) for task in env.tasks(*args)]
  if method == "mistake":
    return env.mistake(*args)
  raise AssertionError(f"no such request: {method}")


def _state(env: Env, observation: str, done: bool) -> dict:
  oracle, no_oracle = None, "the episode is over"
  if not done:
    try:
      oracle = dataclasses.asdict(env.oracle())
    except NotImplementedError as error:
      no_oracle = str(error)
  return {
    "observation": observation,
    "done": done,
    "score": env.score(),
    "oracle": oracle,
    "no_oracle": no_oracle,
  }


def _describe(error: Exception) -> str:
  """One line; for a bug also where it is."""
  text = (str(error).splitlines() or [""])[0]
  if type(error) in PASSED_ON.values():
    return text
  frame = traceback.extract_tb(error.__traceback__)[-1]
  return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


if __name__ == "__main__":
  serve(sys.argv[1], json.loads(sys.argv[2]))
