"""Test environments in child processes: answers, deaths, and processes left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tiny import SIZES

from baar_jax.envs import process
from baar_jax.envs.base import EnvDied
from baar_jax.envs.process import Recall, open_envs
from baar_jax.envs.sandbox.adapter import Sandbox

ROOT = Path(__file__).parents[1]


def pid_of(env):
  return env.child.process and env.child.process.pid


def family(pid):
  """Return a process and all its descendants."""
  process = psutil.Process(pid)
  return [process, *process.children(recursive=True)]


def ended(processes):
  """Return whether all processes end within 30 s; a zombie has ended."""
  for _ in range(300):
    with contextlib.suppress(psutil.NoSuchProcess):
      processes = [
        p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
      ]
    if not processes:
      break
    time.sleep(0.1)
  return not processes


@pytest.fixture
def opened():
  """Yield open_envs. After the test, close all environments; their processes must end."""
  envs = []

  def opening(*args, **kwargs):
    envs.extend(open_envs(*args, **kwargs))
    return list(envs)

  yield opening
  processes = [p for pid in {pid_of(env) for env in envs} - {None} for p in family(pid)]
  for env in envs * 2:
    env.close()
  assert ended(processes)


def test_slots_answer_in_threads_as_the_environment_itself(opened):
  envs, sandbox = opened("sandbox", SIZES, 2, 4), Sandbox(**SIZES)
  assert envs[1].tasks("train") == sandbox.tasks("train")

  def play(env, task):
    tape, done = [env.reset(task.id)], False
    while not done:
      oracle, mistake = env.oracle(), env.mistake("lost", "key")
      _, done = answer = env.step(oracle.action if len(tape) % 3 else mistake)
      tape.append((oracle, mistake, answer, env.score()))
    return tape

  jobs = [(env, sandbox.tasks("train")[i % 4]) for i, env in enumerate(envs)]
  with ThreadPoolExecutor(8) as pool:
    tapes = list(pool.map(lambda job: play(*job), jobs))
  assert tapes == [play(Sandbox(**SIZES), task) for _, task in jobs]
  pids = [pid_of(env) for env in envs]
  assert (
    len(set(pids)) == 2 and pids == pids[:2] * 4
  )  # neighbours are in different processes


def test_a_child_plays_only_what_no_child_has_answered(monkeypatch):
  memory, tape, deadly = {}, [], ["d"]

  def open_recall():
    moves = []

    def answer(method, argument):
      """Answer with the task and the actions of the child's episode."""
      tape.append(argument)
      if argument in deadly:
        raise EnvDied(deadly.pop())
      if method == "reset":
        moves.clear()
      moves.append(argument)
      return "".join(moves)

    return Recall(answer, memory)

  def play(recall, actions):
    """Play a task "t"; return the last answer, and what has reached a child."""
    tape.clear()
    last = recall("reset", "t")
    for action in actions:
      last = recall("step", action)
    return last, "".join(tape)

  first, second = open_recall(), open_recall()
  assert play(first, "xz") == ("txz", "txz")
  assert play(second, "xz") == ("txz", "")
  assert play(second, "xy") == ("txy", "txy")
  assert play(first, "xzx") == ("txzx", "x")  # The first child is still at "xz".
  with pytest.raises(EnvDied):
    play(second, "xyd")
  assert play(second, "xyd") == ("txyd", "txyd")
  monkeypatch.setattr(process, "MAX_ANSWERS", 0)
  assert play(second, "") == ("t", "t")


@pytest.mark.parametrize(
  "sent, cause", [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "in 3 s")]
)
def test_a_death_ends_the_episodes_of_that_process_only(opened, sent, cause):
  first, second = opened("sandbox", SIZES, 1, 2, timeout_s=3.0)
  first.reset("test-0")
  second.reset("test-0")
  dead, processes = pid_of(first), family(pid_of(first))
  os.kill(dead, sent)
  with pytest.raises(EnvDied, match=cause):
    first.step("look")
  assert ended(processes)
  assert first.reset("test-0") and pid_of(first) != dead
  # The new process does not have the episode of the second slot.
  for call in (lambda: second.step("look"), lambda: second.mistake("lost", "k")):
    with pytest.raises(EnvDied, match="no live episode .it|no live episode .no answer"):
      call()
  assert second.reset("test-0") and second.step(second.oracle().action)[0]


def test_closing_ends_running_and_waiting_calls(opened):
  envs = opened("sandbox", SIZES, 1, 2, timeout_s=60)
  os.kill(pid_of(envs[0]), signal.SIGSTOP)  # A stopped process does not answer.
  with ThreadPoolExecutor(2) as threads:
    calls = [threads.submit(env.reset, "test-0") for env in envs]
    time.sleep(0.2)
    envs[0].close()
    messages = sorted(str(call.exception()) for call in calls)
  assert messages[0].endswith("environment is closed: open a new one")
  assert "(it ended without an answer)" in messages[1]  # not "no answer in 60 s"
  assert pid_of(envs[0]) is None  # The waiting call has started no new child.


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
"""
PARENT = """
from baar_jax.envs.process import open_envs
(env,) = open_envs("stuck.py:Stuck", {}, 1, 1)
env.reset("t")
print(env.child.process.pid, flush=True)
env.step("x")
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_parent(end, tmp_path):
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  (tmp_path / "stuck.py").write_text(STUCK)
  (scratch := tmp_path / "scratch").mkdir()
  environ = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)}
  parent = subprocess.Popen(
    [sys.executable, "-c", PARENT], cwd=tmp_path, env=environ, stdout=subprocess.PIPE
  )
  signal.signal(signal.SIGINT, before)
  processes = family(int(parent.stdout.readline()))
  assert len(processes) == 2
  time.sleep(0.2)  # By now the parent waits for the answer of its call.
  parent.send_signal(end)
  assert parent.wait() != 0 and ended(processes) and not list(scratch.iterdir())
