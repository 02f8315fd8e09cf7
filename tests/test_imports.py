"""The layers: a file imports from lower ones alone, and what must start fast stays without JAX."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "baar_jax"
# Folders and files from the lowest layer up. A file imports from lower layers and its own.
LAYERS = (
  "config episode mesh",
  "checks store",
  "envs",
  "llms",
  "rollout",
  "router",
  "train",
  "run",
)
LAYERS += ("report", "stages")
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
# What child processes and engines of other Pythons do without.
HEAVY = {"jax", "flax", "optax", "orbax", "pydantic", "pandas", "jinja2", "matplotlib", "psutil"}
LONGEST_CHAIN = 9
FILES = {
  ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
  for path in PACKAGE.rglob("*.py")
  if path.name != "__init__.py"
}


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


def inner_imports(path: Path) -> set[str]:
  """The files of the package that a file imports, as named in FILES."""
  inner = set()
  for name in imports(path):
    parts = name.split(".")
    if parts[0] == "baar_jax" and len(parts) > 1:
      prefixes = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
      inner.add(next(prefix for prefix in prefixes if prefix in FILES))
  return inner


@cache
def reached(start: str) -> set[str]:
  """All files that importing one imports in the end."""
  done, todo = set(), {start}
  while todo:
    name = todo.pop()
    done.add(name)
    todo |= inner_imports(FILES[name]) - done
  return done


@cache
def chain(name: str) -> int:
  """How many files the longest chain of imports from this one down has."""
  return 1 + max((chain(inner) for inner in inner_imports(FILES[name])), default=0)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_imports_from_lower_layers_and_its_own(name):
  own = name.split(".")[0]
  for inner in inner_imports(FILES[name]):
    folder = inner.split(".")[0]
    sibling = folder == own != "stages"  # a stage never imports a stage
    assert LEVEL[folder] < LEVEL[own] or (sibling and name != inner), inner
    assert name not in reached(inner), f"{inner} imports {name}"


def test_chains_are_short_and_end_at_the_command_line():
  assert 1 + max(chain(inner) for inner in inner_imports(ROOT / "main.py")) <= LONGEST_CHAIN
  assert {name for path in PACKAGE.rglob("__init__.py") for name in imports(path)} == set()
  assert not {"main", "configs"} & {n.split(".")[0] for p in FILES.values() for n in imports(p)}


@pytest.mark.parametrize("name", [name for name in sorted(FILES) if name.startswith("envs.")])
def test_environments_do_without_heavy_libraries(name):
  """Child processes start with them, in a fraction of a second and a few MB."""
  outer = {n.split(".")[0] for inner in reached(name) for n in imports(FILES[inner])}
  assert not outer & HEAVY
  assert "config" not in reached(name)


@pytest.mark.parametrize(
  "modules, unwanted",
  [
    ("main", {"openai", "httpx", "httpx2"}),  # scripted runs do without the client of API models
    ("baar_jax.envs.worker, baar_jax.envs.sandbox", HEAVY | {"numpy"}),  # a child process
  ],
)
def test_what_a_new_python_has_loaded(modules, unwanted):
  """As Python sees it: also what libraries import."""
  code = f"import sys, {modules}; print(*sys.modules)"
  printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
  loaded = {name.split(".")[0] for name in printed.split()}
  assert "baar_jax" in loaded and not loaded & unwanted
