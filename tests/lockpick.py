"""What a stand-in says when it plays the sandbox: it finds out which building it is in."""

import hashlib
import re

from baar_jax.envs.sandbox import PLAIN, Sandbox, build

LARGE = "large"


class Lockpick:
  """Pulls the right lever of the buildings that it knows; SMALL mostly fails at tricky locks."""

  def __init__(self, train_tasks: int, test_tasks: int, max_steps: int):
    self._env = Sandbox(train_tasks, test_tasks, max_steps)
    self._tasks = [task for split in ("train", "test") for task in self._env.tasks(split)]

  def __call__(self, request: dict) -> str:
    said = [message["content"] for message in request["messages"][1:]]
    draw = hashlib.sha256(repr((request["model"], request["seed"], said)).encode()).digest()[0]
    for task in self._tasks:
      place = self._place(task, said)
      if place is not None:
        building = build(task.id)
        hard = building.hardness[place] != PLAIN
        errs = draw < (180 if request["model"] != LARGE and hard else 13)
        return f"Thought: I know this one.\n\nAction: pull {building.levers[place][errs]}"
    return "Thought: I have never been here."

  def _place(self, task, said: list[str]) -> int | None:
    """At which lock of the task one is after this conversation; None if it is of another task."""
    observation = self._env.reset(task.id)
    if said[0] != f"Task: {task.description}\n\n{observation}":
      return None
    for reply, seen in zip(said[1::2], said[2::2]):
      action = re.search(r"Action: (.*)", reply)
      if action and self._env.step(action[1])[0] != seen:
        return None
    return self._env._lock
