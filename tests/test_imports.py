"""The rules of the house: layers, short files, annotations, and what starts fast without JAX."""

import ast
import contextlib
import graphlib
import importlib
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny

from baar_jax.config import Config
from baar_jax.rollout.loop import Pair
from baar_jax.run import Run
from baar_jax.train.checkpoint import RouterFiles, Training

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "baar_jax"
# Folders and files from the lowest layer up. A file imports from lower layers and its own.
LAYERS = [
  "config,episode,mesh",
  "store",
  "envs",
  "llms",
  "rollout",
  "router",
  "train",
  "run",
  "report,serve",
  "stages",
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split(",")}
# What child processes and engines of other Pythons do without.
HEAVY = {
  "jax",
  "flax",
  "optax",
  "orbax",
  "pydantic",
  "pandas",
  "jinja2",
  "matplotlib",
  "psutil",
}
LONGEST_CHAIN = 9
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
MOST_LINES = 400  # of a file without its docstrings


def imports(path: Path) -> set[str]:
  """Full names of all that a file imports, at its top or within a function."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


PATHS = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"] + [
  ROOT / "main.py"
]
ALL = {
  ".".join(path.relative_to(ROOT).with_suffix("").parts): imports(path)
  for path in PATHS
}
# The files of the package that each file imports, as modules or for names in them.
INNER = {
  name: {
    module
    for full in names
    for module in (full, full.rpartition(".")[0])
    if module in ALL
  }
  for name, names in ALL.items()
}
REACHED, CHAIN = (
  {},
  {},
)  # all files that importing one imports, and the longest chain from it down
for file in graphlib.TopologicalSorter(
  INNER
).static_order():  # it raises where imports are a cycle
  REACHED[file] = {file}.union(*(REACHED[inner] for inner in INNER[file]))
  CHAIN[file] = 1 + max((CHAIN[inner] for inner in INNER[file]), default=0)


def test_files_import_from_lower_layers_and_their_own():
  for name in ALL.keys() - {"main"}:
    package = name.split(".")[1]
    for inner in INNER[name]:
      folder = inner.partition("baar_jax.")[2].split(".")[0]
      sibling = folder == package != "stages"  # a stage never imports a stage
      assert sibling or LEVEL[folder] < LEVEL[package], f"{name} imports {inner}"
    assert not {"main", "configs"} & {full.split(".")[0] for full in ALL[name]}, name


def test_chains_are_short_and_packages_import_nothing():
  assert CHAIN["main"] <= LONGEST_CHAIN
  assert {name for path in PACKAGE.rglob("__init__.py") for name in imports(path)} == {
    "importlib"
  }


def test_environments_do_without_heavy_libraries():
  """Child processes start with them, in a fraction of a second and a few MB."""
  for name in ALL:
    if name.startswith("baar_jax.envs."):
      outer = {full.split(".")[0] for inner in REACHED[name] for full in ALL[inner]}
      assert not outer & HEAVY and "baar_jax.config" not in REACHED[name], name


def test_what_a_new_python_has_loaded():
  """As Python sees it, also what libraries import: of a child process, and of scripted runs, which
  do without the client of API models."""
  child = "baar_jax.envs.process, baar_jax.envs.sandbox.adapter"
  for modules, unwanted in (
    (child, HEAVY | {"numpy"}),
    ("main", {"openai", "httpx", "httpx2"}),
  ):
    code = f"import sys, {modules}; print(*sys.modules)"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    loaded = {name.split(".")[0] for name in printed.split()}
    assert "baar_jax" in loaded and not loaded & unwanted


def lines_of_docstrings(tree: ast.AST) -> int:
  count = 0
  for node in ast.walk(tree):
    if isinstance(node, ast.Module | ast.ClassDef | FUNCTION) and ast.get_docstring(
      node
    ):
      count += node.body[0].end_lineno - node.body[0].lineno + 1
  return count


def test_files_are_short():
  for path in PATHS:
    text = path.read_text()
    lines = len(text.splitlines()) - lines_of_docstrings(ast.parse(text))
    assert lines < MOST_LINES, f"{path}: {lines} lines without docstrings"


def find_lacking(tree: ast.AST) -> list[str]:
  """Name the parameters and returns of a file that have no type."""
  lacking = []
  for node in ast.walk(tree):
    if not isinstance(node, FUNCTION):
      continue
    a = node.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    for parameter in filter(None, given):
      if parameter.annotation is None and parameter.arg not in ("self", "cls"):
        lacking.append(f"{node.name}({parameter.arg})")
    if node.returns is None and node.name != "__init__":
      lacking.append(f"{node.name} ->")
  return lacking


def test_a_lack_of_types_is_found():
  text = "def f(a, b: int, *c, d=1, **e) -> int:\n  def g(): pass\n"
  assert find_lacking(ast.parse(text)) == ["f(a)", "f(d)", "f(c)", "f(e)", "g ->"]


@pytest.mark.parametrize("path", [*PACKAGE.rglob("*.py")], ids=lambda path: path.stem)
def test_every_parameter_and_return_has_a_type(path):
  assert find_lacking(ast.parse(path.read_text())) == []


def list_hinted(module) -> Iterator:
  """Yield the functions, methods and classes of a module, whose hints can be resolved."""
  for value in vars(module).values():
    if getattr(value, "__module__", "") != module.__name__:
      continue
    if inspect.isclass(value):
      yield value
      for part in vars(value).values():
        part = getattr(part, "fget", None) or getattr(part, "func", part)
        if inspect.isfunction(part := inspect.unwrap(part)) and part.__annotations__:
          yield part
    elif inspect.isfunction(value := inspect.unwrap(value)):
      yield value


def list_types(hint) -> Iterator:
  """Yield a type and all that it is made of, such as those of a Callable's parameters."""
  yield hint
  for part in hint if isinstance(hint, list) else typing.get_args(hint):
    yield from list_types(part)


