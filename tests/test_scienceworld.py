"""Test ScienceWorld on its real engine: expert, replays, fatal mistakes and splits."""

from types import SimpleNamespace

import pytest
from tiny import follow

from baar_jax.envs.base import read_verb
from baar_jax.envs.scienceworld import adapter
from baar_jax.envs.scienceworld.adapter import (
  CRITICAL_VERBS,
  TASK_TYPES,
  Expert,
  Options,
  ScienceWorld,
)
from baar_jax.episode import SPLITS


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> Options:
  return Options(gold_dir=str(tmp_path_factory.mktemp("gold")))


@pytest.fixture(scope="module")
def env(options) -> ScienceWorld:
  return ScienceWorld(test_tasks=len(TASK_TYPES), options=options)


@pytest.fixture(scope="module")
def ids(env) -> dict[str, str]:
  """Return the id of the first test task of each type."""
  return {task.id.split("/")[0]: task.id for task in env.tasks("test")}


def test_expert_wins_a_task_of_every_type(env, ids):
  assert tuple(ids) == TASK_TYPES
  for task_id in ids.values():
    env.reset(task_id)
    follow(env)
    assert env.score() == 1.0, task_id


def play(env, task_id, beside=lambda: None) -> list:
  """Return what an episode of the expert shows, with possible mistakes at each step."""
  tape = [env.reset(task_id)]
  done = False
  while not done:
    beside()
    oracle = env.oracle()
    verb = read_verb(oracle.action)
    assert oracle.critical == (verb in CRITICAL_VERBS)
    for kind in ("wrong", "wasted"):
      mistakes = [env.mistake(kind, str(key)) for key in range(6)]
      assert oracle.action not in mistakes
      assert len({*mistakes}) > 1
      if kind == "wrong" and oracle.critical:
        assert {*map(read_verb, mistakes)} == {verb}
      tape.append(mistakes)
    observation, done = env.step(oracle.action)
    tape.append((oracle.action, observation, env.score()))
  return tape


# Mixing and growing create objects with new numbers. The engine draws at random among
# cups of a kind.
@pytest.mark.parametrize(
  "task_type", ["chemistry-mix", "identify-life-stages-2", "power-component"]
)
def test_a_replay_does_not_depend_on_what_runs_beside_it(env, ids, options, task_type):
  other = ScienceWorld(options=options)

  def disturb():
    # A load resets the engine's counter, and creates fewer objects than the game has.
    other.reset("find-non-living-thing/225")
    other.step("wait1")

  alone = play(env, ids[task_type])
  assert play(env, ids[task_type], disturb) == alone
  assert play(other, ids[task_type]) == alone


def test_reset_task_is_banned_and_a_wrong_focus_is_fatal(env, ids):
  env.reset(ids["lifespan-longest-lived-then-shortest-lived"])
  follow(env, lambda oracle: oracle.critical)
  env.step(env.oracle().action)
  state = (env.score(), env.oracle())
  assert 0 < state[0] < 1
  for action in ("reset task", " Reset  the TASK "):
    assert env.step(action) == ("That action is not allowed here.", False)
    assert (env.score(), env.oracle()) == state
  _, done = env.step("focus on ground")
  assert done
  assert env.score() == 0.0


def test_senseless_actions_are_answered(env, ids):
  env.reset(ids["find-plant"])
  for action in ("", "fly", "\ud800", "go to\nkitchen", "help", "objects", "task"):
    observation, done = env.step(action)
    assert observation
    assert not done


def list_ids(options, size: int, split: str = "test") -> list[str]:
  env = ScienceWorld(size, size, size, options=options)
  return [task.id for task in env.tasks(split)]


def test_splits_are_disjoint_and_have_as_many_tasks_as_asked(options, monkeypatch):
  # The type has few tasks, so that few solutions are made.
  monkeypatch.setattr(adapter, "TASK_TYPES", ("identify-life-stages-2",))
  ids = [task_id for split in SPLITS for task_id in list_ids(options, 2, split)]
  assert len({*ids}) == 6
  with pytest.raises(ValueError, match="9 were asked for: lower --config.env.test_t"):
    list_ids(options, 9)
  # The type has 4 test variations. Without the first 2, the others are left.
  skipping = Options(gold_dir=options.gold_dir, skip_test_variations=2)
  assert list_ids(skipping, 2) == list_ids(options, 4)[2:]


def test_lists_name_tasks_by_the_ids_of_agentgym(tmp_path, capsys):
  """Four types of 30 variations come first; the last type has 10 of all 4,639."""
  train, test = tmp_path / "train.json", tmp_path / "test.txt"
  train.write_text('[{"item_id": "sciworld_606"}, "sciworld_120", "sciworld_14"]')
  test.write_text("sciworld_4638\nsciworld_606")
  engines = Options(short_tasks=False)
  lists = Options(short_tasks=False, train_ids=str(train), test_ids=str(test))
  assert list_ids(lists, 2, "train") == ["boil/14", "use-thermometer/0"]
  # A task of both lists is a test task. The engine's dev split loses a listed task.
  assert list_ids(lists, 2) == ["use-thermometer/486", "identify-life-stages-2/9"]
  assert list_ids(engines, 1, "dev") == ["boil/14"] != list_ids(lists, 1, "dev")
  ScienceWorld.complete(lists, tmp_path)
  assert not capsys.readouterr().err
  ScienceWorld.complete(engines, tmp_path)
  assert "tasks come from the engine's splits" in capsys.readouterr().err


FOCUS, KITCHEN, OUTSIDE = "focus on pot", "go to kitchen", "go to outside"
AMBIGUOUS = (FOCUS, "Ambiguous request: Please enter the number")
CLOSED = (KITCHEN, "The door is not open.")
UNKNOWN = (FOCUS, "No known action matches that")
ASTRAY = [(KITCHEN, "You move to the kitchen."), (OUTSIDE, "You move to the outside.")]


@pytest.mark.parametrize(
  "plan, steps, expected",
  [
    # The expert answers an ambiguous request, unless the plan has the answer.
    ([FOCUS, "x"], [AMBIGUOUS], ("0", 1, True)),
    ([FOCUS, "0", "x"], [AMBIGUOUS], ("0", 1, False)),
    # The expert opens a closed door.
    ([KITCHEN], [CLOSED], ("open door to kitchen", 0, True)),
    # The expert replaces an unknown action by the most similar valid action.
    ([FOCUS], [UNKNOWN], ("focus on pot in kitchen", 0, False)),
    # The expert undoes the last deviation first.
    (["x"], ASTRAY, (KITCHEN, 0, True)),
  ],
)
def test_the_expert_repairs_failures_and_deviations(plan, steps, expected):
  valid = ["focus on pot in kitchen", "focus on sink", "open pot"]
  engine = SimpleNamespace(list_valid_actions=lambda: valid)
  expert = Expert(plan, "This room is called the hallway.", engine)
  for step in steps:
    expert.observe(*step)
  oracle = expert.oracle()
  assert (oracle.action, oracle.position, oracle.recovering) == expected
