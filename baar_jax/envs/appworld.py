"""AppWorld: an assistant writes Python that calls the APIs of nine apps, on the engine itself."""

import ast
import atexit
import gc
import itertools
import json
import os
import re
import resource
import shutil
from pathlib import Path
from typing import IO, Any, ClassVar

from baar_jax.envs.appworld_expert import Expert, make_plan
from baar_jax.envs.appworld_prompt import SYSTEM_PROMPT
from baar_jax.envs.appworld_root import check, make_root
from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import Task

DATASETS = {"train": "train", "test": "test_normal"}
OUTPUT_CHARS = 4000  # of one observation; the rest is cut
CODE_S = 60  # after which AppWorld breaks code off
COLLECTED_WORLDS = 10  # after so many, what they have left in memory is collected
MEMORY_BYTES = 4 << 30  # of a process; an agent's code that wants more gets a MemoryError
NO_CAP = 1_000_000  # of executions; the caller counts steps
EXPERIMENT = "episodes"


class AppWorld(Env):
  """The Env of AppWorld. Its engine has room for one world in a process.

  Agents' code runs in this process; AppWorld keeps it from the usual functions for files and
  processes, which is no sandbox: it can read what the process can, solutions included.
  """

  system_prompt = SYSTEM_PROMPT
  code_actions = True
  episodes_per_process = 100  # what the engine keeps of each world adds up to 100 MB in 300
  _holder: ClassVar["AppWorld | None"] = None  # whose world the process has

  def __init__(
    self,
    data: str | Path,
    train_tasks: int,
    test_tasks: int,
    max_steps: int = 40,
    train_split: str = "",
    test_split: str = "",
    code_s: int = CODE_S,
  ) -> None:
    """Opens nothing yet.

    Args:
      data: the directory that $APPWORLD_ROOT names elsewhere, which holds `data/`.
      train_tasks, test_tasks: how many tasks each split has.
      max_steps: of each task's episodes; the caller counts them.
      train_split, test_split: names of datasets; "" is train and test_normal.
      code_s: seconds after which an agent's code is broken off.

    Raises:
      ValueError: AppWorld is not installed in the version that is expected, or cannot use the
        directory.
    """
    self._data = Path(data).absolute() / "data"
    check(self._data)
    self._sizes = {"train": train_tasks, "test": test_tasks}
    self._datasets = {
      "train": train_split or DATASETS["train"],
      "test": test_split or DATASETS["test"],
    }
    self._max_steps = max_steps
    self._code_s = code_s
    self._root: Path | None = None
    self._lock: IO | None = None
    self._world: Any = None
    self._worlds = 0
    self._expert: Expert | None = None
    self._no_expert = ""

  def tasks(self, split: str) -> list[Task]:
    """The first tasks of a dataset, levels of difficulty and scenarios in turn."""
    if split not in self._sizes:
      raise ValueError(f"unknown split {split!r}; known: {', '.join(self._sizes)}")
    dataset, count = self._datasets[split], self._sizes[split]
    path = self._data / "datasets" / f"{dataset}.txt"
    if not path.is_file():
      known = sorted(file.stem for file in path.parent.glob("*.txt"))
      raise ValueError(f"AppWorld has no dataset {dataset!r} in {path.parent}; known: {known}")
    lines = path.read_text().splitlines()
    ids = [line.partition(":")[0].strip() for line in lines if line.strip()]
    if len(ids) < count or not ids:
      raise ValueError(
        f"AppWorld's dataset {dataset} has {len(ids)} tasks in {path.parent}, {count} were asked "
        f"for: set --config.env.{split}_tasks; more of our own are made by --stage=setup with the "
        "same flags"
      )
    return [
      Task(id_, split, self._specs(id_)["instruction"], self._max_steps)
      for id_ in self._in_turn(ids)[:count]
    ]

  def _in_turn(self, ids: list[str]) -> list[str]:
    scenarios: dict[str, list[str]] = {}
    for id_ in ids:
      scenarios.setdefault(id_.partition("_")[0], []).append(id_)
    levels: dict[int, list[list[str]]] = {}
    for variants in scenarios.values():
      levels.setdefault(self._difficulty(variants[0]), []).append(variants)
    return _alternate(_alternate([levels[level] for level in sorted(levels)]))

  def _difficulty(self, task_id: str) -> int:
    path = self._data / "tasks" / task_id / "ground_truth" / "metadata.json"
    return json.loads(path.read_text())["difficulty"] if path.is_file() else 0

  def _specs(self, task_id: str) -> dict:
    path = self._data / "tasks" / task_id / "specs.json"
    if not re.fullmatch(r"\w+", task_id) or not path.is_file():
      raise ValueError(f"{task_id!r} is no AppWorld task in {self._data / 'tasks'}")
    return json.loads(path.read_text())

  def reset(self, task_id: str) -> str:
    self._specs(task_id)
    engine = self._engine()
    self._end_world()
    if AppWorld._holder not in (None, self):
      raise ValueError("AppWorld has one world per process: set --config.env.live_per_process=1")
    AppWorld._holder = self
    self._world = engine.AppWorld(
      task_id=task_id,
      experiment_name=EXPERIMENT,
      max_interactions=NO_CAP,
      timeout_seconds=self._code_s,
    )
    self._expert, self._no_expert = self._expert_of(task_id)
    task = self._world.task
    person = task.supervisor
    apps = [f"- {app}: {text}" for app, text in task.app_descriptions.items()]
    return "\n".join(
      [
        f"Your supervisor is {person.first_name} {person.last_name}, email {person.email}, "
        f"phone number {person.phone_number}.",
        f"It is {task.datetime:%A, %Y-%m-%d, %H:%M}.",
        "The apps:",
        *apps,
      ]
    )

  def _expert_of(self, task_id: str) -> tuple[Expert | None, str]:
    """The expert for a task; where its data has no solution, why there is none."""
    path = self._data / "tasks" / task_id / "ground_truth" / "compiled_solution.py"
    if not path.is_file():
      split = next((name for name in self._listed(task_id)), "no dataset")
      return None, (
        f"AppWorld's task {task_id} ({split}) has no solution, which scripted models need: of the "
        "downloaded datasets only train and dev have them; --config.env.data=own has them all"
      )
    docs = self._world.task.api_docs

    def is_write(app: str, api: str) -> bool:
      return app in docs and api in docs[app] and docs[app][api]["method"] != "GET"

    return Expert(make_plan(path.read_text(), is_write), is_write), ""

  def _listed(self, task_id: str) -> list[str]:
    files = sorted((self._data / "datasets").glob("*.txt"))
    return [file.stem for file in files if task_id in file.read_text().split()]

  def step(self, action: str) -> tuple[str, bool]:
    world = self._current()
    # A model's reply may hold half a surrogate pair, which cannot be written to AppWorld's log.
    code = action.encode("utf-8", "replace").decode()
    output = _unparsable(code) or self._execute(code)
    if self._expert:
      self._expert.observe(action, output)
    return _cut(output), world.task_completed()

  def _execute(self, code: str) -> str:
    try:
      return self._world.execute(code)
    except BaseException as error:  # raised by the agent's code, or by printing what it printed
      self._world.safety_guard.disable()
      return f"Execution failed. Traceback:\n{type(error).__name__}: {error}"

  def score(self) -> float:
    """1 if all tests of AppWorld's own evaluation pass, else 0."""
    return float(self._current().evaluate().success)

  def oracle(self) -> Oracle:
    return self._solver().oracle()

  def mistake(self, kind: str, key: str) -> str:
    return self._solver().mistake(kind, key)

  def _current(self) -> Any:
    if self._world is None:
      raise RuntimeError("no episode has been started: call reset() first")
    return self._world

  def _solver(self) -> Expert:
    self._current()
    if self._expert is None:
      raise NotImplementedError(self._no_expert)
    return self._expert

  def _engine(self) -> Any:
    """The package, with a root of this process's own: it writes beside its data."""
    if self._root is None:
      self._root, self._lock = make_root(self._data)
    os.environ["APPWORLD_ROOT"] = str(self._root)
    os.environ["IPYTHONDIR"] = str(self._root / "ipython")  # rather than in the user's home
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    known = set(os.environ)
    import appworld

    # It reads the first .env above its directory; the agent's code could read those keys.
    for name in set(os.environ) - known:
      del os.environ[name]
    return appworld

  def _end_world(self) -> None:
    if self._world is not None:
      # Each world's IPython shell would be kept for the end of the process, with all that its
      # variables hold: 1 MB a world. This process is killed, so nothing is left undone.
      atexit._clear()
      self._world.shell.user_ns.clear()
      self._world.close()
      self._world = self._expert = None
      AppWorld._holder = None
      self._worlds += 1
      if self._worlds % COLLECTED_WORLDS == 0:
        _collect()
      shutil.rmtree(self._root / "experiments", ignore_errors=True)

  def close(self) -> None:
    self._end_world()
    if self._root is not None:
      shutil.rmtree(self._root, ignore_errors=True)
      self._lock.close()
      self._root = self._lock = None


def _collect() -> None:
  """Collects garbage, which AppWorld puts off for hundreds of episodes."""
  gc.collect()
  if not gc.get_freeze_count():
    gc.freeze()  # the engine's own million objects, which stay and need not be looked at again


def _alternate(lists: list[list]) -> list:
  """The first of each list, then the second of each, and so on."""
  rounds = itertools.zip_longest(*lists)
  return [item for row in rounds for item in row if item is not None]


def _unparsable(code: str) -> str:
  """What to answer to code that AppWorld's own parser would fail on; "" for all other code."""
  try:
    ast.parse(code)
  except SyntaxError:
    return ""  # AppWorld says where it is
  except (ValueError, RecursionError, MemoryError) as error:
    return f"Execution failed. Traceback:\nThe code cannot be parsed: {error}"
  return ""


def _cut(text: str) -> str:
  text = text.rstrip()
  over = len(text) - OUTPUT_CHARS
  return text if over <= 0 else f"{text[:OUTPUT_CHARS]}\n[{over} more characters were cut]"
