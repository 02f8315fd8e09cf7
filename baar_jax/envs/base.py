"""Define Env, the interface of environments; list them; define scripted errors.

Every error rate is our choice; docs/scripted_models.md gives the reasons. In a pair of
numbers, the first is SMALL's and the second is LARGE's.
"""

import dataclasses
import functools
import itertools
import math
import os
import pkgutil
import random
import re
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baar_jax.envs.engines import Engine
from baar_jax.episode import Task

# Words of a result that tell of an error (our choice).
ERROR_WORDS = re.compile(
  "no known action|nothing happens|error|exception|fail|can't|jammed", re.IGNORECASE
)
NO_EXPERT = (
  "this environment has no expert, which scripted models need: define oracle() and "
  "mistake() in its class, set --config.models.kind=chat, or play configs/quickstart.py"
)


@dataclasses.dataclass(frozen=True)
class Oracle:
  """The expert's next step; only scripted models see it.

  Attributes:
    action: the expert's action.
    position: index of this step in the expert's plan. It stays the same until the step
      is done.
    critical: whether a weak model often gets this kind of step wrong.
    recovering: whether the action only undoes an earlier mistake.
  """

  action: str
  position: int
  critical: bool
  recovering: bool


@dataclasses.dataclass
class Lapse:
  """The chances that a model gets one step wrong.

  Attributes:
    rate: probability of an error.
    wrong: probability that an error is a wrong action. Otherwise it wastes the step.
  """

  rate: float
  wrong: float


@dataclasses.dataclass(frozen=True)
class Errors:
  """Error rates of scripted models, by the difficulty of each critical step.

  The odds of an error at a critical step are exp(difficulty - ability). A failed try at
  a critical step raises the odds of all later tries at it. The defaults apply to
  ScienceWorld and to a user's environment. The numbers of intermediate models are
  equally spaced between SMALL's and LARGE's (our choice).

  Attributes:
    ability: ability of SMALL and LARGE.
    routine: error rates at a routine step, or a step that undoes a mistake.
    wrong: share of wrong actions in errors at critical steps.
    growth: factors of SMALL's and LARGE's odds at a critical step after a failed try at
      it, by any model.
    task_type: a regular expression that finds the type of a task in the task's id.
    models: the number of models, which each run sets.
  """

  ability: tuple[float, float] = (-0.05, 1.1)
  routine: tuple[float, float] = (0.14, 0.03)
  wrong: float = 0.5
  growth: tuple[float, float] = (13.0, 5.4)
  task_type: str = "[^/_]+"
  models: int = 2

  def between(self, ends: tuple[float, float], model: int) -> float:
    """Interpolate a model's number between SMALL's and LARGE's.

    Args:
      ends: the numbers of SMALL and LARGE.
      model: the model's index by price.
    """
    skill = model / (self.models - 1)
    return (1 - skill) * ends[0] + skill * ends[1]

  def difficulty(self, model: int, task_id: str, oracle: Oracle) -> float:
    """Add up the effects of the type of task, the action's words, and luck.

    Each effect has the standard deviation 1. All trials of a task share its luck: one
    part is the same for all models, the other is each model's own.

    Args:
      model: the model's index by price.
      task_id: the task of the episode.
      oracle: the expert's next step.
    """
    words = {*re.findall("[a-z]{3,}", oracle.action.lower())}
    luck = f"{task_id}|{oracle.position}"
    return (
      draw_effect("".join(re.findall(self.task_type, task_id)[:1]))
      + sum(map(draw_effect, sorted(words))) / math.sqrt(len(words) or 1)
      + draw_effect(luck)
      + draw_effect(f"{luck}|{model}")
    )

  def lapse(
    self, model: int, task_id: str, oracle: Oracle, failed: bool = False
  ) -> Lapse:
    """Compute how a model may err at the expert's next step.

    Args:
      model: the model's index by price.
      task_id: the task of the episode.
      oracle: the expert's next step.
      failed: whether a try at this step has failed before in the episode.
    """
    rate = self.between(self.routine, model)
    odds = rate / (1 - rate)
    wrong = 0.0
    if oracle.critical and not oracle.recovering:
      difficulty = self.difficulty(model, task_id, oracle)
      odds = math.exp(difficulty - self.between(self.ability, model))
      if failed:
        odds *= self.between(self.growth, model)
      wrong = self.wrong
    return Lapse(odds / (1 + odds), wrong)


