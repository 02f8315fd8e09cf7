"""AppWorld's expert: follows a gold solution a few statements at a time, and errs on request."""

import ast
import dataclasses
import random
from collections.abc import Callable, Iterator

from baar_jax.envs.base import Oracle

MAX_PLAN = 15  # steps; neighbours are joined beyond it
# What a step does, by how much it matters; the first two are routine.
KINDS = ("read", "declare", "pages", "login", "write", "answer")
ROUTINE = ("read", "declare")
FAILED = "Execution failed"
EARLY = 0.7  # share of wrong writes that declare the task done instead
# Arguments that can be changed so that the call still works and does something else.
NUMBERS = ("amount", "quantity", "rating", "priority", "duration")
TEXTS = ("content", "title", "description", "name", "message", "body", "subject", "label", "tags")
# How often each kind of wasted step is taken: all apps, one app's APIs, one API.
WANDERINGS = (0.2, 0.5, 0.3)

IsWrite = Callable[[str, str], bool]  # whether an app's API changes anything


@dataclasses.dataclass(frozen=True)
class PlanStep:
  """A part of the solution, to be executed at once.

  Attributes:
    apis: (app, API) of all that it calls.
  """

  code: str
  kind: str
  apis: tuple[tuple[str, str], ...]


def make_plan(solution: str, is_write: IsWrite) -> list[PlanStep]:
  """Splits the function `solution` of a gold solution into steps that each call an API.

  What the function's module has beside it comes first; all steps share one namespace.
  """
  module = ast.parse(solution).body
  function = next(node for node in module if getattr(node, "name", "") == "solution")
  beside = [node for node in module if node is not function and not _is_text(node)]
  body = [node for node in function.body if not _is_text(node) and not isinstance(node, ast.Return)]
  plan: list[PlanStep] = []
  waiting: list[ast.stmt] = []
  for node in [*beside, *body]:
    waiting.append(node)
    if _apis(node) and not isinstance(node, ast.FunctionDef):
      plan.append(_step(waiting, is_write))
      waiting = []
  if not plan or ("supervisor", "complete_task") not in plan[-1].apis:
    waiting.append(ast.parse("apis.supervisor.complete_task()").body[0])
    plan.append(_step(waiting, is_write))
  while len(plan) > MAX_PLAN:
    first = min(range(len(plan) - 2), key=lambda i: (_rank(plan[i], plan[i + 1]), i))
    plan[first : first + 2] = [_joined(plan[first], plan[first + 1])]
  return plan


def _is_text(node: ast.stmt) -> bool:
  return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _api(node: ast.AST) -> tuple[str, str] | None:
  """(app, API) if the node is `apis.APP.API`."""
  if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
    root = node.value.value
    if isinstance(root, ast.Name) and root.id == "apis":
      return node.value.attr, node.attr
  return None


def _apis(node: ast.AST) -> list[tuple[str, str]]:
  return [api for part in ast.walk(node) if (api := _api(part))]


def _calls(node: ast.AST) -> Iterator[tuple[ast.Call, tuple[str, str]]]:
  for part in ast.walk(node):
    if isinstance(part, ast.Call) and (api := _api(part.func)):
      yield part, api


def _step(nodes: list[ast.stmt], is_write: IsWrite) -> PlanStep:
  kind = max((_kind(node, is_write) for node in nodes), key=KINDS.index)
  apis = tuple(api for node in nodes for api in _apis(node))
  lines = [ast.unparse(node) for node in nodes]
  assigned = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign)]
  if assigned:
    last = assigned[-1]
    target = last.targets[-1] if isinstance(last, ast.Assign) else last.target
    lines.append(f"print({ast.unparse(target)})")
  return PlanStep("\n".join(lines), kind, apis)


def _kind(node: ast.stmt, is_write: IsWrite) -> str:
  found = {"read"}
  for app, api in _apis(node):
    if (app, api) == ("supervisor", "complete_task"):
      found.add("declare")
    elif api == "login":
      found.add("login")
    elif is_write(app, api):
      found.add("write")
  for call, api in _calls(node):
    if api == ("supervisor", "complete_task") and (call.args or call.keywords):
      found.add("answer")
  if any(_paged(part) for part in ast.walk(node)):
    found.add("pages")
  return max(found, key=KINDS.index)


def _paged(node: ast.AST) -> bool:
  """Whether an API is called with the number of a page, or handed to a loop over pages."""
  if not isinstance(node, ast.Call):
    return False
  if any(keyword.arg == "page_index" for keyword in node.keywords):
    return True
  return isinstance(node.func, ast.Name) and node.func.id.endswith("from_pages")


