"""The layers: a file imports from lower ones alone, and what must start fast stays without JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "baar_jax"

# A file imports from the layers above its own in this table, and within its layer from the files
# that are named before it.
LAYERS = {
  "records and pure functions": (
    "config sharding episode rewards losses frontier budget qwen2 theme envs.base "
    "llms.prices llms.endpoints"
  ),
  "edges": (
    "agent calls llms.chat llms.scripted envs.sandbox envs.sandbox_optimum "
    "envs.scienceworld_engine "
    "envs.scienceworld_expert envs.scienceworld envs.engines "
    "envs.alfworld_expert envs.alfworld_engine envs.alfworld envs.alfworld_games "
    "envs.appworld_people envs.appworld_made envs.appworld_questions envs.appworld_chores "
    "envs.appworld_joins envs.appworld_data envs.appworld_tasks envs.appworld_prompt "
    "envs.appworld_expert envs.appworld_root envs.appworld envs.worker envs.process "
    "view weights store models checkpoint batches"
  ),
  "loops": "live rollout policies router training run",
  "stages": (
    "setup taxonomy references pretrain sft bopo vanilla thresholds cascade single_turn zero_shot "
    "methods baselines evaluate plan export "
    "bench_figures bench_subject bench_router bench_training bench_latency bench_peer bench"
  ),
  "report": (
    "ledger samples rows contests spending latency learning showcase published results cells "
    "tables budget_tables study_tables frontier_plots plots episode_html sections page report"
  ),
}
ORDER = [name for names in LAYERS.values() for name in names.split()]
HEAVY = {"jax", "flax", "optax", "orbax"}


def module_name(path: Path) -> str:
  return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


FILES = {module_name(path): path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}


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
  found = set()
  for name in imports(path):
    parts = name.split(".")
    if parts[0] == "baar_jax" and len(parts) > 1:
      # The longest prefix that is a file: the rest is a name in it.
      known = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
      found.add(next(inner for inner in known if inner in FILES))
  return found


def reached(start: str) -> set[str]:
  """All files that importing one imports in the end."""
  done, todo = set(), {start}
  while todo:
    name = todo.pop()
    done.add(name)
    todo |= inner_imports(FILES[name]) - done
  return done


def test_every_file_has_its_place():
  assert sorted(ORDER) == sorted(FILES), "name new files in LAYERS, in the lowest layer that works"


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_imports_from_lower_layers_alone(name):
  below = ORDER[: ORDER.index(name)]
  assert inner_imports(FILES[name]) <= set(below)


def test_inits_import_nothing():
  assert {name for path in PACKAGE.rglob("__init__.py") for name in imports(path)} == set()


def test_nothing_imports_the_command_line():
  assert not {"main", "configs"} & {n.split(".")[0] for p in FILES.values() for n in imports(p)}


@pytest.mark.parametrize("name", [name for name in sorted(FILES) if name.startswith("envs.")])
def test_environments_do_without_jax(name):
  """Child processes start with them, in a fraction of a second and a few MB."""
  outer = {n.split(".")[0] for inner in reached(name) for n in imports(FILES[inner])}
  assert not outer & HEAVY


def test_scripted_runs_do_without_the_client_of_api_models():
  code = "import sys, main; print(*sys.modules)"
  result = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  loaded = {name.split(".")[0] for name in result.stdout.split()}
  assert "baar_jax" in loaded and not loaded & {"openai", "httpx", "httpx2", "pydantic"}


def test_the_child_process_starts_without_jax():
  """As Python sees it: also what libraries import."""
  code = "import sys, baar_jax.envs.worker, baar_jax.envs.sandbox; print(*sys.modules)"
  result = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  loaded = {name.split(".")[0] for name in result.stdout.split()}
  assert "baar_jax" in loaded
  assert not loaded & (HEAVY | {"numpy"})
