"""Stage setup: installs what an environment needs, and downloads or generates its tasks."""

import os
import shutil

from baar_jax.envs import engines
from baar_jax.envs.appworld_shell import landlock_version
from baar_jax.episode import SPLITS
from baar_jax.run import Run

# What generates tasks, run in the engine's Python: MODULE DIRECTORY and the sizes of SPLITS.
MAKERS = {"alfworld": "baar_jax.envs.alfworld_games", "appworld": "baar_jax.envs.appworld_tasks"}
# The arguments of the engine's Python that download its data into the directory that its variable
# names, and the files that a complete download has.
DOWNLOADS = {"appworld": (("-I", "-m", "appworld.cli", "download", "data"), "data/datasets/*.txt")}


def main(run: Run) -> None:
  """Installs the engine and provides its data, each only where it is missing.

  Raises ValueError if the installation fails, or the data that the user named is missing.
  """
  c = run.config.env
  if c.kind not in engines.ENGINES:
    run.print(f"setup: {c.kind} needs nothing more")
    return
  engine, generated = engines.ENGINES[c.kind], engines.generated_data(c.kind)
  engines.install(c.kind)
  run.print(f"setup: {engine.title} {engine.version} in {engines.directory(c.kind)}")
  if c.kind == "appworld" and landlock_version() < 1:
    run.print("setup: without Landlock (Linux 5.13) Python alone keeps agents' code from files")
  lacking = not c.data and engines.uses_generated_data(c.kind, "") and not generated.is_dir()
  if c.kind in DOWNLOADS and lacking:
    try:
      download(c.kind)
    except ValueError as error:
      instead = "this project's tasks are used instead"
      run.print(f"setup: {engine.title}'s data could not be downloaded ({error}); {instead}")
  if engines.uses_generated_data(c.kind, c.data):
    run.print(f"setup: generating tasks in {generated} where they are missing")
    with engines.lock(generated.name):
      sizes = [str(getattr(c, f"{split}_tasks")) for split in SPLITS]
      engines.run_module(c.kind, MAKERS[c.kind], str(generated), *sizes)
  run.print(f"setup: its tasks in {engines.existing_data(c.kind, c.data)}")
  run.tasks("train")  # shows whether they can be used


def download(kind: str, timeout_s: float = 180.0) -> None:
  """Downloads an engine's data, as a whole or not at all. Raises ValueError if that fails."""
  (arguments, complete), place = DOWNLOADS[kind], engines.downloaded_data(kind)
  draft = place.with_name(f"{place.name}.part")  # readable by all, as caches may be shared
  with engines.lock(place.name):
    if place.is_dir():  # another process was faster
      return
    shutil.rmtree(draft, ignore_errors=True)  # of an interrupted download
    draft.mkdir()
    # The lines are wide, for of a failure only the last one is shown.
    environ = os.environ | {engines.ENGINES[kind].data_variable: str(draft), "COLUMNS": "2000"}
    try:
      command = [str(engines.python_path(kind)), *arguments]
      engines.output_of("the download", command, environ, timeout_s)
      if not any(draft.glob(complete)):
        raise ValueError(f"it brought no {complete}")
      os.replace(draft, place)
    finally:
      shutil.rmtree(draft, ignore_errors=True)
