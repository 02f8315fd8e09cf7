"""Test ALFWorld on its real engine with synthetic games, and with damaged data."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import follow

from baar_jax.envs import engines
from baar_jax.envs.alfworld.adapter import (
  GAME,
  GAMES,
  ROUTINE_VERBS,
  TASK_TYPES,
  ALFWorld,
  Options,
)
from baar_jax.envs.base import EnvDied, read_verb
from baar_jax.envs.process import ProcessEnv, open_envs
from tools.make_tasks import make_tasks

ENGINE = ALFWorld.engine
TRAIN = TEST = 6  # one game of each type


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
  if not shutil.which("g++") and not ENGINE.is_installed():
    pytest.skip("ALFWorld cannot be compiled here")
  ENGINE.install()
  place = tmp_path_factory.mktemp("games")
  make_tasks(ENGINE, place, (TRAIN, 1, TEST))
  return place


@pytest.fixture(scope="module")
def env(data) -> Iterator[ProcessEnv]:
  sizes = {"train_tasks": TRAIN, "dev_tasks": 1, "test_tasks": TEST, "max_steps": 30}
  arguments = sizes | {"options": {"data": str(data)}}
  with contextlib.closing(*open_envs("alfworld", arguments, 1, 1)) as env:
    yield env


def list_ids(data: Path, source: str, size: int) -> list[str]:
  """Return the ids of a split's first games, without the engine."""
  env = ALFWorld(size, options=Options(str(data), source))
  return [task.id for task in env.tasks("train")]


def put(data: Path, task_id: str, game: str) -> str:
  path = data / GAMES / task_id / GAME
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(game)
  return task_id


def score(env, task_id: str) -> float:
  """Return the score of the expert in a task."""
  env.reset(task_id)
  follow(env)
  return env.score()


def test_the_expert_wins_games_of_every_type(data, env):
  """Play real games if $ALFWORLD_DATA is set, else synthetic games.

  Each game is played a second time with all furniture at one location. There the expert
  has to name its target, as with a dresser and its drawers.
  """
  source = Path(os.environ.get("ALFWORLD_DATA") or data)
  count = len([*source.glob(f"{GAMES}/train/*/*/{GAME}")])
  ids = list_ids(source, "train", min(30, count))
  for task_id in ids:
    text = (source / GAMES / task_id / GAME).read_text()
    name = task_id.split("/", 1)[1]
    assert score(env, put(data, f"plain/{name}", text)) == 1.0
    game = json.loads(text)
    place = re.search(r"receptacleAtLocation \S+ ([^\s)]+)", game["pddl_problem"])[1]
    moved = re.sub(r"(AtLocation \S+ )[^\s)]+", rf"\g<1>{place}", game["pddl_problem"])
    crowded = json.dumps(game | {"pddl_problem": moved})
    assert score(env, put(data, f"crowded/{name}", crowded)) == 1.0
  assert {task_id.split("/")[1].split("-")[0] for task_id in ids} == {*TASK_TYPES}


def test_mistakes_are_repeatable_and_the_expert_recovers(env):
  for task in env.tasks("test"):
    observation = env.reset(task.id)
    for step in range(100):
      oracle = env.oracle()
      kinds = ("wrong", "wasted")
      mistakes = [env.mistake(kind, str(step)) for kind in kinds]
      assert mistakes == [env.mistake(kind, str(step)) for kind in kinds]
      assert oracle.action not in mistakes
      assert oracle.critical == (read_verb(oracle.action) not in ROUTINE_VERBS)
      commands = observation.split("AVAILABLE ACTIONS: ")[1].split(",")
      acting = {name for name in commands if read_verb(name) not in ROUTINE_VERBS}
      if oracle.critical and len(acting) > 1:
        assert mistakes[0] in acting
      observation, done = env.step((*mistakes, *[oracle.action] * 6)[step % 8])
      if done:
        break
    assert env.score() == 1.0


STOCK = """
import json, sys
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs import PddlEnv
file, actions = sys.argv[1], json.loads(sys.argv[2])
infos = textworld.EnvInfos(won=True, admissible_commands=True)
env = AlfredDemangler(PddlEnv(infos), shuffle=False)
env.load(file)
states = [env.reset()] + [env.step(action)[0] for action in actions]
commands = [",".join(sorted(s["admissible_commands"])) for s in states]
print(json.dumps([[s["feedback"], c, s["won"]] for s, c in zip(states, commands)]))
"""


def test_the_patched_engine_says_the_same_as_the_stock_engine(data, env):
  task_id = list_ids(data, "train", 2)[1]
  actions = []
  states = []
  env.reset(task_id)
  while not env.score():
    is_wasted = len(actions) % 3 == 2
    action = (
      env.mistake("wasted", str(len(actions))) if is_wasted else env.oracle().action
    )
    observation, done = env.step(action)
    actions.append(action)
    states.append([*observation.rsplit("\nAVAILABLE ACTIONS: "), done])
  arguments = [STOCK, str(data / GAMES / task_id / GAME), json.dumps(actions)]
  printed = engines.output_of("stock", [str(ENGINE.python), "-Ic", *arguments])
  assert json.loads(printed)[1:] == states


@pytest.mark.parametrize(
  "part, damage, reason",
  [
    ("You are in the middle of a room.", "{open('TRAP', 'w')}", "open.* is not a name"),
    ('list_appliances\\": [', 'nothing\\": [', "list_appliances"),
    ("(:init", "(:init (", "."),
  ],
)
def test_a_hostile_game_runs_no_code_and_ends_no_other_game(
  data, env, tmp_path, part, damage, reason
):
  """The engine evaluates texts in braces as Python; only names may be evaluated."""
  task_id = list_ids(data, "train", 1)[0]
  env.reset(task_id)
  process = env.child.process
  game = (data / GAMES / task_id / GAME).read_text()
  assert part in game
  trap = tmp_path / "trap"
  game = game.replace(part, damage.replace("TRAP", str(trap)))
  hostile = put(data, task_id.replace("train", "hostile"), game)
  with pytest.raises(EnvDied, match=f"the game .* cannot be loaded .*{reason}"):
    env.reset(hostile)
  assert not trap.exists()
  assert score(env, task_id) == 1.0
  assert env.child.process is process  # It may have other games, so it lives.
