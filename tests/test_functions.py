"""Test the file of functions: its form, its tests, and that no two are alike."""

import ast
import contextlib
import itertools
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from baar_jax.envs.code.adapter import FUNCTIONS

ROWS = [json.loads(line) for line in FUNCTIONS.read_text("utf-8").splitlines()]
FIELDS = "id split kind level text signature shown hidden reference".split()
# Each operator's neighbour is a wrong one in its place.
OPERATORS = (
  *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.In, ast.NotIn),
  *(ast.Is, ast.IsNot, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.And, ast.Or),
)


def test_the_file_has_its_form_and_sizes():
  assert Counter(row["split"] for row in ROWS) == {"train": 240, "dev": 80, "test": 160}
  assert len({row["id"] for row in ROWS}) == 480
  assert len({row["kind"] for row in ROWS}) == 20
  for row in ROWS:
    assert [*row] == FIELDS
    assert (len(row["shown"]), len(row["hidden"])) == (2, 3)


def change(field: str, value: object) -> object:
  """Return a wrong value of a field of a syntax tree; None if there is none."""
  if field == "ops":
    return [change("op", value[0]), *value[1:]]
  if type(value) in OPERATORS:
    return OPERATORS[OPERATORS.index(type(value)) ^ 1]()
  if field == "test":
    return ast.UnaryOp(ast.Not(), value)
  if type(value) in (int, float):
    return value + 1
  return f"{value}_" if field == "value" and isinstance(value, str) else None


def list_wrong(source: str) -> Iterator[str]:
  """Yield a function's source with one change at a time."""
  tree = ast.parse(source)
  for node in [*ast.walk(tree)]:
    for field, value in [*ast.iter_fields(node)]:
      if wrong := change(field, value):
        setattr(node, field, wrong)
        yield ast.unparse(tree)
        setattr(node, field, value)


def passes(source: str, tests: list[str]) -> bool:
  """Tell whether code passes tests within a second of this process's time."""
  # An alarm may arrive after the last test.
  with contextlib.suppress(Exception, KeyboardInterrupt):
    signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)
    try:
      space = {}
      for text in (source, *tests):
        exec(text, space)
      return True
    finally:
      signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
  return False


def test_tests_accept_the_reference_and_refuse_three_others():
  signal.signal(signal.SIGVTALRM, signal.default_int_handler)
  for row in ROWS:
    tests = row["shown"] + row["hidden"]
    assert passes(row["reference"], tests), row["id"]
    assert not passes(row["signature"] + " return None", tests), row["id"]
    wrong = list_wrong(row["reference"])
    refused = (code for code in wrong if not passes(code, tests))
    assert len([*itertools.islice(refused, 3)]) == 3, row["id"]


def list_words(row: dict) -> list[str]:
  return re.findall("[a-z0-9']+", row["text"].lower())


def list_nodes(row: dict) -> list[str]:
  """List the beginnings and ends of a reference's nodes, without names and values."""
  dumped = ast.dump(ast.parse(row["reference"]))
  return re.findall(r"\w+(?=\()|\)", re.sub(r", ctx=\w+\(\)", "", dumped))


@pytest.mark.parametrize("tell, most", [(list_words, 0.15), (list_nodes, 0.8)])
def test_no_two_functions_are_alike(tell, most):
  """They share at most a part of their runs of five."""
  runs = []
  for row in ROWS:
    items = tell(row)
    runs.append({(*items[i : i + 5],) for i in range(len(items) - 4)})
  for some, other in itertools.combinations(runs, 2):
    assert len(some & other) <= most * len(some | other), some
