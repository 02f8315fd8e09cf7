"""Check the order in which tasks are rolled out, and the keys of what learns."""

import collections
import itertools

import pytest

from baar_jax.config import Config, SamplePlan
from baar_jax.episode import Task
from baar_jax.rollout import jobs


@pytest.mark.parametrize("count, size", [(6, 2), (7, 3), (3, 8)])
def test_all_tasks_are_drawn_before_one_repeats(count, size):
  tasks = [Task(f"t{i}", "train", "do it", 9) for i in range(count)]

  def draw(seed):
    return [*itertools.islice(jobs.draw_task_batches(tasks, size, seed), 20)]

  assert draw(0) == draw(0) != draw(1)
  seen = collections.Counter()
  for batch in draw(0):
    ids = [task.id for task in batch]
    assert len({*ids}) == len(ids) == min(size, count)
    seen.update(ids)
    assert max(seen.values()) - min(seen[t.id] for t in tasks) <= 1 + (count % size > 0)


def test_keys_of_rollouts_and_samples_are_as_stored_before():
  config = Config()
  config.references.samples = 3
  config.references.plans = (
    SamplePlan("samples", 3, True),
    SamplePlan("steps", 2, True),
    SamplePlan("repeats", 1),
  )
  hard, rest = jobs.exploration_specs(config)
  assert hard.key == "exploration(steps=2,repeats=1)"
  assert rest.key == "exploration-all(samples=3,steps=2)"
  assert jobs.stratified_spec(config).key == "stratified(samples=3)"
  assert jobs.rollout_spec("bopo", 0.3, 5).key == "bopo(lam=0.3)/5"
  assert jobs.rollout_spec("bopo", 0.3, 5, 2).key == "bopo(lam=0.3,seed=2)/5"
