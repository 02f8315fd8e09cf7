"""The Env protocol: what the rollout loop and the scripted models ask of an environment."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from baar_jax.episode import Task

PROMPTS = Path(__file__).parent / "prompts"  # instructions for agents
NO_EXPERT = "this environment has no expert, which scripted models need"


class EnvDied(RuntimeError):
  """The process behind an environment is gone; the next reset() starts a new one."""


@dataclasses.dataclass(frozen=True)
class Oracle:
  """What the environment's expert knows about the next step; only scripted models may see it."""

  action: str  # the expert's
  position: int  # of this step in the expert's plan; it stays the same until the step is done
  critical: bool  # whether a weak model gets this kind of step wrong
  recovering: bool  # whether the action only undoes an earlier mistake


class Env(Protocol):
  """A text environment that runs one episode at a time.

  A new environment is a subclass whose constructor takes train_tasks, dev_tasks, test_tasks and
  max_steps (see examples/corridor.py). Only the scripted models need `oracle` and `mistake`.
  """

  system_prompt: str  # the agent's instructions, with one worked example
  code_actions = False  # whether an action is a block of code rather than one line
  scores_steps = False  # whether score() tells something, at little cost, after every step

  def tasks(self, split: str) -> list[Task]:
    """The tasks of a split, in a fixed order. Raises ValueError if there are none."""

  def reset(self, task_id: str) -> str:
    """Starts a task from its beginning and returns the first observation."""

  def step(self, action: str) -> tuple[str, bool]:
    """Acts. Returns the observation, also for a senseless action, and whether the episode ends."""

  def score(self) -> float:
    """The score so far, in [0, 1]."""

  def close(self) -> None:
    """Frees what the environment holds. May be called twice."""

  def oracle(self) -> Oracle:
    """The expert's next action and what is known about it."""
    raise NotImplementedError(NO_EXPERT)

  def mistake(self, kind: str, key: str) -> str:
    """A wrong action in place of the expert's; the same key gives the same action.

    The kind "wrong" acts on the wrong thing, which may be fatal or cost a recovery. "lost" wanders
    as a weak model does, "hasty" as a strong one; both waste the step.
    """
    raise NotImplementedError(NO_EXPERT)


def spread(count: int) -> list[int]:
  """The numbers below `count`, in an order whose every beginning is spread evenly."""
  return sorted(range(count), key=lambda number: f"{number:032b}"[::-1])


def verb(action: str) -> str:
  return action.split(" ", 1)[0]


def keep(path: Path, make: Callable[[], bytes]) -> bytes:
  """A file's content, which the first process that has made it keeps; none sees a part of it."""
  if not path.exists():
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(make())
    try:
      os.link(draft, path)
    except FileExistsError:
      pass  # another process was faster
    except OSError:  # a file system without links, where the last one wins
      os.replace(draft, path)
    draft.unlink(missing_ok=True)
  return path.read_bytes()
