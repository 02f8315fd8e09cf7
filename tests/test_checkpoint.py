"""Checkpoints: what comes back, what is kept, and what damage and kills leave."""

import contextlib
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from baar_jax.config import Config
from baar_jax.train.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]
PATHS = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}

# Saves a state that tells its update, one update after another, until it is killed.
SAVE_FOR_EVER = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from baar_jax.train.checkpoint import Checkpoints
from baar_jax.config import Config
from tests.test_checkpoint import state
checkpoints = Checkpoints(Path(sys.argv[1]), Config())
for update in range(1, 10_000):
  checkpoints.save(update, state(update))
  print(update, flush=True)
"""


def state(value: float):
  """A tree as training has it: named and numbered leaves, scalars among them."""
  return {
    "params": {"layers": {"kernel": jnp.full((2, 30, 7), value, jnp.float32)}, "norm": jnp.ones(5)},
    "optimizer": [jnp.array(int(value), jnp.int32), jnp.arange(6, dtype=jnp.float32) * value],
  }


def assert_state(got, value):
  np.testing.assert_array_equal(got["params"]["layers"]["kernel"], np.full((2, 30, 7), value))
  np.testing.assert_array_equal(got["params"]["norm"], np.ones(5))
  assert got["optimizer"][0] == int(value)
  np.testing.assert_array_equal(got["optimizer"][1], np.arange(6) * value)


def save(directory: Path, *updates: int) -> None:
  checkpoints = Checkpoints(directory, Config(name="mine"))
  for update in updates:
    checkpoints.save(update, state(update))
  checkpoints.close()


def restore(directory: Path, like=None):
  with contextlib.closing(Checkpoints(directory)) as checkpoints:
    return checkpoints.update, checkpoints.restore(like or state(0))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A directory with the checkpoints of updates 10 and 20; to be copied, not changed."""
  directory = tmp_path_factory.mktemp("whole") / "sft"
  save(directory, 10, 20)
  return directory


def test_the_newest_two_are_kept_and_saving_goes_on(whole, tmp_path):
  update, got = restore(whole)
  assert update == 20
  assert_state(got, 20)
  texts = [path.read_text() for path in (whole / "20" / "config").iterdir()]
  assert any('"name":"mine"' in text.replace(" ", "") for text in texts)
  directory = shutil.copytree(whole, tmp_path / "sft")
  save(directory, 30, 40)
  assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["30", "40"]
  assert_state(restore(directory)[1], 40)


def test_a_strangers_checkpoint_is_read_without_unpickling(whole, monkeypatch):
  for name in ("load", "loads", "Unpickler", "_Unpickler"):
    monkeypatch.setattr(pickle, name, None)
  assert_state(restore(whole)[1], 20)


def test_none(tmp_path):
  with contextlib.closing(Checkpoints(tmp_path / "sft", Config())) as checkpoints:
    assert (checkpoints.update, checkpoints.newest) == (0, None)
    assert_refused(lambda: checkpoints.restore(state(0)), "sft holds no checkpoint")


def assert_refused(call, *texts) -> None:
  """The call ends in one line with these texts."""
  with pytest.raises(ValueError) as error:
    call()
  message = str(error.value)
  assert "\n" not in message and all(str(text) in message for text in texts), message


UNREADABLE = "cannot be read", "remove that directory to go on from the one before"


@pytest.mark.parametrize("change", ["shape", "missing", "extra"])
def test_another_structure(whole, change):
  other = state(0)
  if change == "shape":
    other["params"]["layers"]["kernel"] = jnp.zeros((2, 30, 9))
  elif change == "missing":
    del other["params"]["norm"]
  else:
    other["params"]["more"] = jnp.zeros(3)
  assert_refused(lambda: restore(whole, other), whole / "20", *UNREADABLE)


