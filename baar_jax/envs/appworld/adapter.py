"""AppWorld: an assistant writes Python that calls the APIs of nine apps."""

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

from baar_jax.envs.appworld.errors import AppWorldErrors
from baar_jax.envs.appworld.expert import PlanStep, make_mistake, make_plan
from baar_jax.envs.appworld.shell import FAILED, Shell, warn_of_landlock
from baar_jax.envs.base import Env, Oracle, check_size, spread
from baar_jax.envs.engines import Engine, hide_process
from baar_jax.episode import SPLITS, Task

OUTPUT_CHARS = 4000  # of one observation; the rest is cut
MEMORY_BYTES = 4 << 30  # of a process; code that takes more gets a MemoryError


@dataclasses.dataclass(frozen=True)
class Options:
  # The directory above AppWorld's data/; "" is $APPWORLD_ROOT if set, else the tasks
  # that --stage=setup makes.
  data: str = ""
  # Names of datasets. Splits of one dataset take different tasks of it.
  train_split: str = "train"
  dev_split: str = "dev"
  test_split: str = "test_normal"
  code_s: int = 60  # seconds after which an agent's code is stopped

  def __post_init__(self) -> None:
    if self.code_s < 1:
      raise ValueError(f"code_s is {self.code_s}, expected at least 1")


class AppWorld(Env):
  """The Env of AppWorld. Its engine has room for one world in a process.

  The world stays in this process; agents' code runs in another one, see shell.py.
  """

  Options = Options
  Errors = AppWorldErrors
  engine = Engine(
    packages=("appworld==0.1.3.post1",),
    data_variable="APPWORLD_ROOT",
    download="appworld download data --root $APPWORLD_ROOT",
    install_arguments=("-m", "appworld.cli", "install"),
    warning=warn_of_landlock,
  )
  episodes_per_process = 1
  system_prompt = Path(__file__).with_name("prompt.txt").read_text()
  code_actions = True
  _package: Any = None  # the engine, once it has been started
  _world: Any = None

  @property
  def data(self) -> Path:
    return Path(self.options.data).absolute() / "data"

  def tasks(self, split: str) -> list[Task]:
    """List tasks of a dataset; any first few of them are spread evenly over its list.

    Splits of one dataset take different tasks of it, in the order of SPLITS.
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
    return self.data.joinpath("tasks", task_id, *names)

  def reset(self, task_id: str) -> str:
    if not re.fullmatch(r"\w+", task_id):  # a task has code
      raise ValueError(f"{task_id!r} is no AppWorld task")
    if self._package is None:
      self._start_engine(task_id)
    elif self._world is not None:
      # Each world's IPython shell would stay until the process ends, which runs no exit
      # handlers.
      atexit._clear()
      self._world.close()
      shutil.rmtree(self._root / "experiments", ignore_errors=True)
    self._world = self._package.AppWorld(task_id, "episodes")
    task = self._world.task
    self._shell.start(task.datetime)
    solution = self._path(task_id, "ground_truth", "compiled_solution.py")
    self._plan: list[PlanStep] = []
    if solution.is_file():
      self._plan = make_plan(solution.read_text(), task.api_docs)
    self._position = 0  # in the plan, whatever else the agent does in between
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
    self._world.requester.reset_request_count()
    output = self._shell.execute(action, self.options.code_s, self._call_api).rstrip()
    if self._plan and action == self._step.code and not output.startswith(FAILED):
      self._position = min(self._position + 1, len(self._plan) - 1)
    cut = len(output) - OUTPUT_CHARS
    if cut > 0:
      output = f"{output[:OUTPUT_CHARS]}\n[{cut} more characters were cut]"
    return output, self._world.task_completed()

  @property
  def _step(self) -> PlanStep:
    return self._plan[self._position]

  def _call_api(self, call: dict) -> object:
    app = call["app"]
    api = call["api"]
    arguments = call["arguments"]
    path = self._world.task.api_docs[app][api]["path"]
    # The engine would put "../../admin" into the address, which leads to APIs that
    # agents lack.
    for name in re.findall(r"{(\w+)}", path):
      if re.search(r"[/?#]", str(arguments.get(name))):
        raise ValueError("Some of the passed parameters are invalid.")
    return self._world.apis[app][api](**arguments)

  def score(self) -> float:
    """Return 1 if all tests of AppWorld's own evaluation pass, else 0."""
    self._world._save_state(self._world.output_db_home_path_on_disk)
    return float(self._world.evaluate().success)

  def oracle(self) -> Oracle:
    if not self._plan:
      task_id = self._world.task_id
      problem = f"AppWorld's task {task_id} has no solution, which scripted models need"
      raise NotImplementedError(
        f"{problem}: take the datasets train and dev, or synthetic tasks"
      )
    step = self._step
    return Oracle(step.code, self._position, step.critical, recovering=False)

  def mistake(self, kind: str, key: str) -> str:
    return make_mistake(self._step, kind, key)

  def _start_engine(self, task_id: str) -> None:
    """Import the package; it writes beside its data, in a root of this process."""
    self._root = Path(tempfile.mkdtemp())
    (self._root / "data").symlink_to(self.data)
    os.environ["APPWORLD_ROOT"] = str(self._root)
    os.environ["IPYTHONDIR"] = str(self._root / "ipython")  # not in the user's home
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")  # of the engine's libraries
    names = set(os.environ)
    self._package = importlib.import_module("appworld")
    for name in set(os.environ) - names:  # of the first .env above its directory
      del os.environ[name]
    hide_process()
    world = self._package.AppWorld(
      task_id,
      "shell",
      load_ground_truth=False,
      max_interactions=1_000_000,  # steps are counted
      timeout_seconds=self.options.code_s,
    )
    self._shell = Shell(world)
    world.close()
