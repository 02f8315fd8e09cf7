"""Test ALFWorld on its real engine with synthetic games, and with damaged data."""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from tiny import follow

from baar_jax.envs import engines
from baar_jax.envs.alfworld.adapter import GAME, GAMES, ALFWorld, Options
from baar_jax.envs.alfworld.expert import TASK_TYPES
from baar_jax.envs.base import EnvDied
from baar_jax.envs.process import open_envs
from tools.make_tasks import make_tasks

ACTING = (
  "take",
  "move",
  "clean",
  "heat",
  "cool",
  "use",
  "slice",
)  # all other verbs waste a step
ENGINE = ALFWorld.engine
TRAIN = TEST = 6  # one game of each type


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
  """Generate games as --stage=setup does."""
  if not shutil.which("g++") and not ENGINE.is_installed():
    pytest.skip("ALFWorld cannot be compiled here")
  ENGINE.install()
  place = tmp_path_factory.mktemp("games")
  make_tasks(ENGINE, place, (TRAIN, 1, TEST))
  return place


@pytest.fixture(scope="module")
def env(data):
  arguments = {
    "train_tasks": TRAIN,
    "dev_tasks": 1,
    "test_tasks": TEST,
    "max_steps": 30,
    "options": {"data": str(data)},
  }
  with contextlib.closing(*open_envs("alfworld", arguments, 1, 1)) as env:
    yield env


def listing(data: Path, source: str, size: int) -> list[str]:
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
  ids = listing(
    source, "train", min(30, len(list(source.glob(f"{GAMES}/train/*/*/{GAME}"))))
  )
  for task_id in ids:
    game, name = (
      json.loads((source / GAMES / task_id / GAME).read_text()),
      task_id.split("/", 1)[1],
    )
    place = re.search(r"receptacleAtLocation \S+ ([^\s)]+)", game["pddl_problem"])[1]
    moved = re.sub(r"(AtLocation \S+ )[^\s)]+", rf"\g<1>{place}", game["pddl_problem"])
    assert score(env, put(data, f"plain/{name}", json.dumps(game))) == 1.0
    crowded = json.dumps(game | {"pddl_problem": moved})
    assert score(env, put(data, f"crowded/{name}", crowded)) == 1.0
  assert {task_id.split("/")[1].split("-")[0] for task_id in ids} == set(TASK_TYPES)


def test_mistakes_are_repeatable_and_the_expert_recovers(env):
  draw, steps = random.Random(0), 0
  pairs = [(kind, str(key)) for kind in ("wrong", "lost", "hasty") for key in range(8)]
  for task in env.tasks("test"):
    observation, done = env.reset(task.id), False
    while not done:
      oracle = env.oracle()
      mistakes, again = ([env.mistake(*pair) for pair in pairs] for _ in range(2))
      assert mistakes == again and oracle.action not in mistakes
      routine = oracle.action.split()[0] in ("go", "open", "close", "look", "inventory")
      assert oracle.critical != routine
      if oracle.critical:
        listed = {*observation.split("AVAILABLE ACTIONS: ")[1].split(",")} - {
          oracle.action
        }
        acting = {action for action in listed if action.split()[0] in ACTING}
        assert not acting or {*mistakes[:8]} <= acting
      observation, done = env.step(
        draw.choice(mistakes) if draw.random() < 0.33 else oracle.action
      )
      steps += 1
      assert steps < 30 * TEST
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
  task_id, actions, states, done = listing(data, "train", 2)[1], [], [], False
  env.reset(task_id)
  while not done:
    lost = len(actions) % 3 == 2
    actions.append(
      env.mistake("lost", str(len(actions))) if lost else env.oracle().action
    )
    observation, done = env.step(actions[-1])
    states.append([*observation.rsplit("\nAVAILABLE ACTIONS: "), done])
  arguments = [STOCK, str(data / GAMES / task_id / GAME), json.dumps(actions)]
  printed = engines.output_of("stock", [str(ENGINE.python), "-Ic", *arguments])
  assert json.loads(printed)[1:] == states


def test_games_are_always_the_same_and_missing_ones_are_made(data, tmp_path):
  ids, read = listing(data, "train", TRAIN), Path.read_text
  put(tmp_path, ids[0], "kept")
  make_tasks(ENGINE, tmp_path, (TRAIN + 1, 0, 0))
  assert len(list(tmp_path.rglob(GAME))) == TRAIN + 1
  games, again = (
    [read(place / GAMES / i / GAME) for i in ids] for place in (data, tmp_path)
  )
  assert again == ["kept", *games[1:]]
  digests = [hashlib.sha256(game.encode()).hexdigest()[:16] for game in games]
  assert "b1ba9f4ab4b1f7f0" in digests


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("nowhere", b"", "nowhere in .* 0 tasks.*lower --config.env.train_tasks"),
    (GAME, b"[" * 100_000, "is missing, damaged or older"),
    (
      GAME,
      b'{"solvable": true, "grammar": "put {o} in/on {r}"}',
      "is missing, damaged or older",
    ),
    (GAME, None, "is missing, damaged or older"),  # a pipe, which would never end
  ],
)
def test_unreadable_data_end_in_a_message_of_one_line(tmp_path, name, content, message):
  place = (
    tmp_path / GAMES / "train" / "pick_and_place_simple-Mug-None-Desk-1" / "trial_A"
  )
  place.mkdir(parents=True)
  if content is None:
    os.mkfifo(place / GAME)
  elif content:
    (place if name == GAME else tmp_path).joinpath(name).write_bytes(content)
  with pytest.raises(ValueError, match=message) as error:
    listing(tmp_path, "train" if name == GAME else name, 1)
  assert "\n" not in str(error.value)


def test_a_hostile_game_runs_no_code_and_ends_no_other_game(data, env, tmp_path):
  """The engine evaluates texts in braces as Python; only names may be evaluated."""
  played, pid, trap = (
    listing(data, "train", 1)[0],
    env.child.process.pid,
    tmp_path / "trap",
  )
  game = (data / GAMES / played / GAME).read_text()
  for part, damage, reason in (
    (
      "You are in the middle of a room.",
      f"{{open('{trap}', 'w')}}",
      "open.* is not a name",
    ),
    ('list_appliances\\": [', 'nothing\\": [', "list_appliances"),
    ("(:init", "(:init (", "."),
  ):
    assert part in game
    hostile = put(data, played.replace("train", "hostile"), game.replace(part, damage))
    with pytest.raises(
      EnvDied, match=f"the game .* cannot be loaded .*{reason}"
    ) as error:
      env.reset(hostile)
    assert "\n" not in str(error.value) and not trap.exists()
    assert score(env, played) == 1.0
  assert env.child.process.pid == pid  # The process, which may have other games, lives.
