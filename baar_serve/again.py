"""Train the router of a run again, and serve the new one if it is no worse."""

import copy
import dataclasses
import json
import shutil

from baar_jax.config import ValueConfig
from baar_jax.rollout.jobs import ALWAYS_LARGE
from baar_jax.run import Run
from baar_serve.plan import list_router_specs
from baar_serve.routers import AGAIN, CONFIG, OLDER, exchange_routers
from baar_serve.verdict import compare, find_default


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

  So its sessions have a key of their own. Tasks that always-LARGE or the old router has
  not played become training tasks, so that both routers are judged by the same tests.

  Raises:
    ValueError: no router of the run has played a test.
  """
  played = {task_id for task_id, *_ in run.store.keys(ALWAYS_LARGE.key)}
  played &= {task_id for task_id, *_ in run.store.keys(find_default(run).key)}
  if not any(task.id in played for task in run.store.tasks("test")):
    raise ValueError(f"{run.dir} has no router with a verdict. Leave out --again.")
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


def settle(run: Run, candidate: Run) -> str:
  """Serve a run's new router if it is no worse, else delete it; tell which.

  It is no worse with a higher mean score on the tests, or the same score for no more
  dollars.
  """
  data = compare(run, find_default(candidate), find_default(run))
  is_no_worse = (data.gain.mean, data.other_usd) >= (0, data.usd)
  if is_no_worse:
    exchange_routers(run.dir, AGAIN)
  else:
    shutil.rmtree(candidate.dir)
  verdict = "The new router is served" if is_no_worse else "The old router stays"
  return f"{verdict}. The new one against the old one: {data}."


def roll_back(run: Run) -> None:
  """Serve the router before the newest one; the newest one takes its place.

  Raises:
    ValueError: there is none.
  """
  if not (run.dir / OLDER).exists():
    raise ValueError(f"{run.dir} has no older router. Leave out --rollback.")
  exchange_routers(run.dir, OLDER)
  run.print(f"The older router of {run.dir} is served. --rollback undoes this.")
