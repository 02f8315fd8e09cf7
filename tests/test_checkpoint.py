"""Check that checkpoints survive kills and full disks, and that damage is noticed."""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baar_jax.learn.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}
UNREADABLE = "cannot read checkpoint", "to continue from the previous checkpoint"

# Saves one update after another until it is killed. A state has the number of its update.
SAVE_FOR_EVER = """
import sys
from pathlib import Path
from tests.test_checkpoint import Checkpoints, state
checkpoints = Checkpoints(Path(sys.argv[1]), create=True)
for update in range(1, 10_000):
  checkpoints.save(update, state(update))
  print(update, flush=True)
"""


def state(value: float):
  """A tree like that of a training: named and numbered leaves, and a scalar."""
  params = {
    "layers": {"kernel": jnp.full((2, 30, 7), value, jnp.float32)},
    "norm": jnp.ones(5),
  }
  optimizer = [
    jnp.array(int(value), jnp.int32),
    jnp.arange(6, dtype=jnp.float32) * value,
  ]
  return {"params": params, "optimizer": optimizer}


def save(directory: Path, *updates: int) -> None:
  with contextlib.closing(Checkpoints(directory, create=True)) as checkpoints:
    for update in updates:
      checkpoints.save(update, state(update))


def restore(directory: Path, like=None):
  with contextlib.closing(Checkpoints(directory)) as checkpoints:
    return checkpoints.last_update, checkpoints.restore(like or state(0))


def assert_restored(directory: Path, update: int) -> None:
  newest, got = restore(directory)
  assert newest == update
  jax.tree.map(np.testing.assert_array_equal, got, state(update))


def assert_refused(directory: Path, like=None) -> None:
  """Check that checkpoint 20 is refused, in one line with its directory and the advice."""
  with pytest.raises(ValueError) as error:
    restore(directory, like)
  message, texts = str(error.value), (str(directory / "20"), *UNREADABLE)
  assert "\n" not in message and all(text in message for text in texts), message


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A directory with the checkpoints of updates 10 and 20. Tests copy it."""
  directory = tmp_path_factory.mktemp("whole") / "sft"
  save(directory, 5, 10)
  save(directory, 20)  # the newest two are kept
  assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == [
    "10",
    "20",
  ]
  return directory


def test_a_checkpoint_is_read_without_unpickling(whole, monkeypatch):
  for name in ("load", "loads", "Unpickler", "_Unpickler"):
    monkeypatch.setattr(pickle, name, None)
  assert_restored(whole, 20)


def test_a_checkpoint_of_another_structure_is_refused(whole):
  for params in (state(0)["params"] | {"norm": jnp.ones(6)}, {"norm": jnp.ones(5)}):
    assert_refused(whole, state(0) | {"params": params})


DAMAGES = {
  "gone": lambda path: path.unlink(),
  "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
  "garbage": lambda path: path.write_bytes(
    bytes(byte ^ 0x5A for byte in path.read_bytes())
  ),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_of_a_needed_file_is_noticed(whole, tmp_path, how):
  """With any one file damaged, there are right values or an error, never wrong values."""
  noticed = 0
  for number, file in enumerate(
    path for path in (whole / "20").rglob("*") if path.is_file()
  ):
    directory = shutil.copytree(whole, tmp_path / str(number))
    DAMAGES[how](directory / file.relative_to(whole))
    try:
      assert_restored(directory, 20)
    except ValueError:
      assert_refused(directory)
      noticed += 1
      shutil.rmtree(directory / "20")  # as the message advises
      assert_restored(directory, 10)
  assert noticed > 1


# Writes a checkpoint. A limit of the size of files stands for a full disk.
FAIL = """
import resource, sys
from pathlib import Path
from tests.test_checkpoint import save
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
  save(Path(sys.argv[1]), 30)
except ValueError as error:
  print(error)
"""


def test_a_full_disk_is_an_error_of_one_line(whole, tmp_path):
  """It names the newest checkpoint. Nothing else is printed, though Orbax uses threads."""
  directory = shutil.copytree(whole, tmp_path / "sft")
  command = [sys.executable, "-c", FAIL, str(directory)]
  result = subprocess.run(
    command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
  )
  (line,) = result.stdout.splitlines()
  assert result.stderr == "" and "free disk space and run" in line
  assert line.startswith(f"cannot write a checkpoint; the newest is {directory}/20 (")
  save(directory, 50)  # when there is room again
  assert_restored(directory, 50)


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path):
  """SIGKILL comes at some moment of many saves. Afterwards, saving goes on."""
  command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path / "sft")]
  child = subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
  )
  with child:
    lines = iter(child.stdout)
    next(line for line in lines if int(line) >= 3)
    time.sleep(0.1)
    child.send_signal(signal.SIGKILL)
    reported = [int(line) for line in lines]
  update = restore(tmp_path / "sft")[0]
  assert_restored(tmp_path / "sft", update)
  # All checkpoints are there that were reported before the last save began.
  assert update >= max([3, *reported]) - 2
  save(tmp_path / "sft", update + 50)
  assert_restored(tmp_path / "sft", update + 50)
