"""Engines that need a Python environment of their own: where it is, and how it is made."""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import baar_jax

ROOT = str(Path(baar_jax.__file__).parents[1])
OWN = "own"  # --config.env.data for what this project makes itself
# In an engine's Python this project is found last, so that nothing of it shadows the engine's.
RUN_MODULE = (
  "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
  "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
# All that an engine's process is told: what an agent's code can read holds no keys.
PASSED_TO_ENGINES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")


@dataclasses.dataclass(frozen=True)
class Engine:
  """What is installed, and how.

  Attributes:
    title: its name in messages.
    packages: pinned, the engine itself first.
    programs: without which it cannot be built.
    install: arguments of its Python that end the installation.
    data_variable: the environment variable that names the directory of its data.
    unusable: what the path of its data must not contain.
  """

  title: str
  packages: tuple[str, ...]
  programs: tuple[str, ...]
  install: tuple[str, ...]
  data_variable: str
  unusable: str | None = None

  @property
  def version(self) -> str:
    return self.packages[0].partition("==")[2]


ENGINES = {
  "alfworld": Engine(
    title="ALFWorld",
    packages=("alfworld==0.4.2", "textworld==1.7.0", "fast-downward-textworld==20.6.4"),
    programs=("g++", "make"),
    install=(),
    data_variable="ALFWORLD_DATA",
  ),
  "appworld": Engine(
    title="AppWorld",
    packages=("appworld==0.1.3.post1",),
    programs=(),
    install=("-m", "appworld.cli", "install"),
    data_variable="APPWORLD_ROOT",
    unusable="memory",  # it takes such a path for a database in memory
  ),
}


def cache() -> Path:
  """Where engines and what is made for them are kept: $BAAR_JAX_CACHE, else the user's cache."""
  own = os.environ.get("BAAR_JAX_CACHE")
  user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
  return Path(own).absolute() if own else Path(user).absolute() / "baar_jax"


def setup_command(kind: str) -> str:
  return f"python main.py --stage=setup --config=configs/{kind}.py"


def directory(kind: str) -> Path:
  """Of the engine's Python environment."""
  return cache() / f"{kind}-{ENGINES[kind].version}"


def installed(kind: str) -> bool:
  """Whether the environment is complete, of the pinned packages, and its Python is still there."""
  marker = _marker(kind)
  packages = marker.read_text().splitlines() if marker.exists() else []
  return packages == list(ENGINES[kind].packages) and (directory(kind) / "bin" / "python").exists()


def check_version(kind: str) -> None:
  """For the engine's own Python: raises ValueError unless it has the pinned version."""
  try:
    found = importlib.metadata.version(kind)
  except importlib.metadata.PackageNotFoundError:
    found = "none"
  engine = ENGINES[kind]
  if found != engine.version:
    raise ValueError(
      f"{engine.title} {engine.version} is needed, {found} is installed: delete {sys.prefix} and "
      f"run: {setup_command(kind)}"
    )


def _marker(kind: str) -> Path:
  return directory(kind) / "installed.txt"


def python_of(kind: str) -> list[str]:
  """The command that runs a module of this project for an environment of this kind.

  Raises:
    ValueError: its engine is not installed.
  """
  if kind not in ENGINES:
    return [sys.executable, "-m"]
  if not installed(kind):
    raise ValueError(f"{ENGINES[kind].title} is not installed; run: {setup_command(kind)}")
  return [str(directory(kind) / "bin" / "python"), "-I", "-B", "-c", RUN_MODULE, ROOT]


def environ_of(kind: str) -> dict[str, str]:
  """The environment variables of its process."""
  if kind in ENGINES:
    return {name: os.environ[name] for name in PASSED_TO_ENGINES if name in os.environ}
  paths = [ROOT] + [path for path in [os.environ.get("PYTHONPATH")] if path]
  return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
  """One process at a time makes what `name` stands for; the others wait for it."""
  cache().mkdir(parents=True, exist_ok=True)
  with (cache() / f"{name}.lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def install(kind: str) -> bool:
  """Makes the engine's Python environment unless it is there. Returns whether it was made.

  Raises:
    ValueError: a program is missing, or the installation failed.
  """
  engine, place = ENGINES[kind], directory(kind)
  if engine.unusable and engine.unusable in str(place):
    raise ValueError(
      f"{engine.title} cannot use {cache()}, whose name contains {engine.unusable!r}: set "
      "BAAR_JAX_CACHE to another directory"
    )
  with locked(place.name):
    if installed(kind):
      return False
    missing = [name for name in engine.programs if not shutil.which(name)]
    if missing:
      raise ValueError(
        f"{engine.title} is compiled when it is installed, and {' and '.join(missing)} cannot be "
        "found: install a C++ compiler and make (Debian: apt-get install g++ make)"
      )
    print(f"installing {engine.title} {engine.version} into {place}", file=sys.stderr)
    shutil.rmtree(place, ignore_errors=True)  # of an installation that was broken off
    python = str(place / "bin" / "python")
    log = cache() / f"{place.name}.log"
    commands = [
      [sys.executable, "-m", "venv", str(place)],
      [python, "-m", "pip", "install", *engine.packages],
    ]
    if engine.install:
      commands.append([python, *engine.install])
    # The builds call `python`, which is the environment's own.
    path = os.pathsep.join([str(place / "bin"), os.environ.get("PATH", os.defpath)])
    environ = os.environ | {"PATH": path}
    with log.open("w") as output:
      for command in commands:
        done = subprocess.run(
          command,
          stdin=subprocess.DEVNULL,
          stdout=output,
          stderr=output,
          env=environ,
        )
        if done.returncode:
          raise ValueError(f"{' '.join(command)} failed; what it said is in {log}")
    _marker(kind).write_text("\n".join(engine.packages))
    return True


def run_module(kind: str, module: str, *arguments: str) -> str:
  """Runs a module of this project in the engine's Python and returns what it printed."""
  return output_of(module, [*python_of(kind), module, *arguments], environ_of(kind))


def output_of(name: str, command: list[str], environ: dict[str, str] | None = None) -> str:
  """What a command prints. Raises ValueError with its last line of errors if it fails."""
  done = subprocess.run(
    command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ
  )
  if done.returncode:
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise ValueError(f"{name} failed: {last}")
  return done.stdout


def wants_own_data(kind: str, data: str) -> bool:
  """Whether the tasks are those that this project makes; the arguments are those of `data_of`."""
  return data == OWN or (_named(kind, data) is None and not downloaded_data(kind).is_dir())


def _named(kind: str, data: str) -> tuple[Path, str] | None:
  """The directory that the user named, and where."""
  if data == OWN:
    return None
  variable = ENGINES[kind].data_variable
  place = data or os.environ.get(variable)
  return (
    (Path(place).absolute(), "--config.env.data" if data else f"${variable}") if place else None
  )


def data_of(kind: str, data: str) -> Path:
  """The directory of an engine's data.

  Args:
    data: a directory; "own" is what --stage=setup makes; "" is the directory that the engine's
      environment variable names, else what --stage=setup has downloaded, else what it has made.

  Raises:
    ValueError: there is no such directory.
  """
  named = _named(kind, data)
  if named:
    place, where = named
    if not place.is_dir():
      raise ValueError(f"{place}, named by {where}, is not a directory")
    return place
  place = own_data(kind) if wants_own_data(kind, data) else downloaded_data(kind)
  if not place.is_dir():
    raise ValueError(f"{ENGINES[kind].title} has no tasks yet; run: {setup_command(kind)}")
  return place


def own_data(kind: str) -> Path:
  """Where --stage=setup puts the tasks that this project makes."""
  return cache() / f"{kind}-own"


def downloaded_data(kind: str) -> Path:
  """Where --stage=setup puts the data that it downloads."""
  return cache() / f"{kind}-data"
