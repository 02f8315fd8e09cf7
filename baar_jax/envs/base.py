"""Define Env, the interface between environments and the rollout loop."""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baar_jax.envs.engines import Engine
from baar_jax.envs.errors import KnowledgeErrors, Oracle
from baar_jax.episode import CacheRule, Task

# Words of a result that tell of an error (our choice).
ERROR_WORDS = re.compile(
  "no known action|nothing happens|error|exception|fail|can't|jammed", re.IGNORECASE
)
NO_EXPERT = (
  "this environment has no expert, which scripted models need: define oracle() and "
  "mistake() in its class, or set --config.models.kind=chat"
)


class EnvDied(RuntimeError):
  """Report that an environment has lost its episode, for example by a crash.

  Unless the environment is closed, its next reset() starts a new episode.
  """


@dataclasses.dataclass(frozen=True)
class NoOptions:
  """The `Options` of an environment without options."""


class Env:
  """A text environment that runs one episode at a time.

  A new environment is a subclass in one file (see examples/corridor.py). Only the
  scripted models call `oracle` and `mistake`. A subclass sets the class attributes
  below that differ from their defaults.

  Attributes:
    Options: a dataclass; its fields are the settings --config.env.options.
    Errors: decides how scripted models err in this environment.
    engine: the engine, if it needs a Python environment (venv) of its own, else None.
      With an engine, `Options` needs the field `data`.
    metric: the meaning of SR in the report: "success" is the rate of success, "score"
      the mean score.
    has_optimum: whether rollout/optimum.py can compute the best policy.
    prompt_growth: estimated tokens that each step adds to the prompt. A dry run uses
      this estimate while the run has no episodes.
    episodes_per_process: the most live episodes that may share a child process; None is
      any number.
    needs_process: whether episodes run in child processes.
    remembered: whether a child's answers are remembered instead of played again. Set
      this only if all answers depend on nothing but the task, the actions since the
      reset, and the arguments.
    scripted_options: values that these options must have if models are scripted.
    system_prompt: the agent's instructions, with one worked example.
    code_actions: whether an action is a block of code, not one line.
    scores_steps: whether `score` is informative and cheap after every step.
    step_s: seconds that a step of the environment takes in simulated time (our choice).
    cache_rule: the prompt caches' rule in this environment; None is each model's own.
  """

  Options: type = NoOptions
  Errors: type = KnowledgeErrors
  engine: Engine | None = None
  metric = "success"
  has_optimum = False
  prompt_growth = 150
  episodes_per_process: int | None = None
  needs_process = True
  remembered = False
  scripted_options: Mapping[str, Any] = {}

  system_prompt: str
  code_actions = False
  scores_steps = False
  step_s = 1.0
  cache_rule: CacheRule | None = None

  def __init__(
    self,
    train_tasks: int = 0,
    dev_tasks: int = 0,
    test_tasks: int = 0,
    max_steps: int = 40,
    options: Any = None,
  ) -> None:
    """Store the sizes of the splits and the options.

    Args:
      train_tasks: number of tasks in the split "train".
      dev_tasks: number of tasks in the split "dev".
      test_tasks: number of tasks in the split "test".
      max_steps: an episode ends after this number of steps.
      options: an instance of this class's `Options`; None is its default.
    """
    self.sizes = {"train": train_tasks, "dev": dev_tasks, "test": test_tasks}
    self.max_steps = max_steps
    self.options = options or self.Options()

  @classmethod
  def complete(cls, options: Any, runs: Path) -> Any:
    """Fill in the options that depend on the machine.

    A run calls this before it opens an environment.

    Args:
      options: an instance of this class's `Options`.
      runs: the directory that contains the directory of each run.

    Returns:
      The completed options.

    Raises:
      ValueError: an option names data that do not exist.
    """
    if cls.engine is None:
      return options
    data = cls.engine.find_data(options.data)
    return dataclasses.replace(options, data=data)

  def tasks(self, split: str) -> list[Task]:
    """Return a split's tasks, always in the same order.

    Raises:
      ValueError: the split has fewer tasks than its size.
    """

  def reset(self, task_id: str) -> str:
    """Start a task from its beginning and return the first observation."""

  def step(self, action: str) -> tuple[str, bool]:
    """Execute an action.

    An action that the environment does not understand gets an observation, too.

    Returns:
      The observation, and whether the episode has ended.
    """

  def score(self) -> float:
    """Return the current score of the episode, in [0, 1]."""

  def close(self) -> None:
    """Free the environment's resources; a second call does nothing."""

  def oracle(self) -> Oracle:
    """Return the expert's next action and the facts about this step."""
    raise NotImplementedError(NO_EXPERT)

  def mistake(self, kind: str, key: str) -> str:
    """Return a wrong action in place of the expert's.

    Args:
      kind: the kind of mistake. "wrong" acts on the wrong object; this may be fatal or
        cost further steps. "lost" wastes the step in the way of a weak model, "hasty"
        in the way of a strong model.
      key: the seed of the random draw. The same key gives the same action in the same
        state.
    """
    raise NotImplementedError(NO_EXPERT)


def spread(count: int) -> list[int]:
  """Order the indices below `count`, so that the first few spread evenly.

  For any n, the first n indices are nearly evenly spaced. The sort key is the index
  with its bits reversed.
  """
  return sorted(range(count), key=lambda number: f"{number:032b}"[::-1])


def read_verb(action: str) -> str:
  """Return the first word of an action."""
  return action.split(" ", 1)[0]


def interleave(groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
  """Yield the first item of each group, then all second items, and so on.

  A group that has ended is skipped. Falsy items, such as "" or 0, are left out.
  """
  rounds = itertools.zip_longest(*groups)
  return filter(None, itertools.chain.from_iterable(rounds))


def check_size(source: str, tasks: Sequence, split: str, size: int) -> None:
  """Verify that a source has enough tasks for a split.

  Args:
    source: the name of the source, for the error message.
    tasks: the tasks of the source, or their ids.
    split: the split that takes its tasks from the source.
    size: the number of tasks that the split needs.

  Raises:
    ValueError: there are fewer tasks than `size`.
  """
  if len(tasks) < size:
    problem = f"{source} has {len(tasks)} tasks, but {size} were asked for"
    remedy = f"lower --config.env.{split}_tasks or change --config.env.options"
    raise ValueError(f"{problem}: {remedy}")


def read_or_make(path: Path, make: Callable[[], bytes]) -> bytes:
  """Read a file; if it is missing, make it first.

  If several processes make the file at once, all of them return the content of the
  first. A process never reads a file that is only half written.

  Args:
    path: the file.
    make: computes the content of a missing file.
  """
  if not path.exists():
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(make())
    try:
      os.link(draft, path)
    except FileExistsError:
      pass  # Another process was faster: its file stays.
    except OSError:  # The disk has no hard links: the last process replaces the file.
      os.replace(draft, path)
    draft.unlink(missing_ok=True)
  return path.read_bytes()
