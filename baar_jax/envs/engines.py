"""Install the engines that need a Python environment of their own; find their data."""

import dataclasses
import fcntl
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
# An engine's Python runs this short program, which starts a module of this project. The
# project's directory comes last in the search path, so that none of the project's files
# hides a module of the engine.
RUN_MODULE = (
  "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
  "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
# An engine's process gets only these environment variables, so it sees no API keys.
PASSED_TO_ENGINES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")
# Start of a command of bubblewrap. What it runs has no network, no other processes and
# no environment variables; it ends with the thread that has started it.
BUBBLEWRAP = (
  "bwrap",
  "--unshare-all",
  "--cap-drop",
  "ALL",
  "--die-with-parent",
  "--clearenv",
  "--dev",
  "/dev",
)
# Libraries and time zones of the system, which a Python program may need.
SYSTEM_FILES = (
  "/lib",
  "/lib64",
  "/usr/lib",
  "/usr/lib64",
  "/usr/share/zoneinfo",
  "/etc/ld.so.cache",
  "/etc/localtime",
)


def cache() -> Path:
  """Return the directory that contains the engines and the synthetic games.

  The directory is $BAAR_JAX_CACHE if set, else "baar_jax" in the user's cache
  directory. The cache directory of a user without a home is ".cache" in the directory
  of this process.
  """
  home = os.path.expanduser("~").replace("~", ".")
  user = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache")
  return Path(os.environ.get("BAAR_JAX_CACHE") or user / "baar_jax").absolute()


def output_of(name: str, command: list[str], environ: dict | None = None) -> str:
  """Run a command and return its standard output.

  Args:
    name: the name of the command, for the error message.
    command: the program and its arguments.
    environ: the environment variables; None passes those of this process.

  Raises:
    ValueError: the command fails. The message has the last line of its error output.
  """
  done = subprocess.run(command, input="", capture_output=True, text=True, env=environ)
  if done.returncode:
    errors = done.stderr.strip().splitlines() or ["it printed no error"]
    raise ValueError(f"{name} failed ({errors[-1]}): correct this and run again")
  return done.stdout


@dataclasses.dataclass(frozen=True)
class Engine:
  """An engine with a Python environment of its own.

  Attributes:
    packages: the packages to install, with versions, such as "alfworld==0.4.2". The
      first package is the engine, and gives `name`.
    data_variable: the environment variable in which a user names the directory of real
      games.
    download: the command that downloads real games. Its program is in the `bin` of the
      Python environment.
    needs: a clause with what the installation requires; the message of a failed
      installation contains this clause.
    install_arguments: the engine's Python is run with these arguments to finish the
      installation; no arguments mean that nothing is left to do.
    code_reads: the directory below the data that agents' code may read. Such an
      engine is run by bubblewrap; "" means that it runs no code of agents.
  """

  packages: tuple[str, ...]
  data_variable: str
  download: str
  needs: str = ""
  install_arguments: tuple[str, ...] = ()
  code_reads: str = ""

  @property
  def name(self) -> str:
    """Return the engine's name, such as "alfworld"."""
    return self.packages[0].partition("==")[0]

  @property
  def directory(self) -> Path:
    """Return the directory of the engine's Python environment."""
    return cache() / self.packages[0].replace("==", "-")

  @property
  def python(self) -> Path:
    """Return the path of the engine's Python program."""
    return self.directory / "bin" / "python"

  @property
  def generated_data(self) -> Path:
    """Return the directory of synthetic games, made by `tools/make_tasks.py`."""
    return cache() / f"{self.name}-own"

  def is_installed(self) -> bool:
    """Return whether an installation of the pinned packages was completed."""
    marker = self.directory / "installed.txt"
    installed = marker.read_text().split() if marker.exists() else []
    return installed == [*self.packages] and self.python.exists()

  def install(self) -> None:
    """Install the Python environment unless it is complete.

    Raises:
      ValueError: a command of the installation fails.
    """
    directory = self.directory
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"{directory.name}.lock").open("w") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)  # Another process would wait here.
      if self.is_installed():
        return
      print(f"installing into {directory}", file=sys.stderr)
      python = str(self.python)
      # --clear removes the files of an interrupted installation.
      commands = [[sys.executable, "-m", "venv", "--clear", str(directory)]]
      commands.append([python, "-m", "pip", "install", *self.packages])
      if self.install_arguments:
        commands.append([python, *self.install_arguments])
      # Builds of packages call `python`: PATH must lead to the engine's Python.
      path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
      for command in commands:
        name = " ".join(command) + self.needs
        output_of(name, command, os.environ | {"PATH": path})
      (directory / "installed.txt").write_text("\n".join(self.packages))

  def named_data(self, data: str) -> str:
    """Return the directory of tasks that the user has named, in either of two ways.

    Args:
      data: the environment's option `data`; "" if the option is not set.

    Returns:
      The option if set, else the value of `data_variable`, else "".
    """
    return data or os.environ.get(self.data_variable, "")

  def find_data(self, data: str) -> Path:
    """Return the absolute path of the directory of tasks, which may not exist.

    It is the directory that the user has named, else that of the synthetic tasks.

    Args:
      data: the environment's option `data`; see `named_data`.
    """
    return Path(self.named_data(data) or self.generated_data).absolute()

  def explain_missing(self, directory: Path) -> str:
    """Say how to get real or synthetic tasks; "" if the directory exists.

    Raises:
      ValueError: the directory does not exist, and the engine is not installed.
    """
    if directory.is_dir():
      return ""
    programs = Path(command_of(self)[0]).parent
    return (
      f"{self.name} has no data in {directory}: get real tasks with {programs}/"
      f"{self.download}, or make synthetic ones with python -m tools.make_tasks "
      f"{self.name}, and run the same command again"
    )


