"""AppWorld on its real engine, with tasks of our own: gold passes, everything else does not."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from baar_jax.config import Config, EnvConfig
from baar_jax.envs import appworld_root, appworld_tasks, engines
from baar_jax.envs.appworld import OUTPUT_CHARS, AppWorld
from baar_jax.envs.appworld_expert import MAX_PLAN, Expert, make_plan
from baar_jax.envs.base import EnvDied
from baar_jax.envs.process import open_envs
from baar_jax.episode import SMALL
from baar_jax.llms.scripted import LARGE, AppWorldErrors, ScriptedPair
from baar_jax.rollout.live import Job
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.policies import always
from baar_jax.run import memory_mb
from baar_jax.stages import setup
from baar_jax.train.rewards import difficulty

ROOT = Path(__file__).parents[1]
NAMES = ("gpt-4.1-mini", "gpt-4.1")
SCENARIOS = len(appworld_tasks.scenarios())
SIZES = {"train_tasks": SCENARIOS, "test_tasks": 8}
MAKER = "baar_jax.envs.appworld_tasks"
PAY = "d1a0000_1"  # chores.pay_friend


@pytest.fixture(scope="session")
def data(tmp_path_factory):
  """AppWorld's engine, installed where it is not, and tasks of our own."""
  engines.install("appworld")
  place = tmp_path_factory.mktemp("appworld") / "own"
  engines.run_module("appworld", MAKER, str(place), str(SCENARIOS), "8")
  return place


@pytest.fixture(scope="module")
def pair_of_envs(data):
  """Two processes, which start their worlds once for all tests."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("OPENAI_API_KEY", "sk-secret")
    envs = open_envs("appworld", {"data": str(data), "code_s": 3} | SIZES, 2, 1)
  yield envs
  for env in envs:
    env.close()


@pytest.fixture
def env(pair_of_envs):
  return pair_of_envs[0]


def follow(env, task_id, until=lambda oracle: False):
  """The expert's episode as a tape, to the end or to a step."""
  tape, done = [env.reset(task_id)], False
  while not done and not until(env.oracle()):
    action = env.oracle_action()
    observation, done = env.step(action)
    tape.append((action, observation))
  return tape


def writes(oracle):
  return "create_transaction" in oracle.action


def gone(pids):
  """Whether all processes end; they are given time, for a kill takes effect when it does."""
  for _ in range(600):
    if not any(Path(f"/proc/{pid}").exists() and state(pid) not in "XZ" for pid in pids):
      return True
    time.sleep(0.05)
  return False


def state(pid):
  try:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
  except OSError:
    return "X"


def test_gold_passes_and_nothing_else_does_in_every_scenario(pair_of_envs):
  tasks = pair_of_envs[0].tasks("train")
  assert len({task.id.split("_")[0] for task in tasks}) == len(tasks) == SCENARIOS >= 12

  def play(env, task):
    env.reset(task.id)
    scores, plan = [env.score()], []  # before anything is done
    for wrong in ("apis.supervisor.complete_task()", "apis.supervisor.complete_task(answer=-1)"):
      env.reset(task.id)
      assert env.step(wrong)[1]
      scores.append(env.score())
    env.reset(task.id)
    done = False
    while not done:
      oracle = env.oracle()
      assert oracle.position == len(plan) < MAX_PLAN
      plan.append(oracle.action)
      observation, done = env.step(oracle.action)
      assert observation and "Execution failed" not in observation
    return scores + [env.score(), len(plan)]

  with ThreadPoolExecutor(2) as threads:
    halves = [threads.submit(lambda e, ts: [play(e, t) for t in ts], env, tasks[i::2])
              for i, env in enumerate(pair_of_envs)]  # fmt: skip
    played = [row for half in halves for row in half.result()]
  assert [row[:4] for row in played] == [[0.0, 0.0, 0.0, 1.0]] * SCENARIOS
  assert min(row[4] for row in played) >= 5
  assert memory_mb(pair_of_envs) / 2 < 350


def test_first_observation_and_conversation(env):
  observation = env.reset(PAY)
  assert observation.startswith("Your supervisor is ")
  assert "@example.com" in observation and "2024-05-16" in observation
  assert "- venmo: " in observation
  assert env.code_actions
  assert "show_api_doc" in env.system_prompt and "```python" in env.system_prompt


def test_two_environments_stay_apart(pair_of_envs):
  here, there = pair_of_envs
  alone = follow(here, PAY)
  follow(here, PAY, until=writes)
  follow(there, PAY, until=writes)
  there.step(there.oracle_action())
  balance = "print(apis.venmo.show_venmo_balance(access_token=venmo))"
  assert here.step(balance) != there.step(balance)
  assert (here.score(), there.score()) == (0.0, 0.0)  # neither has said that it is done
  assert follow(there, PAY) == alone == follow(here, PAY)


