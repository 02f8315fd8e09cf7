"""Engines that need a Python of their own: their installation, and their data."""

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
# An engine's Python looks for modules in this project last, so that none shadows the
# engine's.
RUN_MODULE = (
  "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
  "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
PASSED_TO_ENGINES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")


def cache() -> Path:
  """Return the directory of engines and their data.

  It is $BAAR_JAX_CACHE, else in the user's cache.
  """
  user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
  return Path(os.environ.get("BAAR_JAX_CACHE") or user / "baar_jax").absolute()


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
  """Let one process at a time produce the thing of this name; the others wait."""
  cache().mkdir(parents=True, exist_ok=True)
  with (cache() / f"{name}.lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def output_of(name: str, command: list[str], environ: dict | None = None) -> str:
  """Return what a command prints.

  Raises:
    ValueError: it fails; with its name and its last line of errors.
  """
  done = subprocess.run(command, input="", capture_output=True, text=True, env=environ)
  if done.returncode:
    errors = done.stderr.strip().splitlines() or ["it printed no error"]
    raise ValueError(f"{name} failed: {errors[-1]}")
  return done.stdout


def no_warning() -> str:
  """Return the warning of an engine that needs none."""
  return ""


@dataclasses.dataclass(frozen=True)
class Engine:
  """An engine of the environment whose name its first package has."""

  packages: tuple[str, ...]  # pinned, the engine itself first
  data_variable: str  # the environment variable that names the directory of its data
  download: str  # the command of its Python environment that brings the real data
  needs: str = ""  # what has to be there before the installation
  install_arguments: tuple[str, ...] = ()  # of its Python, to end the installation
  warning: Callable[[], str] = no_warning  # what this machine lacks, in a line

  @property
  def name(self) -> str:
    return self.packages[0].partition("==")[0]

  @property
  def directory(self) -> Path:  # of its Python environment
    return cache() / self.packages[0].replace("==", "-")

  @property
  def python(self) -> Path:
    return self.directory / "bin" / "python"

  @property
  def generated_data(self) -> Path:
    return cache() / f"{self.name}-own"

  @property
  def remedy(self) -> str:
    return f"run: python main.py --stage=setup --config=configs/{self.name}.py"

  def is_installed(self) -> bool:
    """Tell whether the pinned packages are complete and their Python is there."""
    marker = self.directory / "installed.txt"
    installed = marker.read_text().split() if marker.exists() else []
    return installed == [*self.packages] and self.python.exists()

  def install(self) -> None:
    """Install the Python environment unless it is complete.

    Raises:
      ValueError: a command fails.
    """
    place = self.directory
    with lock(place.name):
      if self.is_installed():
        return
      print(f"installing into {place}", file=sys.stderr)
      python = str(self.python)
      # What an interrupted installation has left is cleared.
      commands = [[sys.executable, "-m", "venv", "--clear", str(place)]]
      commands.append([python, "-m", "pip", "install", *self.packages])
      if self.install_arguments:
        commands.append([python, *self.install_arguments])
      # The builds call `python`, which has to be the environment's.
      path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
      for command in commands:
        name = " ".join(command) + self.needs
        output_of(name, command, os.environ | {"PATH": path})
      (place / "installed.txt").write_text("\n".join(self.packages))

  def make_tasks(self, place: Path, sizes: Iterable[int]) -> None:
    """Generate the tasks that a directory lacks, in the engine's Python.

    Args:
      place: the directory.
      sizes: of SPLITS.
    """
    maker = f"baar_jax.envs.{self.name}.tasks"
    command = [*command_of(self), maker, str(place), *map(str, sizes)]
    output_of(maker, command, environ_of(self))

  def set_up(self, data: str, sizes: Iterable[int], say: Callable[[str], None]) -> None:
    """Install the engine and, unless data are named, generate tasks.

    What is there already stays.

    Args:
      data: the option; see `named_data`.
      sizes: of SPLITS.
      say: takes each line about what was done.

    Raises:
      ValueError: something fails.
    """
    self.install()
    say(f"the engine of {self.name} is in {self.directory}")
    if warning := self.warning():
      say(warning)
    if not self.named_data(data):
      say(f"generating tasks in {self.generated_data}")
      say(f"real ones come by {self.python.parent}/{self.download}")
      with lock(self.generated_data.name):
        self.make_tasks(self.generated_data, sizes)

  def named_data(self, data: str) -> str:
    """Return the directory that an option or else the variable names; "" is none."""
    return data or os.environ.get(self.data_variable, "")

  def existing_data(self, data: str) -> str:
    """Return the directory that is named, else that of generated tasks.

    Raises:
      ValueError: it does not exist.
    """
    place = Path(self.named_data(data) or self.generated_data).absolute()
    if not place.is_dir():
      remedy = (
        f"set --config.env.options.data or ${self.data_variable}, or {self.remedy}"
      )
      raise ValueError(f"{self.name} has no data in {place}: {remedy}")
    return str(place)


def command_of(engine: Engine | None) -> list[str]:
  """Return the command that runs a module of this project, in the engine's Python.

  Raises:
    ValueError: the engine is not installed.
  """
  if engine is None:
    return [sys.executable, "-c", RUN_MODULE, ROOT]
  if not engine.is_installed():
    raise ValueError(f"the engine of {engine.name} is not installed; {engine.remedy}")
  return [str(engine.python), "-I", "-B", "-c", RUN_MODULE, ROOT]


def environ_of(engine: Engine | None) -> dict[str, str]:
  """Return the environment variables of a process; an engine's gets no keys."""
  if engine is None:
    return dict(os.environ)
  return {name: os.environ[name] for name in PASSED_TO_ENGINES if name in os.environ}


def hide_process() -> None:
  """Keep other processes of this user from this one's environment, files and memory."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
