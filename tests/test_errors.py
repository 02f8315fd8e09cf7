"""Every error that a user can see: its message, and the case that produces it.

Each tests/errors_*.py has CASES: rows of a message ("..." is any text), a function that
raises it in an empty directory, and the function's other arguments. Together they pass
every statement of the product that writes an error, except in the functions of
ELSEWHERE.
"""

import ast
import functools
import importlib
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
from tiny import ROOT

FILES = [ROOT / "main.py"]
for folder in ("baar_jax", "baar_serve"):
  FILES += (ROOT / folder).rglob("*.py")
# Messages of these reach a user, or a client of the endpoint.
SEEN = {
  "ValueError",
  "NotImplementedError",
  "Refusal",
  "EnvDied",
  "CapReached",
  "OSError",
  "FileNotFoundError",
  "Error",
  "WrongResult",
  "BudgetSpent",
  "NoAnswer",
  "refusal",
  "UnknownItem",
  "ImpossibleUsage",
}
# Functions (file.function) whose other errors are raised in the tests of their files.
ELSEWHERE = {
  "adapter.oracle",
  "adapter.start",
  "again.begin",
  "again.roll_back",
  "app._check_client",
  "app._find_purse",
  "app.answer",
  "budget._to_fraction",
  "budget.reserve",
  "chat.ask",
  "chat.settle",
  "checkpoint.check_metrics",
  "desk._select",
  "engines.output_of",
  "exchange._make",
  "exchange.score",
  "flags.check_variables",
  "learn.fit",
  "learn.play",
  "learn.play_session",
  "learn.read_tasks",
  "loop._count_failures",
  "process._ask",
  "process._kill",
  "process.call",
  "provider.key",
  "request.read",
  "request.read_body",
  "responses._find",
  "rival.check_answers",
  "routed._prepare",
  "routed._refuse",
  "routed.ask",
  "routed.find_affordable",
  "store.add",
  "store.adopt",
  "store.table",
  "weights.check_directory",
  "weights.read_config",
}


def bind(make: Callable, *arguments: object) -> Callable[[Path], object]:
  """Return a function that runs a case in a directory."""
  return lambda directory: make(directory, *arguments)


CASES = []
for table in sorted(Path(__file__).parent.rglob("errors_*.py")):
  for message, make, *arguments in importlib.import_module(table.stem).CASES:
    CASES.append((message, bind(make, *arguments)))


def name_of(call: ast.AST) -> str:
  """Return the name of the function or class that is called; "" if nothing is."""
  function = getattr(call, "func", None)
  return getattr(function, "id", getattr(function, "attr", ""))


def find_raised(statement: ast.stmt) -> bool | None:
  """Tell whether a statement raises the error that it writes; None if it writes none.

  A function in lower case, such as `refuse`, may make the error that is raised.
  """
  if isinstance(statement, ast.Raise):
    name = name_of(statement.exc)
    return True if name in SEEN or name.islower() else None
  if isinstance(statement, ast.Expr | ast.Assign | ast.Return):
    if getattr(getattr(statement.value, "func", None), "id", "") == "require":
      return True
    calls = set(map(name_of, ast.walk(statement)))
    return False if calls & {*SEEN, "fail"} else None
  return None


def list_statements() -> Iterator[tuple[Path, str, ast.AST]]:
  """Yield the file, the innermost function and each of its statements."""
  for path in FILES:
    owners = {}
    for function in ast.walk(ast.parse(path.read_text())):
      if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        owners |= dict.fromkeys(ast.walk(function), function.name)
    for node, name in owners.items():
      yield path, name, node


class Product(NamedTuple):
  """The result of a case.

  Attributes:
    message: the error's message, with TMP for the directory.
    raised: the lines (file, number) that an exception passed.
    run: the lines that were run.
  """

  message: str
  raised: set[tuple[str, int]]
  run: set[tuple[str, int]]


@functools.cache
def produce(make: Callable[[Path], object]) -> Product:
  """Run a case in an empty directory, and trace the lines of the product."""
  files = set(map(str, FILES))
  raised = set()
  run = set()

  def trace(frame: FrameType, event: str, value: object) -> Callable | None:
    """Record the line of a frame, if it is in a file of the product."""
    if frame.f_code.co_filename not in files:
      return None
    lines = raised if event == "exception" else run
    lines.add((frame.f_code.co_filename, frame.f_lineno))
    return trace

  usual = sys.gettrace()
  with tempfile.TemporaryDirectory() as directory:
    threading.settrace(trace)
    sys.settrace(trace)
    try:
      make(Path(directory))
    except Exception as error:
      message = str(error).replace(directory, "TMP")
      # A RecursionError ends the tracing, so the lines of tracebacks count too.
      while error:
        frames = traceback.extract_tb(error.__traceback__)
        raised |= {(frame.filename, frame.lineno) for frame in frames}
        error = error.__context__
    else:
      pytest.fail("nothing was raised")
    finally:
      sys.settrace(usual)
      threading.settrace(None)
  return Product(message, raised, run)


@pytest.mark.parametrize("message, make", CASES)
def test_a_case_produces_its_message(message, make):
  produced = produce(make).message
  pattern = ".*".join(map(re.escape, message.split("...")))
  assert re.fullmatch(pattern, produced), produced
  assert produced.isprintable() and "sk-secret" not in produced


def test_every_error_has_a_case():
  raised = set()
  run = set()
  for _, make in CASES:
    product = produce(make)
    raised |= product.raised
    run |= product.run
  sites = 0
  missing = set()
  for path, function, node in list_statements():
    is_raised = find_raised(node)
    if is_raised is None:
      continue
    sites += is_raised
    lines = {(str(path), n) for n in range(node.lineno, node.end_lineno + 1)}
    if not lines & (raised if is_raised else run):
      missing.add(f"{path.stem}.{function}")
  assert missing == ELSEWHERE, missing ^ ELSEWHERE
  # A change of the product's form must not hide its errors from this test.
  assert sites > 150
