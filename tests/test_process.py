"""Environments in child processes: same answers, every death noticed, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baar_jax.envs.base import EnvDied
from baar_jax.envs.process import open_envs
from baar_jax.envs.sandbox import Sandbox
from baar_jax.run import memory_mb

ROOT = Path(__file__).parents[1]
SIZES = {"train_tasks": 4, "test_tasks": 4}
TASK = "find-plant/3"


@pytest.fixture
def opened():
  """open_envs, with everything closed and gone at the end."""
  envs = []

  def opening(*args, **kwargs):
    envs.extend(open_envs(*args, **kwargs))
    return list(envs)

  yield opening
  pids = group_pids({env.pid for env in envs})
  for env in envs:
    env.close()
    env.close()
  assert gone(pids)


def stat(pid):
  """State and process group, of a process that may be gone."""
  try:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return "X", None
  return fields[0], int(fields[2])


def group_pids(groups):
  pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
  return {pid for pid in pids if stat(pid)[1] in groups and stat(pid)[0] not in "XZ"}


def jvm_of(env):
  (jvm,) = group_pids({env.pid}) - {env.pid}
  return jvm


def gone(pids):
  """Whether all processes end; they are given time, for a kill takes effect when it does."""
  for _ in range(300):
    if all(stat(pid)[0] in "XZ" for pid in pids):
      return True
    time.sleep(0.1)
  return False


def test_closing_does_not_wait_for_a_call_under_way(opened):
  env = opened("sandbox", SIZES, 1, 1, timeout_s=60)[0]
  env.reset(env.tasks("test")[0].id)
  os.kill(env.pid, signal.SIGSTOP)  # it will not answer
  with ThreadPoolExecutor(1) as thread:
    call = thread.submit(env.step, "pull A")
    time.sleep(0.2)
    env.close()
    with pytest.raises(EnvDied, match="it ended without an answer"):  # not "no answer within"
      call.result()


def test_a_call_that_waits_for_another_starts_no_child_after_closing(opened):
  envs = opened("sandbox", SIZES, 1, 2, timeout_s=60)
  os.kill(envs[0].pid, signal.SIGSTOP)
  with ThreadPoolExecutor(2) as threads:
    calls = [threads.submit(env.tasks, "test") for env in envs]
    time.sleep(0.2)
    for env in envs:
      env.close()
    for call in calls:
      with pytest.raises(EnvDied):
        call.result()
  assert [env.pid for env in envs] == [None, None]


def test_child_answers_as_the_environment_itself(opened):
  child = opened("sandbox", SIZES, 1, 1)[0]
  here = Sandbox(**SIZES)
  assert child.system_prompt == here.system_prompt
  for split in ("train", "test"):
    assert child.tasks(split) == here.tasks(split)
  task = here.tasks("test")[0].id
  assert child.reset(task) == here.reset(task)
  for step in range(3):
    assert child.oracle() == here.oracle()
    assert child.oracle_action() == here.oracle_action()
    assert child.mistake("lost", f"k{step}") == here.mistake("lost", f"k{step}")
    action = here.oracle_action()
    assert child.step(action) == here.step(action)
    assert child.score() == here.score()


def test_neighbours_are_in_different_processes(opened):
  envs = opened("sandbox", SIZES, 2, 3)
  pids = [env.pid for env in envs]
  assert len(envs) == 6
  assert len(set(pids)) == 2
  assert pids == pids[:2] * 3


def test_slots_are_apart_and_threads_may_call_at_once(opened):
  envs = opened("sandbox", SIZES, 2, 4)
  tasks = [task.id for task in envs[0].tasks("train")]

  def play(env, task):
    tape = [env.reset(task)]
    for i in range(12):
      action = env.mistake("lost", str(i)) if i % 3 == 0 else env.oracle_action()
      tape.append((action, *env.step(action), env.score()))
      if tape[-1][2]:
        break
    return tape

  jobs = [(env, tasks[i % 4]) for i, env in enumerate(envs)]
  with ThreadPoolExecutor(8) as pool:
    tapes = list(pool.map(lambda job: play(*job), jobs))
  assert tapes == [play(Sandbox(**SIZES), task) for _, task in jobs]


def test_a_caller_s_mistake_is_a_value_error_and_harms_nothing(opened):
  env, other = opened("sandbox", SIZES, 1, 2)
  task = env.tasks("test")[0].id
  other.reset(task)
  with pytest.raises(ValueError, match="nowhere"):
    env.tasks("nowhere")
  assert other.step(other.oracle_action())[0]
  assert env.reset(task)


def test_wrong_kind_and_arguments_are_value_errors_or_named():
  with pytest.raises(ValueError, match="sandbox"):
    open_envs("beach", {}, 1, 1)
  with pytest.raises(EnvDied, match="no_such_argument"):
    open_envs("sandbox", {"no_such_argument": 1}, 1, 1)


def test_killed_child_is_noticed_by_every_slot_and_replaced(opened):
  first, second = opened("sandbox", SIZES, 2, 2)[::2]
  task = first.tasks("test")[0].id
  first.reset(task)
  second.reset(task)
  assert first.pid == second.pid
  dead = first.pid
  os.kill(dead, signal.SIGKILL)
  with pytest.raises(EnvDied):
    first.step("look")
  assert first.reset(task)
  assert first.pid != dead
  # Another process answers now, but it does not hold the second slot's episode.
  with pytest.raises(EnvDied):
    second.step("look")
  with pytest.raises(EnvDied):
    second.mistake("lost", "k")
  assert second.reset(task)
  assert second.pid == first.pid
  assert second.step(second.oracle_action())[0]


def test_hung_child_is_killed(opened):
  (env,) = opened("sandbox", SIZES, 1, 1, timeout_s=1.0)
  env.reset(env.tasks("test")[0].id)
  pid = env.pid
  os.kill(pid, signal.SIGSTOP)
  with pytest.raises(EnvDied, match="within 1 s"):
    env.step("look")
  assert gone({pid})
  assert env.reset(env.tasks("test")[0].id)


def test_closed_handle_stays_closed(opened):
  first, second = opened("sandbox", SIZES, 1, 2)
  task = first.tasks("test")[0].id
  first.close()
  with pytest.raises(EnvDied, match="closed"):
    first.reset(task)
  assert second.reset(task)


def test_killed_jvm_is_noticed_and_replaced(opened, tmp_path):
  (env,) = opened("scienceworld", {"gold_dir": str(tmp_path)}, 1, 1)
  observation = env.reset(TASK)
  child, jvm = env.pid, jvm_of(env)
  assert 50 < memory_mb([env]) < 1500
  os.kill(jvm, signal.SIGKILL)
  with pytest.raises(EnvDied):
    env.step("look around")
  assert gone({child, jvm})
  assert env.reset(TASK) == observation
  assert env.step(env.oracle_action())[0]


def test_killed_child_takes_its_jvm_along(opened, tmp_path):
  (env,) = opened("scienceworld", {"gold_dir": str(tmp_path)}, 1, 1)
  env.reset(TASK)
  child, jvm = env.pid, jvm_of(env)
  os.kill(child, signal.SIGKILL)
  assert gone({child, jvm})


def test_killed_parent_leaves_nothing_behind(tmp_path):
  parent = f"""
