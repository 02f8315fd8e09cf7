"""ALFWorld on its real engine, on games made here: verdicts, expert, mistakes, bad data."""

import dataclasses
import json
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from baar_jax.envs import engines
from baar_jax.envs.alfworld_expert import TASK_TYPES, Expert, Facts, Goal
from baar_jax.envs.base import EnvDied
from baar_jax.envs.process import open_envs
from baar_jax.episode import SMALL
from baar_jax.llms.scripted import ALFWorldErrors, ScriptedPair
from baar_jax.rollout.live import Job
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.policies import always
from baar_jax.run import memory_mb
from baar_jax.train.rewards import difficulty

NAMES = ("gpt-4.1-mini", "gpt-4.1")
TRAIN, TEST = 66, 60  # as in configs/alfworld.py
GAME = "game.tw-pddl"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
  """The games that --stage=setup makes for configs/alfworld.py."""
  missing = [name for name in engines.ENGINES["alfworld"].programs if not shutil.which(name)]
  if missing and not engines.installed("alfworld"):
    pytest.skip(f"ALFWorld cannot be compiled here without {missing}")
  engines.install("alfworld")
  place = tmp_path_factory.mktemp("games")
  make(place, TRAIN, TEST)
  return place


def make(place: Path, train: int, test: int) -> None:
  engines.run_module("alfworld", "baar_jax.envs.alfworld_games", str(place), str(train), str(test))


@pytest.fixture
def opened(data):
  """opened(...): environments of the made games, or of others, closed at the end."""
  envs = []

  def opening(processes=1, live=1, timeout_s=120.0, **kwargs):
    wanted = {"data": str(data), "train_tasks": TRAIN, "test_tasks": TEST} | kwargs
    envs.extend(open_envs("alfworld", wanted, processes, live, timeout_s))
    return envs[-processes * live :]

  yield opening
  for env in envs:
    env.close()


def copy_of(data: Path, place: Path, count: int, kind: str = "") -> list[Path]:
  """A directory of its own with the first training games of a type; returns their files."""
  files = sorted(data.glob(f"json_2.1.1/train/{kind}*/*/{GAME}"))[:count]
  for file in files:
    target = place / "json_2.1.1" / file.relative_to(data / "json_2.1.1").parent
    shutil.copytree(file.parent, target)
  return sorted(place.glob(f"json_2.1.1/train/*/*/{GAME}"))


def follow(env, task, mistake=lambda step: None):
  """Plays the expert's actions, or a mistake's where there is one. Returns steps and the end."""
  env.reset(task.id)
  done, steps = False, 0
  while not done and steps < task.max_steps:
    _, done = env.step(mistake(steps) or env.oracle_action())
    steps += 1
  return steps, done


def test_the_expert_wins_the_games(data, opened):
  """Those of $ALFWORLD_DATA where it is set, else a third of the made ones."""
  real = os.environ.get("ALFWORLD_DATA")
  files = list(Path(real).glob(f"json_2.1.1/train/*/*/{GAME}")) if real else []
  where = {"data": real, "train_tasks": min(120, len(files))} if files else {"train_tasks": 24}
  envs = opened(processes=2, **where)
  tasks = envs[0].tasks("train")

  def play(env, part):
    return [(task.id, *follow(env, task), env.score()) for task in part]

  with ThreadPoolExecutor(2) as pool:
    played = sum(pool.map(play, envs, (tasks[::2], tasks[1::2])), [])
  lost = [row for row in played if row[2:] != (True, 1.0)]
  assert len(lost) <= 0.01 * len(tasks), lost
  assert {task.id.split("/")[1].split("-")[0] for task in tasks} == set(TASK_TYPES)


