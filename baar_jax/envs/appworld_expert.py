"""AppWorld's expert: follows a gold solution a few statements at a time, and errs on request."""

import ast
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from baar_jax.envs.base import Oracle

Api = tuple[str, str]  # the names of an app and of one of its APIs
ApiDocs = dict[str, dict[str, dict]]  # by these names
API = re.compile(r"\bapis\.(\w+)\.(\w+)")
COMPLETE = ("supervisor", "complete_task")
MAX_PLAN = 15  # steps; neighbours are joined beyond it
# What a step does, by how much it matters; the first two are routine.
KINDS = ("read", "declare", "pages", "login", "write", "answer")
ROUTINE = ("read", "declare")
EARLY = 0.7  # share of wrong writes that declare the task done instead
# Arguments that can be changed so that the call still works and does something else.
NUMBERS = ("amount", "quantity", "rating", "priority", "duration")
TEXTS = ("content", "title", "description", "name", "message", "body", "subject", "label", "tags")
# Ways to read documentation, which is long, and how often each is taken.
WANDERINGS = {
  "print(apis.api_docs.show_app_descriptions())": 0.2,
  "print(apis.api_docs.show_api_descriptions(app_name='{app}'))": 0.5,
  "print(apis.api_docs.show_api_doc(app_name='{app}', api_name='{api}'))": 0.3,
}


class PlanStep(NamedTuple):
  """Code that is executed at once, its kind, and the APIs that it calls."""

  code: str
  kind: str
  apis: list[Api]


def make_plan(solution: str, docs: ApiDocs) -> list[PlanStep]:
  """Splits the function `solution` of a gold solution into steps that each call an API.

  All steps share one namespace; what the solution's module has beside the function comes first.
  """
  module = ast.parse(solution).body
  function = next(node for node in module if getattr(node, "name", "") == "solution")
  module.remove(function)
  plan, waiting = [], []
  for node in module + function.body:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if not is_text and not isinstance(node, ast.Return):
      waiting.append(node)
      if API.search(ast.unparse(node)) and not isinstance(node, ast.FunctionDef):
        plan.append(_step(waiting, docs))
        waiting = []
  if not plan or COMPLETE not in plan[-1].apis:
    waiting += ast.parse("apis.supervisor.complete_task()").body
    plan.append(_step(waiting, docs))
  while len(plan) > MAX_PLAN:
    # The two neighbours that matter least become one step; the last step stays alone.
    pairs = [sorted(KINDS.index(step.kind) for step in pair) for pair in zip(plan, plan[1:-1])]
    first = pairs.index(min(pairs))
    one, two = plan[first : first + 2]
    kind = KINDS[pairs[first][1]]
    plan[first : first + 2] = [PlanStep(f"{one.code}\n{two.code}", kind, one.apis + two.apis)]
  return plan


def _step(nodes: list[ast.stmt], docs: ApiDocs) -> PlanStep:
  code = "\n".join(ast.unparse(node) for node in nodes)
  apis = API.findall(code)
  kinds = {"read"}
  if COMPLETE in apis:
    kinds.add("declare" if "complete_task()" in code else "answer")
  if any(name == "login" for _, name in apis):
    kinds.add("login")
  if any(_writes(api, docs) for api in apis if api != COMPLETE and api[1] != "login"):
    kinds.add("write")
  if "page_index=" in code or "from_pages(" in code:
    kinds.add("pages")
  targets = [node.targets[-1] for node in nodes if isinstance(node, ast.Assign)]
  if targets:
    code += f"\nprint({ast.unparse(targets[-1])})"
  return PlanStep(code, max(kinds, key=KINDS.index), apis)


def _writes(api: Api, docs: ApiDocs) -> bool:
  app, name = api
  return app in docs and name in docs[app] and docs[app][name]["method"] != "GET"


def _arguments(tree: ast.AST) -> Iterator[tuple[ast.Call, Api, ast.keyword]]:
  """Every named argument of a call of an API."""
  for call in ast.walk(tree):
    if isinstance(call, ast.Call) and (match := API.fullmatch(ast.unparse(call.func))):
      for argument in call.keywords:
        yield call, match.groups(), argument


class Expert:
  """Follows a solution during one episode, whatever else is done in between."""

  def __init__(self, solution: str, docs: ApiDocs) -> None:
    self._plan = make_plan(solution, docs)
    self._docs = docs
    self._position = 0

  @property
  def _next(self) -> PlanStep:
    return self._plan[min(self._position, len(self._plan) - 1)]

  def oracle(self) -> Oracle:
    step = self._next
    return Oracle(step.code, self._position, step.kind not in ROUTINE, recovering=False)

  def observe(self, code: str, output: str) -> None:
    """Goes on to the next step if the code was this step's and did not fail."""
    if code == self._next.code and not output.startswith("Execution failed"):
      self._position = min(self._position + 1, len(self._plan))

  def mistake(self, kind: str, key: str) -> str:
    """Wrong code in place of the expert's; see Env.mistake."""
    step, draw = self._next, random.Random(key)
    code = {"wrong": self._wrong, "hasty": _hasty, "lost": _lost}[kind](step, draw)
    return _lost(step, draw) if code in ("", step.code) else code

  def _wrong(self, step: PlanStep, draw: random.Random) -> str:
    """The step done wrongly; "" if it is a routine one or its call cannot be seen."""
    tree = ast.parse(step.code)
    if step.kind == "answer":
      answer = draw.choice((f"answer={draw.randrange(10_000, 99_999)}", ""))
      return f"apis.supervisor.complete_task({answer})"
    if step.kind == "login":
      password = f"{draw.choice(('pass', 'secret'))}{draw.randrange(1000)}"
      for _, (_, name), argument in _arguments(tree):
        if (name, argument.arg) == ("login", "password"):
          argument.value = ast.Constant(password)
      return ast.unparse(tree)
    if step.kind == "pages":  # the first page alone, in no variable
      for call, _, argument in _arguments(tree):
        if argument.arg == "page_index":
          argument.value = ast.Constant(0)
          return f"print({ast.unparse(call)})"
    if step.kind == "write":
      calls = [(api, argument) for _, api, argument in _arguments(tree)]
      spots = [a for api, a in calls if _writes(api, self._docs) and a.arg in NUMBERS + TEXTS]
      if draw.random() < EARLY or not spots:
        return "apis.supervisor.complete_task()"
      spot = draw.choice(spots)
      change = ast.Constant(1 if spot.arg in NUMBERS else "?")
      spot.value = ast.BinOp(spot.value, ast.Add(), change)
      return ast.unparse(tree)
    return ""


def _hasty(step: PlanStep, draw: random.Random) -> str:
  """A call without a token, or with a parameter that does not exist: a short error."""
  apps = sorted({app for app, _ in step.apis if app not in ("supervisor", "api_docs")})
  app = draw.choice(apps or ["venmo", "phone", "spotify"])
  if draw.random() < 0.5:
    return f"print(apis.{app}.show_account())"
  return f"print(apis.{app}.login(user='me', secret='{draw.randrange(1000)}'))"


def _lost(step: PlanStep, draw: random.Random) -> str:
  app, api = draw.choice(step.apis)
  (code,) = draw.choices(list(WANDERINGS), list(WANDERINGS.values()))
  return code.format(app=app, api=api)
