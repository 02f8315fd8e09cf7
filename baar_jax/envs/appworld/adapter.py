"""Connect AppWorld, where an agent writes Python that calls the APIs of nine apps."""

import atexit
import dataclasses
import importlib
import json
import os
import re
import resource
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from baar_jax.envs.appworld.expert import PlanStep, draw_mistake, make_plan
from baar_jax.envs.base import DifficultyErrors, Env, Oracle, check_size, spread
from baar_jax.envs.engines import Engine
from baar_jax.episode import SPLITS, Task


class AppWorldErrors(DifficultyErrors):
  """Error rates of scripted models in AppWorld.

  SMALL's error rate at routine steps is high, because a weak model has to read much
  documentation.
  """

  ABILITY = (0.9, 1.35)
  ROUTINE = (0.65, 0.10)


OUTPUT_CHARS = 4000  # An observation is cut after this number of characters.
CODE_S = 60  # seconds after which an agent's code is stopped
FAILED = "Execution failed. Traceback:\n"
# Limits of the process that executes agents' code: bytes of memory and of a file, and
# threads. Code that needs more fails.
LIMITS = {
  resource.RLIMIT_AS: 4 << 30,
  resource.RLIMIT_FSIZE: 1 << 30,
  resource.RLIMIT_NPROC: 4096,
}


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of AppWorld.

  Several splits may name the same dataset; they then get different tasks of it.

  Attributes:
    data: the directory that contains AppWorld's directory data/. "" is $APPWORLD_ROOT
      if set, else the synthetic tasks that --stage=setup generates.
    train_split: the dataset of the training tasks.
    dev_split: the dataset of the validation tasks.
    test_split: the dataset of the held-out tests.
    trusted: whether agents' code runs without a wall, with all rights of the user.
  """

  data: str = ""
  train_split: str = "train"
  dev_split: str = "dev"
  test_split: str = "test_normal"
  trusted: bool = False


class AppWorld(Env):
  """The Env of AppWorld.

  The process with this object holds one task's world: databases, solution and score. As
  in AppWorld itself, agents' code runs in this process; see `engines.confine`.
  """

  Options = Options
  Errors = AppWorldErrors
  engine = Engine(
    packages=("appworld==0.1.3.post1",),
    data_variable="APPWORLD_ROOT",
    download="appworld download data --root $APPWORLD_ROOT",
    install_arguments=("-m", "appworld.cli", "install"),
    code_reads="data",
  )
  episodes_per_process = 1
  # Measured in 30 synthetic tasks, as estimated tokens: the solution's steps and before
  # them a look at the documents of each app and API that it uses lengthen the prompt by
  # 312 tokens each (270 to 397, by task). The first prompt has 967.
  prompt_growth = 310
  system_prompt = Path(__file__).with_name("prompt.txt").read_text()
  code_actions = True
  _package: Any = None  # the engine's Python module; None before the first reset
  _world: Any = None

  @property
  def data(self) -> Path:
    """Return the absolute path of AppWorld's directory data/."""
    return Path(self.options.data).absolute() / "data"

  def tasks(self, split: str) -> list[Task]:
    """Return a split's tasks, spread evenly over the list of its dataset.

    If several splits name the same dataset, they get different tasks: each split gets
    the tasks that follow those of the earlier splits.

    Raises:
      ValueError: the dataset has too few tasks.
    """
    datasets = {name: getattr(self.options, f"{name}_split") for name in SPLITS}
    dataset = datasets[split]
    first = 0
    for name in SPLITS[: SPLITS.index(split)]:
      if datasets[name] == dataset:
        first += self.sizes[name]
    end = first + self.sizes[split]
    path = self.data / "datasets" / f"{dataset}.txt"
    lines = path.read_text().split("\n") if path.is_file() else []
    ids = [line.partition(":")[0].strip() for line in lines if line.strip()]
    check_size(f"AppWorld's dataset {path}", ids, split, end)
    tasks = []
    for index in spread(len(ids))[first:end]:
      specs = json.loads(self._path(ids[index], "specs.json").read_text())
      tasks.append(Task(ids[index], split, specs["instruction"], self.max_steps))
    return tasks

  def _path(self, task_id: str, *names: str) -> Path:
    """Return the path of a file of a task."""
    return self.data.joinpath("tasks", task_id, *names)

  def reset(self, task_id: str) -> str:
    """Start a task.

    Returns:
      The observation: the supervisor, the time and the apps.

    Raises:
      ValueError: the id has other characters than letters, digits and "_".
    """
    # A task's directory contains code that is executed. So an id such as "../x", which
    # leads to another directory, is refused.
    if not re.fullmatch(r"\w+", task_id):
      raise ValueError(f"{task_id!r} is not the id of an AppWorld task: correct the id")
    if self._package is None:
      self._start_engine()
    elif self._world is not None:
      # Python's exit handlers would keep each world's IPython shell in memory. They are
      # removed: this process ends by a signal, which would not run them anyway.
      atexit._clear()
      self._world.close()
      shutil.rmtree(self._root / "experiments", ignore_errors=True)
    self._world = self._package.AppWorld(
      task_id,
      "episodes",
      max_interactions=1_000_000,  # no limit; the rollout loop counts the steps
      timeout_seconds=CODE_S,
    )
    # Logs cannot be written if code prints half of a surrogate pair.
    self._world.save_logs = lambda: None
    task = self._world.task
    solution = self._path(task_id, "ground_truth", "compiled_solution.py")
    self._plan: list[PlanStep] = []
    if solution.is_file():
      self._plan = make_plan(solution.read_text(), task.api_docs)
    self._position = 0  # the index of the plan's next step
    person = task.supervisor
    name = f"{person.first_name} {person.last_name}"
    contact = f"email {person.email}, phone number {person.phone_number}"
    apps = (f"- {app}: {text}" for app, text in task.app_descriptions.items())
    lines = [
      f"Your supervisor is {name}, {contact}.",
      f"It is {task.datetime:%A, %Y-%m-%d, %H:%M}.",
      "The apps:",
      *apps,
    ]
    return "\n".join(lines)

  def step(self, action: str) -> tuple[str, bool]:
    """Execute an agent's code.

    The paper states no limits of outputs and of time; `OUTPUT_CHARS` and `CODE_S` are
    our choice.

    Returns:
      The output of the code, and whether the task was declared done, right or wrong.
    """
    try:
      output = self._world.execute(action)
    except BaseException as error:  # The agent's code may raise any error.
      self._world.safety_guard.disable()
      output = f"{FAILED}{type(error).__name__}: {error}"
    output = output.rstrip().encode("utf-8", "replace").decode()
    if self._plan and action == self._step.code and not output.startswith(FAILED):
      self._position = min(self._position + 1, len(self._plan) - 1)
    cut = len(output) - OUTPUT_CHARS
    if cut > 0:
      output = f"{output[:OUTPUT_CHARS]}\n[{cut} more characters were cut]"
    return output, self._world.task_completed()

  @property
  def _step(self) -> PlanStep:
    """Return the plan's next step."""
    return self._plan[self._position]

  def score(self) -> float:
    """Return 1 if all tests of AppWorld's own evaluation pass, else 0."""
    self._world._save_state(self._world.output_db_home_path_on_disk)
    return float(self._world.evaluate().success)

  def oracle(self) -> Oracle:
    """Return the next step of the task's solution.

    Raises:
      NotImplementedError: the task has no solution.
    """
    if not self._plan:
      task_id = self._world.task_id
      problem = f"AppWorld's task {task_id} has no solution, which scripted models need"
      raise NotImplementedError(
        f"{problem}: use the datasets train and dev, or synthetic tasks"
      )
    step = self._step
    return Oracle(step.code, self._position, step.critical, recovering=False)

  def mistake(self, kind: str, key: str) -> str:
    """Return wrong code in place of the expert's; see Env.mistake."""
    return draw_mistake(self._step, kind, key)

  def _start_engine(self) -> None:
    """Import the engine.

    The engine writes files beside its data. To keep the data clean, the engine gets a
    temporary root directory with a link to the data.
    """
    self._root = Path(tempfile.mkdtemp())
    (self._root / "data").symlink_to(self.data)
    os.environ["APPWORLD_ROOT"] = str(self._root)
    # IPython must not write into the user's home directory.
    os.environ["IPYTHONDIR"] = str(self._root / "ipython")
    for limit, value in LIMITS.items():
      resource.setrlimit(limit, (value, value))
    warnings.simplefilter("ignore")  # The engine's libraries print warnings.
    self._package = importlib.import_module("appworld")
