"""AppWorld: an assistant writes Python that calls the APIs of nine apps; and its expert."""

import ast
import atexit
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
from typing import NamedTuple

from baar_jax.envs.appworld_shell import FAILED, Shell
from baar_jax.envs.base import PROMPTS, Env, Oracle, spread
from baar_jax.envs.engines import hide_process
from baar_jax.episode import SPLITS, Task

USUAL_DATASETS = ("train", "dev", "test_normal")  # of SPLITS
OUTPUT_CHARS = 4000  # of one observation; the rest is cut
MEMORY_BYTES = 4 << 30  # of a process; an agent's code that takes more gets a MemoryError
API = re.compile(r"\bapis\.(\w+)\.(\w+)")
COMPLETE = ("supervisor", "complete_task")
ROUTINE = ("read", "declare")  # kinds of steps
EARLY = 0.7  # share of wrong writes that declare the task done instead
# Arguments that can be changed so that the call still works and does something else.
NUMBERS = ("amount", "quantity", "rating", "priority", "duration")
TEXTS = ("content", "title", "description", "name", "message", "body", "subject", "label", "tags")
# Ways to read documentation, which is long, and how often each is taken.
WANDERINGS = {
  "print(apis.api_docs.show_app_descriptions())": 0.2,
  "print(apis.api_docs.show_api_descriptions(app_name='{app}'))": 0.5,
  "print(apis.api_docs.show_api_doc(app_name='{app}', api_name='{api}'))": 0.3,
}


