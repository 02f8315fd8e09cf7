"""Every error that a user can see: its message, and the case that produces it.

Each tests/errors_*.py has CASES: rows of a message ("..." is any text), a function that
raises it in an empty directory, and the function's other arguments. Together they pass
every statement of the product that writes an error.
"""

import ast
import functools
import importlib
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
from pydantic import ValidationError

ROOT = Path(__file__).parents[1]
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


def bind(message: str, make: Callable, *arguments: object) -> tuple[str, Callable]:
  """Return a case's message, and the function that raises it in a directory."""
  return message, lambda directory: make(directory, *arguments)


TABLES = [
  importlib.import_module(path.stem)
  for path in sorted(Path(__file__).parent.rglob("errors_*.py"))
]
CASES = [bind(*case) for table in TABLES for case in table.CASES]

FORMS = """
def a(): raise ValueError("wrong")
def b(): require(False, "field", "right")
def c(self): raise self._refuse("wrong")
def d():
  def e(): sys.exit(fail("wrong"))
  return Refusal(400, "wrong")
def f(): raise KeyError("wrong")
def g(): raise
"""


class Site(NamedTuple):
  """A statement that writes an error.

  Attributes:
    function: the innermost function of the statement.
    first: its first line.
    last: its last line.
    is_raised: False if another statement raises, sends or prints the error.
  """

  file: str
  function: str
  first: int
  last: int
  is_raised: bool


def list_calls(node: ast.AST) -> set[str]:
  """List the names of the functions and classes that a piece of code calls."""
  names = set()
  for part in ast.walk(node):
    if isinstance(part, ast.Call):
      names.add(getattr(part.func, "id", getattr(part.func, "attr", "")))
  return names


def find_raised(statement: ast.stmt) -> bool | None:
  """Tell whether a statement raises the error that it writes; None if it writes none.

  A function in lower case, such as `refuse`, may make the error that is raised.
  """
  calls = list_calls(statement)
  if isinstance(statement, ast.Raise):
    maker = getattr(statement.exc, "func", None)
    name = getattr(maker, "id", getattr(maker, "attr", ""))
    return True if name in SEEN or name.islower() else None
  called = getattr(getattr(statement, "value", None), "func", None)
  if getattr(called, "id", "") == "require":
    return True
  if isinstance(statement, ast.Expr | ast.Assign | ast.Return):
    return False if calls & {*SEEN, "fail"} else None
  return None


def list_sites(path: Path) -> list[Site]:
  """List a file's statements that write a seen error."""
  sites = {}
  for function in ast.walk(ast.parse(path.read_text())):
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
      continue
    for node in ast.walk(function):
      is_raised = find_raised(node)
      if is_raised is not None:
        file = str(path.relative_to(ROOT))
        # An inner function comes after the function around it.
        sites[node.lineno] = Site(
          file, function.name, node.lineno, node.end_lineno, is_raised
        )
  return list(sites.values())


class Product(NamedTuple):
  """The result of a case.

  Attributes:
    message: the error's message, with TMP for the directory.
    raised: the lines (file, number) that the error and its causes passed.
    run: the lines that were run.
  """

  message: str
  raised: set[tuple[str, int]]
  run: set[tuple[str, int]]


@functools.cache
def produce(make: Callable[[Path], object]) -> Product:
  """Run a case in an empty directory, and trace the lines of the product."""
  lines = set()
  files = set(map(str, FILES))

  def trace(frame: FrameType, event: str, value: object) -> Callable | None:
    """Record the line of a frame, if it is in a file of the product."""
    if frame.f_code.co_filename not in files:
      return None
    lines.add((frame.f_code.co_filename, frame.f_lineno))
    return trace

  usual = sys.gettrace()
  with tempfile.TemporaryDirectory() as directory:
    threading.settrace(trace)
    sys.settrace(trace)
    try:
      make(Path(directory))
    except Exception as error:
      raised = error
    else:
      pytest.fail("nothing was raised")
    finally:
      sys.settrace(usual)
      threading.settrace(None)
  message = str(raised).replace(directory, "TMP")
  return Product(message, list_lines(raised), lines)


def list_lines(error: BaseException | None) -> set[tuple[str, int]]:
  """List the lines that an error and its causes passed."""
  lines = set()
  while error:
    frames = traceback.extract_tb(error.__traceback__)
    lines |= {(frame.filename, frame.lineno) for frame in frames}
    if isinstance(error, ValidationError):
      for part in error.errors():
        lines |= list_lines(part.get("ctx", {}).get("error"))
    error = error.__cause__ or error.__context__
  return lines


@pytest.mark.parametrize("message, make", CASES)
def test_a_case_produces_its_message(message, make):
  produced = produce(make).message
  pattern = ".*".join(map(re.escape, message.split("...")))
  assert re.fullmatch(pattern, produced), produced
  assert produced.isprintable()


def test_every_error_has_a_case():
  raised = set()
  run = set()
  for _, make in CASES:
    product = produce(make)
    raised |= product.raised
    run |= product.run
  missing = []
  for path in FILES:
    for site in list_sites(path):
      lines = {(str(path), line) for line in range(site.first, site.last + 1)}
      passed = raised if site.is_raised else run
      if not lines & passed:
        missing.append(f"{site.file}:{site.first} {site.function}")
  assert not missing, f"{len(missing)} errors without a case: {missing}"


def test_the_finder_sees_the_errors_of_the_product():
  """A change of the product's form must not hide its errors from the test above."""
  sites = [site for path in FILES for site in list_sites(path)]
  assert sum(site.is_raised for site in sites) > 150


def test_the_finder_sees_errors_that_are_made_and_not_raised(tmp_path, monkeypatch):
  monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
  path = tmp_path / "file.py"
  path.write_text(FORMS)
  functions = {site.function: site.is_raised for site in list_sites(path)}
  assert functions == {"a": True, "b": True, "c": True, "d": False, "e": False}