import time
from baar_jax.envs.process import open_envs
envs = open_envs("scienceworld", {{"gold_dir": {str(tmp_path)!r}}}, 1, 1)
envs[0].reset({TASK!r})
print(envs[0].pid, flush=True)
time.sleep(600)
"""
  process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE)
  child = int(process.stdout.readline())
  pids = group_pids({child})
  assert len(pids) == 2
  process.kill()
  process.communicate()
  assert gone(pids)


STUCK = """
import subprocess, sys, time
from baar_jax.envs.base import Env
class Stuck(Env):
  system_prompt = "p"
  def reset(self, task_id):
    self.helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return ""
  def step(self, action):
    time.sleep(600)
  def score(self):
    return 0.0
"""
PARENT = """
import sys, threading
from baar_jax.envs.process import open_envs
(env,) = open_envs(sys.argv[1], {}, 1, 1)
env.reset("t")
print(env.pid, flush=True)
if sys.argv[2] == "raise":
  threading.Timer(0.5, env.close).start()  # as Run.close() does on the way out
env.step("x")
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, "raise"])
def test_no_process_outlives_a_parent_that_waits_for_it(end, tmp_path):
  (tmp_path / "stuck.py").write_text(STUCK)
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  process = subprocess.Popen(
    [sys.executable, "-c", PARENT, f"{tmp_path / 'stuck.py'}:Stuck", str(end)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  signal.signal(signal.SIGINT, before)
  pids = group_pids({int(process.stdout.readline())})
  assert len(pids) == 2
  time.sleep(0.2)  # until it is amid the call
  if end != "raise":
    process.send_signal(end)
  process.communicate()
  assert process.returncode != 0
  assert gone(pids)


COUNTING = """
from baar_jax.envs.base import Env
class Counting(Env):
  system_prompt, episodes_per_process, count = "p", 2, 0
  def reset(self, task_id):
    self.count += 1
    return str(self.count)
"""


def test_a_fresh_process_takes_over_after_so_many_episodes(opened, tmp_path):
  (tmp_path / "counting.py").write_text(COUNTING)
  (env,) = opened(f"{tmp_path / 'counting.py'}:Counting", {}, 1, 1)
  assert [env.reset("t") for _ in range(5)] == ["1", "2", "1", "2", "1"]


CHATTY = """
import sys, types
class Chatty:
  system_prompt, code_actions, episodes_per_process = "p", False, 0
  def reset(self, task_id):
    print("noise")
    return f"{sys.stdin.read()!r} {'jax' in sys.modules}"
  def tasks(self, split):
    raise ValueError("no such split")
  def step(self, action):
    raise ValueError("a bug")
  def score(self):
    return 0.0
  def oracle(self):
    raise NotImplementedError("no expert here")
sys.modules["chatty"] = types.ModuleType("chatty")
sys.modules["chatty"].Chatty = Chatty
from baar_jax.envs import worker
worker.KINDS["chatty"] = ("chatty", "Chatty")
worker.main("chatty", "{}")
"""


def test_child_s_prints_input_and_bugs_stay_out_of_the_protocol():
  requests = [[0, "reset", ["t"]], [0, "tasks", [""]], [0, "step", ["x"]]]
  done = subprocess.run(
    [sys.executable, "-c", CHATTY],
    cwd=ROOT,
    input="".join(json.dumps(request) + "\n" for request in requests),
    capture_output=True,
    text=True,
  )
  hello, state, mistake, bug = map(json.loads, done.stdout.splitlines())
  shown = {"system_prompt": "p", "code_actions": False, "episodes_per_process": 0}
  assert hello == {"value": shown}
  assert state["value"]["observation"] == "'' False"  # no input to read, and no jax
  assert (state["value"]["oracle"], state["value"]["no_oracle"]) == (None, "no expert here")
  assert mistake == {"error": "ValueError", "message": "no such split", "survived": True}
  assert (bug["error"], bug["survived"]) == ("ValueError", False)  # nobody asked for it
  assert bug["message"].startswith("a bug (")
  assert done.returncode == 1
  assert "noise" in done.stderr