def test_agents_code_is_answered_whatever_it_is(env):
  env.reset(PAY)
  for code, wanted in (
    ("x = (", "Syntax error"),
    ("print(1/0)", "ZeroDivisionError"),
    ("while True: pass", "timed out after 3 seconds"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("raise BaseException('odd')", "odd"),
    ("print('\\ud800')", "surrogates not allowed"),
    ("x = [0] * 10**10", "MemoryError"),
    ("import subprocess", "not allowed"),
    ("-" * 100_000 + "1", "cannot be parsed"),
    ("print('\0')", "null bytes"),
    ("\ud800", "Syntax error"),
    ("", "No code"),
    ("print('fine')", "fine"),
  ):
    observation, done = env.step(code)
    assert wanted in observation and not done
  assert env.step("y = 41")[0]
  assert env.step("print(y + 1)") == ("42", False)


def test_long_output_is_cut_and_says_so(env):
  env.reset(PAY)
  observation, _ = env.step(f"print('y' * {OUTPUT_CHARS + 123})")
  assert observation == "y" * OUTPUT_CHARS + "\n[123 more characters were cut]"


def test_agents_code_sees_no_keys(env):
  env.reset(PAY)
  observation, _ = env.step("import os\nprint(sorted(os.environ))")
  assert "HOME" in observation and "OPENAI_API_KEY" not in observation


def test_step_cap_and_the_scripted_pair_through_the_loop(env, pair_of_envs):
  class Lost(AppWorldErrors):
    UNKNOWN = (1.0, 1.0)
    HARDNESS = {"easy": 99, "hard": 99, "intractable": 99}
    DECISIVE_SHARE, LOST, TOLD = 0.0, 0.0, ()

  task = next(task for task in env.tasks("train") if task.id == PAY)
  pair = ScriptedPair(NAMES, Lost())
  (episode,) = run_episodes([Job(task, 0)], always(SMALL, "s"), pair, pair_of_envs[:1])
  assert (episode.stop, len(episode.steps), episode.score) == ("max_steps", 40, 0.0)
  assert any("api_docs" in step.action for step in episode.steps)


def test_mistakes_are_repeatable_of_their_kind_and_never_the_expert_s(env):
  keys = [f"k{number}" for number in range(12)]
  seen = set()
  follow(env, "d3a0001_1", until=lambda oracle: mistakes_here(env, oracle, keys, seen))
  assert {"login(", "page_index=0"} <= seen
  follow(env, PAY, until=lambda oracle: mistakes_here(env, oracle, keys, seen) and False)
  assert "amount=" in seen
  with pytest.raises(ValueError, match="silly"):
    env.mistake("silly", "k")


def mistakes_here(env, oracle, keys, seen):
  for kind in ("wrong", "lost", "hasty"):
    made = [env.mistake(kind, key) for key in keys]
    assert made == [env.mistake(kind, key) for key in keys]
    assert oracle.action not in made
    for action in made:
      ast.parse(action)
      assert kind != "lost" or "api_docs" in action
      assert kind != "hasty" or "show_account()" in action or "login(user=" in action
      if kind == "wrong" and oracle.critical:
        assert "api_docs" not in action
        seen |= {part for part in ("login(", "page_index=0", "amount=") if part in action}
  return False


def test_what_mistakes_come_to(env):
  """A wrong login and a first page can be put right; a wrong write or answer is the end."""
  follow(env, "d3a0001_1", until=lambda oracle: "login(" in oracle.action)
  before = env.oracle()
  for kind in ("wrong", "lost", "hasty"):
    observation, done = env.step(env.mistake(kind, "k"))
    assert (done, env.oracle()) == (False, before)
    assert ("Execution failed" in observation) == (kind != "lost")
    assert (len(observation) > 500) == (kind == "lost")
  while "page_index" not in env.oracle_action():
    env.step(env.oracle_action())
  assert not env.step(env.mistake("wrong", "k"))[1]
  done = False
  while not done:
    _, done = env.step(env.oracle_action())
  assert env.score() == 1.0
  follow(env, PAY, until=writes)
  changed = next(m for m in (env.mistake("wrong", str(k)) for k in range(99)) if "amount" in m)
  early = next(m for m in (env.mistake("wrong", str(k)) for k in range(99)) if "complete" in m)
  assert not env.step(changed)[1]
  for _ in range(2):
    _, done = env.step(env.oracle_action())
  assert (done, env.score()) == (True, 0.0)
  follow(env, PAY, until=writes)
  assert env.step(early)[1]
  assert env.score() == 0.0


def test_killed_child_is_noticed_and_replaced(env):
  env.reset(PAY)
  dead = env.pid
  os.kill(dead, signal.SIGKILL)
  with pytest.raises(EnvDied):
    env.step("print(1)")
  assert gone({dead})
  follow(env, PAY)
  assert env.score() == 1.0
  assert env.pid != dead


def test_killed_parent_ends_a_child_amid_endless_code(data, tmp_path, monkeypatch):
  parent = f"""
import threading
from baar_jax.envs.process import open_envs
(env,) = open_envs("appworld", {{"data": {str(data)!r}, "train_tasks": 1, "test_tasks": 1}}, 1, 1)
env.reset({PAY!r})
threading.Thread(target=env.step, args=("while True: pass",), daemon=True).start()
print(env.pid, flush=True)
threading.Event().wait()
"""
  environ = os.environ | {"TMPDIR": str(tmp_path)}
  process = subprocess.Popen(
    [sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, env=environ
  )
  child = int(process.stdout.readline())
  time.sleep(1)  # the code is under way
  process.kill()
  process.communicate()
  assert gone({child})
  # What it has left behind, the next one removes.
  (left,) = tmp_path.glob(f"{appworld_root.ROOT_NAME}*")
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  for _ in range(100):
    root, lock = appworld_root.make_root(data / "data")
    if not left.exists():  # a killed process has its files open for a moment
      break
    lock.close()
    time.sleep(0.05)
  assert list(tmp_path.iterdir()) == [root]
  again, other = appworld_root.make_root(data / "data")
  assert root.exists() and again.exists()  # it is in use
  lock.close()
  other.close()


@pytest.fixture
def installed(monkeypatch):
  """As in the engine's Python, for what needs no engine."""
  version = engines.ENGINES["appworld"].version
  monkeypatch.setattr("importlib.metadata.version", lambda name: version)


def make_dataset(place, name, task_ids):
  for number, task_id in enumerate(task_ids):
    truth = place / "data" / "tasks" / task_id / "ground_truth"
    truth.mkdir(parents=True)
    (truth.parent / "specs.json").write_text(json.dumps({"instruction": f"Do {number}."}))
    (truth / "metadata.json").write_text(json.dumps({"difficulty": int(task_id[1])}))
  (place / "data" / "datasets").mkdir(parents=True, exist_ok=True)
  (place / "data" / "datasets" / f"{name}.txt").write_text("\n".join(task_ids) + "\n")


def test_tasks_are_spread_over_levels_and_scenarios(installed, tmp_path):
  ids = ["x1a_1", "x1a_2", "x1b_1", "x1b_2", "x2a_1", "x2a_2", "x3a_1", "x3a_2"]
  make_dataset(tmp_path, "train", ids)
  wanted = ["x1a_1", "x2a_1", "x3a_1", "x1b_1", "x1a_2", "x2a_2", "x3a_2", "x1b_2"]
  for count in (3, 6, 8):
    tasks = AppWorld(tmp_path, train_tasks=count, test_tasks=1, max_steps=7).tasks("train")
    assert [task.id for task in tasks] == wanted[:count]
  assert (tasks[0].description, tasks[0].split, tasks[0].max_steps) == ("Do 0.", "train", 7)


def test_bad_inputs_are_one_line(installed, monkeypatch, tmp_path):
  good = tmp_path / "good"
  make_dataset(good, "train", ["x1a_1"])
  (good / "data" / "datasets" / "empty.txt").write_text("\n")

  def refused(match, work):
    with pytest.raises(ValueError, match=match) as error:
      work()
    assert "\n" not in str(error.value)

  def env_of(place=good, train_tasks=1, **splits):
    return AppWorld(place, train_tasks, 1, **splits)

  refused("2 were asked for", lambda: env_of(train_tasks=2).tasks("train"))
  refused("has 0 tasks", lambda: env_of(train_split="empty").tasks("train"))
  refused("no dataset 'challenge'", lambda: env_of(test_split="challenge").tasks("test"))
  refused("unknown split 'valid'", lambda: env_of().tasks("valid"))
  refused("'x9_9' is no AppWorld task", lambda: env_of().reset("x9_9"))
  refused("'../x' is no AppWorld task", lambda: env_of().reset("../x"))
  refused("datasets is missing", lambda: env_of(tmp_path))
  refused("contains 'memory': move it, or set BAAR_JAX", lambda: env_of(tmp_path / "memory-1"))
  monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.2")
  refused(r"AppWorld 0\.1\.3\.post1 is needed, 0\.1\.2 is .*delete .* --stage=setup", env_of)
  with pytest.raises(ValueError, match="'memory'"):
    appworld_tasks.main(str(tmp_path / "memory"), "1", "1")


def test_bad_inputs_reach_the_parent(env):
  with pytest.raises(ValueError, match="no AppWorld task"):
    env.reset("nowhere_1")
  assert env.reset(PAY)


def test_a_task_without_solution_says_which_have_one(data, env):
  solution = data / "data" / "tasks" / PAY / "ground_truth" / "compiled_solution.py"
  hidden = solution.rename(solution.with_suffix(".hidden"))
  try:
    assert env.reset(PAY)
    with pytest.raises(NotImplementedError, match=r"\(train\) has no solution.* train and dev"):
      env.oracle()
    assert env.step("print(7)") == ("7", False)
    assert env.score() == 0.0
  finally:
    hidden.rename(solution)


def test_making_tasks_is_incremental_and_repeatable(data, tmp_path):
  def files(place):
    found = [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): path.stat().st_mtime_ns for path in found}

  before = files(data)
  said = engines.run_module("appworld", MAKER, str(data), "4", "8")
  assert said.splitlines() == [f"{SCENARIOS + 8} tasks in {data}, 0 of them new"]
  assert files(data) == before
  other = tmp_path / "other"
  (other / "data").mkdir(parents=True)
  (other / "data" / "left").write_text("of one that was killed")
  engines.run_module("appworld", MAKER, str(other), "2", "0")
  said = engines.run_module("appworld", MAKER, str(other), "3", "1")
  assert said.splitlines() == [f"4 tasks in {other}, 2 of them new"]
  assert not (other / "data" / "left").exists()
  for name in files(other):
    if "/tasks/" in name:
      assert (other / name).read_bytes() == (data / name).read_bytes(), name
  assert (other / "data/datasets/train.txt").read_text().split()[0] == PAY
  (other / "data/datasets/dev.txt").unlink()  # a list that is lost, or newer than the tasks
  said = engines.run_module("appworld", MAKER, str(other), "3", "1")
  assert said.splitlines() == [f"4 tasks in {other}, 0 of them new"]
  assert len((other / "data/datasets/dev.txt").read_text().split()) == 1


def test_ids_show_the_level_and_splits_share_no_task():
  train, test = (list(appworld_tasks._ids(dataset, 50)) for dataset in (0, 1))
  assert not set(train) & set(test)
  assert len(set(train + test)) == 100
  assert {name[:2] for name in train[:SCENARIOS]} == {"d1", "d2", "d3"}
  assert all(len(name.split("_")[0]) == 7 for name in train)
  assert all(set(name.split("_")[0]) <= set("0123456789abcdef") for name in train)


SOLUTION = """
import math

def solution(apis, requester):
    "A docstring."
    me = apis.supervisor.show_profile()
    word = 'pw'
    token = apis.venmo.login(username=me['email'], password=word)['access_token']
    for page in range(3):
        apis.venmo.show_transactions(access_token=token, page_index=page)
    apis.venmo.create_transaction(access_token=token, receiver_email='b@x.org', amount=3)
    apis.supervisor.complete_task(answer=4)
"""


def is_write(app, api):
  return api.startswith(("create", "login", "complete"))


def test_plan_of_a_solution():
  plan = make_plan(SOLUTION, is_write)
  assert [step.kind for step in plan] == ["read", "login", "pages", "write", "answer"]
  assert plan[0].code == "import math\nme = apis.supervisor.show_profile()\nprint(me)"
  assert plan[1].code.splitlines()[0] == "word = 'pw'"
  assert plan[1].code.endswith("\nprint(token)")
  expert = Expert(plan, is_write)
  expert.observe("print(1)", "1")
  expert.observe(plan[0].code, "Execution failed. Traceback:")
  assert expert.oracle().position == 0
  for number, step in enumerate(plan):
    oracle = expert.oracle()
    assert (oracle.action, oracle.position, oracle.critical) == (step.code, number, number > 0)
    expert.observe(step.code, "Execution successful.")
  assert expert.oracle().action == plan[-1].code


def test_long_plans_are_joined_where_it_matters_least():
  lines = [f"    x{number} = apis.phone.show_alarm(alarm_id={number})" for number in range(30)]
  lines.insert(9, "    apis.phone.create_alarm(time='10:00')")
  code = "\n".join(["def solution(apis, requester):", *lines])  # and it does not say when it ends
  plan = make_plan(code, is_write)
  assert len(plan) == MAX_PLAN
  assert [step.apis for step in plan if step.kind == "write"] == [(("phone", "create_alarm"),)]
  assert plan[-1].code == "apis.supervisor.complete_task()"
  assert sum(len(step.apis) for step in plan) == 32
  whole = "\n".join(step.code for step in plan)
  assert [f"x{number} =" in whole for number in range(30)] == [True] * 30


def fake_download(monkeypatch, tmp_path, code):
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path))
  monkeypatch.delenv("APPWORLD_ROOT", raising=False)
  python = engines.directory("appworld") / "bin" / "python"
  python.parent.mkdir(parents=True, exist_ok=True)
  if not python.exists():
    python.symlink_to(sys.executable)
  head = "import os, pathlib, time\nroot = pathlib.Path(os.environ['APPWORLD_ROOT']) / 'data'\n"
  arguments = ("-c", head + code)
  monkeypatch.setitem(setup.DOWNLOADS, "appworld", (arguments, "data/datasets/*.txt"))


