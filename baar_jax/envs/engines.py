"""Engines that need a Python environment each: how they are installed, and where their data are."""

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import baar_jax
from baar_jax.envs.appworld_shell import landlock_version

ROOT = str(Path(baar_jax.__file__).parents[1])
SET_UP = "run: python main.py --stage=setup --config=configs/{}.py"
# An engine's Python looks for modules in this project last, so that none shadows the engine's.
RUN_MODULE = (
  "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
  "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
PASSED_TO_ENGINES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")


@dataclasses.dataclass(frozen=True)
class Engine:
  packages: tuple[str, ...]  # pinned, the engine itself first
  data_variable: str  # the environment variable that names the directory of its data
  download: str  # the command of its Python environment that brings the real data
  maker: str  # the module that generates tasks; its arguments are a directory and the splits' sizes
  needs: str = ""  # what has to be there before the installation
  install: tuple[str, ...] = ()  # arguments of its Python that end the installation


ENGINES = {
  "alfworld": Engine(
    packages=("alfworld==0.4.2", "textworld==1.7.0", "fast-downward-textworld==20.6.4"),
    data_variable="ALFWORLD_DATA",
    download="alfworld-download --data-dir $ALFWORLD_DATA",
    maker="baar_jax.envs.alfworld_games",
    needs=", which takes a C++ compiler and make (Debian: apt-get install g++ make),",
  ),
  "appworld": Engine(
    packages=("appworld==0.1.3.post1",),
    data_variable="APPWORLD_ROOT",
    download="appworld download data --root $APPWORLD_ROOT",
    maker="baar_jax.envs.appworld_tasks",
    install=("-m", "appworld.cli", "install"),
  ),
}


def cache() -> Path:
  """Where engines and their data are kept: $BAAR_JAX_CACHE, else the user's cache."""
  user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
  return Path(os.environ.get("BAAR_JAX_CACHE") or user / "baar_jax").absolute()


def directory(kind: str) -> Path:  # of the engine's Python environment
  return cache() / ENGINES[kind].packages[0].replace("==", "-")


def python_path(kind: str) -> Path:
  return directory(kind) / "bin" / "python"


def is_installed(kind: str) -> bool:
  """Whether the environment is complete, of the pinned packages, and still has its Python."""
  marker = directory(kind) / "installed.txt"
  packages = marker.read_text().split() if marker.exists() else []
  return packages == [*ENGINES[kind].packages] and python_path(kind).exists()


def python_of(kind: str) -> list[str]:
  """The command that runs a module of this project where environments of this kind can run.

  Raises ValueError if their engine is not installed.
  """
  if kind not in ENGINES:
    return [sys.executable, "-c", RUN_MODULE, ROOT]
  if not is_installed(kind):
    raise ValueError(f"the engine of {kind} is not installed; {SET_UP.format(kind)}")
  return [str(python_path(kind)), "-I", "-B", "-c", RUN_MODULE, ROOT]


def environ_of(kind: str) -> dict[str, str]:
  """The environment variables of a process; an engine's gets no keys."""
  passed = PASSED_TO_ENGINES if kind in ENGINES else os.environ
  return {name: os.environ[name] for name in passed if name in os.environ}


def hide_process() -> None:
  """Keeps other processes of this user from the environment, files and memory of this one."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
  """Lets one process at a time produce what `name` stands for; the others wait."""
  cache().mkdir(parents=True, exist_ok=True)
  with (cache() / f"{name}.lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def set_up(kind: str, data: str, sizes: Iterable[int], say: Callable[[str], None]) -> None:
  """Installs an engine and, where no data are named, generates tasks, `sizes` of SPLITS.

  What is there already stays. Raises ValueError if something fails.
  """
  engine, place = ENGINES[kind], generated_data(kind)
  install(kind)
  say(f"setup: the engine of {kind} is in {directory(kind)}")
  if kind == "appworld" and landlock_version() < 1:
    say("setup: without Landlock (Linux 5.13) Python alone keeps agents' code from files")
  if not named_data(kind, data):
    say(f"setup: generating tasks in {place}")
    say(f"setup: real ones come by {directory(kind)}/bin/{engine.download}")
    with lock(place.name):
      make_tasks(kind, place, sizes)


def install(kind: str) -> None:
  """Installs the engine's Python environment unless it is complete; ValueError if that fails."""
  engine, place, python = ENGINES[kind], directory(kind), str(python_path(kind))
  with lock(place.name):
    if is_installed(kind):
      return
    print(f"installing into {place}", file=sys.stderr)
    # What an interrupted installation has left is cleared.
    commands = [[sys.executable, "-m", "venv", "--clear", str(place)]]
    commands += [[python, "-m", "pip", "install", *engine.packages]]
    commands += [[python, *engine.install]] if engine.install else []
    # The builds call `python`, which has to be the environment's.
    path = os.pathsep.join([str(place / "bin"), os.environ.get("PATH", os.defpath)])
    for command in commands:
      output_of(" ".join(command) + engine.needs, command, os.environ | {"PATH": path})
    (place / "installed.txt").write_text("\n".join(engine.packages))


def make_tasks(kind: str, place: Path, sizes: Iterable[int]) -> None:
  """Generates the tasks that a directory lacks, in the engine's Python."""
  maker = ENGINES[kind].maker
  output_of(maker, [*python_of(kind), maker, str(place), *map(str, sizes)], environ_of(kind))


def output_of(name: str, command: list[str], environ: dict | None = None) -> str:
  """What a command prints. Raises ValueError with its last line of errors if it fails."""
  done = subprocess.run(command, input="", capture_output=True, text=True, env=environ)
  if done.returncode:
    last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
    raise ValueError(f"{name} failed: {last}")
  return done.stdout


def named_data(kind: str, data: str) -> str:
  """The directory that `data` or else the engine's environment variable names; "" is none."""
  return data or os.environ.get(ENGINES[kind].data_variable, "")


def generated_data(kind: str) -> Path:
  return cache() / f"{kind}-own"


def existing_data(kind: str, data: str) -> Path:
  """The directory that is named, else that of generated tasks; ValueError if it is missing."""
  place = Path(named_data(kind, data) or generated_data(kind)).absolute()
  if not place.is_dir():
    remedy = f"set --config.env.data or ${ENGINES[kind].data_variable}, or {SET_UP.format(kind)}"
    raise ValueError(f"{kind} has no data in {place}: {remedy}")
  return place
