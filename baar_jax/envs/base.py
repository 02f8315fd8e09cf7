"""The Env class, which the rollout loop and the scripted models use."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baar_jax.envs.engines import Engine
from baar_jax.envs.errors import KnowledgeErrors, Oracle
from baar_jax.episode import Task

NO_EXPERT = "this environment has no expert, which scripted models need"


class EnvDied(RuntimeError):
  """The process behind an environment is gone; the next reset() starts a new one."""


@dataclasses.dataclass(frozen=True)
class NoOptions:
  """The options of an environment that has none."""


class Env:
  """A text environment that runs one episode at a time.

  The class states the facts about the environment. A new one is a subclass in one
  file (see examples/corridor.py). Only the scripted models need `oracle` and
  `mistake`.
  """

  Options: type = NoOptions  # a dataclass; --config.env.options are its fields
  Errors: type = KnowledgeErrors  # how scripted models err here
  # Of an environment that needs a Python of its own, and whose options have `data`.
  engine: Engine | None = None
  metric = "success"  # the environment's SR: the rate of success, or the mean "score"
  has_optimum = False  # whether rollout/optimum.py computes the best policy
  prompt_growth = 150  # tokens that a step adds to the prompt, until some are stored
  episodes_per_process: int | None = None  # at most; None is any number
  needs_process = True  # whether episodes run in child processes
  scripted_options: Mapping[str, Any] = {}  # the values that scripted models need

  system_prompt: str  # the agent's instructions, with one worked example
  code_actions = False  # whether an action is a block of code rather than one line
  scores_steps = False  # whether score() says something, cheaply, after every step

  def __init__(
    self,
    train_tasks: int = 0,
    dev_tasks: int = 0,
    test_tasks: int = 0,
    max_steps: int = 40,
    options: Any = None,
  ) -> None:
    """Keep the sizes of the splits, and the options.

    Args:
      train_tasks: how many tasks the split "train" has; the others likewise.
      max_steps: of an episode.
      options: of this class's Options; None is its default.
    """
    self.sizes = {"train": train_tasks, "dev": dev_tasks, "test": test_tasks}
    self.max_steps = max_steps
    self.options = options or self.Options()

  @classmethod
  def complete(cls, options: Any, runs: Path) -> Any:
    """Fill in the options that depend on the machine, before an environment is opened.

    Args:
      options: of this class's Options.
      runs: the directory above those of all runs.

    Raises:
      ValueError: something that an option names is missing.
    """
    if cls.engine is None:
      return options
    data = cls.engine.existing_data(options.data)
    return dataclasses.replace(options, data=data)

  def tasks(self, split: str) -> list[Task]:
    """List a split's tasks in a fixed order. Raises ValueError if there are none."""

  def reset(self, task_id: str) -> str:
    """Start a task from its beginning and return the first observation."""

  def step(self, action: str) -> tuple[str, bool]:
    """Act, also if the action is senseless.

    Returns:
      The observation, and whether the episode ends.
    """

  def score(self) -> float:
    """Return the score so far, in [0, 1]."""

  def close(self) -> None:
    """Free the environment's resources. May be called twice."""

  def oracle(self) -> Oracle:
    """Return the expert's next action and what is known about it."""
    raise NotImplementedError(NO_EXPERT)

  def mistake(self, kind: str, key: str) -> str:
    """Return a wrong action in place of the expert's.

    Args:
      kind: "wrong" acts on the wrong thing, which may be fatal or cost a recovery.
        "lost" wanders as a weak model does, "hasty" as a strong one; both waste the
        step.
      key: the same key gives the same action.
    """
    raise NotImplementedError(NO_EXPERT)


def spread(count: int) -> list[int]:
  """Order the numbers below `count` so that every beginning is spread evenly."""
  return sorted(range(count), key=lambda number: f"{number:032b}"[::-1])


def verb(action: str) -> str:
  """Return the first word of an action."""
  return action.split(" ", 1)[0]


def take_turns(groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
  """Yield the first of each group, then the second of each that has one, and so on."""
  rounds = itertools.zip_longest(*groups)
  return filter(None, itertools.chain.from_iterable(rounds))


def check_size(place: str, listed: Sequence, split: str, size: int) -> None:
  """Raise ValueError if a place has fewer tasks than a split needs."""
  if len(listed) < size:
    problem = f"{place} has {len(listed)} tasks, {size} were asked for"
    remedy = f"set --config.env.{split}_tasks, or other --config.env.options"
    raise ValueError(f"{problem}: {remedy}")


def keep(path: Path, make: Callable[[], bytes]) -> bytes:
  """Return a file's content, which the first process that has made it keeps.

  No process sees a part of it.
  """
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
