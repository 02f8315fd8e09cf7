"""Stage setup: installs what an environment needs, and gets or makes its tasks."""

import os
import shutil
import subprocess
from pathlib import Path

from baar_jax.envs import engines
from baar_jax.run import Run

# What makes tasks, run in the engine's own Python: MODULE DIRECTORY TRAIN_TASKS TEST_TASKS.
MAKERS = {"alfworld": "baar_jax.envs.alfworld_games", "appworld": "baar_jax.envs.appworld_tasks"}
# What downloads an engine's data into the directory that its variable names, as arguments of its
# Python, and what is there when it is complete.
DOWNLOADS = {"appworld": (("-I", "-m", "appworld.cli", "download", "data"), "data/datasets/*.txt")}
DOWNLOAD_S = 180.0


def main(run: Run) -> None:
  """Installs the engine and sees to its data, each only where it is missing.

  Raises:
    ValueError: the installation failed, or the data that was named is not there.
  """
  c = run.config.env
  if c.kind not in engines.ENGINES:
    run.say(f"setup: {c.kind} needs nothing more")
    return
  engine = engines.ENGINES[c.kind]
  engines.install(c.kind)
  run.say(f"setup: {engine.title} {engine.version} in {engines.directory(c.kind)}")
  own = engines.own_data(c.kind)
  if may_download(c.kind, c.data):
    why_not = download(c.kind)
    if why_not:
      run.say(
        f"setup: {engine.title}'s data could not be downloaded ({why_not}); our own tasks instead"
      )
  if engines.wants_own_data(c.kind, c.data):
    with engines.locked(own.name):
      sizes = (str(c.train_tasks), str(c.test_tasks))
      run.say(f"setup: making tasks in {own} where they are missing")
      engines.run_module(c.kind, MAKERS[c.kind], str(own), *sizes)
  data = engines.data_of(c.kind, c.data)
  made = ", made by this project" if data == own else ""
  run.say(f"setup: its tasks in {data}{made}")
  run.tasks("train")  # shows whether they can be used


def may_download(kind: str, data: str) -> bool:
  """Whether data can be downloaded, and nobody named, downloaded or made any before."""
  wanted = data != engines.OWN and engines.wants_own_data(kind, data)
  return kind in DOWNLOADS and wanted and not engines.own_data(kind).is_dir()


def download(kind: str, timeout_s: float = DOWNLOAD_S) -> str:
  """Downloads an engine's data; it is there as a whole or not at all.

  Returns:
    "", or why there is none.
  """
  arguments, complete = DOWNLOADS[kind]
  place = engines.downloaded_data(kind)
  part = place.with_name(f"{place.name}.part")
  with engines.locked(place.name):
    if place.is_dir():  # another process was faster
      return ""
    shutil.rmtree(part, ignore_errors=True)  # of a download that was broken off
    part.mkdir(parents=True)
    why_not = _download(kind, arguments, part, timeout_s)
    if not why_not and not any(part.glob(complete)):
      why_not = f"it brought no {complete}"
    if why_not:
      shutil.rmtree(part, ignore_errors=True)
    else:
      os.replace(part, place)
  return why_not


def _download(kind: str, arguments: tuple[str, ...], part: Path, timeout_s: float) -> str:
  try:
    done = subprocess.run(
      [str(engines.directory(kind) / "bin" / "python"), *arguments],
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      # Wide, or its last line is only the end of what it says.
      env=os.environ | {engines.ENGINES[kind].data_variable: str(part), "COLUMNS": "2000"},
      timeout=timeout_s,
    )
  except subprocess.TimeoutExpired:
    return f"it took more than {timeout_s:g} s"
  if done.returncode:
    return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
  return ""