def test_observations_are_as_agentgym_gives_them(opened):
  (env,) = opened()
  task = env.tasks("test")[0]
  first = env.reset(task.id)
  room, goal, actions = first.split("\n")
  assert room.startswith("You are in the middle of a room.")
  assert goal == f"Your task is to: {task.description}"
  listed = actions.removeprefix("AVAILABLE ACTIONS: ").split(",")
  assert {"look", "inventory"} < set(listed)
  assert listed == sorted(listed)
  assert env.oracle_action() in listed
  observation, done = env.step("do something useful")
  assert observation.startswith("Nothing happens.\nAVAILABLE ACTIONS: ")
  assert (done, env.score()) == (False, 0.0)
  going = next(action for action in listed if action.startswith("go to"))
  observation, _ = env.step(going)
  assert going.removeprefix("go to ") in observation.split("\n")[0]
  assert env.reset(task.id) == first


def test_expert_recovers_from_what_went_wrong(opened):
  """A third of all actions are mistakes; they cost steps, and the game is won all the same."""
  envs = opened(live=1)
  tasks = envs[0].tasks("test")[:24]
  won, steps = 0, 0
  for task in tasks:
    draw = random.Random(task.id)

    def mistake(step, env=envs[0], draw=draw, task=task):
      kind = draw.choice(("wrong", "lost", "hasty"))
      return env.mistake(kind, f"{task.id}{step}") if draw.random() < 0.33 else None

    taken, done = follow(envs[0], task, mistake)
    won, steps = won + done, steps + taken
  assert won >= 23
  assert steps > 7 * len(tasks)  # 6 without mistakes


def test_mistakes_are_repeatable_and_never_the_expert_s(opened):
  (env,) = opened()
  env.reset(env.tasks("train")[2].id)  # clean, and put
  seen = set()
  done = False
  while not done:
    oracle = env.oracle()
    made = {kind: [env.mistake(kind, str(i)) for i in range(12)] for kind in ("wrong", "lost")}
    assert made["wrong"] == [env.mistake("wrong", str(i)) for i in range(12)]
    assert oracle.action not in made["wrong"] + made["lost"]
    assert oracle.critical == (oracle.action.split()[0] in ("take", "clean", "move"))
    if oracle.critical:
      seen.add(oracle.position)
      assert {a.split()[0] for a in made["wrong"]}.isdisjoint({"go", "look", "inventory"})
    _, done = env.step(oracle.action)
  assert seen == {0, 1, 2}
  with pytest.raises(ValueError, match="silly"):
    env.mistake("silly", "k")


def test_the_older_grammar_has_words_of_its_own(data, opened, tmp_path):
  (file,) = copy_of(data, tmp_path, 1, "pick_and_place")
  game = json.loads(file.read_text())
  assert '"move {o} to {r}"' in game["grammar"]
  game["grammar"] = game["grammar"].replace('"move {o} to {r}"', '"put {o} in/on {r}"')
  file.write_text(json.dumps(game))
  (env,) = opened(data=str(tmp_path), train_tasks=1)
  (task,) = env.tasks("train")
  assert "move OBJECT to RECEPTACLE" in env.system_prompt
  env.reset(task.id)
  assert "put OBJECT in/on RECEPTACLE" in env.system_prompt
  assert "move" not in env.system_prompt
  actions = []
  while not env.score():
    actions.append(env.oracle_action())
    env.step(actions[-1])
  assert any(action.startswith("put ") and " in/on " in action for action in actions)


STOCK = """
import json, sys
from pathlib import Path
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs import PddlEnv
file, actions = sys.argv[1], json.loads(sys.argv[2])
wanted = textworld.EnvInfos(won=True, admissible_commands=True)
env = AlfredDemangler(PddlEnv(wanted), shuffle=False)
env.load(file)
states = [env.reset()] + [env.step(action)[0] for action in actions]
print(json.dumps([[s["feedback"], sorted(s["admissible_commands"]), s["won"]] for s in states]))
"""


