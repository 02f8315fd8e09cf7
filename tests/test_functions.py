"""Test the file of functions: its form, its tests, and that no two are alike."""

import ast
import contextlib
import itertools
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator

from baar_jax.envs.code.adapter import FUNCTIONS

ROWS = [json.loads(line) for line in FUNCTIONS.read_text("utf-8").splitlines()]
FIELDS = "id split kind level text signature shown hidden reference"
# Each operator's neighbour is a wrong one in its place.
OPERATORS = [*ast.cmpop.__subclasses__(), ast.And, ast.Or, ast.Add, ast.Sub]
OPERATORS += [ast.Mult, ast.FloorDiv]


def test_the_file_has_its_form_and_sizes():
  assert Counter(row["split"] for row in ROWS) == {"train": 240, "dev": 80, "test": 160}
  for field, count in (("id", 480), ("kind", 20)):
    assert len({row[field] for row in ROWS}) == count
  for row in ROWS:
    assert " ".join(row) == FIELDS
    assert (len(row["shown"]), len(row["hidden"])) == (2, 3)


def change(field: str, value: object) -> object:
  """Return a wrong value of a field of a syntax tree; None if there is none."""
  kind = type(value)
  if kind in OPERATORS:
    return OPERATORS[OPERATORS.index(kind) ^ 1]()
  if field == "test":
    return ast.UnaryOp(ast.Not(), value)
  if field == "ops" and (first := change("op", value[0])):
    return [first, *value[1:]]
  if field == "value" and kind in (int, float, str):
    return value + kind("1")
  return None


def list_wrong(source: str) -> Iterator[str]:
  """Yield a function's source with one change at a time."""
  tree = ast.parse(source)
  for node in ast.walk(tree):
    for field, value in ast.iter_fields(node):
      if wrong := change(field, value):
        setattr(node, field, wrong)
        yield ast.unparse(tree)
        setattr(node, field, value)


def passes(source: str, tests: list[str]) -> bool:
  """Tell whether code passes tests within a second of this process's time."""
  # An alarm may arrive after the last test.
  with contextlib.suppress(Exception, KeyboardInterrupt):
    signal.setitimer(signal.ITIMER_VIRTUAL, 1)
    try:
      space = {}
      for text in (source, *tests):
        exec(text, space)
      return True
    finally:
      signal.setitimer(signal.ITIMER_VIRTUAL, 0)
  return False


def test_tests_accept_the_reference_and_refuse_three_others():
  signal.signal(signal.SIGVTALRM, signal.default_int_handler)
  for row in ROWS:
    tests = row["shown"] + row["hidden"]
    assert passes(row["reference"], tests), row["id"]
    none = row["signature"] + " return None"
    wrong = (none, *list_wrong(row["reference"]))
    refused = (code for code in wrong if not passes(code, tests))
    assert next(refused) == none and [*itertools.islice(refused, 2)][1:], row["id"]


# The words of a text, and a reference without names and values.
WORDS = r"[a-z0-9']+"
NODES = r"\w+(?=\()|\)"


def test_no_two_functions_are_alike():
  """They share at most a part of their runs of five words, or nodes."""
  texts = []
  trees = []
  for row in ROWS:
    tree = ast.dump(ast.parse(row["reference"]))
    texts.append(list_runs(WORDS, row["text"].lower()))
    trees.append(list_runs(NODES, tree))
  for runs, most in ((texts, 0.15), (trees, 0.8)):
    for some, other in itertools.combinations(runs, 2):
      assert len(some & other) <= most * len(some | other), some


def list_runs(pattern: str, text: str) -> set[tuple]:
  found = re.findall(pattern, text)
  return {(*found[i : i + 5],) for i in range(len(found) - 4)}