def command_of(engine: Engine | None) -> list[str]:
  """Return the command that runs a module of this project in an engine's Python.

  The caller appends the name of the module and the module's arguments.

  Args:
    engine: the engine; None means the Python that runs this process.

  Raises:
    ValueError: the engine is not installed.
  """
  if engine is None:
    return [sys.executable, "-c", RUN_MODULE, ROOT]
  if not engine.is_installed():
    raise ValueError(
      f"the engine of {engine.name} is not installed; "
      f"run: python main.py --stage=setup --config=configs/{engine.name}.py"
    )
  return [str(engine.python), "-I", "-B", "-c", RUN_MODULE, ROOT]


def environ_of(engine: Engine | None) -> dict[str, str]:
  """Select the environment variables of a new process.

  Args:
    engine: the engine of the new process, which gets PASSED_TO_ENGINES only. Without an
      engine (None) the process gets all variables.
  """
  if engine is None:
    return dict(os.environ)
  return {name: os.environ[name] for name in PASSED_TO_ENGINES if name in os.environ}


def confine(engine: Engine | None, data: Path | str, scratch: str) -> list[str]:
  """Return the beginning of a command, which keeps a program from the machine.

  A confined program reads its Python, the data and, with an engine, this package, and
  nothing else. What it writes stays in memory.

  Args:
    engine: the engine whose Python runs the program; None is that of this process.
    data: the file or directory that the program may read.
    scratch: a directory for temporary files.
  """
  prefix = engine.directory if engine else Path(sys.prefix)
  python = engine.python if engine else Path(sys.executable)
  base = prefix
  settings = prefix / "pyvenv.cfg"
  if settings.exists():
    base = Path(re.search("home = (.*)", settings.read_text())[1]).parent
  paths = [*SYSTEM_FILES, prefix, *([Path(ROOT, "baar_jax")] if engine else [])]
  # `base` may be a link to the directory that really has the interpreter.
  for root in (base, python.resolve().parents[1]):
    paths += [root / "bin", root / "lib"]
  command = [*BUBBLEWRAP]
  for path in (*paths, data):
    command += ["--ro-bind-try", str(path), str(path)]
  return [*command, "--tmpfs", scratch, "--setenv", "HOME", scratch]


@functools.cache
def can_confine(engine: Engine | None) -> bool:
  """Return whether bubblewrap works on this machine, for programs of an engine.

  Raises:
    ValueError: the engine is not installed.
  """
  command = [*confine(engine, "/nowhere", "/scratch"), command_of(engine)[0], "-c", ""]
  try:
    done = subprocess.run(command, env=environ_of(engine), capture_output=True)
  except FileNotFoundError:  # bubblewrap is not installed.
    return False
  return done.returncode == 0


def check_walls(engine: Engine | None) -> None:
  """Raise an error if agents' code cannot be confined.

  Raises:
    ValueError: bubblewrap does not work on this machine.
  """
  if not can_confine(engine):
    raise ValueError(
      "agents' code must be confined, and bubblewrap does not work here: install it "
      "(Debian: apt-get install bubblewrap), or run everything in a container, with "
      "--config.env.options.trusted=True (no wall at all)"
    )
