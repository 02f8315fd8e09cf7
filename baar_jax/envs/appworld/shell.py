"""Executes agents' code in a process without keys, solutions, databases and scores.

The engine would execute it in its own process. Here that process forks another one
before it knows a solution, and the other one forks a shell for each episode. A call of
an API goes through a socket to the engine's process, as JSON, and nothing else leaves
the shell.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import sysconfig
import threading
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace
from typing import Any, BinaryIO

GRACE_S = 5  # the engine's own limit ends code first, unless the code prevents it
MESSAGE_BYTES = 64 << 20  # the longest line of JSON
CONTROL, CHANNEL = 200, 201  # file descriptors in the forked processes
FAILED = "Execution failed. Traceback:\n"
LOST = "The code ended its process or ran too long, and all variables are lost."
READABLE = (sys.prefix, sysconfig.get_path("stdlib"), "/usr/share/zoneinfo")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of Python's audit hooks that a shell may not cause.
DENIED = (
  "ctypes.",
  "fcntl.",
  "gc.",
  "os.",
  "pty.",
  "shutil.",
  "signal.",
  "socket.",
  "sqlite3.",
  "code.__new__",
  "resource.",
  "subprocess.",
  "sys.addaudithook",
  "syslog.",
)
# Linux's numbers of an option of prctl, of Landlock's system calls, and of rights.
NO_NEW_PRIVILEGES, CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 38, 444, 445, 446
READ_FILE, READ_DIRECTORY = 4, 8


class Shell:
  """Executes an agent's code; `start` begins an episode with a new process."""

  def __init__(self, world: Any) -> None:
    """Fork a process that forgets the world's database and task.

    Args:
      world: one that knows no solution.
    """
    self._control, control = socket.socketpair()
    if os.fork() == 0:
      try:
        _fork_shells(world, control)
      finally:
        os._exit(0)

  def start(self, now: datetime) -> None:
    """Replace the shell by a new one, whose clock shows this time."""
    self._now = now
    self._channel, theirs = socket.socketpair()
    socket.send_fds(self._control, [now.isoformat().encode()], [theirs.fileno()])
    theirs.close()
    self._stream = self._channel.makefile("rwb")

  def execute(self, code: str, timeout_s: float, call: Callable[[dict], object]) -> str:
    """Return what the code prints.

    Args:
      code: the agent's Python.
      timeout_s: after which it is stopped.
      call: answers its calls of APIs, {"app", "api", "arguments"}.
    """
    # The world's time is frozen, but threading waits on the real clock.
    end = self._channel.shutdown
    timer = threading.Timer(timeout_s + GRACE_S, end, [socket.SHUT_RDWR])
    timer.start()
    try:
      message = _ask(self._stream, {"code": code})
      while "output" not in message:
        try:
          answer = {"value": call(message)}
        except Exception as error:  # raised again in the shell
          answer = {"error": str(error)}
        message = _ask(self._stream, answer)
      return str(message["output"]).encode("utf-8", "replace").decode()
    except (OSError, ValueError, TypeError, RecursionError):  # gone, or no JSON
      self.start(self._now)
      return FAILED + LOST
    finally:
      timer.cancel()


def landlock_version() -> int:
  """Return the version of the kernel's Landlock; 0 or less if there is none.

  It keeps a process from files.
  """
  if sys.platform != "linux":
    return 0
  return ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)


def warn_of_landlock() -> str:
  """Return what the user has to know if there is no Landlock; "" if there is."""
  if landlock_version() > 0:
    return ""
  return "without Landlock (Linux 5.13) Python alone keeps agents' code from files"


def _ask(stream: BinaryIO, message: dict) -> dict:
  """Send a line of JSON and return the other side's answer."""
  stream.write(json.dumps(message, default=str).encode() + b"\n")
  stream.flush()
  return json.loads(stream.readline(MESSAGE_BYTES))


def _fork_shells(world: Any, control: socket.socket) -> None:
  """Fork a shell for each channel that arrives, and kill the one before."""
  os.dup2(control.fileno(), CONTROL)
  for output in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
  os.closerange(3, CONTROL)
  os.closerange(CHANNEL, 65536)
  from appworld.apps.model_lib import CachedDBHandler

  CachedDBHandler.reset()
  world.models = world.task = None
  del world.shell.user_ns["requester"]
  world._save_state = world.save_logs = lambda *_: None
  control = socket.socket(fileno=CONTROL)
  shell = 0
  while True:
    now, channels, *_ = socket.recv_fds(control, 100, 1)
    if shell:
      os.kill(shell, signal.SIGKILL)
      os.waitpid(shell, 0)
    if not channels:
      return
    shell = os.fork()
    if shell == 0:
      os.dup2(channels[0], CHANNEL)
      os.closerange(3, CHANNEL)
      _run_shell(world, datetime.fromisoformat(now.decode()))
    os.close(channels[0])


def _run_shell(world: Any, now: datetime) -> None:
  """Execute the code that comes through the channel, until that ends."""
  stream = socket.socket(fileno=CHANNEL).makefile("rwb")

  def request(_app_name: str, _api_name: str, **arguments: object) -> object:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # the time limit waits
    try:
      call = {"app": _app_name, "api": _api_name, "arguments": arguments}
      answer = _ask(stream, call)
    finally:
      signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    if "error" in answer:
      raise Exception(answer["error"])
    return answer["value"]

  world.requester.request = request
  world._unset_datetime()
  world.task = SimpleNamespace(datetime=now)
  world._set_datetime()
  _give_up_rights()
  message = json.loads(stream.readline())
  while True:
    try:
      output = world.execute(message["code"])
    except BaseException as error:  # raised by the agent's code, or while it was parsed
      world.safety_guard.disable()
      output = f"{FAILED}{type(error).__name__}: {error}"
    message = _ask(stream, {"output": output})


def _give_up_rights() -> None:
  """Leave this process the right to read Python's own files, and no other."""
  places = [place for place in READABLE if os.path.isdir(place)]
  if landlock_version() > 0:
    _give_up_files(places)
  prefixes = tuple(f"{place}/" for place in places)

  def check(event: str, arguments: tuple) -> None:
    allowed = not event.startswith(DENIED)
    if event in ("open", "os.listdir", "os.scandir"):
      path = arguments[0]
      writes = event == "open" and arguments[2] & WRITING
      inside = type(path) is str and path.startswith(prefixes) and ".." not in path
      allowed = type(path) is int or inside and not writes
    if not allowed:
      raise PermissionError(f"{event} is not allowed")

  sys.addaudithook(check)


def _give_up_files(places: list[str]) -> None:
  """Let the kernel refuse files elsewhere, programs, TCP, and signals to others."""
  kernel = ctypes.CDLL(None)
  rights = _list_rights(landlock_version())
  rules = kernel.syscall(CREATE_RULESET, rights, len(rights), 0)
  for place in places:
    rule = struct.pack("=Qi", READ_FILE | READ_DIRECTORY, os.open(place, os.O_PATH))
    kernel.syscall(ADD_RULE, rules, 1, rule, 0)
  kernel.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
  if kernel.syscall(RESTRICT_SELF, rules, 0):
    raise OSError("the kernel's Landlock could not be used")


def _list_rights(version: int) -> bytes:
  """Pack the rights that a version of Landlock can refuse: files, TCP, signals."""
  file_rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
  rights = [file_rights, 3, 3][: 1 + (version >= 4) + (version >= 6)]
  return struct.pack(f"{len(rights)}Q", *rights)