def _rank(first: PlanStep, second: PlanStep) -> tuple[int, int]:
  """Which neighbours are joined first: those that matter least."""
  kinds = sorted((KINDS.index(first.kind), KINDS.index(second.kind)))
  return kinds[0], kinds[1]


def _joined(first: PlanStep, second: PlanStep) -> PlanStep:
  kind = max(first.kind, second.kind, key=KINDS.index)
  return PlanStep(f"{first.code}\n{second.code}", kind, first.apis + second.apis)


class Expert:
  """Follows a plan during one episode, whatever else is done in between."""

  def __init__(self, plan: list[PlanStep], is_write: IsWrite) -> None:
    self._plan = plan
    self._is_write = is_write
    self._position = 0

  @property
  def _next(self) -> PlanStep:
    return self._plan[min(self._position, len(self._plan) - 1)]

  def oracle(self) -> Oracle:
    step = self._next
    return Oracle(step.code, self._position, step.kind not in ROUTINE, recovering=False)

  def observe(self, code: str, output: str) -> None:
    """Takes note of code that was executed and of what it printed."""
    if code == self._next.code and not output.startswith(FAILED):
      self._position = min(self._position + 1, len(self._plan))

  def mistake(self, kind: str, key: str) -> str:
    """Wrong code in place of the expert's; see Env.mistake."""
    if kind not in ("wrong", "lost", "hasty"):
      raise ValueError(f"unknown kind of mistake {kind!r}; known: wrong, lost, hasty")
    draw = random.Random(key)
    step = self._next
    made = None
    if kind == "wrong":
      made = self._wrong(step, draw)
    elif kind == "hasty":
      made = _hasty(step, draw)
    if made is None or made == step.code:
      made = _lost(step, draw)
    return made

  def _wrong(self, step: PlanStep, draw: random.Random) -> str | None:
    """The step done wrongly; None if it is a routine one."""
    if step.kind == "login":
      return _wrong_password(step, draw)
    if step.kind == "pages":
      return _first_page(step)
    if step.kind == "answer":
      answer = draw.choice((f"answer={draw.randrange(10_000, 99_999)}", ""))
      return f"apis.supervisor.complete_task({answer})"
    if step.kind == "write":
      changed = None if draw.random() < EARLY else self._changed_write(step, draw)
      return changed or "apis.supervisor.complete_task()"
    return None

  def _changed_write(self, step: PlanStep, draw: random.Random) -> str | None:
    """The step with one argument of one write changed; None if it has no such argument."""
    tree = ast.parse(step.code)
    spots = [
      keyword
      for call, api in _calls(tree)
      if self._is_write(*api)
      for keyword in call.keywords
      if keyword.arg in NUMBERS + TEXTS
    ]
    if not spots:
      return None
    spot = draw.choice(spots)
    more = ast.Constant(1 if spot.arg in NUMBERS else "?")
    spot.value = ast.BinOp(spot.value, ast.Add(), more)
    return ast.unparse(tree)


def _wrong_password(step: PlanStep, draw: random.Random) -> str:
  tree = ast.parse(step.code)
  for call, (_, api) in _calls(tree):
    if api == "login":
      for keyword in call.keywords:
        if keyword.arg == "password":
          keyword.value = ast.Constant(f"{draw.choice(('pass', 'secret'))}{draw.randrange(1000)}")
  return ast.unparse(tree)


def _first_page(step: PlanStep) -> str | None:
  """Only the first page, in no variable; None where there is no plain call to be seen."""
  for call, _ in _calls(ast.parse(step.code)):
    for keyword in call.keywords:
      if keyword.arg == "page_index":
        keyword.value = ast.Constant(0)
        return f"print({ast.unparse(call)})"
  return None


def _hasty(step: PlanStep, draw: random.Random) -> str:
  """A call without a token, or with a parameter that there is not: a short error."""
  apps = sorted({app for app, _ in step.apis if app not in ("supervisor", "api_docs")})
  app = draw.choice(apps or ["venmo", "phone", "spotify"])
  if draw.random() < 0.5:
    return f"print(apis.{app}.show_account())"
  return f"print(apis.{app}.login(user='me', secret='{draw.randrange(1000)}'))"


def _lost(step: PlanStep, draw: random.Random) -> str:
  """Documentation, which is long."""
  app, api = draw.choice(step.apis)
  docs = "apis.api_docs"
  return draw.choices(
    (
      f"print({docs}.show_app_descriptions())",
      f"print({docs}.show_api_descriptions(app_name='{app}'))",
      f"print({docs}.show_api_doc(app_name='{app}', api_name='{api}'))",
    ),
    WANDERINGS,
  )[0]