class AppWorld(Env):
  """The Env of AppWorld. Its engine has room for one world in a process.

  The world stays in this process; agents' code runs in another one, see appworld_shell.py.
  """

  system_prompt = (PROMPTS / "appworld.txt").read_text()
  code_actions = True

  def __init__(
    self, data, train_tasks, dev_tasks, test_tasks, max_steps=40, splits=("", "", ""), code_s=60
  ) -> None:
    """Starts no engine yet.

    `data` is the directory above AppWorld's `data/`. The splits are names of datasets; "" is train,
    dev and test_normal. An agent's code is stopped after `code_s` seconds.
    """
    self._data = Path(data).absolute() / "data"
    self._datasets = [name or usual for name, usual in zip(splits, USUAL_DATASETS)]
    self._sizes = train_tasks, dev_tasks, test_tasks
    self._max_steps, self._code_s = max_steps, code_s
    self._engine = self._world = None

  def tasks(self, split: str) -> list[Task]:
    """Tasks of a dataset; any first few of them are spread evenly over its list.

    Splits of one dataset take different tasks of it, in the order of SPLITS.
    """
    *earlier, dataset = self._datasets[: SPLITS.index(split) + 1]
    first = sum(size for name, size in zip(earlier, self._sizes) if name == dataset)
    count = first + self._sizes[len(earlier)]
    path = self._data / "datasets" / f"{dataset}.txt"
    lines = path.read_text().split("\n") if path.is_file() else []
    ids = [line.partition(":")[0].strip() for line in lines if line.strip()]
    if len(ids) < count:
      problem = f"AppWorld's dataset {path} has {len(ids)} tasks, {count} were asked for"
      raise ValueError(f"{problem}: set --config.env.{split}_tasks or {split}_split, or other data")
    chosen = [ids[index] for index in spread(len(ids))[first:count]]
    specs = [self._data / "tasks" / id_ / "specs.json" for id_ in chosen]
    texts = [json.loads(path.read_text())["instruction"] for path in specs]
    return [Task(id_, split, text, self._max_steps) for id_, text in zip(chosen, texts)]

  def reset(self, task_id: str) -> str:
    if not re.fullmatch(r"\w+", task_id):  # a task has code, and a store may be a stranger's
      raise ValueError(f"{task_id!r} is no AppWorld task")
    if self._engine is None:
      self._start_engine(task_id)
    elif self._world is not None:
      # Each world's IPython shell would stay until the process ends, which runs no exit handlers.
      atexit._clear()
      self._world.close()
      shutil.rmtree(self._root / "experiments", ignore_errors=True)
    solution = self._data / "tasks" / task_id / "ground_truth" / "compiled_solution.py"
    self._world = self._engine.AppWorld(task_id, "episodes")
    task = self._world.task
    self._shell.start(task.datetime)
    self._plan = make_plan(solution.read_text(), task.api_docs) if solution.is_file() else []
    self._position = 0  # in the plan, whatever else the agent does in between
    person, apps = task.supervisor, task.app_descriptions.items()
    name = f"{person.first_name} {person.last_name}"
    head = f"Your supervisor is {name}, email {person.email}, phone number {person.phone_number}."
    date = f"It is {task.datetime:%A, %Y-%m-%d, %H:%M}."
    return "\n".join([head, date, "The apps:", *(f"- {app}: {text}" for app, text in apps)])

  def step(self, action: str) -> tuple[str, bool]:
    self._world.requester.reset_request_count()
    output = self._shell.execute(action, self._code_s, self._call_api).rstrip()
    if self._plan and action == self._plan[self._position].code and not output.startswith(FAILED):
      self._position = min(self._position + 1, len(self._plan) - 1)
    cut = len(output) - OUTPUT_CHARS
    if cut > 0:
      output = f"{output[:OUTPUT_CHARS]}\n[{cut} more characters were cut]"
    return output, self._world.task_completed()

  def _call_api(self, call: dict) -> object:
    app, api, arguments = call["app"], call["api"], call["arguments"]
    path = self._world.task.api_docs[app][api]["path"]
    # The engine would put "../../admin" into the address, which leads to APIs that agents lack.
    if any(re.search(r"[/?#]", str(arguments.get(name))) for name in re.findall(r"{(\w+)}", path)):
      raise ValueError("Some of the passed parameters are invalid.")
    return self._world.apis[app][api](**arguments)

  def score(self) -> float:
    """1 if all tests of AppWorld's own evaluation pass, else 0."""
    self._world._save_state(self._world.output_db_home_path_on_disk)
    return float(self._world.evaluate().success)

  def oracle(self) -> Oracle:
    if not self._plan:
      problem = f"AppWorld's task {self._world.task_id} has no solution, which scripted models need"
      raise NotImplementedError(f"{problem}: take the datasets train and dev, or tasks made here")
    step = self._plan[self._position]
    return Oracle(step.code, self._position, step.kind not in ROUTINE, recovering=False)

  def mistake(self, kind: str, key: str) -> str:
    step, draw, code = self._plan[self._position], random.Random(key), ""
    if kind == "wrong":
      code = _wrong(step, draw)
    elif kind == "hasty":  # a call without its token, or with a parameter that does not exist
      apps = sorted({app for app, _ in step.apis if app not in ("supervisor", "api_docs")})
      app = draw.choice(apps or ["venmo", "phone", "spotify"])
      code = f"print(apis.{app}.show_account())"
      if draw.random() >= 0.5:
        code = f"print(apis.{app}.login(user='me', secret='{draw.randrange(1000)}'))"
    if code in ("", step.code):  # reads documentation
      app, api = draw.choice(step.apis)
      (text,) = draw.choices(list(WANDERINGS), list(WANDERINGS.values()))
      code = text.format(app=app, api=api)
    return code

  def _start_engine(self, task_id: str) -> None:
    """Imports the package, with a root directory for this process: it writes beside its data."""
    self._root = Path(tempfile.mkdtemp())
    (self._root / "data").symlink_to(self._data)
    os.environ["APPWORLD_ROOT"] = str(self._root)
    os.environ["IPYTHONDIR"] = str(self._root / "ipython")  # rather than in the user's home
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")  # of the engine's libraries
    names = set(os.environ)
    self._engine = importlib.import_module("appworld")
    for name in set(os.environ) - names:  # of the first .env above its directory
      del os.environ[name]
    hide_process()
    limits = {"max_interactions": 1_000_000, "timeout_seconds": self._code_s}  # steps are counted
    world = self._engine.AppWorld(task_id, "shell", load_ground_truth=False, **limits)
    self._shell = Shell(world)
    world.close()


