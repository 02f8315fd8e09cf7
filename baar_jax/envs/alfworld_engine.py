"""ALFWorld's engine: plays one text game at a time and translates each game's PDDL only once."""

import copy
import functools
import hashlib
import os
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

from baar_jax.envs.alfworld_expert import Facts
from baar_jax.envs.base import EnvDied

# Translation takes most of a game's loading time, so its results are kept beside the engine.
TRANSLATIONS = Path(sys.prefix) / "translated"


def cached_on_disk(function: Callable) -> Callable:
  """Returns a function of strings that keeps its results in files of 30 to 60 kB each."""

  def cached(*texts: str, **named: str):
    key = hashlib.sha256(repr((function.__name__, texts, named)).encode()).hexdigest()
    path = TRANSLATIONS / key[:40]
    if path.exists():
      return pickle.loads(zlib.decompress(path.read_bytes()))
    value = function(*texts, **named)
    TRANSLATIONS.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(zlib.compress(pickle.dumps(value), 1))
    os.replace(draft, path)
    return value

  return cached


@functools.cache
def _opener() -> Callable:
  """Imports and patches the engine on first use; returns a function that opens an environment.

  Unpatched, each load and reset translates the game twice, once for the planner (up to a minute and
  a GB), and each command parses the same few templates. Patched, a game is translated once for all
  processes, never for the planner, and a text is parsed once. What a game says stays the same.
  """
  import fast_downward
  import textworld
  from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
  from textworld.envs import PddlEnv
  from textworld.envs.pddl import logic, textgen

  translate = cached_on_disk(fast_downward.pddl2sas)
  fast_downward.pddl2sas = lambda domain, problem, **_: translate(domain, problem)
  logic._parse_and_convert = cached_on_disk(logic._parse_and_convert)
  parse = functools.cache(textgen._parse_and_convert)
  textgen._parse_and_convert = lambda text, rule_name, trace=False: copy.deepcopy(
    parse(text, rule_name=rule_name)  # a copy, because deriving a text writes into its symbols
  )
  # The engine replaces variables and mappings but never changes one, so a shallow copy is enough.
  textgen.copy_context = lambda context: (
    context | {name: dict(context[name]) for name in ("variables", "mapping")}
  )
  rule = textgen.Rule
  rule.parse_conjunctive_query = staticmethod(functools.cache(rule.parse_conjunctive_query))
  infos = textworld.EnvInfos(won=True, admissible_commands=True, facts=True)
  return lambda: AlfredDemangler(PddlEnv(infos), shuffle=False)


class Engine:
  """Plays one game at a time; starting another game replaces it.

  `commands` are all that the game admits now, and it understands no other wording. `facts` are the
  whole state, which only the expert may see.
  """

  def __init__(self) -> None:
    self._env = self._loaded = None

  def start(self, game: Path | dict) -> str:
    """Starts a game, from its file or its contents, and returns the engine's first text.

    Raises EnvDied if the engine cannot play this game; other games of this process can be played.
    """
    if game != self._loaded:
      import mementos.core

      self._env = self._env or _opener()()
      self._loaded = None
      mementos.core._memento_cache.clear()  # the library keeps 1 MB of every game it has seen
      try:
        self._env.load(game)
      except (Exception, SystemExit) as error:  # a damaged game fails in any of several parsers
        self._env = None
        reason = str(error).split("\n")[0] or type(error).__name__
        raise EnvDied(f"the game cannot be played: {reason}") from error
      self._loaded = game
    return self._enter(self._env.reset())

  def step(self, command: str) -> str:
    return self._enter(self._env.step(command)[0])

  def _enter(self, state: dict) -> str:
    self.won, self.commands = bool(state["won"]), sorted(state["admissible_commands"])
    self.facts = Facts(state["facts"])
    return state["feedback"]
