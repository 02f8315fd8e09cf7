"""Check the trials and samples of tasks, and the order in which they are rolled out."""

import collections
import itertools

import numpy as np
import pytest

from baar_jax.config import (
  SEEDS,
  Config,
  ProfileConfig,
  ReferencesConfig,
  SamplePlan,
)
from baar_jax.episode import Task
from baar_jax.rollout import jobs
from baar_jax.rollout.jobs import BOUNDARY_KEYS, new_trials
from baar_jax.rollout.specs import FIRST_SEED, Job


def test_only_training_tasks_have_new_trials_and_no_seed_is_shared():
  tasks = [Task("t", "train", "", 9), Task("d", "dev", "", 9)]
  config = Config(profile=ProfileConfig(2, robustness=(1, 3)))
  plan = jobs.list_profile(config, tasks)
  assert [spec.key for spec in plan] == [*BOUNDARY_KEYS]
  for listed in plan.values():
    # Trial 0 of one; before the trials of three are those of one and of two.
    new = [("t", seed) for seed in (5000, 5003, 5004, 5005)]
    expected = [("t", 0), ("t", 1), *new, ("d", 0), ("d", 1)]
    assert [(job.task.id, job.seed) for job in listed] == expected
  rollouts = [Job(tasks[0], "rollout", 2, number).seed for number in (0, 1)]
  assert rollouts == [10_002, 1_010_002]
  # No purpose can have so many trials that it reaches the next one's first seed.
  trials = [k for count in range(1, 45) for k in new_trials(count)]
  assert trials == [*range(990)] and SEEDS > 990
  assert min(np.diff(sorted(FIRST_SEED.values()))) >= SEEDS


@pytest.mark.parametrize("count, size", [(6, 2), (7, 3), (3, 8)])
def test_all_tasks_are_drawn_before_one_repeats(count, size):
  tasks = [Task(f"t{i}", "train", "do it", 9) for i in range(count)]

  def draw(seed):
    batches = itertools.islice(jobs.draw_task_batches(tasks, size, seed), 20)
    return [[task.id for task in batch] for batch in batches]

  drawn = draw(0)
  assert drawn == draw(0) != draw(1)
  seen = collections.Counter()
  for ids in drawn:
    assert len({*ids}) == len(ids) == min(size, count)
    seen.update(ids)
    least = min(seen[task.id] for task in tasks)
    assert max(seen.values()) - least <= 1 + (count % size > 0)


PLANS = (
  SamplePlan("samples", 3, True),
  SamplePlan("steps", 2, True),
  SamplePlan("repeats", 1),
)


def test_hard_tasks_are_sampled_and_training_tasks_explored():
  config = Config(references=ReferencesConfig(samples=3, plans=PLANS))
  splits = {"h1": "train", "h2": "dev", "e1": "train", "e2": "dev", "none": "train"}
  tasks = [Task(id_, split, "", 9) for id_, split in splits.items()]
  is_hard = {"h1": True, "h2": True, "e1": False, "e2": False}
  listed = jobs.list_references(config, tasks, is_hard)
  keys = [(spec.key, [job.key for job in planned]) for spec, planned in listed.items()]
  sampled = [(id_, "reference", k) for id_ in ("h1", "h2") for k in (1, 2, 3)]
  assert keys == [
    ("stratified(samples=3)", sampled),
    # An easy task has the plans of all tasks: 3 + 2 samples.
    (
      "exploration-all(samples=3,steps=2)",
      [("e1", "exploration", k) for k in range(1, 6)],
    ),
    ("exploration(steps=2,repeats=1)", [("h1", "exploration", k) for k in range(1, 4)]),
  ]
  config.references.clone_large = True
  assert jobs.list_references(config, tasks, is_hard) == dict([*listed.items()][2:])
