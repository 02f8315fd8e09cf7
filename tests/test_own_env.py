"""Test environments in one file: examples/corridor.py, and faulty ones."""

from contextlib import closing
from pathlib import Path

import pytest
import tiny
from errors_config import command

import main
from baar_jax.envs import base
from baar_jax.envs.base import EnvDied
from baar_jax.envs.process import open_envs
from baar_jax.run import Run
from baar_jax.store import Store

CORRIDOR = Path(__file__).parents[1] / "examples" / "corridor.py"
ODD = """
import sys
from baar_jax.envs.base import Env, Task
class Odd(Env):
  system_prompt, method = "p", ""
  def __init__(self, **sizes): pass
  def give(self, method, right): return eval(self.result) if method == self.method else right
  def reset(self, text):
    print("noise")
    self.method, self.result = text.split("=", 1)
    return self.give("reset", f"{sys.stdin.read()!r} {'jax' in sys.modules}")
  def tasks(self, split): return self.give("tasks", [])
  def step(self, action): return self.give("step", ("a room", False))
  def score(self): return self.give("score", 0)
  def mistake(self, kind, key): return self.give("mistake", "go")
"""


@pytest.fixture
def odd(tmp_path):
  """Open an Odd in a child process."""
  (tmp_path / "odd.py").write_text(ODD)
  with closing(*open_envs(f"{tmp_path}/odd.py:Odd", {}, 1, 1)) as env:
    yield env


def test_the_command_line_runs_the_example(tmp_path):
  command(
    tmp_path,
    f"--config={CORRIDOR}",
    *tiny.flags(tmp_path),
    "--stage=profile",
    "--config.env.max_steps=12",
  )
  with closing(Store(tmp_path / "tiny" / "episodes.sqlite")) as store:
    table = store.table(["always-small", "always-large"])
  assert table.groupby("policy").success.sum()["always-large"] > 0


def test_prints_input_and_bugs_do_not_disturb_the_protocol(capfd, odd):
  assert (odd.system_prompt, odd.code_actions, odd.scores_steps) == ("p", False, False)
  # The child has no input to read, and has not imported jax.
  assert odd.reset("=") == "'' False"
  with pytest.raises(
    NotImplementedError, match="no expert, which scripted models need"
  ):
    odd.oracle()
  odd.reset("tasks=int('?')")
  with pytest.raises(ValueError, match="^invalid literal for int"):
    odd.tasks("train")
  for bug in (
    "step=int('?')",
    "step=1 / 0",
  ):  # a ValueError, too, is the environment's own
    odd.reset(bug)
    with pytest.raises(EnvDied, match=r"Error: .* \(<string>:1\)"):
      odd.step("x")
  assert "noise" in capfd.readouterr().err


def test_a_result_of_the_wrong_kind_is_named(odd):
  """The error is a ValueError of one line, so the episode is not tried again."""
  calls = {"step": ["t"], "score": [], "mistake": ["lost", "k"], "tasks": ["train"]}
  wrong = {
    "reset": ["None", "b'a'", "('a', False)"],
    "tasks": [
      "None",
      "[]",
      "['t']",
      "[Task(b't', 'train', 'd', 9)]",
      "[Task('t', 'train', None, 9)]",
    ],
    "step": ["None", "'ab'", "('a', None)", "('a', False, 1)"],
    "mistake": ["None", "7"],
    "score": ["None", "float('nan')", "-0.1", "1.5", "'1'"],
  }
  for method, result in ((name, result) for name in wrong for result in wrong[name]):
    with pytest.raises(
      ValueError, match=f"^Odd.{method}.* gave .*, but must give .*"
    ) as error:
      odd.reset(f"{method}={result}")
      getattr(odd, method)(*calls[method])
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


MAZE = """
import dataclasses
from baar_jax.envs.base import Env, Task
@dataclasses.dataclass
class Options:
  rooms: int = 1
  light: float = 1.0
class Maze(Env):
  Options, metric, system_prompt = Options, "score", "p"
  def tasks(self, split): return [Task(split, split, f"{self.options}", self.max_steps)]
"""


def test_a_user_s_environment_has_options_and_a_metric(tmp_path):
  (tmp_path / "maze.py").write_text(MAZE)
  kind = f"{tmp_path}/maze.py:Maze"
  # The command line gives texts. An integer is converted to a float.
  config = tiny.config(tmp_path, kind=kind, options={"rooms": "7", "light": 2})
  main.validate(config)
  assert config.env.options == {"rooms": 7, "light": 2.0}
  with closing(Run(config)) as run:
    assert run.tasks("dev")[0].description == "Options(rooms=7, light=2.0)"
  assert base.load(kind).metric == "score" and base.load("sandbox").metric == "success"
  for value in ("many", True, 1.0):
    config.env.options = {"rooms": value}
    message = f"^--config.env.options.rooms is {value!r}, but must be of type int"
    with pytest.raises(ValueError, match=message) as error:
      main.validate(config)
    assert "\n" not in str(error.value)
