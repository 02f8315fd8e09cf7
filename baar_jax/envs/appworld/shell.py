"""Execute an agent's code in a process without keys, solutions, databases and scores.

The world of a task is its databases, solution and score. One process, the world's
process, holds them. The engine alone would execute an agent's code in this process.
Here, the world's process forks a second process, the forker, before it reads any
solution. For each episode, the forker forks a third process, the shell, which executes
the code. The shell can send two things to the world's process, through a socket as
JSON: calls of APIs and the text that the code prints.
"""

import contextlib
import ctypes
import ctypes.util
import errno
import json
import os
import resource
import signal
import socket
import struct
import sys
import sysconfig
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO

# The engine has a time limit that stops an agent's code. If the code evades that limit,
# the shell is replaced this number of seconds later.
GRACE_S = 5
# Most bytes that the world's process reads from an episode's code. The engine keeps the
# arguments of all calls in memory.
EPISODE_BYTES = 64 << 20
# Most threads and processes of a shell's user, beyond which a shell starts no thread.
MOST_THREADS = 1000
# File descriptors: CONTROL connects the world's process and the forker, CHANNEL the
# world's process and a shell.
CONTROL, CHANNEL = 200, 201
FAILED = "Execution failed. Traceback:\n"
LOST = "The code ended its process or ran too long, and all variables are lost."
# A shell may read files below these directories, but no others.
READABLE = (sys.prefix, sysconfig.get_path("stdlib"), "/usr/share/zoneinfo")
# A shell must not open a file with any of these flags.
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Names of Python's audit events begin with these texts. Such events are refused in a
# shell.
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
# Numbers of the Linux kernel: an option of prctl, and three system calls of Landlock.
NO_NEW_PRIVILEGES, CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 38, 444, 445, 446
READ_FILE, READ_DIRECTORY = 4, 8  # flags of Landlock's rights
GET_SECCOMP = 21  # an option of prctl
EMPTY_MEMORY = 0x32  # flags of mmap: private, without a file, at a given address
# Flags of clone: the one that starts a thread and no process, and those of namespaces.
NEW_THREAD, NAMESPACES = 0x10000, 0x7E020000
CAPABILITIES = 0x20080522  # the version of capset's arguments
# The system calls that the kernel permits to a shell. None of them reaches another
# process, the network, the machine's administration, or a file's contents or rights
# beyond Landlock's.
PERMITTED_CALLS = """
read readv pread64 write writev pwrite64 lseek close close_range
dup dup2 dup3 stat lstat fstat newfstatat statx access faccessat faccessat2
readlink readlinkat getdents64 getcwd brk mmap munmap mprotect mremap
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait
sigaltstack pause alarm setitimer getitimer restart_syscall futex set_robust_list rseq
set_tid_address arch_prctl membarrier exit exit_group sched_yield
getcpu nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
getrandom getrusage sysinfo uname getpid getppid gettid getuid geteuid getgid getegid
getgroups getpgrp select pselect6 poll ppoll
"""
# Calls that are permitted if the argument of this index has one of these values.
# Commands of fcntl and ioctl: those that copy a file descriptor, or read or set its
# flags, or ask whether it is a terminal. Others can send signals to other processes.
# Advice of madvise: what concerns the shell's own memory. Others can take memory from
# the machine. Processors are those of the shell only, and messages have no flags.
PERMITTED_VALUES = {
  ("fcntl", 1): (0, 1, 2, 3, 4, 1030),
  ("ioctl", 1): (0x5401, 0x541B, 0x5421, 0x5450, 0x5451),
  ("madvise", 2): (0, 1, 2, 3, 4, 8, 14, 15, 16, 17),
  ("sched_getaffinity", 0): (0,),
  ("sendto", 3): (0,),
  ("recvfrom", 3): (0,),
}


