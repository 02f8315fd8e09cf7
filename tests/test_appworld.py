"""Test AppWorld on its real engine with synthetic tasks: solutions, attacks, failures."""

import ctypes
import os
import sys
from contextlib import closing

import psutil
import pytest
from tiny import follow

from baar_jax.envs.appworld import adapter
from baar_jax.envs.appworld.adapter import AppWorld, Options
from baar_jax.envs.process import open_envs
from baar_jax.episode import SPLITS

SCENARIOS = 5
SIZES = {"train_tasks": SCENARIOS, "dev_tasks": 1, "test_tasks": 2}
ENGINE = AppWorld.engine
PAY, SHARES = "d1a0000_1", "d3a0000_1"


def arguments(data, **options) -> dict:
  """Return the arguments of the environment; dev and test share a dataset."""
  return SIZES | {"options": {"data": str(data), "test_split": "dev"} | options}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """Install the engine if it is missing, and generate tasks over an older version's."""
  ENGINE.install()
  place = tmp_path_factory.mktemp("appworld") / "own"
  (place / "data" / "tasks" / PAY).mkdir(parents=True)
  ENGINE.make_tasks(place, (SCENARIOS, 1, 2))
  return place


@pytest.fixture(scope="module")
def env(data):
  """Open an environment in a child that imports the engine once for all tests."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("OPENAI_API_KEY", "sk-secret")
    (env,) = open_envs("appworld", arguments(data), 1, 1)
  yield env
  env.close()


def test_only_the_solution_passes_in_every_scenario(env):
  tasks = [task for split in SPLITS for task in env.tasks(split)]
  assert len({task.id.split("_")[0] for task in tasks}) == SCENARIOS
  assert {task.id[:3] for task in tasks} == {"d1a", "d2a", "d3a"}
  assert len({task.id for task in tasks}) == SCENARIOS + 3  # dev and test share no task
  for task in tasks:
    for answer in ("", "answer=-1"):
      env.reset(task.id)
      assert env.score() == 0.0  # The task has just started.
      assert env.step(f"apis.supervisor.complete_task({answer})")[1]
      assert env.score() == 0.0
    first, tape = env.reset(task.id), follow(env)
    assert not any("Execution failed" in observation for _, observation in tape)
    assert 5 <= len(tape) <= 10
    assert env.score() == 1.0
  assert (env.reset(task.id), follow(env)) == (first, tape)


def test_any_code_gets_an_observation_and_sees_no_keys(env):
  env.reset(PAY)
  for code, expected in (
    ("x = (", "Syntax error"),
    ("print(1/0)", "ZeroDivisionError"),
    ("__import__('signal').alarm(1)\nwhile True: pass", "timed out after 60 seconds"),
    ("raise BaseException('odd')", "odd"),
    ("print('\\ud800')", "?"),
    ("x = [0] * 10**10", "MemoryError"),
    ("import subprocess", "not allowed"),
    *[
      (f"apis.venmo.show_transaction(transaction_id='{id_}')", "parameters are invalid")
      for id_ in ("../../admin/x", "..", "{page}", "%2e%2e")
    ],
    ("apis.supervisor.show_profile(client=1)", "successful"),
    ("-" * 100_000 + "1", "Execution failed"),
    ("print('\0')", "null bytes"),
    ("\ud800", "Execution failed"),
    ("", "No code"),
    ("y = 41", "successful"),
    ("print(y + 1)", "42"),
  ):
    observation, done = env.step(code)
    assert expected in observation and not done
  hidden = sys.platform != "linux" or ctypes.CDLL(None).prctl(3) == 0  # PR_GET_DUMPABLE
  assert (
    hidden
  )  # so that the keys of this process are not read, whatever the shell can do
  observation, _ = env.step("import os\nprint(sorted(os.environ))")
  assert "HOME" in observation and "OPENAI_API_KEY" not in observation
  cut = "y" * adapter.OUTPUT_CHARS + "\n[123 more characters were cut]"
  assert env.step(f"print('y' * {adapter.OUTPUT_CHARS + 123})") == (cut, False)


FILE = "__import__('io').FileIO"
FORGED = '{"value": ["o", true, "", null]}'
REFUSED = {  # PARENT and WORKER are process ids
  "keys": "import pathlib\nprint(pathlib.Path('/proc/PARENT/environ').read_text())",
  "memory": f"{FILE}('/proc/WORKER/mem')",
  "solution": f"{FILE}('DATA/tasks/{PAY}/ground_truth/answer.json')",
  "library": "r = __import__('readline')\nr.read_history_file('/etc/passwd')",
  "write": f"{FILE}('TMP/file', 'w')",
  "link": "import os\nos.symlink('/etc/passwd', 'TMP/file')",
  "spawn": "import os\nos.posix_spawn('/bin/sh', ['sh', '-c', 'touch TMP/file'], {})",
  "signal": "import os\n__import__('signal').pidfd_send_signal(os.pidfd_open(PARENT), 0)",
  "machine code": "__import__('ctypes').CDLL(None).getppid()",
  "memory limit": "__import__('resource').setrlimit(9, (-1, -1))",
  "network": "__import__('socket').socket()",
  "database": "from appworld.apps.venmo.models import User\nprint(len(User.all()))",
}
# Code in a second interpreter, in which no audit hook of Python holds.
HOOKLESS = "s = __import__('_xxsubinterpreters')\ns.run_string(s.create(), '''CODE''')"
KERNEL = "import ctypes\nkernel = ctypes.CDLL(None, use_errno=True)\n"
NOT_PERMITTED = "assert ctypes.get_errno() != 1"  # the number of EPERM
# Look for the databases, which the engine shares with a dozen files, in a part of memory.
# A page of other memory may begin like a database by chance.
SHARED = f"""{KERNEL}
def is_database(page):
  kernel.access(ctypes.c_void_p(page), 0)
  is_readable = ctypes.get_errno() != 14  # EFAULT
  return is_readable and ctypes.string_at(page, 6) == b"SQLite"
