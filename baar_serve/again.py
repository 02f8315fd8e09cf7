"""Train the router of a run again, and serve the new one if it is no worse."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

from baar_jax.config import ValueConfig
from baar_jax.open import VOCABULARY, load_default
from baar_jax.report.table import load_split
from baar_jax.rollout.jobs import ALWAYS_LARGE, BOUNDARIES
from baar_jax.rollout.specs import PolicySpec
from baar_jax.run import Run
from baar_serve.plan import has_router, list_router_specs

# The directories of the new router until the verdict, and of the one before.
AGAIN = "again"
OLDER = "older"
CONFIG = "config.json"
# What belongs to a router in the directory of its run.
FILES = (CONFIG, VOCABULARY, "checkpoints")


def find_candidate(run: Run) -> Run:
  """Return the run with the router that it trains again, or with its only one."""
  path = run.dir / AGAIN / CONFIG
  if not path.exists():
    return run
  return _replace_router(run, ValueConfig(**json.loads(path.read_text())["value"]))


def _replace_router(run: Run, value: ValueConfig) -> Run:
  """Return a run with the same sessions and another router."""
  candidate = copy.copy(run)
  candidate.dir = run.dir / AGAIN
  candidate.config = dataclasses.replace(run.config, value=value)
  return candidate


def begin(run: Run) -> Run:
  """Return the run with a new router, which has one update more.

  So its sessions have a key of their own. Only what always-LARGE has played stays a
  validation task or a test, so that both routers are judged by the same tests.

  Raises:
    ValueError: the run has no router.
  """
  if not has_router(run):
    raise ValueError(f"{run.dir} has no router to train again. Leave out --again.")
  played = {task_id for task_id, _ in run.store.keys(ALWAYS_LARGE.key)}
  for split in ("dev", "test"):
    tasks = run.store.tasks(split)
    new = [task for task in tasks if task.id not in played]
    run.store.put_tasks("train", [*run.store.tasks("train"), *new])
    run.store.put_tasks(split, [task for task in tasks if task not in new])
  candidate = find_candidate(run)
  if candidate is not run:
    return candidate
  value = run.config.value
  while any(run.store.keys(spec.key) for spec in list_router_specs(candidate.config)):
    value = dataclasses.replace(value, updates=value.updates + 1)
    candidate = _replace_router(run, value)
  return candidate


def find_default(run: Run) -> PolicySpec:
  """Return the router's policy with its default cost weight."""
  weight = load_default(run.files())
  specs = list_router_specs(run.config)
  return next(spec for spec in specs if spec.cost_weight == weight)


def settle(run: Run, candidate: Run) -> str:
  """Serve a run's new router if it is no worse, else delete it; tell which.

  It is no worse with a higher mean score on the tests, or the same score for no more
  dollars.
  """
  specs = [*BOUNDARIES, find_default(run), find_default(candidate)]
  means = load_split(run.store, specs, run.config, "test").mean(["score", "cost_usd"])
  *_, old, new = means.itertuples(index=False)
  is_no_worse = (new.score, -new.cost_usd) >= (old.score, -old.cost_usd)
  if is_no_worse:
    shutil.rmtree(run.dir / OLDER, ignore_errors=True)
    exchange_routers(run.dir, candidate.dir)
    candidate.dir.rename(run.dir / OLDER)
  else:
    shutil.rmtree(candidate.dir)
  verdict = "The new router is served" if is_no_worse else "The old router stays"
  return (
    f"{verdict}: scores {new.score:.3f} and before {old.score:.3f}, at "
    f"${new.cost_usd:.6f} and before ${old.cost_usd:.6f} a test."
  )


def roll_back(run: Run) -> None:
  """Serve the router before the newest one; the newest one takes its place.

  Raises:
    ValueError: there is none.
  """
  if not (run.dir / OLDER).exists():
    raise ValueError(f"{run.dir} has no older router. Leave out --rollback.")
  exchange_routers(run.dir, run.dir / OLDER)
  run.print(f"The older router of {run.dir} is served. --rollback undoes this.")


def exchange_routers(first: Path, second: Path) -> None:
  """Let the routers of two directories change places."""
  spare = first / "spare"
  for name in FILES:
    (first / name).rename(spare)
    (second / name).rename(first / name)
    spare.rename(second / name)
