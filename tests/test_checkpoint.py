"""Check that checkpoints survive full disks, and that damage is noticed."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import restore, save, state
from tiny import ROOT

# A program that saves an update. A limit of the size of files stands for a full disk.
# Only the error's text is printed.
SAVE = """
import resource, sys
from pathlib import Path
from baar_jax.learn.checkpoint import hide_repeated_errors
from tests.states import save
sys.excepthook = lambda kind, error, trace: print(error, file=sys.stderr)
hide_repeated_errors()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
save(Path(sys.argv[1]), 30)
"""


def assert_restored(directory: Path, update: int) -> None:
  newest, got = restore(directory)
  assert newest == update
  jax.tree.map(np.testing.assert_array_equal, got, state(update))


def assert_refused(directory: Path, like=None) -> None:
  """Check that checkpoint 20 is refused, in one line with its directory and the advice."""
  advice = "remove this directory .* continue from the previous checkpoint"
  with pytest.raises(ValueError, match=f"^cannot read checkpoint .*/20 .*{advice}$"):
    restore(directory, like)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A directory with the checkpoints of updates 10 and 20. Tests copy it."""
  directory = tmp_path_factory.mktemp("whole") / "sft"
  save(directory, 5, 10)
  save(directory, 20)  # the newest two are kept
  assert {path.name for path in directory.glob("[0-9]*")} == {"10", "20"}
  return directory


def test_a_checkpoint_is_read_without_unpickling(whole, monkeypatch):
  for name in ("load", "loads", "Unpickler", "_Unpickler"):
    monkeypatch.setattr(pickle, name, None)
  assert_restored(whole, 20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_of_another_structure_is_refused(whole):
  for params in (state(0)["params"] | {"norm": jnp.ones(6)}, {"norm": jnp.ones(5)}):
    assert_refused(whole, state(0) | {"params": params})


def test_a_full_disk_is_an_error_of_one_line(whole, tmp_path):
  """It names the newest checkpoint. Nothing else is printed, though Orbax uses threads."""
  directory = shutil.copytree(whole, tmp_path / "sft")
  ended = subprocess.run(
    [sys.executable, "-c", SAVE, directory],
    cwd=ROOT,
    # Cut programs must not get into the cache that all tests share.
    env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"},
    stderr=subprocess.PIPE,
    text=True,
  )
  (line,) = ended.stderr.splitlines()
  newest = f"cannot write a checkpoint; the newest is {directory}/20 ("
  assert line.startswith(newest) and "free disk space and run" in line
  save(directory, 50)  # when there is room again
  assert_restored(directory, 50)
