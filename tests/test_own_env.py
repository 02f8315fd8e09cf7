"""An environment in one file: examples/corridor.py, by the command line and by hand."""

import json
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
SIZES = {"train_tasks": 2, "test_tasks": 2, "max_steps": 12}


def test_the_command_line_runs_the_example(tmp_path):
  command = ["main.py", f"--config={CORRIDOR}", *tiny.flags(tmp_path), "--stage=profile"]
  assert main.main(main.parse([*command, "--config.env.max_steps=12"], flags.FlagValues())) == 0
  store = Store(tmp_path / "tiny" / "episodes.sqlite")
  table = store.table(["always-small", "always-large"])
  store.close()
  assert table.groupby("policy").success.sum()["always-large"] > 0
  metrics = (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()
  used = [json.loads(line) for line in metrics if "mb_per_live_episode" in line]
  assert used[0]["mb_per_live_episode"] > 5


def test_the_example_plays_and_an_environment_without_an_expert_says_so(tmp_path):
  with closing(*open_envs(f"{CORRIDOR}:Corridor", SIZES, 1, 1)) as env:
    task = env.tasks("train")[1]
    assert (task.id, task.max_steps) == ("train-1", 12)
    assert env.reset(task.id).endswith(" door.")
    assert env.step(env.mistake("wrong", "k"))[1] is False
    for _ in range(6):
      assert env.score() == 0
      _, done = env.step(env.oracle().action)
    assert (done, env.score()) == (True, 1.0)
  path = tmp_path / "plain.py"
  path.write_text(CORRIDOR.read_text().replace("def oracle(", "def other("))
  with closing(*open_envs(f"{path}:Corridor", SIZES, 1, 1)) as env:
    env.reset("test-0")
    with pytest.raises(NotImplementedError, match="no expert, which scripted models need"):
      env.oracle()


@pytest.mark.parametrize(
  "kind, kwargs, error, message",
  [
    ("beach", {}, ValueError, "known: sandbox"),
    ("nowhere.py:Corridor", {}, ValueError, "there is no file nowhere.py"),
    (f"{CORRIDOR}:Hall", {}, ValueError, "corridor.py has no class Hall"),
    ("sandbox", {"no_such_argument": 1}, EnvDied, "no_such_argument"),
  ],
)
def test_a_wrong_kind_or_argument_is_named(kind, kwargs, error, message):
  with pytest.raises(error, match=message):
    open_envs(kind, kwargs, 1, 1)


ODD = """
from baar_jax.envs.base import Env
from baar_jax.episode import Task
class Odd(Env):
  system_prompt = "p"
  def __init__(self, method, result):
    setattr(self, method, lambda *_: eval(result))
  def reset(self, task_id): return "a room"
  def step(self, action): return "a room", False
"""


RESULTS = {  # wrong ones of each method
  "tasks": ["None", "[]", "['t']", "[Task('t', 'a', 'Go.', 9)] * 2", "[Task(1, 'a', 'Go.', 9)]"],
  "reset": ["None", "b'a'", "('a', False)"],
  "step": ["None", "'ab'", "('a', None)", "('a', False, 1)", "['a', True]"],
  "score": ["None", "float('nan')", "-0.1", "1.5", "'1'"],
  "oracle": ["None", "'go'"],
  "mistake": ["None", "7"],
  "system_prompt": ["None"],
}
EXPECTED = {"tasks": "a list of Task", "step": "(text, bool)", "score": "a number in [0, 1]"}


@pytest.mark.parametrize("method", RESULTS)
def test_a_result_of_the_wrong_kind_is_named_with_its_class(tmp_path, method):
  (tmp_path / "odd.py").write_text(ODD)
  arguments = {"score": (), "oracle": (), "mistake": ("lost", "k")}.get(method, ("t",))
  for result in RESULTS[method]:
    settings = {"method": method, "result": result}
    with (
      pytest.raises(ValueError, match=f"^Odd.{method} gave .*; expected ") as error,
      closing(*open_envs(f"{tmp_path}/odd.py:Odd", settings, 1, 1)) as env,
    ):
      if method != "tasks":
        env.reset("t")
      getattr(env, method)(*arguments)
    assert EXPECTED.get(method, "") in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_splits_that_share_a_task_are_refused():
  env = SimpleNamespace(tasks=lambda split: [Task(id_, split, "Go.", 9) for id_ in ("a", split)])
  store = SimpleNamespace(tasks=lambda split: [])
  config = Config(env=EnvConfig(kind="odd.py:Odd"))
  run = SimpleNamespace(is_main=True, store=store, envs=lambda: [env], config=config)
  with pytest.raises(ValueError, match="odd.py:Odd lists the task 'a' twice: each is in one split"):
    Run.tasks(run, "train")


def test_spread_is_a_permutation_that_starts_evenly():
  for count in (0, 1, 2, 7, 64, 100):
    assert sorted(spread(count)) == list(range(count))
  assert spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
