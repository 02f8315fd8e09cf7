"""The directory that AppWorld's engine works in: one per process, with a link to the data."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from baar_jax.envs.engines import check_version

ROOT_NAME = "baar_jax-appworld-"


def check(data: Path) -> None:
  """Raises ValueError if AppWorld is not as expected or cannot use the directory."""
  check_version("appworld")
  for place, remedy in (
    (data.parent, "move it, or set BAAR_JAX_CACHE"),
    (Path(tempfile.gettempdir()), "set TMPDIR"),
  ):
    if "memory" in str(place):
      raise ValueError(f"AppWorld cannot use {place}, whose name contains 'memory': {remedy}")
  if not (data / "datasets").is_dir():
    raise ValueError(
      f"{data.parent} is no data of AppWorld ({data / 'datasets'} is missing); get it with "
      "`appworld download data`, or take tasks made here with --config.env.data=own"
    )


def make_root(data: Path) -> tuple[Path, IO]:
  """A temporary directory with a link to the data, and the lock that says it is in use.

  Those whose process was killed are removed on the way.
  """
  for lock in Path(tempfile.gettempdir()).glob(f"{ROOT_NAME}*/lock"):
    try:
      with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    except OSError:
      continue  # it is in use, or another's
  root = Path(tempfile.mkdtemp(prefix=ROOT_NAME))
  (root / "data").symlink_to(data)
  file = (root / "lock.tmp").open("w")
  fcntl.flock(file, fcntl.LOCK_EX)
  os.rename(root / "lock.tmp", root / "lock")
  return root, file