class Shell:
  """A handle, in the world's process, of the shell that executes an agent's code."""

  def __init__(self, world: Any) -> None:
    """Fork the forker, the process that later forks a shell for each episode.

    Args:
      world: a world of the engine that was loaded without a solution. The forker drops
        the world's databases and task from its memory.
    """
    self._control, control = socket.socketpair()
    if os.fork() == 0:
      try:
        _fork_shells(world, control)
      finally:
        os._exit(0)

  def start(self, now: datetime) -> None:
    """Start a new shell, in place of an earlier one.

    Args:
      now: the time that the code reads from the clock.
    """
    self._now = now
    self._left_bytes = EPISODE_BYTES
    self._restart()

  def _restart(self) -> None:
    """Start a new shell in the same episode."""
    self._channel, shell_end = socket.socketpair()
    now = self._now.isoformat().encode()
    socket.send_fds(self._control, [now], [shell_end.fileno()])
    shell_end.close()
    self._stream = self._channel.makefile("rwb")

  def execute(self, code: str, timeout_s: float, call: Callable[[dict], object]) -> str:
    """Execute code in the shell and return its output.

    If the shell ends or takes too long, a new shell replaces it.

    Args:
      code: the agent's Python.
      timeout_s: seconds after which the code is stopped.
      call: function that answers an API call of the code. Its argument is a dict with
        the keys "app", "api" and "arguments".
    """
    # The engine freezes Python's clock at the task's time. threading.Timer still uses
    # the real clock.
    end = self._channel.shutdown
    timer = threading.Timer(timeout_s + GRACE_S, end, [socket.SHUT_RDWR])
    timer.start()
    try:
      message = self._ask({"code": code})
      while "output" not in message:
        try:
          answer = {"value": call(message)}
        except Exception as error:  # The shell raises this error in the agent's code.
          answer = {"error": str(error)}
        message = self._ask(answer)
      return str(message["output"]).encode("utf-8", "replace").decode()
    except (OSError, ValueError, TypeError, RecursionError, MemoryError):
      # The shell has ended, or has sent too much, or a line that is not a message.
      self._restart()
      return FAILED + LOST
    finally:
      timer.cancel()

  def _ask(self, message: dict) -> dict:
    """Send a message to the shell and return its answer."""
    line = _ask(self._stream, message, self._left_bytes)
    self._left_bytes -= len(line)
    return json.loads(line)


def landlock_version() -> int:
  """Return the version of Landlock in the kernel; 0 or less if there is none.

  Landlock is a feature of Linux that denies a process the access to files.
  """
  if sys.platform != "linux":
    return 0
  return ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)


def warn_of_walls() -> str:
  """Return a warning if this machine lacks seccomp or Landlock, else ""."""
  lacks = []
  if sys.platform != "linux" or ctypes.CDLL(None).prctl(GET_SECCOMP) < 0:
    lacks.append("seccomp in the kernel")
  if not ctypes.util.find_library("seccomp"):
    lacks.append("the library libseccomp.so.2")
  if landlock_version() <= 0:
    lacks.append("Landlock (Linux 5.13)")
  if not lacks:
    return ""
  return f"{' and '.join(lacks)} missing: agents' code is not confined by the kernel"


def _ask(stream: BinaryIO, message: dict, most_bytes: int = -1) -> bytes:
  """Send a message as a line of JSON and return the line of the answer.

  Args:
    most_bytes: where to cut the line; -1 does not cut it.
  """
  stream.write(json.dumps(message, default=str).encode() + b"\n")
  stream.flush()
  return stream.readline(most_bytes)


def _fork_shells(world: Any, control: socket.socket) -> None:
  """Run the forker: for each new channel, kill the last shell and fork another one.

  Args:
    world: a world without a solution.
    control: the socket from which the forker receives, for each new shell, a channel
      and the world's time. When the world's process ends, so does the forker.
  """
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
  if sys.platform == "linux":
    _leave_shared_files()
  # Opened once: to look for the library starts programs.
  seccomp = _open_seccomp()
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
      _run_shell(world, datetime.fromisoformat(now.decode()), seccomp)
    os.close(channels[0])


def _leave_shared_files() -> None:
  """Put empty memory in the place of all files that this process shares in its memory.

  The engine opens its databases so. The kernel's filters do not see what a process
  writes to such memory, and it reaches the file.

  Raises:
    OSError: the kernel does not replace the memory.
  """
  replace = ctypes.CDLL(None).mmap
  replace.restype = ctypes.c_void_p
  for line in Path("/proc/self/maps").read_text().splitlines():
    span, rights, *_ = line.split()
    if rights[3] == "s":
      first, end = (int(address, 16) for address in span.split("-"))
      place = ctypes.c_void_p(first)
      size = ctypes.c_size_t(end - first)
      if replace(place, size, 0, EMPTY_MEMORY, -1, ctypes.c_long(0)) != first:
        raise OSError("the kernel does not replace shared memory")


def _open_seccomp() -> ModuleType | None:
  """Open the package that filters system calls; None if its library is missing."""
  if not ctypes.util.find_library("seccomp"):
    return None
  import pyseccomp

  return pyseccomp


def _run_shell(world: Any, now: datetime, seccomp: ModuleType | None) -> None:
  """Run the shell: execute each block of code from the channel until it is closed.

  Args:
    world: a world without a solution; its method `execute` runs the code.
    now: the time that the code reads from the clock.
    seccomp: the result of `_open_seccomp`.
  """
  stream = socket.socket(fileno=CHANNEL).makefile("rwb")

  def request(_app_name: str, _api_name: str, **arguments: object) -> object:
    """Call an API in the world's process and return its answer."""
    # The engine's time limit is a signal, which must not interrupt an exchange of
    # messages.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
      call = {"app": _app_name, "api": _api_name, "arguments": arguments}
      answer = json.loads(_ask(stream, call))
    finally:
      signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    if "error" in answer:
      raise Exception(answer["error"])
    return answer["value"]

  world.requester.request = request
  world._unset_datetime()
  world.task = SimpleNamespace(datetime=now)
  world._set_datetime()
  resource.setrlimit(resource.RLIMIT_NPROC, (MOST_THREADS, MOST_THREADS))
  _give_up_rights(seccomp)
  message = json.loads(stream.readline())
  while True:
    try:
      output = world.execute(message["code"])
    except BaseException as error:  # The agent's code may raise any error.
      world.safety_guard.disable()
      output = f"{FAILED}{type(error).__name__}: {error}"
    message = json.loads(_ask(stream, {"output": output}))


