"""The environment of examples/sandbox.py."""

from tiny import follow

from examples.sandbox import BROKEN, Sandbox, build


def test_the_expert_opens_every_building_without_a_broken_lock():
  env = Sandbox(train_tasks=40, max_steps=18)
  for task in env.tasks("train"):
    env.reset(task.id)
    follow(env)
    assert env.score() == (BROKEN not in build(task.id).hardness)