def test_what_makes_it_fast_changes_nothing(data, opened):
  """The same game on the engine as it comes."""
  (env,) = opened()
  task = env.tasks("train")[1]
  env.reset(task.id)
  actions, states = [], []
  for step in range(14):
    actions.append(env.mistake("lost", str(step)) if step % 3 == 2 else env.oracle_action())
    observation, done = env.step(actions[-1])
    states.append([*observation.rsplit("\nAVAILABLE ACTIONS: "), done])
    if done:
      break
  python = engines.directory("alfworld") / "bin" / "python"
  file = data / "json_2.1.1" / task.id / GAME
  stock = json.loads(
    engines.output_of("stock", [str(python), "-I", "-c", STOCK, str(file), json.dumps(actions)])
  )
  assert [[text, ",".join(commands), won] for text, commands, won in stock[1:]] == states
  assert done


def test_games_are_the_same_every_time_and_more_can_be_made(data, tmp_path):
  make(tmp_path, 2, 1)
  files = {path.relative_to(tmp_path) for path in tmp_path.rglob(GAME)}
  assert len(files) == 3
  next(iter(tmp_path.rglob(GAME))).unlink()  # it is made again
  make(tmp_path, 4, 1)
  more = {path.relative_to(tmp_path) for path in tmp_path.rglob(GAME)}
  assert files < more
  assert len(more) == 5
  for path in more:
    assert (tmp_path / path).read_bytes() == (data / path).read_bytes()
    game = json.loads((data / path).read_text())
    assert game["walkthrough"][-1].split()[0] in ("move", "use")


def test_damaged_games_are_left_out_and_counted(data, opened, tmp_path, capfd):
  files = copy_of(data, tmp_path, 4)
  files[0].write_text("{")
  unsolved = json.loads(files[2].read_text()) | {"solvable": False}
  files[2].write_text(json.dumps(unsolved))
  (env,) = opened(data=str(tmp_path), train_tasks=2)
  assert {task.id for task in env.tasks("train")} == {
    file.parent.relative_to(tmp_path / "json_2.1.1").as_posix() for file in (files[1], files[3])
  }
  (env,) = opened(data=str(tmp_path), train_tasks=3)
  with pytest.raises(ValueError, match="has 2 games, 3 were asked for.*--config.env.train_tasks"):
    env.tasks("train")
  assert "left out 2 of 4 games" in capfd.readouterr().err


def test_splits_by_directory_and_by_list(data, opened, tmp_path):
  files = copy_of(data, tmp_path, 3)
  ids = [file.parent.relative_to(tmp_path / "json_2.1.1").as_posix() for file in files]
  plain, mapped = tmp_path / "list.txt", tmp_path / "mappings.json"
  plain.write_text("\n".join([*ids[:2], "train/pick_and_place_simple-Mug-None-Desk-1/trial_T"]))
  mapped.write_text(
    json.dumps([dict(zip(("task_type", "task_id"), i.split("/")[1:])) for i in ids[1:]])
  )
  sizes = {"train_tasks": 2, "test_tasks": 2, "data": str(tmp_path)}
  (env,) = opened(**sizes, train_split=str(plain), test_split=str(mapped))
  assert {task.id for task in env.tasks("train")} == set(ids[:2])
  assert {task.id for task in env.tasks("test")} == set(ids[1:])
  mapped.write_text("[1]")
  with pytest.raises(ValueError, match="mappings.json is no list of objects"):
    env.tasks("test")
  (tmp_path / "json_2.1.1" / "empty").mkdir()
  plain.write_text("train/nothing/here")
  for split, said in (
    ("empty", "has no games"),
    ("nowhere", "neither a directory .*has: empty, train.*--config.env.data=own"),
    (str(plain), "no game that .*list.txt lists is in"),
  ):
    (env,) = opened(**sizes, train_split=split)
    with pytest.raises(ValueError, match=said):
      env.tasks("train")
  with pytest.raises(ValueError, match="unknown split 'dev'"):
    env.tasks("dev")
  for task_id in ("train/none/here", "../x", ids[0].replace("train/", "")):
    with pytest.raises(ValueError, match="expected SPLIT/NAME/TRIAL"):
      env.reset(task_id)


