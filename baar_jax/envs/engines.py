"""Engines that need a Python environment each: where it is, and how it is installed."""

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import baar_jax

ROOT = str(Path(baar_jax.__file__).parents[1])
GENERATED = "own"  # --config.env.data for the tasks that this project generates
# An engine's Python looks for modules in this project last, so that none shadows the engine's.
RUN_MODULE = (
  "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
  "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
PASSED_TO_ENGINES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")


@dataclasses.dataclass(frozen=True)
class Engine:
  title: str  # its name in messages
  packages: tuple[str, ...]  # pinned, the engine itself first
  data_variable: str  # the environment variable that names the directory of its data
  programs: tuple[str, ...] = ()  # those that its build needs
  install: tuple[str, ...] = ()  # arguments of its Python that end the installation

  @property
  def version(self) -> str:
    return self.packages[0].partition("==")[2]


ENGINES = {
  "alfworld": Engine(
    title="ALFWorld",
    packages=("alfworld==0.4.2", "textworld==1.7.0", "fast-downward-textworld==20.6.4"),
    data_variable="ALFWORLD_DATA",
    programs=("g++", "make"),
  ),
  "appworld": Engine(
    title="AppWorld",
    packages=("appworld==0.1.3.post1",),
    data_variable="APPWORLD_ROOT",
    install=("-m", "appworld.cli", "install"),
  ),
}


def cache() -> Path:
  """Where engines and their data are kept: $BAAR_JAX_CACHE, else the user's cache."""
  user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
  return Path(os.environ.get("BAAR_JAX_CACHE") or user / "baar_jax").absolute()


def setup_command(kind: str) -> str:
  return f"python main.py --stage=setup --config=configs/{kind}.py"


def directory(kind: str) -> Path:  # of the engine's Python environment
  return cache() / f"{kind}-{ENGINES[kind].version}"


def python_path(kind: str) -> Path:
  return directory(kind) / "bin" / "python"


def generated_data(kind: str) -> Path:
  return cache() / f"{kind}-own"


def downloaded_data(kind: str) -> Path:
  return cache() / f"{kind}-data"


def is_installed(kind: str) -> bool:
  """Whether the environment is complete, of the pinned packages, and still has its Python."""
  marker = directory(kind) / "installed.txt"
  packages = marker.read_text().splitlines() if marker.exists() else []
  return packages == list(ENGINES[kind].packages) and python_path(kind).exists()


def python_of(kind: str) -> list[str]:
  """The command that runs a module of this project where environments of this kind can run.

  Raises ValueError if their engine is not installed.
  """
  if kind not in ENGINES:
    return [sys.executable, "-c", RUN_MODULE, ROOT]
  if not is_installed(kind):
    raise ValueError(f"{ENGINES[kind].title} is not installed; run: {setup_command(kind)}")
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


def install(kind: str) -> None:
  """Installs the engine's Python environment unless it is complete.

  Raises ValueError if a program is missing or the installation failed.
  """
  engine, place, python = ENGINES[kind], directory(kind), str(python_path(kind))
  with lock(place.name):
    if is_installed(kind):
      return
    if missing := [name for name in engine.programs if not shutil.which(name)]:
      problem = f"{engine.title} is compiled, and {' and '.join(missing)} cannot be found: install"
      raise ValueError(f"{problem} a C++ compiler and make (Debian: apt-get install g++ make)")
    print(f"installing {engine.title} {engine.version} into {place}", file=sys.stderr)
    shutil.rmtree(place, ignore_errors=True)  # of an interrupted installation
    commands = [[sys.executable, "-m", "venv", str(place)]]
    commands += [[python, "-m", "pip", "install", *engine.packages]]
    commands += [[python, *engine.install]] if engine.install else []
    # The builds call `python`, which has to be the environment's.
    path = os.pathsep.join([str(place / "bin"), os.environ.get("PATH", os.defpath)])
    log = cache() / f"{place.name}.log"
    with log.open("w") as output:
      streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
      for command in commands:
        if subprocess.run(command, env=os.environ | {"PATH": path}, **streams).returncode:
          raise ValueError(f"{' '.join(command)} failed; its output is in {log}")
    (place / "installed.txt").write_text("\n".join(engine.packages))


def run_module(kind: str, module: str, *arguments: str) -> str:
  """Runs a module of this project in the engine's Python and returns what it printed."""
  return output_of(module, [*python_of(kind), module, *arguments], environ_of(kind))


def output_of(
  name: str, command: list[str], environ: dict | None = None, timeout_s: float | None = None
) -> str:
  """What a command prints. Raises ValueError with its last line of errors if it fails."""
  options = {"capture_output": True, "text": True, "env": environ, "timeout": timeout_s}
  try:
    done = subprocess.run(command, input="", **options)
  except subprocess.TimeoutExpired:
    raise ValueError(f"{name} took more than {timeout_s:g} s") from None
  if done.returncode:
    last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
    raise ValueError(f"{name} failed: {last}")
  return done.stdout


def data_of(kind: str, data: str) -> Path:
  """The directory of an engine's data, which may have to be downloaded or generated yet.

  `data` is a directory; "own" is what --stage=setup generates; "" is the directory that the
  engine's environment variable names, else what --stage=setup has downloaded, else what it
  generates. Raises ValueError if a named directory does not exist.
  """
  place, variable = generated_data(kind), ENGINES[kind].data_variable
  named = data or os.environ.get(variable)
  if named and data != GENERATED:
    place = Path(named).absolute()
    if not place.is_dir():
      raise ValueError(f"{place}, named by --config.env.data or ${variable}, is not a directory")
  elif not data and downloaded_data(kind).is_dir():
    place = downloaded_data(kind)
  return place


def uses_generated_data(kind: str, data: str) -> bool:
  return data_of(kind, data) == generated_data(kind)


def existing_data(kind: str, data: str) -> Path:
  """The directory of `data_of`. Raises ValueError if it has yet to be generated."""
  place = data_of(kind, data)
  if not place.is_dir():
    raise ValueError(f"{ENGINES[kind].title} has no tasks yet; run: {setup_command(kind)}")
  return place
