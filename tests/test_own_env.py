"""Test environments in one file: examples/corridor.py, and faulty ones."""

from contextlib import closing

import pytest
import tiny
from errors_config import command

import main
from baar_jax.envs.base import EnvDied
from baar_jax.envs.process import open_envs
from baar_jax.run import Run
from baar_jax.store import Store


def test_the_command_line_runs_the_example(tmp_path):
  flags = tiny.flags(tmp_path, "--stage=profile", "--config.env.max_steps=12")
  command(tmp_path, f"--config={tiny.ROOT}/examples/corridor.py", *flags)
  with closing(Store(tmp_path / "tiny" / "episodes.sqlite")) as store:
    table = store.table(["always-small", "always-large"])
  assert table.groupby("policy").success.sum()["always-large"] > 0


ODD = """
import sys
from baar_jax.envs.base import Env
class Odd(Env):
  system_prompt = "p"
  def reset(self, task_id):
    print("noise")
    return f"{sys.stdin.read()!r} {'jax' in sys.modules}"
  def tasks(self, split): return int(split)
  def step(self, action): return eval(action)
"""


def test_prints_input_and_bugs_do_not_disturb_the_protocol(capfd, tmp_path):
  (tmp_path / "odd.py").write_text(ODD)
  with closing(*open_envs(f"{tmp_path}/odd.py:Odd", {}, 1, 1)) as odd:
    # The child has no input to read, and has not imported jax.
    assert odd.reset("t") == "'' False"
    assert odd.system_prompt == "p"
    with pytest.raises(NotImplementedError, match="no expert"):
      odd.oracle()
    with pytest.raises(ValueError, match="^invalid literal for int"):
      odd.tasks("train")
    # A step's ValueError is the environment's own, too.
    for bug in ("int('?')", "1 / 0"):
      odd.reset("t")
      with pytest.raises(EnvDied, match=r"Error: .* \(<string>:1\)"):
        odd.step(bug)
  assert "noise" in capfd.readouterr().err


MAZE = """
import dataclasses
from baar_jax.envs.base import Env, Task
@dataclasses.dataclass
class Options:
  rooms: int = 1
  light: float = 1.0
class Maze(Env):
  Options, system_prompt = Options, "p"
  def tasks(self, split): return [Task(split, split, f"{self.options}", self.max_steps)]
"""


def test_a_user_s_environment_has_options(tmp_path):
  (tmp_path / "maze.py").write_text(MAZE)
  # The command line gives texts. An integer is converted to a float.
  options = {"rooms": "7", "light": 2}
  config = tiny.config(tmp_path, kind=f"{tmp_path}/maze.py:Maze", options=options)
  main.validate(config)
  assert config.env.options == {"rooms": 7, "light": 2.0}
  with closing(Run(config)) as run:
    assert run.tasks("dev")[0].description == "Options(rooms=7, light=2.0)"