def _give_up_rights(seccomp: ModuleType | None) -> None:
  """Give up all rights of this process except reading Python's own files.

  Code may get around Python's audit hook. The kernel's filters hold for all code of the
  process, and cannot be removed.

  Args:
    seccomp: the result of `_open_seccomp`.

  Raises:
    OSError: the kernel does not take the rights away.
  """
  directories = [path for path in READABLE if os.path.isdir(path)]
  header = struct.pack("=Ii", CAPABILITIES, 0)
  if sys.platform == "linux" and ctypes.CDLL(None).capset(header, bytes(24)):
    raise OSError("the kernel refuses to take capabilities away")
  if landlock_version() > 0:
    _give_up_files(directories)
  if seccomp:
    _give_up_calls(seccomp)
  prefixes = tuple(f"{path}/" for path in directories)
  # Code can change this module's constants, but not the hook's own.
  denied, writing = DENIED, WRITING

  def check(event: str, arguments: tuple) -> None:
    """Refuse an audit event, unless it reads a file below the directories.

    Raises:
      PermissionError: the event is refused. The agent reads this message.
    """
    allowed = not event.startswith(denied)
    if event in ("open", "os.listdir", "os.scandir"):
      path = arguments[0]
      writes = event == "open" and arguments[2] & writing
      inside = type(path) is str and path.startswith(prefixes) and ".." not in path
      allowed = type(path) is int or inside and not writes
    if not allowed:
      raise PermissionError(f"{event} is not allowed")

  sys.addaudithook(check)


def _give_up_calls(seccomp: ModuleType) -> None:
  """Make the kernel refuse all system calls but those that Python's own work needs.

  Calls of other architectures are refused, too. The flags of clone3 cannot be filtered,
  so it seems to be missing, and Python's threads start by clone.
  """
  refuse = seccomp.ERRNO(errno.EPERM)
  rules = seccomp.SyscallFilter(refuse)
  rules.set_attr(seccomp.Attr.ACT_BADARCH, refuse)

  def permit(name: str, *conditions: object) -> None:
    """Permit a call; a machine of another kind may lack it."""
    with contextlib.suppress(ValueError, OSError):
      rules.add_rule(seccomp.ALLOW, name, *conditions)

  for name in PERMITTED_CALLS.split():
    permit(name)
  for (name, index), values in PERMITTED_VALUES.items():
    for value in values:
      permit(name, seccomp.Arg(index, seccomp.EQ, value))
  # Before Linux 6.2, Landlock does not refuse to empty a file that may be read.
  for name, index in (("open", 1), ("openat", 2)):
    permit(name, seccomp.Arg(index, seccomp.MASKED_EQ, WRITING, 0))
  for name in ("kill", "tgkill"):
    permit(name, seccomp.Arg(0, seccomp.EQ, os.getpid()))
  mask = NEW_THREAD | NAMESPACES
  permit("clone", seccomp.Arg(0, seccomp.MASKED_EQ, mask, NEW_THREAD))
  # The shell's own limits may be read, and not set.
  permit("prlimit64", seccomp.Arg(0, seccomp.EQ, 0), seccomp.Arg(2, seccomp.EQ, 0))
  rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
  rules.load()


def _give_up_files(directories: list[str]) -> None:
  """Make the kernel refuse new programs, TCP, signals, and most files to this process.

  Args:
    directories: only files below these directories may still be read.

  Raises:
    OSError: the kernel does not accept the restriction.
  """
  kernel = ctypes.CDLL(None)
  rights = _list_rights(landlock_version())
  rules = kernel.syscall(CREATE_RULESET, rights, len(rights), 0)
  for path in directories:
    directory = os.open(path, os.O_PATH)
    rule = struct.pack("=Qi", READ_FILE | READ_DIRECTORY, directory)
    kernel.syscall(ADD_RULE, rules, 1, rule, 0)
    os.close(directory)
  kernel.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
  if kernel.syscall(RESTRICT_SELF, rules, 0):
    raise OSError("the kernel refuses Landlock's restrictions")
  os.close(rules)


def _list_rights(version: int) -> bytes:
  """Pack the bit masks of the rights that a version of Landlock can refuse.

  There is one mask each for files, for TCP (from version 4) and for signals (from
  version 6).
  """
  file_rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
  rights = [file_rights, 3, 3][: 1 + (version >= 4) + (version >= 6)]
  return struct.pack(f"{len(rights)}Q", *rights)
