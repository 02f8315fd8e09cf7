"""Connect AppWorld, where an agent writes Python that calls the APIs of nine apps."""

import ast
import atexit
import dataclasses
import importlib
import json
import os
import random
import re
import resource
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from baar_jax.envs.base import Env, Errors, Oracle, check_size, spread
from baar_jax.envs.engines import Engine
from baar_jax.episode import SPLITS, Task

API = re.compile(r"\bapis\.(\w+)\.(\w+)")
COMPLETE = ("supervisor", "complete_task")
DECLARE = "apis.supervisor.complete_task()"
ROUTINE = ("read", "declare")  # the kinds of routine steps; see PlanStep
# At a step that writes data, this share of wrong actions write nothing, but declare the
# task done.
EARLY = 0.7
# Names of arguments of API calls. If such an argument is changed, the call still
# works but has another effect.
NUMBERS = ("amount", "quantity", "rating", "priority", "duration")
TEXTS = (
  "content",
  "title",
  "description",
  "name",
  "message",
  "body",
  "subject",
  "label",
  "tags",
)
# Code that wastes a step, drawn evenly: it reads documentation, or calls an API without
# a token, or with parameters that do not exist.
WASTED = (
  "print(apis.api_docs.show_app_descriptions())",
  "print(apis.api_docs.show_api_descriptions(app_name='{app}'))",
  "print(apis.api_docs.show_api_doc(app_name='{app}', api_name='{api}'))",
  "print(apis.{app}.{api}())",
  "print(apis.{app}.login(user='me', secret='x'))",
)


class PlanStep(NamedTuple):
  """One step of the expert's plan.

  Attributes:
    code: the block of Python that an agent executes in this step.
    kind: "answer" answers the task's question; "write" changes data; "login" logs in;
      "pages" reads several pages; "declare" declares the task done; "read" reads data.
    apis: the called APIs, as pairs of the app's and the API's name.
    writing: those of `apis` that change data.
  """

  code: str
  kind: str
  apis: list[tuple[str, str]]
  writing: list[tuple[str, str]]

  @property
  def critical(self) -> bool:
    """Return whether a weak model often gets this kind of step wrong."""
    return self.kind not in ROUTINE


def make_plan(solution: str, docs: dict[str, dict[str, dict]]) -> list[PlanStep]:
  """Split a solution into steps that each call at least one API.

  All steps share one namespace. The last step declares the task done.

  Args:
    solution: Python code with a function `solution`. The plan begins with the code
      outside this function.
    docs: the documentation of each API, by the names of app and API.
  """
  module = ast.parse(solution).body
  function = next(node for node in module if getattr(node, "name", "") == "solution")
  module.remove(function)
  plan: list[PlanStep] = []
  statements: list[ast.stmt] = []
  for node in module + function.body:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_text or isinstance(node, ast.Return):
      continue
    statements.append(node)
    if API.search(ast.unparse(node)) and not isinstance(node, ast.FunctionDef):
      plan.append(_make_step(statements, docs))
      statements = []
  if not plan or COMPLETE not in plan[-1].apis:
    statements += ast.parse(DECLARE).body
    plan.append(_make_step(statements, docs))
  return plan


def _make_step(nodes: list[ast.stmt], docs: dict[str, dict[str, dict]]) -> PlanStep:
  """Combine statements into a step that prints the variable assigned last.

  Args:
    nodes: the statements.
    docs: the documentation of each API, by the names of app and API.
  """
  code = "\n".join(map(ast.unparse, nodes))
  apis = API.findall(code)
  writing = []
  for app, api in apis:
    method = docs.get(app, {}).get(api, {}).get("method", "GET")
    if method != "GET":
      writing.append((app, api))
  kind = _find_kind(code, apis, writing)
  targets = [node.targets[-1] for node in nodes if isinstance(node, ast.Assign)]
  if targets:
    code += f"\nprint({ast.unparse(targets[-1])})"
  return PlanStep(code, kind, apis, writing)


def _find_kind(
  code: str, apis: list[tuple[str, str]], writing: list[tuple[str, str]]
) -> str:
  """Find the kind of a step; if several kinds fit, the most critical one counts.

  The order from the most critical is: answer, write, login, pages, declare, read.

  Args:
    code: the step's Python.
    apis: the called APIs.
    writing: those of `apis` that change data.
  """
  if COMPLETE in apis and "complete_task()" not in code:
    return "answer"
  if any(api != COMPLETE and api[1] != "login" for api in writing):
    return "write"
  if any(name == "login" for _, name in apis):
    return "login"
  if "page_index=" in code or "from_pages(" in code:
    return "pages"
  return "declare" if COMPLETE in apis else "read"


def draw_mistake(step: PlanStep, kind: str, key: str) -> str:
  """Draw wrong code that replaces the code of a step.

  Args:
    step: the expert's step.
    kind: "wrong" or "wasted"; see Env.mistake.
    key: the seed of the random draw.
  """
  draw = random.Random(key)
  code = ""
  if kind == "wrong":
    code = _act_wrongly(step, draw)
  if code in ("", step.code):
    # If nothing in the step can be done wrongly, the step is wasted.
    app, api = draw.choice(step.apis)
    code = draw.choice(WASTED).format(app=app, api=api)
  return code


class Argument(NamedTuple):
  """A keyword argument in a call of an API.

  Attributes:
    call: the call.
    api: the names of the app and of the API.
    node: the argument's name and value.
  """

  call: ast.Call
  api: tuple[str, str]
  node: ast.keyword


def _list_arguments(tree: ast.Module) -> list[Argument]:
  """Collect the keyword arguments of all calls of APIs in a step."""
  arguments = []
  for call in ast.walk(tree):
    if isinstance(call, ast.Call):
      api = API.fullmatch(ast.unparse(call.func))
      if api:
        arguments += [Argument(call, api.groups(), node) for node in call.keywords]
  return arguments


def _act_wrongly(step: PlanStep, draw: random.Random) -> str:
  """Write code that does a critical step wrongly.

  Returns:
    The code; "" if the step is routine, or has no argument that can be changed.
  """
  tree = ast.parse(step.code)
  arguments = _list_arguments(tree)
  if step.kind == "answer":
    answer = draw.choice((f"answer={draw.randrange(10_000, 99_999)}", ""))
    return f"apis.supervisor.complete_task({answer})"
  if step.kind == "login":
    password = f"{draw.choice(('pass', 'secret'))}{draw.randrange(1000)}"
    for argument in arguments:
      if argument.api[1] == "login" and argument.node.arg == "password":
        argument.node.value = ast.Constant(password)
    return ast.unparse(tree)
  if step.kind == "pages":
    # The wrong code prints the first page only, and stores nothing in a variable.
    for argument in arguments:
      if argument.node.arg == "page_index":
        argument.node.value = ast.Constant(0)
        return f"print({ast.unparse(argument.call)})"
  if step.kind == "write":
    written = [argument.node for argument in arguments if argument.api in step.writing]
    candidates = [node for node in written if node.arg in NUMBERS + TEXTS]
    if draw.random() < EARLY or not candidates:
      return DECLARE
    node = draw.choice(candidates)
    addition = ast.Constant(1 if node.arg in NUMBERS else "?")
    node.value = ast.BinOp(node.value, ast.Add(), addition)
    return ast.unparse(tree)
  return ""


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
  # A weak model has to read much documentation, so it errs often at routine steps.
  errors = Errors(ability=(0.9, 1.35), routine=(0.65, 0.10))
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
