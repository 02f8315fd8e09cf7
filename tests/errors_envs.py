"""The errors of environments, their options, engines and processes."""

from contextlib import closing
from pathlib import Path
from unittest import mock

from errors_config import command

from baar_jax.envs import base, engines
from baar_jax.envs.alfworld import adapter as alfworld
from baar_jax.envs.appworld import adapter as appworld
from baar_jax.envs.base import Env
from baar_jax.envs.code.adapter import read_functions
from baar_jax.envs.process import open_envs
from baar_jax.envs.scienceworld import adapter

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
  load(tmp, "Good")
  with closing(*open_envs(f"{tmp}/own.py:Good", {}, 1, 1)) as env:
    env.reset("'A room.'")
    env.score()


def list_games(tmp: Path, content: bytes) -> None:
  """List the training games of a file."""
  (tmp / "list.txt").write_bytes(content)
  alfworld.ALFWorld(1, options=alfworld.Options(str(tmp), "list.txt")).tasks("train")


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
  ("...no expert...quickstart.py", lambda tmp: Env().mistake("wasted", "key")),
  (
    "no.txt is not a list of ids from sciworld_0 to sciworld_4638: download it again",
    lambda tmp: adapter.ScienceWorld(1, options=LISTED).tasks("train"),
  ),
  (
    "cannot read functions from TMP/none (...",
    lambda tmp: read_functions(f"{tmp}/none"),
  ),
  # The kind and its options
  (
    "...kind is 'poem'...FILE.py:CLASS...scienceworld...",
    command,
    "--config.env.kind=poem",
  ),
  ("...own.py:Good'...ZeroDivisionError(...); correct...", load, "Good", "1 / 0"),
  ("...kind is 'TMP/own.py:Task'...Task is no subclass of Env...", load, "Task"),
  ("...missing 1 required positional argument: 'rooms'...", load, "NoDefault"),
  ("...skip_test_variations is -1, but must be at least 0...", command, SKIPPED),
  (
    "...size: Unexpected keyword argument...gold_dir...",
    command,
    "--config.env.options.size=2",
  ),
  ("...short_tasks: Input should be a valid boolean...", command, SHORT),
  # Engines
  ("...toy is not installed...--stage=setup...", lambda tmp: engines.command_of(TOY)),
  ("appworld has no data in TMP/nowhere...tools.make_tasks appworld...", find_no_data),
  # Child processes
  ("Good.score gave 2: give what Env.score in baar_jax/envs/base.py says", score),
  # ALFWorld
  ("list.txt is not a list of games...SPLIT/NAME/TRIAL...", list_games, b"\xff"),
  ("'train' is not the name of an ALFWorld game...", list_games, b"train/trial_A"),
  (f"...{MUG}...is missing...", list_games, f"train/{MUG}/trial_A".encode()),
  # AppWorld
  ("'../x' is not the id of...", lambda tmp: appworld.AppWorld().reset("../x")),
]
