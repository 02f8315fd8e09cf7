"""Exchange the router of a run with another one that is kept beside it."""

import shutil
from pathlib import Path

from baar_jax.run import VOCABULARY
from baar_jax.store import lock

# The directories of the new router until the verdict, and of the one before.
AGAIN = "again"
OLDER = "older"
CONFIG = "config.json"
# What belongs to a router in the directory of its run.
FILES = (CONFIG, VOCABULARY, "checkpoints")
# The end of the name of the directory that exists during an exchange.
SPARE = "-spare"


def exchange_routers(run_dir: Path, name: str) -> None:
  """Serve the router in a directory of a run; the one before becomes the older one.

  Every move may be repeated, so that `finish_exchange` can go on after a kill.

  Args:
    run_dir: the directory of the run.
    name: the directory in it, AGAIN or OLDER.
  """
  new = run_dir / name
  spare = run_dir / f"{name}{SPARE}"
  spare.mkdir(exist_ok=True)
  for file in FILES:
    if not (spare / file).exists():
      (run_dir / file).rename(spare / file)
  for file in FILES:
    if (new / file).exists():
      (new / file).rename(run_dir / file)
  shutil.rmtree(new, ignore_errors=True)
  shutil.rmtree(run_dir / OLDER, ignore_errors=True)
  spare.rename(run_dir / OLDER)


def finish_exchange(run_dir: Path) -> None:
  """Finish an exchange of routers that was killed.

  Raises:
    ValueError: another program uses the run.
  """
  for name in (AGAIN, OLDER):
    if (run_dir / f"{name}{SPARE}").exists():
      with lock(run_dir / "lock"):
        exchange_routers(run_dir, name)
