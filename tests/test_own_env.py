"""An environment in one file: examples/corridor.py, by the command line and by hand."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from absl import flags

import main
from baar_jax.config import Config, EnvConfig
from baar_jax.envs.base import EnvDied, spread
from baar_jax.envs.process import open_envs
from baar_jax.episode import Task
from baar_jax.run import Run
from baar_jax.store import Store

CORRIDOR = Path(__file__).parents[1] / "examples" / "corridor.py"


def test_the_command_line_runs_the_example(tmp_path):
  command = ["main.py", f"--config={CORRIDOR}", *tiny.flags(tmp_path), "--stage=profile"]
  assert main.main(main.parse([*command, "--config.env.max_steps=12"], flags.FlagValues())) == 0
  with closing(Store(tmp_path / "tiny" / "episodes.sqlite")) as store:
    table = store.table(["always-small", "always-large"])
  assert table.groupby("policy").success.sum()["always-large"] > 0


def test_an_environment_without_an_expert_can_be_played(tmp_path):
  path = tmp_path / "plain.py"
  path.write_text(CORRIDOR.read_text().replace("def oracle(", "def other("))
  sizes = {"train_tasks": 2, "dev_tasks": 2, "test_tasks": 2, "max_steps": 12}
  with closing(*open_envs(f"{path}:Corridor", sizes, 1, 1)) as env:
    assert [(task.id, task.max_steps) for task in env.tasks("train")][1] == ("train-1", 12)
    assert env.reset("test-0").endswith(" door.")
    assert env.step(env.mistake("wrong", "k"))[1] is False and env.score() == 0
    with pytest.raises(NotImplementedError, match="no expert, which scripted models need"):
      env.oracle()


@pytest.mark.parametrize(
  "kind, message",
  [
    ("beach", "there is no file"),
    (f"{CORRIDOR}:Hall", "corridor.py has no class Hall"),
    ("sandbox", "no_such_argument"),
  ],
)
def test_a_wrong_kind_or_argument_is_named(kind, message):
  with pytest.raises((ValueError, EnvDied), match=message):
    open_envs(kind, {"no_such_argument": 1}, 1, 1)


ODD = """
from baar_jax.envs.base import Env
class Odd(Env):
  system_prompt, method = "p", ""
  def give(self, method, right): return eval(self.result) if method == self.method else right
  def reset(self, text):
    self.method, self.result = text.split("=", 1)
    return self.give("reset", "a room")
  def tasks(self, split): return self.give("tasks", [])
  def step(self, action): return self.give("step", ("a room", False))
  def score(self): return self.give("score", 0)
  def mistake(self, kind, key): return self.give("mistake", "go")
class Mute(Odd):
  system_prompt = None
class Blind(Odd):
  def oracle(self): return "go"
"""


def test_a_result_of_the_wrong_kind_is_named(tmp_path):
  """In one line, which is no reason to try again."""
  (tmp_path / "odd.py").write_text(ODD)
  calls = {"step": ["t"], "score": [], "mistake": ["lost", "k"], "tasks": ["train"]}
  wrong = {"reset": ["None", "b'a'", "('a', False)"], "tasks": ["None", "['t']"]}
  wrong |= {"step": ["None", "'ab'", "('a', None)", "('a', False, 1)"], "mistake": ["None", "7"]}
  wrong |= {"score": ["None", "float('nan')", "-0.1", "1.5", "'1'"]}
  with closing(*open_envs(f"{tmp_path}/odd.py:Odd", {}, 1, 1)) as env:
    for method, result in [(name, result) for name in wrong for result in wrong[name]]:
      with pytest.raises(ValueError, match=f"^Odd.{method} gave .*; expected .*") as error:
        env.reset(f"{method}={result}")
        getattr(env, method)(*calls[method])
      assert "\n" not in str(error.value) and len(str(error.value)) < 200
  with pytest.raises(ValueError, match="^Mute.system_prompt gave None; expected a text"):
    open_envs(f"{tmp_path}/odd.py:Mute", {}, 1, 1)
  (blind,) = open_envs(f"{tmp_path}/odd.py:Blind", {}, 1, 1)
  with closing(blind), pytest.raises(ValueError, match="^Blind.oracle gave 'go'; expected an Or"):
    blind.reset("=")


@pytest.mark.parametrize(
  "ids, message",
  [
    ({"train": "ab", "dev": "ac", "test": "d"}, "the task 'a' twice: each is in one split"),
    ({"train": "aba", "dev": "c", "test": "d"}, "the task 'a' twice"),
    ({"train": "ab", "dev": "", "test": "d"}, "no dev task: each split needs one"),
  ],
)
def test_splits_that_share_a_task_or_have_none_are_refused(ids, message):
  env = SimpleNamespace(tasks=lambda split: [Task(id_, split, "Go.", 9) for id_ in ids[split]])
  store = SimpleNamespace(tasks=lambda split: [])
  config = Config(env=EnvConfig(kind="odd.py:Odd"))
  run = SimpleNamespace(is_main=True, store=store, envs=lambda: [env], config=config)
  with pytest.raises(ValueError, match=f"odd.py:Odd lists {message}"):
    Run.tasks(run, "train")


def test_spread_is_a_permutation_that_starts_evenly():
  assert all(sorted(spread(count)) == list(range(count)) for count in (0, 1, 2, 7, 64, 100))
  assert spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
