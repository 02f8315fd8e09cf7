"""Every error that a user can see: its message, and the case that produces it.

Each tests/errors_*.py has CASES: rows of a message ("..." is any text) and a function
that raises it in an empty directory. Together they pass every statement of the product
that writes an error, but for UNSEEN: errors that no user sees, with the reason.
"""

import ast
import functools
import importlib
import re
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from pydantic import ValidationError

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "main.py", *(ROOT / "baar_jax").rglob("*.py")]
# Messages of these reach a user, or a client of the endpoint.
SEEN = {"ValueError", "NotImplementedError", "Refusal", "EnvDied", "CapReached"}
SEEN |= {"OSError", "Error", "WrongResult", "BudgetSpent", "refusal"}
AREAS = sorted(path.stem for path in Path(__file__).parent.glob("errors_*.py"))
TABLES = [importlib.import_module(name) for name in AREAS]
CASES = [case for table in TABLES for case in table.CASES]
UNSEEN = {site for table in TABLES for site in getattr(table, "UNSEEN", {})}


class Site(NamedTuple):
  """A statement that writes an error."""

  file: str
  function: str
  first: int
  last: int


def list_sites(path: Path) -> list[Site]:
  """List a file's statements that raise a seen error, or that call `require`."""
  sites = []
  for function in ast.walk(ast.parse(path.read_text())):
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
      continue
    for node in ast.walk(function):
      call = getattr(node, "exc", None) or getattr(node, "value", None)
      if not isinstance(node, ast.Raise | ast.Expr) or not isinstance(call, ast.Call):
        continue
      name = getattr(call.func, "id", getattr(call.func, "attr", ""))
      if name in (SEEN if isinstance(node, ast.Raise) else {"require"}):
        file = str(path.relative_to(ROOT))
        sites.append(Site(file, function.name, node.lineno, node.end_lineno))
  return sites


@functools.cache
def produce(make: Callable[[Path], object]) -> tuple[str, frozenset[tuple[str, int]]]:
  """Run a case in an empty directory.

  Returns:
    The message, with TMP for the directory, and the lines (file, number) that the error
    and its causes passed.
  """
  with tempfile.TemporaryDirectory() as directory:
    try:
      make(Path(directory))
    except Exception as error:
      raised = error
    else:
      pytest.fail("nothing was raised")
  return str(raised).replace(directory, "TMP"), frozenset(list_lines(raised))


def list_lines(error: BaseException | None) -> set[tuple[str, int]]:
  """List the lines that an error and its causes passed."""
  lines = set()
  while error:
    for frame in traceback.extract_tb(error.__traceback__):
      lines.add((frame.filename, frame.lineno))
    if isinstance(error, ValidationError):
      for part in error.errors():
        lines |= list_lines(part.get("ctx", {}).get("error"))
    error = error.__cause__ or error.__context__
  return lines


@pytest.mark.parametrize("message, make", CASES)
def test_a_case_produces_its_message(message, make):
  said, _ = produce(make)
  pattern = ".*".join(map(re.escape, message.split("...")))
  assert re.fullmatch(pattern, said), said
  assert said.isprintable()


def test_every_error_has_a_case():
  passed = set()
  for _, make in CASES:
    passed |= produce(make)[1]
  missing = []
  for path in FILES:
    for site in list_sites(path):
      lines = {(str(path), line) for line in range(site.first, site.last + 1)}
      if not lines & passed and f"{site.file} {site.function}" not in UNSEEN:
        missing.append(f"{site.file}:{site.first} {site.function}")
  assert not missing, f"{len(missing)} errors without a case: {missing}"
