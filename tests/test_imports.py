"""The rules of the house: layers, two programs, and what starts fast without JAX."""

import ast
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from tiny import ROOT

from baar_jax.config import Config
from baar_jax.learn.batches import Encoder
from baar_jax.run import Run

CORE = ROOT / "baar_jax"
# Folders and files from the lowest layer up. A file imports from lower layers and its own.
LAYERS = [
  "config,episode,mesh",
  "store",
  "envs",
  "llms",
  "rollout",
  "router",
  "learn",
  "paper",
  "conditioned",
  "run",
  "families",
  "report,decide",
  "stages",
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split(",")}
# The two programs and their configurations, with what they never import. Nothing imports
# what only a maintainer or a reader runs.
APART = {
  "baar_jax": {"main", "configs", "baar_serve", "tools", "examples"},
  "configs": {"main", "baar_serve", "tools", "examples"},
  "main": {"baar_serve", "tools", "examples"},
  "baar_serve": {"main", "tools", "examples"},
}
# Words of the endpoint. In the core, only the class Router knows a session.
ENDPOINT = re.compile(r"(?i)\b(serve[dr]?|serving|sessions?|purses?)\b")
# Files that are no text of the house.
UNREAD = (".pyc", ".gz", ".jsonl")
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
# The folders of the methods.
METHODS = tuple(f"baar_jax.{name}." for name in ("learn", "paper", "conditioned"))


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


def imports_of(*paths: Path) -> dict[str, set[str]]:
  """Map the name of each module to what it imports."""
  files = {}
  for path in paths:
    files[".".join(path.relative_to(ROOT).with_suffix("").parts)] = imports(path)
  return files


PACKAGES = [*CORE.rglob("__init__.py")]
ALL = imports_of(ROOT / "main.py", *({*CORE.rglob("*.py")} - {*PACKAGES}))
# The files of the package that each file imports, as modules or for names in them.
INNER = {}
for name, names in ALL.items():
  INNER[name] = (names | {full.rpartition(".")[0] for full in names}) & ALL.keys()
REACHED = {}  # all files that importing one imports
# This raises where imports are a cycle.
for file in graphlib.TopologicalSorter(INNER).static_order():
  REACHED[file] = {file}.union(*(REACHED[inner] for inner in INNER[file]))


def test_files_import_from_lower_layers_and_their_own():
  for name in ALL.keys() - {"main"}:
    package = name.split(".")[1]
    for inner in INNER[name]:
      folder = inner.split(".")[1]
      sibling = folder == package != "stages"  # a stage never imports a stage
      assert sibling or LEVEL[folder] < LEVEL[package], f"{name} imports {inner}"


@pytest.mark.parametrize("program", APART)
def test_the_programs_are_apart(program):
  paths = [ROOT / f"{program}.py", *(ROOT / program).rglob("*.py")]
  for name, names in imports_of(*filter(Path.exists, paths)).items():
    assert not APART[program] & {full.split(".")[0] for full in names}, name


def test_the_core_has_no_word_of_the_endpoint():
  assert ENDPOINT.search("Sessions: each") and ENDPOINT.search("the server.")
  paths = [ROOT / "main.py", *CORE.rglob("*.*"), *(ROOT / "configs").rglob("*.py")]
  for path in paths:
    if path.suffix not in UNREAD and path != CORE / "decide.py":
      assert not ENDPOINT.findall(path.read_text()), path


def test_packages_import_nothing():
  assert set().union(*map(imports, PACKAGES)) == {"importlib"}


def test_environments_do_without_heavy_libraries():
  """Child processes start with them, in a fraction of a second and a few MB."""
  for name in ALL:
    if name.startswith("baar_jax.envs."):
      outer = {full.split(".")[0] for inner in REACHED[name] for full in ALL[inner]}
      assert not outer & HEAVY and "baar_jax.config" not in REACHED[name], name


@pytest.mark.parametrize(
  "modules, unwanted",
  [
    ("baar_jax.envs.process, baar_jax.envs.scienceworld.adapter", HEAVY | {"numpy"}),
    ("main", {"openai", "httpx"}),
  ],
)
def test_what_a_new_python_has_loaded(modules, unwanted):
  """As Python sees it, also what libraries import: of a child process, and of scripted runs, which
  do without the client of API models."""
  code = f"import sys, {modules}; print(*sys.modules)"
  printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
  loaded = {name.split(".")[0] for name in printed.split()}
  assert "baar_jax" in loaded and not loaded & unwanted


# What a run has: its methods and what it keeps.
RUN = {*vars(Run), *re.findall(r"self\.(\w+) = ", inspect.getsource(Run))}


def list_members(type_: type) -> set[str]:
  """List what a protocol asks for; nothing for another class."""
  members = set()
  for base in type_.__mro__:
    if getattr(base, "_is_protocol", False):
      members |= {*vars(base), *base.__annotations__}
  return {name for name in members if not name.startswith("_")}


def test_methods_take_values_and_never_a_run_or_a_store():
  """No file of a method can name a type of the package that a run would fit."""

  class Disguise(typing.Protocol):
    config: Config

    def tasks(self) -> None: ...

  assert list_members(Disguise) == {"config", "tasks"} <= RUN
  protocols = set()
  for name in ALL:
    if name.startswith(METHODS):
      assert "baar_jax.store" not in INNER[name]
      for inner in REACHED[name]:
        for value in vars(importlib.import_module(inner)).values():
          if getattr(value, "_is_protocol", False) and list_members(value):
            protocols.add(value)
  assert Encoder in protocols
  assert not [value for value in protocols if list_members(value) <= RUN]