DAMAGES = {
  "gone": None,
  "half": lambda content: content[: len(content) // 2],
  "garbage": lambda content: bytes(byte ^ 0x5A for byte in content),
  "key": lambda content: content.replace(b"param_name", b"parameter"),  # other JSON
}


def damage(path: Path, how: str) -> None:
  content = path.read_bytes()
  path.unlink()
  if how != "gone":
    path.write_bytes(DAMAGES[how](content))


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_noticed_or_of_no_file_that_is_needed(whole, tmp_path, how):
  """Whichever file is damaged: the right values or the error, never wrong values."""
  paths = [path for path in (whole / "20").rglob("*") if path.is_file()]
  files = [path.relative_to(whole) for path in paths if path.parent.name != "config"]
  noticed = 0
  for number, names in enumerate([files, *([name] for name in files)]):
    directory = shutil.copytree(whole, tmp_path / str(number))
    for name in names:
      damage(directory / name, how)
    try:
      update, got = restore(directory)
    except ValueError:
      assert_refused(lambda: restore(directory), directory / "20", *UNREADABLE)  # noqa: B023
      noticed += 1
      shutil.rmtree(directory / "20")  # the advice in the message
      update, got = restore(directory)
    assert update == (20 if (directory / "20").exists() else 10)
    assert_state(got, update)
  assert noticed > 1


def test_what_is_no_checkpoint_is_left_alone_or_refused(whole, tmp_path):
  directory = shutil.copytree(whole, tmp_path / "sft")
  for name in ("notes.txt", "30"):
    (directory / name).touch()
  for name in ("abc", "20 (copy)", "030", "30.orbax-checkpoint-tmp"):
    (directory / name).mkdir()
  update, got = restore(directory)
  assert update == 20
  assert_state(got, 20)
  for name in ("25", "99999999999999999999"):
    (directory / name).mkdir()
    assert_refused(lambda: restore(directory), directory / name, *UNREADABLE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tree, leaf", [("params", "norm"), ("optimizer", 1)])
def test_numbers_that_are_none_are_never_restored(tmp_path, tree, leaf, value):
  poisoned = state(20)
  poisoned[tree][leaf] = poisoned[tree][leaf].at[1].set(value)
  with contextlib.closing(Checkpoints(tmp_path, Config())) as checkpoints:
    checkpoints.save(20, poisoned)
  assert_refused(lambda: restore(tmp_path), tmp_path / "20", "not finite", *UNREADABLE)


# Reads what is cut, then writes to a disk that is full.
FAIL_TWICE = """
import resource, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from absl import logging
from tests.test_checkpoint import restore, save
logging.use_absl_handler()
logging.set_verbosity(logging.WARNING)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
for call in (restore, lambda directory: save(directory, 30)):
  try:
    call(Path(sys.argv[1]))
  except ValueError as error:
    print(len(str(error)) < 600)
"""


def test_nothing_is_said_beside_the_error(whole, tmp_path):
  directory = shutil.copytree(whole, tmp_path / "sft")
  for path in (directory / "20" / "params" / "d").iterdir():
    damage(path, "half")
  command = [sys.executable, "-c", FAIL_TWICE, str(directory)]
  result = subprocess.run(command, cwd=ROOT, env=PATHS, capture_output=True, text=True)
  assert (result.stdout, result.stderr) == ("True\nTrue\n", "")


@pytest.mark.parametrize("limit", [0, 100, 1000])
def test_a_full_disk_is_named_with_the_newest_whole_checkpoint(whole, tmp_path, limit):
  """The limit of a file's size stands for the disk; Orbax writes in threads of its own."""
  directory = shutil.copytree(whole, tmp_path / "sft")
  trees, limits = state(30), resource.getrlimit(resource.RLIMIT_FSIZE)

  def save_twice():
    with contextlib.closing(Checkpoints(directory, Config())) as checkpoints:
      resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
      checkpoints.save(30, trees)
      checkpoints.save(40, trees)

  text = f"no checkpoint after update 20 can be written to {directory} ("
  try:
    assert_refused(save_twice, text, "File too large", "make room there")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  save(directory, 50)  # once there is room
  assert_state(restore(directory)[1], 50)


def test_kill_in_the_middle_of_a_save(tmp_path):
  """SIGKILL at some moment of many saves: the newest whole one is there, and saving goes on."""
  command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path / "sft")]
  child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=PATHS)
  lines = iter(child.stdout)
  for line in lines:
    if int(line) >= 3:
      break
  time.sleep(0.1)
  child.send_signal(signal.SIGKILL)
  reported = [int(line) for line in lines]
  child.wait()
  child.stdout.close()
  update, got = restore(tmp_path / "sft")
  assert_state(got, update)
  # What was reported before the last save had begun is there.
  assert update >= max([3, *reported]) - 2
  save(tmp_path / "sft", update + 50)
  assert_state(restore(tmp_path / "sft")[1], update + 50)
