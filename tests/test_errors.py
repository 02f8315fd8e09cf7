"""Errors that users can see: each message, and the case that produces it.

Each tests/errors_*.py has CASES: rows of a message ("..." is any text), a function that
raises it in an empty directory, and the function's other arguments.
"""

import importlib
import re
from pathlib import Path

import pytest

CASES = []
for table in sorted(Path(__file__).parent.rglob("errors_*.py")):
  for message, make, *arguments in importlib.import_module(table.stem).CASES:
    CASES.append((message, make, arguments))


@pytest.mark.parametrize("message, make, arguments", CASES)
def test_a_case_produces_its_message(message, make, arguments, tmp_path):
  with pytest.raises(Exception) as raised:
    make(tmp_path, *arguments)
  produced = str(raised.value).replace(str(tmp_path), "TMP")
  pattern = ".*".join(map(re.escape, message.split("...")))
  assert re.fullmatch(pattern, produced), produced
  assert produced.isprintable() and "sk-secret" not in produced