def test_no_data_names_what_mends_it(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match="nowhere, named by --config.env.data, is not a directory"):
    engines.data_of("alfworld", str(tmp_path / "nowhere"))
  monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "gone"))
  with pytest.raises(ValueError, match=r"gone, named by \$ALFWORLD_DATA, is not a directory"):
    engines.data_of("alfworld", "")
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path))
  with pytest.raises(ValueError, match="no tasks yet; run: python main.py --stage=setup"):
    engines.data_of("alfworld", "own")


def test_a_game_that_cannot_be_played_costs_its_own_episode_alone(data, opened, tmp_path):
  files = copy_of(data, tmp_path, 4)
  game = json.loads(files[1].read_text())
  files[1].write_text(json.dumps(game | {"pddl_problem": game["pddl_problem"][:900]}))
  envs = opened(data=str(tmp_path), train_tasks=4, live=4)
  pid = envs[0].pid
  jobs = [Job(task, seed) for task in envs[0].tasks("train") for seed in range(2)]
  pair = ScriptedPair(NAMES, ALFWorldErrors())
  ended = list(run_episodes(jobs, always(1, "large"), pair, envs))
  bad = files[1].parent.relative_to(tmp_path / "json_2.1.1").as_posix()
  assert {e.task_id for e in ended if e.stop.startswith("error:")} == {bad}
  assert "cannot be played" in next(e.stop for e in ended if e.task_id == bad)
  assert len(ended) == 8 and envs[0].pid == pid


def test_foreign_directories_are_left_out(data, opened, tmp_path, capfd):
  (file,) = copy_of(data, tmp_path, 1)
  shutil.copytree(file.parent, tmp_path / "json_2.1.1" / "train" / "notes" / "trial_x")
  (env,) = opened(data=str(tmp_path), train_tasks=1)
  assert len(env.tasks("train")) == 1
  assert "left out 1 of 2 games: 'notes' does not name an ALFWorld game" in capfd.readouterr().err
  (env,) = opened(data=str(tmp_path), train_tasks=1, train_split=str(data))
  with pytest.raises(ValueError, match="neither a directory in"):
    env.tasks("train")


def test_an_engine_that_is_not_as_pinned_is_refused(data, opened, monkeypatch):
  engine = engines.ENGINES["alfworld"]
  python = engines.directory("alfworld") / "bin" / "python"
  code = "from baar_jax.envs import engines as e; e.ENGINES['alfworld'] = e.ENGINES['appworld']; "
  code = f"import sys; sys.path.append({engines.ROOT!r}); {code} e.check_version('alfworld')"
  with pytest.raises(ValueError, match="is needed, 0.4.2 is installed: delete .* and run: "):
    engines.output_of("it", [str(python), "-I", "-c", code])
  changed = dataclasses.replace(engine, packages=(engine.packages[0], "textworld==0"))
  monkeypatch.setitem(engines.ENGINES, "alfworld", changed)
  with pytest.raises(ValueError, match="ALFWorld is not installed; run: .*--stage=setup"):
    opened()


def test_a_killed_child_costs_one_more_try(opened):
  envs = opened(live=2)
  tasks = envs[0].tasks("train")[:2]
  killed = []

  class Killing(ScriptedPair):
    def start(self, env, task, seed, purse):
      agents = super().start(env, task, seed, purse)
      if not killed:
        killed.append(env.pid)
        os.kill(env.pid, signal.SIGKILL)
      return agents

  pair = Killing(NAMES, ALFWorldErrors())
  ended = list(run_episodes([Job(t, 0) for t in tasks], always(1, "large"), pair, envs))
  again = list(
    run_episodes(
      [Job(t, 0) for t in tasks], always(1, "large"), ScriptedPair(NAMES, ALFWorldErrors()), envs
    )
  )
  assert len(killed) == 1
  outcomes = [
    sorted((e.task_id, e.score, e.stop, len(e.steps)) for e in es) for es in (ended, again)
  ]
  assert outcomes[0] == outcomes[1]
  assert {e.stop for e in ended} <= {"done", "max_steps"}


