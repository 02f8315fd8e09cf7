"""An environment in one file: examples/corridor.py, and others that do what they must not."""

from contextlib import closing
from pathlib import Path

import pytest
import tiny
from absl import flags

import main
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
class Mute(Odd):
  system_prompt = None
class Blind(Odd):
  def oracle(self): return "go"
class Twice(Odd):
  def tasks(self, split): return [Task("a", split, "Go.", 9)]
"""


@pytest.fixture
def odd_file(tmp_path):
  (tmp_path / "odd.py").write_text(ODD)
  return tmp_path / "odd.py"


@pytest.fixture
def odd(odd_file):
  """odd(class): one of the classes above, in a process of its own."""
  return lambda name: closing(*open_envs(f"{odd_file}:{name}", {}, 1, 1))


def test_the_command_line_runs_the_example(tmp_path):
  command = ["main.py", f"--config={CORRIDOR}", *tiny.flags(tmp_path), "--stage=profile"]
  assert main.main(main.parse([*command, "--config.env.max_steps=12"], flags.FlagValues())) == 0
  with closing(Store(tmp_path / "tiny" / "episodes.sqlite")) as store:
    table = store.table(["always-small", "always-large"])
  assert table.groupby("policy").success.sum()["always-large"] > 0


def test_prints_input_and_bugs_stay_out_of_the_protocol(odd, capfd):
  with odd("Odd") as env:
    assert (env.system_prompt, env.code_actions, env.scores_steps) == ("p", False, False)
    assert env.reset("=") == "'' False"  # no input to read, and no jax
    with pytest.raises(NotImplementedError, match="no expert, which scripted models need"):
      env.oracle()
    env.reset("tasks=int('?')")
    with pytest.raises(ValueError, match="^invalid literal for int"):
      env.tasks("train")
    for bug in ("step=int('?')", "step=1 / 0"):  # a ValueError, too, is the environment's own
      env.reset(bug)
      with pytest.raises(EnvDied, match=r"Error: .* \(<string>:1\)"):
        env.step("x")
  assert "noise" in capfd.readouterr().err


def test_a_result_of_the_wrong_kind_is_named(odd):
  """In one line, which is no reason to try again."""
  calls = {"step": ["t"], "score": [], "mistake": ["lost", "k"], "tasks": ["train"]}
  wrong = {"reset": ["None", "b'a'", "('a', False)"], "tasks": ["None", "['t']"]}
  wrong["tasks"] += ["[Task(b't', 'train', 'd', 9)]", "[Task('t', 'train', None, 9)]"]
  wrong |= {"step": ["None", "'ab'", "('a', None)", "('a', False, 1)"], "mistake": ["None", "7"]}
  wrong |= {"score": ["None", "float('nan')", "-0.1", "1.5", "'1'"]}
  with odd("Odd") as env:
    for method, result in [(name, result) for name in wrong for result in wrong[name]]:
      with pytest.raises(ValueError, match=f"^Odd.{method} gave .*; expected .*") as error:
        env.reset(f"{method}={result}")
        getattr(env, method)(*calls[method])
      assert "\n" not in str(error.value) and len(str(error.value)) < 200
  with pytest.raises(ValueError, match="^Mute.system_prompt gave None; expected a text"):
    odd("Mute")
  with odd("Blind") as env, pytest.raises(ValueError, match="^Blind.oracle gave 'go'; expected an"):
    env.reset("=")


@pytest.mark.parametrize(
  "name, message", [("Twice", "the task 'a' twice: each is in one"), ("Odd", "no train task: each")]
)
def test_splits_that_share_a_task_or_have_none_are_refused(odd_file, name, message, tmp_path):
  config = tiny.config(tmp_path, kind=f"{odd_file}:{name}")
  problem = f"odd.py:{name} lists {message}"
  with closing(Run(config)) as run, pytest.raises(ValueError, match=problem):
    run.tasks("train")
