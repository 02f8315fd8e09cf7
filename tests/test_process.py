"""Test environments in child processes: answers, deaths, and processes left behind."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psutil
import pytest
from tiny import ROOT, SANDBOX, SIZES, follow

from baar_jax.envs.base import EnvDied
from baar_jax.envs.process import open_envs
from examples.sandbox import Sandbox


def family(pid: int) -> list[psutil.Process]:
  """Return a process and all its descendants."""
  process = psutil.Process(pid)
  return [process, *process.children(recursive=True)]


def are_ended(processes: list[psutil.Process]) -> bool:
  """Return whether all processes end within 30 s; a zombie has ended."""
  _, left = psutil.wait_procs(processes, timeout=30)
  return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def play(env, task_id: str) -> list:
  """Play a mistake and the expert's actions; return all answers."""
  opening = env.reset(task_id)
  wasted = env.step(env.mistake("wasted", "key"))
  return [opening, wasted, *follow(env), env.score()]


def test_slots_answer_in_threads_as_the_environment_itself():
  envs = open_envs(SANDBOX, SIZES, 2, 4)
  sandbox = Sandbox(**SIZES)
  assert envs[1].tasks("train") == sandbox.tasks("train")
  ids = [task.id for task in sandbox.tasks("train")[:4]] * 2
  with ThreadPoolExecutor(8) as pool:
    tapes = list(pool.map(play, envs, ids))
  assert tapes == [play(sandbox, task_id) for task_id in ids]
  first, second, *others = [env.child.process.pid for env in envs]
  assert first != second  # Neighbours are in different processes.
  assert others == [first, second] * 3
  processes = family(first) + family(second)
  for env in envs * 2:
    env.close()
  assert are_ended(processes)


@pytest.mark.parametrize(
  "sent, cause", [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "in 3 s")]
)
def test_a_death_ends_the_episodes_of_that_process_only(sent, cause):
  first, second = open_envs(SANDBOX, SIZES, 1, 2, timeout_s=3.0)
  with closing(first):
    first.reset("test-0")
    second.reset("test-0")
    dead = family(first.child.process.pid)
    os.kill(dead[0].pid, sent)
    with pytest.raises(EnvDied, match=cause):
      first.step("look")
    assert are_ended(dead)
    assert first.reset("test-0")
    # The new process does not have the episode of the second slot.
    with pytest.raises(EnvDied, match=f"no live episode .*{cause}"):
      second.score()
    assert play(second, "test-0")


def test_closing_ends_running_and_waiting_calls():
  envs = open_envs(SANDBOX, SIZES, 1, 2, timeout_s=60)
  envs[0].tasks("train")
  stopped = family(envs[0].child.process.pid)
  os.kill(stopped[0].pid, signal.SIGSTOP)  # A stopped process does not answer.
  with ThreadPoolExecutor(2) as threads:
    calls = [threads.submit(env.reset, "test-0") for env in envs]
    time.sleep(0.2)
    envs[0].close()
    messages = sorted(str(call.exception()) for call in calls)
  assert "is closed" in messages[0]
  assert "ended without an answer" in messages[1]  # not "no answer in 60 s"
  assert are_ended(stopped)
  assert envs[0].child.process is None  # The waiting call has started no new child.


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


def test_no_process_outlives_its_parent(tmp_path):
  (tmp_path / "stuck.py").write_text(STUCK)
  scratch = tmp_path / "scratch"
  scratch.mkdir()
  parent = subprocess.Popen(
    [sys.executable, "-c", PARENT],
    cwd=tmp_path,
    env=os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
  )
  processes = family(int(parent.stdout.readline()))
  assert len(processes) == 2
  time.sleep(0.2)  # By now the parent waits for the answer of its call.
  parent.kill()
  assert parent.wait() != 0
  assert are_ended(processes)
  assert not [*scratch.iterdir()]