class PlanStep(NamedTuple):
  code: str  # executed at once
  kind: str
  apis: list[tuple[str, str]]  # the names of an app and of one of its APIs
  writing: list[tuple[str, str]]  # those that change something


def make_plan(solution: str, docs: dict) -> list[PlanStep]:
  """Splits the function `solution` of a gold solution into steps that each call an API.

  All steps share one namespace; what the solution's module has beside the function comes first.
  docs[app][api] is of an API.
  """
  module = ast.parse(solution).body
  function = next(node for node in module if getattr(node, "name", "") == "solution")
  module.remove(function)
  plan, waiting = [], []
  for node in module + function.body:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if not is_text and not isinstance(node, ast.Return):
      waiting.append(node)
      if API.search(ast.unparse(node)) and not isinstance(node, ast.FunctionDef):
        plan.append(_step(waiting, docs))
        waiting = []
  if not plan or COMPLETE not in plan[-1].apis:
    waiting += ast.parse("apis.supervisor.complete_task()").body
    plan.append(_step(waiting, docs))
  return plan


def _step(nodes: list[ast.stmt], docs: dict) -> PlanStep:
  code = "\n".join(ast.unparse(node) for node in nodes)
  apis = API.findall(code)
  methods = {api: docs.get(api[0], {}).get(api[1], {}).get("method", "GET") for api in apis}
  writing = [api for api in apis if methods[api] != "GET"]
  signs = {  # of what the step does, by how much it matters
    "read": True,
    "declare": COMPLETE in apis and "complete_task()" in code,
    "pages": "page_index=" in code or "from_pages(" in code,
    "login": any(name == "login" for _, name in apis),
    "write": any(api != COMPLETE and api[1] != "login" for api in writing),
    "answer": COMPLETE in apis and "complete_task()" not in code,
  }
  *_, kind = filter(signs.get, signs)
  targets = [node.targets[-1] for node in nodes if isinstance(node, ast.Assign)]
  if targets:
    code += f"\nprint({ast.unparse(targets[-1])})"
  return PlanStep(code, kind, apis, writing)


def _wrong(step: PlanStep, draw: random.Random) -> str:
  """The step done wrongly; "" if it is a routine one or its call cannot be seen."""
  tree = ast.parse(step.code)
  calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
  apis = [(call, API.fullmatch(ast.unparse(call.func))) for call in calls]
  arguments = [(call, api.groups(), a) for call, api in apis if api for a in call.keywords]
  if step.kind == "answer":
    answer = draw.choice((f"answer={draw.randrange(10_000, 99_999)}", ""))
    return f"apis.supervisor.complete_task({answer})"
  if step.kind == "login":
    password = f"{draw.choice(('pass', 'secret'))}{draw.randrange(1000)}"
    for _, (_, name), argument in arguments:
      if (name, argument.arg) == ("login", "password"):
        argument.value = ast.Constant(password)
    return ast.unparse(tree)
  if step.kind == "pages":  # the first page alone, in no variable
    for call, _, argument in arguments:
      if argument.arg == "page_index":
        argument.value = ast.Constant(0)
        return f"print({ast.unparse(call)})"
  if step.kind == "write":
    spots = [a for _, api, a in arguments if api in step.writing and a.arg in NUMBERS + TEXTS]
    if draw.random() < EARLY or not spots:
      return "apis.supervisor.complete_task()"
    spot = draw.choice(spots)
    spot.value = ast.BinOp(spot.value, ast.Add(), ast.Constant(1 if spot.arg in NUMBERS else "?"))
    return ast.unparse(tree)
  return ""
