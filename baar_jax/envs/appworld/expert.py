"""AppWorld's expert, who runs a gold solution in steps, and models' mistakes."""

import ast
import random
import re
from typing import NamedTuple

API = re.compile(r"\bapis\.(\w+)\.(\w+)")
COMPLETE = ("supervisor", "complete_task")
DECLARE = "apis.supervisor.complete_task()"
ROUTINE = ("read", "declare")  # kinds of steps
EARLY = 0.7  # share of wrong writes that declare the task done instead
# Arguments that can be changed so that the call still works and does something else.
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
# Ways to read documentation, which is long, and how often each is taken.
WANDERINGS = {
  "print(apis.api_docs.show_app_descriptions())": 0.2,
  "print(apis.api_docs.show_api_descriptions(app_name='{app}'))": 0.5,
  "print(apis.api_docs.show_api_doc(app_name='{app}', api_name='{api}'))": 0.3,
}


class PlanStep(NamedTuple):
  code: str  # executed at once
  kind: str
  apis: list[tuple[str, str]]  # the names of an app and of one of its APIs
  writing: list[tuple[str, str]]  # those that change something

  @property
  def critical(self) -> bool:
    return self.kind not in ROUTINE


def make_plan(solution: str, docs: dict[str, dict[str, dict]]) -> list[PlanStep]:
  """Split the function `solution` of a gold solution into steps that each call an API.

  All steps share one namespace; the rest of the solution's module comes first.

  Args:
    solution: Python.
    docs: by app and API.
  """
  module = ast.parse(solution).body
  function = next(node for node in module if getattr(node, "name", "") == "solution")
  module.remove(function)
  plan: list[PlanStep] = []
  waiting: list[ast.stmt] = []
  for node in module + function.body:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_text or isinstance(node, ast.Return):
      continue
    waiting.append(node)
    if API.search(ast.unparse(node)) and not isinstance(node, ast.FunctionDef):
      plan.append(_make_step(waiting, docs))
      waiting = []
  if not plan or COMPLETE not in plan[-1].apis:
    waiting += ast.parse(DECLARE).body
    plan.append(_make_step(waiting, docs))
  return plan


def _make_step(nodes: list[ast.stmt], docs: dict[str, dict[str, dict]]) -> PlanStep:
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
  """Name what a step does: of several things the one that matters most."""
  if COMPLETE in apis and "complete_task()" not in code:
    return "answer"
  if any(api != COMPLETE and api[1] != "login" for api in writing):
    return "write"
  if any(name == "login" for _, name in apis):
    return "login"
  if "page_index=" in code or "from_pages(" in code:
    return "pages"
  return "declare" if COMPLETE in apis else "read"


def make_mistake(step: PlanStep, kind: str, key: str) -> str:
  """Return wrong code in place of a step's; see Env.mistake."""
  draw = random.Random(key)
  code = ""
  if kind == "wrong":
    code = _act_wrongly(step, draw)
  elif kind == "hasty":
    code = _call_wrongly(step, draw)
  if code in ("", step.code):  # reads documentation
    app, api = draw.choice(step.apis)
    (text,) = draw.choices([*WANDERINGS], [*WANDERINGS.values()])
    code = text.format(app=app, api=api)
  return code


def _call_wrongly(step: PlanStep, draw: random.Random) -> str:
  """Write a call without its token, or with a parameter that does not exist."""
  apps = sorted({app for app, _ in step.apis} - {"supervisor", "api_docs"})
  app = draw.choice(apps or ["venmo", "phone", "spotify"])
  if draw.random() >= 0.5:
    return f"print(apis.{app}.login(user='me', secret='{draw.randrange(1000)}'))"
  return f"print(apis.{app}.show_account())"


class Argument(NamedTuple):
  """A named argument of an API's call in a step."""

  call: ast.Call
  api: tuple[str, str]
  node: ast.keyword


def _list_arguments(tree: ast.Module) -> list[Argument]:
  arguments = []
  for call in ast.walk(tree):
    if isinstance(call, ast.Call):
      api = API.fullmatch(ast.unparse(call.func))
      if api:
        arguments += [Argument(call, api.groups(), node) for node in call.keywords]
  return arguments


def _act_wrongly(step: PlanStep, draw: random.Random) -> str:
  """Do the step wrongly; "" if it is a routine one or its call cannot be seen."""
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
  if step.kind == "pages":  # the first page alone, in no variable
    for argument in arguments:
      if argument.node.arg == "page_index":
        argument.node.value = ast.Constant(0)
        return f"print({ast.unparse(argument.call)})"
  if step.kind == "write":
    written = [argument.node for argument in arguments if argument.api in step.writing]
    spots = [node for node in written if node.arg in NUMBERS + TEXTS]
    if draw.random() < EARLY or not spots:
      return DECLARE
    spot = draw.choice(spots)
    added = ast.Constant(1 if spot.arg in NUMBERS else "?")
    spot.value = ast.BinOp(spot.value, ast.Add(), added)
    return ast.unparse(tree)
  return ""