def test_a_call_that_takes_too_long_ends_its_child(opened):
  (env,) = opened(timeout_s=4.0)
  task = env.tasks("train")[0]
  first, hung = env.reset(task.id), env.pid
  os.kill(hung, signal.SIGSTOP)
  with pytest.raises(EnvDied, match="no answer within 4 s"):
    env.step("look")
  assert env.reset(task.id) == first
  assert env.pid != hung


def test_the_pair_s_ends_lie_where_the_paper_s_do(opened):
  """always-SMALL 40.0 and always-LARGE 63.5 of 100, on all made games."""
  envs = opened(processes=2, live=4)
  tasks = envs[0].tasks("train") + envs[1].tasks("test")
  pair = ScriptedPair(NAMES, ALFWorldErrors())
  jobs = [Job(task, 0) for task in tasks]
  ends = {
    model: list(run_episodes(jobs, always(model, str(model)), pair, envs)) for model in (SMALL, 1)
  }
  rate = {model: 100 * np.mean([e.score for e in ended]) for model, ended in ends.items()}
  assert len(tasks) == 126
  assert abs(rate[SMALL] - 40.0) <= 5
  assert abs(rate[1] - 63.5) <= 5
  assert {e.stop for ended in ends.values() for e in ended} == {"done", "max_steps"}
  assert all(len(e.steps) == 30 for ended in ends.values() for e in ended if e.score < 1)
  by_task = {
    task.id: [[e.score for e in ended if e.task_id == task.id] for ended in ends.values()]
    for task in tasks
  }
  labels = [difficulty(*both) for both in by_task.values()]
  for label in ("easy", "hard", "intractable"):
    assert labels.count(label) > 0.15 * len(tasks), label
  assert memory_mb(envs) / len(envs) < 150


class Named:
  """A proposition as the engine has it."""

  def __init__(self, name, *arguments):
    self.name, self.arguments = name, [type("Argument", (), {"name": a}) for a in arguments]


IN_FRIDGE = Named("inreceptacle", "mug 1", "fridge 1")
KITCHEN = [
  Named("atlocation", "agent1", "loc 1"),
  Named("receptacleatlocation", "fridge 1", "loc 1"),
  Named("receptacleatlocation", "desk 1", "loc 2"),
  Named("receptacletype", "fridge 1", "fridgetype"),
  Named("receptacletype", "desk 1", "desktype"),
  Named("openable", "fridge 1"),
  Named("objecttype", "mug 1", "mugtype"),
  Named("cancontain", "desktype", "mugtype"),
]


@pytest.mark.parametrize(
  "more, action",
  [
    ([Named("inreceptacle", "mug 1", "fridge 1")], "open fridge 1"),
    (
      [Named("inreceptacle", "mug 1", "fridge 1"), Named("opened", "fridge 1")],
      "take mug 1 from fridge 1",
    ),
    ([Named("inreceptacle", "mug 1", "desk 1")], "go to desk 1"),
    ([Named("holds", "agent1", "mug 1")], "cool mug 1 with fridge 1"),
    ([Named("holds", "agent1", "mug 1"), Named("iscool", "mug 1")], "go to desk 1"),
  ],
)
def test_the_expert_s_next_action(more, action):
  expert = Expert(Goal.of("pick_cool_then_place_in_recep-Mug-None-Desk-3"))
  assert expert.oracle(Facts(KITCHEN + more), []).action == action


@pytest.mark.parametrize("name", ["pick_up-Mug-None-Desk-1", "pick_and_place_simple-Mug"])
def test_names_that_are_no_games(name):
  with pytest.raises(ValueError, match="does not name an ALFWorld game"):
    Goal.of(name)
