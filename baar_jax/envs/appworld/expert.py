"""Split a solution of AppWorld into steps, and draw the mistakes of scripted models."""

import ast
import random
import re
from typing import NamedTuple

API = re.compile(r"\bapis\.(\w+)\.(\w+)")
COMPLETE = ("supervisor", "complete_task")
DECLARE = "apis.supervisor.complete_task()"
ROUTINE = ("read", "declare")  # the kinds of routine steps; see PlanStep
# At a step that writes data, this share of wrong actions write nothing, but declare the
# task done.
EARLY = 0.7
# Names of arguments of API calls. If such an argument is changed, the call still
# works but has another effect.
NUMBERS = ("amount", "quantity", "rating", "priority", "duration")
TEXTS = (
  "content",
  "title",
  "description",
  "name",
  "message",
  "body",
  "subject",
  "label",
  "tags",
)
# Code that wastes a step, drawn evenly: it reads documentation, or calls an API without
# a token, or with parameters that do not exist.
WASTED = (
  "print(apis.api_docs.show_app_descriptions())",
  "print(apis.api_docs.show_api_descriptions(app_name='{app}'))",
  "print(apis.api_docs.show_api_doc(app_name='{app}', api_name='{api}'))",
  "print(apis.{app}.{api}())",
  "print(apis.{app}.login(user='me', secret='x'))",
)


class PlanStep(NamedTuple):
  """One step of the expert's plan.

  Attributes:
    code: the block of Python that an agent executes in this step.
    kind: "answer" answers the task's question; "write" changes data; "login" logs in;
      "pages" reads several pages; "declare" declares the task done; "read" reads data.
    apis: the called APIs, as pairs of the app's and the API's name.
    writing: those of `apis` that change data.
  """

  code: str
  kind: str
  apis: list[tuple[str, str]]
  writing: list[tuple[str, str]]

  @property
  def critical(self) -> bool:
    """Return whether a weak model often gets this kind of step wrong."""
    return self.kind not in ROUTINE


def make_plan(solution: str, docs: dict[str, dict[str, dict]]) -> list[PlanStep]:
  """Split a solution into steps that each call at least one API.

  All steps share one namespace. The last step declares the task done.

  Args:
    solution: Python code with a function `solution`. The plan begins with the code
      outside this function.
    docs: the documentation of each API, by the names of app and API.
  """
  module = ast.parse(solution).body
  function = next(node for node in module if getattr(node, "name", "") == "solution")
  module.remove(function)
  plan: list[PlanStep] = []
  statements: list[ast.stmt] = []
  for node in module + function.body:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_text or isinstance(node, ast.Return):
      continue
    statements.append(node)
    if API.search(ast.unparse(node)) and not isinstance(node, ast.FunctionDef):
      plan.append(_make_step(statements, docs))
      statements = []
  if not plan or COMPLETE not in plan[-1].apis:
    statements += ast.parse(DECLARE).body
    plan.append(_make_step(statements, docs))
  return plan


def _make_step(nodes: list[ast.stmt], docs: dict[str, dict[str, dict]]) -> PlanStep:
  """Combine statements into a step that prints the variable assigned last.

  Args:
    nodes: the statements.
    docs: the documentation of each API, by the names of app and API.
  """
  code = "\n".join(map(ast.unparse, nodes))
  apis = API.findall(code)
  writing = []
  for app, api in apis:
    method = docs.get(app, {}).get(api, {}).get("method", "GET")
    if method != "GET":
      writing.append((app, api))
  kind = _find_kind(code, apis, writing)
  targets = [node.targets[-1] for node in nodes if isinstance(node, ast.Assign)]
  if targets:
    code += f"\nprint({ast.unparse(targets[-1])})"
  return PlanStep(code, kind, apis, writing)


def _find_kind(
  code: str, apis: list[tuple[str, str]], writing: list[tuple[str, str]]
) -> str:
  """Find the kind of a step; if several kinds fit, the most critical one counts.

  The order from the most critical is: answer, write, login, pages, declare, read.

  Args:
    code: the step's Python.
    apis: the called APIs.
    writing: those of `apis` that change data.
  """
  if COMPLETE in apis and "complete_task()" not in code:
    return "answer"
  if any(api != COMPLETE and api[1] != "login" for api in writing):
    return "write"
  if any(name == "login" for _, name in apis):
    return "login"
  if "page_index=" in code or "from_pages(" in code:
    return "pages"
  return "declare" if COMPLETE in apis else "read"


def draw_mistake(step: PlanStep, kind: str, key: str) -> str:
  """Draw wrong code that replaces the code of a step.

  Args:
    step: the expert's step.
    kind: "wrong" or "wasted"; see Env.mistake.
    key: the seed of the random draw.
  """
  draw = random.Random(key)
  code = ""
  if kind == "wrong":
    code = _act_wrongly(step, draw)
  if code in ("", step.code):
    # If nothing in the step can be done wrongly, the step is wasted.
    app, api = draw.choice(step.apis)
    code = draw.choice(WASTED).format(app=app, api=api)
  return code


class Argument(NamedTuple):
  """A keyword argument in a call of an API.

  Attributes:
    call: the call.
    api: the names of the app and of the API.
    node: the argument's name and value.
  """

  call: ast.Call
  api: tuple[str, str]
  node: ast.keyword


def _list_arguments(tree: ast.Module) -> list[Argument]:
  """Collect the keyword arguments of all calls of APIs in a step."""
  arguments = []
  for call in ast.walk(tree):
    if isinstance(call, ast.Call):
      api = API.fullmatch(ast.unparse(call.func))
      if api:
        arguments += [Argument(call, api.groups(), node) for node in call.keywords]
  return arguments


def _act_wrongly(step: PlanStep, draw: random.Random) -> str:
  """Write code that does a critical step wrongly.

  Returns:
    The code; "" if the step is routine, or has no argument that can be changed.
  """
  tree = ast.parse(step.code)
  arguments = _list_arguments(tree)
  if step.kind == "answer":
    answer = draw.choice((f"answer={draw.randrange(10_000, 99_999)}", ""))
    return f"apis.supervisor.complete_task({answer})"
  if step.kind == "login":
    password = f"{draw.choice(('pass', 'secret'))}{draw.randrange(1000)}"
    for argument in arguments:
      if argument.api[1] == "login" and argument.node.arg == "password":
        argument.node.value = ast.Constant(password)
    return ast.unparse(tree)
  if step.kind == "pages":
    # The wrong code prints the first page only, and stores nothing in a variable.
    for argument in arguments:
      if argument.node.arg == "page_index":
        argument.node.value = ast.Constant(0)
        return f"print({ast.unparse(argument.call)})"
  if step.kind == "write":
    written = [argument.node for argument in arguments if argument.api in step.writing]
    candidates = [node for node in written if node.arg in NUMBERS + TEXTS]
    if draw.random() < EARLY or not candidates:
      return DECLARE
    node = draw.choice(candidates)
    addition = ast.Constant(1 if node.arg in NUMBERS else "?")
    node.value = ast.BinOp(node.value, ast.Add(), addition)
    return ast.unparse(tree)
  return ""
