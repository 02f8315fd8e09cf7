"""ALFWorld's PDDL engine, patched so that a game is translated and parsed only once."""

import copy
import functools
import hashlib
import pickle
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baar_jax.envs.base import keep

# Translation takes most of a game's loading time: its results are kept by the engine.
TRANSLATIONS = Path(sys.prefix) / "translated"
# The engine evaluates text in braces as Python: only names are let through.
NAME = r"(\w+(\.(name|id|indefinite))?|'[^']*')"
NAMES = re.compile(rf" *{NAME}( (or|\+) {NAME})* *")


def keep_on_disk(function: Callable, *texts: str, **named: str) -> Any:
  """Return a function's result, which is kept in a file of 30 to 60 kB."""
  key = hashlib.sha256(repr((function.__name__, texts, named)).encode()).hexdigest()

  def make() -> bytes:
    return zlib.compress(pickle.dumps(function(*texts, **named)), 1)

  return pickle.loads(zlib.decompress(keep(TRANSLATIONS / key[:40], make)))


@functools.cache
def import_engine() -> Callable[[], Any]:
  """Import and patch the engine on first use; return what opens an environment.

  Unpatched, each load and reset translates the game twice, once for the planner (up to
  a minute and a GB), and each command parses the same few templates. Patched, a game is
  translated once for all processes, never for the planner, and a text is parsed once.
  The texts of a game stay the same.
  """
  import fast_downward
  import textworld
  from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
  from textworld.envs import PddlEnv
  from textworld.envs.pddl import logic, textgen

  translate = fast_downward.pddl2sas
  fast_downward.pddl2sas = lambda *texts, **_: keep_on_disk(translate, *texts)
  read = logic._parse_and_convert
  logic._parse_and_convert = functools.partial(keep_on_disk, read)
  parse = functools.cache(textgen._parse_and_convert)
  evaluate = textgen.EvalSymbol.derive

  def parse_once(text: str, rule_name: str, trace: bool = False) -> Any:
    # A copy, because deriving a text writes into its symbols.
    return copy.deepcopy(parse(text, rule_name=rule_name))

  def copy_context(context: dict) -> dict:
    # The engine replaces variables and mappings but never changes one.
    copied = {name: dict(context[name]) for name in ("variables", "mapping")}
    return context | copied

  def evaluate_names(symbol: Any, context: dict | None = None) -> list:
    if not NAMES.fullmatch(symbol.expression):
      raise RuntimeError(f"{symbol.expression!r} is no name of a thing")
    return evaluate(symbol, context)

  textgen._parse_and_convert = parse_once
  textgen.copy_context = copy_context
  textgen.EvalSymbol.derive = evaluate_names
  rule = textgen.Rule
  rule.parse_conjunctive_query = staticmethod(
    functools.cache(rule.parse_conjunctive_query)
  )
  infos = textworld.EnvInfos(won=True, admissible_commands=True, facts=True)
  return lambda: AlfredDemangler(PddlEnv(infos), shuffle=False)
