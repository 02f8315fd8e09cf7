"""Test AppWorld on its real engine with synthetic tasks: solutions, attacks, failures."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tiny import follow

from baar_jax.envs.appworld import adapter
from baar_jax.envs.appworld.adapter import AppWorld
from baar_jax.envs.base import EnvDied
from baar_jax.envs.engines import ROOT, can_confine
from baar_jax.envs.process import ProcessEnv, open_envs
from baar_jax.episode import SPLITS
from tools.make_tasks import make_tasks

SCENARIOS = 5
SIZES = {"train_tasks": SCENARIOS, "dev_tasks": 1, "test_tasks": 2}
ENGINE = AppWorld.engine
PAY, SHARES = "d1a0000_1", "d3a0000_1"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
  """Install the engine if it is missing, and generate tasks over an older version's."""
  ENGINE.install()
  place = tmp_path_factory.mktemp("appworld") / "own"
  (place / "data" / "tasks" / PAY).mkdir(parents=True)
  make_tasks(ENGINE, place, (SCENARIOS, 1, 2))
  return place


def open_world(data: Path, trusted: bool) -> ProcessEnv:
  """Open an environment whose splits dev and test share a dataset."""
  options = {"data": str(data), "test_split": "dev", "trusted": trusted}
  (env,) = open_envs("appworld", SIZES | {"options": options}, 1, 1)
  return env


@pytest.fixture(scope="module")
def env(data) -> Iterator[ProcessEnv]:
  """Open an environment in a child that imports the engine once for all tests."""
  with closing(open_world(data, trusted=False)) as env:
    yield env


@pytest.fixture(scope="module")
def trusted(data) -> Iterator[ProcessEnv]:
  """Open an environment without a wall."""
  with closing(open_world(data, trusted=True)) as env:
    yield env


def test_only_the_solution_passes_in_every_scenario(env, trusted):
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
  for world in (env, trusted):  # with a wall and without
    assert (world.reset(task.id), follow(world)) == (first, tape)


def test_any_code_gets_an_observation(env):
  env.reset(PAY)
  for code, expected in (
    ("__import__('signal').alarm(1)\nwhile True: pass", "timed out after 60 seconds"),
    ("raise BaseException('odd')", "odd"),
    ("print('\\ud800')", "?"),
    ("x = [0] * 10**10", "MemoryError"),
    ("-" * 100_000 + "1", "Execution failed"),
    ("print('\0')", "null bytes"),
    ("\ud800", "Execution failed"),
    ("y = 41", "successful"),
    ("print(y + 1)", "42"),
  ):
    observation, done = env.step(code)
    assert expected in observation and not done
  cut = "y" * adapter.OUTPUT_CHARS + "\n[123 more characters were cut]"
  assert env.step(f"print('y' * {adapter.OUTPUT_CHARS + 123})") == (cut, False)


READ = "__import__('io').FileIO"
SOCKETS = "s = __import__('socket')\n"
KERNEL = "kernel = __import__('ctypes').CDLL(None)\n"
# Each attack fails, or reaches what it looks for. PARENT is a process id.
ATTACKS = {
  "variables": "import os\nassert 'PATH' in os.environ",
  "keys": f"assert {READ}('/proc/PARENT/environ').read()",
  "memory": f"{READ}('/proc/PARENT/mem')",
  "a file": f"{READ}('TMP/file').read()",
  "the project's directory": f"{READ}('ROOT/README.md')",
  "a file to write": f"{READ}('TMP/new', 'w')",
  "data to write": f"{READ}('DATA/new', 'w')",
  "a link": "import os\nos.symlink('TMP/file', 'TMP/new')",
  "a program": "import os\nos.posix_spawn('/bin/sh', ['sh', '-c', ''], {})",
  "network": f"{SOCKETS}s.create_connection(('127.0.0.1', PORT))",
  "a local socket": f"{SOCKETS}s.socket(s.AF_UNIX).connect('\\0baar-PORT')",
  "a signal": f"{KERNEL}assert kernel.kill(PARENT, 0) == 0",
  "limits": f"{KERNEL}assert kernel.prlimit(PARENT, 7, 0, bytes(16)) == 0",
  "a priority": "import os\nos.getpriority(os.PRIO_PROCESS, PARENT)",
  "the terminal": "import os\nnull = os.stat('/dev/null')\n"
  "assert not os.path.samestat(os.fstat(2), null)",
  "root's rights": f"{KERNEL}assert kernel.chroot(b'/') == 0",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wall_keeps_code_from_the_machine(env, trusted, data, tmp_path, attack):
  """Without the wall, the same code reaches what it looks for."""
  if not can_confine(ENGINE):
    pytest.skip("bubblewrap cannot be had here")
  (tmp_path / "file").write_text("secret")
  with ExitStack() as stack:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = server.getsockname()[1]
    local = stack.enter_context(socket.socket(socket.AF_UNIX))
    local.bind(f"\0baar-{port}")
    local.listen()
    code = f"{ATTACKS[attack]}\nprint('reached')"
    values = dict(
      PARENT=os.getpid(), TMP=tmp_path, DATA=data / "data", PORT=port, ROOT=ROOT
    )
    for name, value in values.items():
      code = code.replace(name, str(value))
    env.reset(PAY)
    assert env.step(code)[0].startswith("Execution failed")
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    new = data / "data" / "new"
    assert not new.exists()
    if attack != "root's rights" or os.geteuid() == 0:
      trusted.reset(PAY)
      assert trusted.step(code) == ("reached", False)
    new.unlink(missing_ok=True)


def test_code_that_ends_its_process_ends_its_episode_only(env):
  env.reset(PAY)
  with pytest.raises(EnvDied):
    env.step("__import__('os').abort()")
  # The new process does not end with the thread that needs it first.
  with ThreadPoolExecutor(1) as threads:
    threads.submit(env.reset, PAY).result()
  assert env.step("print(7)") == ("7", False)


def test_a_wrong_login_can_be_repaired_but_a_wrong_write_not(env):
  env.reset(SHARES)
  follow(env, lambda oracle: "login(" in oracle.action)
  oracle = env.oracle()
  for kind in ("wrong", "wasted"):
    for key in "abcdef":
      observation, _ = env.step(env.mistake(kind, key))
      assert kind == "wasted" or "Execution failed" in observation
      assert env.oracle() == oracle
  follow(env)
  assert env.score() == 1.0
  env.reset(PAY)
  follow(env, lambda oracle: "create_transaction" in oracle.action)
  errors = (env.mistake("wrong", str(key)) for key in range(99))
  env.step(next(error for error in errors if "amount" in error))
  follow(env)
  assert env.score() == 0.0


def test_models_can_play_a_task_without_a_solution(data, env):
  solution = data / "data" / "tasks" / PAY / "ground_truth" / "compiled_solution.py"
  hidden = solution.rename(solution.with_suffix(".hidden"))
  env.reset(PAY)
  hidden.rename(solution)
  assert env.step("print(7)") == ("7", False)
  with pytest.raises(NotImplementedError, match="has no solution"):
    env.oracle()