library = ctypes.cast(kernel.getpid, ctypes.c_void_p).value // 4096 * 4096
assert sum(map(is_database, range(library - 2**30, library, 4096))) > 5
"""
CONFINED = {
  "a file in shared memory": SHARED,
  "a UDP socket": "import socket\nsocket.socket(type=socket.SOCK_DGRAM)",
  "a local socket": "import socket\nsocket.socket(socket.AF_UNIX)",
  "a process": f"{KERNEL}assert kernel.fork() != -1",
  "a namespace": f"{KERNEL}assert kernel.unshare(0x10000000) == 0",
  "a process by clone": f"{KERNEL}assert kernel.syscall(56, 17, 0, 0, 0, 0) != -1",
  "clone3": f"{KERNEL}kernel.syscall(435, 0, 0)\nassert ctypes.get_errno() != 38",
  "an emptied file": f"{KERNEL}kernel.open(b'/', 0o1000)\n{NOT_PERMITTED}",
  "a page of memory": f"{KERNEL}kernel.madvise(0, 0, 101)\n{NOT_PERMITTED}",
  "another's limits": f"{KERNEL}assert kernel.prlimit(PARENT, 7, 0, bytes(16)) == 0",
  "root's capabilities": f"{KERNEL}assert kernel.mmap(0, 4096, 3, 50, -1, 0) == 0",
  "an urgent message": f"{KERNEL}assert kernel.send(201, b'x', 1, 1) == 1",
  "a call of x32": f"{KERNEL}assert kernel.syscall(0x40000000 + 39) > 0",
  "rights of a file": "import os\nos.chmod('TMP', 0o700)",
  "times of a file": "import os\nos.utime('TMP')",
  "a priority": "import os\nos.setpriority(os.PRIO_PROCESS, PARENT, 1)",
  "a limit": "import resource\nresource.setrlimit(7, (9, 9))",
  "a signal by a file": "import fcntl\nfcntl.fcntl(201, 8, PARENT)",
  "a signal": f"{KERNEL}assert kernel.kill(PARENT, 0) == 0",
}
for name, code in CONFINED.items():
  REFUSED[name] = HOOKLESS.replace("CODE", code)
FUTILE = {
  "evaluation": "import appworld\nPassed = type('Passed', (), {'success': True})\n"
  "appworld.AppWorld.evaluate = lambda self: Passed",
  "answer": "for fd in range(1, 64):\n  for pid in ('self', WORKER):\n    try:\n"
  f"      file = {FILE}(f'/proc/{{pid}}/fd/{{fd}}', 'w')\n"
  f"      file.write(b'{FORGED}\\n{{\"value\": 1.0}}\\n')\n    except OSError:\n      pass",
}


@pytest.mark.parametrize("attack", REFUSED | FUTILE)
def test_agents_code_reaches_no_key_file_process_or_score(env, data, tmp_path, attack):
  code = (REFUSED | FUTILE)[attack].replace("PARENT", str(os.getpid()))
  code = code.replace("WORKER", str(env.child.process.pid)).replace(
    "DATA", str(data / "data")
  )
  env.reset(PAY)
  observation, done = env.step(code.replace("TMP", str(tmp_path)))
  assert observation.startswith("Execution failed") == (attack in REFUSED) and not done
  assert not list(tmp_path.iterdir())
  assert env.score() == 0.0
  assert env.step("print(7)") == ("7", False)  # the next answer is its own


def test_an_episode_survives_a_shell_that_ends_or_hangs(data):
  with closing(*open_envs("appworld", arguments(data, code_s=1), 1, 1)) as env:
    env.reset(PAY)
    assert "Exception" in env.step("while True: apis.supervisor.show_profile()")[0]
    assert env.step("print(7)") == ("7", False)  # the limit did not end it amid a call
    for code in (
      "import os\nos.abort()",
      "__import__('signal').alarm(0)\nwhile True: pass",
    ):
      observation, done = env.step(f"x = 1\n{code}")
      assert (
        observation.endswith("ran too long, and all variables are lost.") and not done
      )
      assert "name 'x' is not defined" in env.step("print(x)")[0]
    world = psutil.Process(env.child.process.pid)
    shells = world.children(recursive=True)  # they are killed as a group
    assert [os.getpgid(shell.pid) for shell in shells] == [world.pid] * 2


def test_a_wrong_login_can_be_repaired_but_a_wrong_write_not(env):
  """A wrong login can be put right; a wrong write ends the task."""
  env.reset(SHARES)
  follow(env, lambda oracle: "login(" in oracle.action)
  oracle = env.oracle()
  for kind in ("wrong", "lost", "hasty"):
    observation, _ = env.step(env.mistake(kind, "k"))
    assert ("Execution failed" in observation) == (
      kind != "lost"
    ) and env.oracle() == oracle
  follow(env)
  assert env.score() == 1.0
  env.reset(PAY)
  follow(env, lambda oracle: "create_transaction" in oracle.action)
  errors = (env.mistake("wrong", str(key)) for key in range(99))
  env.step(next(error for error in errors if "amount" in error))
  follow(env)
  assert env.score() == 0.0


def test_a_missing_solution_and_too_few_tasks_are_named(data, env):
  solution = data / "data" / "tasks" / PAY / "ground_truth" / "compiled_solution.py"
  hidden = solution.rename(solution.with_suffix(".hidden"))
  env.reset(PAY)
  hidden.rename(solution)
  assert env.step("print(7)") == ("7", False)  # Models can still play this task.
  with pytest.raises(
    NotImplementedError, match="has no solution.* datasets train and dev"
  ):
    env.oracle()
  with pytest.raises(ValueError, match="has 5 tasks, but 9 were asked for"):
    AppWorld(9, 1, 1, options=Options(str(data))).tasks("train")