def find_types(module) -> set:
  """Find all types that parameters, returns and fields of a module name."""
  named = set()
  for value in list_hinted(module):
    hints = typing.get_type_hints(
      value, localns={"ArrayTree": object}
    )  # a name of optax's own
    for hint in hints.values():
      named |= {type_ for type_ in list_types(hint) if isinstance(type_, type)}
  return named


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  with contextlib.closing(Run(tiny.config(tmp_path_factory.mktemp("runs")))) as run:
    yield run


def list_members(type_: type) -> set[str]:
  """List what a protocol asks for."""
  names = set()
  for base in type_.__mro__:
    if getattr(base, "_is_protocol", False):
      names |= {*vars(base), *base.__annotations__}
  return {name for name in names if not name.startswith("_")}


def is_run(type_: type, run: Run) -> bool:
  """Tell whether a run may be a value of a type: by its class, or by what it can do."""
  if getattr(type_, "_is_protocol", False):
    members = list_members(type_)
    return bool(members) and all(hasattr(run, name) for name in members)
  return type_ not in (object, typing.Any) and isinstance(run, type_)


def test_training_takes_a_record_and_never_a_run(run):
  types = set()
  for name in ALL:
    if name.startswith("baar_jax.train."):
      new_types = find_types(importlib.import_module(name))
      assert not [type_ for type_ in new_types if is_run(type_, run)], name
      types |= new_types
  assert {Training, RouterFiles} < types  # it looks into what it is to look into


def test_a_run_in_disguise_is_found(run):
  class Runner(typing.Protocol):
    config: Config

    def play(self) -> None: ...

  class Other(Runner, typing.Protocol):
    def fly(self) -> None: ...

  def play(make: Callable[[list[Runner]], int], other: Run | None) -> None: ...

  types = set()
  for hint in typing.get_type_hints(play, localns=locals()).values():
    types |= {type_ for type_ in list_types(hint) if isinstance(type_, type)}
  assert {type_ for type_ in types if is_run(type_, run)} == {Runner, Run}
  assert not any(is_run(type_, run) for type_ in (Training, Other, Pair, str))
