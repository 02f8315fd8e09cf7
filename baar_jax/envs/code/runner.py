"""Run one function's tests in a process of its own, and print what each brought.

The adapter starts this file as a program. It reads a JSON object with `code` and
`tests`, and prints `READY`. Then it prints a JSON text for each test: "" if it passed,
else what went wrong.
"""

import ast
import json
import os
import re
import resource
import sys

READY = '"ready"'  # the first line of the answer
# Limits of each process: seconds of CPU, bytes of memory and of a file, and processes.
# Code that needs more fails (our choice).
LIMITS = {
  resource.RLIMIT_CPU: 2,
  resource.RLIMIT_AS: 1 << 30,
  resource.RLIMIT_FSIZE: 1 << 20,
  resource.RLIMIT_NPROC: 4096,
}
VALUE_CHARS = 160  # A value or a message is cut after this number of characters.


def cut(text: str) -> str:
  """Cut a long text, without addresses and what cannot be written as UTF-8."""
  text = re.sub(" at 0x[0-9a-f]+", "", text.encode(errors="replace").decode())
  return text if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]} ..."


def describe(error: BaseException) -> str:
  """Say which exception was raised, in one line."""
  lines = str(error).splitlines() or [""]
  return cut(f"It raised {type(error).__name__}: {lines[0]}".removesuffix(": "))


def run_test(test: str, space: dict) -> str:
  """Run a test, and say what went wrong; "" if it passed.

  Args:
    test: source text whose last statement is `assert CALL == VALUE`, or another assert.
    space: the names that the code has defined.
  """
  *setup, check = ast.parse(test).body
  exec(compile(ast.Module(setup, []), "<test>", "exec"), space)
  condition = check.test
  is_equation = isinstance(condition, ast.Compare) and len(condition.ops) == 1
  if not is_equation or not isinstance(condition.ops[0], ast.Eq):
    passed = eval(compile(ast.Expression(condition), "<test>", "eval"), space)
    return "" if passed else "It is not true."
  value = eval(compile(ast.Expression(condition.left), "<test>", "eval"), space)
  expected = condition.comparators[0]
  expected = eval(compile(ast.Expression(expected), "<test>", "eval"), space)
  return "" if value == expected else f"It gave {cut(repr(value))}."


def main() -> None:
  """Answer the request on the standard input."""
  request = json.load(sys.stdin)
  # The code may print, so the answers go to a file descriptor of their own.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  for limit, value in LIMITS.items():
    resource.setrlimit(limit, (value, value))
  print(READY, file=answers, flush=True)
  space = {"__name__": "solution"}
  problem = ""
  try:
    exec(compile(request["code"], "<solution>", "exec"), space)
  except BaseException as error:  # The code may raise any error.
    problem = describe(error)
  for test in request["tests"]:
    result = problem
    if not problem:
      try:
        result = run_test(test, space)
      except BaseException as error:
        result = describe(error)
    print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
  main()
