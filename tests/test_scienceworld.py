"""Test ScienceWorld on its real engine: expert, replays, fatal mistakes and splits."""

import json
from types import SimpleNamespace

import pytest
from tiny import follow

from baar_jax.envs.scienceworld import adapter
from baar_jax.envs.scienceworld.adapter import TASK_TYPES, Options, ScienceWorld
from baar_jax.envs.scienceworld.expert import CRITICAL_VERBS, Expert
from baar_jax.episode import SPLITS


@pytest.fixture(scope="module")
def gold_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("gold")


def make(gold_dir, **sizes) -> ScienceWorld:
  return ScienceWorld(**sizes, options=Options(gold_dir=str(gold_dir)))


@pytest.fixture(scope="module")
def env(gold_dir):
  return make(gold_dir, test_tasks=len(TASK_TYPES))


@pytest.fixture(scope="module")
def tasks(env):
  """Return the first test task of each type."""
  return {task.id.split("/")[0]: task for task in env.tasks("test")}


def test_expert_wins_a_task_of_every_type(env, tasks):
  assert tuple(tasks) == TASK_TYPES
  for task in tasks.values():
    env.reset(task.id)
    follow(env)
    assert env.score() == 1.0 and task.description.startswith("Your task is to"), (
      task.id
    )


def play(env, task_id):
  """Yield the tape of the expert's episode at each step, with possible mistakes."""
  tape, done = [env.reset(task_id)], False
  while not done:
    yield tape
    oracle, kinds = env.oracle(), ("wrong", "lost", "hasty")
    mistakes = {
      kind: [env.mistake(kind, f"k{key}") for key in range(6)] for kind in kinds
    }
    for kind, actions in mistakes.items():
      assert oracle.action not in actions and len({*actions}) > 1
      if kind == "wrong" and oracle.critical:
        assert {action.split()[0] for action in actions} == {oracle.action.split()[0]}
    assert oracle.critical == (oracle.action.split()[0] in CRITICAL_VERBS)
    tape += [mistakes, (oracle.action, *env.step(oracle.action), env.score())]
    done = tape[-1][2]


def test_a_replay_does_not_depend_on_what_runs_beside_it(env, tasks, gold_dir):
  # Mixing and growing create objects with new numbers. The engine draws at random among
  # cups of a kind.
  other = make(gold_dir)
  for task_type in ("chemistry-mix", "identify-life-stages-2", "power-component"):
    task_id = tasks[task_type].id
    (*_, alone) = play(env, task_id)
    for beside in play(env, task_id):
      assert beside == alone[: len(beside)]
      # A load resets the engine's counter, and creates fewer objects than this game has.
      other.reset("find-non-living-thing/225")
      other.step("wait1")
    assert beside == alone
    (*_, elsewhere) = play(other, task_id)
    assert elsewhere == alone


def test_reset_task_is_banned_and_a_wrong_focus_is_fatal(env, tasks):
  env.reset(tasks["lifespan-longest-lived-then-shortest-lived"].id)
  follow(env, lambda oracle: oracle.critical)
  env.step(env.oracle().action)
  half, oracle = env.score(), env.oracle()
  assert 0 < half < 1
  for action in ("reset task", " Reset  the TASK "):
    assert env.step(action) == ("That action is not allowed here.", False)
    assert (env.score(), env.oracle()) == (half, oracle)
  _, done = env.step("focus on ground")
  assert (done, env.score()) == (True, 0.0)


def test_senseless_actions_are_answered(env, tasks):
  env.reset(tasks["find-plant"].id)
  for action in ("", "fly", "\ud800", "go to\nkitchen", "help", "objects", "task"):
    observation, done = env.step(action)
    assert observation and not done and env.score() == 0


def test_splits_are_disjoint_and_have_as_many_tasks_as_asked(
  gold_dir, tmp_path, monkeypatch
):
  few = (
    "identify-life-stages-2",
    "find-animal",
    "find-plant",
  )  # so that few solutions are made
  monkeypatch.setattr(adapter, "TASK_TYPES", few)
  env = make(gold_dir, train_tasks=6, dev_tasks=2, test_tasks=3)
  train, dev, test = ([task.id for task in env.tasks(split)] for split in SPLITS)
  assert (len(train), len(dev), len(test), len({*train, *dev, *test})) == (6, 2, 3, 11)
  monkeypatch.setattr(adapter, "TASK_TYPES", few[:1])
  with pytest.raises(
    ValueError, match="but 9 were asked for: lower --config.env.test_t"
  ):
    make(gold_dir, test_tasks=9).tasks("test")
  # The type has 4 test variations. Without the first 2, the others are left.
  options = Options(gold_dir=str(gold_dir), skip_test_variations=2)
  every = make(gold_dir, test_tasks=4).tasks("test")
  assert ScienceWorld(test_tasks=2, options=options).tasks("test") == every[2:]
  # Tasks with a solution of more than 32 steps are skipped.
  monkeypatch.setattr(adapter, "TASK_TYPES", few[2:])
  first, second = make(tmp_path, test_tasks=2).tasks("test")
  for steps, listed in ((32, first), (33, second)):
    gold = {"actions": ["wait1"] * steps, "description": first.description}
    (tmp_path / f"{first.id.replace('/', '-')}.json").write_text(json.dumps(gold))
    assert make(tmp_path, test_tasks=1).tasks("test") == [listed]


FOCUS, KITCHEN, OUTSIDE = "focus on pot", "go to kitchen", "go to outside"
AMBIGUOUS = (FOCUS, "Ambiguous request: Please enter the number")
ASTRAY = [(KITCHEN, "You move to the kitchen."), (OUTSIDE, "You move to the outside.")]


@pytest.mark.parametrize(
  "plan, steps, expected",
  [
    # The expert answers an ambiguous request, unless the plan has the answer.
    ([FOCUS, "x"], [AMBIGUOUS], ("0", 1, True)),
    ([FOCUS, "0", "x"], [AMBIGUOUS], ("0", 1, False)),
    # The expert opens a closed door.
    (
      [KITCHEN],
      [(KITCHEN, "The door is not open.")],
      ("open door to kitchen", 0, True),
    ),
    # The expert replaces an unknown action by the most similar valid action.
    (
      [FOCUS],
      [(FOCUS, "No known action matches that")],
      ("focus on pot in kitchen", 0, False),
    ),
    # The expert undoes the last deviation first.
    (["x"], ASTRAY, (KITCHEN, 0, True)),
  ],
)
def test_the_expert_repairs_failures_and_deviations(plan, steps, expected):
  valid = ["focus on pot in kitchen", "focus on sink", "open pot"]
  engine = SimpleNamespace(list_valid_actions=lambda: valid)
  expert = Expert(plan, "This room is called the hallway.", engine)
  for action, observation in steps:
    expert.observe(action, observation)
  oracle = expert.oracle()
  assert (oracle.action, oracle.position, oracle.recovering) == expected
