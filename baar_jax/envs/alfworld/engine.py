"""Patch ALFWorld's engine so that it translates and parses each game only once."""

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

from baar_jax.envs.base import read_or_make

# Most of the time to load a game is spent on the translation of its PDDL. So
# translations are stored in this directory of the engine's Python environment.
TRANSLATIONS = Path(sys.prefix) / "translated"
# The engine evaluates each text between braces in a game's file as Python code. A text
# that does not match NAMES is refused, so that a game cannot execute any other code.
NAME = r"(\w+(\.(name|id|indefinite))?|'[^']*')"
NAMES = re.compile(rf" *{NAME}( (or|\+) {NAME})* *")


def call_once(function: Callable, *texts: str, **named_texts: str) -> Any:
  """Return a function's result, read from disk if the result was computed before.

  A result is stored as a file of 30 to 60 kB in TRANSLATIONS.

  Args:
    function: the function. Its name and the arguments determine the file.
    *texts: positional arguments.
    **named_texts: keyword arguments.
  """
  key = hashlib.sha256(
    repr((function.__name__, texts, named_texts)).encode()
  ).hexdigest()

  def compute() -> bytes:
    """Call the function; return its result, pickled and compressed."""
    return zlib.compress(pickle.dumps(function(*texts, **named_texts)), 1)

  return pickle.loads(zlib.decompress(read_or_make(TRANSLATIONS / key[:40], compute)))


@functools.cache
def import_engine() -> Callable[[], Any]:
  """Import the engine, patch it, and return a function that creates a game.

  Without the patch, each load and reset translates the game twice. The translation for
  the planner takes up to a minute and 1 GB. Each command also parses the same few
  templates of texts again. With the patch, a game is translated once for all processes,
  and never for the planner. Each process parses a template once. The engine's output
  stays the same.
  """
  import fast_downward
  import textworld
  from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
  from textworld.envs import PddlEnv
  from textworld.envs.pddl import logic, textgen

  translate = fast_downward.pddl2sas
  fast_downward.pddl2sas = lambda *texts, **_: call_once(translate, *texts)
  read = logic._parse_and_convert
  logic._parse_and_convert = functools.partial(call_once, read)
  parse = functools.cache(textgen._parse_and_convert)
  evaluate = textgen.EvalSymbol.derive

  def parse_once(text: str, rule_name: str, trace: bool = False) -> Any:
    """Parse a template once; return a copy, because the engine changes the result."""
    return copy.deepcopy(parse(text, rule_name=rule_name))

  def copy_context(context: dict) -> dict:
    """Copy the dicts "variables" and "mapping" of a context, but not their values.

    That is enough, because the engine replaces these values but never changes one.
    """
    copied = {name: dict(context[name]) for name in ("variables", "mapping")}
    return context | copied

  def evaluate_names(symbol: Any, context: dict | None = None) -> list:
    """Evaluate an expression of a game's text if it consists of names only."""
    if not NAMES.fullmatch(symbol.expression):
      raise RuntimeError(f"the text {symbol.expression!r} is not a name")
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
