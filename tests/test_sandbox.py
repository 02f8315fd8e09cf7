"""The environment of examples/sandbox.py, and its error rates."""

from tiny import follow

from baar_jax.envs.base import Oracle
from examples.sandbox import BROKEN, Sandbox, SandboxErrors, build


def test_the_expert_opens_every_building_without_a_broken_lock():
  env = Sandbox(train_tasks=40, max_steps=18)
  for task in env.tasks("train"):
    env.reset(task.id)
    follow(env)
    assert env.score() == (BROKEN not in build(task.id).hardness)


def test_small_errs_more_at_locks_that_are_not_plain():
  errors = SandboxErrors(2)
  for critical, rate, wrong in ((False, 0.10, 0.05), (True, 0.80, 0.5)):
    oracle = Oracle("", 0, critical, recovering=False)
    assert errors.lapse(0, "t", oracle) == (rate, wrong)
