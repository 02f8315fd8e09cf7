"""The rules of the house: layers, and what starts fast without JAX."""

import ast
import contextlib
import graphlib
import importlib
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import tiny

from baar_jax.config import Config
from baar_jax.rollout.jobs import Source
from baar_jax.run import Run

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "baar_jax"
# Folders and files from the lowest layer up. A file imports from lower layers and its own.
LAYERS = [
  "config,episode,flags,mesh",
  "store",
  "envs",
  "llms",
  "rollout",
  "router",
  "learn",
  "paper",
  "conditioned",
  "rivals",
  "open",
  "run",
  "report,decide",
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
}
LONGEST_CHAIN = 11
# The folders of the methods.
METHODS = tuple(
  f"baar_jax.{name}." for name in ("learn", "paper", "conditioned", "rivals")
)


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


def test_methods_take_values_and_never_a_run_or_a_store(run):
  """Every type of the package that a file of a method can name is in what it imports."""
  types = set()
  for name in ALL:
    if name.startswith(METHODS):
      for inner in REACHED[name]:
        values = vars(importlib.import_module(inner)).values()
        types |= {value for value in values if isinstance(value, type)}
  assert Source in types and Run not in types
  assert not any("baar_jax.store" in INNER[n] for n in ALL if n.startswith(METHODS))
  own = [type_ for type_ in types if type_.__module__.startswith("baar_jax.")]
  assert not [type_ for type_ in own if is_run(type_, run)]


def test_a_run_in_disguise_is_found(run):
  class Runner(typing.Protocol):
    config: Config

    def tasks(self) -> None: ...

  class Other(Runner, typing.Protocol):
    def fly(self) -> None: ...

  assert [is_run(type_, run) for type_ in (Run, Runner, Other)] == [True, True, False]
