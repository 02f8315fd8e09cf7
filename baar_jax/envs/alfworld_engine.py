"""The ALFWorld engine: one text game at a time, without the planner, each game translated once."""

import contextlib
import copy
import functools
import hashlib
import os
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from baar_jax.envs.alfworld_expert import Facts
from baar_jax.envs.base import EnvDied

# Beside the engine itself: what translating a game gives, which takes it most of the time.
KEPT = Path(sys.prefix) / "translated"


@contextlib.contextmanager
def arguments_kept() -> Iterator[None]:
  """The PDDL translator takes its settings from sys.argv, and writes them there."""
  arguments = list(sys.argv)
  try:
    yield
  finally:
    sys.argv = arguments


def kept(function: Callable) -> Callable:
  """A function of strings whose results are kept on disk: 30 to 60 kB a game."""

  def result(*texts: str, **named: str):
    key = hashlib.sha256(repr((function.__name__, texts, named)).encode()).hexdigest()
    path = KEPT / key[:40]
    if path.exists():
      return pickle.loads(zlib.decompress(path.read_bytes()))
    value = function(*texts, **named)
    KEPT.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(zlib.compress(pickle.dumps(value), 1))
    os.replace(draft, path)
    return value

  return result


@functools.cache
def _opener() -> Callable:
  """Imports the engine, on first use, and returns the function that opens an environment.

  As it comes, loading and resetting translate a game twice each, once of it for the planner, which
  takes up to a minute and a GB; and each step parses the same few templates again for every
  command. Here a game is translated once, ever, and not for the planner, and a text is parsed once.
  """
  with arguments_kept():
    import fast_downward
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv
    from textworld.envs.pddl import logic, textgen

  translate = kept(fast_downward.pddl2sas)
  logic._parse_and_convert = kept(logic._parse_and_convert)

  def pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False):
    del verbose, optimize
    with arguments_kept():
      return translate(domain, problem)

  fast_downward.pddl2sas = logic.fast_downward.pddl2sas = pddl2sas

  parse = functools.cache(textgen._parse_and_convert)

  def parse_and_convert(text: str, rule_name: str, trace: bool = False):
    del trace
    return copy.deepcopy(parse(text, rule_name=rule_name))  # deriving writes into the symbols

  textgen._parse_and_convert = parse_and_convert
  # Variables and mappings are looked up and replaced, never changed: a shallow copy is enough.
  textgen.copy_context = lambda context: (
    context | {name: dict(context[name]) for name in ("variables", "mapping")}
  )
  rule = textgen.Rule
  rule.parse_conjunctive_query = staticmethod(functools.cache(rule.parse_conjunctive_query))

  def open_environment():
    wanted = textworld.EnvInfos(won=True, admissible_commands=True, facts=True)
    return AlfredDemangler(PddlEnv(wanted), shuffle=False)

  return open_environment


def _forget() -> None:
  """Drops what the engine's library keeps of every game that it has seen: 1 MB each."""
  import mementos.core

  mementos.core._memento_cache.clear()


class Engine:
  """One game at a time; another one takes its place."""

  def __init__(self) -> None:
    self._env = _opener()()
    self._loaded: Path | dict | None = None
    self._state = None

  def start(self, game: Path | dict) -> str:
    """Starts a game, from its file or its contents, and returns what the engine says first.

    Raises:
      EnvDied: the engine cannot play it, which is no harm to other games of this process.
    """
    if game != self._loaded:
      self._loaded = None
      _forget()
      try:
        self._env.load(game if isinstance(game, dict) else str(game))
      except (Exception, SystemExit) as error:  # a damaged game fails in any of its parsers
        self._env = _opener()()
        what = str(error).split("\n")[0] or type(error).__name__
        name = game if isinstance(game, Path) else "the game"
        raise EnvDied(f"{name} cannot be played: {what}") from error
      self._loaded = game
    self._state = self._env.reset()
    return self._state["feedback"]

  def step(self, command: str) -> str:
    self._state, _, _ = self._env.step(command)
    return self._state["feedback"]

  @property
  def won(self) -> bool:
    return bool(self._state["won"])

  @property
  def commands(self) -> list[str]:
    """What the game admits now; a command must be one of these, letter by letter."""
    return sorted(self._state["admissible_commands"])

  def facts(self) -> Facts:
    """The whole state; privileged."""
    return Facts(self._state["facts"])