WHOLE = "(root / 'datasets').mkdir(parents=True); (root / 'datasets/train.txt').write_text('t')"


def test_download_is_whole_or_not_there(monkeypatch, tmp_path):
  place = tmp_path / "appworld-data"
  for code, why in (
    ("raise SystemExit('no route to host')", "no route to host"),
    ("root.mkdir()", "it brought no data/datasets"),
    (WHOLE + "\nraise SystemExit('cut off')", "cut off"),
    (WHOLE + "\ntime.sleep(60)", "more than 1 s"),
  ):
    fake_download(monkeypatch, tmp_path, code)
    assert why in setup.download("appworld", timeout_s=1)
    assert not place.exists()
    assert engines.wants_own_data("appworld", "")
  fake_download(monkeypatch, tmp_path, WHOLE)
  assert setup.download("appworld") == ""
  assert engines.data_of("appworld", "") == place
  assert [path.name for path in tmp_path.glob("*.part")] == []


class FakeRun:
  def __init__(self, data):
    self.config = Config(env=EnvConfig(kind="appworld", data=data, train_tasks=3, test_tasks=2))
    self.said = []

  def say(self, text):
    self.said.append(text)

  def tasks(self, split):
    self.listed = split


def test_setup_tries_the_download_only_where_nothing_is(monkeypatch, tmp_path):
  tried = tmp_path / "tried"
  count = f"open({str(tried)!r}, 'a').write('x')\nraise SystemExit('no network')"
  fake_download(monkeypatch, tmp_path, count)
  monkeypatch.setattr(engines, "install", lambda kind: False)
  made = []

  def make(kind, module, place, *sizes):
    made.append((module, sizes))
    Path(place).mkdir(exist_ok=True)

  monkeypatch.setattr(engines, "run_module", make)
  run = FakeRun(data="own")
  setup.main(run)
  assert not tried.exists()
  engines.own_data("appworld").rmdir()
  run = FakeRun(data="")
  setup.main(run)
  assert [line for line in run.said if "no network" in line and "\n" not in line]
  setup.main(FakeRun(data=""))
  assert tried.read_text() == "x"
  assert made == [(MAKER, ("3", "2"))] * 3
  fake_download(monkeypatch, tmp_path, WHOLE)
  engines.own_data("appworld").rmdir()
  run = FakeRun(data="")
  setup.main(run)
  assert run.said[-1] == f"setup: its tasks in {tmp_path / 'appworld-data'}"
  assert len(made) == 3


def test_the_pair_s_ends_lie_where_the_paper_s_do(pair_of_envs):
  tasks = pair_of_envs[0].tasks("train") + pair_of_envs[0].tasks("test")
  pair = ScriptedPair(NAMES, AppWorldErrors())
  jobs = [Job(task, seed) for task in tasks for seed in range(2)]
  wins = {}
  for model in (SMALL, LARGE):
    episodes = list(run_episodes(jobs, always(model, "m"), pair, pair_of_envs))
    assert {episode.stop for episode in episodes} <= {"done", "max_steps"}
    for episode in episodes:
      wins.setdefault(episode.task_id, ([], []))[model].append(bool(episode.score))
  wins_TxMxK = np.array(list(wins.values()))
  # The paper's ends are 53.0 and 66.7; 24 tasks have a standard error of about 10 points.
  assert abs(wins_TxMxK[:, 0].mean() - 0.53) < 0.22
  assert abs(wins_TxMxK[:, 1].mean() - 0.667) < 0.22
  assert wins_TxMxK[:, 1].mean() > wins_TxMxK[:, 0].mean()
  labels = [difficulty(small, large) for small, large in wins_TxMxK.tolist()]
  assert set(labels) == {"easy", "hard", "intractable"}