def draw_effect(key: str) -> float:
  """Draw from the standard normal distribution, with the key as the random seed."""
  return random.Random(key).gauss(0.0, 1.0)


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
    errors: the error rates of scripted models in this environment.
    engine: the engine, if it needs a Python environment (venv) of its own, else None.
      With an engine, `Options` needs the field `data`.
    metric: the meaning of SR in the report: "success" is the rate of success, "score"
      the mean score.
    prompt_growth: estimated tokens that each step adds to the prompt. A dry run uses
      this estimate while the run has no episodes.
    episodes_per_process: the most live episodes that may share a child process; None is
      any number.
    needs_process: whether episodes run in child processes.
    system_prompt: the agent's instructions, with one worked example.
    code_actions: whether an action is a block of code, not one line.
    opening: the text with which each observation's part for the agent begins. The agent
      sees a new conversation at each step, with this part only; the router sees all.
      "" is one conversation for the whole episode.
    success_score: the lowest score of a success.
    scores_steps: whether `score` is informative and cheap after every step.
    waits: whether a step, or a model's reply in it, may wait for another process.
  """

  Options: type = NoOptions
  errors = Errors()
  engine: Engine | None = None
  metric = "success"
  prompt_growth = 150
  episodes_per_process: int | None = None
  needs_process = True

  system_prompt: str
  code_actions = False
  opening = ""
  success_score = 1.0
  scores_steps = False
  waits = True

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
    if problem := cls.engine.explain_missing(data):
      raise ValueError(problem)
    return dataclasses.replace(options, data=str(data))

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
        cost further steps. "wasted" wastes the step.
      key: the seed of the random draw. The same key gives the same action in the same
        state.
    """
    raise NotImplementedError(NO_EXPERT)


# The class of each environment, relative to baar_jax.envs. Only the module of the
# environment in use is imported.
ENVIRONMENTS = {
  "code": "code.adapter.Code",
  "scienceworld": "scienceworld.adapter.ScienceWorld",
  "alfworld": "alfworld.adapter.ALFWorld",
  "appworld": "appworld.adapter.AppWorld",
  "stored": "base.Env",  # Other programs record these episodes.
}


@functools.cache
def load(kind: str) -> type[Env]:
  """Load the class of an environment.

  Args:
    kind: a key of ENVIRONMENTS, or "FILE.py:CLASS" for a user's environment.

  Raises:
    ValueError: the file is missing or fails, it lacks the class, or one of the class's
      options has no default.
  """
  if kind in ENVIRONMENTS:
    return pkgutil.resolve_name(f"baar_jax.envs.{ENVIRONMENTS[kind]}")
  path, _, name = kind.rpartition(":")
  try:
    environment = runpy.run_path(path or name)[name]
    if not issubclass(environment, Env):
      raise TypeError(f"{name} is no subclass of Env")
    environment.Options()
  except (Exception, SystemExit) as error:  # The user's file may raise any error.
    raise ValueError(
      f"--config.env.kind is {kind!r}, but this fails with {error!r:.200}; correct the "
      f"file, or set FILE.py:CLASS or one of: {', '.join(ENVIRONMENTS)}"
    ) from error
  return environment


def make(kind: str, options: Mapping[str, Any] = {}, **sizes: int) -> Env:
  """Create an environment in this process.

  Args:
    kind: the kind of environment; see `load`.
    options: values of options by name.
    **sizes: train_tasks, dev_tasks, test_tasks and max_steps; see `Env.__init__`.

  Raises:
    ValueError: the kind is wrong.
  """
  environment = load(kind)
  return environment(**sizes, options=environment.Options(**options))


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
